"""What `featcal inspect-drift` measured: the figures of every model on every task, block and module."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
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
    residual: float | None = None
    """mean ‖r‖₂ / mean ‖h_expert‖₂, of p = e_in + r (paper, equation 28): e_in is the drift of the block's input, which
    a skip connection carries on, r what its branches add; None where input and output have different shapes."""
    residual_cosine: float | None = None
    """Mean cosine of r and e_in: below 0 the branches take drift away, above they add to it; None like residual."""


@dataclass(frozen=True)
class BlockDrift:
    """One block, and the modules inside it."""

    name: str
    drift: PlaceDrift
    """Of the block's output."""
    modules: dict[str, PlaceDrift] = field(default_factory=dict)
    """Of the modules' outputs, by their path inside the block."""
    share: float | None = None
    """Of the drift after the last block, what begins here: t, this block's local mismatch as the model's later blocks
    carry it (paper, P m of Proposition 2), is Σ ⟨t, e⟩ / Σ ‖e‖² of it. With `outside` they add up to 1."""
    carried: float | None = None
    """mean ‖t‖₂ / mean ‖h_expert‖₂ after the last block."""


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
    sensitivity_median: float | None = None
    """Of ‖z − z_expert‖₂ / ‖e‖₂, over examples: a lower bound of the head's B (paper, Proposition 3)."""
    sensitivity_max: float | None = None


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
    outside: float | None = None
    """Share of the last drift that what lies outside of blocks brings in, embeddings for example."""
    cosine_percentiles: list[float] = field(default_factory=list)
    """Of the cosine of h and h_expert after the last block, each example's mean: percentiles 0, 5, 10, … 100."""

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
    traced: int = 0
    """Examples that shares are measured on."""


@dataclass(frozen=True)
class Gain:
    """What the other model has more than the first on one task."""

    cosine: float
    """After the last block."""
    result: float
    """Accuracy, or share of predictions that are the expert's: each 0 to 1."""


@dataclass(frozen=True)
class Gains:
    """Nearer features against better results."""

    measure: str
    """accuracy, from the models' own reports, or agreement with the expert."""
    tasks: dict[str, Gain]


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
    gains: Gains | None = None
    """Where two models are compared."""
    schema: int = SCHEMA

    def to_json(self) -> str:
        # null for what is no finite number: JSON has no word for it
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(values, indent=2) + "\n"


def compare_drift(drift: float, other: float, name: str, experts: str = "the experts") -> str:
    """How much nearer or farther than `name` one is in percent; empty where that is no finite number."""
    change = drift / other - 1 if other else nan
    if not isfinite(change):
        return ""
    if abs(change) < VISIBLE:
        return f"as near to {experts} as {name}"
    how = f"farther from {experts}" if change > 0 else f"nearer to {experts}"
    return f"{100 * abs(change):.{1 if abs(change) < 0.1 else 0}f} % {how} than {name}"
