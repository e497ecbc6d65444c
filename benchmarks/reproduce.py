"""A table of the paper (arXiv 2605.13030), measured with featcal: the paper's figures beside the measured ones.

    python benchmarks/reproduce.py TABLE [-r RECIPE] [--tasks mnist svhn] [--examples 8 16] [--seeds 42] [--limit 50]
                                   [--device cuda] [--batch-size N] [--allow-code-execution] [-o FOLDER]

TABLE is 1 to 12, figure-3, figure-5 or authors-readme, as the shipped recipes hold it under `paper:`. Each row that
featcal can make is calibrated once per seed and evaluated. The folder gets TABLE.md and TABLE.json, written again after
every calibration, and under `cells` each calibrated model; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from hashlib import sha256
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

from corruptions import corrupting
from pydantic.dataclasses import dataclass

from featcal_cli import calibrate, evaluate
from featcal_cli.evaluation.lm_eval_tasks import check_harness
from featcal_cli.evaluation.results import Score, combine
from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.runtime.errors import FeatCalError

MEAN = "mean"
SETTINGS = ("examples", "ridge", "rho", "alpha")
"""Keys of the calibration that a row may set."""
COSTS = {"seconds": ("seconds", 1), "rss_gib": ("peak_rss_bytes", 2**30)}
"""Column → the key of the report's cost, and what it is divided by."""
NOT_RUN = {
    "surgery": "Surgery and ProbSurgery are other methods",
    "probsurgery": "Surgery and ProbSurgery are other methods",
    "best": "the best of base and experts in each column is no model",
    "multitask": "no public checkpoint of the multi-task model is known",
}


@dataclass(frozen=True, config={"extra": "forbid"})
class Row:
    """A row of the table as the recipe holds it, its numbers read; the recipes' comments explain the keys."""

    method: str
    merge: str | None = None
    model: str | None = None
    examples: int | None = None
    ridge: float | None = None
    rho: float | None = None
    alpha: float | None = None
    corrupt: str | None = None
    figures: Sequence[float | None] = ()
    spread: float | None = None
    misprints: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key in (*SETTINGS, "corrupt") if (value := getattr(self, key)) is not None}

    @property
    def name(self) -> str:
        model = " + ".join(part for part in (self.merge, self.method) if part and part != "merged")
        return ", ".join([model, *(f"{key} {value}" for key, value in self.settings.items())])


class Part:
    """The rows that one recipe has of the table, and what has been measured of them."""

    def __init__(self, title: str, draft: Draft, table: Mapping[str, Any], args: argparse.Namespace) -> None:
        self.title, self.draft, self.args = title, draft, args
        self.all_columns: Sequence[str] = table["columns"]
        self.printed = [Row(**row) for row in table["rows"]]
        self.rows = choose_rows(self.printed, args.examples)
        self.skipped = [self.explain_skip(row) for row in self.rows]
        self.seeds = args.seeds or [int(seed) for seed in table.get("seeds", ())] or [draft.calibration.seed]
        tasks = {task: spec.evaluate for task, spec in draft.tasks.items() if task in (args.tasks or [task])}
        self.how = {} if set(self.all_columns) & set(COSTS) else {task: how for task, how in tasks.items() if how}
        self.scored = {task: list(how.lm_eval) or [task] for task, how in self.how.items()}
        """Task → the columns that its evaluation fills."""
        known = [*COSTS, MEAN, *(column for columns in self.scored.values() for column in columns)]
        self.columns = [column for column in self.all_columns if column in known or column.endswith("_wh")]
        self.scores: dict[tuple[int, int | None], dict[str, Score]] = {}
        """Row and seed (None for models that are not calibrated) → column → score."""
        self.costs: dict[tuple[int, int], Mapping[str, Any]] = {}

    def explain_skip(self, row: Row) -> str:
        if row.method in NOT_RUN and not (row.method == "multitask" and row.model):
            return NOT_RUN[row.method]
        if row.method in ("merged", "featcal") and self.find_merged(row) is None:
            return f"featcal does not build {row.merge} merges, and no public checkpoint is known"
        return ""

    def find_merged(self, row: Row) -> str | dict[str, Any] | None:
        """The merged model of a row: a checkpoint, or how it is built; None if neither is known."""
        for other in self.printed:
            if other.method == "merged" and other.merge == row.merge and other.model:
                return other.model
        own = self.draft.merged
        if row.merge is None or (isinstance(own, Merge) and own.method == row.merge):
            return own.model_dump() if isinstance(own, Merge) else own
        return {"method": row.merge} if row.merge in get_args(Merge.model_fields["method"].annotation) else None

    def measure(self) -> Iterator[None]:
        """Calibrate and evaluate row by row and seed by seed; yields after each. Raises FeatCalError."""
        for number, row in enumerate(self.rows):
            for seed in self.seeds if row.method == "featcal" and not self.skipped[number] else ():
                recipe, folder = self.calibrate(number, row, seed)
                if self.scored:
                    self.evaluate(recipe, folder, number, seed)
                yield

    def calibrate(self, number: int, row: Row, seed: int) -> tuple[dict[str, Any], Path]:
        recipe = self.draft.model_dump(mode="json", exclude_none=True, exclude={"output"})
        recipe["merged"] = self.find_merged(row)
        recipe["calibration"] |= {key: value for key, value in row.settings.items() if key in SETTINGS} | {"seed": seed}
        settings = [f"{key}-{value}" for key, value in row.settings.items()]
        digest = sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
        name = "-".join([self.title, row.merge or "merged", *settings, f"seed-{seed}", digest]).replace(":", "-")
        folder, report = self.args.output / "cells" / name, self.args.output / "cells" / name / "featcal_report.json"
        if not report.exists():  # an output appears whole, or not at all
            print(f"calibrating {name}", file=sys.stderr)
            with corrupting(row.corrupt):
                calibrate(recipe, output=folder, device=self.args.device, batch_size=self.args.batch_size)
        found = json.loads(report.read_text(encoding="utf-8"))
        self.costs[number, seed] = found["cost"]
        return found["recipe"], folder

    def evaluate(self, recipe: dict[str, Any], folder: Path, number: int, seed: int) -> None:
        """Score the calibrated model, and once the merged model, the experts and those that are there to compare."""
        targets: dict[str, tuple[int, int | None]] = {"calibrated": (number, seed)}
        models = {"calibrated": str(folder)}
        for other, row in enumerate(self.rows):
            is_its_merge = row.method == "merged" and row.merge == self.rows[number].merge
            is_reference = row.merge is None and row.method not in ("featcal", "merged")
            if self.skipped[other] or (other, None) in self.scores or not (is_its_merge or is_reference):
                continue
            targets[row.method] = (other, None)
            if row.method not in ("merged", "experts"):
                models[row.method] = row.model or recipe["base"]
        scores: dict[str, dict[str, Score]] = {role: {} for role in targets}
        for turn in range(max(map(len, self.scored.values()))):  # one of lm-eval's tasks at a time
            tasks = {task: self.restrict(task, spec, turn) for task, spec in recipe["tasks"].items()}
            print(f"evaluating {folder.name}", file=sys.stderr)
            found = evaluate(
                {**recipe, "tasks": tasks}, list(models.values()), limit=self.args.limit, device=self.args.device,
                batch_size=self.args.batch_size, allow_code=self.args.allow_code_execution,
            )  # fmt: skip
            for task, by_role in found.tasks.items():
                named = dict(zip(("experts", "merged", *models), by_role.scores.values(), strict=True))
                for role in scores:
                    scores[role][self.scored[task][turn]] = named[role]
        for role, target in targets.items():
            self.scores[target] = scores[role]

    def restrict(self, task: str, spec: Mapping[str, Any], turn: int) -> dict[str, Any]:
        """The task, evaluated on the column of this turn alone, or not at all."""
        how = spec.get("evaluate")
        columns = self.scored.get(task, [])[turn : turn + 1]
        rest = {key: value for key, value in spec.items() if key != "evaluate"}
        if how and how.get("lm_eval"):
            how = {**how, "lm_eval": {column: how["lm_eval"][column] for column in columns}}
        return {**rest, "evaluate": how} if columns else rest

    def read_figure(self, number: int, column: str) -> dict[str, float | None]:
        """What is known by now of one cell: the paper's figure, the mean over seeds, its interval and its deviation."""
        figure = {"paper": self.read_printed(self.rows[number], column)}
        if column in COSTS:
            key, unit = COSTS[column]
            values = [cost[key] / unit for (at, _), cost in self.costs.items() if at == number]
        else:
            found = [scores for (at, _), scores in self.scores.items() if at == number]
            scores = [combine(list(by.values())) if column == MEAN else by[column] for by in found]
            values = [100 * score.value for score in scores]
            if scores:
                figure |= {end: 100 * mean(getattr(score, end) for score in scores) for end in ("low", "high")}
        return figure | {"value": mean(values) if values else None, "spread": stdev(values) if values[1:] else None}

    def read_printed(self, row: Row, column: str) -> float | None:
        """The paper's figure; if fewer tasks are scored, the mean of theirs."""
        printed = dict(zip(self.all_columns, row.figures, strict=True)) if row.figures else {}
        if column != MEAN or not self.args.tasks:
            return printed.get(column)
        figures = [figure for name in self.columns if name != MEAN and (figure := printed.get(name)) is not None]
        return mean(figures) if figures else None


def choose_rows(rows: Sequence[Row], examples: Sequence[int]) -> list[Row]:
    """The rows with these numbers of examples; if the table does not vary them, its rows with each of these numbers."""
    if any(row.examples is not None for row in rows) or not examples:
        return [row for row in rows if not examples or row.examples in (None, *examples)]
    chosen = [[replace(row, examples=n) for n in examples] if row.method == "featcal" else [row] for row in rows]
    return [row for group in chosen for row in group]


def find_table(table: str, recipe: str | None) -> tuple[str, dict[str, Draft]]:
    """The name of the table, and the recipes that have it. Exits with the known names if there is none."""
    files = [find_recipe(recipe)] if recipe else shipped_recipes()
    drafts = {file.stem: read_draft(file, {}) for file in files}
    name = {"figure-3": "table-12"}.get(table, f"table-{table}" if table.isdecimal() else table)
    found = {title: draft for title, draft in drafts.items() if name in draft.paper}
    if not found:
        known = sorted({name for draft in drafts.values() for name in draft.paper})
        sys.exit(f"there is no {name}; the recipes have {', '.join(known)}")
    return name, found


def show(figure: Mapping[str, float | None], misprint: str | None) -> str:
    """The measured figure with half of its interval and its deviation over seeds, and the paper's in brackets."""
    value, low, high, spread = (figure.get(key) for key in ("value", "low", "high", "spread"))
    measured = "–" if value is None else f"{value:.1f}"
    measured += "" if low is None or high is None else f" ± {(high - low) / 2:.1f}"
    measured += "" if spread is None else f" (σ {spread:.1f})"
    return f"{measured} [{'–' if figure['paper'] is None else figure['paper']}{'*' if misprint else ''}]"


def write(folder: Path, table: str, parts: Sequence[Part], limit: int | None) -> str:
    """Write TABLE.json and TABLE.md, which is returned."""
    text, lines = [f"# {table} of arXiv 2605.13030: measured ± half of the 95 % interval [paper's]"], []
    for part in parts:
        text += ["", f"## {part.title}", "", f"| | {' | '.join(part.columns)} |"]
        text.append("|---" * (1 + len(part.columns)) + "|")
        for number, row in enumerate(part.rows):
            figures = {column: part.read_figure(number, column) for column in part.columns}
            cells = [show(figure, row.misprints.get(column)) for column, figure in figures.items()]
            text.append(f"| {row.name} | {' | '.join(cells)} |")
            seeds = [seed for at, seed in part.costs if at == number]
            line = {"recipe": part.title, "name": row.name, "seeds": seeds, "skipped": part.skipped[number]}
            lines.append({**line, "figures": figures})
        text += ["", *dict.fromkeys(f"- not measured: {reason}" for reason in part.skipped if reason)]
    text += ["", "Figures are in percent, but for costs; a star marks what seems to be a misprint of the paper."]
    text += [f"Scored on at most {limit} test examples of a task."] if limit else []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table}.json").write_text(json.dumps({"table": table, "limit": limit, "lines": lines}, indent=2) + "\n")
    (folder / f"{table}.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return "\n".join(text)


def main(words: Sequence[str] | None = None) -> None:
    """Measure the table that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("-r", "--recipe")
    parser.add_argument("--tasks", nargs="+", default=[])
    parser.add_argument("--examples", nargs="+", type=int, default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--allow-code-execution", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path("reproduction"))
    args = parser.parse_args(words)
    table, drafts = find_table(args.table.lower().replace(" ", "-"), args.recipe)
    if unknown := set(args.tasks) - {task for draft in drafts.values() for task in draft.tasks}:
        sys.exit(f"there is no task {min(unknown)}")
    try:
        parts = [Part(title, draft, draft.paper[table], args) for title, draft in drafts.items()]
        for part in parts:
            check_harness(part.how, allow_code=args.allow_code_execution)
        for part in parts:
            for _ in part.measure():
                write(args.output, table, parts, args.limit)
        print(write(args.output, table, parts, args.limit))
    except FeatCalError as error:
        sys.exit(f"error: {error.what}\n   in: {error.where}\n  fix: {error.fix}")


if __name__ == "__main__":
    main()
