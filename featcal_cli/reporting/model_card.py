"""Write the model card of an output: metadata, and a run's report in words and tables."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from featcal_cli.calibration.results import ADAPTER, describe_guard, describe_kinds, write_share
from featcal_cli.evaluation.results import CALIBRATED, MERGED, average_tasks
from featcal_cli.hub.model_source import is_hub_id
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.reporting.markdown import join_notes, write_drift_cells
from featcal_cli.reporting.report import CARD, ITSELF, PICTURE, RECIPE, REPORT, OutputDrift, Report, Source
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.progress import tell_seconds
from featcal_cli.runtime.sanitise import for_markdown, one_line, without_folders, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml, split_front_matter

MODELS = ("merged", "base", "expert")
HUB = "https://huggingface.co"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MARK = "<!-- This card was written by featcal. -->"
MERGED_CARD = "README.merged.md"
"""File name of a copy of the merged model's own card, which an output has if that card is not on the Hub."""
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
"""Pattern that the Hub's names of licences match."""
TASK_TYPES = {
    "zero-shot": "zero-shot-image-classification",
    "generation": "text2text-generation",
    "lm-eval": "text-generation",
}
"""The Hub's task type for each evaluation protocol; other protocols use the merged card's pipeline tag."""
VARIABLES = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "image_processor"}
"""Variable names for these classes in the card's example code; all others are called processor."""
LISTED = 12
"""The most lines of a list that are shown."""


def write_card(
    report: Report,
    *,
    name: str,
    target: str | None = None,
    merged_readme: str | None = None,
    model_class: str = "AutoModel",
    processor_class: str | None = None,
) -> str:
    """Return the text of README.md, which shows drift.png if the report has curves.

    name: name of the output folder; target: the Hub id that the output is pushed to, if any; merged_readme: the merged
    model's own card, whose metadata are used; model_class and processor_class: names of the transformers classes that
    load the output.
    """
    merged_data = _read_metadata(merged_readme or "")
    data = _write_metadata(report, merged_data, target)
    if results := list(_list_results(report, data.pipeline_tag)):
        data.model_name, data.eval_results = one_line((target or name).rpartition("/")[2]), results
    loading = _write_loading(target or name, model_class, processor_class)
    merged = next(iter(_find_sources(report, "merged")), None)
    at_hub = f"{HUB}/{merged.name}/blob/{merged.commit}/{CARD}" if merged and _on_hub(merged) else MERGED_CARD
    merged_card = at_hub if merged and merged_readme else None
    text = _render_body(report, name, target, merged_card, loading, model_class, data.license_name or data.license)
    metadata = data.to_dict()  # type: ignore[no-untyped-call]
    return without_tokens(f"---\n{dump_yaml(metadata)}---\n\n{text}\n")


def copy_merged_card(report: Report, readme: str | None) -> dict[str, bytes]:
    """Return the merged model's own card as {file name: content} for the output; empty if there is none, or the Hub has
    it."""
    if not readme or any(map(_on_hub, _find_sources(report, "merged"))):
        return {}
    return {MERGED_CARD: without_tokens(readme).encode("utf-8", "replace")}


def read_license(readme: str | None) -> str | None:
    """Return the licence that a card names, as "other: NAME" for one with a name of its own; None where it is
    unclear."""
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
    """Return the metadata of a card; empty if they are not YAML, or not a mapping."""
    return split_front_matter(text.removeprefix("\ufeff").replace("\r\n", "\n"))[0] or {}


def _write_metadata(report: Report, merged: Mapping[str, Any], target: str | None) -> ModelCardData:
    """Make the card's metadata. base_model lists merged first, as the output is closest to it, then base and experts:
    the weights are computed from all of them, and the Hub has one relation for the whole list."""
    models = [name for name in _find_repos(report, *MODELS) if name != target]
    languages = [code for code in _texts(merged.get("language")) if re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)]
    pipelines = [tag for tag in _texts(merged.get("pipeline_tag")) if re.fullmatch(r"[a-z0-9-]+", tag)]
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
    """Yield the calibrated model's scores as evaluation results for the Hub."""
    names = {source.role: source.name for source in _find_sources(report, "data") if _on_hub(source)}
    for task, scores in report.accuracy.items():
        by_lm_eval = scores.protocol == "lm-eval"
        yield EvalResult(
            task_type=TASK_TYPES.get(scores.protocol) or pipeline_tag or "other",
            dataset_type=scores.metric if by_lm_eval else names.get(f"data {task}", one_line(task, 80)),
            dataset_name=one_line(f"{task} ({scores.metric if by_lm_eval else scores.split})", 80),
            metric_type=METRICS[scores.metric].hub_name if scores.metric in METRICS else "accuracy",
            metric_value=round(scores.scores[CALIBRATED].value, 5),
        )


def _texts(value: object) -> list[str]:
    """Return the texts in a metadata value of unknown type that fit in one line of 80 characters."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text and text == one_line(text, 80)]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _find_sources(report: Report, *kinds: str) -> list[Source]:
    """Return the sources whose role begins with one of these words, in the order of the words."""
    return [source for kind in kinds for source in report.sources if source.role.partition(" ")[0] == kind]


def _find_repos(report: Report, *kinds: str) -> list[str]:
    return _unique(source.name for source in _find_sources(report, *kinds) if _on_hub(source))


def _on_hub(source: Source) -> bool:
    """Return whether a source is a repo of the Hub, with a name that can be linked to."""
    return source.commit is not None and is_hub_id(source.name)


def _render_body(
    report: Report, name: str, target: str | None, merged_card: str | None, loading: str, model: str, agreed: str | None
) -> str:
    """Return the card's text below the metadata. merged_card: address or file of the merged model's own card, if it has
    one; loading: code that loads the output; model: a class of transformers; agreed: the licence of all models, None
    where they differ."""
    rows = report.judged_rows[: len(report.drift)]
    context = {
        **_describe_sources(report, agreed),
        **_describe_modules(report),
        "report": report,
        "title": (target or name).rpartition("/")[2],
        "merged_card": merged_card,
        "loading": loading,
        "adapter_code": _write_adapter_code(report, target or name, model),
        "means": average_tasks(report.accuracy) if report.accuracy else {},
        "other_metrics": _show_names(_list_other_metrics(report)),
        "choices": list(_list_choices(report)),
        "farther_than_base": [row.task for row in rows if row.base is not None and row.before > row.base],
        "notes": [_show_message(note, report) for note in join_notes(report.notes, report.drift)],
        "commands": _write_commands(name, target),
        "any_local": not all(_on_hub(source) or source.name == ITSELF for source in report.sources),
        "mark": MARK,
        "listed": LISTED,
        "picture": PICTURE,
        "recipe_file": RECIPE,
        "report_file": REPORT,
        "adapter_folder": ADAPTER,
    }
    text = _make_environment(report).from_string(TEMPLATE.read_text(encoding="utf-8")).render(context)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _make_environment(report: Report) -> Environment:
    """Make the template's Jinja environment, which escapes every value that is not marked as Markdown."""

    def finalize(value: object) -> str:
        return str(value) if isinstance(value, Markup) else for_markdown(str(value))

    # trim and lstrip: a line that holds a statement alone leaves none behind
    environment = Environment(finalize=finalize, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "markdown": Markup,
        "message": lambda text: _show_message(text, report),
        "names": _show_names,
        "drift_cells": write_drift_cells,
        "percent": lambda score: f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}",
        "share": write_share,
        "size": tell_bytes,
        "seconds": tell_seconds,
    }
    return environment


def _show_names(names: Iterable[str]) -> Markup:
    return Markup(", ".join(map(for_markdown, names)))


def _describe_sources(report: Report, agreed: str | None) -> dict[str, Any]:
    """Return template variables on models and datasets, each listed once with all its roles, and on their licences."""
    sources: dict[tuple[str, str | None], list[Source]] = {}
    for source in report.sources:
        sources.setdefault((source.name, source.commit), []).append(source)
    rows = []
    for same in sources.values():
        first = same[0]
        found_in = "; ".join(_show_message(place, report) for place in _unique(source.found_in for source in same))
        commit = f"`{first.commit[:7]}`" if first.commit and _on_hub(first) else "local"
        rows.append(
            {
                "link": _link(first),
                "roles": [source.role for source in same],
                "commit": Markup("none" if first.name == ITSELF else commit),
                "license": first.license or "not named",
                "found_in": Markup(f" {found_in} |"),
            }
        )
    models = _find_sources(report, *MODELS)
    silent = sum(source.license is None for source in models)
    licenses = _show_names(_unique(source.license for source in models if source.license))
    unnamed = f"{silent} of {len(models)} name none" if silent else ""
    merge = merge if isinstance(merge := report.recipe.get("merged"), Mapping) else {}
    numbers = [f"{key} {merge[key]}" for key in ("scale", "density", "seed") if key in merge]
    built = f"a merge of its experts ({', '.join([str(merge.get('method', 'unknown')), *numbers])})"
    counts = report.settings["examples"].values()
    return {
        "sources": rows,
        "places": _unique(source.found_in for source in report.sources),
        "merged": next(map(_link, _find_sources(report, "merged")), built),
        "examples": f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}",
        "self_written": [
            source.role.partition(" ")[2] for source in _find_sources(report, "data") if source.name == ITSELF
        ],
        "agreed": agreed,
        "licenses": Markup("; ".join(filter(None, (licenses, unnamed)))),
    }


def _describe_modules(report: Report) -> dict[str, Any]:
    """Return template variables on what was calibrated, how much it changed, and what was left unchanged."""
    modules = [module for block in report.blocks for module in block.modules]
    guard = describe_guard(report.blocks)
    kinds = Counter(module.kind for module in modules).most_common()
    skipped = Counter((entry["name"], entry["reason"]) for block in report.blocks for entry in block.skipped)
    outside = "embeddings of tokens" if report.settings.get("stems") else "embeddings"
    left = [f"{outside}, final norms, poolers and heads"]
    for (name, reason), count in skipped.most_common():
        blocks = f"{count} block{'s' if count > 1 else ''}"
        left.append(Markup(f"{for_markdown(name)} in {blocks}: {_show_message(reason, report)}"))
    return {
        "modules": modules,
        "changes": sorted(module.relative_change for module in modules),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds),
        "guard": guard[:1].upper() + guard[1:],
        "calibrated_kinds": describe_kinds(report.blocks, stems=bool(report.settings.get("stems"))),
        "left_unchanged": left,
    }


def _list_other_metrics(report: Report) -> Iterator[str]:
    """Yield a phrase for each task that is not measured by the default metric, with the metric's name."""
    for task, scores in report.accuracy.items():
        if scores.metric in METRICS and METRICS[scores.metric].symbol:
            yield f"{task}: 100 · {METRICS[scores.metric].title}"


def _list_choices(report: Report) -> Iterator[tuple[str, OutputDrift, OutputDrift]]:
    """Yield each task on which the expert's own head makes a choice, with the outputs of the merged and the calibrated
    model."""
    for task, measured in report.measures.items():
        before, after = (model.output if (model := measured.models.get(r)) else None for r in (MERGED, CALIBRATED))
        if before and after and before.agreement is not None and after.agreement is not None:
            yield task, before, after


def _write_commands(name: str, target: str | None) -> str:
    """Return the commands that reproduce the output."""
    download = f"hf download {shlex.quote(one_line(target))} {RECIPE} --local-dir .\n" if target else ""
    return f"{download}featcal calibrate -r {RECIPE} -o {shlex.quote(one_line(name) + '-again')}"


def _write_adapter_code(report: Report, output: str, model: str) -> str:
    """Return the code that loads the adapter onto the merged model; empty if the run built that model itself."""
    merged = next(iter(_find_sources(report, "merged")), None)
    if merged is None:
        return ""
    model = model if model.isidentifier() else "AutoModel"
    name = merged.name if _on_hub(merged) else Path(merged.name).name
    revision = f', revision="{merged.commit}"' if _on_hub(merged) else ""
    where, place = (json.dumps(one_line(text), ensure_ascii=False) for text in (name, output))
    return f"""from peft import PeftModel
from transformers import {model}

merged = {model}.from_pretrained({where}{revision}, dtype="auto")
model = PeftModel.from_pretrained(merged, {place}, subfolder="{ADAPTER}")"""


def _write_loading(place: str, model: str, processor: str | None) -> str:
    """Return the code that loads the output with these classes of transformers."""
    where = json.dumps(one_line(place), ensure_ascii=False)
    names = [name if name.isidentifier() else "AutoModel" for name in (model, processor) if name]
    lines = [
        f"from transformers import {', '.join(names)}",
        "",
        f'model = {names[0]}.from_pretrained({where}, dtype="auto")',
    ]
    lines += [f"{VARIABLES.get(name, 'processor')} = {name}.from_pretrained({where})" for name in names[1:]]
    return "\n".join(lines)


def _link(source: Source) -> Markup:
    """Return a link to a source's page at its commit; for a local source, the last part of its path."""
    if not _on_hub(source):
        return Markup(for_markdown(Path(source.name).name))
    kind = "datasets/" if source.role.startswith("data ") else ""
    return Markup(f"[{for_markdown(source.name)}]({HUB}/{kind}{source.name}/tree/{source.commit})")


def _show_message(text: str, report: Report) -> Markup:
    """Return one of featcal's messages as Markdown for the card, with local paths cut to their last part."""
    for source in report.sources:
        if source.commit is None and Path(source.name).is_absolute():
            text = text.replace(source.name, Path(source.name).name)
    return Markup(for_markdown(without_folders(text), longest=400))
