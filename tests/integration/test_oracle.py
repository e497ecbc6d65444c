"""What is calibrated equals the official implementation, through the command line, and the slow oracle: by default
families that are as different as can be, the others with -m matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import succeed
from families import BY_NAME, FAMILIES, Family, few_of, save_family
from family_checks import check_family, check_nothing_to_learn, check_oracle, read_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize("name", few_of(TURNS, {"bert"}))
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


DATA = Path(__file__).parents[1] / "data" / "clip-tiny"


@pytest.mark.parametrize(
    ("result", "tolerance"), [("official-a", 1e-4), pytest.param("official-b", 5e-3, marks=pytest.mark.matrix)]
)
def test_official_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str], result: str, tolerance: float) -> None:
    official = load_file(DATA / f"{result}.safetensors")
    with safe_open(DATA / f"{result}.safetensors", framework="pt") as file:
        told = file.metadata()
    experts, data = [], []
    for task in range(3):
        save_file({"pixel_values": official[f"pixel_values.t{task}"]}, tmp_path / f"t{task}.safetensors")
        experts.append(f"t{task}={DATA / f'expert{task}'}")
        data.append(f"t{task}={tmp_path / f't{task}'}.safetensors")
    settings = {"--ridge": told["lambda"], "--rho": told["rho"], "--alpha": told["alpha"]}
    models = {"merged": DATA / "merged", "--base": DATA / "base", "--expert": experts, "--data": data}
    succeed(capsys, "calibrate", {**models, "--method": "paper", **settings, "-o": tmp_path / "out"})
    ours = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name.removeprefix("calibrated."): t for name, t in official.items() if name.startswith("calibrated.")}
    assert len(expected) == 48
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= tolerance * tensor.norm(), name
    merged = load_file(DATA / "merged" / "model.safetensors")
    assert {name for name in merged if not merged[name].equal(ours[name])} == set(expected)
