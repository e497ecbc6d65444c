"""What a calibration did: the contents of featcal_report.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

REPORT = "featcal_report.json"
"""File name of the report in an output folder."""
RECIPE = "featcal.yaml"
"""File name of the resolved recipe in an output folder."""


@dataclass(frozen=True)
class ModuleReport:
    """What calibration did to one module."""

    name: str
    """Path inside the block."""
    kind: str
    rows: int
    """Rows (tokens) fitted, all tasks together."""
    condition_number: float
    """Of the regularised normal equations, estimated."""
    relative_change: float
    """‖W* − W_merged‖ / ‖W_merged‖."""


@dataclass(frozen=True)
class BlockReport:
    """What calibration did to one block."""

    name: str
    seconds: float
    modules: list[ModuleReport]
    skipped: list[dict[str, str]]
    """name and reason of what stayed as merged."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BlockReport:
        values = json.loads(text)
        return cls(**{**values, "modules": [ModuleReport(**module) for module in values["modules"]]})


@dataclass(frozen=True)
class TaskDrift:
    """Drift of one task at the last block: mean ‖h − h_exp‖ / mean ‖h_exp‖, and mean cosine to the expert's feature."""

    before: float
    """Of the merged model."""
    after: float
    """Of the calibrated model."""
    base: float
    cosine_before: float
    cosine_after: float
    held_out: bool
    """Measured on examples that were not fitted."""


@dataclass(frozen=True)
class Report:
    """A whole run."""

    featcal_version: str
    recipe: dict[str, Any]
    environment: dict[str, str]
    settings: dict[str, Any]
    blocks: list[BlockReport]
    drift: dict[str, TaskDrift]
    cost: dict[str, float]
    notes: list[str] = field(default_factory=list)
    """What was chosen without being told, and what was left alone."""

    def to_json(self) -> str:
        """The text of featcal_report.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def worse(self) -> list[str]:
        """Tasks whose drift grew."""
        return [task for task, drift in self.drift.items() if drift.after > drift.before]
