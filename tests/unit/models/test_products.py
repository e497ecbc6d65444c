"""Products are caught at the functions that make them, with the part of a parameter that they are made with. Their rows
are matched to tokens by how a feature's shape changes, never by one shape that could mean two things; where they
cannot be matched, no batch may have padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Size, Tensor, nn
from torch.nn.functional import linear

from featcal_cli.data.batches import DECODER_AXIS, ENCODER_AXIS
from featcal_cli.models.architecture import find_architecture
from featcal_cli.models.module_kinds import ParameterSlice
from featcal_cli.models.probing import UNMATCHED
from featcal_cli.models.products import MatmulInterceptor, Routing
from featcal_cli.models.token_rows import Rows, learn_rows

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
    watch = MatmulInterceptor(parameters, lambda w, x, _: seen.append((w, x)), lambda _, y: results.append(y))
    with torch.no_grad(), watch:
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


AXES = {ENCODER_AXIS: (8, 7), DECODER_AXIS: (8, 6)}
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
TOKENS = torch.arange(24.0).reshape(2, 3, 4)


def learn(first: tuple[int, ...], second: tuple[int, ...], *, other_inputs: bool = False) -> Rows:
    return learn_rows(Size((*first, 4)), Size((*second, 4)), AXES, other_inputs=other_inputs)


def keep(x: Tensor, first: tuple[int, ...], second: tuple[int, ...]) -> Tensor | None:
    """The rows kept of a feature whose shapes in the two probes were `first` and `second`."""
    found = learn(first, second).select(x, {ENCODER_AXIS: MASK}, {}, 2)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("x", "first", "second", "rows"),
    [
        (TOKENS, (3, 8), (5, 7), [0, 1, 3]),
        (TOKENS.transpose(0, 1), (8, 3), (7, 5), [0, 3, 1]),
        (TOKENS.reshape(6, 4), (24,), (35,), [0, 1, 3]),
    ],
    ids=["examples by tokens", "tokens by examples", "flattened"],
)
def test_padding_is_not_kept(x: Tensor, first: tuple[int, ...], second: tuple[int, ...], rows: list[int]) -> None:
    kept = keep(x, first, second)
    assert kept is not None and torch.equal(kept, TOKENS.reshape(6, 4)[rows])
    weights = torch.arange(6.0).view(2, 3)
    found = learn(first, second).select(x, {ENCODER_AXIS: MASK}, {ENCODER_AXIS: weights}, 2)
    assert found is not None and found[1] is not None and found[1].tolist() == [float(row) for row in rows]


def test_a_mask_that_does_not_fit_says_nothing() -> None:
    assert keep(torch.zeros(7, 4), (24,), (35,)) is None


@pytest.mark.parametrize(
    ("first", "second", "needed", "beside_others"),
    [
        ((3, 8), (5, 7), False, False),
        ((3, 8), (5, 6), False, False),  # the decoder's
        ((3,), (5,), False, False),  # one row for each example
        ((1, 10), (1, 10), False, False),  # a table
        ((3, 17), (5, 17), True, False),  # patches, if there is an image; else the text with padding of the model's own
        ((12, 6), (20, 6), True, False),  # windows, of an image if there is one
        ((3, 25), (5, 24), True, True),  # patches and text
        ((3, 4, 2), (5, 3, 2), True, True),
        ((10,), (29,), True, True),
        ((1, 16), (1, 14), True, True),  # a table of distances
    ],
)
def test_batches_must_be_full_where_nothing_tells_what_is_padding(
    first: tuple[int, ...], second: tuple[int, ...], needed: bool, beside_others: bool
) -> None:
    assert learn(first, second).may_hold_padding is needed
    assert learn(first, second, other_inputs=True).may_hold_padding is beside_others
    assert learn_rows(Size((3, 4)), Size((5, 7, 4)), AXES, other_inputs=True).may_hold_padding


def test_states_of_another_input_are_no_table_of_distances() -> None:
    """A sound may have twice as many frames as its text has tokens."""
    assert learn((1, 16), (1, 14)).distances == 1
    assert learn((3, 16), (5, 14)).distances is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.windows = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        windows: Tensor = self.windows(self.tokens(x).view(-1, 4, 8))
        return x + windows.view_as(x)


class Windowed(nn.Module):
    """Pads its text to whole windows of four tokens, which a part of its layers reads."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 8), nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # noqa: ARG002 - so that there is padding
        x = self.embed(nn.functional.pad(input_ids, (0, -input_ids.shape[1] % 4)))
        for layer in self.layers:
            x = layer(x)
        return x


class Plain(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.windows(self.tokens(x))
        return result


class Compared(Windowed):
    """Compares the first token of every example with that of every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Plain(), Plain()])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # noqa: ARG002 - as above
        x = self.embed(input_ids[:, 0])
        x = x[:, None] - x
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("model_class", "kept", "holds"), [(Windowed, ["tokens"], "padded text"), (Compared, [], "")])
def test_rows_that_are_no_tokens_are_left_unchanged(model_class: type[Any], kept: list[str], holds: str) -> None:
    """Windows of a text that the model pads itself, and pairs of examples."""
    inputs = {"input_ids": torch.ones(4, 9, dtype=torch.long), "attention_mask": torch.ones(4, 9, dtype=torch.long)}
    for block in find_architecture(model_class(), {"task": inputs}, "auto").blocks:
        assert [module.name for module in block.modules] == kept and holds in str(block.holds)
        assert dict(block.skipped) == dict.fromkeys({"tokens", "windows"} - set(kept), UNMATCHED)
