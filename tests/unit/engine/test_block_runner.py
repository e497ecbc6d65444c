"""What a runner brings, checks and gives back, and that nothing of a pass stays when it is dropped."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from families import BY_NAME, save_family
from jobs import Prepared, prepare
from safetensors.torch import load_file, save_file

from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.paused_forward import start_forward
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import calibrate


def make_runner(prepared: Prepared, dtype: torch.dtype = torch.float32) -> BlockRunner:
    return BlockRunner(prepared.models.merged, prepared.architecture, prepared.device, dtype)


def test_what_lies_in_lists_is_checked_too(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["convnext"])
    file = saved.folder / "red" / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("stages.1.downsampling_layer.1.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NumericsError, match=r"expert red has NaN or infinity in .*stages\.1\.downsampling_layer\.1"):
        calibrate(saved.recipe(), output=tmp_path / "out", device="cpu")


def test_nothing_is_left_of_a_pass_that_is_dropped(tmp_path: Path) -> None:
    prepared = prepare(save_family(tmp_path, BY_NAME["bert"]))
    runner, batch = make_runner(prepared), next(iter(prepared.examples.values())).fitted[0]
    with runner.on_device():
        passes = [start_forward(runner, batch, "")]
    hidden = weakref.ref(passes[0].hidden)
    passes.clear()
    gc.collect()
    assert hidden() is None
