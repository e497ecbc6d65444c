"""The time that a run is expected to take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from families import BY_NAME, Saved, save_family

from featcal_cli import dry_run
from featcal_cli.cli.console import OUT
from featcal_cli.cli.results import show_plan
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows import plan as module
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.time_estimate import CALL, LOGITS, PRODUCTS, SOLVES, SPREAD, SUMS, WRITING, TimeEstimate
from featcal_cli.workflows.verbs import calibrate

FITTED, CHECKED, HELD = 12, 4, 4
"""Of 20 rows of one task."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("llama"), BY_NAME["llama"], examples=20)


def planned(saved: Saved, monkeypatch: pytest.MonkeyPatch, speed: float, **settings: object) -> Plan:
    monkeypatch.setattr(module, "measure_speed", lambda _: speed)
    recipe = saved.recipe(**settings)
    recipe["tasks"] = {"red": recipe["tasks"]["red"]}  # type: ignore[index]
    return dry_run(recipe, output=saved.folder / "out", batch_size=4)


def stages_of(plan: Plan) -> dict[str, float]:
    assert plan.time is not None
    return dict(plan.time.stages)


def test_formula_by_hand(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of width 32 and 48, with two of four heads for keys and values: 99 tokens."""
    speed, settings = 1e3, {"ridge": None, "rho": None, "alpha": None}
    plan = planned(llama, monkeypatch, speed, **settings)
    rows = plan.examples["red"]
    assert plan.example_counts == {"red": (FITTED, CHECKED + HELD)}
    first, *others = (batch["attention_mask"] for batch in rows.fitted)
    length = float(torch.cat([mask.sum(1) for mask in (first, *others)]).float().mean())
    longer = length / float(first.sum(1).float().mean())
    inputs = [(32, 64), (32, 32), (32, 96), (48, 32)]  # of q, k and v; o; gate and up; down
    rows_of_batch = longer * first.shape[1]
    forward = 2 * rows_of_batch * sum(d_in * d_out for d_in, d_out in inputs)
    head, batches = 99 * 32 * length, {FITTED: 3, CHECKED: 1, HELD: 1}
    parts = 4
    product, call = PRODUCTS * forward / speed, 2 * CALL * torch.get_num_threads() / speed

    back = min(2, round(64 / FITTED))
    gradient = 2 * sum(d_out * widest / 2 for d_out, widest in ((64, 32), (32, 32), (96, 48), (32, 32)))
    measuring = (
        FITTED * (1 + back) * product
        + (1 + back) * batches[FITTED] * call
        + LOGITS * head / speed * FITTED * (1 + back)
        + SUMS * rows_of_batch * FITTED * back * gradient / speed
    )
    stages = stages_of(plan)
    assert stages["measuring the experts' outputs"] == pytest.approx(measuring, rel=1e-6)
    solves = 2 * sum(d_in**2 * (d_in * 2 / 3 + d_out * 8 + 10 * 64) for d_in, d_out in inputs)
    of_task = (
        (FITTED + CHECKED) * 2 * product
        + (2 * parts + 1) * (batches[FITTED] + batches[CHECKED]) * call
        + (4 * HELD + 3 * CHECKED) * (product + LOGITS * head / speed)
        + (4 * batches[HELD] + 3 * batches[CHECKED]) * call
        + SUMS * rows_of_batch * (FITTED + CHECKED) * 2 * 1.5 * (3 * 32**2 + 48**2) / speed
    )
    systems = 2 * 7 * call
    assert stages["calibrating"] == pytest.approx(of_task + SOLVES * solves / speed + systems, rel=1e-6)
    assert stages["head"] == pytest.approx(LOGITS * head * FITTED * (2 * 4 + 3 * 24) / speed, rel=1e-6)
    assert stages["refining the result"] == 0 and stages["writing"] == WRITING


def test_what_is_not_done_takes_no_time(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (stages_of(planned(llama, monkeypatch, speed)) for speed in (1e6, 1e3))
    assert fast["measuring the experts' outputs"] == fast["head"] == 0, "the paper's method"
    assert slow["calibrating"] == pytest.approx(1e3 * fast["calibrating"])
    refined = stages_of(planned(llama, monkeypatch, 1e3, ridge=None, rho=None, alpha=None, refine=True))
    assert refined["refining the result"] > 0


def test_stages_are_reported_by_the_names_that_are_expected(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_speed", lambda _: 1e9)
    seen: list[str] = []
    expected: list[str] = []

    class Watcher(Listener):
        def stage(self, text: str) -> None:
            seen.append(text)

        def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
            assert is_known
            expected.extend(stages)

        def progress(self, progress: Progress) -> None:
            seen.append(progress.unit)

    recipe = llama.recipe(ridge=None, rho=None, alpha=None, refine=True)
    calibrate(recipe, output=llama.folder / "refined", listener=Watcher())
    assert [name for name in dict.fromkeys(seen) if name in expected] == expected


@pytest.mark.parametrize("known", [True, False])
def test_a_dry_run_tells_it(
    llama: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    plan = planned(llama, monkeypatch, 1e6)
    monkeypatch.setattr(OUT, "width", 80)
    object.__setattr__(plan, "time", TimeEstimate(20.0, {"calibrating": 130.0}, known))
    show_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    told = (
        "about 2 to 4 minutes on this machine"
        if known
        else "not known for this kind of job; the run tells what is left"
    )
    assert f"time        {told}" in lines
    range_ = plan.to_dict()["estimate"]["seconds"]
    assert range_ == ((150 / SPREAD, 150 * SPREAD) if known else None)


def test_mixtures_are_not_estimated(tmp_path: Path) -> None:
    plan = dry_run(save_family(tmp_path, BY_NAME["mixtral"], examples=20).recipe(), output=tmp_path / "out")
    assert plan.time is not None and plan.time.range is None and not plan.time.is_known
