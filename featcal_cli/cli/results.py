"""Show results, plans, models, recipes and findings on the terminal. Hints go to stderr."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console

from featcal_cli.cli.console import ERR, OUT, escape, fold, make_list, make_table, write_count
from featcal_cli.evaluation.results import (
    BASE,
    CALIBRATED,
    EXPERT,
    MERGED,
    Evaluation,
    Score,
    TaskScores,
    average_nats,
    average_tasks,
    common_metric,
    describe_regained,
    find_metric,
    show_change,
    show_nats,
    show_scores,
    show_values,
)
from featcal_cli.lineage.search import tell_source
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.reading import COMPANIONS, describe_recipe
from featcal_cli.reporting.report import CARD, PICTURE, Report
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.process import list_launch_words
from featcal_cli.runtime.progress import tell_change, tell_range, tell_seconds
from featcal_cli.runtime.sanitise import enumerate_names, for_terminal

if TYPE_CHECKING:
    from typer import Context

    from featcal_cli.hub.push import Pushed
    from featcal_cli.models.inventory import Inventory
    from featcal_cli.workflows.doctor import Finding
    from featcal_cli.workflows.inputs import Inputs
    from featcal_cli.workflows.plan import Plan
    from featcal_cli.workflows.session import RunOptions

OWN_MODEL = "Next, a model of your own: featcal calibrate USER/MERGED --dry-run"
"""Hint after the demo."""
MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "problem": "[red]✗[/]"}
"""Signs for the states of doctor's findings."""


def show_inputs(inputs: Inputs) -> None:
    """Show a job's models and data, grouped by the source in which each name was found."""
    width = max(cell_len(for_terminal(finding.role)) for finding in inputs.findings)
    groups: dict[str, list[str]] = {}
    for finding, commit in zip(inputs.findings, inputs.commits, strict=True):
        blanks = " " * (width - cell_len(for_terminal(finding.role)))
        at = f" [dim]at {commit[:7]}[/dim]" if commit else ""
        line = f"  {escape(finding.role)}{blanks}  {escape(finding.value)}{at}"
        groups.setdefault(tell_source(finding), []).append(line)
    for source, lines in groups.items():
        OUT.print(f"{escape(source[:1].upper() + source[1:])}:")
        for line in lines:
            OUT.print(line, soft_wrap=True)
    OUT.print()


def show_plan(plan: Plan) -> None:
    needs = plan.estimate
    missing, here, copied = (
        sum(transfer[key] for transfer in plan.transfers.values()) for key in ("missing", "here", "copied")
    )
    cached = f"; {tell_bytes(copied)} more for copies in featcal's cache" if copied else ""
    calibrated = f"{plan.modules} modules in {plan.blocks} blocks" + (f" and {plan.head}" if plan.head else "")
    calibrated += "" if plan.stops else ", which all models have"
    if not plan.blocks:
        calibrated = "known when it runs: the model cannot be traced without its weights"
    device = f", {tell_bytes(needs.device_bytes)} on {plan.device}" if needs.device_bytes else ""
    lines = {
        "model": f"{plan.model_class}, {write_count(plan.parameters)} parameters, {plan.dtype}",
        "calibrated": calibrated,
        "examples": "; ".join(_describe_examples(plan)),
        "settings": plan.settings,
        "refined": _describe_refining(plan),
        "download": describe_download(missing, here),
        "memory": f"about {tell_bytes(needs.host_bytes)}{device}, with the weights that are read",
        "disk": f"about {tell_bytes(needs.disk_bytes)} while it runs, with the output{cached}",
        "time": _describe_time(plan, downloads=bool(missing)),
        "push": f"to {plan.recipe.output.push_to}" if plan.recipe.output.push_to else "no",
    }
    for name, text in lines.items():
        for line in fold(text, OUT.width, f"{name:<11} ", " " * 12):
            OUT.print(escape(line), soft_wrap=True)
    downloaded = "Only small files were downloaded. " if any(plan.inputs.commits) else ""
    start = "" if plan.stops or plan.is_finished else "Leave out --dry-run to start."
    if downloaded or start:
        _hint(f"{downloaded}{start}".strip())


def _describe_refining(plan: Plan) -> str:
    if plan.refining is None:
        return "no"
    how = f"by {plan.refining.steps} steps of distillation, with {plan.refining.texts} examples per task in each"
    most = max(fitted for fitted, _ in plan.example_counts.values())
    if plan.refining.blocks_on and plan.refining.blocks_on < most:
        how += f", after blocks are calibrated on {plan.refining.blocks_on} examples of each task"
    return how if plan.recipe.calibration.refine else f"{how} (--no-refine leaves it out)"


def describe_download(missing: int, here: int) -> str:
    if not missing:
        return "nothing"
    return tell_bytes(missing) + (f"; {tell_bytes(here)} are here already" if here else "")


def _describe_time(plan: Plan, *, downloads: bool) -> str:
    seconds = plan.time and plan.time.range
    if not seconds:
        return "not known for this kind of job; the run tells what is left"
    return f"about {tell_range(*seconds)} on this machine{', after the download' if downloads else ''}"


def _describe_examples(plan: Plan) -> Iterator[str]:
    """Yield a phrase for each group of tasks from which as many examples are taken."""
    tasks: dict[tuple[int, int], list[str]] = {}
    for task, counts in plan.example_counts.items():
        tasks.setdefault(counts, []).append(task)
    for (fitted, held_out), named in tasks.items():
        at_most = "at most " if fitted == plan.recipe.calibration.examples else "about "
        at_most = "" if all(plan.examples[task].is_whole for task in named) else at_most
        whose = "per task" if len(tasks) == 1 else f"of {enumerate_names(named)}"
        yield f"{at_most}{fitted} to fit and {held_out} to hold out {whose}"


def show_calibration(
    report: Report, output: Path, pushed: Pushed | None, seconds: float | None, next_steps: Iterable[str] = ()
) -> None:
    """Show the result of a calibration, its output folder, and its duration (None if an earlier run computed it), and
    lines on what to do next."""
    _show_drift(report)
    of_run = {0: "held-out ", len(report.drift): "calibration "}.get(len(report.fitted_tasks), "")
    for scores in report.scores:
        OUT.print()
        _show_scores(scores, "" if scores is report.accuracy else of_run)
    OUT.print()
    if report.worse:
        grown = f"{report.judged_by} grew on {', '.join(report.worse)}"
        _print(f"warning: {grown}: look at this before you publish", ERR, "bold red")
    places = [str(output), *([pushed.url] if pushed else [])]
    told = [_describe_scores(scores, leads=not place) for place, scores in enumerate(report.scores)]
    text = f"{', '.join(told)} and {_describe_drift(report)}" if told else _describe_drift(report)
    where = " and at ".join(places)
    took = "" if seconds is None else f" in {tell_seconds(seconds)}"
    _print(f"{text[:1].upper()}{text[1:]}{took}; the calibrated model is in {where}.")
    for step in next_steps:
        _hint(step)


def list_next_steps(report: Report, output: Path, pushed: Pushed | None, how: RunOptions) -> list[str]:
    """List what a user may want to do with a calibrated model, in at most three lines. how: the run's options, which
    a suggested command keeps as far as it has them."""
    folder = shlex.quote(str(output))
    lines = [f"{folder}/{PICTURE} shows the drift by block, {CARD} how to load the model."]
    can_be_measured = any(task.get("evaluate") for task in report.recipe["tasks"].values())
    # without --gpus, as evaluation is made for one process
    line = ["featcal", "evaluate", str(output), *_list_options(how)]
    commands = [f"`{shlex.join(line)}`"] if can_be_measured and not report.accuracy else []
    if not (pushed or report.has_grown):
        commands.append("this command with --push-to USER/NAME")
    if commands:
        lines.append(f"Next: {', or '.join(commands)}.")
    last = []
    if str(report.loading.get("model_class")).endswith("ForCausalLM"):
        last.append("vLLM serves it, llama.cpp makes a GGUF.")
    if pushed and how.overwrite_repo:
        last.append(f"`git revert {pushed.commit[:7]}` undoes the push.")
    elif isinstance(report.recipe.get("merged"), str):
        last.append("The merged model is unchanged.")
    return [*lines, " ".join(last)] if last else lines


def _list_options(how: RunOptions) -> Iterator[str]:
    """Yield the words of the options by which models are loaded and run."""
    yield from ["--device", how.device] if how.device != "auto" else []
    yield from ["--batch-size", str(how.batch_size)] if how.batch_size else []
    flags = {"--allow-pickle": how.allow_pickle, "--trust-remote-code": how.trust_remote_code}
    yield from (name for name, given in {**flags, "--allow-code-execution": how.allow_code}.items() if given)


def describe_saved(context: Context, file: Path, said: Iterable[str]) -> str:
    """Return a note with the command for a saved dry run: options that were typed, but not those in `said`."""
    line = ["featcal", *list_launch_words(), str(context.info_name), "-r", str(file)]
    leave_out = {*said, "recipe", "dry_run", "save"}
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in leave_out and source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            line += [max(parameter.opts, key=len), *([] if value is True else [str(value)])]
    return f"{file} has the whole job; to run it: `{shlex.join(line)}`"


def _describe_drift(report: Report) -> str:
    change, what = tell_change(*report.mean_judged), f"mean {report.judged_by}"
    if change in ("0 %", "new"):
        return f"{what} {'grew' if change == 'new' or report.has_grown else 'stayed as it was'}"
    return f"{what} {'fell' if change[0] == '-' else 'grew'} by {change[1:]}"


def _describe_scores(tasks: Mapping[str, TaskScores], *, leads: bool = True) -> str:
    """Return a phrase on what the calibrated model has won back of what merging lost. leads: it begins the sentence."""
    means, metric, regained = average_tasks(tasks), common_metric(tasks), describe_regained(tasks)
    before, after, known = means[MERGED], means[CALIBRATED], find_metric(metric)
    verb = "fell" if after.value < before.value else "rose"
    if not known.unit:
        shown, what = show_values(means, metric), known.title.lower()
        nats = {role: show_nats(loss) for role, loss in average_nats(tasks).items()}
        if nats and shown[MERGED] == shown[CALIBRATED] and nats[MERGED] != nats[CALIBRATED]:
            # the mean over texts is less certain than a difference on the same texts
            shown, what = nats, "nats per token"
        was, now = shown[MERGED], shown[CALIBRATED]
        moved = f"{what} {verb} from {was} to {now}" if was != now else f"{what} stayed at {now}"
        if not regained or was == now:
            return moved
        return f"won back {regained} ({moved})" if leads else f"{moved} ({regained})"
    word = "accuracy" if {scores.metric for scores in tasks.values()} == {"accuracy"} else "the mean score"
    won = f" ({regained})" if regained else ""
    points = show_change(means, MERGED, CALIBRATED, metric).lstrip("+-")
    return f"{word} {verb} by {points} points{won}" if points != "0.0" else f"{word} stayed as it was"


def _show_drift(report: Report) -> None:
    if report.has_grown or report.fitted_tasks or report.is_unchanged:
        colour = "bold red" if report.has_grown else "bold"
        OUT.print(f"[{colour}]{escape(report.headline[0].upper() + report.headline[1:])}[/]")
    what = f"{report.judged_by[0].upper()}{report.judged_by[1:]} from the experts'"
    what = what if report.output_distances else "Drift of the last block's features"
    OUT.print(f"{what} {escape(report.measured_on)}; 0 is the expert:")
    rows = [[escape(row.task), *row.cells] for row in report.judged_rows]
    OUT.print(make_table(("task", "merged", "calibrated", "change", "base")[: len(rows[-1])], rows))
    if report.fitted_tasks:
        OUT.print("Figures on calibration examples say little for new ones.")


def show_evaluation(evaluation: Evaluation, seconds: float) -> None:
    _show_scores(evaluation.tasks, "randomly chosen " if evaluation.limit is not None else "")
    OUT.print()
    tasks = len(evaluation.tasks)
    _print(f"Measured on {tasks} task{'s' if tasks > 1 else ''} in {tell_seconds(seconds)}.")


def _show_scores(tasks: Mapping[str, TaskScores], which: str = "") -> None:
    """Print the scores of every model on every task below a line on the table; `which`: a word for the examples."""
    means = average_tasks(tasks)
    others = [role for role in means if role not in (EXPERT, MERGED, BASE)]
    used = [METRICS.get(scored.metric) for scored in tasks.values()]
    rows = []
    for (task, scored), metric in zip(tasks.items(), used, strict=True):
        mark = f" ({metric.symbol})" if metric and metric.symbol else ""
        rows.append(_write_scores(escape(task) + mark, scored.scores, scored.metric, others))
    if len(tasks) > 1:
        rows.append(_write_scores("mean", means, common_metric(tasks), others))
    if nats := average_nats(tasks):
        # of what is shown, so that readers who subtract find the same
        rounded = {role: round(loss, 3) for role, loss in nats.items()}
        change = [show_nats(rounded[others[0]] - rounded[MERGED], "+")] if len(others) == 1 and MERGED in nats else []
        shown = {role: show_nats(loss) for role, loss in nats.items()}
        base = [shown.pop(BASE)] if BASE in shown else []
        rows.append(["nats/token", *shown.values(), *change, *base])
    titles = [metric.title for metric in METRICS.values() if metric in used]
    title = ", and ".join([*titles[:1], *(f"{more} where marked," for more in titles[1:])])
    counts = [score.examples for scored in tasks.values() for score in scored.scores.values()]
    count = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    known = find_metric(common_metric(tasks))
    what = f"{'Scores' if None in used else title} in percent" if known.unit else title
    rows_used = f"{which}{'texts' if known.of_texts else 'labelled examples'} per task"
    rows_used += "; lower is better" * known.lower_is_better
    OUT.print(f"{what}, ± 95 % interval, on {count} {rows_used}:")
    change = ["change" if known.lower_is_better else "gain"] if len(others) == 1 else []
    heads = ["task", *(escape(role) for role in means if role != BASE), *change, *([BASE] if BASE in means else [])]
    OUT.print(make_table(heads, rows, overflow="fold"))


def _write_scores(name: str, scores: Mapping[str, Score], metric: str, others: Sequence[str]) -> list[str]:
    """Return a row of scores. The difference of one further model from merged comes after it, a base last."""
    shown = show_scores(scores, metric)
    base = [shown.pop(BASE)] if BASE in shown else []
    change = [show_change(scores, MERGED, others[0], metric)] if len(others) == 1 and MERGED in scores else []
    return [name, *shown.values(), *change, *base]


def show_inventory(inventory: Inventory) -> None:
    """Show a model's blocks and their modules; neighbouring blocks with equal modules are shown once."""
    size = write_count(inventory.parameters)
    OUT.print(f"[bold]{escape(inventory.model)}[/bold]: {escape(inventory.model_class)}, {size} parameters")
    share = f"{int(inventory.share * 1000) / 10:g} %"  # never rounded up to all
    OUT.print(f"{share} of the parameters inside blocks are calibrated")
    neighbours = groupby(inventory.blocks, lambda block: (block.name.rpartition(".")[0], block.modules, block.skipped))
    for first, *rest in (list(blocks) for _, blocks in neighbours):
        name = f"{first.name} … {rest[-1].name.rpartition('.')[2]}" if rest else first.name
        size = write_count(sum(module.parameters for module in first.modules))
        count = f"{len(rest) + 1} blocks, each" if rest else "one block"
        OUT.print(f"\n[bold]{escape(name)}[/bold] ({count}: {len(first.modules)} modules, {size} parameters)")
        rows = [[escape(module.name), escape(module.kind), write_count(module.parameters)] for module in first.modules]
        for skipped in first.skipped:
            rows.append([f"[dim]{escape(text)}[/dim]" for text in (skipped["name"], "as merged", skipped["reason"])])
        OUT.print(make_list(rows, indent=2))


def show_recipes(files: Sequence[Path]) -> None:
    purposes = {file.stem: describe_recipe(file) for file in files} | {"": ""} | COMPANIONS
    OUT.print(make_list([f"[bold]{escape(name)}[/bold]", escape(purpose)] for name, purpose in purposes.items()))
    ERR.print()
    _hint("Print one with `featcal recipes NAME`, or calibrate with it: `featcal calibrate -r NAME`.")


def show_demo() -> None:
    _hint(
        "Five experts were fine-tuned from one small vision transformer, each for another question about handwritten "
        "digits, and merged by task arithmetic. The demo calibrates the merged model; `featcal recipes demo` shows its "
        "recipe."
    )
    ERR.print()


def show_findings(findings: Sequence[Finding]) -> None:
    """Print each of doctor's findings, wrapped at words, with the fix and the command for it below."""
    width = max(len(finding.name) for finding in findings)
    indent, room = " " * (width + 4), OUT.width - width - 4
    for finding in findings:
        first, *rest = fold(finding.text, room, rest="")
        OUT.print(f"{MARKS[finding.state]} {finding.name:<{width}}  {escape(first)}", soft_wrap=True)
        for line in rest:
            OUT.print(escape(f"{indent}{line}"), soft_wrap=True)
        for line in fold(f"fix: {finding.fix}", room, rest="     ") if finding.fix else ():
            OUT.print(f"{indent}[bold]{escape(line)}[/]", soft_wrap=True)
        if finding.command:
            OUT.print(f"{indent}     {escape(finding.command)}", soft_wrap=True)
    problems = sum(finding.state == "problem" for finding in findings)
    verdicts = {0: "All is well.", 1: "One thing would stop a run."}
    OUT.print(f"\n{verdicts.get(problems, f'{problems} things would stop a run.')}")


def _print(text: str, console: Console = OUT, style: str = "none") -> None:
    for line in fold(text, console.width, rest=""):
        console.print(f"[{style}]{escape(line)}[/]", soft_wrap=True)


def _hint(text: str) -> None:
    _print(text, ERR, "dim")
