"""featcal modules: what would be calibrated, from the config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import featcal_inside
from families import BY_NAME, Family, few_of, save_family
from family_checks import calibrated_share
from hub_server import HubServer

from featcal_cli.hub.snapshot import Snapshot, resolve_config
from featcal_cli.models.inventory import take_inventory
from featcal_cli.workflows.verbs import calibrate

SHOWN = ["clip-vision", "clip", "bert", "gpt2", "llama", "t5", "bart", "whisper", "mixtral", "llava"]


def save_config(folder: Path, family: Family) -> Snapshot:
    """A folder with nothing but the config."""
    model = family.build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return Snapshot(family.name, folder, None)


@pytest.mark.parametrize("name", SHOWN)
def test_the_blocks_are_those_that_calibration_visits(tmp_path: Path, name: str) -> None:
    inventory = take_inventory(save_config(tmp_path, BY_NAME[name]), "auto")
    assert {block.name for block in inventory.blocks} == set(BY_NAME[name].block_names)


NAMES = ["clip-vision", "bert", "llama", "t5", "mixtral", "xlnet", "jamba"]


@pytest.mark.parametrize("name", few_of(NAMES, ("mixtral",)))
def test_the_modules_are_those_that_calibration_reports(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    result = calibrate(saved.recipe(), output=tmp_path / "out", batch_size=5)
    inventory = take_inventory(resolve_config(str(tmp_path / "merged")), "auto")
    calibrated = {(block.name, module.name) for block in result.report.blocks for module in block.modules}
    listed = {(block.name, module.name) for block in inventory.blocks for module in block.modules}
    assert calibrated == listed or name in NAMES[4:]  # all matrices of a parameter are listed as one
    assert inventory.share == pytest.approx(calibrated_share(result), abs=0.04 if name in NAMES[4:] else 1e-6)


def test_no_weights_are_downloaded(tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    save_family(tmp_path, BY_NAME["bert"])
    hub.add_repo("inventory/bert", tmp_path / "merged")
    run = featcal_inside(capsys, "modules", {"model": "inventory/bert", "--json": ""})
    assert run.code == 0, run.stderr
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
