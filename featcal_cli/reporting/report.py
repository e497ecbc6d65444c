"""What a run measured: the figures of `featcal inspect-drift`, and the contents of featcal_report.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from math import inf, isfinite, nan
from operator import getitem
from typing import Any

from pydantic import TypeAdapter, ValidationError

from featcal_cli.calibration.results import AdapterReport, BlockReport
from featcal_cli.evaluation.results import TaskScores
from featcal_cli.runtime.progress import tell_change
from featcal_cli.runtime.untrusted_text import list_some, without_tokens, write_json

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
    share: float | None = None
    """Of the drift after the last block, what begins here: t, this block's local mismatch as the model's later blocks
    carry it (paper, P m of Proposition 2), is Σ ⟨t, e⟩ / Σ ‖e‖² of it. With `outside` they add up to 1."""
    carried: float | None = None
    """mean ‖t‖₂ / mean ‖h_expert‖₂ after the last block."""


@dataclass(frozen=True)
class OutputDrift:
    """What the drift does to the expert's own head, run on the model's last features."""

    kind: str
    """logits, or features where the expert has no logits of one choice (none at all, a regression, several labels)."""
    relative: float
    """mean ‖z − z_expert‖ / mean ‖z_expert‖; for logits ‖ ‖² is the variance under q, half the expert's probabilities
    and half even."""
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
    outside: float | None = None
    """Share of the last drift that what lies outside of blocks brings in, embeddings for example."""

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

    @property
    def answers_farther(self) -> float | None:
        """How much farther the answers of `other` are from the expert's than those of `model`, both relative; infinite
        where they are no finite numbers, None where there are not two models with answers."""
        outputs = [self.models[role].output for role in ("model", "other") if role in self.models]
        distances = [output.relative for output in outputs if output is not None]
        if len(distances) < 2 or not isfinite(distances[0]):
            return None
        return distances[1] - distances[0] if isfinite(distances[1]) else inf


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

    @property
    def short_names(self) -> dict[str, str]:
        """`names` to be read: of a commit the first seven digits."""
        return {role: re.sub("(?<=@[0-9a-f]{7})[0-9a-f]{33}$", "", name) for role, name in self.names.items()}

    def to_json(self) -> str:
        return write_json(asdict(self), indent=2) + "\n"


REPORT, RECIPE, CARD, PICTURE = "featcal_report.json", "featcal.yaml", "README.md", "drift.png"
"""File names in an output folder: report, resolved recipe, model card (in any repo), picture of the drift."""


@dataclass(frozen=True)
class TaskDrift:
    """Drift of one task at the last block: mean ‖h − h_exp‖ / mean ‖h_exp‖, and mean cosine to the expert's feature."""

    before: float
    """Of the merged model."""
    after: float
    """Of the calibrated model."""
    base: float | None  # None where the base model lacks tokens of the examples
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
    base: float | None
    is_marked: bool = False
    """Measured on fitted rows, where other tasks are not."""

    @property
    def cells(self) -> list[str]:
        """Before, after, change and, if it is measured, base."""
        base = [] if self.base is None else [f"{self.base:.3f}"]
        return [f"{self.before:.3f}", f"{self.after:.3f}", tell_change(self.before, self.after), *base]


def _add_mean(tasks: Iterable[DriftRow]) -> list[DriftRow]:
    """The rows and, where there are several, their mean, in which all weigh the same."""
    rows = list(tasks)
    before, after = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("before", "after"))
    known = [row.base for row in rows if row.base is not None]
    return [*rows, DriftRow("mean", before, after, sum(known) / len(known) if known else None)] if rows[1:] else rows


@dataclass(frozen=True)
class DriftCurve:
    """Relative drift of one task after every block, in forward order."""

    blocks: list[str]
    before: list[float]
    """Of the merged model."""
    after: list[float]
    """Of the calibrated model."""
    base: list[float]  # empty where the base model is not measured


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
    """Seconds and bytes; under torchrun, of memory the most that one process took, and `expert_bytes_by_rank`."""
    notes: list[str] = field(default_factory=list)
    """What was chosen without being told, and what was left alone."""
    sources: list[Source] = field(default_factory=list)
    curves: dict[str, DriftCurve] = field(default_factory=dict)
    """By task, drift over depth."""
    measures: dict[str, TaskInspection] = field(default_factory=dict)
    """By task, what inspect-drift measures, of merged, calibrated and base, on the examples of `drift`."""
    accuracy: dict[str, TaskScores] = field(default_factory=dict)
    """By task, of expert, merged and calibrated model, where they were evaluated."""
    adapter: AdapterReport | None = None
    """Where one was written."""

    def to_dict(self) -> dict[str, Any]:
        """What featcal_report.json holds."""
        return {"headline": self.headline, **asdict(self)}

    def to_json(self) -> str:
        text = write_json(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        # names in data may hold half characters
        return without_tokens(text.encode("utf-8", "backslashreplace").decode())

    @classmethod
    def from_json(cls, text: str) -> Report:
        values = json.loads(text)
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            for *place, last in (problem["loc"] for problem in error.errors() if problem["input"] is None):
                reduce(getitem, place, values)[last] = nan  # the null of what is no finite number
            return TypeAdapter(cls).validate_python(values)

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
        bases = {task: found.models["base"].output for task, found in self.measures.items() if "base" in found.models}
        return _add_mean(
            replace(row, before=before, after=after, base=base.relative if (base := bases.get(row.task)) else row.base)
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
        return f"on held-out rows, but on fitted rows for {list_some(self.fitted_tasks)}"

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
