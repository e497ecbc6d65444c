"""The output is the merged checkpoint again, with only the calibrated tensors changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_family
from safetensors import safe_open
from transformers import AutoModel

from featcal_cli.hub.snapshot import resolve
from featcal_cli.models.loading import find_class
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

BY_NAME = {family.name: family for family in FAMILIES}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            found |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return found


def header_of(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("clip-vision", "one file"), ("bert", "sharded"), ("gpt2", "sharded"), ("gpt2", "bfloat16"),
        ("llama", "bfloat16"),
    ],
)  # fmt: skip
def test_only_calibrated_tensors_change(tmp_path: Path, name: str, layout: str) -> None:
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    saved = save_family(tmp_path, BY_NAME[name], dtype=dtype)
    merged, output = tmp_path / "merged", tmp_path / "out"
    if layout == "sharded":
        model = find_class(resolve(str(merged))).from_pretrained(merged)
        (merged / "model.safetensors").unlink()
        model.save_pretrained(merged, max_shard_size="20KB")
        assert len(list(merged.glob("*.safetensors"))) > 2
    (merged / "README.md").write_text("a card")
    (merged / "notes").mkdir()
    (merged / "notes" / "more.txt").write_text("more")
    (merged / "pytorch_model.bin").write_bytes(b"old weights in another format")
    report = calibrate(saved.recipe(), output=output).report  # else some updates are held back whole

    before, after = tensors_of(merged), tensors_of(output)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    calibrated = {f"{block.name}.{module.name}" for block in report.blocks for module in block.modules}
    ends = {".".join(key.split(".")[-4:-1]) for key in changed}
    assert ends == {".".join(path.split(".")[-3:]) for path in calibrated}
    for file in (path for path in merged.rglob("*") if path.is_file()):
        twin = output / file.relative_to(merged)
        if file.suffix == ".safetensors":
            assert header_of(twin) == header_of(file)
        elif file.suffix == ".bin":
            assert not twin.exists()
        elif file.name == "README.md":
            assert (output / "README.merged.md").read_text().rstrip().endswith("a card")  # beside the new one
        else:
            assert twin.read_bytes() == file.read_bytes()
    _, info = AutoModel.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    calibrate(saved.recipe(), output=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "featcal_report.json").read_text())
    assert report["settings"]["ridge"] == 0.05 and report["settings"]["chosen_by"] == "given"
    assert set(report["drift"]) == set(saved.inputs)
    assert set(report["drift"]["red"]) == {"before", "after", "base", "cosine_before", "cosine_after", "held_out"}
    module = report["blocks"][0]["modules"][0]
    assert set(module) == {"name", "kind", "rows", "relative_change", "ridge", "step"}
    assert module["rows"] == 3 * 12 * 17
    assert report["cost"]["seconds"] > 0 and report["cost"]["peak_rss_bytes"] > 0
    experts = sum((tmp_path / task / "model.safetensors").stat().st_size for task in saved.inputs)
    assert 0 < report["cost"]["expert_bytes_read"] <= experts


def test_an_existing_output_is_replaced_only_when_asked(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    calibrate(saved.recipe(), output=tmp_path / "out")
    with pytest.raises(OutputError, match="another job: --rho was 2, and is 1"):
        calibrate(saved.recipe(rho=1.0), output=tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")  # ours, whatever was made of it
    calibrate(saved.recipe(), output=tmp_path / "out", overwrite=True)
    assert len((tmp_path / "out" / "config.json").read_text()) > 2
    (tmp_path / "out" / "runs").mkdir()
    (tmp_path / "out" / "runs" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"files that featcal did not write, and is not replaced: runs/mine\.txt"):
        calibrate(saved.recipe(), output=tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "runs" / "mine.txt").read_text() == "mine"


def test_what_comes_to_stand_in_the_outputs_place_during_a_run_is_not_replaced(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])

    class Neighbour(Listener):
        def stage(self, text: str) -> None:
            if text == "writing":
                (tmp_path / "out").mkdir()
                (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(OutputError, match="the output folder exists"):
        calibrate(saved.recipe(), output=tmp_path / "out", listener=Neighbour())
    with pytest.raises(OutputError, match="not one that featcal made"):
        calibrate(saved.recipe(), output=tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    shutil.rmtree(tmp_path / "out")
    notes = calibrate(saved.recipe(), output=tmp_path / "out").report.notes
    assert any("2 of 2 blocks were taken over" in note for note in notes)


def test_nothing_of_the_users_in_the_hidden_folder_is_touched(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    hidden = tmp_path / ".out.featcal"
    for folder in (hidden, hidden / "journal", hidden / "journal" / "block-mine"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.txt").write_text("mine")
    kept = sorted(hidden.rglob("*"))
    calibrate(saved.recipe(), output=tmp_path / "out")
    assert sorted(hidden.rglob("*")) == kept
    assert {path.read_text() for path in kept if path.is_file()} == {"mine"}


@pytest.mark.parametrize(
    ("place", "harm"),
    [
        ("merged", "replace"), (".", "replace"), ("red", "replace"), ("link", "replace"),
        ("merged/out", "lie in"), ("red/a/b", "lie in"), ("link/out", "lie in"),
    ],
)  # fmt: skip
def test_the_output_never_replaces_an_input_or_lies_in_one(tmp_path: Path, place: str, harm: str) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    (tmp_path / "link").symlink_to(tmp_path / "merged")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=f"would {harm}"):
        calibrate(saved.recipe(), output=tmp_path / place, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
