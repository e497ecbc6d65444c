"""Weights on their way to a device, and whether they are finite."""

from __future__ import annotations

import pytest
import torch

from featcal_cli.engine import weight_uploads
from featcal_cli.engine.weight_uploads import fetch_weights, is_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("piece", [4, 1 << 24])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(weight_uploads, "PIECE", piece)
    largest = torch.full((3, 6), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    assert is_finite(largest) and is_finite(largest.T) and is_finite(torch.empty(0, 6, dtype=dtype))
    for place in range(18):
        for value in (torch.nan, torch.inf, -torch.inf):
            weight = torch.zeros(18, dtype=dtype)
            weight[place] = value
            assert not is_finite(weight.view(3, 6)) and not is_finite(weight.view(3, 6).T)


def test_tensors_are_fetched_whatever_their_layout_and_dtype() -> None:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(4), torch.rand(3, 4)[:, ::2], torch.tensor([5])]
    fetched = fetch_weights(tensors)
    assert all(torch.equal(one, other) for one, other in zip(fetched, tensors, strict=True))
    assert fetch_weights([]) == []
