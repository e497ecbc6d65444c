"""Write the model card of an output: metadata, and a run's report in words and tables."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined, Template, pass_context
from markupsafe import Markup

from featcal_cli.calibration.results import ADAPTER, describe_guard, describe_head, describe_kinds, write_share
from featcal_cli.evaluation.results import (
    CALIBRATED,
    TaskScores,
    average_nats,
    average_tasks,
    common_metric,
    describe_regained,
    find_metric,
    show_nats,
    show_scores,
)
from featcal_cli.hub.snapshot import is_hub_id
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.reporting.report import CARD, ITSELF, MERGED_CARD, PICTURE, RECIPE, REPORT, Report, Source
from featcal_cli.reporting.verdict import join_notes
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.progress import tell_seconds
from featcal_cli.runtime.sanitise import for_markdown, one_line, without_folders, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml, split_front_matter

MODELS = ("merged", "base", "expert")
HUB = "https://huggingface.co"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MARK = "<!-- This card was written by featcal. -->"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
"""Pattern that the Hub's names of licences match."""
TASK_TYPES = {
    "texts": "text-generation", "zero-shot": "zero-shot-image-classification", "generation": "text2text-generation",
    "lm-eval": "text-generation",
}  # fmt: skip
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
    runs_code: bool = False,
) -> str:
    """Return the text of README.md. name: of the output folder; target: the Hub id that it is pushed to; merged_readme:
    the merged model's own card, whose metadata are used; model_class, processor_class: classes that load the output;
    runs_code: whether the former is code of its repo."""
    merged_data = _read_metadata(merged_readme or "")
    data = _write_metadata(report, merged_data, target)
    if results := list(_list_results(report, data.pipeline_tag)):
        data.model_name, data.eval_results = one_line((target or name).rpartition("/")[2]), results
    merged = next(iter(_find_sources(report, "merged")), None)
    on_hub = merged is not None and _on_hub(merged)
    merged_card = f"{HUB}/{merged.name}/blob/{merged.commit}/{CARD}" if merged and on_hub else MERGED_CARD
    rows = report.judged_rows[: len(report.drift)]
    context = {
        **_describe_sources(report, data.license),
        **_describe_modules(report),
        "report": report,
        "name": name,
        "target": target,
        "output": target or name,
        "merged_card": merged_card if merged and merged_readme else None,
        "merged_name": merged and (merged.name if on_hub else Path(merged.name).name),
        "merged_commit": merged.commit if merged and on_hub else None,
        "loaders": [kind if kind.isidentifier() else "AutoModel" for kind in (model_class, processor_class) if kind],
        # sentence-transformers pools the model's features; AutoModel alone would not give the embeddings
        "pools": data.library_name == "sentence-transformers" and "modules.json" in report.files,
        "runs_code": runs_code,
        "options": 'dtype="auto", trust_remote_code=True' if runs_code else 'dtype="auto"',
        "variables": VARIABLES,
        "measured": [_average(scores) for scores in report.scores],
        "other_metrics": _show_names(
            f"{task}: {'100 · ' * bool(METRICS[scores.metric].unit)}{METRICS[scores.metric].title}"
            for task, scores in report.accuracy.items()
            if scores.metric in METRICS and METRICS[scores.metric].symbol
        ),
        "farther_than_base": [row.task for row in rows if row.base is not None and row.before > row.base],
        "notes": [_show_message(note, report) for note in _list_notes(report)],
        "any_local": not all(_on_hub(source) or source.name == ITSELF for source in report.sources),
        "mark": MARK,
        "listed": LISTED,
        "picture": PICTURE,
        "recipe_file": RECIPE,
        "report_file": REPORT,
        "adapter_folder": ADAPTER,
    }
    text = _load_template().render(context)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    metadata = data.to_dict()  # type: ignore[no-untyped-call]
    return without_tokens(f"---\n{dump_yaml(metadata)}---\n\n{text}\n")


def _average(scores: Mapping[str, TaskScores]) -> dict[str, Any]:
    """Return scores by task with their means, for the template."""
    return {
        "tasks": scores,
        "means": average_tasks(scores),
        "nats": {role: show_nats(loss) for role, loss in average_nats(scores).items()},
        "metric": common_metric(scores),
        "known": find_metric(common_metric(scores)),
        "regained": describe_regained(scores),
    }


def copy_merged_card(report: Report, readme: bytes) -> dict[str, bytes]:
    """Return the merged model's own card by file name, as it is unless it holds a token; empty if there is none, or the
    Hub has it."""
    if not readme or any(map(_on_hub, _find_sources(report, "merged"))):
        return {}
    text = readme.replace(b"\0", b"").decode("utf-8", "replace")  # in UTF-16, a token has these between its letters
    hidden = without_tokens(text)
    return {MERGED_CARD: readme if hidden == text else hidden.encode("utf-8", "replace")}


def read_license(readme: str | None) -> str | None:
    """Return the Hub's name of the licence that a card names; None where it has a name of its own, or it is unclear."""
    name = _read_metadata(readme or "").get("license")
    if isinstance(name, list) and len(name) == 1:
        name = name[0]
    known = isinstance(name, str) and LICENSE.fullmatch(name) and name not in ("other", "unknown")
    return str(name) if known else None


def _read_metadata(text: str) -> dict[str, Any]:
    """Return the metadata of a card; empty if they are not YAML, or not a mapping."""
    return split_front_matter(text.removeprefix("\ufeff").replace("\r\n", "\n"))[0] or {}


def _write_metadata(report: Report, merged: Mapping[str, Any], target: str | None) -> ModelCardData:
    """Make the card's metadata. base_model lists merged first, as the output is closest to it, then base and experts:
    the weights are computed from all of them, and the Hub has one relation for the whole list."""
    models = [name for name in _find_repos(report, *MODELS) if name != target]
    languages = [code for code in _texts(merged.get("language")) if re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)]
    pipelines = [tag for tag in _texts(merged.get("pipeline_tag")) if re.fullmatch(r"[a-z0-9-]+", tag)]
    # an adapter's card says peft, but the output is no adapter
    libraries = [name for name in _texts(merged.get("library_name")) if re.fullmatch(r"(?!peft$)[\w.-]+", name)]
    libraries += ["sentence-transformers"] if "modules.json" in report.files else []
    licenses = {source.license for source in _find_sources(report, *MODELS)}
    agreed = (licenses.pop() if len(licenses) == 1 else None) or ""
    return ModelCardData(
        base_model=models or None,
        base_model_relation="merge" if models else None,
        datasets=_find_repos(report, "data") or None,
        language=languages or None,
        library_name=next(iter(libraries), "transformers"),
        pipeline_tag=next(iter(pipelines), None),
        tags=_unique(["featcal", "merge", *_texts(merged.get("tags"))]),
        license=agreed if LICENSE.fullmatch(agreed) else None,
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


@cache
def _load_template() -> Template:
    """Load the template of the card, which escapes every value that is not marked as Markdown."""

    def finalize(value: object) -> str:
        return str(value) if isinstance(value, Markup) else for_markdown(str(value))

    # trim and lstrip: a line that holds a statement alone leaves none behind
    environment = Environment(finalize=finalize, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = {
        "markdown": Markup,
        "message": pass_context(lambda context, text: _show_message(text, context["report"])),
        "names": _show_names,
        "python": lambda text: Markup(json.dumps(one_line(text), ensure_ascii=False)),
        "sh": lambda text: Markup(shlex.quote(one_line(text))),
        "drift_cells": lambda row: [cell.replace("-", "−") for cell in row.cells],
        "scores": show_scores,
        "share": write_share,
        "size": tell_bytes,
        "seconds": tell_seconds,
    }
    environment.filters |= filters
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _show_names(names: Iterable[str]) -> Markup:
    return Markup(", ".join(map(for_markdown, names)))


def _describe_sources(report: Report, agreed: str | None) -> dict[str, Any]:
    """Return template variables on models and datasets, and on their licences."""
    rows = [
        {
            "link": _link(source),
            "role": source.role,
            "commit": Markup(
                "none" if source.name == ITSELF else f"`{str(source.commit)[:7]}`" if _on_hub(source) else "local"
            ),
            "license": source.license or "not named",
            "found_in": _show_message(source.found_in, report),
        }
        for source in report.sources
    ]
    models = _find_sources(report, *MODELS)
    silent = sum(source.license is None for source in models)
    licenses = _show_names(_unique(source.license for source in models if source.license))
    unnamed = f"{silent} of {len(models)} name none" if silent else ""
    merge = merge if isinstance(merge := report.recipe.get("merged"), Mapping) else {}
    numbers = [f"{key} {value}" for key, value in merge.items() if key != "method"]
    built = f"a merge of its experts ({', '.join([str(merge.get('method', 'unknown')), *numbers])})"
    counts = report.settings["examples"].values()
    return {
        "sources": rows,
        "merged": next(map(_link, _find_sources(report, "merged")), built),
        "examples": f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}",
        "self_written": [
            source.role.partition(" ")[2] for source in _find_sources(report, "data") if source.name == ITSELF
        ],
        "agreed": agreed,
        "licenses": Markup("; ".join(filter(None, (licenses, unnamed)))),
    }


def _list_notes(report: Report) -> list[str]:
    """List the notes without those on sources, settings, updates, head and refining, which other sections of the card
    hold."""
    elsewhere = ("settings: ", *(f"from {source.found_in}: " for source in report.sources))
    told = describe_guard(report.blocks), describe_head(report.blocks), str(report.refined or "")
    notes = join_notes(report.notes, report.drift)
    return [note for note in notes if note not in told and not note.startswith(elsewhere)]


def _describe_modules(report: Report) -> dict[str, Any]:
    """Return template variables on what was calibrated, how much it changed, and what was left unchanged."""
    modules = [module for block in report.blocks for module in block.modules]
    guard, head, refined = describe_guard(report.blocks), describe_head(report.blocks), str(report.refined or "")
    kinds = Counter(module.kind for module in modules).most_common()
    last = next((block for block in report.blocks if block.is_head), None)
    skipped = Counter((entry["name"], entry["reason"]) for block in report.blocks for entry in block.skipped)
    outside = "embeddings of tokens" if report.settings.get("stems") else "embeddings"
    others = (
        {"linear": "final norms and poolers"}.get(last.modules[0].kind, "poolers and heads")
        if last and last.modules
        else ""
    )
    left = [f"{outside}, {others or 'final norms, poolers and heads'}"]
    for (name, reason), count in skipped.most_common():
        blocks = f"{count} block{'s' if count > 1 else ''}"
        left.append(Markup(f"{for_markdown(name)} in {blocks}: {_show_message(reason, report)}"))
    return {
        "modules": modules,
        "changes": [pick(module.relative_change for module in modules) for pick in (median, max)] if modules else [],
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds),
        "guard": guard[:1].upper() + guard[1:],
        "refined": refined[:1].upper() + refined[1:],
        "has_head": last is not None and bool(last.modules),
        "head": head if report.settings.get("step", 1) == 1 else "",
        "blocks": [block for block in report.blocks if not block.is_head],
        "calibrated_kinds": describe_kinds(report.blocks, stems=bool(report.settings.get("stems"))),
        "left_unchanged": left,
    }


def _link(source: Source) -> Markup:
    """Return a link to a source's page at its commit; for a local source, the last part of its path."""
    if not _on_hub(source):
        return Markup(for_markdown(Path(source.name).name))
    kind = "datasets/" if source.role.startswith("data ") else ""
    return Markup(f"[{for_markdown(source.name)}]({HUB}/{kind}{source.name}/tree/{source.commit})")


def _show_message(text: str, report: Report) -> Markup:
    """Return one of featcal's messages as Markdown for the card, with local paths cut to their last part."""
    known = (source.name for source in report.sources if source.commit is None)
    return Markup(for_markdown(without_folders(text, known), longest=400))
