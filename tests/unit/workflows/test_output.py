"""The output is the merged checkpoint again, with only the calibrated tensors changed; what is in its place, beside it
or of no use is kept, left out or refused."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BY_NAME, Saved, save_family
from hub_server import HubServer
from jobs import Watcher
from published import resolve
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from featcal_cli.models.loading import find_class
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, OutputError
from featcal_cli.runtime.files import LOCK, explain_full, tell_fix
from featcal_cli.workflows import inputs
from featcal_cli.workflows.verbs import calibrate, dry_run

TOKEN = "hf_" + "aB3dE6gH" * 4


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def header_of(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def write(folder: Path, path: str, content: bytes = b"anything") -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def paths_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "layout"), [("clip-vision", "one file"), ("bert", "sharded"), ("gpt2", "sharded"), ("llama", "bfloat16")]
)
def test_only_calibrated_tensors_change(tmp_path: Path, name: str, layout: str) -> None:
    """And what else is in the folder is there again; but weights in other formats, which would be stale."""
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    saved = save_family(tmp_path, BY_NAME[name], dtype=dtype).only(1)
    merged, output = tmp_path / "merged", tmp_path / "out"
    if layout == "sharded":
        model = find_class(resolve(str(merged))).from_pretrained(merged)
        (merged / "model.safetensors").unlink()
        model.save_pretrained(merged, max_shard_size="20KB")
        assert len(list(merged.glob("*.safetensors"))) > 2
    write(merged, "README.md", "---\r\nlicense: mit\r\n---\r\na card".encode("utf-16"))
    write(merged, "notes/more.txt")
    write(merged, "pytorch_model.bin")
    report = calibrate(saved.recipe(), output=output).report

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
            assert (output / "README.merged.md").read_bytes() == file.read_bytes()  # beside the new one
        else:
            assert twin.read_bytes() == file.read_bytes()
    _, info = AutoModel.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]


def test_a_finished_output_says_what_was_done_and_is_not_made_again(tmp_path: Path) -> None:
    """What differs from the job that is asked for is said; and is replaced where --overwrite says so, but for files
    that featcal did not write."""
    saved, output = save_family(tmp_path, BY_NAME["vit"]).only(1), tmp_path / "out"
    calibrate(saved.recipe(), output=tmp_path / "gone" / ".." / "out")
    report = json.loads((output / "featcal_report.json").read_text())
    assert report["settings"]["ridge"] == 0.05 and report["settings"]["chosen_by"] == "given"
    assert set(report["drift"]) == set(saved.inputs)
    assert set(report["drift"]["red"]) == {"before", "after", "base", "cosine_before", "cosine_after", "held_out"}
    module = report["blocks"][0]["modules"][0]
    assert set(module) == {"name", "kind", "rows", "relative_change", "ridge", "step"}
    assert module["rows"] == 12 * 17
    assert report["cost"]["seconds"] > 0 and report["cost"]["peak_rss_bytes"] > 0
    experts = sum((tmp_path / task / "model.safetensors").stat().st_size for task in saved.inputs)
    assert 0 < report["cost"]["expert_bytes_read"] <= experts

    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    write(tmp_path, f".out.featcal/{LOCK}", b'{"process": 1, "machine": "another"}')  # of a run killed at its very end
    again = calibrate(saved.recipe(), output=output)
    assert again.was_done and again.report.drift.keys() == set(saved.inputs)
    assert not (tmp_path / ".out.featcal").exists()
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    for change, said in (({"examples": 7}, "--examples was 12, and is 7"), ({"rho": 0.5}, "--rho was 2, and is 0.5")):
        with pytest.raises(OutputError, match="this is the output of another job") as refused:
            calibrate(saved.recipe(**change), output=output)
        assert said in refused.value.what and "--overwrite" in refused.value.fix and " -r " in refused.value.fix
    with pytest.raises(OutputError, match="--as-adapter was not given, and is 2"):
        calibrate(saved.recipe(), output=output, as_adapter=2)
    (output / "config.json").write_text("{}")  # ours, whatever was made of it
    calibrate(saved.recipe(), output=output, overwrite=True)
    assert len((output / "config.json").read_text()) > 2
    write(output, "runs/mine.txt")
    with pytest.raises(OutputError, match=r"files that featcal did not write, and is not replaced: runs/mine\.txt"):
        calibrate(saved.recipe(), output=output, overwrite=True)
    assert (output / "runs" / "mine.txt").is_file()
    config = tmp_path / "merged" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(OutputError, match=r"merged/config\.json has changed") as refused:
        calibrate(saved.recipe(), output=output)
    assert " -r " not in refused.value.fix  # no recipe brings the file back


def test_what_users_put_in_the_outputs_place_or_the_hidden_folder_stays(saved: Saved, tmp_path: Path) -> None:
    hidden = tmp_path / ".out.featcal"
    for folder in (hidden, hidden / "journal", hidden / "journal" / "block-mine"):
        write(folder, "mine.txt")
    kept = sorted(hidden.rglob("*"))

    with pytest.raises(OutputError, match="the output folder exists"):
        watcher = Watcher("writing", lambda: write(tmp_path / "out", "thesis.txt"))
        calibrate(saved.recipe(), output=tmp_path / "out", listener=watcher)
    with pytest.raises(OutputError, match="not one that featcal made"):
        calibrate(saved.recipe(), output=tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").is_file()
    shutil.rmtree(tmp_path / "out")
    notes = calibrate(saved.recipe(), output=tmp_path / "out").report.notes
    assert any("2 of 2 blocks were taken over" in note for note in notes)
    assert sorted(hidden.rglob("*")) == kept


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("merged", "would replace"), (".", "would replace"), ("red", "would replace"), ("link", "would replace"),
        ("merged/out", "would lie in"), ("red/a/b", "would lie in"), ("link/out", "would lie in"),
        ("loop", "cannot be a folder"), ("there", "cannot be a folder"),
    ],
)  # fmt: skip
def test_no_output_replaces_an_input_or_lies_in_one(saved: Saved, tmp_path: Path, place: str, what: str) -> None:
    for link, target in (("link", tmp_path / "merged"), ("loop", "loop"), ("here", "there"), ("there", "here")):
        (tmp_path / link).symlink_to(target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FeatCalError, match=what) as refused:
        calibrate(saved.recipe(), output=tmp_path / place, overwrite=True)
    assert refused.value.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_no_composed_file_holds_a_token_and_cards_in_other_encodings_stop_nothing(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "merged" / "README.md").write_bytes(f"caf\xe9 {TOKEN}".encode("latin-1"))
    (tmp_path / "base" / "README.md").write_bytes(b"\xff\xfe\xe9")
    for task in saved.inputs:
        (tmp_path / task / "README.md").write_bytes(b"---\nlicense: mit\n---\ncaf\xe9")
    report = calibrate(saved.recipe(), output=tmp_path / "out").report
    assert {source.license for source in report.sources if source.role.startswith("expert")} == {"mit"}
    assert not [path for path in (tmp_path / "out").iterdir() if TOKEN[5:].encode() in path.read_bytes()]
    assert calibrate(saved.recipe(), output=tmp_path / "out").was_done  # its own report is understood


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free disk space, or choose another --output"),
        (errno.EFBIG, "raise the limit of this process (ulimit -f)"),
        (errno.EACCES, "let this user read and write it, or choose another --output"),
        (errno.EIO, "check the disk, or choose another --output"),
        (errno.EISDIR, "choose another --output"),
    ],
)
def test_the_fix_depends_on_the_systems_number(number: int, fix: str) -> None:
    assert tell_fix(OSError(number, os.strerror(number)), "choose another --output") == fix
    assert tell_fix(RuntimeError(f"I/O error (os error {number})"), "choose another --output") == fix


def test_a_refused_file_is_named_with_what_moves_it(tmp_path: Path) -> None:
    message = explain_full(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "a")))
    assert message is not None and message.where == str(tmp_path / "a") and "FEATCAL_CACHE" in message.fix
    assert explain_full(PermissionError(errno.EPERM, "Operation not permitted")) is None
    assert explain_full(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None


# What lies beside the weights: components stay byte for byte, copies of the same tensors go.

KEPT = (
    "1_Pooling/config.json", "2_Dense/pytorch_model.bin", "2_Dense/config.json", "lora/adapter_model.safetensors",
    "vision_tower/model.safetensors", "unet/diffusion_pytorch_model.bin", "sparse_linear.pt", "model_head.pkl",
    "training_args.bin", "original/params.json", "adapter/adapter_model.safetensors",
)  # fmt: skip
GONE = (
    "onnx/model.onnx", "openvino/openvino_model.bin", "model-Q4_K_M.gguf", "gguf/model.gguf", "tf_model.h5",
    "consolidated.safetensors", "original/consolidated.00.pth", "optimizer.pt", "pytorch_model.bin",
    "checkpoint-500/optimizer.pt", "flax_model.msgpack", "model.safetensors.index.json",
)  # fmt: skip


def test_components_stay_and_second_copies_go(saved: Saved, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    for path in (*KEPT, *GONE):
        write(merged, path)
    (merged / GONE[-1]).write_text('{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    weights = load_file(merged / "model.safetensors")
    other = {name: value + 0.01 for name, value in weights.items()}  # a component that is built like the model
    made = {
        "question_encoder/model.safetensors": other, "0_Transformer/model.safetensors": weights,
        "v_head.safetensors": {"summary.weight": torch.ones(1, 32)},
    }  # fmt: skip
    copies = {
        "checkpoint-500/model.safetensors": other, "earlier.safetensors": dict(list(other.items())[:2]),
        "model.fp16.safetensors": {name: value.to(torch.bfloat16) for name, value in weights.items()},
    }  # fmt: skip
    for path, tensors in (made | copies).items():
        (merged / path).parent.mkdir(exist_ok=True)
        save_file(tensors, merged / path)
    watcher = Watcher()
    report = calibrate(saved.recipe(), output=tmp_path / "out", listener=watcher).report
    assert not paths_in(tmp_path / "out") & {*GONE, *copies}
    for path in (*KEPT, *made):
        assert (tmp_path / "out" / path).read_bytes() == (merged / path).read_bytes(), path
    for told in (watcher.notes.splitlines(), report.notes):
        assert [text for text in told if "0_Transformer/model.safetensors" in text and "copied unchanged" in text]


def test_components_of_a_repo_are_downloaded_and_those_of_pickled_models_kept(saved: Saved, hub: HubServer) -> None:
    folder = saved.folder / "merged"
    write(folder, "2_Dense/pytorch_model.bin", b"no pickle at all")
    write(folder, "onnx/model.onnx")
    hub.add_repo("user/embedding", folder)
    found = resolve("user/embedding").folder
    assert (found / "2_Dense" / "pytorch_model.bin").read_bytes() == b"no pickle at all"
    assert not (found / "onnx").exists()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    hub.add_repo("user/pickled", folder)
    for name in ("user/pickled", str(folder)):
        copy = resolve(name, allow_pickle=True).folder
        assert (copy / "2_Dense" / "pytorch_model.bin").read_bytes() == b"no pickle at all"
        assert not {"pytorch_model.bin", "onnx/model.onnx"} & paths_in(copy)


@pytest.mark.parametrize(
    ("path", "what", "options"),
    [
        *((name, f"{name} is the name of a file that featcal writes, and a folder here", {}) for name in
          ("README.md", "drift.png")),
        ("README.merged.md", "README.merged.md is the name of a file that featcal writes, and a folder here", {}),
        ("", "is the folder that an adapter is written to", {"as_adapter": 2}),  # a file of that name
    ],
)  # fmt: skip
def test_taken_names_are_refused(saved: Saved, tmp_path: Path, path: str, what: str, options: dict[str, Any]) -> None:
    (tmp_path / "merged" / "README.md").unlink(missing_ok=True)
    if path != "README.md":
        write(tmp_path / "merged", "README.md")
    write(tmp_path / "merged", f"{path}/inside.txt" if path else "adapter")
    with pytest.raises(FeatCalError, match=what):
        dry_run(saved.recipe(), output=tmp_path / "out", **options)


@pytest.mark.parametrize("name", ["2_Dense", "2_Dense/config.json"])  # a folder, and a file
def test_what_cannot_be_read_is_refused_at_once(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / "merged", "2_Dense/config.json")

    def access(path: Path, _: int) -> bool:
        return not path.match(f"merged/{name}")  # root may read all there is

    monkeypatch.setattr(inputs, "os", SimpleNamespace(access=access, R_OK=os.R_OK))
    with pytest.raises(CheckpointError, match=f"{name} cannot be read by this user"):
        dry_run(saved.recipe(), output=tmp_path / "out")
