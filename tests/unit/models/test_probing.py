"""What the masks that a block is given say of the rows that are padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from families import BY_NAME
from torch import Tensor, nn

from featcal_cli.models import probing, tracing
from featcal_cli.models.architecture import find_architecture
from featcal_cli.models.probing import read_mask

SEEN = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
HIDDEN = torch.zeros(2, 1, 1, 3).masked_fill(~SEEN[:, None, None], torch.finfo(torch.float32).min)
CAUSAL = SEEN[:, None, None] & torch.ones(3, 3).bool().tril()


@pytest.mark.parametrize(
    "mask", [SEEN, SEEN.long(), SEEN[:, None, None].expand(2, 1, 4, 3), HIDDEN, HIDDEN[:, 0], CAUSAL]
)
def test_rows_count_that_any_row_may_attend_to(mask: Tensor) -> None:
    seen = read_mask(mask, torch.randn(2, 3, 8))
    assert seen is not None
    assert torch.equal(seen, SEEN)


@pytest.mark.parametrize(
    "other",
    [
        None,
        torch.randn(2, 3),
        torch.zeros(2, 3),
        torch.ones(2, 4).bool(),
        torch.ones(1, 1, 3, 3).bool(),
        torch.randn(2, 1, 3, 3),  # a bias of positions
        HIDDEN.expand(2, 2, 1, 3),
    ],
)
def test_what_is_no_mask_of_the_rows_says_nothing(other: Tensor | None) -> None:
    assert read_mask(other, torch.randn(2, 3, 8)) is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *_: object, **__: object) -> Any:
        return x + self.two(self.one(x))


class Frames(nn.Module):
    """Makes a frame of two samples; before the mask, blocks are given other tensors of its shape."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.layers = nn.Linear(2, 8), nn.ModuleList([Layer(), Layer()])

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> Any:
        x = self.wide(input_values.unflatten(1, (-1, 2)))
        mask = attention_mask[:, ::2].bool()
        places = torch.arange(x.shape[1]).expand(len(x), -1)
        bias = None if mask.all() else torch.zeros(len(x), 1, x.shape[1], x.shape[1])
        for layer in self.layers:
            x = layer(x, places, ~mask, bias=bias, mask=mask)
        return x


def test_the_mask_is_what_hides_the_last_row_where_inputs_are_padded() -> None:
    """Not numbers of positions, what marks padding instead, or a bias, which is none without padding."""
    inputs = {"input_values": torch.randn(4, 16), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    run = probing.probe_model(Frames().eval(), "task", inputs)
    paddings = [run.find_padding(block, *run.block_axis(block)) for block in run.blocks]
    assert [padding.mask for padding in paddings] == [4, 4]


@pytest.mark.parametrize(
    ("name", "runs"), [("wav2vec2", 3), ("seamless-m4t-v2", 3), ("llava", 2), ("bert", 2), ("vit", 2)]
)
def test_a_mask_is_looked_for_once_a_stack(name: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models take long to run, even on little."""
    family, traced = BY_NAME[name], mock.Mock(wraps=tracing.trace)
    monkeypatch.setattr(probing, "trace", traced)
    find_architecture(family.build().eval(), {"task": family.inputs(4)}, "auto")
    assert traced.call_count == runs
