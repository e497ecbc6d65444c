"""`reproduce`: a table of the paper, a calibration at a time, beside what the paper prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

from featcal_cli import __version__
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED, Score, combine
from featcal_cli.recipe.mistakes import did_you_mean
from featcal_cli.recipe.paper import PaperRow, PaperTable
from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes
from featcal_cli.recipe.schema import Data, Draft, Evaluate, Merge, Output, Recipe
from featcal_cli.reporting.report import Report
from featcal_cli.reporting.reproduction import (
    MEAN,
    Figure,
    Line,
    Reproduction,
    plot_reproduction,
    write_reproduction,
)
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.files import write_requested
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.progress import Listener, OneOfMany
from featcal_cli.runtime.untrusted_text import write_json
from featcal_cli.workflows.evaluate import evaluate_models
from featcal_cli.workflows.session import CalibrateOptions, RunOptions, Session
from featcal_cli.workflows.verbs import CalibrationRun
from featcal_cli.workflows.workspace import check_name

OUTPUT = Path("reproduction")
CELLS = "cells"
SAME_TABLE = {"figure-3": "table-12"}
SETTINGS = ("examples", "ridge", "rho", "alpha")
"""Keys of calibration that rows may have of their own."""
COSTS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "seconds": lambda cost: cost["seconds"],
    "rss_gib": lambda cost: cost["peak_rss_bytes"] / 2**30,
    "energy_wh": lambda cost: cost.get("gpu_watt_hours"),
}
"""Columns that the report of a calibration fills."""
ROLES = {"experts": EXPERT, "merged": MERGED, "featcal": CALIBRATED}
"""Method of a row → the role of its model in an evaluation; others keep their name."""
NOT_RUN = {
    "surgery": "Surgery and ProbSurgery are other methods",
    "probsurgery": "Surgery and ProbSurgery are other methods",
    "best": "the best of base and experts in each column is no model",
    "multitask": "no public checkpoint of the multi-task model is known",
}


@dataclass(frozen=True)
class Selection:
    """How much of a table is wanted."""

    tasks: Sequence[str] = ()
    """That are scored; none for all. What is merged and fitted stays as it is."""
    examples: Sequence[int] = ()
    """Fitted per task, instead of the table's."""
    seeds: Sequence[int] = ()
    corruptions: Sequence[str] = ()
    """Of the fitted images, instead of the table's."""
    limit: int | None = None
    """Test examples per task."""
    allow_code: bool = False


def reproduce(
    table: str,
    selection: Selection | None = None,
    *,
    recipe: str | None = None,
    output: Path | None = None,
    options: RunOptions | None = None,
    listener: Listener | None = None,
) -> Reproduction:
    """Calibrate and evaluate what a table of the paper holds, and write it with the paper's figures beside to
    TABLE.json, TABLE.md and TABLE.png in `output`, again after every calibration.

    table: 1, figure-3, …, of the shipped recipes, or of `recipe` alone. Whatever an earlier run has finished there is
    kept, and a calibration that was cut short goes on. Raises FeatCalError.
    """
    if read_launch().size > 1:
        raise RecipeError("tables are made by one process", where="torchrun", fix="type featcal reproduce alone")
    selection, folder, started = selection or Selection(), output or OUTPUT, time.monotonic()
    name, drafts = find_table(table, recipe)
    check_name(folder)
    run = _Run(selection, folder / CELLS, options or RunOptions(), OneOfMany(listener or Listener()))
    parts = [_Part(title, draft, draft.paper[name], run) for title, draft in drafts.items()]
    _check_wanted(parts, selection)

    def collect() -> Reproduction:
        return Reproduction(
            featcal_version=__version__,
            table=name,
            columns={part.title: part.columns for part in parts},
            lines=[line for part in parts for line in part.lines()],
            limit=selection.limit,
            environment=next((part.environment for part in parts if part.environment), {}),
            seconds=time.monotonic() - started,
            notes=list(_describe(selection)),
        )

    _write(folder, collect())
    for part in parts:
        for _ in part.measure():
            _write(folder, collect())
    return collect()


def find_table(table: str, recipe: str | None) -> tuple[str, dict[str, Draft]]:
    """The name of a table, and by their names the recipes that have it. Raises RecipeError where there is none."""
    files = [find_recipe(recipe)] if recipe else shipped_recipes()
    drafts = {file.stem: read_draft(file, {}) for file in files}
    known = {name: None for draft in drafts.values() for name in draft.paper}
    wanted = "-".join(table.lower().replace("-", " ").split())
    wanted = f"table-{wanted}" if wanted.isdecimal() else wanted
    wanted = SAME_TABLE.get(wanted, wanted)
    if wanted not in known:
        where = f"--recipe {recipe}" if recipe else "TABLE"
        names = ", ".join(sorted(known, key=lambda name: (name.rstrip("0123456789"), len(name), name)))
        fix = f"{did_you_mean(wanted, known, 0.7)}give one of: {names}" if known else "add what it prints, under paper:"
        raise RecipeError(f"no recipe has {wanted[:40]} of the paper", where=where, fix=fix)
    return wanted, {title: draft for title, draft in drafts.items() if wanted in draft.paper}


def choose_rows(rows: Sequence[PaperRow], key: str, values: Sequence[Any]) -> list[PaperRow]:
    """The rows with these values of `key` alone: those of the table, and where it has none, a row with the figures that
    it has for any; none of the other methods'."""
    if not values:
        return list(rows)
    chosen: list[PaperRow] = []
    varies = any(getattr(row, key) is not None for row in rows)
    for row in rows:
        if row.method != "featcal":
            chosen += [row] if getattr(row, key) in (None, *values) else []
            continue
        for value in values:
            unprinted: dict[str, Any] = {"figures": (), "spread": None, "misprints": {}} if varies else {}
            wanted = row.model_copy(update={key: value, **unprinted})
            if any(_identify(other) == _identify(wanted) for other in chosen):
                continue
            printed = (other for other in rows if _identify(other) == _identify(wanted))
            chosen.append(next(printed, wanted))
    return chosen


def _identify(row: PaperRow) -> dict[str, Any]:
    return row.model_dump(exclude={"figures", "spread", "misprints"})


def _check_wanted(parts: Sequence[_Part], selection: Selection) -> None:
    """Raise RecipeError for tasks that there are not, and for what cannot be scored, before anything is computed."""
    from featcal_cli.evaluation.lm_eval_tasks import check_harness

    known = list(dict.fromkeys(task for part in parts for task in part.draft.tasks))
    for task in selection.tasks:
        if task not in known:
            fix = f"{did_you_mean(task, known)}name some of: {', '.join(known)}"
            raise RecipeError(f"there is no task {task[:40]}", where="--tasks", fix=fix)
    for part in parts:
        check_harness(part.ways_to_score, allow_code=selection.allow_code)


def _describe(selection: Selection) -> Iterator[str]:
    """What is not as in the paper, in sentences."""
    if selection.limit is not None:
        yield f"scored on at most {selection.limit} test examples of a task, not on all"
    if selection.tasks:
        yield f"scored on {', '.join(selection.tasks)} alone; means are over these, the paper's too where it has them"
    if selection.examples or selection.corruptions:
        yield "where the paper has no row with these examples or this corruption, its figure is of the row without them"


def _write(folder: Path, result: Reproduction) -> None:
    contents: dict[str, str | bytes] = {
        "json": write_json(result.to_dict(), indent=2, ensure_ascii=False) + "\n",
        "md": write_reproduction(result),
        "png": plot_reproduction(result),
    }
    with suppress(OSError):  # writing says why
        folder.mkdir(parents=True, exist_ok=True)
    for kind, content in contents.items():
        write_requested(folder / f"{result.table}.{kind}", content, where=f"--output {folder}")


@dataclass(frozen=True)
class _Run:
    """What all parts of a table have in common."""

    selection: Selection
    cells: Path
    """Where calibrated models are kept."""
    options: RunOptions
    listener: Listener


class _Part:
    """What one recipe has of the table, as far as it is measured."""

    def __init__(self, title: str, draft: Draft, table: PaperTable, run: _Run) -> None:
        self.title, self.draft, self.table = title, draft, table
        self.selection, self.cells, self.options, self.listener = run.selection, run.cells, run.options, run.listener
        self.environment: Mapping[str, str] = {}
        rows = choose_rows(self.table.rows, "examples", self.selection.examples)
        self.rows = choose_rows(rows, "corrupt", self.selection.corruptions)
        self.skipped = [self._explain_skip(row) for row in self.rows]
        self.seeds = self.selection.seeds or self.table.seeds or [self.draft.calibration.seed]
        self._scored = {task: _list_figures(task, spec.evaluate) for task, spec in self.draft.tasks.items()}
        """By task, its columns."""
        self._scored = {task: names for task, names in self._scored.items() if task in (self.selection.tasks or [task])}
        scored = [column for names in self._scored.values() for column in names]
        self.columns = [column for column in self.table.columns if column in (*scored, MEAN, *COSTS)]
        self._scores: dict[tuple[int, int | None], Mapping[str, Score]] = {}
        """Of a row and a seed, which only what was calibrated has, by column."""
        self._costs: dict[int, Mapping[str, Any]] = {}
        """Of a row."""

    @property
    def ways_to_score(self) -> dict[str, Evaluate]:
        """By task, how it is scored; nothing where the table holds costs alone."""
        if set(self.columns) <= set(COSTS):
            return {}
        return {task: how for task in self._scored if (how := self.draft.tasks[task].evaluate) is not None}

    def measure(self) -> Iterator[None]:
        """Calibrate and evaluate; yields whenever there is more to show. Raises FeatCalError."""
        for number, row in enumerate(self.rows):
            if row.method != "featcal" or self.skipped[number]:
                continue
            for seed in self.seeds:
                self._measure_cell(number, row, seed)
                yield

    def _measure_cell(self, number: int, row: PaperRow, seed: int) -> None:
        draft = self._make_draft(row, seed)
        digest = sha256(draft.model_dump_json().encode()).hexdigest()[:8]
        settings = [f"{key}-{value}" for key, value in _settings_of(row).items()]
        parts = [self.title, row.merge or "merged", *settings, f"seed-{seed}", digest]
        folder = self.cells / "-".join(parts).replace(":", "-")
        session = Session(draft, self.options, self.listener)
        self.listener.note(", ".join(parts[:-1]))
        report = CalibrationRun(session, folder, CalibrateOptions()).calibrate().report
        self.environment = report.environment
        self._costs[number] = report.cost
        if self.ways_to_score:
            self._evaluate(session, report, number, seed, folder)

    def _evaluate(self, session: Session, report: Report, number: int, seed: int, folder: Path) -> None:
        """Score the calibrated model; and with it, once, those of other rows that it is there for."""
        row = self.rows[number]
        targets: dict[str, tuple[int, int | None]] = {CALIBRATED: (number, seed)}
        models = {CALIBRATED: str(folder)}
        for other, about in enumerate(self.rows):
            is_its_merge = about.method == "merged" and about.merge == row.merge
            is_reference = about.merge is None and about.method != "featcal"
            if self.skipped[other] or (other, None) in self._scores or not (is_its_merge or is_reference):
                continue
            targets[ROLES.get(about.method, about.method)] = (other, None)
            if about.method == "pretrained" or (about.model and is_reference):
                models[about.method] = str(about.model or self.draft.base or report.recipe["base"])
        recipe = Recipe.model_validate(report.recipe)
        scores: dict[str, dict[str, Score]] = {role: {} for role in targets}
        for part in _split_rounds(recipe, list(self._scored)):
            measured = evaluate_models(
                session, part, models, limit=self.selection.limit, batch_size=self.options.batch_size,
                allow_code=self.selection.allow_code, tasks=[task for task in part.tasks if part.tasks[task].evaluate],
                roles=list(targets),
            )  # fmt: skip
            for task, found in measured.tasks.items():
                (column,) = _list_figures(task, part.tasks[task].evaluate)
                for role, score in found.scores.items():
                    scores[role][column] = score
        for role, target in targets.items():
            self._scores[target] = scores[role]

    def _make_draft(self, row: PaperRow, seed: int) -> Draft:
        """The recipe with what is the row's own."""
        given = {key: getattr(row, key) for key in SETTINGS if getattr(row, key) is not None}
        tasks = self.draft.tasks
        if row.corrupt:
            data = {
                task: (spec.data or Data()).model_copy(update={"corrupt": row.corrupt}) for task, spec in tasks.items()
            }
            tasks = {task: spec.model_copy(update={"data": data[task]}) for task, spec in tasks.items()}
        calibration = self.draft.calibration.model_copy(update={**given, "seed": seed})
        merged = self._find_merged(row)
        return self.draft.model_copy(
            update={"merged": merged, "tasks": tasks, "calibration": calibration, "output": Output()}
        )

    def _find_merged(self, row: PaperRow) -> Merge | str | None:
        """The merged model that the row is about: a checkpoint, or what is built; None where neither is known."""
        for other in self.table.rows:
            if other.method == "merged" and other.merge == row.merge and other.model:
                return other.model
        own = self.draft.merged
        if row.merge is None or (isinstance(own, Merge) and own.method == row.merge):
            return own
        built = row.merge in get_args(Merge.model_fields["method"].annotation)
        return Merge.model_validate({"method": row.merge}) if built else None

    def _explain_skip(self, row: PaperRow) -> str:
        if row.method in NOT_RUN and not (row.method == "multitask" and row.model):
            return NOT_RUN[row.method]
        if row.method in ("merged", "featcal") and self._find_merged(row) is None:
            return f"featcal does not build {row.merge} merges, and no public checkpoint is known"
        return ""

    def lines(self) -> list[Line]:
        """The rows with what is known by now."""
        return [
            Line(
                recipe=self.title,
                method=row.method,
                merge=row.merge,
                settings=_settings_of(row),
                figures={column: self._read_figure(number, row, column) for column in self.columns},
                paper_spread=row.spread,
                seeds=[seed for at, seed in self._scores if at == number and seed is not None],
                skipped=self.skipped[number],
                is_printed=row in self.table.rows and bool(row.figures),
            )
            for number, row in enumerate(self.rows)
        ]

    def _read_figure(self, number: int, row: PaperRow, column: str) -> Figure:
        figure = Figure(self._read_printed(row, column), misprint=row.misprints.get(column, ""))
        if column in COSTS:
            return replace(figure, value=COSTS[column](self._costs[number])) if number in self._costs else figure
        scores = [
            combine(list(by_column.values())) if column == MEAN else by_column[column]
            for (at, _), by_column in self._scores.items()
            if at == number
        ]
        if not scores:
            return figure
        values = [100 * score.value for score in scores]
        low, high = (100 * mean(getattr(score, end) for score in scores) for end in ("low", "high"))
        spread = stdev(values) if len(values) > 1 else None
        return replace(figure, value=mean(values), low=low, high=high, spread=spread)

    def _read_printed(self, row: PaperRow, column: str) -> float | None:
        """The paper's figure; of fewer tasks than it averages, their mean, where it prints them."""
        printed = dict(zip(self.table.columns, row.figures, strict=True)) if row.figures else {}
        if column != MEAN or len(self._scored) == len(self.draft.tasks):
            return printed.get(column)
        figures = [figure for name in self.columns if name != MEAN and (figure := printed.get(name)) is not None]
        return mean(figures) if figures else None


def _settings_of(row: PaperRow) -> dict[str, Any]:
    """What is the row's own of the settings."""
    return {key: value for key in (*SETTINGS, "corrupt") if (value := getattr(row, key)) is not None}


def _list_figures(task: str, how: Evaluate | None) -> list[str]:
    """The columns that a task's evaluation fills: its own, or one for each of lm-eval's tasks."""
    return [] if how is None else list(how.lm_eval) or [task]


def _split_rounds(recipe: Recipe, tasks: Sequence[str]) -> Iterator[Recipe]:
    """The recipe, to be evaluated on these tasks, as often as needed to measure one of lm-eval's tasks at a time."""
    rounds = max((len(_list_figures(task, recipe.tasks[task].evaluate)) for task in tasks), default=0)
    for number in range(rounds):
        specs = {}
        for task, spec in recipe.tasks.items():
            how = spec.evaluate if task in tasks else None
            if how is not None and how.lm_eval:
                chosen = dict(list(how.lm_eval.items())[number : number + 1])
                how = how.model_copy(update={"lm_eval": chosen}) if chosen else None
            elif number:
                how = None
            specs[task] = spec.model_copy(update={"evaluate": how})
        yield recipe.model_copy(update={"tasks": specs})
