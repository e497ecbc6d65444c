"""What the masks that a block is given say of the rows that are padding."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from families import BY_NAME
from torch import Tensor

from featcal_cli.models import probing, tracing
from featcal_cli.models.architecture import find_architecture
from featcal_cli.models.probing import read_mask

SEEN = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
HIDDEN = torch.zeros(2, 1, 1, 3).masked_fill(~SEEN[:, None, None], torch.finfo(torch.float32).min)
CAUSAL = SEEN[:, None, None] & torch.ones(3, 3).bool().tril()
OTHER = torch.zeros(2, 1, 1, 3).masked_fill(SEEN[:, None, None], torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "given",
    [
        [SEEN.long()],
        [SEEN[:, None, None].expand(2, 1, 4, 3)],
        [HIDDEN],
        [HIDDEN[:, 0]],
        [CAUSAL],
        [torch.randn(2, 4, 3), HIDDEN],  # hidden states that are as wide
        [torch.randn(2, 1, 3, 3), torch.ones(2, 5).bool(), HIDDEN],  # a bias of positions; the mask of other rows
        [torch.ones(1, 1, 3, 3).bool(), HIDDEN],  # of no example
        [HIDDEN, OTHER],
    ],
)
def test_rows_count_that_any_row_may_attend_to(given: list[Tensor]) -> None:
    hidden = torch.randn(2, 3, 8)
    seen = read_mask([hidden, *given], hidden)
    assert seen is not None
    assert torch.equal(seen, SEEN)


@pytest.mark.parametrize(
    "given", [[], [torch.randn(2, 3)], [torch.zeros(2, 3)], [torch.ones(2, 4)], [HIDDEN.expand(2, 2, 1, 3)]]
)
def test_where_no_mask_is_given_nothing_is_known(given: list[Tensor]) -> None:
    hidden = torch.randn(2, 3, 8)
    assert read_mask([hidden, *given], hidden) is None


def test_the_mask_of_another_sequence_comes_after_that_of_hidden_states() -> None:
    """Where both are as long."""
    hidden, other = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    seen = read_mask([hidden, OTHER, other, HIDDEN], other)
    assert seen is not None
    assert torch.equal(seen, SEEN)


@pytest.mark.parametrize(
    ("name", "runs"), [("wav2vec2", 3), ("seamless-m4t-v2", 3), ("llava", 2), ("bert", 2), ("vit", 2)]
)
def test_a_mask_is_looked_for_once_a_stack(name: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models take long to run, even on little."""
    family, traced = BY_NAME[name], mock.Mock(wraps=tracing.trace)
    monkeypatch.setattr(probing, "trace", traced)
    find_architecture(family.build().eval(), {"task": family.inputs(4)}, "auto")
    assert traced.call_count == runs
