"""What a model card says about a run: the drift, the settings, the sources, how to use it and to run it again."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from featcal_cli.drift_section import _change, write_drift
from featcal_cli.markdown import inert, one_line, without_paths
from featcal_cli.references import is_hub_id
from featcal_cli.report import RECIPE, REPORT, Report, Source
from featcal_cli.results import describe_guard

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
