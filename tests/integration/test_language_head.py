"""The head of a language model, or the norm before it, is fitted to what the experts predict: whole runs, tiny models.

Each case needs a whole calibration, since the head is fitted to the features of all calibrated blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import Family, Saved, few_of, save_family, text
from family import GROUPED_SIZES, T5_SIZES, text_to_text
from safetensors.torch import load_file

from featcal_cli.workflows.verbs import calibrate

GEMMA = {**GROUPED_SIZES, "head_dim": 8}
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "granite": (
        "GraniteForCausalLM",
        {**GROUPED_SIZES, "tie_word_embeddings": False, "logits_scaling": 4.0},
        text,
        "lm_head",
    ),
    "llama": ("LlamaForCausalLM", {**GROUPED_SIZES, "tie_word_embeddings": False}, text, "lm_head"),
    "tied llama": ("LlamaForCausalLM", {**GROUPED_SIZES, "tie_word_embeddings": True}, text, "model.norm"),
    "gemma": ("GemmaForCausalLM", GEMMA, text, "model.norm"),
    "t5": ("T5ForConditionalGeneration", T5_SIZES, text_to_text, "decoder.final_layer_norm"),
}


def save(folder: Path, name: str) -> Saved:
    """Save a case with 40 examples a task, some of which are held out."""
    model, config, inputs, _ = CASES[name]
    return save_family(folder, Family(name, model, config, inputs, ""), examples=40)


def run(saved: Saved, name: str, **calibration: object) -> tuple[dict[str, torch.Tensor], Any]:
    """Calibrate with featcal's method; return the tensors that were written, and the report."""
    out = saved.folder / name
    calibrate(saved.recipe(method="featcal", ridge=None, rho=None, alpha=None, examples=24, **calibration), output=out)
    return load_file(out / "model.safetensors"), json.loads((out / "featcal_report.json").read_text("utf-8"))


def divergence(saved: Saved, folder: Path) -> float:
    """The mean KL divergence of a model's predictions from the experts', at tokens that are not padding."""
    load = getattr(transformers, saved.family.model).from_pretrained
    model, total = load(folder), 0.0
    for task, inputs in saved.inputs.items():
        mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
        with torch.inference_mode():
            expert, own = (
                each(**inputs).logits.double().log_softmax(-1) for each in (load(saved.folder / task), model)
            )
        if mask.shape != own.shape[:2]:
            mask = torch.ones(own.shape[:2], dtype=torch.bool)
        total += float((expert.exp() * (expert - own)).sum(-1)[mask].mean()) / len(saved.inputs)
    return total


@pytest.mark.parametrize("name", few_of(CASES, ("llama", "t5")))
def test_predictions_come_closer_and_nothing_else_changes(tmp_path: Path, name: str) -> None:
    saved, changed = save(tmp_path, name), CASES[name][-1]
    fitted, report = run(saved, "fitted")
    plain, without = run(saved, "plain", head=False)
    last = report["blocks"][-1]
    assert last["name"] == changed and not last["skipped"]
    before, after = last["divergence"]
    assert after < before
    assert any(changed in note for note in report["notes"]) == (report["settings"]["step"] == 1)
    assert report["settings"]["head"] and not without["settings"]["head"]
    assert {path for path in plain if not torch.equal(plain[path], fitted[path])} == {f"{changed}.weight"}
    assert bool(report["perplexity"]) == (name != "t5")
    assert divergence(saved, tmp_path / "fitted") < divergence(saved, tmp_path / "plain")
    assert "blocks and the head, " in (tmp_path / "fitted" / "README.md").read_text("utf-8")


def test_logits_that_change_after_the_head_are_left(tmp_path: Path) -> None:
    """Where a model bends its logits, the head's own are no predictions."""
    config = {**GEMMA, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    saved = save_family(tmp_path, Family("soft", "Gemma2ForCausalLM", config, text, ""), examples=40)
    fitted, report = run(saved, "fitted")
    reason = "the model changes what its last norm or its head returns"
    assert report["blocks"][-1]["skipped"] == [{"name": "model.norm", "reason": reason}]
    assert "In 2 blocks, " in (tmp_path / "fitted" / "README.md").read_text("utf-8")
    assert torch.equal(
        fitted["model.norm.weight"], load_file(tmp_path / "merged" / "model.safetensors")["model.norm.weight"]
    )


def test_a_run_that_was_interrupted_takes_the_head_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, "llama")
    whole, _ = run(saved, "whole")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("featcal_cli.workflows.calibrate.shrink_updates", stop)
        run(saved, "again")
    with monkeypatch.context() as patch:
        patch.setattr("featcal_cli.calibration.algorithm.calibrate_head", stop)
        again, report = run(saved, "again")
    assert all(torch.equal(again[path], value) for path, value in whole.items())
    assert any("blocks were taken over" in note for note in report["notes"])
