"""Schemas of a run's measurements: the results of `featcal inspect-drift`, and the contents of featcal_report.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import reduce
from math import inf, isfinite, nan
from operator import getitem
from typing import Any

from pydantic import TypeAdapter, ValidationError

from featcal_cli.calibration.results import AdapterReport, BlockReport, Refinement
from featcal_cli.evaluation.results import TaskScores, average_nats, common_metric, find_metric, regained_share
from featcal_cli.runtime.progress import tell_apart, tell_change
from featcal_cli.runtime.sanitise import list_some, shorten_commits, without_folders, without_tokens
from featcal_cli.runtime.structured_text import walk, write_json

SCHEMA = 2
"""Version of the JSON format, increased when a key is removed or changes its meaning."""
VISIBLE = 5e-4
"""Smallest difference between two relative drifts that counts; smaller ones do not show in three digits."""


@dataclass(frozen=True)
class PlaceDrift:
    """The distance of one model's features from the expert's at one place, over all tokens but padding: drift e = h −
    h_expert = m + p (paper, Proposition 1), with m what the block itself does and p the effect of earlier drift."""

    distance: float
    """The mean ‖e‖₂."""
    relative: float
    """Relative drift, mean ‖e‖₂ / mean ‖h_expert‖₂."""
    cosine: float
    """Mean cosine of h and h_expert."""
    local: float | None = None
    """Local part, mean ‖m‖₂ / mean ‖h_expert‖₂; None before the first block."""
    upstream: float | None = None
    """Inherited part, mean ‖p‖₂ / mean ‖h_expert‖₂; None before the first block."""


@dataclass(frozen=True)
class BlockDrift:
    name: str
    drift: PlaceDrift
    """Drift of the block's output."""
    share: float | None = None
    """Share of the drift e after the last block that begins in this block, Σ ⟨t, e⟩ / Σ ‖e‖², where t is this block's
    local mismatch as the model's later blocks propagate it (paper, P m of Proposition 2). All shares and `outside` add
    up to 1."""


@dataclass(frozen=True)
class OutputDrift:
    """The effect of drift on outputs: the expert's own head runs on last features of model and expert."""

    kind: str
    """Kind of output: logits, or features where the expert has no logits for a single choice."""
    relative: float
    """Relative distance, mean ‖z − z_expert‖ / mean ‖z_expert‖. For logits, ‖ ‖² is the variance under q, the average
    of the expert's probabilities and the uniform distribution."""
    divergence: float | None = None
    """Mean KL(expert ‖ model), in nats; None without logits."""
    agreement: float | None = None
    """Share of predictions, 0 to 1, whose first choice is the same as the expert's; None without logits."""


@dataclass(frozen=True)
class ModelDrift:
    stem: PlaceDrift
    """Drift before the first block."""
    blocks: list[BlockDrift]
    """Drift at every block that the task's examples reach, in forward order."""
    output: OutputDrift | None
    outside: float | None = None
    """Share of the drift after the last block that begins outside of blocks, in embeddings for example."""

    @property
    def last(self) -> PlaceDrift:
        return self.blocks[-1].drift


@dataclass(frozen=True)
class TaskInspection:
    examples: int
    models: dict[str, ModelDrift]
    """Drift by role: model, base, and other where a second model is compared."""
    traced: int = 0
    """Number of examples on which the blocks' shares of the drift are measured."""

    @property
    def outputs_farther(self) -> float | None:
        """Distance of outputs of `other` minus that of `model`; infinite if only the first is; else None."""
        outputs = [self.models[role].output for role in ("model", "other") if role in self.models]
        distances = [output.relative for output in outputs if output is not None]
        if len(distances) < 2 or not isfinite(distances[0]):
            return None
        return distances[1] - distances[0] if isfinite(distances[1]) else inf


@dataclass(frozen=True)
class Inspection:
    featcal_version: str
    names: dict[str, str]
    """Name of each role as the user typed it: model, base, other, and expert TASK."""
    tasks: dict[str, TaskInspection]
    notes: list[str]
    recipe: dict[str, Any]
    environment: dict[str, str]
    cost: dict[str, float]
    schema: int = SCHEMA
    calibrated: list[str] = field(default_factory=list)
    """Roles of the models that featcal has calibrated before, which pictures draw in one colour."""
    perplexity: dict[str, TaskScores] = field(default_factory=dict)
    """Perplexities of experts and roles by task, on the same examples; empty but for models that write text."""

    @property
    def places(self) -> list[str]:
        """The models and the data on this machine, as paths or names."""
        return [*self.names.values(), *(str(value) for keys, value in walk(self.recipe) if keys[-1] == "path")]

    @property
    def short_names(self) -> dict[str, str]:
        """The `names`, with commits shortened to seven digits, and folders to their own names where these differ."""
        names = {role: shorten_commits(name) for role, name in self.names.items()}
        last = {role: without_folders(name, [name]) for role, name in names.items()}
        times = Counter(last.values())
        return {role: last[role] if times[last[role]] == 1 else name for role, name in names.items()}

    def to_json(self) -> str:
        return write_json(asdict(self), indent=2) + "\n"


REPORT, RECIPE, CARD, PICTURE = "featcal_report.json", "featcal.yaml", "README.md", "drift.png"
"""File names in an output folder: report, resolved recipe, model card (in any repo), picture of the drift."""
MERGED_CARD = "README.merged.md"
"""File name of a copy of the merged model's own card, which an output has if that card is not on the Hub."""


@dataclass(frozen=True)
class TaskDrift:
    """Drift of one task at the last block: mean ‖h − h_exp‖ / mean ‖h_exp‖, and mean cosine to the expert's feature."""

    before: float
    """Drift of the merged model."""
    after: float
    """Drift of the calibrated model."""
    base: float | None  # None where the base model lacks tokens of the examples
    cosine_before: float
    cosine_after: float
    held_out: bool
    """Whether drift is measured on held-out instead of calibration examples."""


@dataclass(frozen=True)
class DriftRow:
    """A row of the table of drift: one task, or the mean over all tasks."""

    task: str
    before: float
    after: float
    base: float | None

    @property
    def cells(self) -> list[str]:
        """The row's cells as text: drift before, drift after, the change and, if measured, the base model's drift."""
        base = [] if self.base is None else [f"{self.base:.3f}"]
        differ = abs(self.after - self.before) >= VISIBLE
        pair = tell_apart(self.before, self.after) if differ else (f"{self.before:.3f}", f"{self.after:.3f}")
        return [*pair, tell_change(self.before, self.after), *base]


def _add_mean(tasks: Iterable[DriftRow]) -> list[DriftRow]:
    """Return the rows and, if there are several, their unweighted mean as the last row."""
    rows = list(tasks)
    before, after = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("before", "after"))
    known = [row.base for row in rows if row.base is not None]
    return [*rows, DriftRow("mean", before, after, sum(known) / len(known) if known else None)] if rows[1:] else rows


ITSELF = "the expert itself"
"""Name of the source for examples that the task's expert has written itself."""


@dataclass(frozen=True)
class Source:
    role: str
    """The role: merged, base, expert TASK, or data TASK."""
    name: str
    """A Hub id, or a path on this machine."""
    commit: str | None
    """Commit of the Hub repo; None for a local path."""
    found_in: str
    """The place where the name was read: "the command line", "mergekit_config.yml", …"""
    license: str | None
    """The licence that the source's own card names; None if it names none."""


JUDGED = ("merged", "calibrated")
"""The two roles in Report.measures whose outputs are compared."""


@dataclass(frozen=True)
class Report:
    featcal_version: str
    recipe: dict[str, Any]
    environment: dict[str, str]
    settings: dict[str, Any]
    blocks: list[BlockReport]
    drift: dict[str, TaskDrift]
    cost: dict[str, Any]
    """Cost in seconds and bytes; under torchrun, with the largest memory of any process, and `expert_bytes_by_rank`."""
    notes: list[str] = field(default_factory=list)
    """Notes on choices that the user did not make, and on modules that were left unchanged."""
    sources: list[Source] = field(default_factory=list)
    measures: dict[str, TaskInspection] = field(default_factory=dict)
    """Measurements of merged, calibrated and base model as in inspect-drift, on the examples of `drift`."""
    accuracy: dict[str, TaskScores] = field(default_factory=dict)
    """Scores of expert, merged and calibrated model by task, where they were evaluated."""
    perplexity: dict[str, TaskScores] = field(default_factory=dict)
    """Perplexities of expert, merged, calibrated and base model by task, where drift was measured."""
    adapter: AdapterReport | None = None
    """The report on the adapter, where one was written."""
    refined: Refinement | None = None
    """The report on refining, where it was asked for."""
    files: list[str] = field(default_factory=list)
    """Paths of the output's files, relative to its folder."""
    loading: dict[str, Any] = field(default_factory=dict)
    """Arguments of `write_card` on how to load the output: classes of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """The content of featcal_report.json."""
        scores = {"nats_per_token": average_nats(self.perplexity), "won_back": self.won_back}
        return {"headline": self.headline, **scores, **asdict(self)}

    def to_json(self) -> str:
        # names of files and in data may hold anything, half characters included
        return without_tokens(write_json(self.to_dict(), indent=2, ensure_ascii=True) + "\n")

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
    def scores(self) -> list[dict[str, TaskScores]]:
        """Scores of outputs by task, once for each measure: those on labelled data, then perplexities, unless the
        former are perplexities too."""
        is_known = bool(self.accuracy) and find_metric(common_metric(self.accuracy)).of_texts
        return [scores for scores in (self.accuracy, {} if is_known else self.perplexity) if scores]

    @property
    def won_back(self) -> float | None:
        """Share of what merging lost, in the first of `scores`, that the calibrated model has won back; None without
        scores."""
        return regained_share(self.scores[0]) if self.scores else None

    @property
    def drift_rows(self) -> list[DriftRow]:
        """Rows of the table of drift: one per task and, if there are several, their mean last."""
        return _add_mean(DriftRow(task, drift.before, drift.after, drift.base) for task, drift in self.drift.items())

    @property
    def output_distances(self) -> dict[str, tuple[float, float]]:
        """Distance of outputs from the expert's, ‖z − z_exp‖ / ‖z_exp‖, before and after, by task; empty unless errors
        are measured at the outputs and every task has outputs. Refined results have KL(expert ‖ model)."""
        if self.refined is not None and self.is_refined:
            return {task: (self.refined.merged[task], self.refined.after[task]) for task in self.drift}
        if self.settings.get("metric") != "output":
            return {}
        outputs = {
            task: tuple(drift.output.relative for role in JUDGED if (drift := measured.models[role]).output)
            for task, measured in self.measures.items()
        }
        known = {task: (pair[0], pair[1]) for task, pair in outputs.items() if len(pair) == len(JUDGED)}
        return known if known.keys() == self.drift.keys() else {}

    @property
    def judged_rows(self) -> list[DriftRow]:
        """Rows of the table of the values that judge the result, distances of outputs, else drift: one per task and, if
        there are several, their mean last."""
        rows = []
        for task, pair in self.output_distances.items():
            base = self.measures[task].models.get("base") if task in self.measures else None
            distance = base.output.relative if base and base.output else self.drift[task].base
            # of a refined result, the distance of base was measured in another way
            rows.append(DriftRow(task, *pair, None if self.is_refined else distance))
        return _add_mean(rows) if rows else self.drift_rows

    @property
    def judged(self) -> dict[str, tuple[float, float]]:
        """The values that judge the result, before and after, by task."""
        return {row.task: (row.before, row.after) for row in self.judged_rows[: len(self.drift)]}

    @property
    def mean_judged(self) -> tuple[float, float]:
        mean = self.judged_rows[-1]
        return mean.before, mean.after

    @property
    def judged_by(self) -> str:
        """The name of the values in `judged`."""
        of_outputs = "KL divergence of outputs" if self.is_refined else "distance of outputs"
        return of_outputs if self.output_distances else "drift"

    @property
    def has_grown(self) -> bool:
        """Whether the mean of `judged` grew by at least VISIBLE, or is not a number."""
        before, after = self.mean_judged
        return not after < before + VISIBLE

    @property
    def fitted_tasks(self) -> list[str]:
        """Tasks whose drift is measured on calibration examples."""
        return [task for task, drift in self.drift.items() if not drift.held_out]

    @property
    def measured_on(self) -> str:
        """A phrase that says on which examples drift is measured."""
        if not self.fitted_tasks:
            return "on held-out rows"
        if len(self.fitted_tasks) == len(self.drift):
            return "on calibration examples"
        return f"on held-out rows, but on calibration examples for {list_some(self.fitted_tasks)}"

    @property
    def is_refined(self) -> bool:
        """Whether updates by which the result was refined are kept."""
        return self.refined is not None and self.refined.share > 0

    @property
    def is_unchanged(self) -> bool:
        """Whether all weights are the merged model's."""
        return self.settings.get("step") == 0 and not self.is_refined

    @property
    def headline(self) -> str:
        """The result in one line: the mean of `judged` before and after, and the examples that it is measured on."""
        before, after = self.judged_rows[-1].cells[:2]
        what = f"mean {self.judged_by}"
        if self.is_unchanged:
            return f"no update helps: these are the merged model's weights, with {what} {before} {self.measured_on}"
        if before == after and not self.has_grown:
            return f"{what} stayed at {after} {self.measured_on}"
        change = f"WARNING: {what} grew" if self.has_grown else f"{what} went"
        return f"{change} from {before} to {after} {self.measured_on}"

    @property
    def worse(self) -> list[str]:
        """Tasks on which the value in `judged` grew by at least VISIBLE, or is not a number."""
        return [task for task, (before, after) in self.judged.items() if not after < before + VISIBLE]
