"""The model card of an output: metadata, and a run's report in words and tables."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from featcal_cli.calibration.results import describe_guard, describe_kinds
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED, average_tasks
from featcal_cli.hub.model_source import is_hub_id
from featcal_cli.reporting.markdown import (
    join_notes,
    write_accuracy,
    write_adapter,
    write_distances,
    write_drift_cells,
    write_percent,
    write_row,
)
from featcal_cli.reporting.report import CARD, ITSELF, RECIPE, REPORT, Report, Source
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.progress import tell_seconds
from featcal_cli.runtime.sanitise import for_markdown, one_line, without_folders, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml, split_front_matter

MODELS = ("merged", "base", "expert")
HUB = "https://huggingface.co"
METRICS = {
    "features": "Errors are measured on features, as in the paper.",
    "output": "Errors are measured by their effect on each expert's outputs.",
}
ORDERS = {
    "block": "The modules of a block were solved together, as in the paper.",
    "module": "Modules were solved one after another, each on what the calibrated ones before it give.",
}
"""Sentences of the card on metric and order; reports of earlier versions name none."""
MARK = "<!-- This card was written by featcal. -->"
MERGED_CARD = "README.merged.md"
"""File name of the merged model's own card in an output, where no page of the Hub shows it."""
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
"""Pattern of the Hub's names of licences."""
TASK_TYPES = {
    "zero-shot": "zero-shot-image-classification",
    "generation": "text2text-generation",
    "lm-eval": "text-generation",
}
"""The Hub's task type for each protocol; the model's own one is taken for heads."""
VARIABLES = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "image_processor"}
"""Names of variables for these classes in the code of a card; all others are called processor."""
FEATURES = ("feature-extraction", "image-feature-extraction")
"""The Hub's names of the task of models without a head."""
LISTED = 12
"""The most lines of a list that are shown."""
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


def write_card(
    report: Report,
    *,
    name: str,
    target: str | None = None,
    merged_readme: str | None = None,
    model_class: str = "AutoModel",
    processor_class: str | None = None,
    pipeline_tag: str | None = None,
) -> str:
    """The text of README.md, which shows drift.png where the report has curves.

    name: of the output folder; target: the Hub id that it is pushed to, if any; merged_readme: the merged model's own
    card, whose metadata are used; model_class and processor_class: names in transformers whose from_pretrained loads
    the output; pipeline_tag: used where the merged card has none.
    """
    merged_data = _read_metadata(merged_readme or "")
    data = _write_metadata(report, merged_data, target, pipeline_tag)
    if results := list(_list_results(report, data.pipeline_tag)):
        data.model_name, data.eval_results = one_line((target or name).rpartition("/")[2]), results
    loading = _write_loading(target or name, pipeline_tag, model_class, processor_class)
    agreed = data.license_name or data.license
    sections = _write_sections(report, name, target, (model_class, loading), agreed, has_card=bool(merged_readme))
    text = "\n\n".join([MARK, *sections])
    metadata = data.to_dict()  # type: ignore[no-untyped-call]
    return without_tokens(f"---\n{dump_yaml(metadata)}---\n\n{text}\n")


def copy_merged_card(report: Report, readme: str | None) -> dict[str, bytes]:
    """The merged model's own card by its file name in the output; empty where there is none, or the Hub has it."""
    if not readme or any(map(_on_hub, _find_sources(report, "merged"))):
        return {}
    return {MERGED_CARD: without_tokens(readme).encode("utf-8", "replace")}


def read_license(readme: str | None) -> str | None:
    """The licence that a card names, "other: NAME" for one with a name of its own; None where it cannot be told."""
    data = _read_metadata(readme or "")
    name = data.get("license")
    if isinstance(name, list) and len(name) == 1:
        name = name[0]
    if not isinstance(name, str) or not LICENSE.fullmatch(name) or name == "unknown":
        return None
    if name != "other":
        return name
    own = data.get("license_name")
    return f"other: {one_line(own)}" if isinstance(own, str) and one_line(own) else None


def _read_metadata(text: str) -> dict[str, Any]:
    """The metadata of a card; metadata that are not YAML, or not a mapping, count as empty."""
    return split_front_matter(text.removeprefix("\ufeff").replace("\r\n", "\n"))[0] or {}


def _write_metadata(
    report: Report, merged: Mapping[str, Any], target: str | None, pipeline_tag: str | None
) -> ModelCardData:
    """The metadata of the card. base_model lists merged first, to which the output is closest, then base and experts:
    the weights are computed from every one of them, and the Hub has one relation for the whole list."""
    models = [name for name in _find_repos(report, *MODELS) if name != target]
    languages = [code for code in _texts(merged.get("language")) if re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)]
    pipelines = [tag for tag in _texts([merged.get("pipeline_tag"), pipeline_tag]) if re.fullmatch(r"[a-z0-9-]+", tag)]
    licenses = {source.license for source in _find_sources(report, *MODELS)}
    license_, _, license_name = ((licenses.pop() if len(licenses) == 1 else None) or "").partition(": ")
    agree = LICENSE.fullmatch(license_) and license_name == one_line(license_name)
    link = merged.get("license_link")
    known = agree and license_name and isinstance(link, str) and re.fullmatch(r"https?://\S+|LICENSE(\.\w+)?", link)
    return ModelCardData(
        base_model=models or None,
        base_model_relation="merge" if models else None,
        datasets=_find_repos(report, "data") or None,
        language=languages or None,
        library_name="transformers",
        pipeline_tag=next(iter(pipelines), None),
        tags=_unique(["featcal", "merge", *_texts(merged.get("tags"))]),
        license=license_ if agree else None,
        license_name=(agree and license_name) or None,
        license_link=link if known else None,
    )


def _list_results(report: Report, pipeline_tag: str | None) -> Iterator[EvalResult]:
    """The calibrated model's scores for the Hub's index of results."""
    names = {source.role: source.name for source in _find_sources(report, "data") if _on_hub(source)}
    for task, scores in report.accuracy.items():
        by_lm_eval = scores.protocol == "lm-eval"
        yield EvalResult(
            task_type=TASK_TYPES.get(scores.protocol) or pipeline_tag or "other",
            dataset_type=scores.metric if by_lm_eval else names.get(f"data {task}", one_line(task, 80)),
            dataset_name=one_line(f"{task} ({scores.metric if by_lm_eval else scores.split})", 80),
            metric_type={"spearman": "spearmanr"}.get(scores.metric, "accuracy"),
            metric_value=round(scores.scores[CALIBRATED].value, 5),
        )


def _texts(value: object) -> list[str]:
    """The short texts in a value of somebody's metadata."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text and text == one_line(text, 80)]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _find_sources(report: Report, *kinds: str) -> list[Source]:
    """The sources whose roles begin with these words, in their order."""
    return [source for kind in kinds for source in report.sources if source.role.partition(" ")[0] == kind]


def _find_repos(report: Report, *kinds: str) -> list[str]:
    return _unique(source.name for source in _find_sources(report, *kinds) if _on_hub(source))


def _on_hub(source: Source) -> bool:
    """Whether a source is a repo of the Hub, with a name that can be linked to."""
    return source.commit is not None and is_hub_id(source.name)


def _write_sections(
    report: Report, name: str, target: str | None, loading: tuple[str, str], agreed: str | None, *, has_card: bool
) -> Iterator[str]:
    """The parts of a card's body, in order. loading: a class of transformers, and the code that loads the output
    by it. agreed: the licence of all models, None where they do not agree. has_card: the merged model has a card
    of its own."""
    model_class, code = loading
    yield f"# {for_markdown((target or name).rpartition('/')[2])}"
    if report.has_grown:
        headline = for_markdown(report.headline.removeprefix("WARNING: "))
        yield f"> **Warning:** {headline}: this model is further from its experts than the merged one."
    if report.worse:
        worse = ", ".join(map(for_markdown, report.worse))
        what = f"{report.judged_by} grew on {worse}"
        yield f"> **Warning:** {what}: there this model is further from its expert than the merged one."
    yield _summarise(report)
    merged = next(iter(_find_sources(report, "merged")), None)
    if has_card and merged:
        at_hub = f"{HUB}/{merged.name}/blob/{merged.commit}/{CARD}"
        yield f"The merged model has [a card of its own]({at_hub if _on_hub(merged) else MERGED_CARD})."
    yield f"## Use\n\n{_fence('python', code)}"
    if report.adapter and merged:
        commit = merged.commit if _on_hub(merged) else None
        yield write_adapter(report.adapter, merged.name, commit, target or name, model_class)
    yield from write_accuracy(report)
    yield from write_distances(report)
    yield f"## How it was made\n\n{_describe_settings(report)}"
    yield _describe_cost(report)
    yield from _write_sources(report)
    skipped = Counter((entry["name"], entry["reason"]) for block in report.blocks for entry in block.skipped)
    left = [
        f"{for_markdown(name)} in {count} block{'s' if count > 1 else ''}: {_show_message(reason, report)}"
        for (name, reason), count in skipped.most_common()
    ]
    outside = "embeddings of tokens" if report.settings.get("stems") else "embeddings"
    yield f"### Left unchanged\n\n{_write_list([f'{outside}, final norms, poolers and heads', *left])}"
    if report.notes:
        notes = [_show_message(note, report) for note in join_notes(report.notes, report.drift)]
        yield f"### Notes\n\n{_write_list(notes)}"
    download = f"hf download {shlex.quote(one_line(target))} {RECIPE} --local-dir .\n" if target else ""
    command = f"{download}featcal calibrate -r {RECIPE} -o {shlex.quote(one_line(name) + '-again')}"
    what = f"`{RECIPE}` names every model and dataset of the Hub by its commit; `{REPORT}` holds all its figures."
    yield f"### Run it again\n\n{what}\n\n{_fence('sh', command)}"
    if not all(_on_hub(source) or source.name == ITSELF for source in report.sources):
        yield "Sources marked local are files of the machine where this was made: put your own paths in the recipe."
    yield f"## Limits\n\n{_write_list(list(_list_limits(report, agreed)))}"
    yield f"## Citation\n\n{_fence('bibtex', CITATION)}"


def _summarise(report: Report) -> str:
    """Two sentences on what was done, and one on the result."""
    merge = merge if isinstance(merge := report.recipe.get("merged"), Mapping) else {}
    numbers = [f"{key} {merge[key]}" for key in ("scale", "density", "seed") if key in merge]
    built = f"a merge of its experts ({for_markdown(', '.join([str(merge.get('method', 'unknown')), *numbers]))})"
    merged = next(map(_link, _find_sources(report, "merged")), built)
    counts = report.settings["examples"].values()
    examples = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    experts = "the expert's" if len(report.drift) == 1 else f"those of its {len(report.drift)} experts"
    before, after, change, *_ = write_drift_cells(report.judged_rows[-1])
    whose = "experts'" if report.output_distances else "experts"
    closer = f"{'outputs' if report.output_distances else 'features'} come closer to {experts}"
    done = f"its weights were changed in closed form, without training, so that its {closer}"
    if report.settings.get("step") == 0:
        done = f"no update let its {closer}, so all weights are the merged model's"
    text = (
        f"This is {merged}, calibrated by featcal {for_markdown(report.featcal_version)} ([FeatCal](https://arxiv.org/abs/"
        f"2605.13030)): {done}. This took {examples} unlabelled "
        "examples per task. File names, tensor names, shapes and dtypes are those of the merged model, so it loads "
        "wherever that one does.\n\n"
        f"Mean {report.judged_by} from the {whose}, {for_markdown(report.measured_on)}: **{before} → {after}** "
        f"({change})."
    )
    if report.accuracy and (means := average_tasks(report.accuracy)).keys() >= {EXPERT, MERGED, CALIBRATED}:
        shown = {role: write_percent(score) for role, score in means.items()}
        measure = "accuracy" if all(one.metric != "spearman" for one in report.accuracy.values()) else "score"
        text += f" Mean {measure}: **{shown[MERGED]} → {shown[CALIBRATED]}** % (experts: {shown[EXPERT]} %)."
    return text


def _write_loading(place: str, purpose: str | None, model: str, processor: str | None) -> str:
    """The code that loads the output by these classes of transformers, and as a pipeline where it can be one."""
    where = json.dumps(one_line(place), ensure_ascii=False)
    names = [name if name.isidentifier() else "AutoModel" for name in (model, processor) if name]
    ready = processor is not None and purpose is not None and names[0].startswith("Auto")
    if purpose in FEATURES and names[0] != "AutoModel":
        ready = False  # that pipeline would leave the head out
    lines = [
        f"from transformers import {', '.join([*names, *(['pipeline'] if ready else [])])}",
        "",
        f'model = {names[0]}.from_pretrained({where}, dtype="auto")',
    ]
    lines += [f"{VARIABLES.get(name, 'processor')} = {name}.from_pretrained({where})" for name in names[1:]]
    if ready:
        lines += ["", f"pipe = pipeline({json.dumps(purpose)}, model={where})  # or all in one"]
    return "\n".join(lines)


def _write_sources(report: Report) -> Iterator[str]:
    """A table of models and datasets, each once, with all its roles."""
    sources: dict[tuple[str, str | None], list[Source]] = {}
    for source in report.sources:
        sources.setdefault((source.name, source.commit), []).append(source)
    places = _unique(source.found_in for source in report.sources)
    heads = ["source", "used as", "commit", "licence", *(["found in"] if len(places) > 1 else [])]
    lines = [write_row(heads), write_row(["---"] * len(heads))]
    for same in sources.values():
        first = same[0]
        commit = f"`{first.commit[:7]}`" if first.commit and _on_hub(first) else "local"
        commit = "none" if first.name == ITSELF else commit
        roles = ", ".join(for_markdown(source.role) for source in same)
        cells = [_link(first), roles, commit, for_markdown(first.license or "not named")]
        if len(places) > 1:
            cells.append("; ".join(_show_message(place, report) for place in _unique(one.found_in for one in same)))
        lines.append(write_row(cells))
    if sources:
        said = f"\n\nFound in: {_show_message(places[0], report)}." if len(places) == 1 else ""
        yield "\n".join(["### Sources\n", *lines]) + said


def _describe_settings(report: Report) -> str:
    settings = report.settings
    modules = [module for block in report.blocks for module in block.modules]
    changes = sorted(module.relative_change for module in modules)
    kinds = ", ".join(f"{count} {for_markdown(kind)}" for kind, count in Counter(m.kind for m in modules).most_common())
    sentences = [
        f"Method: {for_markdown(str(settings['method']))}, with λ (ridge) = {settings['ridge']:g}, ρ (rho) = "
        f"{settings['rho']:g}, α (alpha) = {settings['alpha']:g} ({_show_message(settings['chosen_by'], report)}).",
        METRICS.get(str(settings.get("metric")), METRICS["features"]),
        ORDERS.get(str(settings.get("order")), ORDERS["block"]),
        f"Norms: {for_markdown(str(settings['norms']))}; biases: {'calibrated' if settings['bias'] else 'unchanged'}; "
        f"token weights: {for_markdown(str(settings['token_weights']))}.",
        f"In {len(report.blocks)} blocks, {len(modules)} modules were calibrated ({kinds or 'none'}).",
    ]
    if guarded := describe_guard(report.blocks):
        sentences.append(f"{guarded[0].upper()}{guarded[1:]}.")
    if 0 < (step := settings.get("step", 1.0)) < 1:
        grown = f"the mean {report.judged_by} grew on held-out rows"
        sentences.append(f"All updates were reduced to {step:g}, because {grown}.")
    if changes:
        middle, most = (f"{100 * change:.0f} %" for change in (changes[len(changes) // 2], changes[-1]))
        sentences.append(f"Their weights moved by {middle} (median) and by {most} at most.")
    return " ".join(sentences)


def _describe_cost(report: Report) -> str:
    cost, machine = report.cost, {key: for_markdown(value) for key, value in report.environment.items()}
    device = f" and {tell_bytes(cost['peak_device_bytes'])} on the device" if cost["peak_device_bytes"] else ""
    return (
        f"This took {tell_seconds(cost['seconds'])} on {machine['device']}, {tell_bytes(cost['peak_rss_bytes'])} of "
        f"memory{device} at the peak, and read {tell_bytes(cost['expert_bytes_read'])} of the experts' weights "
        f"(torch {machine['torch']}, transformers {machine['transformers']}, {machine['platform']})."
    )


def _list_limits(report: Report, agreed: str | None) -> Iterator[str]:
    judged_by = report.judged_by.capitalize()
    yield f"{judged_by} was measured on few examples per task, and it is not accuracy: evaluate on your own data."
    yield "The experts are the aim: what they get wrong, this model may get wrong too."
    calibrated = describe_kinds(report.blocks, stems=bool(report.settings.get("stems")))
    if calibrated and report.settings.get("step") != 0:
        yield for_markdown(calibrated)
    if written := [source.role.partition(" ")[2] for source in _find_sources(report, "data") if source.name == ITSELF]:
        tasks = for_markdown(", ".join(written))
        yield f"The experts wrote the examples of {tasks} themselves: real ones may serve better."
    models = _find_sources(report, *MODELS)
    if agreed:
        yield f"Licence: all models that it was made from say {for_markdown(agreed)}. The datasets have their own."
    elif models:
        silent = sum(source.license is None for source in models)
        named = ", ".join(_unique(for_markdown(source.license) for source in models if source.license))
        unnamed = f"{silent} of {len(models)} name none" if silent else ""
        reasons = "; ".join(filter(None, (named, unnamed)))
        yield f"No licence is carried over: the models that it was made from do not all name the same one ({reasons})."


def _link(source: Source) -> str:
    """A link to a source's page at its commit; for a local one, the last part of its path."""
    if not _on_hub(source):
        return for_markdown(Path(source.name).name)
    kind = "datasets/" if source.role.startswith("data ") else ""
    return f"[{for_markdown(source.name)}]({HUB}/{kind}{source.name}/tree/{source.commit})"


def _show_message(text: str, report: Report) -> str:
    """A message of featcal's own, which may hold names and paths, for the card."""
    for source in report.sources:
        if source.commit is None and Path(source.name).is_absolute():
            text = text.replace(source.name, Path(source.name).name)
    return for_markdown(without_folders(text), longest=400)


def _write_list(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - LISTED} more, in `{REPORT}`"] if len(lines) > LISTED else []
    return "\n".join(f"- {line}" for line in [*lines[:LISTED], *more])


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
