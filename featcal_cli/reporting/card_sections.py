"""The parts of a model card."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from featcal_cli.calibration.results import describe_guard
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED
from featcal_cli.hub.model_names import is_hub_id
from featcal_cli.reporting.markdown import inert, one_line, without_paths
from featcal_cli.reporting.report import PICTURE, RECIPE, REPORT, Report, Source

HUB = "https://huggingface.co"
LISTED = 12
"""Lines of a list that are shown."""
CITATION = """\
@misc{gu2026featcal,
  title         = {FeatCal: Feature Calibration for Post-Merging Models},
  author        = {Gu, Yanggan and Cai, Shuo and Wang, Zihao and Wang, Wenjun and Wang, Yuanyi and Wang, Pengkai and
                   Huang, Sirui and Lu, Su and Wu, Jianmin and Yang, Hongxia},
  year          = {2026},
  eprint        = {2605.13030},
  archivePrefix = {arXiv},
  primaryClass  = {cs.LG},
  url           = {https://arxiv.org/abs/2605.13030}
}"""


def write_sections(
    report: Report,
    *,
    name: str,
    target: str | None,
    loaders: Sequence[str],
    agreed: str | None,
) -> Iterator[str]:
    """The parts of a card's body, in order. loaders: the classes of transformers that load model and processor;
    agreed: the licence of all models, None where they do not agree; the rest is as in `write_card`."""
    place = target or name
    yield f"# {inert(place.rpartition('/')[2])}"
    if report.has_grown:
        said = inert(report.headline.removeprefix("WARNING: "))
        yield f"> **Warning:** {said}: this model is further from its experts than the merged one."
    if report.worse:
        worse = ", ".join(inert(task) for task in report.worse)
        yield f"> **Warning:** drift grew on {worse}: there this model is further from its expert than the merged one."
    yield _summary(report)
    yield from write_drift(report)
    yield "## Use"
    yield _fenced("python", _loading(place, loaders))
    yield "## How it was made"
    yield _settings(report)
    yield _cost(report)
    if report.sources:
        yield "### Sources"
        yield "\n".join(_sources(report))
    yield "### Left as merged"
    yield _listed(_left_alone(report))
    if report.notes:
        yield "### Found and chosen on the way"
        yield _listed([_message(note, report) for note in dict.fromkeys(report.notes)])
    yield "### Run it again"
    yield from _rerun(report, target, name)
    yield "## Limits"
    yield "\n".join(f"- {line}" for line in _limits(report, agreed))
    yield "## Citation"
    yield _fenced("bibtex", CITATION)


def models_of(report: Report) -> list[Source]:
    """Merged, base and experts, in this order."""
    order = {"merged": 0, "base": 1, "expert": 2}
    found = [source for source in report.sources if source.role.partition(" ")[0] in order]
    return sorted(found, key=lambda source: order[source.role.partition(" ")[0]])


def data_of(report: Report) -> list[Source]:
    """The sources of the examples."""
    return [source for source in report.sources if source.role.startswith("data ")]


def on_hub(source: Source) -> bool:
    """Whether a source is a repo of the Hub, with a name that can be linked to."""
    return source.commit is not None and is_hub_id(source.name)


def _summary(report: Report) -> str:
    """What was done, in two sentences, and what came of it."""
    merged = next((source for source in report.sources if source.role == "merged"), None)
    counts = report.settings["examples"].values()
    examples = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    experts = "the expert's" if len(report.drift) == 1 else f"those of its {len(report.drift)} experts"
    before, after = report.means
    return (
        f"This is {_link(merged) if merged else _built_in(report)}, mended by featcal {inert(report.featcal_version)}: "
        f"its weights were calibrated, in closed form and without gradients, to bring its features closer to "
        f"{experts}, on {examples} unlabelled examples per task ([FeatCal](https://arxiv.org/abs/2605.13030)). Files, "
        "tensor names, shapes and dtypes are the merged model's, so whatever loads that one loads this one.\n\n"
        f"Mean drift from the experts, {inert(report.rows)}: **{before:.3f} → {after:.3f}** ({_change(before, after)})."
        + (" No update helped: all weights are the merged model's." if report.settings.get("step") == 0 else "")
    )


def _built_in(report: Report) -> str:
    """In words, the merge that featcal made itself."""
    merged = report.recipe.get("merged")
    found = merged if isinstance(merged, Mapping) else {}
    scale = f", scale {found['scale']:g}" if "scale" in found else ""
    return f"a merge of its experts ({inert(str(found.get('method', 'unknown')))}{scale})"


def _loading(place: str, loaders: Sequence[str]) -> str:
    names = [name if name.isidentifier() else "AutoModel" for name in loaders]
    where = json.dumps(one_line(place), ensure_ascii=False)
    lines = [
        f"from transformers import {', '.join(names)}",
        "",
        f'model = {names[0]}.from_pretrained({where}, dtype="auto")',
    ]
    return "\n".join([*lines, *(f"processor = {name}.from_pretrained({where})" for name in names[1:])])


def _settings(report: Report) -> str:
    settings = report.settings
    modules = [module for block in report.blocks for module in block.modules]
    changes = sorted(module.relative_change for module in modules)
    kinds = ", ".join(f"{count} {inert(kind)}" for kind, count in Counter(m.kind for m in modules).most_common())
    text = (
        f"λ (ridge) = {settings['ridge']:g}, ρ (rho) = {settings['rho']:g}, α (alpha) = {settings['alpha']:g}; chosen "
        f"by: {_message(settings['chosen_by'], report)}."
    )
    text += (
        f" Norms: {inert(str(settings['norms']))}; biases: {'calibrated' if settings['bias'] else 'as merged'}; token "
        f"weights: {inert(str(settings['token_weights']))}. "
        f"In {len(report.blocks)} blocks, {len(modules)} modules were calibrated ({kinds or 'none'})."
    )
    if guarded := describe_guard(report.blocks):
        text += f" {guarded[0].upper()}{guarded[1:]}."
    if 0 < (step := report.settings.get("step", 1.0)) < 1:
        text += (
            f" All updates were pulled back together, to {step:g} of themselves, as mean drift grew on held-out rows."
        )
    if changes:
        middle, most = changes[len(changes) // 2], changes[-1]
        text += f" Their weights moved by {100 * middle:.0f} % (median) and by {100 * most:.0f} % at most."
    return text


def _cost(report: Report) -> str:
    cost, found = report.cost, {key: inert(value) for key, value in report.environment.items()}
    device = f" and {_size(cost['peak_device_bytes'])} on the device" if cost["peak_device_bytes"] else ""
    return (
        f"This took {_duration(cost['seconds'])} on {found['device']}, {_size(cost['peak_rss_bytes'])} of memory"
        f"{device} at the peak, and read {_size(cost['expert_bytes_read'])} of the experts' weights "
        f"(torch {found['torch']}, transformers {found['transformers']}, {found['platform']})."
    )


def _sources(report: Report) -> Iterator[str]:
    yield "| role | source | commit | licence | found in |"
    yield "| --- | --- | --- | --- | --- |"
    for source in report.sources:
        commit = f"`{source.commit[:12]}`" if source.commit and on_hub(source) else "local"
        cells = [inert(source.role), _link(source), commit, inert(source.license or "not said")]
        yield f"| {' | '.join(cells)} | {_message(source.found_in, report)} |"


def _left_alone(report: Report) -> list[str]:
    skipped = Counter((found["name"], found["reason"]) for block in report.blocks for found in block.skipped)
    lines = ["embeddings, final norms, poolers and heads"]
    for (name, reason), count in skipped.most_common():
        blocks = "1 block" if count == 1 else f"{count} blocks"
        lines.append(f"{inert(name)} in {blocks}: {_message(reason, report)}")
    return lines


def _rerun(report: Report, target: str | None, name: str) -> Iterator[str]:
    command = f"featcal calibrate -r {RECIPE} -o {shlex.quote(one_line(name) + '-again')}"
    if target:
        command = f"hf download {shlex.quote(one_line(target))} {RECIPE} --local-dir .\n{command}"
    yield f"`{RECIPE}` names every model and dataset of the Hub by its commit; `{REPORT}` holds all its figures."
    yield _fenced("sh", command)
    if any(not on_hub(source) for source in report.sources):
        yield "What is marked local lay on the machine where this was made: in the recipe, put your own paths for it."


def _limits(report: Report, agreed: str | None) -> Iterator[str]:
    yield "Drift was measured on few examples per task, and it is not accuracy: evaluate on your own data."
    yield "The experts are the aim: what they get wrong, this model may get wrong too."
    yield "Only Linear modules and norms inside of transformer blocks were calibrated."
    models = models_of(report)
    if agreed:
        yield f"Licence: all models that it was made from say {inert(agreed)}. The datasets have their own."
    elif models:
        said = ", ".join(dict.fromkeys(inert(source.license) for source in models if source.license))
        silent = sum(source.license is None for source in models)
        said += f"{'; ' if said else ''}{silent} of {len(models)} name none" if silent else ""
        yield f"No licence is carried over: the models that it was made from do not all name the same one ({said})."


def _link(source: Source) -> str:
    """A source's page at its commit; of a local one the last part of its path."""
    if not on_hub(source):
        return inert(Path(source.name).name)
    kind = "datasets/" if source.role.startswith("data ") else ""
    return f"[{inert(source.name)}]({HUB}/{kind}{source.name}/tree/{source.commit})"


def _message(text: str, report: Report) -> str:
    """A message of featcal's own, which may hold names and paths, for the card."""
    for source in report.sources:
        if source.commit is None and Path(source.name).is_absolute():
            text = text.replace(source.name, Path(source.name).name)
    return inert(without_paths(text), longest=400)


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - LISTED} more, in `{REPORT}`"] if len(lines) > LISTED else []
    return "\n".join(f"- {line}" for line in [*lines[:LISTED], *more])


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


Accuracy = Mapping[str, tuple[float, float, float]]
"""By task, the accuracy of expert, merged and calibrated model, 0 to 1."""


def write_drift(report: Report) -> Iterator[str]:
    """The parts of the section on drift, in order, with the accuracy where it was measured."""
    accuracy = _read_accuracy(report)
    every = len(report.fitted_tasks) == len(report.drift)
    yield "## Drift from the experts" + (", on fitted rows" if every else "")
    yield _how_measured(report, accuracy)
    yield "\n".join(_table(report, accuracy))
    if answers := list(_answers(report)):
        yield "\n".join(answers)
    if farther := [inert(task) for task, drift in report.drift.items() if drift.before > drift.base]:
        yield (
            f"On {', '.join(farther)} the merged model is farther from its expert than the base model is: there "
            "merging was worse than doing nothing, and a smaller merging scale usually helps."
        )
    if report.curves:
        yield f"![Drift from each task's expert after every block, before and after calibration]({PICTURE})"


def _read_accuracy(report: Report) -> Accuracy:
    roles = (EXPERT, MERGED, CALIBRATED)
    found = {task: [each.scores[role] for role in roles] for task, each in report.accuracy.items()}
    return {task: (scores[0].value, scores[1].value, scores[2].value) for task, scores in found.items()}


def _how_measured(report: Report, accuracy: Accuracy) -> str:
    held_out = {drift.held_out for drift in report.drift.values()}
    where = "examples that were not fitted."
    if held_out == {False}:
        where = "**the examples that were fitted**, because there were no others; on new ones it will be larger."
    elif len(held_out) == 2:
        where += " Where a task is marked \\*, there were none, and **it is measured on the fitted ones**."
    ranked = [inert(task) for task, found in report.accuracy.items() if found.metric == "spearman"]
    ranks = f" (of {', '.join(ranked)}: 100 · Spearman's ρ)" if ranked else ""
    scores = f" Accuracy is in percent, on labelled data{ranks}." if accuracy else ""
    return f"Drift is mean ‖h − h_expert‖ / mean ‖h_expert‖ after the last block, on {where} 0 is the expert.{scores}"


def _table(report: Report, accuracy: Accuracy) -> Iterator[str]:
    """Drift per task, with the accuracy where it was measured, and the means."""
    heads = ["task", "merged", "calibrated", "change", "base"]
    if accuracy:
        heads = ["task", "drift: merged", "calibrated", "change", "base", "accuracy: expert", "merged", "calibrated"]
    missing = ["–"] * (len(heads) - 5)
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    some_held_out = any(drift.held_out for drift in report.drift.values())
    for task, drift in report.drift.items():
        mark = " \\*" if some_held_out and not drift.held_out else ""
        scores = _percents(accuracy[task]) if task in accuracy else missing
        yield _row(inert(task) + mark, (drift.before, drift.after, drift.base), scores)
    if len(report.drift) > 1:
        drifts = [(drift.before, drift.after, drift.base) for drift in report.drift.values()]
        scored = [accuracy[task] for task in report.drift if task in accuracy]
        means = _percents(map(_mean, zip(*scored, strict=True))) if len(scored) == len(drifts) else missing
        yield _row("**mean**", tuple(map(_mean, zip(*drifts, strict=True))), means)


def _row(task: str, drift: tuple[float, ...], scores: Iterable[str]) -> str:
    before, after, base = drift
    cells = [task, f"{before:.3f}", f"{after:.3f}", _change(before, after), f"{base:.3f}", *scores]
    return f"| {' | '.join(cells)} |"


def _answers(report: Report) -> Iterator[str]:
    """What drift does to the answers of the experts that give some, run with their own heads; nothing for the rest."""
    models = {task: found.models for task, found in report.measures.items()}
    outputs = {task: (found["merged"].output, found["calibrated"].output) for task, found in models.items() if found}
    rows = []
    for task, (before, after) in outputs.items():
        if before and after and before.agreement is not None and after.agreement is not None:
            agreed = f"{100 * before.agreement:.0f} % → {100 * after.agreement:.0f} %"
            rows.append(f"| {inert(task)} | {agreed} | {before.divergence:.3f} → {after.divergence:.3f} |")
    if rows:
        yield "With its last features put under each expert's own head, merged → calibrated:"
        yield ""
        yield "| task | same first choice as the expert | KL from the expert, nats |"
        yield "| --- | ---: | ---: |"
        yield from rows


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _change(before: float, after: float) -> str:
    if before == 0:
        return "0 %" if after == 0 else "new"
    return f"{100 * (after - before) / before:+.0f} %".replace("-", "−")


def _percents(values: Iterable[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]
