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


@pytest.mark.parametrize("with_bias", [False, True])
def test_each_matrix_of_a_batched_product_is_told_of(*, with_bias: bool) -> None:
    parameters = {"deep": DEEP, "shift": nn.Parameter(torch.randn(3, 4))}
    x = torch.randn(3, 5, 6)
    seen: list[tuple[ParameterSlice, Tensor, ParameterSlice | None]] = []
    made: list[Tensor] = []
    with torch.no_grad():
        bias = parameters["shift"][:, None] if with_bias else torch.zeros(3, 1, 4)
        expected = torch.baddbmm(bias, x, DEEP)
        with MatmulInterceptor(parameters, lambda *args: seen.append(args), lambda _, y: made.append(y)):
            result = torch.baddbmm(bias, x, DEEP) if with_bias else torch.bmm(x, DEEP)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.stack(made), expected)
    assert [weight.name(DEEP.shape) for weight, _, _ in seen] == ["deep[0]", "deep[1]", "deep[2]"]
    for number, (weight, given, shift) in enumerate(seen):
        assert torch.equal(weight.of(DEEP), DEEP[number].T)
        assert torch.equal(given, x[number])
        assert shift == (ParameterSlice("shift", 4 * number, (4,), (1,)) if with_bias else None)


def test_a_choice_among_all_values_gives_no_tokens() -> None:
    routing = Routing()
    with torch.no_grad(), MatmulInterceptor({"deep": DEEP}, lambda *_: None, routing=routing):
        torch.argmax(torch.randn(4, 3))
        result = torch.bmm(torch.ones(3, 4, 6), DEEP)
    torch.testing.assert_close(result, torch.ones(3, 4, 6) @ DEEP)
    assert routing.find(torch.ones(4, 6)) is None


def test_attention_is_looked_into_with_its_rows_by_length_and_example() -> None:
    attention = nn.MultiheadAttention(8, 2, bias=True).eval()
    x = torch.randn(5, 3, 8)
    seen: dict[str, tuple[torch.Size, ParameterSlice | None]] = {}

    def keep(weight: ParameterSlice, x: Tensor, bias: ParameterSlice | None) -> None:
        seen[weight.parameter] = (x.shape, bias)

    with torch.no_grad():
        expected, _ = attention(x, x, x, need_weights=False)
        with MatmulInterceptor(dict(attention.named_parameters()), keep):
            output, _ = attention(x, x, x, need_weights=False)
    torch.testing.assert_close(output, expected)
    assert {name: shape for name, (shape, _) in seen.items()} == {
        "in_proj_weight": (5, 3, 8),
        "out_proj.weight": (5, 3, 8),
    }
    assert [bias and bias.parameter for _, bias in seen.values()] == ["in_proj_bias", "out_proj.bias"]
