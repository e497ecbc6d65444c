"""`featcal reproduce`: the paper's tables, on tiny models and data under the real ids."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from command_line import Run, check_refusal, featcal_inside
from hub_server import HubServer
from PIL import Image
from recipe_world import World
from safetensors.torch import load_file

from featcal_cli.calibration.journal import Journal
from featcal_cli.recipe.reading import find_recipe, read_draft

pytestmark = pytest.mark.usefixtures("undrawn")
RECIPE = "clip-vit-b32-8"
FEW = {"--device": "cpu", "--json": "", "--tasks": "mnist,svhn"}


@pytest.fixture
def paper(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tables are written; everything that the recipe of eight tasks names is on the Hub."""
    World(hub, tmp_path / "world").publish(read_draft(find_recipe(RECIPE), {}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reproduction"


@pytest.fixture
def unpictured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no picture of a table."""
    monkeypatch.setattr("featcal_cli.workflows.reproduce.plot_reproduction", lambda _: b"")


def make(capsys: pytest.CaptureFixture[str], table: str, **options: object) -> dict[str, Any]:
    """By the names of its rows, a table that is made without a fault; under "" all of it."""
    run = run_reproduce(capsys, table, **options)
    assert run.code == 0, run.stderr
    result = json.loads(run.stdout)
    return {"": result, **{line["name"]: line for line in result["lines"]}}


def run_reproduce(capsys: pytest.CaptureFixture[str], table: str, **options: object) -> Run:
    return featcal_inside(capsys, "reproduce", {"": table, **FEW, **{f"--{key}": options[key] for key in options}})


def test_a_table_holds_what_evaluate_measures_beside_the_papers(
    paper: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(capsys, "1", examples=4, limit=10)
    line = table["task_arithmetic + featcal, examples 4"]
    (cell,) = (paper / "cells").glob("*task_arithmetic*")
    run = featcal_inside(capsys, "evaluate", {"": str(cell), "--limit": 10, "--json": "", "--device": "cpu"})
    tasks = json.loads(run.stdout)["tasks"]
    measured = {task: 100 * tasks[task]["scores"][cell.name]["value"] for task in ("mnist", "svhn")}
    assert {task: line["figures"][task]["value"] for task in measured} == pytest.approx(measured)
    assert line["figures"]["mean"]["value"] == pytest.approx(mean(measured.values()))
    assert line["figures"]["mnist"]["paper"] == 98.8
    assert line["figures"]["mean"]["paper"] == pytest.approx((95.0 + 98.8) / 2), "the paper's, over the same tasks"
    assert line["figures"]["svhn"]["difference"] == pytest.approx(measured["svhn"] - 95.0)
    for name, role in (("experts", "expert"), ("task_arithmetic", "merged")):
        figure = table[name]["figures"]["mnist"]
        score = tasks["mnist"]["scores"][role]
        assert [figure["low"], figure["value"], figure["high"]] == pytest.approx(
            [100 * score[key] for key in ("low", "value", "high")]
        )
    assert table["average + featcal, examples 4"]["figures"]["mnist"]["value"] is not None
    assert table["wudi + featcal, examples 4"]["figures"]["mnist"]["value"] is None
    assert (
        "does not build wudi" in table["wudi"]["skipped"] and "other methods" in table["average + surgery"]["skipped"]
    )
    assert list(table[""]["columns"][RECIPE]) == ["svhn", "mnist", "mean"]
    text = (paper / "table-1.md").read_text()
    assert "| multitask | measured |" in text and "at most 10 test examples" in text
    assert Image.open(paper / "table-1.png").width > 500

    def refuse(*_: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr("featcal_cli.workflows.calibrate.Computation.compute", refuse)
    again = make(capsys, "1", examples=4, limit=10)
    assert again[""]["lines"] == table[""]["lines"]


@pytest.mark.matrix
@pytest.mark.usefixtures("unpictured")
def test_a_table_goes_on_where_it_was_cut_short(
    paper: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(capsys, "1", examples=4, output="whole")
    write = Journal.write
    written: list[int] = []

    def interrupt(journal: Journal, number: int, *rest: Any) -> None:
        if len(written) == 3:  # the second block of the second merge
            raise KeyboardInterrupt
        written.append(number)
        write(journal, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", interrupt)
        assert run_reproduce(capsys, "1", examples=4).code == 130
    partial = {line["name"]: line for line in json.loads((paper / "table-1.json").read_text())["lines"]}
    assert partial["average + featcal, examples 4"]["seeds"] == [42]
    assert partial["task_arithmetic + featcal, examples 4"]["seeds"] == []
    blocks: list[int] = []

    def count(journal: Journal, number: int, *rest: Any) -> None:
        blocks.append(number)
        write(journal, number, *rest)

    monkeypatch.setattr(Journal, "write", count)
    rest = make(capsys, "1", examples=4)
    assert blocks == [1], "the first merge is kept, and the second one's first block"
    assert rest[""]["lines"] == whole[""]["lines"]
    for cell in (paper / "cells").iterdir():
        other = paper.with_name("whole") / "cells" / cell.name
        one, two = (load_file(folder / "model.safetensors") for folder in (cell, other))
        assert all(tensor.equal(two[name]) for name, tensor in one.items())


@pytest.mark.matrix
@pytest.mark.usefixtures("paper", "unpictured")
def test_budgets_have_a_row_each_and_seeds_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    table = make(capsys, "figure-3", examples="8,5", seeds="1,2", tasks=None)
    eight, five = table["task_arithmetic + featcal, examples 8"], table["task_arithmetic + featcal, examples 5"]
    assert (eight["figures"]["mean"]["paper"], eight["paper_spread"]) == (82.9, 0.3)
    assert five["figures"]["mean"]["paper"] is None, "the paper has no such row"
    assert eight["seeds"] == five["seeds"] == [1, 2]
    single = make(capsys, "12", examples="8", seeds="2", tasks=None)["task_arithmetic + featcal, examples 8"]
    value = eight["figures"]["mean"]["value"]
    values = [2 * value - single["figures"]["mean"]["value"], single["figures"]["mean"]["value"]]
    figure = eight["figures"]["mean"]
    assert figure["spread"] == pytest.approx(stdev(values)) and stdev(values) > 0
    assert table["task_arithmetic + surgery, examples 8"]["skipped"]
    assert "task_arithmetic + surgery, examples 16" not in table


@pytest.mark.matrix
@pytest.mark.usefixtures("unpictured")
def test_what_is_fitted_is_corrupted_and_what_is_scored_is_not(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = make(capsys, "6", corrupt=["fog:3", "contrast:5"], examples=4, tasks=None)
    assert table["task_arithmetic + featcal, examples 4, corrupt fog:3"]["figures"]["mean"]["paper"] == 75.6
    assert table["task_arithmetic + featcal, examples 4, corrupt contrast:5"]["figures"]["mean"]["paper"] is None
    clean = make(capsys, "authors-readme", examples=4, tasks=None)
    assert table["task_arithmetic"]["figures"]["mean"]["value"] == clean["task_arithmetic"]["figures"]["mean"]["value"]
    cells = [next((paper / "cells").glob(f"*{name}*")) for name in ("fog", "contrast", "rho")]
    weights = [load_file(cell / "model.safetensors") for cell in cells]
    name = next(name for name in weights[0] if name.endswith("layers.0.self_attn.q_proj.weight"))
    assert not any(one[name].equal(other[name]) for one, other in pairwise(weights))
    assert "corrupt: fog:3" in (cells[0] / "featcal.yaml").read_text()


@pytest.mark.usefixtures("unpictured")
def test_costs_are_those_of_the_calibration(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = make(capsys, "5", examples=4, tasks=None)
    figures = table["task_arithmetic + featcal, examples 4"]["figures"]
    (cell,) = (paper / "cells").iterdir()
    cost = json.loads((cell / "featcal_report.json").read_text())["cost"]
    assert figures["seconds"]["value"] == cost["seconds"] and figures["seconds"]["paper"] == 53
    assert figures["rss_gib"]["value"] == cost["peak_rss_bytes"] / 2**30


@pytest.mark.parametrize(
    ("table", "options", "reason"),
    [
        ("99", {}, "no recipe has table-99"),
        ("tabel-1", {}, "no recipe has tabel-1"),
        ("7", {"recipe": RECIPE}, "no recipe has table-7"),
        ("1", {"tasks": "mnits"}, "there is no task mnits"),
        ("1", {"examples": "8;16"}, "'8;16' is no list of numbers"),
        ("1", {"seeds": "-1"}, "'-1' is no list of numbers"),
        ("6", {"corrupt": "fog:9"}, "'fog:9' is no KIND:SEVERITY"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(
    table: str, options: dict[str, object], reason: str, paper: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal(run_reproduce(capsys, table, **options), reason)
    assert not paper.exists()


def test_code_that_models_write_is_not_run_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    run = run_reproduce(capsys, "4", tasks="coding", output=tmp_path / "tables")
    check_refusal(run, "runs code that a model wrote")
    assert not (tmp_path / "tables").exists()
