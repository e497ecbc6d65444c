"""What recipes say: values are what their keys want, whatever YAML 1.1 makes of them; what is wrong with a recipe is
said at once, with lines."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from command_line import Capsys, complete_draft, featcal_inside, run_line

from featcal_cli.recipe.reading import (
    as_draft,
    collect_overrides,
    find_recipe,
    print_shipped,
    read_draft,
    shipped_recipes,
)
from featcal_cli.recipe.schema import Merge, Recipe
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows.inputs import dump_recipe

ODD = """\
merged: {method: ties, scale: 5e-1, density: 0.4}
base: user/base
tasks:
  no: {expert: user/no, data: user/no}
  on:
    expert: user/on@12345678
    data: {dataset: user/on, config: off, split: 010, revision: 1e10, columns: {label: 2024-01-02}}
    evaluate: {split: yes, answers: [yes, no, 12:30, 1e3]}
  123: {expert: user/a, data: user/a}
calibration: {ridge: 1e-5, rho: 2, examples: 0256, bias: off, routers: yes, seed: 08}
"""


def test_a_value_is_what_its_key_wants_and_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(ODD)
    recipe = complete_draft(read_draft(file, {}))
    assert list(recipe.tasks) == ["no", "on", "123"]
    settings, on = recipe.calibration, recipe.tasks["on"]
    assert (settings.ridge, settings.rho, settings.examples, settings.seed) == (1e-5, 2.0, 256, 8)
    assert (settings.bias, settings.routers) == (False, True)
    assert (on.expert, on.data.config, on.data.split, on.data.revision) == ("user/on@12345678", "off", "010", "1e10")
    assert on.data.columns == {"label": "2024-01-02"}
    assert on.evaluate is not None
    assert (on.evaluate.split, on.evaluate.answers) == ("yes", ("yes", "no", "12:30", "1e3"))
    file.write_text(dump_recipe(recipe))
    assert complete_draft(read_draft(file, {})).model_dump() == recipe.model_dump()
    # also by who reads YAML 1.1
    assert Recipe.model_validate(yaml.safe_load(file.read_text())).model_dump() == recipe.model_dump()


WRONG = """\
merged: {method: ties, scal: 0.3}
tasks:
  mnist:
    expret: a/c
    data: ./nowhere.jsonl
  svhn:
    expert: https://example.com/x
    evaluate: {answers: {a: b}, max_new_tokens: few}
calibration:
  examples: many
  metric: loud
  split: train
  1.5: 2
"""


def test_hundreds_of_mistakes_parse_the_recipe_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("tasks:\n" + "".join(f"  t{number}: {{exprt: x}}\n" for number in range(300)))
    compose = Mock(wraps=yaml.compose_all)
    monkeypatch.setattr(yaml, "compose_all", compose)
    with pytest.raises(RecipeError, match="301 mistakes"):
        read_draft(file, {})
    assert compose.call_count == 1


def test_all_mistakes_of_a_recipe_are_said_at_once_each_with_its_line(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(WRONG)
    run = featcal_inside(capsys, "calibrate", {"-r": file, "--rho": "1e9"})
    assert run.code == 2 and run.stdout == ""
    lines = run.shown.splitlines()
    assert lines[0] == "error: 11 mistakes:" and run.stderr.count("error:") == 1
    said = [line.removeprefix("    - ") for line in lines if line.startswith("    - ")]
    places = "line 1, line 4, line 5, line 7, line 8, line 8, the command line, line 10, line 11, line 12, line 13"
    assert ", ".join(text.partition(":")[0] for text in said) == places
    for words in (
        "unknown key scal in merged (did you mean scale?)",
        "unknown key expret in tasks.mnist (did you mean expert?)",
        "there is no file or folder ./nowhere.jsonl",
        "https://example.com/x is not the page of a model",
        "calibration.examples must be a valid integer, not 'many'",
        "--rho must be at most 1000000, not 1000000000",
        "unknown key split in calibration (move it to the section data or",
        "unknown key 1.5 in calibration (the keys here are",
    ):
        assert words in run.stderr
    assert f"in: {file}" in run.stderr.replace("\n    ", "")


def test_all_tasks_that_are_mistyped_are_named_at_once(capsys: Capsys) -> None:
    experts = "--merge ties:0.5:0.4 --base a/a --expert mnist=a/b --expert svhn=a/c --expert dtd=a/d"
    typed = "--data mnst=x/y --data svhn=x/y --columns svnh=text:t --split ddt=test --skip-expert mnis"
    run = run_line(capsys, ["calibrate", *experts.split(), *typed.split(), "-o", "my out", "--dry-run"])
    assert run.code == 2
    for wrong, right in (("mnst", "mnist"), ("svnh", "svhn"), ("ddt", "dtd"), ("mnis", "mnist")):
        assert wrong in run.stderr and f"did you mean {right}?" in run.stderr
    # what to type instead has all that was typed
    assert f"featcal calibrate {experts} {typed} -o 'my out' --dry-run --expert mnst=REPO" in run.stderr


@pytest.mark.parametrize("name", [file.stem for file in shipped_recipes()])
def test_a_printed_recipe_is_the_shipped_one_from_any_folder(name: str, tmp_path: Path) -> None:
    printed, shipped = tmp_path / "mine.yaml", next(file for file in shipped_recipes() if file.stem == name)
    printed.write_text(print_shipped(name))
    mine, theirs = read_draft(printed, {}), read_draft(shipped, {})
    assert mine.model_dump() == theirs.model_dump()
    assert len(set(mine.local_paths)) == len(set(theirs.local_paths)) == (11 if name == "demo" else 0)
    assert all(task.expert and Path(task.expert).is_absolute() for task in mine.tasks.values() if name == "demo")


@pytest.mark.parametrize(
    ("typed", "keys", "name", "option"),
    [
        ("average", {"method": "average"}, "average", "average"),
        ("task_arithmetic:0.123456789", {"method": "task_arithmetic", "scale": 0.123456789},
         "task_arithmetic-0.123456789", "task_arithmetic:0.123456789"),
        ("ties", {"method": "ties", "scale": 0.3, "density": 0.2}, "ties-0.3-0.2", "ties:0.3:0.2"),
        ("ties:0.4:0.1", {"method": "ties", "scale": 0.4, "density": 0.1}, "ties-0.4-0.1", "ties:0.4:0.1"),
        ("dare_ties:1::7", {"method": "dare_ties", "scale": 1.0, "density": 0.2, "seed": 7}, "dare_ties-1-0.2-7",
         "dare_ties:1:0.2:7"),
    ],
)  # fmt: skip
def test_merges_in_one_word_hold_what_they_read(typed: str, keys: dict[str, Any], name: str, option: str) -> None:
    draft = as_draft({key: value for key, value in collect_overrides(merge=typed).items() if value})
    assert draft.model_dump()["merged"] == keys and draft.name == name
    assert as_draft({"merged": keys}).merged == draft.merged
    assert isinstance(draft.merged, Merge) and draft.merged.option == option


def test_no_job_depends_on_the_papers_figures() -> None:
    draft = read_draft(find_recipe("clip-vit-b32-8"), {})
    assert draft.paper and "paper" not in draft.model_dump()


def test_a_program_may_give_paths_in_its_recipe() -> None:
    tasks = {"x": {"expert": Path("e"), "data": {"path": Path("x.jsonl")}}}
    texts = {"x": {"expert": "e", "data": {"path": "x.jsonl"}}}
    draft = as_draft({"merged": Path("m"), "base": Path("b"), "tasks": tasks, "skip_experts": [Path("s")]})
    assert draft == as_draft({"merged": "m", "base": "b", "tasks": texts, "skip_experts": ["s"]})
