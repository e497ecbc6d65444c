"""Families against the slow oracle: by default those that are as different as can be, the others with -m matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from compatibility import read_rows
from families import BY_NAME, FAMILIES, Family, save_family
from family_checks import check_family, check_oracle

from featcal_cli.workflows.verbs import calibrate

DEFAULT = {"bert", "gpt2", "vit", "mixtral", "xlm"}
"""With a cache that blocks write to."""
FAR_APART = [pytest.param(family, marks=[] if family.name in DEFAULT else pytest.mark.matrix) for family in FAMILIES]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("family", FAR_APART, ids=lambda family: family.name)
def test_a_family_is_calibrated_as_the_oracle_does_it(tmp_path: Path, family: Family) -> None:
    check_family(tmp_path, family)


TURNS = {
    "bert": (
        "query|key|value",
        r"attention\.output\.dense",
        r"attention\.output\.LayerNorm|intermediate",
        r"^\.output",
    ),
    "t5": (
        r"SelfAttention\.[qkv]|EncDecAttention\.[kv]",
        r"SelfAttention\.o",
        r"EncDecAttention\.q",
        r"EncDecAttention\.o",
        "wi",
        "wo",
    ),
    "llama": ("[qkv]_proj|input_layernorm", "o_proj", "gate|up|post_attention", "down"),
    "mixtral": ("[qkv]_proj", "o_proj"),  # and then its experts, whose router stays
    "clip-vision": ("[qkv]_proj|layer_norm1", "out_proj", "fc1|layer_norm2", "fc2"),
}
"""What is solved at once where it is solved module by module, by the paths inside a block."""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", TURNS)
def test_modules_are_solved_on_what_those_before_them_give(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    result = calibrate(saved.recipe(order="module"), output=tmp_path / "out", batch_size=5)
    check_oracle(saved, result, turns=TURNS[name])
    assert result.report.settings["order"] == "module"


def test_the_table_in_the_docs_has_a_row_for_every_family() -> None:
    assert [row.split("|")[1].strip() for row in read_rows()] == sorted({family.name for family in FAMILIES})
    assert len(FAMILIES) == len({family.name for family in FAMILIES}) >= 45
