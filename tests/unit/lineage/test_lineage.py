"""Every source of a merged model's lineage, told, told apart, asked for at once or refused."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from bad_input import LAUGHS
from bad_input import MERGES as MERGE_KEYS
from wild_merges import CODE, MERGES, SAID, SILENT, TIES, Files, Merge, card, config, listed, lora, model, open_texts

from featcal_cli.hub.repo import Kind, Repo
from featcal_cli.lineage.claims import MalformedError, read_card, read_mergekit
from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.lineage.search import OpenQuestionsError, name_tasks
from featcal_cli.recipe.reading import collect_overrides, read_draft
from featcal_cli.recipe.schema import Draft
from featcal_cli.runtime.errors import FeatCalError, LineageError
from featcal_cli.runtime.structured_text import load_documents
from featcal_cli.workflows.inputs import dump_recipe

PARTS = card(configs=[{"config_name": "one"}, {"config_name": "two"}])
ROWS: dict[str, Files] = {"data ORG/rows": card(), "data ORG/parts": PARTS, "ORG/mine": card()}
ANSWERS = {"REPO": "ORG/mine", "SOURCE": "ORG/rows", "CONFIG": "one", "TASK": "mine"}


def read_command(command: str) -> Draft:
    """What a command line of `featcal calibrate` says, as the command itself reads it."""
    featcal, calibrate, merged, *options = shlex.split(command)
    assert (featcal, calibrate) == ("featcal", "calibrate")
    given: dict[str, list[str]] = {"base": [], "expert": [], "data": [], "skip_expert": []}
    for name, value in zip(options[::2], options[1::2], strict=True):
        given[name.removeprefix("--").replace("-", "_")].append(value)
    base = next(iter(given.pop("base")), None)
    return read_draft(None, collect_overrides(merged=merged, base=base, **given))


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: merge.name)
def test_a_merge_is_found_or_asked_for_in_one_round_or_refused(merge: Merge) -> None:
    """The recipe says the same as the findings; where the user says something too, no repo is opened twice."""
    open_one = open_texts({"ORG/merged": merge.files, **merge.repos, **ROWS})
    opened: list[tuple[str, Kind]] = []

    def opener(name: str, kind: Kind) -> Repo:
        opened.append((name, kind))
        return open_one(name, kind)

    draft = Draft.model_validate({"merged": "ORG/merged", **merge.draft})
    if merge.refused:
        with pytest.raises(FeatCalError, match=merge.refused) as refused:
            find_lineage(draft, opener)
        assert all(words in str(refused.value) for words in merge.words)
        assert refused.value.where and refused.value.fix
        return
    if merge.asks:
        with pytest.raises(OpenQuestionsError) as caught:
            find_lineage(draft, opener)
        command = caught.value.command
        for words in merge.words:
            assert words in str(caught.value)
        asked = [" ".join(pair) for question in caught.value.questions for pair in question.options or ()]
        assert sorted(asked) == sorted(merge.asks)
        names_experts = any(one.startswith("--expert") for one in asked)
        for task, expert in merge.experts.items():
            assert (f"--expert {task}={expert}" in command) is names_experts
        if merge.base:
            assert (f"--base {merge.base}" in command) is names_experts
        command = re.sub(r"\b(REPO|SOURCE|CONFIG|TASK)\b", lambda word: ANSWERS[word[1]], command)
        draft = read_command(command)
        opened.clear()
    lineage = find_lineage(draft, opener)
    assert not merge.draft or len(set(opened)) == len(opened)
    values = {finding.role: finding.value for finding in lineage.findings}
    experts = {role: value for role, value in values.items() if role.startswith("expert ")}
    if not merge.asks:
        assert values["base"] == merge.base
        assert experts == {f"expert {task}": one for task, one in merge.experts.items()}
    assert values.items() >= merge.values.items()
    sources = {finding.role: finding.source for finding in lineage.findings}
    for role, source in merge.sources.items():
        assert source in sources[role]
    assert merge.note in "\n".join(lineage.notes)
    assert lineage.recipe.base == values["base"]
    assert [f"expert {task}" for task in lineage.recipe.tasks] == list(experts)
    for task, spec in lineage.recipe.tasks.items():
        assert (spec.expert, str(spec.data)) == (values[f"expert {task}"], values[f"data {task}"])
    assert Draft.model_validate(yaml.safe_load(dump_recipe(lineage.recipe)))


def test_many_experts_that_are_gone_are_told_shortly() -> None:
    experts = [f"ORG/bert-{number}" for number in range(60)]
    repos = dict.fromkeys(experts[:2], CODE)
    opener = open_texts({"ORG/merged": listed("ties", *experts, base_model="ORG/base"), **repos, **ROWS})
    with pytest.raises(LineageError) as caught:
        find_lineage(Draft(merged="ORG/merged"), opener)
    assert "and 53 more" in caught.value.what and len(caught.value.what) + len(caught.value.where) < 1000
    assert caught.value.command.count("--skip-expert") == 58 and "--expert " not in caught.value.command
    assert caught.value.where.startswith("ORG/bert-2, ORG/bert-3, ")
    assert caught.value.where.endswith(" and 53 more, named by mergekit_config.yml of ORG/merged")
    assert caught.value.where.count("named by") == 1


@pytest.mark.parametrize("generations", [5, 6])
def test_ancestors_are_looked_for_five_generations_up(generations: int) -> None:
    line = ["ORG/bert-math", *(f"ORG/older-{number}" for number in range(1, generations)), "ORG/base"]
    repos = {child: model(parent, data="ORG/rows") for child, parent in pairwise(line)}
    repos |= {"ORG/bert-code": model("ORG/base", data="ORG/rows")}
    opener = open_texts({"ORG/merged": listed("linear", "ORG/bert-math", "ORG/bert-code"), **repos, **ROWS})
    if generations == 5:
        assert find_lineage(Draft(merged="ORG/merged"), opener).recipe.base == "ORG/base"
    else:
        with pytest.raises(OpenQuestionsError, match="do not agree on a base"):
            find_lineage(Draft(merged="ORG/merged"), opener)


def test_a_configuration_that_the_card_repeats_is_noted_once() -> None:
    names = ["ORG/bert-math", "ORG/bert-code"]
    files = listed("slerp", *names, base_model=names[0])
    (text,) = files.values()
    files |= card(f"```yaml\n{text}```\n", tags=["mergekit"])
    opener = open_texts({"ORG/merged": files, **dict.fromkeys(names, CODE), **ROWS})
    notes = find_lineage(Draft(merged="ORG/merged"), opener).notes
    assert sum("is one of the experts and not their base" in note for note in notes) == 1


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
    opener = open_texts({"ORG/merged": config(TIES), **SILENT, **ROWS})
    for folder in ("Base-7B", "Base-7B-chat", "rows"):
        Path("ORG", folder).mkdir(parents=True)
        Path("ORG", folder, "README.md").write_text("---\ndatasets: /etc\nbase_model: /etc\n---\n")
    recipe = find_lineage(Draft(merged="ORG/merged"), opener).recipe
    assert recipe.base == "ORG/Base-7B@main"
    assert recipe.tasks["chat"].expert == "ORG/Base-7B-chat@main"
    assert str(recipe.tasks["chat"].data) == "ORG/rows@main"
    assert recipe.tasks["code"].expert == "ORG/Base-7B-code"


def test_a_card_in_a_folder_may_name_paths(tmp_path: Path) -> None:
    """From the folder, absolute, or (where a model is there, or it can be nothing else) from where the command runs."""
    law, chat = Path("law").resolve(), Path("models/chat").resolve()
    for name, files in {
        "merged": listed("ties", "../math", str(tmp_path / "code"), "./law", "models/chat", base_model="base"),
        "merged/base": {},
        "math": card(datasets=["rows"]),
        "math/rows": {},
        "code": lora("../merged/base", "../math/rows"),
        str(law): card(datasets=str(tmp_path / "math/rows")),
        str(chat): {"config.json": "{}", **card(datasets=str(tmp_path / "math/rows"))},
    }.items():
        (tmp_path / name).mkdir(exist_ok=True, parents=True)
        for path, text in files.items():
            (tmp_path / name / path).write_text(text)
    recipe = find_lineage(Draft(merged=str(tmp_path / "merged"))).recipe
    assert recipe.base == str(tmp_path / "merged/base")
    experts = {"math": tmp_path / "math", "code": tmp_path / "code", "law": law, "chat": chat}
    assert {task: spec.expert for task, spec in recipe.tasks.items()} == {k: str(v) for k, v in experts.items()}
    assert {spec.data.path for spec in recipe.tasks.values()} == {str(tmp_path / "math/rows")}


UNREADABLE = {
    "broken": "base_model: [a, b",
    "a list": "- base_model",
    "a mapping for a name": "base_model: {a: b}\ndatasets: 7\nmodel-index: [[{results: x}]]\nconfigs: {a: [1]}",
    "odd tags": 'base_model: !!int ""',
    "a python object": "base_model: !!python/object/apply:os.system [exit]",
    "nested without end": f"base_model: {'[' * 1000}",
    "merge keys that unfold": MERGE_KEYS,
    "aliases that unfold": LAUGHS,
    "a list in itself": "base_model: &a [*a]",
    "too long": f"base_model: {'x' * 2_000_000}",
}


@pytest.mark.parametrize("metadata", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_metadata_is_left_out_and_said(metadata: str, tmp_path: Path) -> None:
    """Wherever it stands: no traceback, but a note, or the question what the model was made from."""
    read = read_card(f"---\n{metadata}\n---\n```yaml\na: b\n```\n")
    assert not (read.base_models or read.datasets)
    assert read.problem or "a mapping" in metadata or "datasets: 7" in metadata
    assert read.yaml_blocks == ["a: b\n"]
    for file in ("mergekit_config.yml", "featcal.yaml", "README.md", "config.json"):
        (tmp_path / file).write_text(f"---\n{metadata}\n---\n" if file == "README.md" else metadata)
        with pytest.raises(LineageError, match="--expert TASK=REPO --data TASK=SOURCE"):
            find_lineage(Draft(merged=str(tmp_path)))
        (tmp_path / file).unlink()


def test_a_config_that_is_none_is_malformed() -> None:
    for text in (
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
            read_mergekit(load_documents(text), "mergekit_config.yml")


def test_foreign_text_reaches_a_message_escaped_and_short(tmp_path: Path) -> None:
    (text,) = listed("ties", "x\x1b[31m/\n" + "y" * 500, base_model="a/b").values()
    (tmp_path / "mergekit_config.yml").write_text(text)
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
