"""Processes are only started where each has a GPU, or none needs one."""

from __future__ import annotations

import pytest

from featcal_cli.runtime import distributed
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.process import NAMES


@pytest.mark.parametrize(
    ("found", "text", "fix"),
    [(0, "no GPU on", "leave it out"), (1, "1 GPU on", "leave it out"), (3, "3 GPUs", "--gpus 3")],
)
def test_more_processes_than_gpus_are_refused(found: int, text: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    with pytest.raises(RecipeError, match=text) as caught:
        distributed.start_ranks(4, ["calibrate", "merged", "--device", "cuda"])
    assert caught.value.where == "--gpus" and fix in caught.value.fix


def test_processes_of_torchrun_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RecipeError, match="torchrun has started"):
        distributed.start_ranks(2, ["calibrate", "merged", "--device=cpu"])
