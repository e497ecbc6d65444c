"""The two methods: whose numbers, which metric and order, what is checked; and results that are worse than merged."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
import yaml
from command_line import Capsys, Run, featcal_inside
from families import TASKS, Saved, save_tokenizer
from hub_server import HubServer
from outcome import weights

from featcal_cli.calibration.hyperparameters import FEATCAL, PAPER, Hyperparameters, choose_hyperparameters, kind_of
from featcal_cli.recipe.schema import Calibration
from featcal_cli.reporting.report import Report
from featcal_cli.workflows.verbs import calibrate

OPEN: dict[str, Any] = {"ridge": None, "rho": None, "alpha": None}
"""Nothing is given."""
SETTINGS = tuple(OPEN)


def chosen(settings: Mapping[str, Any]) -> dict[str, float]:
    """λ, ρ and α of a report's settings, of one of its candidates, or of a recipe."""
    return {name: settings[name] for name in SETTINGS}


def read_report(output: Path) -> Report:
    return Report.from_json((output / "featcal_report.json").read_text())


HALF: dict[str, Any] = {"ridge": 0.123, "alpha": 0.7}
AS_OURS: dict[str, Any] = {"metric": "output", "order": "module"}
ALL: dict[str, Any] = {"ridge": 0.123, "rho": 1.5, "alpha": 0.7}


@pytest.mark.parametrize(
    ("given", "kind", "expected", "whose"),
    [
        ({}, "causal", FEATCAL["module"], "featcal's defaults"),
        (HALF, "causal", replace(FEATCAL["module"], **HALF), "ridge and alpha given, else featcal's defaults"),
        (ALL, "encoder", replace(FEATCAL["module"], **ALL), "given"),
        ({"metric": "features"}, "encoder", replace(FEATCAL["module"], metric="features"), "featcal's defaults"),
        ({"order": "block"}, "encoder", FEATCAL["block"], "featcal's defaults"),
        ({"method": "paper"}, "encoder", PAPER["CLIP"], "the paper's for encoder models"),
        ({"method": "paper"}, "encoder-decoder", PAPER["FLAN-T5"], "the paper's for encoder-decoder models"),
        ({"method": "paper"}, "causal", PAPER["Llama-3.2-3B"], "the paper's for causal models"),
        ({"method": "paper", **ALL}, "causal", Hyperparameters(0.123, 1.5, 0.7), "given"),
        (
            {"method": "paper", **AS_OURS},
            "encoder",
            replace(PAPER["CLIP"], **AS_OURS),
            "the paper's for encoder models",
        ),
    ],
)
def test_given_numbers_replace_numbers(given: dict[str, Any], kind: str, expected: Hyperparameters, whose: str) -> None:
    assert choose_hyperparameters(Calibration.model_validate(given), kind) == (expected, whose)


@pytest.mark.parametrize(("method", "checks"), [("featcal", True), ("paper", False)])
def test_the_method_says_whether_updates_are_checked(bert: Saved, tmp_path: Path, method: str, checks: bool) -> None:
    """And with which metric and order; the report says all of it, and the recipe holds the numbers."""
    report = calibrate(bert.recipe(**OPEN, method=method), output=tmp_path / "out", strict=checks).report
    settings = report.settings
    assert (settings["method"], settings["guard"]) == (method, checks)
    assert (settings["metric"], settings["order"]) == (("output", "module") if checks else ("features", "block"))
    assert chosen(settings) == chosen(asdict(FEATCAL["module"] if checks else PAPER["CLIP"]))
    assert any(step is not None for block in report.blocks for step in [m.step for m in block.modules]) == checks
    assert not report.perplexity, "of no language model"
    assert any(note.startswith(f"settings: method {method}, ridge {settings['ridge']:g}") for note in report.notes)
    assert f"({settings['chosen_by']})" in (tmp_path / "out" / "README.md").read_text()
    written = yaml.safe_load((tmp_path / "out" / "featcal.yaml").read_text())["calibration"]
    assert chosen(written) == chosen(settings) and written["method"] == method
    again = calibrate(tmp_path / "out" / "featcal.yaml", output=tmp_path / "again").report
    assert weights(tmp_path / "again") == weights(tmp_path / "out")
    settings = read_report(tmp_path / "out").settings  # as JSON has them
    assert again.settings == {**settings, "chosen_by": "given", "asked": again.settings["asked"]}
    assert again.settings["asked"] == {**settings["asked"], **chosen(settings)}


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
WHISPER = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1}
HEADLESS: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaModel": (SMALL, "causal"),
    "GPT2Model": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, "causal"),
    "Qwen2ForSequenceClassification": (SMALL, "causal"),
    "T5EncoderModel": ({"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4}, "encoder-decoder"),
    "BartModel": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
    "WhisperForAudioClassification": (WHISPER, "encoder"),
    "BertModel": (SMALL, "encoder"),
    "BertGenerationEncoder": (SMALL, "encoder"),
    "CLIPTextModel": (SMALL, "encoder"),
}
"""Classes without a head that generates: what they are made of, and whose numbers the paper's method gives them."""


@pytest.mark.parametrize("name", HEADLESS)
def test_a_model_without_its_head_has_the_numbers_of_its_blocks(name: str) -> None:
    sizes, kind = HEADLESS[name]
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        assert kind_of(model_class(model_class.config_class(**sizes))) == kind


def run_job(capsys: Capsys, recipe: Mapping[str, Any], output: Path, **options: object) -> tuple[Run, str]:
    """`featcal calibrate` with a recipe; and what it said in one line."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    run = featcal_inside(capsys, "calibrate", {"-r": file, "-o": output, **options})
    return run, re.sub(r"\s+", " ", run.stderr)


def write_rows(folder: Path, *, labels: Callable[[int], int], test: bytes) -> None:
    """The words of a task as a dataset of two splits, of which one is of no use to a calibration."""
    folder.mkdir()
    ids = torch.randint(2, 98, (24, 8), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {"text": [" ".join(f"w{word}" for word in row) for row in ids], "label": [labels(n) for n in range(24)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "train.parquet")
    (folder / "test.parquet").write_bytes(test)


def test_labels_and_test_data_are_never_read_and_a_seed_gives_the_same_bytes(saved: Saved, tmp_path: Path) -> None:
    """Two runs whose data differ in nothing else."""
    save_tokenizer(saved.folder / "base")
    write_rows(tmp_path / "one", labels=lambda number: number % 2, test=b"not a parquet file")
    write_rows(tmp_path / "two", labels=lambda number: 7 - number, test=b"")
    reports = []
    for name in ("one", "two"):
        recipe: dict[str, Any] = saved.recipe(**OPEN, method="featcal")
        recipe["tasks"] = {task: recipe["tasks"][task] for task in TASKS[:1]}
        recipe["tasks"][TASKS[0]]["data"] = {"path": str(tmp_path / name), "split": "train"}
        reports.append(calibrate(recipe, output=tmp_path / f"{name}-out").report)
    one, two = ({**report.settings, "inputs": {}} for report in reports)
    assert one == two
    assert weights(tmp_path / "one-out") == weights(tmp_path / "two-out")


GROWING = {"ridge": 1e-5, "rho": 1.0, "alpha": 1.0, "method": "paper"}
"""Fits few rows to the letter, and with them nothing else."""


def test_drift_that_grew_stops_a_strict_run_before_it_pushes(
    bert: Saved, hub: HubServer, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there. Without --strict the mean, which grew too, stops the push, but not with --push-anyway."""
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    output, push = tmp_path / "out", {"--push-to": "alice/strict"}
    for _ in range(2):
        run, said = run_job(capsys, bert.recipe(**GROWING), output, **{**push, "--strict": ""})
        report = read_report(output)
        task = max(report.worse, key=lambda task: report.drift[task].after - report.drift[task].before)
        drift = report.drift[task]
        assert run.code == 3 and "Traceback" not in said
        assert said.count(f"drift grew on {task}, from {drift.before:.3f} to {drift.after:.3f}") == 1
        assert not hub.repos["model", "alice/strict"].log if ("model", "alice/strict") in hub.repos else True
    assert "nothing is computed again" in said
    assert report.settings["step"] == 1 and report.headline.startswith("WARNING: mean drift grew from")
    assert "held-out rows" in report.headline
    assert "**Warning:** mean drift grew from" in (output / "README.md").read_text()
    written = weights(output)
    run, said = run_job(capsys, bert.recipe(**GROWING), output, **push)
    assert run.code == 3 and "nothing is computed again" in said and "--push-anyway" in said
    assert ("model", "alice/strict") not in hub.repos or not hub.repos["model", "alice/strict"].log
    run, said = run_job(capsys, bert.recipe(**GROWING), output, **{**push, "--push-anyway": ""})
    assert run.code == 0 and "nothing is computed again" in said and "WARNING: mean drift grew" in run.stdout
    assert len(hub.repos["model", "alice/strict"].log) == 1 and weights(output) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.yaml"]
