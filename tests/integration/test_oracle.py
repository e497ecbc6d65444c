"""Families against the slow oracle: by default those that are as different as can be, the others with -m matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import BY_NAME, FAMILIES, Family, few_of, save_family
from family_checks import check_family, check_nothing_to_learn, check_oracle, read_rows

from featcal_cli.workflows.verbs import calibrate

DEFAULT = {"bert", "gpt2", "vit", "mixtral", "xlm"}
"""With a cache that blocks write to."""
FAR_APART = [pytest.param(family, marks=[] if family.name in DEFAULT else pytest.mark.matrix) for family in FAMILIES]


@pytest.mark.parametrize("family", FAR_APART, ids=lambda family: family.name)
def test_a_family_is_calibrated_as_the_oracle_does_it(tmp_path: Path, family: Family) -> None:
    check_family(tmp_path, family)


TURNS = {
    "bert": (
        "query|key|value", r"attention\.output\.dense", r"attention\.output\.LayerNorm|intermediate", r"^\.output",
    ),
    "t5": (
        r"SelfAttention\.[qkv]|EncDecAttention\.[kv]", r"SelfAttention\.o", r"EncDecAttention\.q",
        r"EncDecAttention\.o", "wi", "wo",
    ),
    "llama": ("[qkv]_proj|input_layernorm", "o_proj", "gate|up|post_attention", "down"),
    "mixtral": ("[qkv]_proj", "o_proj"),  # and then its experts, whose router stays
    "clip-vision": ("[qkv]_proj|layer_norm1", "out_proj", "fc1|layer_norm2", "fc2"),
}  # fmt: skip
"""What is solved at once where it is solved module by module, by the paths inside a block."""


@pytest.mark.parametrize("name", few_of(TURNS, {"bert", "mixtral"}))
def test_modules_are_solved_on_what_those_before_them_give(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    result = calibrate(saved.recipe(order="module"), output=tmp_path / "out", batch_size=5)
    check_oracle(saved, result, turns=TURNS[name])
    assert result.report.settings["order"] == "module"


@pytest.mark.parametrize("name", few_of(["bert", "mixtral", "t5", "swin", "wav2vec2", "xlnet"], {"bert"}))
def test_where_nothing_is_to_be_learnt_nothing_changes(tmp_path: Path, name: str) -> None:
    check_nothing_to_learn(tmp_path, BY_NAME[name])


def test_the_table_in_the_docs_has_a_row_for_every_family() -> None:
    assert [row.split("|")[1].strip() for row in read_rows()] == sorted({family.name for family in FAMILIES})
    assert len(FAMILIES) == len({family.name for family in FAMILIES}) >= 45
