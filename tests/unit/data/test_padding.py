"""Examples without padding are each example alone; tests/matrix/test_batches.py has them in all kinds of batches."""

from __future__ import annotations

import torch
from torch import Tensor

from featcal_cli.data.batches import find_along, remove_padding, token_masks

LENGTHS = (3, 1, 3, 2, 1)


def make_texts(longest: int) -> dict[str, Tensor]:
    """Ids that tell the example and the token, padded with 0."""
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    ids = (10 * torch.arange(1, 6)[:, None] + torch.arange(longest)) * mask
    boxes = ids[..., None].float().expand(-1, -1, 4).contiguous()
    return {"input_ids": ids, "attention_mask": mask, "bbox": boxes, "pixel_values": torch.rand(5, longest, 2, 2)}


def test_examples_are_cut_and_those_of_equal_length_share_batches() -> None:
    batch = make_texts(4)
    full = remove_padding([batch], 2)
    assert [x["input_ids"].tolist() for x in full] == [[[10, 11, 12], [30, 31, 32]], [[20], [50]], [[40, 41]]]
    assert all(x["attention_mask"].all() and x["bbox"].shape[:2] == x["input_ids"].shape for x in full)
    assert torch.equal(torch.cat([x["pixel_values"] for x in full]), batch["pixel_values"][[0, 2, 1, 4, 3]])
    assert all(not token_masks(x) for x in full)


def test_ids_with_a_mask_of_their_own_are_cut_by_it() -> None:
    """InstructBLIP reads a question a second time, with another tokenizer."""
    texts = make_texts(4)
    named = {f"qformer_{name}": texts[name].flip(0) for name in ("input_ids", "attention_mask")}
    for example in remove_padding([texts | named], 1):
        number = int(example["input_ids"][0, 0]) // 10
        assert example["qformer_input_ids"].shape[1] == example["qformer_attention_mask"].sum() == LENGTHS[-number]


def test_what_a_model_wants_of_one_size_is_not_cut() -> None:
    """Whisper's spectrograms have features before frames."""
    batch = {"input_features": torch.rand(2, 4, 6), "attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])}
    assert find_along(batch, "encoder") == ["attention_mask"]
    [full] = remove_padding([batch], 2)
    assert torch.equal(full["attention_mask"], batch["attention_mask"])


def test_a_mask_of_floating_point_numbers_cuts_like_any_other() -> None:
    sound = {"input_values": torch.rand(2, 4), "attention_mask": torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]])}
    assert [x["input_values"].shape for x in remove_padding([sound], 2)] == [(1, 4), (1, 2)]
