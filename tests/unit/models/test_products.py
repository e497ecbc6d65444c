"""Products are caught at the functions that make them, with the part of a parameter that they are made with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear

from featcal_cli.models.module_kinds import ParameterSlice, find_convolutions
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
        (lambda: X.matmul(DEEP[torch.tensor(2)]), "deep[2]", DEEP[2].T),
        (lambda: torch.addmm(torch.zeros(4), X[0], DEEP[1]), "deep[1]", DEEP[1].T),
        (lambda: torch.einsum("bsd,ed->bse", X, WIDE), "wide", WIDE),
        (lambda: torch.einsum("ed,bsd->bse", WIDE, X), "wide", WIDE),
        (lambda: torch.einsum("bsd,hde->bshe", X, DEEP), "", None),  # d_out has no one stride
        (lambda: torch.einsum("hsd,hde->hse", X.repeat(2, 1, 1)[:3], DEEP), "", None),  # a matrix for each h
        (lambda: linear(X, WIDE * 2), "", None),
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


def test_products_of_activations_are_not_looked_into() -> None:
    seen: list[object] = []
    with torch.no_grad(), MatmulInterceptor({"deep": DEEP}, lambda *args: seen.append(args)):
        result = torch.bmm(torch.ones(3, 5, 6), DEEP * 2)
    torch.testing.assert_close(result, torch.ones(3, 5, 6) @ (DEEP * 2))
    assert not seen


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_experts_that_are_given_all_tokens_get_those_that_they_are_chosen_for(others: float) -> None:
    """If the others are zero."""
    scores = torch.tensor([[3.0, 2, 1], [1, 3, 2], [2, 3, 1], [3, 2, 1]])
    tokens = torch.randn(4, 6)
    routing, given = Routing(), list[Tensor]()
    with torch.no_grad(), MatmulInterceptor({"deep": DEEP}, lambda _, x, __: given.append(x), routing=routing):
        chosen = scores.topk(2).indices
        is_chosen = torch.zeros(4, 3).scatter_(1, chosen, 1.0)
        torch.bmm(tokens * (is_chosen + others).T[:, :, None], DEEP)
    if others:
        assert [len(x) for x in given] == [4, 4, 4]
        assert not any(routing.find(x) for x in given)
        return
    for number, rows in enumerate([[0, 2, 3], [0, 1, 2, 3], [1]]):
        route = routing.find(given[number])
        assert route is not None
        assert route.rows.tolist() == rows
        assert route.shape == (4, 6)
        assert torch.equal(given[number], tokens[rows])


def test_a_choice_among_all_values_gives_no_tokens() -> None:
    routing = Routing()
    with torch.no_grad(), MatmulInterceptor({"deep": DEEP}, lambda *_: None, routing=routing):
        torch.argmax(torch.randn(4, 3))
        result = torch.bmm(torch.ones(3, 4, 6), DEEP)
    torch.testing.assert_close(result, torch.ones(3, 4, 6) @ DEEP)
    assert routing.find(torch.ones(4, 6)) is None


@pytest.mark.parametrize(("padding", "groups", "is_told"), [(2, 4, True), (0, 4, False), ((2,), 4, True)])
def test_a_convolution_of_a_function_is_told_of(padding: int | tuple[int], groups: int, *, is_told: bool) -> None:
    module = nn.Conv1d(4, 4, 3, padding=2, groups=4)
    x = torch.randn(2, 4, 7)
    seen: list[tuple[ParameterSlice, Tensor, ParameterSlice | None]] = []
    watch = MatmulInterceptor(
        dict(module.named_parameters()), lambda *args: seen.append(args), convolutions=find_convolutions(module)
    )
    with torch.no_grad(), watch:
        conv1d(x, weight=module.weight.squeeze(1).unsqueeze(1), bias=module.bias, padding=padding, groups=groups)
    assert [(w.parameter, given is x, b and b.parameter) for w, given, b in seen] == [
        ("weight", True, "bias")
    ] * is_told


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
