"""The search: many candidates walk together, and none of them notices the others."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from math import inf, nan
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from families import FAMILIES, Saved, save_family
from jobs import Prepared, prepare
from safetensors.torch import save_file

from featcal_cli.calibration.hyperparameters import Candidate, Hyperparameters, Trial
from featcal_cli.calibration.search import Search, mean_ratio
from featcal_cli.engine.job import Job
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.progress import Progress
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

BY_NAME = {family.name: family for family in FAMILIES}
CANDIDATES = {
    "strong": Hyperparameters(1e-5, 1.0, 1.0),
    "middling": Hyperparameters(0.05, 2.0, 0.3),
    "weak": Hyperparameters(1.0, 1.0, 0.1),
}
FITTED, HELD_OUT = 8, 4
"""Rows that the search fits, and in each half of the rows held out."""
SHOWN = slice(12, 12 + HELD_OUT)
"""Rows that drift is measured on in a search among 12."""


def quiet(_: Progress) -> None:
    """Nobody looks."""


def start(prepared: Prepared, names: list[str], cuts: dict[int, int] | None = None) -> Search:
    """A search among some of CANDIDATES."""
    candidates = {name: Candidate(CANDIDATES[name], "the test", place) for place, name in enumerate(names)}
    return Search(prepared.to_search(names, FITTED, cuts or {}), candidates, True, cuts or {})


def by_settings(trials: list[Trial]) -> dict[str, Trial]:
    """Without what is said of a candidate beside others."""
    alone = [replace(trial, place=0, error=None) for trial in trials]
    return {name: trial for name, values in CANDIDATES.items() for trial in alone if trial.hyperparameters == values}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("bert"), BY_NAME["bert"])


def drift_alone(saved: Saved, folder: Path, settings: Hyperparameters) -> dict[str, tuple[float, float]]:
    """Drift before and after by task, of a calibration by itself: fitted to what the search fits, and measured on what
    it measures on, which is the second half of the held-out rows here."""
    recipe: dict[str, Any] = saved.recipe(**vars(settings), examples=FITTED, select="preset")
    folder.mkdir()
    for task, inputs in saved.inputs.items():
        rows = {name: torch.cat([value[: FITTED + HELD_OUT], value[SHOWN]]) for name, value in inputs.items()}
        save_file(rows, folder / f"{task}.safetensors")
        recipe["tasks"][task]["data"] = str(folder / f"{task}.safetensors")
    found = calibrate(recipe, output=folder / "out").report.drift
    assert all(drift.held_out for drift in found.values())
    return {task: (drift.before, drift.after) for task, drift in found.items()}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("bert", "strong"),
        pytest.param("bert", "weak", marks=pytest.mark.matrix),
        pytest.param("albert", "middling", marks=pytest.mark.matrix),
        pytest.param("albert-groups", "middling", marks=pytest.mark.matrix),
        pytest.param("t5", "middling", marks=pytest.mark.matrix),
    ],
)
def test_a_candidate_ends_where_it_ends_when_calibrated_alone(tmp_path: Path, name: str, role: str) -> None:
    """Also where blocks run several times, and through encoder and decoder."""
    saved = save_family(tmp_path, BY_NAME[name])
    search = start(prepare(saved, batch_size=FITTED), list(CANDIDATES))
    found = by_settings(search.run(quiet))
    assert found.keys() == CANDIDATES.keys() and not any(trial.dropped for trial in found.values())
    meter, ratios = search.job.drift.meter, []
    for task, (before, after) in drift_alone(saved, tmp_path / role, CANDIDATES[role]).items():
        last = search.job.architecture.last_blocks[task]
        ours, merged = meter.read(last, task, role).relative, meter.read(last, task, "merged").relative
        assert ours == pytest.approx(after, rel=1e-5) and merged == pytest.approx(before, rel=1e-5)
        assert after != pytest.approx(before, rel=1e-4)
        ratios.append(ours / merged)
    assert found[role].drift == pytest.approx(geometric_mean(ratios), rel=1e-6)


def fingerprint(prepared: Prepared) -> dict[str, str]:
    """The bytes of all tensors of all models."""
    models = prepared.models
    everybody = {"merged": models.merged, "base": models.base, **models.experts}
    return {
        f"{role} {name}": sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for role, model in everybody.items()
        for name, tensor in model.module.state_dict().items()
    }


def test_candidates_disturb_neither_each_other_nor_the_models(bert: Saved) -> None:
    """Who walks beside a candidate changes nothing, to the last bit; and a calibration may follow."""
    prepared = prepare(bert)
    before = fingerprint(prepared)
    together = by_settings(start(prepared, list(CANDIDATES)).run(quiet))
    assert fingerprint(prepared) == before
    for name in CANDIDATES:
        assert by_settings(start(prepared, [name]).run(quiet)) == {name: together[name]}


def count_blocks(job: Job, runners: dict[str, Any]) -> Counter[tuple[str, str]]:
    """How often each of `runners` runs each block from now on."""
    counts: Counter[tuple[str, str]] = Counter()
    for role, runner in runners.items():
        for block in job.architecture.blocks:
            module = runner.module(f"{block.name}.{block.modules[0].name}")
            module.register_forward_hook(lambda *_, key=(role, block.name): counts.update([key]))
    return counts


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_experts_run_once_however_many_candidates_there_are(tmp_path: Path, name: str) -> None:
    """Once a batch and block, on the examples to fit and on those that drift is measured on."""
    prepared = prepare(save_family(tmp_path, BY_NAME[name]))
    for names in (["weak"], list(CANDIDATES)):
        search = start(prepared, names)
        counts = count_blocks(search.job, dict(search.job.experts))
        search.run(quiet)
        for task in search.job.experts:
            assert (len(search.job.fitted[task]), len(search.job.drift.batches[task])) == (2, 1)
        assert counts == {
            (task, block.name): 3 for task in search.job.experts for block in search.job.architecture.blocks
        }


def test_a_candidate_that_is_dropped_runs_no_further_block_and_nothing_is_left_of_it(bert: Saved) -> None:
    search = start(prepare(bert), list(CANDIDATES), cuts={1: 1})
    counts = count_blocks(search.job, dict(search.job.students))
    students = {role: weakref.ref(student.model.module) for role, student in search.job.students.items()}
    alive = []

    def look(_: Progress) -> None:
        gc.collect()
        alive.append({role for role, student in students.items() if student() is not None})

    trials = search.run(look)
    first, second = (block.name for block in search.job.architecture.blocks)
    assert [trial.blocks for trial in trials] == [2, 1, 1]
    assert [bool(trial.dropped) for trial in trials] == [False, True, True]
    assert all(first in trial.dropped for trial in trials[1:])
    assert all(counts[name, first] for name in CANDIDATES)
    (left,) = search.job.students
    assert {name for name, block in counts if block == second} == {left} == alive[-1]
    assert {name: trial.blocks for name, trial in by_settings(trials).items() if trial.blocks == 2} == {left: 2}


def test_those_that_are_dropped_were_not_the_best(bert: Saved) -> None:
    """What a candidate is ranked by is what the list shows."""
    trials = start(prepare(bert), list(CANDIDATES), cuts={1: 2}).run(quiet)
    assert [trial.blocks for trial in trials] == [2, 2, 1]
    scores = [trial.score for trial in trials[:2] if trial.score is not None]
    assert len(scores) == 2 and scores == sorted(scores)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_candidates_hold_weights_of_their_own_for_the_current_block_only(tmp_path: Path, name: str) -> None:
    prepared = prepare(save_family(tmp_path, BY_NAME[name]))
    search = start(prepared, list(CANDIDATES))
    merged = prepared.models.merged.module
    blocks = search.job.architecture.blocks
    seen = []

    def look(progress: Progress) -> None:
        for role, student in search.job.students.items():
            for name, parameter in student.model.module.named_parameters():
                if parameter.data_ptr() != merged.get_parameter(name).data_ptr():
                    assert name.startswith(f"{progress.block}."), (role, name, progress.block)
                    seen.append(progress.block)

    search.run(look)
    assert set(seen) == {block.name for block in blocks}


def test_a_candidate_without_a_stable_solution_is_dropped_with_the_reason(
    bert: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on as if it had not been there; where there are no others, it is an error."""
    prepared = prepare(bert)
    expected = by_settings(start(prepared, ["strong", "weak"]).run(quiet))
    monkeypatch.setitem(CANDIDATES, "broken", Hyperparameters(-1.0, 1.0, 0.3))
    monkeypatch.setitem(CANDIDATES, "endless", Hyperparameters(0.1, 1.0, float("inf")))
    for names in (["broken", "strong", "endless", "weak"], ["strong", "weak", "broken"]):
        found = by_settings(start(prepared, names).run(quiet))
        assert {name: found[name] for name in expected} == expected
        assert "no stable solution at ridge -1" in found["broken"].dropped and found["broken"].blocks == 0
        if "endless" in names:
            assert "too large" in found["endless"].dropped
    assert (
        by_settings(start(prepared, ["broken", "strong"]).run(quiet))["strong"] == expected["strong"]
    )  # goes on alone
    monkeypatch.setitem(CANDIDATES, "broken too", Hyperparameters(-2.0, 1.0, 0.3))
    with pytest.raises(NumericsError, match="no stable solution"):
        start(prepared, ["broken", "broken too"]).run(quiet)


def test_a_search_fits_the_first_examples_and_measures_on_those_held_out_for_it(bert: Saved) -> None:
    """What is reported in the end stays unseen."""
    prepared = prepare(bert)
    job = prepared.to_search(["weak"], FITTED)
    for task, inputs in bert.inputs.items():
        for batches, rows in ((job.fitted[task], slice(FITTED)), (job.drift.batches[task], SHOWN)):
            assert torch.cat([batch["input_ids"] for batch in batches]).equal(inputs["input_ids"][rows])


def test_what_is_not_finite_in_merged_says_nothing_and_in_a_candidate_everything() -> None:
    assert mean_ratio([(2.0, 1.0), (1.0, inf), (1.0, nan)]) == pytest.approx(2.0)
    assert mean_ratio([(nan, 1.0), (0.5, 1.0)]) == inf
    assert mean_ratio([]) == 1.0
