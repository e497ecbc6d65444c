"""What a calibration did: the contents of featcal_report.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from featcal_cli.calibration.results import SHOWN, BlockReport
from featcal_cli.evaluation.results import TaskScores
from featcal_cli.reporting.inspection import VISIBLE, TaskInspection
from featcal_cli.runtime.progress import tell_change

REPORT, RECIPE, CARD, PICTURE = "featcal_report.json", "featcal.yaml", "README.md", "drift.png"
"""File names in an output folder: report, resolved recipe, model card (in any repo), picture of the drift."""


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
class DriftRow:
    """A line of the table of drift: a task's, or the mean of all."""

    task: str
    before: float
    after: float
    base: float
    is_marked: bool = False
    """Measured on fitted rows, where other tasks are not."""

    @property
    def cells(self) -> list[str]:
        """Before, after, change and base."""
        return [f"{self.before:.3f}", f"{self.after:.3f}", tell_change(self.before, self.after), f"{self.base:.3f}"]


def _add_mean(tasks: Iterable[DriftRow]) -> list[DriftRow]:
    """The rows and, where there are several, their mean, in which all weigh the same."""
    rows = list(tasks)
    means = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("before", "after", "base"))
    return [*rows, DriftRow("mean", *means)] if len(rows) > 1 else rows


@dataclass(frozen=True)
class DriftCurve:
    """Relative drift of one task after every block, in forward order."""

    blocks: list[str]
    before: list[float]
    """Of the merged model."""
    after: list[float]
    """Of the calibrated model."""
    base: list[float]


ITSELF = "the expert itself"
"""The name of a source of examples that the task's expert has written."""


@dataclass(frozen=True)
class Source:
    """A model or a dataset that a run read."""

    role: str
    """merged, base, expert TASK, or data TASK."""
    name: str
    """A Hub id, or the path of what lies on this machine."""
    commit: str | None
    """Of the Hub repo; None for a local path."""
    found_in: str
    """Where the name was read: "the command line", "mergekit_config.yml", …"""
    license: str | None
    """As the source's own card says it, if it does."""


JUDGED = ("merged", "calibrated")
"""The roles of `measures` that are compared."""


@dataclass(frozen=True)
class Report:
    """A whole run."""

    featcal_version: str
    recipe: dict[str, Any]
    environment: dict[str, str]
    settings: dict[str, Any]
    blocks: list[BlockReport]
    drift: dict[str, TaskDrift]
    cost: dict[str, Any]
    """Seconds, bytes, and watt hours where the machine counts them; under torchrun, of memory the most that one process
    took, and `expert_bytes_by_rank`."""
    notes: list[str] = field(default_factory=list)
    """What was chosen without being told, and what was left alone."""
    sources: list[Source] = field(default_factory=list)
    curves: dict[str, DriftCurve] = field(default_factory=dict)
    """By task, drift over depth."""
    measures: dict[str, TaskInspection] = field(default_factory=dict)
    """By task, what inspect-drift measures, of merged, calibrated and base, on the examples of `drift`."""
    accuracy: dict[str, TaskScores] = field(default_factory=dict)
    """By task, of expert, merged and calibrated model, where they were evaluated."""

    def to_dict(self) -> dict[str, Any]:
        """What featcal_report.json holds."""
        return {"headline": self.headline, **asdict(self)}

    def to_json(self) -> str:
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        return text.encode("utf-8", "backslashreplace").decode()  # names in data may hold half characters

    @classmethod
    def from_json(cls, text: str) -> Report:
        return TypeAdapter(cls).validate_python(json.loads(text))

    @property
    def drift_rows(self) -> list[DriftRow]:
        """The table of drift; the last row is the mean, or the only task's."""
        mixed = len(self.fitted_tasks) < len(self.drift)
        return _add_mean(
            DriftRow(task, drift.before, drift.after, drift.base, mixed and not drift.held_out)
            for task, drift in self.drift.items()
        )

    @property
    def answers(self) -> dict[str, tuple[float, float]]:
        """By task, how far answers are from the expert's, ‖z − z_exp‖ over ‖z_exp‖, before and after; empty unless
        errors are measured by that, and all tasks have answers."""
        if self.settings.get("metric") != "output":
            return {}
        outputs = {
            task: tuple(drift.output.relative for role in JUDGED if (drift := measured.models[role]).output)
            for task, measured in self.measures.items()
        }
        known = {task: (pair[0], pair[1]) for task, pair in outputs.items() if len(pair) == len(JUDGED)}
        return known if known.keys() == self.drift.keys() else {}

    @property
    def judged(self) -> dict[str, tuple[float, float]]:
        """By task, what the result is judged by, before and after: the distance of answers, else drift."""
        return self.answers or {task: (drift.before, drift.after) for task, drift in self.drift.items()}

    @property
    def judged_rows(self) -> list[DriftRow]:
        """The table of what the result is judged by; the last row is the mean, or the only task's."""
        if not self.answers:
            return self.drift_rows
        bases = {task: measured.models["base"].output for task, measured in self.measures.items()}
        return _add_mean(
            replace(row, before=before, after=after, base=base.relative if (base := bases[row.task]) else row.base)
            for row, (before, after) in zip(self.drift_rows, self.answers.values(), strict=False)
        )

    @property
    def mean_judged(self) -> tuple[float, float]:
        """Of all tasks, each weighing the same."""
        mean = self.judged_rows[-1]
        return mean.before, mean.after

    @property
    def judged_by(self) -> str:
        """What that is called."""
        return "distance of answers" if self.answers else "drift"

    @property
    def has_grown(self) -> bool:
        """The mean of what the result is judged by grew by what can be seen, or is no number."""
        before, after = self.mean_judged
        return not after < before + VISIBLE

    @property
    def fitted_tasks(self) -> list[str]:
        """Tasks whose drift is measured on the rows that were fitted."""
        return [task for task, drift in self.drift.items() if not drift.held_out]

    @property
    def measured_on(self) -> str:
        """What drift is measured on, in words: "on held-out rows", "on fitted rows", or which task on which."""
        if not self.fitted_tasks:
            return "on held-out rows"
        if len(self.fitted_tasks) == len(self.drift):
            return "on fitted rows"
        names = ", ".join(self.fitted_tasks[:SHOWN]) + (", …" if len(self.fitted_tasks) > SHOWN else "")
        return f"on held-out rows, but on fitted rows for {names}"

    @property
    def headline(self) -> str:
        """What came of it, in a line: what it is judged by, on average, and what that was measured on."""
        before, after = (f"{value:.3f}" for value in self.mean_judged)
        what = f"mean {self.judged_by}"
        if self.settings.get("step") == 0:
            return f"no update helps: these are the merged model's weights, with {what} {before} {self.measured_on}"
        change = f"WARNING: {what} grew" if self.has_grown else f"{what} went"
        return f"{change} from {before} to {after} {self.measured_on}"

    @property
    def worse(self) -> list[str]:
        """Tasks of which what the result is judged by grew by what can be seen, or is no number."""
        return [task for task, (before, after) in self.judged.items() if not after < before + VISIBLE]
