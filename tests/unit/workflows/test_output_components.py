"""What lies beside the merged model's weights: components stay byte for byte, copies of the same tensors go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES, Saved, save_family
from hub_server import HubServer
from safetensors.torch import load_file, save_file

from featcal_cli.hub.snapshot import resolve
from featcal_cli.runtime.errors import FeatCalError
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.verbs import calibrate, dry_run

pytestmark = pytest.mark.usefixtures("undrawn")

BERT = next(family for family in FAMILIES if family.name == "bert")


def write(folder: Path, path: str, content: bytes | str = b"anything") -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def paths_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save_family(tmp_path, BERT)


def test_components_stay_and_second_copies_go(saved: Saved, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    weights = load_file(merged / "model.safetensors")
    other = {name: value + 0.01 for name, value in weights.items()}  # a component that is built like the model
    for folder in ("question_encoder", "0_Transformer", "checkpoint-500"):
        (merged / folder).mkdir()
    save_file(other, merged / "question_encoder" / "model.safetensors")
    save_file(weights, merged / "0_Transformer" / "model.safetensors")
    save_file(other, merged / "checkpoint-500" / "model.safetensors")
    save_file(dict(list(other.items())[:2]), merged / "earlier.safetensors")
    save_file({"summary.weight": torch.ones(1, 32)}, merged / "v_head.safetensors")
    save_file({name: value.to(torch.bfloat16) for name, value in weights.items()}, merged / "model.fp16.safetensors")
    kept = [
        *(
            "1_Pooling/config.json",
            "2_Dense/pytorch_model.bin",
            "2_Dense/config.json",
            "lora/adapter_model.safetensors",
        ),
        *("vision_tower/model.safetensors", "unet/diffusion_pytorch_model.bin", "sparse_linear.pt", "model_head.pkl"),
        *("training_args.bin", "original/params.json"),
    ]
    gone = [
        *("onnx/model.onnx", "openvino/openvino_model.bin", "model-Q4_K_M.gguf", "gguf/model.gguf", "tf_model.h5"),
        *("consolidated.safetensors", "original/consolidated.00.pth", "optimizer.pt", "pytorch_model.bin"),
        *("checkpoint-500/optimizer.pt", "flax_model.msgpack"),
    ]
    for path in (*kept, *gone):
        write(merged, path)
    gone += ["earlier.safetensors", "model.fp16.safetensors", "checkpoint-500/model.safetensors"]
    kept += [
        "question_encoder/model.safetensors",
        "0_Transformer/model.safetensors",
        "v_head.safetensors",
    ]

    told: list[str] = []

    class Ear(Listener):
        def note(self, text: str) -> None:
            told.append(text)

    calibrate(saved.recipe(), output=tmp_path / "out", listener=Ear())
    assert not paths_in(tmp_path / "out") & set(gone)
    for path in kept:
        assert (tmp_path / "out" / path).read_bytes() == (merged / path).read_bytes(), path
    assert [text for text in told if "0_Transformer/model.safetensors" in text and "copied unchanged" in text]


def test_an_index_beside_a_single_file_goes(saved: Saved, tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    write(tmp_path / "merged", "model.safetensors.index.json", json.dumps(index))
    calibrate(saved.recipe(), output=tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_components_of_a_repo_are_downloaded_and_those_of_pickled_models_kept(hub: HubServer, tmp_path: Path) -> None:
    save_family(tmp_path, BERT)
    folder = tmp_path / "merged"
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


@pytest.mark.parametrize("name", ["README.md", "featcal.yaml", "featcal_report.json", "drift.png"])
def test_a_folder_with_a_name_of_ours_is_refused_before_anything_is_computed(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    (tmp_path / "merged" / "README.md").unlink(missing_ok=True)
    write(tmp_path / "merged", f"{name}/inside.txt")
    with pytest.raises(FeatCalError, match=f"{name} is the name of a file that featcal writes, and a folder here"):
        dry_run(saved.recipe(), output=tmp_path / "out")


@pytest.mark.parametrize("path", ["adapter", "adapter/adapter_model.safetensors"])
def test_what_lies_where_an_adapter_is_to_be_written_is_never_written_over(
    saved: Saved, tmp_path: Path, path: str
) -> None:
    write(tmp_path / "merged", path)
    with pytest.raises(FeatCalError, match="is the folder that an adapter is written to"):
        dry_run(saved.recipe(), output=tmp_path / "out", as_adapter=2)
    calibrate(saved.recipe(), output=tmp_path / "out")
    assert (tmp_path / "out" / path).read_bytes() == b"anything"
