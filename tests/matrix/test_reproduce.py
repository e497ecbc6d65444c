"""`benchmarks/reproduce.py`: the paper's tables, on tiny models and data under the real ids."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path
from runpy import run_path
from statistics import mean
from typing import Any

import pytest
from hub_server import HubServer
from recipe_world import World
from safetensors.torch import load_file

from featcal_cli.recipe.reading import find_recipe, read_draft

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as a script has it
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


def test_what_is_fitted_is_corrupted_and_what_is_scored_is_not(cells: Path) -> None:
    table = make("6")
    weights = [
        load_file(next(cells.glob(f"*{kind}*")) / "model.safetensors")
        for kind in ("fog", "noise", "blur", "-examples-4-seed")
    ]
    name = next(name for name in weights[0] if name.endswith("layers.0.self_attn.q_proj.weight"))
    assert not any(one[name].equal(other[name]) for one, other in combinations(weights, 2))
    assert table["task_arithmetic + featcal, examples 4, corrupt fog:3"]["figures"]["mean"]["paper"] == 75.6
    assert all(line["figures"]["mean"]["value"] is not None for line in table.values() if not line["skipped"])
