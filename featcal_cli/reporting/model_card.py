"""A run's report → the model card of its output: metadata, what the run did, and the merged model's own card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from featcal_cli.evaluation.results import CALIBRATED
from featcal_cli.reporting.card_sections import data_of, models_of, on_hub, write_sections
from featcal_cli.reporting.markdown import inert_document, one_line, without_secrets
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.untrusted_text import split_front_matter

MARK = "<!-- This card was written by featcal. -->"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
"""What the Hub's names of licences look like."""
TASK_TYPES = {
    "zero-shot": "zero-shot-image-classification",
    "generation": "text2text-generation",
    "lm-eval": "text-generation",
}
"""The Hub's names of what a protocol measures; heads do what the model is for."""
OWN_CARD = "## The merged model's own card"


def write_card(
    report: Report,
    *,
    name: str,
    target: str | None = None,
    merged_readme: str | None = None,
    model_class: str = "AutoModel",
    processor_class: str | None = None,
    pipeline_tag: str | None = None,
    library_name: str = "transformers",
) -> str:
    """The text of README.md.

    name: of the output folder; target: the Hub id that it is pushed to, if any; merged_readme: the merged model's own
    card; model_class and processor_class: names in transformers whose from_pretrained loads the output; pipeline_tag:
    used where the merged card has none.
    The card shows drift.png where the report has curves.
    """
    theirs, body = split_card(merged_readme or "")
    data = _metadata(report, theirs, target, pipeline_tag, library_name)
    if results := list(_results(report, data.pipeline_tag)):
        data.model_name, data.eval_results = one_line((target or name).rpartition("/")[2]), results
    if MARK in body:
        # calibrated before: what its card says of that run is in its own repo, and cards do not grow with every run
        body = body.partition(f"\n{OWN_CARD}\n")[2]
    own = inert_document(body, level=3)
    sections = write_sections(
        report,
        name=name,
        target=target,
        loaders=[model_class, *([processor_class] if processor_class else [])],
        agreed=data.license_name or data.license,
    )
    text = "\n\n".join([MARK, *sections, *([OWN_CARD, own] if own else [])])
    return without_secrets(str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")))


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """The metadata and the body of a card; a header that is not YAML, or not a mapping, counts as empty."""
    metadata, body, _ = split_front_matter(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    return metadata or {}, body


def read_license(readme: str | None) -> str | None:
    """The licence that a card names, "other: NAME" for one with a name of its own, None where it cannot be told."""
    data, _ = split_card(readme or "")
    found = data.get("license")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, str) or not LICENSE.fullmatch(found) or found == "unknown":
        return None
    if found != "other":
        return found
    own = data.get("license_name")
    return f"other: {one_line(own)}" if isinstance(own, str) and one_line(own) else None


def _metadata(
    report: Report, theirs: Mapping[str, Any], target: str | None, pipeline_tag: str | None, library_name: str
) -> ModelCardData:
    """The header. Merged, base and experts are all in base_model: the weights are computed from every one of them, and
    the Hub has one relation for the whole list. Merged comes first, because it is what the output is closest to."""
    models = _unique(source.name for source in models_of(report) if on_hub(source) and source.name != target)
    datasets = _unique(source.name for source in data_of(report) if on_hub(source))
    languages = [code for code in _texts(theirs.get("language")) if re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)]
    pipelines = [tag for tag in _texts([theirs.get("pipeline_tag"), pipeline_tag]) if re.fullmatch(r"[a-z0-9-]+", tag)]
    kind, own_name, link = _license(report, theirs)
    return ModelCardData(
        base_model=models or None,
        base_model_relation="merge" if models else None,
        datasets=datasets or None,
        language=languages or None,
        library_name=library_name,
        license=kind,
        license_name=own_name,
        license_link=link,
        pipeline_tag=pipelines[0] if pipelines else None,
        tags=_unique(["featcal", "merge", *_texts(theirs.get("tags"))]),
    )


def _results(report: Report, pipeline_tag: str | None) -> Iterator[EvalResult]:
    """What the calibrated model reaches, for the Hub's index of results."""
    for task, found in report.accuracy.items():
        source = next((source for source in data_of(report) if source.role == f"data {task}"), None)
        dataset = source.name if source is not None and on_hub(source) else one_line(task, 80)
        name = found.metric if found.protocol == "lm-eval" else found.split
        yield EvalResult(
            task_type=TASK_TYPES.get(found.protocol) or pipeline_tag or "other",
            dataset_type=found.metric if found.protocol == "lm-eval" else dataset,
            dataset_name=one_line(f"{task} ({name})", 80),
            metric_type={"spearman": "spearmanr"}.get(found.metric, "accuracy"),
            metric_value=round(found.scores[CALIBRATED].value, 5),
        )


def _license(report: Report, theirs: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """The licence that all models of the run have, with the name and the link of one that is not a common one."""
    found = {source.license for source in models_of(report)}
    agreed = found.pop() if len(found) == 1 else None
    kind, _, own = (agreed or "").partition(": ")
    if not LICENSE.fullmatch(kind) or own != one_line(own):
        return None, None, None
    link = theirs.get("license_link")
    known = own and isinstance(link, str) and re.fullmatch(r"https?://\S+|LICENSE(\.\w+)?", link)
    return kind, own or None, link if known else None


def _texts(value: object) -> list[str]:
    """The short texts in a value of somebody's metadata."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text and text == one_line(text, 80)]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
