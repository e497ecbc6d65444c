"""What `featcal inspect-drift` measured: the figures of every model on every task, block and module."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
"""Version of the JSON form; it grows when a key changes its meaning or goes away."""
VISIBLE = 5e-4
"""Two relative drifts that differ by less are the same in three digits, and none is called worse."""


@dataclass(frozen=True)
class PlaceDrift:
    """How far one model's features are from the expert's at one place, over all tokens but padding.

    e = h − h_expert; m = what the model's own block does differently on the expert's input (local mismatch);
    p = what its block makes of earlier drift (upstream propagation); e = m + p (paper, Proposition 1).
    """

    distance: float
    """mean ‖e‖₂."""
    relative: float
    """mean ‖e‖₂ / mean ‖h_expert‖₂."""
    cosine: float
    """Mean cosine of h and h_expert."""
    local: float | None = None
    """mean ‖m‖₂ / mean ‖h_expert‖₂; None before the first block."""
    upstream: float | None = None
    """mean ‖p‖₂ / mean ‖h_expert‖₂; None before the first block."""
    amplification: float | None = None
    """‖e‖ of this block / ‖e‖ of the one before, mean norms; None where there is none before, or it is 0."""


@dataclass(frozen=True)
class BlockDrift:
    """One block, and the modules inside it."""

    name: str
    drift: PlaceDrift
    """Of the block's output."""
    modules: dict[str, PlaceDrift] = field(default_factory=dict)
    """Of the modules' outputs, by their path inside the block."""


@dataclass(frozen=True)
class OutputDrift:
    """What the drift does to the expert's own head, run on the model's last features."""

    kind: str
    """logits, or features where the expert has no logits."""
    relative: float
    """mean ‖z − z_expert‖₂ / mean ‖z_expert‖₂."""
    divergence: float | None = None
    """Mean KL(expert ‖ model), nats; None without logits."""
    agreement: float | None = None
    """Share of predictions whose first choice is the expert's, 0 to 1; None without logits."""
    certain: float | None = None
    """Share of predictions that the drift cannot change: the expert's margin exceeds 2 ‖z − z_expert‖∞ (paper,
    equation 44); None without logits."""


@dataclass(frozen=True)
class ModelDrift:
    """One model on one task."""

    stem: PlaceDrift
    """Before the first block."""
    blocks: list[BlockDrift]
    """In forward order, as far as the task's examples reach."""
    output: OutputDrift | None
    task_vector_cosine: float | None
    """Cosine of (expert − base) and (model − base), over the parameters of all blocks; None for the base itself."""

    @property
    def last(self) -> PlaceDrift:
        """After the last block."""
        return self.blocks[-1].drift


@dataclass(frozen=True)
class TaskInspection:
    """One task."""

    examples: int
    models: dict[str, ModelDrift]
    """By role: model, base, and other where a second model is compared."""


@dataclass(frozen=True)
class Inspection:
    """Everything that one run of inspect-drift measured."""

    featcal_version: str
    names: dict[str, str]
    """What each role is, as the user typed it: model, base, other, and expert TASK."""
    tasks: dict[str, TaskInspection]
    notes: list[str]
    recipe: dict[str, Any]
    environment: dict[str, str]
    cost: dict[str, float]
    schema: int = SCHEMA

    def to_json(self) -> str:
        # null for what is no finite number: JSON has no word for it
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(values, indent=2) + "\n"
