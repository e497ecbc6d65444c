"""What a calibration runs: every model as often as the fit and its figures need it, and no more."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from families import BY_NAME, few_of, save_family
from torch.utils.flop_counter import FlopCounterMode

from featcal_cli.engine import offload
from featcal_cli.engine.paused_forward import PausedForward
from featcal_cli.models.architecture import Block
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate


@pytest.mark.parametrize("name", few_of(["vit", "t5", "albert"], ("vit",)))
def test_drift_of_a_calibration_is_what_a_look_at_its_output_finds(tmp_path: Path, name: str) -> None:
    """Figure by figure on the rows that were fitted, whose passes serve both."""
    saved = save_family(tmp_path / "saved", BY_NAME[name], examples=4).only(2)
    recipe = saved.recipe(examples=4)
    done = calibrate(recipe, output=tmp_path / "out", batch_size=3)
    seen = inspect_drift(recipe, compare=str(done.output), batch_size=3)
    for task, drift in done.report.drift.items():
        assert not drift.held_out
        measured = done.report.measures[task].models
        for role, at in {"merged": "model", "calibrated": "other", "base": "base"}.items():
            blocks = seen.tasks[task].models[at].blocks
            assert [block.name for block in measured[role].blocks] == [block.name for block in blocks]
            found = [block.drift.relative for block in measured[role].blocks]
            assert found == pytest.approx([block.drift.relative for block in blocks], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "expected"), [(16, [8 * 3 + 4 * 4, 8 * 2 + 4 * 4]), (8, [8 * 3 + 4 * 2, 8 * 2 + 4 * 3])]
)
def test_no_row_runs_oftener_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, expected: list[int]
) -> None:
    """A row that is fitted runs through a block in the expert and twice in the student, which need not finish the last
    block; one that drift is measured on, half of eight, once in each of the four models. Where no rows are held out, it
    is one that is fitted, whose runs serve both. No update is checked here."""
    runs: Counter[str] = Counter()
    run_block = PausedForward.run_block

    def counted(paused: PausedForward, block: Block, *given: Any, **kept: Any) -> Any:
        runs[block.name] += len(paused.hidden)
        return run_block(paused, block, *given, **kept)

    monkeypatch.setattr(PausedForward, "run_block", counted)
    saved = save_family(tmp_path / "saved", BY_NAME["vit"], examples=rows).only(1)
    calibrate(saved.recipe(examples=8, token_weights="uniform"), output=tmp_path / "out")
    assert list(runs.values()) == [len(saved.inputs) * count for count in expected]


@pytest.mark.parametrize("name", few_of(["vit", "t5", "mixtral"], ("vit",)))
def test_kept_outputs_save_only_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A block runs once for each of its parts; what no change has reached is the same, bit for bit."""
    saved = save_family(tmp_path / "saved", BY_NAME[name], examples=12).only(1)
    recipe = saved.recipe(method="featcal", rho=1.0)
    weights, work = [], []
    for room in (offload.OUTPUT_BYTES, 0):
        monkeypatch.setattr(offload, "OUTPUT_BYTES", room)
        with FlopCounterMode(display=False) as counter:
            calibrate(recipe, output=tmp_path / str(room), batch_size=3)
        weights.append((tmp_path / str(room) / "model.safetensors").read_bytes())
        work.append(counter.get_total_flops())
    assert weights[0] == weights[1] != (saved.folder / "merged" / "model.safetensors").read_bytes()
    assert work[0] < work[1]
