"""featcal modules: what would be calibrated, from the config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import featcal_inside, succeed
from families import BY_NAME, Family, few_of, save_family
from hub_server import HubServer
from torch import Tensor, nn

from featcal_cli.hub.model_files import read_entries
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import Block, find_architecture
from featcal_cli.models.inventory import run_without_values
from featcal_cli.models.loading import find_class, load_model, load_outline
from featcal_cli.models.tracing import ForwardError, run_forward


def save_config(folder: Path, family: Family) -> Snapshot:
    """A folder with nothing but the config."""
    model = family.build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return Snapshot(family.name, folder, None)


NEEDS_VALUES = {
    "xmod", "longformer", "longformer-padded", "dbrx", "switch-transformers", "nllb-moe", "led", "siglip2",
    "smolvlm", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "mllama", "mllama-tiles", "udop", "qwen2-audio",
}  # fmt: skip
"""Families whose forward cannot run on shapes alone."""


@pytest.mark.parametrize("name", few_of(BY_NAME, {"mixtral", "gpt-oss", "bart", "llava"}))
def test_a_plan_finds_the_modules_that_a_run_finds(tmp_path: Path, name: str) -> None:
    save_family(tmp_path, BY_NAME[name])
    snapshot, inputs = Snapshot(name, tmp_path / "merged", None), {"red": BY_NAME[name].inputs(4)}
    model_class = find_class(snapshot)
    outline = load_outline("merged", snapshot, model_class, read_entries(snapshot.folder)).module
    planned = run_without_values(outline, "auto", inputs)
    assert (planned is None) == (name in NEEDS_VALUES)
    if planned is not None:
        run = find_architecture(load_model("merged", snapshot, model_class).module, inputs, "auto")
        assert planned.head == run.head and planned.reached == run.reached
        assert [list_modules(block) for block in planned.blocks] == [list_modules(block) for block in run.blocks]


def test_headers_are_not_needed_to_find_experts(tmp_path: Path) -> None:
    save_family(tmp_path, BY_NAME["mixtral"])
    snapshot = Snapshot("mixtral", tmp_path / "merged", None)
    outline = load_outline("merged", snapshot, find_class(snapshot), None).module
    planned = run_without_values(outline, "auto", {"red": BY_NAME["mixtral"].inputs(4)})
    assert planned is not None and all(block.is_mixture for block in planned.blocks)


def test_a_loop_that_waits_for_a_value_ends() -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            while x.any():
                x = x - 1
            return x

    with pytest.raises(ForwardError, match="again and again"):
        run_forward(Waiting(), {"x": torch.ones(1, device="meta")})


def list_modules(block: Block) -> tuple[object, ...]:
    """A block's modules, without what their rows mean, for which masks are looked at."""
    modules = [(module.name, module.kind, module.depth, module.routed) for module in block.modules]
    return block.name, block.calls, block.gating_modules, block.skipped, modules


def test_no_weights_are_downloaded(tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    save_family(tmp_path, BY_NAME["bert"])
    hub.add_repo("inventory/bert", tmp_path / "merged")
    run = succeed(capsys, "modules", {"model": "inventory/bert", "--json": ""})
    assert [block["name"] for block in json.loads(run.stdout)["blocks"]] == ["encoder.layer.0", "encoder.layer.1"]
    assert not any(request.path.endswith(".safetensors") for request in hub.requests)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ({}, 0, "encoder.layer.0 … 1 (2 blocks, each: 8 modules"),
        ({"--norms": "all"}, 2, "of a recipe"),
        ({"model": "nowhere/at-all"}, 2, "nowhere"),
    ],
)
def test_the_table_fits_the_terminal_and_bad_input_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, object], code: int, word: str
) -> None:
    save_config(tmp_path, BY_NAME["bert"])
    run = featcal_inside(capsys, "modules", {"model": tmp_path, **arguments})
    assert run.code == code and word in (run.stderr if code else run.stdout) and not (code and run.stdout)
