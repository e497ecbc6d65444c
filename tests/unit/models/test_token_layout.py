"""Rows of a feature are matched to tokens by how its shape changes, never by one shape that could mean two things."""

from __future__ import annotations

import pytest
import torch
from torch import Size

from featcal_cli.models.token_layout import (
    BLOCK_AXIS,
    DECODER_AXIS,
    ENCODER_AXIS,
    EXAMPLES_AXIS,
    learn_layout,
    make_probes,
    token_lengths,
    token_masks,
)

AXES = {ENCODER_AXIS: (8, 7), DECODER_AXIS: (8, 6)}
MASK = torch.tensor([[1.0, 1, 0], [1, 0, 0]])


def flat(x: torch.Tensor, first: tuple[int, ...], second: tuple[int, ...]) -> torch.Tensor | None:
    """The rows kept of a feature whose shapes in the two probes were `first` and `second`."""
    layout = learn_layout(Size((*first, 4)), Size((*second, 4)), AXES)
    found = layout.flatten(
        x,
        {ENCODER_AXIS: MASK, DECODER_AXIS: None, BLOCK_AXIS: None},
        {EXAMPLES_AXIS: 2, ENCODER_AXIS: 3, DECODER_AXIS: 3},
        ENCODER_AXIS,
    )
    return None if found is None else found[0]


TOKENS = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("x", "first", "second", "rows"),
    [
        (TOKENS, (3, 8), (5, 7), [0, 1, 3]),
        (TOKENS.transpose(0, 1), (8, 3), (7, 5), [0, 3, 1]),
        (TOKENS.reshape(6, 4), (24,), (35,), [0, 1, 3]),
    ],
    ids=["examples by tokens", "tokens by examples", "flattened"],
)
def test_tokens_are_kept_and_padding_is_not(
    x: torch.Tensor, first: tuple[int, ...], second: tuple[int, ...], rows: list[int]
) -> None:
    kept = flat(x, first, second)
    assert kept is not None and torch.equal(kept, TOKENS.reshape(6, 4)[rows])


@pytest.mark.parametrize("place", [1, 2])
def test_heads_on_either_side_of_the_tokens(place: int) -> None:
    heads = torch.stack([TOKENS, TOKENS + 100, TOKENS + 200], dim=place)  # as many heads as tokens
    shapes = ((3, 3, 8), (5, 3, 7)) if place == 1 else ((3, 8, 3), (5, 7, 3))
    kept = flat(heads, *shapes)
    assert kept is not None and len(kept) == 9
    assert set((kept[:, 0] % 100).tolist()) == {0.0, 4.0, 12.0}


@pytest.mark.parametrize(
    ("x", "first", "second", "rows"),
    [
        (TOKENS, (3, 8), (5, 6), 6),  # the decoder's, which has no padding here
        (torch.zeros(1, 10, 4), (1, 10), (1, 10), 10),  # a table counts whole
        (torch.zeros(1, 5, 4), (1, 14), (1, 12), None),  # one that grows with padding in no known way
        (torch.zeros(5, 4), (10,), (11,), None),  # no rule
        (torch.zeros(5, 4), (10,), (29,), None),
        (torch.zeros(7, 4), (24,), (35,), None),  # a shape that breaks the rule
    ],
)
def test_rows_are_matched_where_a_rule_tells_whose_they_are(
    x: torch.Tensor, first: tuple[int, ...], second: tuple[int, ...], rows: int | None
) -> None:
    kept = flat(x, first, second)
    assert (None if kept is None else len(kept)) == rows


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [((1, 5), (1, 15), (1, 13)), ((1, 6), (1, 16), (1, 14)), ((6, 2), (16, 3), (14, 5)), ((5, 2), (15, 3), (13, 5))],
)
def test_a_table_of_distances_counts_as_often_as_tokens_are_so_far_apart(
    rows: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """Wav2Vec2-Conformer's, DeBERTa's and XLNet's; texts of two tokens and of one."""
    layout = learn_layout(Size((*first, 4)), Size((*second, 4)), AXES)
    table = torch.arange(float(max(rows))).view(-1, *[1] * (len(rows) - rows.index(max(rows)))).expand(*rows, 4)
    weights, lengths = {ENCODER_AXIS: MASK}, {EXAMPLES_AXIS: 2, ENCODER_AXIS: 3}
    counted = layout.flatten(table, weights, lengths, ENCODER_AXIS)
    assert counted is not None and counted[1] is not None
    pairs: dict[float, float] = {}
    for row, weight in zip(counted[0][:, 0].tolist(), counted[1].tolist(), strict=True):
        pairs[row] = pairs.get(row, 0) + weight
    middle = max(rows) // 2
    assert pairs == {middle - 1: 1, middle: 3, middle + 1: 1}
    wider = layout.flatten(table, {ENCODER_AXIS: None}, lengths, ENCODER_AXIS)
    assert wider is not None and wider[1] is not None and float(wider[1].sum()) == 2 * 9
    assert not layout.is_table


def test_rows_that_differ_between_examples_are_no_table_of_distances() -> None:
    layout = learn_layout(Size((16, 3, 4)), Size((14, 5, 4)), AXES)
    assert (
        layout.flatten(torch.randn(6, 2, 4), {ENCODER_AXIS: MASK}, {EXAMPLES_AXIS: 2, ENCODER_AXIS: 3}, ENCODER_AXIS)
        is None
    )


def test_windows_of_padded_text_are_not_matched_and_windows_of_images_are() -> None:
    layout = learn_layout(Size((12, 6, 4)), Size((20, 6, 4)), AXES)
    windows, lengths = torch.zeros(8, 6, 4), {EXAMPLES_AXIS: 2, ENCODER_AXIS: 3}
    in_turn = learn_layout(Size((3, 6, 4)), Size((5, 6, 4)), AXES)  # as many for every text
    for of_layout, x in ((layout, windows), (in_turn, windows[:2])):
        assert of_layout.flatten(x, {ENCODER_AXIS: MASK}, lengths, ENCODER_AXIS) is None
        assert of_layout.flatten(x, {ENCODER_AXIS: None, BLOCK_AXIS: None}, lengths, BLOCK_AXIS) is not None


def test_probes_differ_in_examples_and_in_every_token_axis() -> None:
    batch = {
        "input_ids": torch.zeros(4, 20, dtype=torch.long),
        "attention_mask": torch.zeros(4, 20, dtype=torch.long),
        "decoder_input_ids": torch.zeros(4, 1, dtype=torch.long),
    }
    (first, second), axes = make_probes(batch, {ENCODER_AXIS, DECODER_AXIS})
    for name, tensor in first.items():
        assert tensor.shape[0] != second[name].shape[0] and tensor.shape[1] != second[name].shape[1]
    assert axes == {ENCODER_AXIS: (8, 7), DECODER_AXIS: (1, 3)}
    assert bool(first["attention_mask"].all())


def test_probes_differ_in_the_frames_of_spectrograms_that_a_mask_is_about() -> None:
    batch = {"input_features": torch.zeros(4, 20, 16), "attention_mask": torch.ones(4, 20, dtype=torch.long)}
    (first, second), axes = make_probes(batch, {ENCODER_AXIS})
    assert (first["input_features"].shape, second["input_features"].shape) == (Size((3, 20, 16)), Size((5, 15, 16)))
    assert axes == {ENCODER_AXIS: (20, 15)}
    whisper = {"input_features": torch.zeros(4, 16, 20), "attention_mask": batch["attention_mask"]}
    assert make_probes(whisper, {ENCODER_AXIS})[1] == {
        ENCODER_AXIS: (20, 20)
    }  # features before frames, of a fixed number


def test_a_full_mask_is_no_mask() -> None:
    full = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}
    assert token_masks(full)[ENCODER_AXIS] is None
    assert token_lengths(full, torch.zeros(2, 5, 4)) == {EXAMPLES_AXIS: 2, ENCODER_AXIS: 3, BLOCK_AXIS: 5}
