"""Errors and warnings of the Hub about the metadata of a README.md."""

from __future__ import annotations

import re
from typing import Any

import yaml
from jsonschema import Draft202012Validator

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
    license=listed(enum=_LICENSES.split()), language=listed(), metrics=listed(), tags=listed(maxLength=64),
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
