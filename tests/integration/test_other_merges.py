"""Merges whose layers or tokens are not those of their experts: refused in one message, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import BY_NAME, save_family
from transformers import LlamaForCausalLM

from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.workflows.verbs import calibrate, dry_run


@pytest.mark.parametrize(
    ("order", "what", "verb"),
    [
        ([0, 1, 0, 1], r"base lacks the tensor model\.layers\.2\.", dry_run),
        ([1, 0], r"merged's model\.layers\.0 is made of base's model\.layers\.1", calibrate),
    ],
)
def test_other_layers_and_layers_in_another_order_are_refused(
    tmp_path: Path, order: list[int], what: str, verb: Any
) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).recipe()
    restack(tmp_path / "merged", order)
    check_refusal(tmp_path, recipe, what, verb)


def test_tokens_that_an_expert_does_not_know_are_named(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).recipe()
    forget_tokens(tmp_path / "red")
    check_refusal(tmp_path, recipe, r"expert red knows the tokens 0 to 49, and examples hold \d\d")


def test_a_base_without_some_tokens_is_compared_by_its_weights(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).recipe()
    forget_tokens(tmp_path / "base")
    report = calibrate(recipe, output=tmp_path / "out").report
    assert all(drift.base is None for drift in report.drift.values())
    assert any("base knows the tokens 0 to 49" in note and "its drift is left out" in note for note in report.notes)


def forget_tokens(folder: Path) -> None:
    """Leave the model in a folder 50 tokens."""
    module = LlamaForCausalLM.from_pretrained(folder)
    module.resize_token_embeddings(50)
    module.save_pretrained(folder)


def check_refusal(folder: Path, recipe: dict[str, object], what: str, verb: Any = calibrate) -> None:
    before = set(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=what) as raised:
        verb(recipe, output=folder / "out")
    assert raised.value.fix
    assert set(folder.rglob("*")) == before


def restack(folder: Path, order: list[int]) -> None:
    """The model in a folder, made of these of its layers."""
    module = LlamaForCausalLM.from_pretrained(folder)
    tensors = module.state_dict()
    stacked = {name: value for name, value in tensors.items() if ".layers." not in name}
    for number, layer in enumerate(order):
        place = f"model.layers.{layer}."
        taken = {name.removeprefix(place): value for name, value in tensors.items() if name.startswith(place)}
        stacked |= {f"model.layers.{number}.{name}": value.clone() for name, value in taken.items()}
    module.config.num_hidden_layers = len(order)
    other = LlamaForCausalLM(module.config)
    other.load_state_dict(stacked)
    other.save_pretrained(folder)
