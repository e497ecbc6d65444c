"""Every source of a merged model's lineage, told, told apart, asked for or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_input import LAUGHS, MERGES
from hub_texts import Files, card, open_texts

from featcal_cli.hub.repo import Kind, Repo
from featcal_cli.lineage.claims import MalformedError, read_card, read_mergekit
from featcal_cli.lineage.experts import name_tasks
from featcal_cli.lineage.resolve import Lineage, find_lineage
from featcal_cli.recipe.schema import Draft
from featcal_cli.runtime.errors import FeatCalError, HubError, LineageError, RecipeError
from featcal_cli.runtime.structured_text import load_documents
from featcal_cli.workflows.inputs import dump_recipe

SAID = "the command line or recipe"
CONFIG = "mergekit_config.yml of ORG/merged"


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
LINEAR = listing("linear", "ORG/bert-math", "ORG/bert-code")
ONLY_CARD = card(base_model=["ORG/bert-math", "ORG/base", "ORG/bert-code"], tags=["mergekit", "merge"])
ROWS_OF = {"data math": "ORG/math-rows", "data code": "ORG/code-rows"}
EXPERTS = {"expert math": "ORG/bert-math", "expert code": "ORG/bert-code", **ROWS_OF}


@dataclass(frozen=True)
class Case:
    """A Hub on which a lineage can be told, or words of the message why not."""

    name: str
    merged: Files | None
    """The text files of ORG/merged."""
    draft: Mapping[str, Any]
    values: Mapping[str, str] = field(default_factory=lambda: {"base": "ORG/base", **EXPERTS})
    """Role → value of the findings that are looked at."""
    repos: Mapping[str, Files] = field(default_factory=lambda: SILENT)
    """Repo id (datasets after "data ") → its text files."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Role → source, in part."""
    note: str = ""
    """A part of one of the notes."""
    refused: tuple[str, ...] = ()


FEATCAL_YAML = """
merged: other/merged@0123456789012345678901234567890123456789
base: ORG/base@v1
tasks:
  sums: {expert: ORG/bert-math@v1, data: {dataset: ORG/math-rows, revision: v1, config: hard, split: train}}
  code: {expert: ORG/bert-code, data: {path: code.jsonl}}
calibration: {examples: 7}
"""
SUMS = "{merged: ORG/merged, base: ORG/base, tasks: {sums: {expert: ORG/bert-math, data: 'ORG/math-rows:hard'}}}"
TOLD = [
    Case(
        "featcal-yaml", {"featcal.yaml": FEATCAL_YAML}, {},
        {
            "merged": "ORG/merged", "base": "ORG/base@v1", "expert sums": "ORG/bert-math@v1",
            "data sums": "ORG/math-rows@v1:hard:train", "data code": "ORG/code-rows",
        },
        {"ORG/bert-math@v1": {}, "ORG/bert-code": expert("code"), **ROWS},
        {"data sums": "featcal.yaml of ORG/merged", "data code": "the card of ORG/bert-code"},
        note="a path on its author's machine",
    ),
    Case(
        "mergekit-before-featcal-yaml", {**mergekit(LINEAR), "featcal.yaml": SUMS}, {},
        {"base": "ORG/base", **EXPERTS, "data math": "ORG/math-rows:hard"},
        sources={"base": "featcal.yaml", "expert math": CONFIG, "data math": "featcal.yaml", "data code": "card of"},
    ),
    Case("unordered-list-with-the-base-said", ONLY_CARD, {"base": "ORG/base"}, sources={"base": SAID}),
    Case(
        "built-from-experts", None,
        {
            "merged": {"method": "task_arithmetic", "scale": 0.3},
            "tasks": {"one": {"expert": "ORG/bert-math"}, "two": {"expert": "ORG/bert-code"}},
        },
        {"merged": "task_arithmetic:0.3", "base": "ORG/base", "data one": "ORG/math-rows"}, TWO,
        {"expert one": SAID, "base": "base_model of"},
    ),
    Case(
        "data-said-for-a-found-expert", mergekit(TIES), {"tasks": {"Math": {"data": "mine/rows:small"}}},
        {"expert Math": "ORG/bert-math", "data Math": "mine/rows:small", "data code": "ORG/code-rows"},
        sources={"data Math": SAID, "expert Math": CONFIG},
    ),
    Case(
        "experts-said-are-all-there-are", mergekit(TIES),
        {"tasks": {"sums": {"expert": "mine/math"}, "code": {"data": "mine/rows"}}},
        {"base": "ORG/base", "expert sums": "mine/math", "expert code": "ORG/bert-code", "data code": "mine/rows"},
        {**SILENT, "mine/math": card(datasets="ORG/math-rows")},
        {"expert sums": SAID, "expert code": CONFIG, "data sums": "the card of mine/math"},
        note="further experts, which are left out: ORG/bert-math",
    ),
    Case(
        "dataset-and-config-of-the-task",
        mergekit(listing("ties", "ORG/t5_glue-cola_lora", "ORG/t5_glue-sst2_lora", base="ORG/t5")), {},
        {"data cola": "ORG/cola-rows", "data sst2": "ORG/glue:SST2"},
        {
            "ORG/t5_glue-cola_lora": card(datasets=["ORG/web", "ORG/cola-rows"]),
            "ORG/t5_glue-sst2_lora": card(datasets=["ORG/glue"]),
            "data ORG/cola-rows": card(configs=[{"config_name": "only", "data_files": "*"}]),
            "data ORG/glue": card(dataset_info=[{"config_name": name} for name in ("cola", "SST2", "ax")]),
        },
        note="ORG/glue has 3 configs; SST2",
    ),
    Case(
        "default-config", mergekit(TIES), {},
        {"data math": "ORG/math-rows:b", "data code": "ORG/code-rows:default"},
        {
            **TWO,
            "data ORG/math-rows": card(configs=[{"config_name": "a"}, {"config_name": "b", "default": True}]),
            "data ORG/code-rows": card(configs=[{"config_name": "js"}, {"config_name": "default"}]),
        },
    ),
    Case(
        "an-expert-given-as-the-base", mergekit(TIES), {"base": "ORG/bert-code"},
        {"base": "ORG/bert-code", "expert math": "ORG/bert-math"}, TWO, {"base": SAID},
    ),
    Case(
        "a-base-that-a-linear-merge-lists",
        mergekit(listing("linear", "ORG/bert-math", "ORG/bert-code", "ORG/base")), {"base": "ORG/base"},
        {"base": "ORG/base", "expert bert-math": "ORG/bert-math", "data bert-code": "ORG/code-rows"}, TWO,
        {"base": SAID},
    ),
]  # fmt: skip
REFUSED = [
    Case(
        "an-expert-not-said-is-not-the-base", card(base_model=["ORG/bert-math", "ORG/bert-code", "ORG/bert-law"]),
        {"tasks": {"m": {"expert": "ORG/bert-math"}, "c": {"expert": "ORG/bert-code"}}},
        refused=("nothing says what the base", "featcal calibrate ORG/merged --base REPO"),
    ),
    Case(
        "data-for-no-expert", mergekit(TIES), {"tasks": {"sums": {"data": "mine/rows"}}}, repos=TWO,
        refused=("the task sums", "math and code", "--expert sums=REPO"),
    ),
    Case(
        "nobody-to-leave-out", {}, {"skip_experts": ["lost"]}, repos={},
        refused=("there is no expert lost that could be left out: the experts are not known",),
    ),
    Case(
        "nobody-of-this-name-to-leave-out", mergekit(TIES), {"skip_experts": ["mth"]}, repos=TWO,
        refused=("there is no expert mth", "math"),
    ),
    Case(
        "built-from-nothing", None, {"merged": {"method": "average"}}, repos={},
        refused=("which experts the merged model was merged", "--merge average --base REPO --expert TASK=REPO"),
    ),
    Case(
        "the-only-expert-given-as-the-base", mergekit(listing("ties", "ORG/bert-math", base="ORG/base")),
        {"base": "ORG/bert-math"}, repos=TWO,
        refused=("which experts ORG/merged was merged from", "--expert TASK=REPO"),
    ),
    Case(
        "data-for-an-expert-that-is-given-as-the-base", mergekit(TIES),
        {"base": "ORG/bert-code", "tasks": {"code": {"data": "mine/rows"}}}, repos=TWO,
        refused=("for the task code", "experts without a task are math", "fill in REPO and type: featcal"),
    ),
]  # fmt: skip


def seek(case: Case) -> Lineage:
    """The lineage; no repo is opened twice for it."""
    opened: list[tuple[str, Kind]] = []
    open_one = open_texts({**({"ORG/merged": case.merged} if case.merged is not None else {}), **case.repos})

    def open_noted(name: str, kind: Kind) -> Repo:
        opened.append((name, kind))
        return open_one(name, kind)

    try:
        return find_lineage(Draft.model_validate({"merged": "ORG/merged", **case.draft}), open_noted)
    finally:
        assert len(set(opened)) == len(opened)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where no folder could be taken for a repo."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("case", TOLD, ids=lambda case: case.name)
def test_lineage_is_told(case: Case) -> None:
    lineage = seek(case)
    values = {finding.role: finding.value for finding in lineage.findings}
    sources = {finding.role: finding.source for finding in lineage.findings}
    for role, value in case.values.items():
        assert values[role] == value
    for role, source in case.sources.items():
        assert source in sources[role]
    assert case.note in "\n".join(lineage.notes)
    # the recipe says the same as the findings, and is a whole one
    assert lineage.recipe.base == values["base"]
    assert [f"expert {task}" for task in lineage.recipe.tasks] == [
        role for role in values if role.startswith("expert ")
    ]
    for task, spec in lineage.recipe.tasks.items():
        assert (spec.expert, str(spec.data)) == (values[f"expert {task}"], values[f"data {task}"])
    assert Draft.model_validate(yaml.safe_load(dump_recipe(lineage.recipe)))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_lineage_is_asked_for_or_refused(case: Case) -> None:
    with pytest.raises(FeatCalError) as caught:
        seek(case)
    message = str(caught.value)
    for words in case.refused:
        assert words in message
    assert isinstance(caught.value, LineageError | HubError | RecipeError)
    assert caught.value.where
    assert caught.value.fix


def test_many_experts_that_are_gone_are_told_shortly() -> None:
    experts = [f"ORG/bert-{number}" for number in range(60)]
    repos = {name: expert("math") for name in experts[:2]}
    opener = open_texts({"ORG/merged": mergekit(listing("ties", *experts, base="ORG/base")), **repos, **ROWS})
    with pytest.raises(LineageError) as caught:
        find_lineage(Draft(merged="ORG/merged"), opener)
    assert "and 53 more" in caught.value.what and len(caught.value.what) + len(caught.value.where) < 1000
    assert caught.value.command.count("--skip-expert") == 58 and "--expert " not in caught.value.command


def test_a_complete_draft_stays_as_it_is() -> None:
    opener = open_texts({"whole/a": {}})
    data = {"dataset": "whole/rows", "template": "{q}", "columns": {"label": "y"}}
    keys = {"merged": "whole/m", "base": "whole/b", "tasks": {"a": {"expert": "whole/a", "data": data}}}
    draft = Draft.model_validate({**keys, "calibration": {"examples": 7}})
    lineage = find_lineage(draft, opener)
    assert lineage.recipe.model_dump(exclude_none=True) == draft.model_dump(exclude_none=True)
    assert {finding.source for finding in lineage.findings} == {SAID}


def test_a_card_on_the_hub_leads_to_no_folder_here() -> None:
    """A folder with the name of a repo that a card names is passed over: the Hub's repo is meant."""
    name = "ORG"
    opener = open_texts({"ORG/merged": mergekit(TIES), **SILENT})
    for folder in ("base", "bert-math", "math-rows"):
        Path(name, folder).mkdir(parents=True)
        Path(name, folder, "README.md").write_text("---\ndatasets: /etc\nbase_model: /etc\n---\n")
    recipe = find_lineage(Draft(merged="ORG/merged"), opener).recipe
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
    read = read_card(f"---\n{metadata}\n---\n```yaml\na: b\n```\n")
    assert not (read.base_models or read.datasets or read.configs)
    assert read.problem or "a mapping" in metadata or "datasets: 7" in metadata
    assert read.yaml_blocks == ["a: b\n"]
    for file in ("mergekit_config.yml", "featcal.yaml", "README.md", "config.json"):
        (tmp_path / file).write_text(f"---\n{metadata}\n---\n" if file == "README.md" else metadata)
        with pytest.raises(LineageError, match="--expert TASK=REPO --data TASK=SOURCE"):
            find_lineage(Draft(merged=str(tmp_path)))
        (tmp_path / file).unlink()


def test_a_config_that_is_none_is_malformed() -> None:
    for config in (
        "[]",
        "models: []",
        "{merge_method: [ties], models: []}",
        "{merge_method: ties, models: [a/b]}",
        "{merge_method: ties, models: [{model: {a: b}}]}",
        "{merge_method: ties, models: [{model: {model: {path: [x]}}}]}",
        "{merge_method: ties, models: [{model: x/y}], base_model: 7}",
        "{merge_method: ties, slices: [{sources: 7}]}",
        "{merge_method: ties, modules: {vision: 7}}",
    ):
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
