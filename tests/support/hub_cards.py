"""Errors and warnings of the Hub about the metadata of a README.md."""

from __future__ import annotations

import re
from typing import Any

import yaml
from jsonschema import Draft202012Validator

LICENSES = ["apache-2.0", "mit", "llama3.1", "other", "unknown"]
"""Some of those that the Hub knows: the ones that cards here have."""
Schema = dict[str, Any]


def needs(*keys: str, **properties: Schema) -> Schema:
    """A mapping with these keys, some of which are more."""
    return {"type": "object", "required": list(keys), "properties": properties}


def listed(**item: object) -> Schema:
    """A text or a list of texts."""
    text = {"type": "string", **item}
    return {"anyOf": [text, {"type": "array", "items": text}]}


REPO_IDS = listed(pattern=r"^(?!.*(?:--|\.\.))[\w][\w.-]{0,95}(?:/[\w][\w.-]{0,95})?\Z")
METRICS = {"type": "array", "items": needs("type", "value")}
RESULT = needs("task", "dataset", "metrics", task=needs("type"), dataset=needs("type", "name"), metrics=METRICS)
MODEL = needs("name", name={"type": "string"}, results={"type": ["array", "null"], "items": RESULT})
TEXTS = ("license_name", "license_link", "library_name", "pipeline_tag", "thumbnail")
CARD = needs(
    **{key: {"type": "string"} for key in TEXTS},
    license=listed(enum=LICENSES), language=listed(), metrics=listed(), tags=listed(maxLength=64),
    base_model=REPO_IDS, datasets=REPO_IDS, base_model_relation={"enum": ["adapter", "merge", "quantized", "finetune"]},
    **{"model-index": {"type": ["array", "null"], "items": MODEL}},
)  # fmt: skip


def check_card(content: str) -> tuple[list[str], list[str]]:
    """Errors and warnings about a README.md."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", content, re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        return [f"Unable to parse YAML: {type(error).__name__}"], []
    if data is None:
        return [], ["empty or missing yaml metadata in repo card"]
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(CARD).iter_errors(data)], []
