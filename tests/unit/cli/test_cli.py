"""What the command line shows, and where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from command_line import featcal, featcal_inside
from families import FAMILIES, save_family
from hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.recipe.reading import collect_overrides, read_draft
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import RecipeError

VIT = next(family for family in FAMILIES if family.name == "vit")


def arguments(folder: Path) -> dict[str, object]:
    save_family(folder, VIT, examples=20)
    return {
        "merged": folder / "merged",
        "--base": folder / "base",
        "--expert": f"red={folder / 'red'}",
        "--data": f"red={folder / 'red.safetensors'}",
        "-n": 8,
        "-o": folder / "out",
    }


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", arguments(tmp_path))
    assert run.code == 0
    assert "red" in run.stdout and "calibrated" in run.stdout and str(tmp_path / "out") in run.stdout.replace("\n", "")
    assert "token weights: cls" in run.stderr and "README.md shows how" in run.stderr.replace("\n", " ")


def test_quiet_shows_the_result_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", {**arguments(tmp_path), "--seed": 1, "-q": ""})
    assert run.code == 0 and run.stderr == ""
    assert "calibrated" in run.stdout


def test_json_is_the_report_and_where_the_result_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", {**arguments(tmp_path), "--json": ""})
    assert run.code == 0 and run.stderr == ""
    printed = json.loads(run.stdout)
    assert (printed.pop("output"), printed.pop("pushed")) == (str(tmp_path / "out"), None)
    assert printed == json.loads((tmp_path / "out" / "featcal_report.json").read_text())


def test_help_and_version_do_not_load_torch() -> None:
    code = "import sys; from featcal_cli.cli.commands import app\ntry: app(['{}'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    for argument in ("--help", "--version"):
        run = subprocess.run([sys.executable, "-c", code.format(argument)], capture_output=True)
        assert run.returncode == 0, run.stderr


def test_what_looks_for_models_needs_no_torch() -> None:
    """Lineage, its errors and all that stands before them are there while torch is yet on its way."""
    heavy = ("torch", "transformers", "datasets", "pyarrow", "matplotlib", "pandas", "PIL")
    light = (
        "cli.commands",
        "cli.console",
        "cli.drift_view",
        "cli.main",
        "cli.result_view",
        "recipe.shipped",
        "reporting.verdict",
        "runtime.logfile",
        "runtime.process",
        "workflows.evaluate",
        "workflows.inspect_drift",
        "workflows.verbs",
    )
    code = "import sys\n" + "".join(f"import featcal_cli.{name}\n" for name in light)
    code += f"assert not [name for name in {heavy} if name in sys.modules], list(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", ["calibrate", "inspect-drift", "evaluate", "modules"])
def test_an_error_in_lineage_is_said_without_torch(command: str, tmp_path: Path, hub: HubServer) -> None:
    """With a torch that cannot be imported, which would be said if anybody waited for it."""
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("import time\ntime.sleep(100)")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("A model")
    hub.add_repo("silent/model", tmp_path / "model")
    began = time.monotonic()
    run = featcal(command, "silent/model", folder=tmp_path, PYTHONPATH=str(tmp_path / "broken"))
    assert run.returncode == 2 and run.stderr.count("error:") == 1 and "silent/model" in run.stderr
    assert time.monotonic() - began < 60  # and not the 100 seconds of that torch


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: no such file')")
    (tmp_path / "red").mkdir()
    options = ["--base", "red", "--expert", "red=red", "--data", "red=red"]
    run = featcal("calibrate", "red", *options, folder=tmp_path, PYTHONPATH=str(tmp_path / "broken"))
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert "libtorch_cpu.so: no such file" in run.stderr and "install it again" in run.stderr.replace("\n", " ")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "broken", tmp_path / "red"]


def test_commands_are_listed(tmp_path: Path) -> None:
    run = featcal("--help", folder=tmp_path)
    assert run.returncode == 0
    assert "calibrate" in run.stdout and "demo" in run.stdout


def test_nothing_is_wider_than_the_terminal(tmp_path: Path) -> None:
    options = [
        part for name, value in arguments(tmp_path).items() for part in ([name] if name[0] == "-" else []) + [value]
    ]
    run = featcal("calibrate", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    table = [line for line in run.stdout.splitlines() if "out" not in line]
    assert max(map(len, table)) <= 80


def test_hub_repos_are_pinned_to_their_commits(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    for name in ("merged", "base", "red"):
        hub.add_repo(f"pinned/{name}", tmp_path / name)
    run = featcal_inside(
        capsys, "calibrate", {**given, "merged": "pinned/merged", "--base": "pinned/base", "--expert": "red=pinned/red"}
    )
    assert run.code == 0, run.stderr
    recipe = yaml.safe_load((tmp_path / "out" / "featcal.yaml").read_text())
    for place in (recipe["merged"], recipe["base"], recipe["tasks"]["red"]["expert"]):
        assert re.fullmatch(r"pinned/\w+@[0-9a-f]{40}", place)
    again = featcal_inside(
        capsys, "calibrate", {"-r": tmp_path / "out" / "featcal.yaml", "-o": tmp_path / "again", "-q": ""}
    )
    assert again.code == 0, again.stderr
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert one == two


def test_the_default_output_is_named_after_the_merged_model(tmp_path: Path) -> None:
    options = [
        str(part)
        for name, value in arguments(tmp_path).items()
        if name[0] == "-" and name != "-o"
        for part in (name, value)
    ]
    run = featcal("calibrate", tmp_path / "merged", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "merged-featcal" / "model.safetensors").is_file()


def test_pickled_weights_are_read_only_when_asked(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    weights = tmp_path / "red" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "red" / "pytorch_model.bin")
    expected = featcal_inside(capsys, "calibrate", {**given, "-o": tmp_path / "expected"})
    weights.unlink()
    hub.add_repo("pickled/red", tmp_path / "red")
    refused = featcal_inside(capsys, "calibrate", {**given, "--expert": "red=pickled/red"})
    assert (expected.code, refused.code) == (0, 2)
    allowed = featcal_inside(capsys, "calibrate", {**given, "--expert": "red=pickled/red", "--allow-pickle": ""})
    assert allowed.code == 0, allowed.stderr
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("expected", "out"))
    assert one == two


def test_relative_paths_work_and_run_again_from_anywhere(tmp_path: Path) -> None:
    save_family(tmp_path, VIT, examples=20)
    options = ["--base", "base", "--expert", "red=red", "--data", "red=red.safetensors", "-n", "8", "-o", "out"]
    run = featcal("calibrate", "merged", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    (tmp_path / "elsewhere").mkdir()
    again = featcal("calibrate", "-r", tmp_path / "out" / "featcal.yaml", "-o", "again", folder=tmp_path / "elsewhere")
    assert again.returncode == 0, again.stderr
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "elsewhere/again"))
    assert one == two


def test_a_relative_folder_of_images_can_be_read(tmp_path: Path) -> None:
    save_family(tmp_path, VIT, examples=20)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    (tmp_path / "photos").mkdir()
    for number in range(12):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    options = ["--base", "base", "--expert", "red=red", "--data", "red=photos", "-n", "4"]
    run = featcal("calibrate", "merged", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_merged_model_named_by_a_dot_gives_its_folders_name(tmp_path: Path) -> None:
    save_family(tmp_path, VIT, examples=20)
    options = ["--base", "../base", "--expert", "red=../red", "--data", "red=../red.safetensors", "-n", "8"]
    run = featcal("calibrate", ".", *options, "-o", "../out", folder=tmp_path / "merged")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_saved_dry_run_is_the_job(tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path)
    for name in ("merged", "base", "red"):
        hub.add_repo(f"saved/{name}", tmp_path / name)
    given |= {"merged": "saved/merged", "--base": "saved/base", "--expert": "red=saved/red"}
    job = tmp_path / "job.yaml"
    saving = {**given, "--dry-run": "", "--save": job, "--json": ""}
    run = featcal_inside(capsys, "calibrate", saving)
    assert run.code == 0, run.stderr
    recipe, text = json.loads(run.stdout)["recipe"], job.read_text()
    saved = yaml.safe_load(text)
    assert all(saved[key] == recipe[key] for key in ("merged", "base", "calibration")) and "output" not in saved
    assert re.search(r"merged: saved/merged@[0-9a-f]{40}\n", text) and "#   base: the command line" in text
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert not any(str(tmp_path) in line for line in comments) and "saved/merged" in comments[0]
    assert list(tmp_path.glob(".job*")) == []
    again = featcal_inside(capsys, "calibrate", saving)
    assert again.code == 2 and "--overwrite" in again.stderr and again.stdout == "" and job.read_text() == text
    for options, out in (({**given}, "direct"), ({"-r": job}, "saved")):
        done = featcal_inside(capsys, "calibrate", {**options, "-o": tmp_path / out, "-q": ""})
        assert done.code == 0, done.stderr
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("direct", "saved"))
    assert one == two
    made = (tmp_path / "saved" / "featcal.yaml").read_text()
    assert made.startswith("# Written by featcal ") and str(tmp_path) not in made.partition("\nmerged:")[0]


def test_columns_and_splits_are_set_on_the_command_line(tmp_path: Path, hub: HubServer) -> None:
    """Beside --data, over a recipe's data, and of data that is found."""
    beside = collect_overrides(merged="a/m", data=["red=x/y"], columns=["red=text:a, label:b,c"])
    assert read_draft(None, beside).tasks["red"].data == Data(dataset="x/y", columns={"text": "a", "label": "b,c"})
    file = tmp_path / "r.yaml"
    file.write_text("merged: a/m\ntasks: {red: {data: {dataset: x/y, config: z, split: train, columns: {text: a}}}}")
    over = collect_overrides(columns=["red=label:b"], split=["red=test"])
    columns = {"text": "a", "label": "b"}
    wanted = Data(dataset="x/y", config="z", split="test", columns=columns)
    assert read_draft(file, over).tasks["red"].data == wanted
    cards = {"m": "base_model: [found/red, found/green]", "red": "base_model: found/base\ndatasets: [found/data]"}
    cards["green"], cards["base"] = cards["red"], "license: mit"
    for name, card in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\n{card}\n---\n")
        (tmp_path / name / "config.json").write_text("{}")
        hub.add_repo(f"found/{name}", tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    hub.add_repo("found/data", tmp_path / "data", kind="dataset")
    over = collect_overrides(merged="found/m", columns=["red=text:a"], split=["green=test"])
    found = find_lineage(read_draft(None, over)).recipe.tasks
    assert found["red"].data == Data(dataset="found/data", columns={"text": "a"})
    assert found["green"].data == Data(dataset="found/data", split="test")


def test_options_are_named_as_they_were_typed_and_keys_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("merged: a/m\ncalibration: {alpha: 2}")
    with pytest.raises(RecipeError, match=r"calibration\.alpha: input should be") as written:
        read_draft(file, {})
    assert written.value.where == str(file)
    with pytest.raises(RecipeError, match=r"--alpha: input should be") as typed:
        read_draft(file, collect_overrides(alpha=3.0))
    assert typed.value.where == "the command line" and typed.value.fix == "change --alpha"
