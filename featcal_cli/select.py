"""Which λ, ρ and α a run uses: what the user said, else the paper's settings for the kind of model."""

from __future__ import annotations

from transformers import PreTrainedModel

from featcal_cli.recipe import Calibration
from featcal_cli.solver import Settings

PRESETS = {
    "encoder": Settings(ridge=0.05, rho=2.0, alpha=0.3),
    "encoder-decoder": Settings(ridge=1e-5, rho=2.0, alpha=0.6),
    "causal": Settings(ridge=1e-5, rho=0.5, alpha=0.15),
}
"""The paper's settings: of CLIP for encoders, FLAN-T5 for encoder-decoders, Llama-3.2-3B for causal language models."""


def choose_settings(calibration: Calibration, model: PreTrainedModel) -> tuple[Settings, str]:
    """The settings of a run, and in words who chose them."""
    kind = _kind_of(model)
    preset = PRESETS[kind]
    given = {name: getattr(calibration, name) for name in ("ridge", "rho", "alpha")}
    chosen = {name: value for name, value in given.items() if value is not None}
    values = {name: chosen.get(name, getattr(preset, name)) for name in given}
    by_preset = f"the paper's preset for {kind} models"
    if not chosen:
        return preset, by_preset
    chosen_by = "the user" if len(chosen) == len(given) else f"the user ({', '.join(chosen)}), else {by_preset}"
    return Settings(**values), chosen_by


def _kind_of(model: PreTrainedModel) -> str:
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    return "causal" if model.can_generate() else "encoder"
