"""What the masks that a block is given say of the rows that are padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from featcal_cli.engine.token_weights import _read_mask

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
    assert torch.equal(_read_mask(given, 2, 3), SEEN.float())


@pytest.mark.parametrize("given", [[], [torch.randn(2, 3)], [torch.zeros(2, 3)], [torch.ones(2, 4)], [HIDDEN.expand(2, 2, 1, 3)]])
def test_where_no_mask_is_given_nothing_is_known(given: list[Tensor]) -> None:
    assert _read_mask(given, 2, 3).numel() == 0
