"""`benchmarks/reproduce.py`: the paper's tables, on tiny models and data under the real ids."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from statistics import mean
from typing import Any

import pytest
from hub_server import HubServer
from recipe_world import World

from featcal_cli.recipe.reading import find_recipe, read_draft

pytestmark = pytest.mark.usefixtures("undrawn")
SCRIPT = run_path(str(Path(__file__).parents[2] / "benchmarks" / "reproduce.py"))
RECIPE = "clip-vit-b32-8"


@pytest.fixture
def cells(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrated models are kept; everything that the recipe of eight tasks names is on the Hub."""
    World(hub, tmp_path / "world").publish(read_draft(find_recipe(RECIPE), {}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reproduction" / "cells"


def make(table: str, *words: str) -> dict[str, Any]:
    """The lines of a table by their names."""
    SCRIPT["main"]([table, "--device", "cpu", "--examples", "4", *words])
    written = json.loads(next(Path("reproduction").glob("*.json")).read_text())
    return {line["name"]: line for line in written["lines"]}


def test_a_table_holds_the_papers_figures_beside_the_measured_ones(
    cells: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("1", "--tasks", "mnist", "svhn", "--limit", "10")
    table = make(*words)
    figures = table["task_arithmetic + featcal, examples 4"]["figures"]
    assert list(figures) == ["svhn", "mnist", "mean"]
    assert (figures["mnist"]["paper"], figures["svhn"]["paper"]) == (98.8, 95.0)
    assert figures["mean"]["paper"] == pytest.approx((98.8 + 95.0) / 2), "over the same tasks"
    assert figures["mean"]["value"] == pytest.approx(mean(figures[task]["value"] for task in ("mnist", "svhn")))
    for name in ("pretrained", "experts", "multitask", "task_arithmetic", "average"):
        assert table[name]["figures"]["mnist"]["value"] is not None, name
    assert table["wudi + featcal, examples 4"]["figures"]["mnist"]["value"] is None
    assert "does not build wudi" in table["wudi"]["skipped"]
    assert len(list(cells.iterdir())) == 2
    assert "| multitask |" in capsys.readouterr().out

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setitem(SCRIPT["Part"].calibrate.__globals__, "calibrate", refuse)
    assert make(*words) == table


def test_costs_are_the_mean_over_the_seeds(cells: Path) -> None:
    figures = make("5", "--seeds", "1", "2")["task_arithmetic + featcal, examples 4"]["figures"]
    costs = [json.loads((cell / "featcal_report.json").read_text())["cost"] for cell in cells.iterdir()]
    assert len(costs) == 2
    assert figures["seconds"]["value"] == pytest.approx(mean(cost["seconds"] for cost in costs))
    assert figures["rss_gib"]["value"] == pytest.approx(mean(cost["peak_rss_bytes"] for cost in costs) / 2**30)
    assert (figures["seconds"]["paper"], figures["energy_wh"]["paper"]) == (53, 1.9)
