"""Inspections on the terminal: nothing cut, nothing that needs colour, the same words for the same figures."""

import io
import re
from dataclasses import replace
from math import nan

import pytest
from inspections import make_inspection, set_last
from rich.cells import cell_len
from rich.console import Console

from featcal_cli.cli.console import LEVELS
from featcal_cli.cli.drift import show_inspection
from featcal_cli.reporting.html_page import write_page
from featcal_cli.reporting.report import Inspection
from featcal_cli.reporting.verdict import write_summary
from featcal_cli.runtime.sanitise import without_folders


def show(inspection: Inspection, width: int = 80, *, terminal: bool = False) -> str:
    out = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    show_inspection(inspection, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def read_bars(text: str, role: str) -> list[str]:
    return re.findall(rf"{role} +([{LEVELS}·? ]+)$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize(("tasks", "blocks"), [(1, 1), (5, 12), (20, 80)])
def test_no_figure_is_cut_and_no_line_too_long(tasks: int, blocks: int, compare: bool, width: int) -> None:
    names = [f"{'a task with a long name ' * (number % 2)}{number}" for number in range(tasks)]
    inspection = make_inspection(names, blocks, compare=compare)
    text = show(inspection, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert not re.search(r"[\u2501-\u257f]", text)  # boxes; a thin rule is under heads
    for task in inspection.tasks.values():
        for role in task.models:
            assert re.search(rf" {task.models[role].last.relative:.3f}\b", text)
    for role in inspection.names:
        assert len(read_bars(text, role)) == tasks


def test_a_bar_has_a_character_a_block_on_a_scale_from_0_to_the_largest_drift() -> None:
    text = show(make_inspection(["a"], 8, levels={"model": 0.8, "base": 0.8}))
    assert read_bars(text, "model") == [LEVELS]
    assert "0 ▁ to 0.8 █" in text
    assert "encoder.layers.0 … 7" in text
    assert "neighbouring" not in text


def test_neighbours_share_a_character_where_the_terminal_is_too_narrow() -> None:
    text = show(make_inspection(["a"], 240))
    (bar,) = read_bars(text, "model")
    assert len(bar) == 60
    assert bar == "".join(sorted(bar))
    assert "mean of 4" in text.replace("\n", " ")


def test_lists_of_blocks_are_apart_and_unreached_blocks_and_broken_figures_are_shown() -> None:
    encoder, decoder = ([f"{name}.block.{number}" for number in range(3)] for name in ("encoder", "decoder"))
    inspection = make_inspection(["whole"], [*encoder, *decoder])
    part = make_inspection(["part"], encoder)
    inspection = replace(inspection, tasks=inspection.tasks | part.tasks)
    whole, short = read_bars(show(set_last(inspection, "whole", "model", nan)), "model")
    assert re.fullmatch(rf"[{LEVELS}]{{3}} [{LEVELS}]{{2}}\?", whole)
    assert short[3:] == " ···"


def test_where_merging_did_worse_than_no_merging_it_says_so_and_what_helps() -> None:
    inspection = make_inspection(["fine", "bad", "worse"])
    text = show(inspection, 200)
    assert "user/model is 33 % nearer to the experts than the base model (mean drift 1.010 against 1.515)" in text
    assert ", and farther on no task." in text
    inspection = set_last(set_last(inspection, "bad", "model", 2.0), "worse", "model", 3.0)
    text = show(inspection, 200)
    assert "warning: user/model is farther from the expert than the base model on worse (by 1.470)" in text
    assert "smaller merging scale" in text
    assert "on no task" not in text
    assert "fine (" not in text


def test_two_models_are_compared_in_words_both_ways_after_a_verdict() -> None:
    inspection = make_inspection([f"t{number}" for number in range(9)], compare=True)
    verdict = "Outputs of user/other are 40 % nearer to the expert's than those of user/model"
    assert show(make_inspection(["a"], compare=True), 200).startswith(verdict)
    inspection = set_last(inspection, "t3", "other", 1.53)
    text = show(inspection, 200)
    assert "user/other is farther from the expert than user/model on t3 (by 0.500)." in text
    assert "user/other is 30 % nearer to the experts than user/model (mean drift" in text


def test_figures_that_are_said_to_differ_do_and_means_are_those_beside_them() -> None:
    """0.1824 and 0.1816 have the same three digits; the differences of the tasks are 0.001 and 0.002 on average."""
    inspection = make_inspection(["a", "b"], compare=True)
    for task, model, other in (("a", 0.1824, 0.1816), ("b", 0.1824, 0.1806)):
        inspection = set_last(set_last(inspection, task, "model", model), task, "other", other)
    text = show(inspection, 200)
    assert "0.7 % nearer to the experts than user/model (mean drift 0.181 against 0.182)" in text
    assert next(line.split()[1:4] for line in text.splitlines() if line.startswith("mean")) == [
        "0.182",
        "0.181",
        "-0.001",
    ]
    near = set_last(set_last(inspection, "a", "other", 0.1822), "b", "other", 0.1822)
    assert "0.1 % nearer to the experts than user/model (mean drift 0.1822 against 0.1824)" in show(near, 200)


def test_without_outputs_there_are_no_columns_for_them() -> None:
    inspection = make_inspection(["a"])
    drift = inspection.tasks["a"].models["model"]
    bare = replace(drift, output=None)
    models = {**inspection.tasks["a"].models, "model": bare}
    text = show(replace(inspection, tasks={"a": replace(inspection.tasks["a"], models=models)}), 200)
    assert "drift" in text and not re.search(r"\b(output|agree)\b", text)


def test_names_are_inert_and_tokens_are_not_shown() -> None:
    token = "hf_" + "aB3dE6gH" * 3
    inspection = make_inspection([f"task {token}"])
    assert token not in show(replace(inspection, names=inspection.names | {"model": f"/models/{token}"}), 200)
    text = show(make_inspection(["\x1b[31mx\n:smile: [bold]b[/bold]"]), 200)
    assert "\x1b" not in text
    assert ":smile: [bold]b[/bold]" in text


def test_colour_is_only_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = set_last(make_inspection(["a"], compare=True), "a", "model", 2.0)  # with a warning
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(r"\x1b\[[\d;]*3[18]", show(inspection, terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show(inspection, terminal=True)
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)
    assert re.sub(r"\x1b\[[\d;]*m", "", plain) == show(inspection)


def test_sentences_name_folders_shortly_unless_these_have_the_same_name() -> None:
    inspection = make_inspection(["a"], 2, compare=True)
    for other, sentence in (("/work/tuned", "tuned is "), ("/home/merge", "/home/merge is ")):
        text = show(replace(inspection, names=inspection.names | {"model": "/work/merge", "other": other}), 200)
        assert f"model  /work/merge\nother  {other}\n" in text
        assert any(line.startswith(sentence) for line in text.splitlines())


def test_folders_with_spaces_and_brackets_are_left_out_of_what_is_shared() -> None:
    inspection = make_inspection(["a"], 2, compare=True)
    model, data = "/home/me/my (old) models/run 2, late/merged", "/home/me/rows of mine/a.csv"
    names = {"model": model, "other": "/home/me/my (old) models/run 3", "base": "me/base"}
    recipe = {"merged": model, "tasks": {"a": {"data": {"path": data}, "expert": "me/a"}}}
    notes = [f"mergekit_config.yml of {model}: odd", "/home/you/x is no model"]
    inspection = replace(inspection, names=inspection.names | names, recipe=recipe, notes=notes)
    assert inspection.short_names["model"] == "merged" and inspection.short_names["other"] == "run 3"
    page, summary = write_page(inspection), write_summary(inspection)
    for text in (page, summary):
        assert "merged" in text and not any(word in text for word in ("(old)", "run 2", "/home", "of mine"))
    assert "mergekit_config.yml of merged: odd" in page and "path: a.csv" in page


def test_a_known_path_is_not_cut_out_of_another_name() -> None:
    text = "of org/model and /model, in /model-2/a b; in /data/my runs/x.csv. In /data/my runs/x/"
    short = "of org/model and model, in a b; in x.csv. In x/"
    assert without_folders(text, ["/model", "/data/my runs/x/", "/data/my runs/x.csv"]) == short
