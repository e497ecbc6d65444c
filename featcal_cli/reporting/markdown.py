"""An inspection as Markdown for a pipeline's summary, and the tables of a report."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from featcal_cli.calibration.results import ADAPTER, AdapterReport, write_share
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED, Score, average_tasks
from featcal_cli.lineage.questions import enumerate_names
from featcal_cli.reporting.report import PICTURE, DriftRow, Inspection, Report
from featcal_cli.reporting.verdict import list_columns, list_roles, write_verdict
from featcal_cli.runtime.errors import GateError
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.sanitise import for_html, for_markdown, one_line, without_folders

NAMED_TASKS = 3
"""The most tasks of which all are listed; more are called all tasks."""


def join_notes(notes: Iterable[str], tasks: Collection[str]) -> list[str]:
    """The notes in their order; notes with the same text about several tasks become one."""
    tasks_of: dict[str, list[str]] = {}
    for note in notes:
        task = next((task for task in tasks if note.startswith(f"{task}: ")), None)
        if task is None:
            tasks_of.setdefault(note, [])
        else:
            tasks_of.setdefault(note[len(task) + 2 :], []).append(task)

    def name(named: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(named))
        return f"all {len(tasks)} tasks" if len(distinct) == len(tasks) > NAMED_TASKS else enumerate_names(distinct)

    return [f"{name(named)}: {text}" if named else text for text, named in tasks_of.items()]


def label_roles(inspection: Inspection) -> dict[str, str]:
    """The name of every role for other readers, without tokens and the folders of this machine."""
    labels = {role: for_html(inspection.names.get(role, role), 120) for role in list_roles(inspection)}
    if "base" in labels:
        labels["base"] = "base model"
    if labels.get("other") == labels["model"]:
        labels |= {"model": f"A: {labels['model']}", "other": f"B: {labels['other']}"}
    return labels


LONGEST_TEXT = 400
COMMIT = re.compile(r"@([0-9a-f]{7})[0-9a-f]{33}\b")


def write_summary(inspection: Inspection, exceeded: GateError | None = None) -> str:
    """The whole summary, with a heading of the second level; exceeded: the error of the gate `--max-drift`."""
    names = {role: _show(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    parts = [f"## Feature drift of {names.get('other', names['model'])}"]
    if exceeded is not None:
        parts.append(f"❌ **{_show(exceeded.what)}**  \n{_show(exceeded.where)}")
    for is_warning, text in write_verdict(inspection, names, for_markdown):
        parts.append(f"⚠️ {text}" if is_warning else text)
    columns = [column for column in list_columns(inspection) if column.kind != "difference"]
    measures = {column.measure for column in columns}
    lines = [write_row(["task", *(f"{column.measure}, {column.role}" for column in columns)])]
    lines.append(f"| --- |{' ---: |' * len(columns)}")
    for number, task in enumerate(inspection.tasks):
        lines.append(write_row([for_markdown(task), *(column.write(column.values[number]) for column in columns)]))
    if len(inspection.tasks) > 1:
        lines.append(write_row(["**mean**", *(column.write(column.mean) for column in columns)]))
    about = ", ".join(f"{role}: {name}" for role, name in names.items())
    about += ". Drift is mean ‖h − h\\_expert‖ / mean ‖h\\_expert‖ after the last block; 0 is the expert itself."
    if "output" in measures:
        about += " Output is the same distance of outputs, which the expert's own head gives for the features."
    if "agree" in measures:
        about += " Agree is the share of the expert's first choices that stay the first."
    return "\n\n".join([*parts, "\n".join(lines), about]) + "\n"


def write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show(text: str) -> str:
    """A name for other readers: paths without folders, and commits with their first digits."""
    return for_markdown(COMMIT.sub(r"@\1", without_folders(text)), LONGEST_TEXT)


def write_accuracy(report: Report) -> Iterator[str]:
    """The table of scores of expert, merged and calibrated model on labelled data, where they were measured."""
    if not report.accuracy:
        return
    ranked = [for_markdown(task) for task, scores in report.accuracy.items() if scores.metric == "spearman"]
    ranks = f" (of {', '.join(ranked)}: 100 · Spearman's ρ)" if ranked else ""
    roles = (EXPERT, MERGED, CALIBRATED)
    rows = [["task", *roles], ["---", *["---:"] * len(roles)]]
    for task, scores in report.accuracy.items():
        rows.append([for_markdown(task), *(write_percent(scores.scores[role]) for role in roles)])
    if len(report.accuracy) > 1:
        means = average_tasks(report.accuracy)
        rows.append(["**mean**", *(write_percent(means[role]) for role in roles)])
    about = f"In percent, on labelled data{ranks}; ± is half of the 95 % interval, by bootstrap over examples."
    yield f"## Accuracy\n\n{about}"
    yield "\n".join(map(write_row, rows))


def write_percent(score: Score) -> str:
    return f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}"


def write_distances(report: Report) -> Iterator[str]:
    """The tables of distances of merged and calibrated from the experts: of outputs, where the result is judged by
    these, and of features."""
    on_fitted, where = ", on calibration examples", "**the calibration examples**, because there were no others; "
    where += "on new ones it will be larger."
    if len(report.fitted_tasks) < len(report.drift):
        marked = " A task marked \\* had none, and **is measured on its calibration examples**."
        on_fitted, where = "", "held-out examples." + (marked if report.fitted_tasks else "")
    choices = "\n".join(_write_choices(report))
    if report.output_distances:
        what = "This is mean ‖z − z_expert‖ / mean ‖z_expert‖, where z is the output of each expert's own head for"
        where_and_how = (
            f"{where} 0 is the expert. Of logits, each counts half by its probability and half like all others."
        )
        yield f"## Distance of outputs from the experts'{on_fitted}\n\n{what} the last features, on {where_and_how}"
        yield from filter(None, (_write_drift_table(report.judged_rows), choices))
    drift = f"Drift is mean ‖h − h_expert‖ / mean ‖h_expert‖ after the last block, on {where} 0 is the expert."
    yield f"## Drift from the experts{on_fitted}\n\n{drift}"
    yield _write_drift_table(report.drift_rows)
    if report.curves:
        before, after, *_ = report.drift_rows[-1].cells
        what = "Line charts of the drift from each expert after every block, of base, merged and calibrated model"
        yield f"![{what}. The mean after the last block is {before} merged, and {after} calibrated.]({PICTURE})"
    if choices and not report.output_distances:
        yield choices
    rows = [(row, row.base) for row in report.judged_rows[: len(report.drift)] if row.base is not None]
    if farther := [for_markdown(row.task) for row, base in rows if row.before > base]:
        what = f"On {', '.join(farther)} the merged model is farther from its expert than the base model is"
        yield f"{what}: there merging was worse than doing nothing, and a smaller merging scale usually helps."


def write_adapter(adapter: AdapterReport, merged: str, commit: str | None, output: str, model_class: str) -> str:
    """The section on the adapter of an output, with the code that puts it on the merged model. commit: of the
    merged model's repo, None for a folder; output: a folder or a repo; model_class: a class of transformers that
    loads both."""
    model_class = model_class if model_class.isidentifier() else "AutoModel"
    name, place = (json.dumps(one_line(text), ensure_ascii=False) for text in (merged, output))
    if commit is None:
        name = json.dumps(one_line(Path(merged).name), ensure_ascii=False)
    revision = f', revision="{commit}"' if commit else ""
    left_out = f" It cannot hold {len(adapter.left_out)} of the changed parameters." if adapter.left_out else ""
    return f"""### As an adapter

The folder `{ADAPTER}` holds the same updates as a LoRA adapter of rank {adapter.rank} ({tell_bytes(adapter.bytes)}): it
keeps {write_share(adapter.share)} of their sum of squares.{left_out} It goes on the merged model:

```python
from peft import PeftModel
from transformers import {model_class}

merged = {model_class}.from_pretrained({name}{revision}, dtype="auto")
model = PeftModel.from_pretrained(merged, {place}, subfolder="{ADAPTER}")
```"""


def _write_drift_table(rows: Sequence[DriftRow]) -> str:
    heads = ["task", "merged", "calibrated", "change", "base model"][: 1 + len(rows[-1].cells)]
    lines = [write_row(heads), f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for number, row in enumerate(rows):
        name = "**mean**" if 0 < number == len(rows) - 1 else for_markdown(row.task) + (" \\*" if row.is_marked else "")
        lines.append(write_row([name, *write_drift_cells(row)]))
    return "\n".join(lines)


def write_drift_cells(row: DriftRow) -> list[str]:
    return [cell.replace("-", "−") for cell in row.cells]


def _write_choices(report: Report) -> Iterator[str]:
    """Lines of a table that compares the choices of the experts' own heads before and after; empty where no expert has
    logits."""
    rows = []
    for task, measured in report.measures.items():
        before, after = (model.output if (model := measured.models.get(r)) else None for r in (MERGED, CALIBRATED))
        if before and after and before.agreement is not None and after.agreement is not None:
            agreed = f"{100 * before.agreement:.0f} % → {100 * after.agreement:.0f} %"
            rows.append(write_row([for_markdown(task), agreed, f"{before.divergence:.3f} → {after.divergence:.3f}"]))
    if rows:
        about = "Outputs of each expert's own head for the model's last features, merged → calibrated:\n"
        heads = "| task | same first choice as the expert | KL from the expert, nats |\n| --- | ---: | ---: |"
        yield from (about, heads, *rows)
