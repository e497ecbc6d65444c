"""featcal modules: what would be calibrated, from the config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import featcal_inside, succeed
from families import BY_NAME, Family, save_family
from hub_server import HubServer

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.inventory import take_inventory

SHOWN = ["clip-vision", "clip", "bert", "gpt2", "llama", "t5", "bart", "whisper", "mixtral", "llava"]


def save_config(folder: Path, family: Family) -> Snapshot:
    """A folder with nothing but the config."""
    model = family.build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return Snapshot(family.name, folder, None)


@pytest.mark.parametrize("name", SHOWN)
def test_the_blocks_are_those_that_calibration_visits(tmp_path: Path, name: str) -> None:
    inventory = take_inventory(save_config(tmp_path, BY_NAME[name]))
    assert {block.name for block in inventory.blocks} == set(BY_NAME[name].block_names)


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
