"""What the Hub has to say about the metadata of a README.md."""

from __future__ import annotations

import re
from typing import Any

import yaml

_LICENSES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
other
"""
LICENSES = frozenset(_LICENSES.split())
RELATIONS = ("adapter", "merge", "quantized", "finetune")
TEXTS = ("license_name", "license_link", "library_name", "pipeline_tag", "thumbnail")
LISTS = ("license", "language", "base_model", "datasets", "tags", "metrics")
"""Keys whose value is a text or a list of texts."""
REPO_ID = re.compile(r"(?!.*(?:--|\.\.))[\w][\w.-]{0,95}(?:/[\w][\w.-]{0,95})?")


def check_card(content: str) -> tuple[list[str], list[str]]:
    """Errors and warnings about a README.md."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", content, re.DOTALL)
    if match is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"Unable to parse YAML: {type(error).__name__}"], []
    if data is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"], []
    return _check_types(data) + _check_values(data) + _check_results(data.get("model-index")), []


def _check_types(data: dict[str, Any]) -> list[str]:
    errors = [f'"{key}" must be a string' for key in TEXTS if not isinstance(data.get(key, ""), str)]
    for key in LISTS:
        value = data.get(key, [])
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(i, str) for i in value)):
            errors.append(f'"{key}" must be a string or an array of strings')
    return errors


def _check_values(data: dict[str, Any]) -> list[str]:
    errors = [
        f'"license" must be one of {sorted(LICENSES)}' for item in _listed(data.get("license")) if item not in LICENSES
    ]
    for key in ("base_model", "datasets"):
        for item in _listed(data.get(key)):
            if not REPO_ID.fullmatch(item):
                errors.append(f'"{key}" with value "{item}" is not valid. Use an id from https://hf.co.')
    if data.get("base_model_relation", "merge") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {list(RELATIONS)}')
    errors += [f'the tag "{tag}" is too long' for tag in _listed(data.get("tags")) if len(tag) > 64]
    return errors


def _check_results(index: Any) -> list[str]:
    """Errors of `model-index`, the evaluation results."""
    if index is None:
        return []
    if not isinstance(index, list) or not all(isinstance(model, dict) for model in index):
        return ['"model-index" must be an array of objects']
    errors = []
    for number, model in enumerate(index):
        if not isinstance(model.get("name"), str):
            errors.append(f'"model-index[{number}].name" is required')
        for place, result in enumerate(model.get("results") or []):
            where = f"model-index[{number}].results[{place}]"
            task, dataset, metrics = (result.get(key) for key in ("task", "dataset", "metrics"))
            if not isinstance(task, dict) or not isinstance(task.get("type"), str):
                errors.append(f'"{where}.task.type" is required')
            if not isinstance(dataset, dict) or not {"type", "name"} <= dataset.keys():
                errors.append(f'"{where}.dataset" must have a type and a name')
            if not isinstance(metrics, list) or not all({"type", "value"} <= metric.keys() for metric in metrics):
                errors.append(f'"{where}.metrics" must have a type and a value each')
    return errors


def _listed(value: Any) -> list[str]:
    """A text or a list of them as a list; what is neither was refused before."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, str)]
