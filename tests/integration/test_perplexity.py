"""Perplexities of language models after a calibration, against transformers' own losses: whole runs, tiny models.

Each case needs a whole calibration, since the calibrated model is measured as it is written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME, Family, Saved, save_family, text
from family import GROUPED_SIZES

from featcal_cli.data.batches import Batch
from featcal_cli.engine.job import Job
from featcal_cli.evaluation.results import average_tasks
from featcal_cli.reporting.verdict import write_verdict
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows import perplexity
from featcal_cli.workflows.evaluate import evaluate
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

LLAMA = {**GROUPED_SIZES, "tie_word_embeddings": False}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Batch]]:
    """The held-out texts of each task, once a run has measured them."""
    texts: dict[str, list[Batch]] = {}
    whole = perplexity.measure_perplexity

    def watch(job: Job, *args: Any) -> Any:
        texts.update({task: list(batches) for task, batches in job.drift.batches.items()})
        return whole(job, *args)

    monkeypatch.setattr(perplexity, "measure_perplexity", watch)
    return texts


def perplexity_of(folder: Path, model: str, batches: list[Batch]) -> float:
    """By transformers' own loss of each text, which stands alone and without padding."""
    module, nats, tokens = getattr(transformers, model).from_pretrained(folder), 0.0, 0
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            alone = ids[mask.bool()][None]
            with torch.inference_mode():
                nats += float(module(input_ids=alone, labels=alone).loss) * (alone.shape[1] - 1)
            tokens += alone.shape[1] - 1
    return math.exp(nats / tokens)


def run(saved: Saved, **calibration: Any) -> tuple[Path, Any]:
    out = saved.folder / "out"
    settings = {"method": "featcal", "ridge": None, "rho": None, "alpha": None, "examples": 24, **calibration}
    calibrate(saved.recipe(**settings), output=out)
    return out, json.loads((out / "featcal_report.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("LlamaForCausalLM", LLAMA, {}),
        pytest.param(
            "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"refine": True}, marks=pytest.mark.matrix
        ),
        # so bold that all updates are reduced or undone
        pytest.param(
            "LlamaForCausalLM", LLAMA, {"alpha": 1.0, "ridge": 1e-6, "examples": 16}, marks=pytest.mark.matrix
        ),
        ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}, {"method": "paper"}),
    ],
)
def test_perplexities_are_those_that_transformers_gives(
    tmp_path: Path, measured: dict[str, list[Batch]], model: str, config: Any, settings: Any
) -> None:
    saved = save_family(tmp_path, Family("case", model, config, text, ""), examples=40)
    out, report = run(saved, **settings)
    assert measured.keys() == report["perplexity"].keys() == saved.inputs.keys()
    for task, scored in report["perplexity"].items():
        folders = {
            "expert": tmp_path / task,
            "merged": tmp_path / "merged",
            "calibrated": out,
            "base": tmp_path / "base",
        }
        assert list(scored["scores"]) == list(folders) and scored["metric"] == "perplexity"
        for role, folder in folders.items():
            wanted = perplexity_of(folder, model, measured[task])
            assert scored["scores"][role]["value"] == pytest.approx(wanted, rel=1e-4), role
    assert "## Perplexity" in (out / "README.md").read_text("utf-8")


def test_inspect_drift_tells_them(tmp_path: Path, measured: dict[str, list[Batch]]) -> None:
    saved = save_family(tmp_path, BY_NAME["llama"], examples=40)
    inspection = inspect_drift(saved.recipe(examples=8))
    assert measured.keys() == inspection.perplexity.keys() == saved.inputs.keys()
    for task, scored in inspection.perplexity.items():
        folders = {"expert": tmp_path / task, "model": tmp_path / "merged", "base": tmp_path / "base"}
        for role, folder in folders.items():
            wanted = perplexity_of(folder, saved.family.model, measured[task])
            assert scored.scores[role].value == pytest.approx(wanted, rel=1e-4)
    sentences = [text for _, text in write_verdict(inspection, {"model": "it"}, str)]
    means = {role: f"{score.value:.2f}" for role, score in average_tasks(inspection.perplexity).items()}
    roles = f"{means['model']} of it and {means['base']} of the base model; {means['expert']} of the experts"
    assert f"Mean perplexity: {roles}." in sentences
