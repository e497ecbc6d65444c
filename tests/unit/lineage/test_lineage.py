"""Every source of a merged model's lineage, told, told apart, asked for or refused; read from a Hub on loopback."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_input import LAUGHS, MERGES
from hub_server import HubServer

from featcal_cli.hub.model_names import name_tasks
from featcal_cli.hub.repo import Kind, Repo, open_repo
from featcal_cli.lineage.merge_configs import MalformedError, read_mergekit
from featcal_cli.lineage.model_card import read_card
from featcal_cli.lineage.questions import OpenQuestionsError
from featcal_cli.lineage.resolve import Lineage, find_lineage
from featcal_cli.recipe.schema import Draft
from featcal_cli.runtime.errors import FeatCalError, HubError, LineageError
from featcal_cli.runtime.untrusted_text import load_documents
from featcal_cli.workflows.saved_recipe import dump_recipe

SAID = "the command line or recipe"
CONFIG = "mergekit_config.yml of ORG/merged"

Files = Mapping[str, str]


def card(text: str = "", **metadata: Any) -> Files:
    """A README.md."""
    return {"README.md": f"---\n{yaml.safe_dump(metadata)}---\n{text}"}


def mergekit(config: str, **metadata: Any) -> Files:
    """A repo as mergekit leaves it: the configuration in a file, and again in the card."""
    return {"mergekit_config.yml": config, **card(shown(config), **metadata), "config.json": '{"model_type": "bert"}'}


def shown(config: str, text: str = "") -> str:
    """The text of a card that mergekit writes."""
    return f"# merged\n\nA merge of language models. {text}\n\n### Configuration\n\n```yaml\n{config}\n```\n"


def listing(method: str, *models: str, base: str | None = None) -> str:
    """A configuration with a list of models."""
    config: dict[str, Any] = {"merge_method": method, "models": [{"model": model} for model in models]}
    return yaml.safe_dump(config | ({"base_model": base} if base else {}))


def expert(task: str, base: str | None = "ORG/base") -> Files:
    """An expert whose card names its dataset."""
    return card(datasets=[f"ORG/{task}-rows"]) if base is None else card(datasets=[f"ORG/{task}-rows"], base_model=base)


def adapter(base: str, **metadata: Any) -> Files:
    """The files of an adapter, but its weights."""
    return {"adapter_config.json": f'{{"peft_type": "LORA", "base_model_name_or_path": "{base}"}}', **card(**metadata)}


ROWS = {"data ORG/math-rows": card(), "data ORG/code-rows": card()}
TWO = {"ORG/bert-math": expert("math"), "ORG/bert-code": expert("code"), **ROWS}
SILENT = {"ORG/bert-math": expert("math", None), "ORG/bert-code": expert("code", None), **ROWS}
TIES = listing("ties", "ORG/bert-math", "ORG/bert-code", base="ORG/base")
SLERP = listing("slerp", "ORG/bert-math", "ORG/bert-code", base="ORG/bert-math")
LINEAR = listing("linear", "ORG/bert-math", "ORG/bert-code")
ONLY_CARD = card(base_model=["ORG/bert-math", "ORG/base", "ORG/bert-code"], tags=["mergekit", "merge"])
MEASURED: dict[str, Any] = {
    "model-index": [
        {
            "name": "code",
            "results": [
                {
                    "task": {"type": "text-classification"},
                    "dataset": {"name": "Code", "type": "ORG/code-rows", "config": "py", "split": "test"},
                    "metrics": [{"type": "accuracy", "value": 0.5}],
                }
            ],
        }
    ]
}
ROWS_OF = {"data math": "ORG/math-rows", "data code": "ORG/code-rows"}
EXPERTS = {"expert math": "ORG/bert-math", "expert code": "ORG/bert-code", **ROWS_OF}


@dataclass(frozen=True)
class Told:
    """A Hub on which a lineage can be told."""

    name: str
    repos: Mapping[str, Files]
    """Repo id (datasets after "data ") → its text files."""
    values: Mapping[str, str]
    """Role → value of the findings that are looked at."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Role → source, in part."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """A part of one of the notes."""


@dataclass(frozen=True)
class Refused:
    """A Hub on which it cannot, and words of the message."""

    name: str
    repos: Mapping[str, Files]
    words: tuple[str, ...]
    draft: Mapping[str, Any] = field(default_factory=dict)


TOLD = [
    Told(
        "mergekit-models",
        {"ORG/merged": mergekit(TIES), **SILENT},
        {"merged": "ORG/merged", "base": "ORG/base", **EXPERTS},
        {
            "merged": SAID,
            "base": CONFIG,
            "expert math": CONFIG,
            "data math": "the card of ORG/bert-math (datasets)",
        },
    ),
    Told(
        "base-listed-among-models",
        {
            "ORG/merged": {
                "mergekit_config.yaml": listing(
                    "dare_ties", "ORG/base", "ORG/bert-math", "ORG/bert-code", base="ORG/base"
                )
            },
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS},
        {"base": "mergekit_config.yaml of ORG/merged"},
    ),
    Told(
        "slices",
        {
            "ORG/merged": mergekit(
                """
slices:
  - sources:
      - {model: ORG/bert-math, layer_range: [0, 2]}
      - {model: ORG/bert-code, layer_range: [0, 2]}
  - sources:
      - {model: ORG/bert-math, layer_range: [2, 4]}
      - {model: ORG/bert-code, layer_range: [2, 4]}
merge_method: task_arithmetic
base_model: ORG/base
parameters: {weight: 0.5}
"""
            ),
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS},
    ),
    Told(
        "modules",
        {
            "ORG/merged": mergekit(
                yaml.safe_dump(
                    {
                        "merge_method": "ties",
                        "base_model": "ORG/base",
                        "modules": {
                            "vision": {"models": [{"model": "ORG/bert-math"}]},
                            "text": {"models": [{"model": "ORG/bert-code"}]},
                        },
                    },
                    sort_keys=False,
                )
            ),
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS},
    ),
    Told(
        "revisions-and-loras",
        {
            "ORG/merged": mergekit(
                listing("ties", "ORG/bert-math@v1", "ORG/base@v2+ORG/code-lora@v3", base="ORG/base@v2")
            ),
            "ORG/bert-math@v1": expert("math", None),
            "ORG/code-lora@v3": adapter("ORG/base", datasets=["ORG/code-rows"]),
            **ROWS,
        },
        {
            "base": "ORG/base@v2",
            "expert bert-math": "ORG/bert-math@v1",
            "expert code-lora": "ORG/base@v2+ORG/code-lora@v3",
            "data code-lora": "ORG/code-rows",
        },
    ),
    Told(
        "dict-references",
        {
            "ORG/merged": mergekit(
                """
merge_method: ties
base_model: {model: {path: ORG/base, revision: v2}, lora: null, override_architecture: null}
models:
  - model: {model: {path: ORG/bert-math}, lora: null}
  - model: {model: {path: ORG/base, revision: v2}, lora: {path: ORG/code-lora}}
"""
            ),
            "ORG/bert-math": expert("math", None),
            "ORG/code-lora": adapter("ORG/base", datasets="ORG/code-rows"),
            **ROWS,
        },
        {"base": "ORG/base@v2", "expert bert-math": "ORG/bert-math", "expert code-lora": "ORG/base@v2+ORG/code-lora"},
    ),
    Told(
        "slerp-starts-at-an-expert",
        {"ORG/merged": mergekit(SLERP, base_model=["ORG/bert-math", "ORG/bert-code"]), **TWO},
        {"base": "ORG/base", **EXPERTS},
        {"base": "the cards of ORG/bert-math and ORG/bert-code (base_model)", "expert math": CONFIG},
        note="slerp goes from 'ORG/bert-math' to the other model",
    ),
    Told(
        "slerp-whose-card-calls-its-start-the-base",
        {"ORG/merged": {**mergekit(SLERP), **card("Merged using [ORG/bert-math](https://x) as a base.")}, **TWO},
        {"base": "ORG/base", **EXPERTS},
    ),
    Told(
        "nuslerp-has-a-true-base",
        {
            "ORG/merged": mergekit(listing("nuslerp", "ORG/bert-math", "ORG/bert-code", base="ORG/base")),
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS},
        {"base": CONFIG},
    ),
    Told(
        "linear-without-base",
        {
            "ORG/merged": mergekit(LINEAR, base_model=["ORG/bert-code", "ORG/bert-math"]),
            **TWO,
            "ORG/bert-code": expert("code", "ORG/bert-code"),  # some cards name their own repo
        },
        {"base": "ORG/base", **EXPERTS},
        {"base": "the card of ORG/bert-math (base_model)"},
    ),
    Told(
        "linear-whose-card-lists-one-model-more",
        {"ORG/merged": {**mergekit(LINEAR), **ONLY_CARD}, **SILENT},
        {"base": "ORG/base", **EXPERTS},
        {"base": "the card of ORG/merged (base_model)", "expert math": CONFIG},
        note="the only model",
    ),
    Told(
        "block-in-the-card",
        {"ORG/merged": card("```yaml\nhow: to use\n```\n" + shown(TIES)), **SILENT},
        {"base": "ORG/base", **EXPERTS},
        {"base": "the configuration in the card of ORG/merged"},
    ),
    Told(
        "featcal-yaml",
        {
            "ORG/merged": {
                "featcal.yaml": """
merged: other/merged@0123456789012345678901234567890123456789
base: ORG/base@v1
tasks:
  sums: {expert: ORG/bert-math@v1, data: {dataset: ORG/math-rows, revision: v1, config: hard, split: train}}
  code: {expert: ORG/bert-code, data: {path: code.jsonl}}
calibration: {examples: 7}
"""
            },
            "ORG/bert-code": expert("code"),
            **ROWS,
        },
        {
            "merged": "ORG/merged",
            "base": "ORG/base@v1",
            "expert sums": "ORG/bert-math@v1",
            "data sums": "ORG/math-rows@v1:hard:train",
            "data code": "ORG/code-rows",
        },
        {"data sums": "featcal.yaml of ORG/merged", "data code": "the card of ORG/bert-code"},
        note="a path on its author's machine",
    ),
    Told(
        "mergekit-before-featcal-yaml",
        {
            "ORG/merged": {
                **mergekit(LINEAR),
                "featcal.yaml": """
merged: ORG/merged
base: ORG/base
tasks: {sums: {expert: ORG/bert-math, data: "ORG/math-rows:hard"}}
""",
            },
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS, "data math": "ORG/math-rows:hard"},
        {"base": "featcal.yaml", "expert math": CONFIG, "data math": "featcal.yaml", "data code": "the card of"},
    ),
    Told(
        "card-text-names-the-base",
        {
            "ORG/merged": card(
                "This model was merged using the [TIES](https://arxiv.org) merge method using "
                "[ORG/base](https://hub/ORG/base) as a base.",
                base_model=["ORG/bert-math", "ORG/base", "ORG/bert-code"],
            ),
            **SILENT,
        },
        {"base": "ORG/base", **EXPERTS},
        {"base": "as a base", "expert math": "the card of ORG/merged (base_model)"},
    ),
    Told(
        "unordered-list-told-apart-by-the-experts",
        {
            "ORG/merged": ONLY_CARD,
            **TWO,
            "ORG/base": card(base_model="ORG/older"),
            "ORG/bert-code": expert("code", None),
        },
        {"base": "ORG/base", **EXPERTS},
        {"base": "the card of ORG/bert-math (base_model)"},
        note="ORG/base is the base by",
    ),
    Told(
        "unordered-list-told-apart-by-an-adapter",
        {
            "ORG/merged": card(base_model=["ORG/base", "ORG/math-lora"]),
            "ORG/base": card(),
            "ORG/math-lora": adapter("ORG/base", datasets=["ORG/math-rows"]),
            **ROWS,
        },
        {"base": "ORG/base", "expert math-lora": "ORG/math-lora"},
        {"base": "adapter_config.json of ORG/math-lora"},
    ),
    Told(
        "unordered-list-without-the-base",
        {"ORG/merged": card(base_model=["ORG/bert-math", "ORG/bert-code"], base_model_relation="merge"), **TWO},
        {"base": "ORG/base", **EXPERTS},
        note="all models in the card of ORG/merged (base_model) are experts",
    ),
    Told(
        "unordered-list-with-the-base-said",
        {"ORG/merged": ONLY_CARD, **SILENT},
        {"base": "ORG/base", **EXPERTS},
        {"base": SAID},
        draft={"base": "ORG/base"},
    ),
    Told(
        "gated-base-is-not-needed",
        {"ORG/merged": ONLY_CARD, **TWO, "gated ORG/base": card()},
        {"base": "ORG/base", **EXPERTS},
        note="ORG/base was not asked",
    ),
    Told(
        "built-from-experts",
        TWO,
        {"merged": "task_arithmetic:0.3", "base": "ORG/base", "data one": "ORG/math-rows"},
        {"expert one": SAID, "base": "the cards of"},
        draft={
            "merged": {"method": "task_arithmetic", "scale": 0.3},
            "tasks": {"one": {"expert": "ORG/bert-math"}, "two": {"expert": "ORG/bert-code"}},
        },
    ),
    Told(
        "data-said-for-a-found-expert",
        {"ORG/merged": mergekit(TIES), **SILENT},
        {"expert Math": "ORG/bert-math", "data Math": "mine/rows:small", "data code": "ORG/code-rows"},
        {"data Math": SAID, "expert Math": CONFIG},
        draft={"tasks": {"Math": {"data": "mine/rows:small"}}},
    ),
    Told(
        "experts-said-are-all-there-are",
        {"ORG/merged": mergekit(TIES), **SILENT, "mine/math": card(datasets="ORG/math-rows")},
        {"base": "ORG/base", "expert sums": "mine/math", "expert code": "ORG/bert-code", "data code": "mine/rows"},
        {"expert sums": SAID, "expert code": CONFIG, "data sums": "the card of mine/math"},
        draft={"tasks": {"sums": {"expert": "mine/math"}, "code": {"data": "mine/rows"}}},
        note="further experts, which are left out: ORG/bert-math",
    ),
    Told(
        "dataset-and-config-of-the-task",
        {
            "ORG/merged": mergekit(listing("ties", "ORG/t5_glue-cola_lora", "ORG/t5_glue-sst2_lora", base="ORG/t5")),
            "ORG/t5_glue-cola_lora": card(datasets=["ORG/web", "ORG/cola-rows"]),
            "ORG/t5_glue-sst2_lora": card(datasets=["ORG/glue"]),
            "data ORG/cola-rows": card(configs=[{"config_name": "only", "data_files": "*"}]),
            "data ORG/glue": card(
                dataset_info=[{"config_name": "cola"}, {"config_name": "SST2"}, {"config_name": "ax"}]
            ),
        },
        {"data cola": "ORG/cola-rows", "data sst2": "ORG/glue:SST2"},
        note="ORG/glue has 3 configs; SST2",
    ),
    Told(
        "default-config-and-model-index",
        {
            "ORG/merged": mergekit(TIES),
            "ORG/bert-math": expert("math"),
            "ORG/bert-code": card(**MEASURED),
            "data ORG/math-rows": card(configs=[{"config_name": "a"}, {"config_name": "b", "default": True}]),
            "data ORG/code-rows": card(configs=[{"config_name": "js"}, {"config_name": "py"}]),
        },
        {"data math": "ORG/math-rows:b", "data code": "ORG/code-rows:py"},
        {"data code": "the card of ORG/bert-code (model-index)"},
    ),
    Told(
        "known-clip-experts",
        {
            "ORG/merged": card(
                base_model=[
                    "tanganke/clip-vit-base-patch16_stanford-cars",
                    "openai/clip-vit-base-patch16",
                    "tanganke/clip-vit-base-patch16_svhn",
                    "tanganke/clip-vit-base-patch16_oxford-iiit-pet",
                ]
            ),
            "openai/clip-vit-base-patch16": {},
            "tanganke/clip-vit-base-patch16_stanford-cars": {},
            "tanganke/clip-vit-base-patch16_svhn": {},
            "tanganke/clip-vit-base-patch16_oxford-iiit-pet": {},
        },
        {
            "base": "openai/clip-vit-base-patch16",
            "data stanford-cars": "tanganke/stanford_cars::train",
            "data svhn": "ufldl-stanford/svhn:cropped_digits:train",
            "data oxford-iiit-pet": "timm/oxford-iiit-pet::train",
        },
        {"base": "known family", "data svhn": "known family"},
    ),
    Told(
        "known-flan-t5-experts",
        {
            "ORG/merged": mergekit(
                listing(
                    "linear", "tanganke/flan-t5-large_glue-cola_lora-16", "tanganke/flan-t5-large_glue-stsb_lora-16"
                )
            ),
            "tanganke/flan-t5-large_glue-cola_lora-16": {},
            "tanganke/flan-t5-large_glue-stsb_lora-16": {},
        },
        {
            "base": "google/flan-t5-large",
            "data cola": "nyu-mll/glue:cola:train",
            "data stsb": "nyu-mll/glue:stsb:train",
        },
    ),
    Told(
        "known-mergebench-experts",
        {
            "ORG/merged": mergekit(
                listing("linear", "MergeBench/Llama-3.2-3B-Instruct_math", "MergeBench/Llama-3.2-3B-Instruct_coding")
            ),
            "MergeBench/Llama-3.2-3B-Instruct_math": {},
            "MergeBench/Llama-3.2-3B-Instruct_coding": {},
        },
        {"base": "meta-llama/Llama-3.2-3B-Instruct", "data math": "MergeBench/math_val::train"},
    ),
]

REFUSED = [
    Refused(
        "passthrough",
        {"ORG/merged": mergekit(listing("passthrough", "ORG/bert-math", "ORG/bert-code"))},
        ("passthrough", "layer by layer", f"in: {CONFIG}"),
    ),
    Refused(
        "shifted-layers",
        {
            "ORG/merged": mergekit(
                """
merge_method: linear
slices:
  - sources:
      - {model: ORG/bert-math, layer_range: [0, 2]}
      - {model: ORG/bert-code, layer_range: [1, 3]}
"""
            )
        },
        ("shifted", "0–1 with 1–2"),
    ),
    Refused(
        "restacked-layers",
        {
            "ORG/merged": mergekit(
                """
merge_method: linear
slices:
  - sources: [{model: ORG/bert-math, layer_range: [0, 4]}]
  - sources: [{model: ORG/bert-code, layer_range: [2, 6]}]
"""
            )
        },
        ("restacked", "layers 2–5 of a model became 4 and up"),
    ),
    Refused(
        "merge-of-merges", {"ORG/merged": mergekit(f"name: first\n{TIES}\n---\n{LINEAR}")}, ("merge of merges", "2")
    ),
    Refused(
        "mixture-of-experts",
        {"ORG/merged": {"mergekit_moe_config.yml": "base_model: ORG/a\nexperts: [{source_model: ORG/b}]"}},
        ("mixture of experts",),
    ),
    Refused(
        "path-on-the-authors-machine",
        {"ORG/merged": mergekit(listing("ties", "ORG/bert-math", "./out/code", base="ORG/base")), **TWO},
        (
            "'./out/code'",
            "its author's machine",
            CONFIG,
            "featcal calibrate ORG/merged --base ORG/base --expert bert-math=ORG/bert-math --expert code=REPO "
            "--data bert-math=ORG/math-rows --data code=SOURCE",
        ),
    ),
    Refused(
        "base-on-the-authors-machine",
        {"ORG/merged": mergekit(listing("ties", "ORG/bert-math", base="/models/base")), **TWO},
        ("'/models/base'", "featcal calibrate ORG/merged --base REPO"),
    ),
    Refused(
        "models-is-a-number",
        {"ORG/merged": {"mergekit_config.yml": "merge_method: ties\nmodels: 7\n"}},
        ("models is not a list", "--base REPO --expert TASK=REPO --data TASK=SOURCE"),
    ),
    Refused(
        "two-bases-in-the-text",
        {
            "ORG/merged": card(
                "using ORG/x as a base, then using [ORG/y](https://hub) as a base", base_model=["a/b", "c/d"]
            ),
        },
        (
            "several bases in its card: ORG/x and ORG/y",
            "fill in REPO and type: featcal calibrate ORG/merged --base REPO",
        ),
    ),
    Refused(
        "unordered-list-of-silent-models",
        {"ORG/merged": ONLY_CARD, **SILENT, "ORG/base": card()},
        (
            "which of ORG/bert-math, ORG/base and ORG/bert-code is the base",
            "if it is the base, it needs none",
            "featcal calibrate ORG/merged --base REPO --data base=SOURCE",
        ),
    ),
    Refused(
        "experts-disagree",
        {"ORG/merged": mergekit(LINEAR), **TWO, "ORG/bert-code": expert("code", "ORG/other")},
        (
            "ORG/bert-math comes from ORG/base",
            "ORG/bert-code comes from ORG/other",
            "featcal calibrate ORG/merged --base REPO --expert math=ORG/bert-math",
        ),
    ),
    Refused(
        "linear-of-silent-experts",
        {"ORG/merged": mergekit(LINEAR), **SILENT},
        (
            "nothing says what the base of ORG/merged is",
            "mergekit_config.yml (no base)",
            "the card of ORG/bert-math",
            "ORG/merged --base REPO",
        ),
    ),
    Refused(
        "an-expert-not-said-is-not-the-base",
        {"ORG/merged": card(base_model=["ORG/bert-math", "ORG/bert-code", "ORG/bert-law"]), **SILENT},
        (
            "nothing says what the base",
            "--expert m=ORG/bert-math --expert c=ORG/bert-code --base REPO --data m=ORG/math-rows",
        ),
        {"tasks": {"m": {"expert": "ORG/bert-math"}, "c": {"expert": "ORG/bert-code"}}},
    ),
    Refused(
        "no-lineage-at-all",
        {"ORG/merged": {"config.json": '{"_name_or_path": "ORG/hint"}'}},
        (
            "which experts ORG/merged was merged from",
            "mergekit_config.yml (not there)",
            "README.md (not there)",
            "ORG/hint",
            "featcal calibrate ORG/merged --base REPO --expert TASK=REPO --data TASK=SOURCE",
        ),
    ),
    Refused(
        "only-a-base",
        {"ORG/merged": card(base_model="ORG/base")},
        ("which experts", "README.md (one base_model)", "--base ORG/base --expert TASK=REPO --data TASK=SOURCE"),
    ),
    Refused("an-adapter", {"ORG/merged": adapter("ORG/base")}, ("is an adapter", "--expert TASK=REPO")),
    Refused(
        "a-quantized-copy",
        {"ORG/merged": card(base_model="ORG/whole", base_model_relation="quantized")},
        ("quantized copy",),
    ),
    Refused("a-missing-expert", {"ORG/merged": mergekit(TIES), **ROWS}, ("no model ORG/bert-", f"named by {CONFIG}")),
    Refused(
        "a-missing-dataset",
        {"ORG/merged": mergekit(TIES), "ORG/bert-math": expert("math"), "ORG/bert-code": expert("code")},
        ("no dataset ORG/math-rows", "named by the card of ORG/bert-math (datasets)", "fill in SOURCE", "math=SOURCE"),
    ),
    Refused(
        "experts-without-data",
        {"ORG/merged": mergekit(TIES), "ORG/bert-math": {}, "ORG/bert-code": card(datasets=["/etc", "web text"])},
        (
            "ORG/bert-math names no dataset",
            "'/etc' is no dataset",
            "featcal calibrate ORG/merged --base ORG/base --expert math=ORG/bert-math --expert code=ORG/bert-code "
            "--data math=SOURCE --data code=SOURCE",
        ),
    ),
    Refused(
        "several-datasets",
        {"ORG/merged": mergekit(TIES), **TWO, "ORG/bert-math": card(datasets=["ORG/a", "ORG/b"])},
        (
            "several datasets for math: ORG/a, ORG/b",
            "featcal calibrate ORG/merged --base ORG/base --expert math=ORG/bert-math --expert code=ORG/bert-code "
            "--data code=ORG/code-rows --data math=SOURCE",
        ),
        {"base": "ORG/base"},
    ),
    Refused(
        "several-configs",
        {
            "ORG/merged": mergekit(TIES),
            **TWO,
            "data ORG/math-rows": card(configs=[{"config_name": "easy"}, {"config_name": "hard"}]),
        },
        ("has several configs: easy, hard", "fill in CONFIG", "--data math=ORG/math-rows:CONFIG"),
    ),
    Refused(
        "data-for-no-expert",
        {"ORG/merged": mergekit(TIES), **TWO},
        ("the task sums", "math and code", "--data sums=mine/rows --expert sums=REPO"),
        {"tasks": {"sums": {"data": "mine/rows"}}},
    ),
    Refused(
        "built-from-nothing",
        {},
        ("which experts the merged model was merged from", "--merge average --base REPO --expert TASK=REPO"),
        {"merged": {"method": "average"}},
    ),
]


ITSELF = card(base_model=["ORG/merged", "ORG/base", "ORG/bert-math", "ORG/bert-code"])
REFUSED += [
    Refused(
        "a-card-that-names-its-own-repo-as-its-base",
        {"ORG/merged": card(base_model="https://huggingface.co/ORG/merged")},
        ("README.md (its base_model is the repo itself", "calibrate ORG/merged --base REPO --expert TASK=REPO"),
    ),
    Refused(
        "a-config-that-names-its-own-repo-as-its-base",
        {"ORG/merged": mergekit(listing("ties", "ORG/bert-math", "ORG/bert-code", base="ORG/merged@main")), **SILENT},
        ("nothing says what the base", "--base REPO"),
    ),
    Refused(
        "an-expert-given-as-the-base-while-others-lack-data",
        {"ORG/merged": mergekit(TIES), "ORG/bert-math": {}, "ORG/bert-code": {}},
        (
            f"ORG/bert-code is listed as an expert by {CONFIG} and given as the base (--base): it is no expert then",
            f"{CONFIG} names ORG/base as the base; ORG/bert-code is taken",
            "--data math=SOURCE",
        ),
        {"base": "ORG/bert-code"},
    ),
    Refused(
        "the-only-expert-given-as-the-base",
        {"ORG/merged": mergekit(listing("ties", "ORG/bert-math", base="ORG/base")), **TWO},
        ("ORG/bert-math is listed as an expert", "which experts ORG/merged was merged from", "--expert TASK=REPO"),
        {"base": "ORG/bert-math"},
    ),
    Refused(
        "data-for-an-expert-that-is-given-as-the-base",
        {"ORG/merged": mergekit(TIES), **TWO},
        ("for the task code", "those left are math; ORG/bert-code is the base", "fill in REPO and type: featcal"),
        {"base": "ORG/bert-code", "tasks": {"code": {"data": "mine/rows"}}},
    ),
    Refused(
        "all-experts-gone",
        {"ORG/merged": mergekit(TIES)},
        (
            "the expert of math cannot be read: there is no model ORG/bert-math",
            "featcal calibrate ORG/merged --base ORG/base --expert math=REPO --expert code=REPO "
            "--data math=SOURCE --data code=SOURCE",
        ),
    ),
]
TOLD += [
    Told(
        "a-card-that-lists-its-own-repo",
        {"ORG/merged": ITSELF, **TWO},
        {"base": "ORG/base", **EXPERTS},
        note="the card of ORG/merged names the repo itself as its base, which is left out",
    ),
    Told(
        "an-expert-that-names-the-merged-repo-as-its-base",
        {"ORG/merged": mergekit(LINEAR), **TWO, "ORG/bert-math": expert("math", "ORG/merged")},
        {"base": "ORG/base", **EXPERTS},
        {"base": "the card of ORG/bert-code"},
    ),
    Told(
        "an-older-revision-of-the-merged-repo-as-its-base",
        {"ORG/merged": mergekit(listing("ties", "ORG/bert-math", "ORG/bert-code", base="ORG/merged@v1")), **SILENT},
        {"base": "ORG/merged@v1", **EXPERTS},
    ),
    Told(
        "an-expert-given-as-the-base",
        {"ORG/merged": mergekit(TIES), **TWO},
        {"base": "ORG/bert-code", "expert math": "ORG/bert-math"},
        {"base": f"{SAID}; {CONFIG} lists it as an expert"},
        {"base": "ORG/bert-code"},
        f"ORG/bert-code is listed as an expert by {CONFIG} and given as the base (--base): it is no expert then; "
        "the only expert left is ORG/bert-math",
    ),
    Told(
        "another-base-than-the-configs",
        {"ORG/merged": mergekit(TIES), **TWO},
        {"base": "mine/base", **EXPERTS},
        {"base": SAID},
        {"base": "mine/base"},
        f"{CONFIG} names ORG/base as the base; mine/base is taken, as {SAID} says",
    ),
    Told(
        "a-base-that-a-linear-merge-lists",
        {"ORG/merged": mergekit(listing("linear", "ORG/bert-math", "ORG/bert-code", "ORG/base")), **TWO},
        {"base": "ORG/base", "expert bert-math": "ORG/bert-math", "data bert-code": "ORG/code-rows"},
        {"base": "lists it as an expert"},
        {"base": "ORG/base"},
    ),
]


def fill(text: Any, name: str) -> Any:
    """ORG replaced by the case's name in whatever holds text: the client's cache outlives a test."""
    if isinstance(text, str):
        return re.sub(r"\bORG/", f"{name}/", text)
    if isinstance(text, Mapping):
        return {fill(key, name): fill(value, name) for key, value in text.items()}
    return tuple(fill(part, name) for part in text) if isinstance(text, tuple) else text


def publish(hub: HubServer, folder: Path, repos: Mapping[str, Files]) -> None:
    """Put repos on the Hub, each with weights that must not be read."""
    for number, (name, files) in enumerate(repos.items()):
        made = folder / "hub" / str(number)
        made.mkdir(parents=True)
        *kind, repo = name.split()
        repo, _, revision = repo.partition("@")
        weights = "adapter_model.safetensors" if "adapter_config.json" in files else "model.safetensors"
        for path, text in {**files, weights: "no weights"}.items():
            (made / path).write_text(text, encoding="utf-8")
        hub.add_repo(
            repo,
            made,
            kind="dataset" if "data" in kind else "model",
            gated="gated" in kind,
            revision=revision or "main",
        )


def seek(hub: HubServer, folder: Path, case: Told | Refused) -> Lineage:
    """The lineage; no weights are read for it, and no repo is opened twice."""
    opened: list[tuple[str, Kind]] = []

    def open_noted(name: str, kind: Kind) -> Repo:
        opened.append((name, kind))
        return open_repo(name, kind)

    publish(hub, folder, fill(case.repos, case.name))
    try:
        return find_lineage(Draft.model_validate(fill({"merged": "ORG/merged", **case.draft}, case.name)), open_noted)
    finally:
        assert not hub.sent("safetensors")
        assert len(set(opened)) == len(opened)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where no folder could be taken for a repo."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("case", TOLD, ids=lambda case: case.name)
def test_lineage_is_told(case: Told, hub: HubServer, tmp_path: Path) -> None:
    lineage = seek(hub, tmp_path, case)
    values = {finding.role: finding.value for finding in lineage.findings}
    sources = {finding.role: finding.source for finding in lineage.findings}
    for role, value in fill(case.values, case.name).items():
        assert values[role] == value
    for role, source in fill(case.sources, case.name).items():
        assert source in sources[role]
    assert fill(case.note, case.name) in "\n".join(lineage.notes)
    # the recipe says the same as the findings, and is a whole one
    assert lineage.recipe.base == values["base"]
    assert [f"expert {task}" for task in lineage.recipe.tasks] == [
        role for role in values if role.startswith("expert ")
    ]
    for task, spec in lineage.recipe.tasks.items():
        assert (spec.expert, str(spec.data)) == (values[f"expert {task}"], values[f"data {task}"])
    assert Draft.model_validate(yaml.safe_load(dump_recipe(lineage.recipe)))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_lineage_is_asked_for_or_refused(case: Refused, hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(FeatCalError) as caught:
        seek(hub, tmp_path, case)
    message = str(caught.value)
    for words in fill(case.words, case.name):
        assert words in message
    assert isinstance(caught.value, LineageError | HubError)
    assert caught.value.where
    assert caught.value.fix


def test_the_only_expert_left_is_said_whoever_took_the_others_away(hub: HubServer, tmp_path: Path) -> None:
    config = listing("ties", "alone/math", "alone/code", "alone/law", base="alone/base")
    publish(hub, tmp_path, fill({"ORG/merged": mergekit(config), "ORG/math": expert("math"), **ROWS}, "alone"))
    lineage = find_lineage(Draft(merged="alone/merged", base="alone/code", skip_experts=("law",)))
    assert any("the only expert left is alone/math" in note for note in lineage.notes)


def test_a_message_has_what_is_not_answered_and_the_command_all(hub: HubServer, tmp_path: Path) -> None:
    config = listing("ties", "part/math", "part/code", base="part/base")
    publish(hub, tmp_path, {"part/merged": mergekit(config), "part/math": {}})
    with pytest.raises(OpenQuestionsError) as caught:
        find_lineage(Draft(merged="part/merged"))
    error = caught.value
    number = next(number for number, question in enumerate(error.questions) if question.choices)
    error.answer({number: (("--skip-expert", "code"),)})
    assert "part/code" not in str(error) and "private" not in error.fix
    assert "part/math names no dataset" in error.what
    assert error.fix.endswith("--data math=SOURCE --skip-expert code")


@pytest.mark.parametrize(("names", "left"), [(300, 0), (60, 2), (60, 45), (15, 2)])
def test_many_experts_that_are_gone_are_told_shortly(names: int, left: int, hub: HubServer, tmp_path: Path) -> None:
    experts = [f"many-{names}-{left}/bert-{number}" for number in range(names)]
    repos = {name: expert("math") for name in experts[:left]}
    config = listing("ties", *experts, base=f"many-{names}-{left}/base")
    merged = f"many-{names}-{left}/merged"
    publish(hub, tmp_path, fill({"ORG/merged": mergekit(config), **repos, **ROWS}, f"many-{names}-{left}"))
    with pytest.raises(LineageError) as caught:
        find_lineage(Draft(merged=merged))
    error = caught.value
    assert f"{names - left} of {names} experts cannot be read" in error.what
    assert f"and {names - left - 12} more" in error.what and len(error.what) < 800
    assert len(error.where) < 300
    command = error.fix.rpartition("type: ")[2]
    if names - left > 40:
        assert command == f"featcal calibrate {merged} -r job.yaml" and "under tasks" in error.fix
    else:
        assert command.count("--skip-expert") == names - left and "--expert" not in command.replace("--skip-expert", "")
    assert len(error.fix) < 1500


def test_a_complete_draft_reads_nothing(hub: HubServer) -> None:
    tasks = {"a": {"expert": "x/a", "data": {"dataset": "x/rows", "template": "{q}", "columns": {"label": "y"}}}}
    draft = Draft.model_validate({"merged": "x/m", "base": "x/b", "tasks": tasks, "calibration": {"examples": 7}})
    lineage = find_lineage(draft)
    assert not hub.requests
    assert lineage.recipe.model_dump(exclude_none=True) == draft.model_dump(exclude_none=True)
    assert {finding.source for finding in lineage.findings} == {SAID}


def test_a_card_on_the_hub_leads_to_no_folder_here(hub: HubServer, tmp_path: Path) -> None:
    """A folder with the name of a repo that a card names is passed over: the Hub's repo is meant."""
    name = "card-on-the-hub"
    publish(hub, tmp_path, fill({"ORG/merged": mergekit(TIES), **SILENT}, name))
    for folder in ("base", "bert-math", "math-rows"):
        Path(name, folder).mkdir(parents=True)
        Path(name, folder, "README.md").write_text("---\ndatasets: /etc\nbase_model: /etc\n---\n")
    recipe = find_lineage(Draft(merged=f"{name}/merged")).recipe
    assert recipe.base == f"{name}/base@main"
    assert recipe.tasks["math"].expert == f"{name}/bert-math@main"
    assert str(recipe.tasks["math"].data) == f"{name}/math-rows@main"
    assert recipe.tasks["code"].expert == f"{name}/bert-code"


def test_a_card_in_a_folder_may_name_paths(tmp_path: Path) -> None:
    """From the folder, absolute, or (where it can be nothing else) from where the command runs."""
    config = listing("ties", "../math", str(tmp_path / "code"), "./law", base="base")
    for name, files in {
        "merged": mergekit(config),
        "merged/base": {},
        "math": card(datasets=["rows"]),
        "math/rows": {},
        "code": adapter("../merged/base", datasets="../math/rows"),
        "here/law": card(datasets=str(tmp_path / "math/rows")),
    }.items():
        (tmp_path / name).mkdir(exist_ok=True)
        for path, text in files.items():
            (tmp_path / name / path).write_text(text)
    recipe = find_lineage(Draft(merged=str(tmp_path / "merged"))).recipe
    assert recipe.base == str(tmp_path / "merged/base")
    assert {task: spec.expert for task, spec in recipe.tasks.items()} == {
        "math": str(tmp_path / "math"),
        "code": str(tmp_path / "code"),
        "law": str(tmp_path / "here/law"),
    }
    assert {spec.data.path for spec in recipe.tasks.values()} == {str(tmp_path / "math/rows")}


UNREADABLE = {
    "broken": "base_model: [a, b",
    "a list": "- base_model",
    "a mapping for a name": "base_model: {a: b}\ndatasets: 7\nmodel-index: [[{results: x}]]\nconfigs: {a: [1]}",
    "odd tags": 'base_model: !!int ""',
    "no such day": "date: 2024-99-99",
    "a python object": "base_model: !!python/object/apply:os.system [exit]",
    "nested without end": f"base_model: {'[' * 1000}",
    "merge keys that unfold": MERGES,
    "aliases that unfold": LAUGHS,
    "a list in itself": "base_model: &a [*a]",
    "too long": f"base_model: {'x' * 2_000_000}",
}


@pytest.mark.parametrize("metadata", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_metadata_is_left_out_and_said(metadata: str, tmp_path: Path) -> None:
    """Wherever it stands: no traceback, but a note, or the question what the model was made from."""
    read = read_card(f"---\n{metadata}\n---\nusing [a/b](https://hub) as a base\n")
    assert (read.base_models, read.datasets, read.configs) == ((), (), ())
    assert read.problems
    assert read.bases_in_text == ("a/b",)
    for file in ("mergekit_config.yml", "featcal.yaml", "README.md", "config.json"):
        (tmp_path / file).write_text(f"---\n{metadata}\n---\n" if file == "README.md" else metadata)
        with pytest.raises(LineageError, match="--expert TASK=REPO --data TASK=SOURCE"):
            find_lineage(Draft(merged=str(tmp_path)))
        (tmp_path / file).unlink()


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "models: []",
        "{merge_method: [ties], models: []}",
        "{merge_method: ties, models: [a/b]}",
        "{merge_method: ties, models: [{model: {a: b}}]}",
        "{merge_method: ties, models: [{model: {model: {path: [x]}}}]}",
        "{merge_method: ties, models: [{model: x/y}], base_model: 7}",
        "{merge_method: ties, slices: [{sources: 7}]}",
        "{merge_method: ties, slices: [{sources: [{model: x/y, layer_range: [0, 0xffffffffffffffffffff]}]}]}",
        "{merge_method: ties, modules: {vision: 7}}",
    ],
)
def test_a_config_that_is_none_is_malformed(config: str) -> None:
    with pytest.raises(MalformedError):
        read_mergekit(load_documents(config), "mergekit_config.yml")


def test_foreign_text_reaches_a_message_escaped_and_short(tmp_path: Path) -> None:
    (tmp_path / "mergekit_config.yml").write_text(listing("ties", "x\x1b[31m/\n" + "y" * 500, base="a/b"))
    with pytest.raises(LineageError) as caught:
        find_lineage(Draft(merged=str(tmp_path)))
    assert "\x1b" not in str(caught.value)
    assert len(caught.value.what) < 300


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["o/vit_mnist", "o/vit_sun397"], ["mnist", "sun397"]),
        (["o/T5_glue-cola_lora-16", "p/t5_glue-SST2_lora-16"], ["cola", "sst2"]),
        (["o/bert-math@v1", "o/base+o/bert-code@v2"], ["math", "code"]),
        (["o/a-b", "o/a-b-c"], ["b", "b-c"]),
        (["o/math", "p/math"], ["o", "p"]),
        (["o/math@v1", "o/math@v2"], ["math-1", "math-2"]),
        (["o/math@v1", "o/math@v2", "o/math-1"], ["math-2", "math-3", "math-1"]),
        (["o/Only-One"], ["only-one"]),
        (["/tmp/x y/math=1", "/tmp/z/code"], ["math-1", "code"]),
    ],
)
def test_task_names_are_what_tells_experts_apart(references: list[str], names: list[str]) -> None:
    assert name_tasks(references) == names
