"""Answers are compared as choices where they are some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answers import choice_covariance
from torch import Tensor, nn

from featcal_cli.engine.outputs import draw_noise, gives_logits, logit_norm, project_randomly, weigh_logits

Z = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_the_norm_is_that_of_the_covariance_of_a_choice() -> None:
    change = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    squares = torch.einsum("rc,rcd,rd->r", change, choice_covariance(Z), change)
    assert torch.allclose(logit_norm(change, weigh_logits(Z)) ** 2, squares, rtol=1e-4)
    assert torch.allclose(logit_norm(change + 7, weigh_logits(Z)) ** 2, squares, rtol=1e-3)


@pytest.mark.parametrize("are_logits", [True, False])
def test_projections_have_that_covariance_on_average(are_logits: bool) -> None:
    draws, generator = 20_000, torch.Generator().manual_seed(2)
    noise = draw_noise(4 * draws, 6, generator)
    drawn = project_randomly(Z.repeat(draws, 1), noise, are_logits=are_logits).view(draws, 4, 6)
    mean = torch.einsum("nrc,nrd->rcd", drawn, drawn) / draws
    wanted = choice_covariance(Z) if are_logits else torch.eye(6).expand(4, 6, 6)
    assert (mean - wanted).norm() <= 0.05 * wanted.norm()


@pytest.mark.parametrize(
    ("output", "problem", "expected"),
    [
        ({"logits": torch.zeros(2, 3)}, None, True),
        ({"logits": torch.zeros(2, 5, 3)}, "single_label_classification", True),
        ({"logits": torch.zeros(2, 3)}, "regression", False),
        ({"logits": torch.zeros(2, 3)}, "multi_label_classification", False),
        ({"logits": torch.zeros(2, 1)}, None, False),
        ({"logits": torch.zeros(2, 3, 8, 8)}, None, False),
        ({"pooler_output": torch.zeros(2, 3)}, None, False),
    ],
)
def test_what_is_no_choice_is_compared_as_it_is(output: dict[str, Tensor], problem: str | None, expected: bool) -> None:
    module: Any = nn.Module()
    module.config = SimpleNamespace(problem_type=problem)
    assert gives_logits(module, SimpleNamespace(**output)) is expected
