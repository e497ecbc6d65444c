"""Products are caught at the functions that make them, with the part of a parameter that they are made with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from featcal_cli.models.module_kinds import ParameterSlice
from featcal_cli.models.products import MatmulInterceptor, Routing

WIDE = nn.Parameter(torch.randn(12, 6))
DEEP = nn.Parameter(torch.randn(3, 6, 4))
X = torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    ("multiply", "name", "weight"),
    [
        (lambda: linear(X, WIDE), "wide", WIDE),
        (lambda: linear(X, WIDE[4:8]), "wide[4:8]", WIDE[4:8]),
        (lambda: linear(X, WIDE.chunk(3)[1]), "wide[4:8]", WIDE[4:8]),
        (lambda: X @ WIDE[:4].T, "wide[0:4]", WIDE[:4]),
        (lambda: X @ DEEP[1], "deep[1]", DEEP[1].T),
        (lambda: linear(X[0, :0], WIDE), "wide", WIDE),  # of an expert that no token is routed to
        (lambda: X.matmul(DEEP[torch.tensor(2)]), "deep[2]", DEEP[2].T),
        (lambda: torch.addmm(torch.zeros(4), X[0], DEEP[1]), "deep[1]", DEEP[1].T),
        (lambda: torch.einsum("bsd,ed->bse", X, WIDE), "wide", WIDE),
        (lambda: torch.einsum("ed,bsd->bse", WIDE, X), "wide", WIDE),
        (lambda: torch.einsum("bsd,hde->bshe", X, DEEP), "", None),  # d_out has no one stride
        (lambda: torch.einsum("hsd,hde->hse", X.repeat(2, 1, 1)[:3], DEEP), "", None),  # a matrix for each h
        (lambda: linear(X, WIDE * 2), "", None),
        (lambda: torch.bmm(torch.ones(3, 5, 6), DEEP * 2), "", None),
    ],
)
def test_a_product_tells_its_parameter(multiply: Callable[[], Tensor], name: str, weight: Tensor | None) -> None:
    parameters = {"wide": WIDE, "deep": DEEP}
    seen: list[tuple[ParameterSlice, Tensor]] = []
    results: list[Tensor] = []
    with (
        torch.no_grad(),
        MatmulInterceptor(parameters, lambda w, x, _: seen.append((w, x)), lambda _, y: results.append(y)),
    ):
        result = multiply()
    assert [view.name(parameters[view.parameter].shape) for view, _ in seen] == [name] * bool(name)
    for (view, x), y in zip(seen, results, strict=True):
        assert weight is not None and torch.equal(view.of(parameters[view.parameter]), weight)
        assert y is result
        torch.testing.assert_close(linear(x, weight), result)


def test_a_choice_among_all_values_gives_no_tokens() -> None:
    routing = Routing()
    with torch.no_grad(), MatmulInterceptor({"deep": DEEP}, lambda *_: None, routing=routing):
        torch.argmax(torch.randn(4, 3))
        result = torch.bmm(torch.ones(3, 4, 6), DEEP)
    torch.testing.assert_close(result, torch.ones(3, 4, 6) @ DEEP)
    assert routing.find(torch.ones(4, 6)) is None
