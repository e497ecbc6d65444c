"""The result of a job does not depend on its neighbours: on how many examples share a batch, on which side they are
padded, and on which come first."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from families import BY_NAME, TASKS, VOCABULARY, Family, few_of, save_family, save_tokenizer, text
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.workflows.verbs import calibrate

SETTINGS: dict[str, Any] = {"ridge": 0.1, "rho": None, "alpha": None}
"""With a ridge under which rounding stays as small as it is: 1e-4 makes it a thousand times as large."""
PRECISE = 3e-5
"""Of the update: how far results may lie apart, as gradients and module-by-module steps in float32 carry the rounding
of one sum on into the next (1.5e-5 was not reached)."""


def write_texts(file: Path, seed: int, rows: int, least: int, most: int, *, with_targets: bool = False) -> list[str]:
    """Rows of so many words, all of another length; returns the lines."""
    random = Random(seed)

    def words(most: int) -> str:
        return " ".join(f"w{random.randint(3, 94)}" for _ in range(random.randint(least, most)))

    texts = (
        {"prompt": words(most), "response": words(most - 2)} if with_targets else {"text": words(most)}
        for _ in range(rows)
    )
    lines = [json.dumps(row) + "\n" for row in texts]
    file.write_text("".join(lines))
    return lines


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """‖one − other‖, of all tensors together."""
    squares = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return float(squares**0.5)


@pytest.mark.parametrize("name", few_of(["gpt2", "bert", "t5", "mixtral", "qwen2-moe"], ("gpt2", "qwen2-moe")))
def test_no_family_depends_on_batches_padding_and_order(tmp_path: Path, name: str) -> None:
    """One family of each kind: positions that are learnt, given by a mask or relative; a mixture, and one whose shared
    expert is weighed by a gate, as the others are. The paper's method is compared with the oracle, which knows no
    batches."""
    saved = save_family(tmp_path, BY_NAME[name])
    recipe: dict[str, Any] = saved.recipe(**SETTINGS, examples=8)
    with_targets = "decoder_input_ids" in saved.inputs["red"]
    results = []
    for side, batch_size in (("right", 1), ("left", 3)):
        for seed, task in enumerate(TASKS):
            file = tmp_path / f"{task}.jsonl"
            lines = write_texts(file, seed, 8, 3, 9, with_targets=with_targets)  # all are fitted: no step is reduced
            file.write_text("".join(lines if side == "right" else reversed(lines)))
            recipe["tasks"][task]["data"] = str(file)
        for model in ("merged", "base", *TASKS):
            save_tokenizer(tmp_path / model)
            config = tmp_path / model / "tokenizer_config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "padding_side": side}))
        calibrate(recipe, output=tmp_path / side, batch_size=batch_size)
        results.append(load_file(tmp_path / side / "model.safetensors"))
    first, second = results
    assert distance(first, second) <= PRECISE * distance(second, load_file(tmp_path / "merged" / "model.safetensors"))
    assert distance(first, load_file(tmp_path / "merged" / "model.safetensors")) > 0


LONG = Family(
    "long", "GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512},
    text, "transformer.h.0",
)  # fmt: skip


@pytest.mark.matrix
def test_texts_that_are_longer_than_those_whose_gradients_are_measured_are_calibrated_too(tmp_path: Path) -> None:
    """Of more than 16,384 tokens, where the longest text comes late and nothing is padded."""
    recipe: dict[str, Any] = save_family(tmp_path, LONG).recipe(**SETTINGS, examples=48)
    save_tokenizer(tmp_path / "red")
    write_texts(tmp_path / "red.jsonl", 2, 60, 400, 500)
    recipe["tasks"] = {"red": {"expert": str(tmp_path / "red"), "data": str(tmp_path / "red.jsonl")}}
    block, _ = calibrate(recipe, output=tmp_path / "out", batch_size=1).report.blocks  # and the norm before the head
    linear = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert linear <= {module.name for module in block.modules}, block.skipped
