"""The hyperparameters λ, ρ and α: given by the user, or defaults of featcal's method or the paper's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from featcal_cli.data.batches import DECODER_AXIS, forward_names
from featcal_cli.recipe.schema import Calibration


@dataclass(frozen=True)
class Hyperparameters:
    """Settings of a method: λ, ρ, α, metric and order."""

    ridge: float
    """λ: weight of the anchor in every closed form."""
    rho: float
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: float
    """α: target features = α · expert + (1 − α) · calibrated."""
    metric: str = "features"
    """How errors are measured: "features" on features, as in the paper; "output" by their effect on each expert's
    outputs."""
    order: str = "block"
    """How much is solved from the same features: "block" solves a whole block, as in the paper; "module" solves the
    modules of one depth at a time, on features from the modules calibrated before."""


NUMBERS = ("ridge", "rho", "alpha")
"""Hyperparameters that a user may set instead of the method's defaults."""
PAPER = {
    "CLIP": Hyperparameters(ridge=0.05, rho=2.0, alpha=0.3),
    "FLAN-T5": Hyperparameters(ridge=1e-5, rho=2.0, alpha=0.6),
    "Llama-3.2-3B": Hyperparameters(ridge=1e-5, rho=0.5, alpha=0.15),
    "Llama-3.1-8B": Hyperparameters(ridge=3.0, rho=0.5, alpha=0.15),
}
"""The paper's hyperparameters, by the model for which the paper gives them."""
PAPER_KINDS = {"encoder": "CLIP", "encoder-decoder": "FLAN-T5", "causal": "Llama-3.2-3B"}
"""Key of PAPER whose hyperparameters the paper's method uses, by kind of model."""
FEATCAL = {
    "module": Hyperparameters(ridge=1e-4, rho=1.0, alpha=0.5, metric="output", order="module"),
    "block": Hyperparameters(ridge=1e-3, rho=1.0, alpha=0.3, metric="output", order="block"),
}
"""featcal's default hyperparameters by order: close to the best of a grid search on every model family of benchmarks/
(benchmarks/NOTES.md)."""


def choose_hyperparameters(
    calibration: Calibration, kind: str, *, has_gradients: bool = True
) -> tuple[Hyperparameters, str]:
    """Return the hyperparameters and a phrase that says where they come from: numbers from the user if given, else the
    method's own, with its metric and order. kind: a key of PAPER_KINDS. has_gradients: whether the output metric can be
    measured."""
    order = calibration.solving_order
    metric = "output" if calibration.uses_output_metric and has_gradients else "features"
    own, whose = FEATCAL[order], "featcal's defaults"
    if calibration.method == "paper":
        own, whose = PAPER[PAPER_KINDS[kind]], f"the paper's for {kind} models"
    given = {name: value for name in NUMBERS if (value := getattr(calibration, name)) is not None}
    if len(given) == len(NUMBERS):
        whose = "given"
    elif given:
        whose = f"{' and '.join(given)} given, else {whose}"
    return replace(own, metric=metric, order=order, **given), whose


def describe_settings(method: str, used: Hyperparameters, whose: str) -> str:
    """Describe what `choose_hyperparameters` returned."""
    numbers = ", ".join(f"{name} {getattr(used, name):g}" for name in NUMBERS)
    errors = "at the outputs" if used.metric == "output" else "on features"
    return f"method {method}, {numbers} ({whose}), errors measured {errors}, {used.order} by {used.order}"


def kind_of(model: PreTrainedModel) -> str:
    """Return the key of PAPER_KINDS for a model, with or without its head, according to what its blocks are. A T5
    encoder counts as an encoder-decoder, being half of one; text encoders, vision models and the encoder of a Whisper
    that classifies sounds count as encoders, like the towers of CLIP."""
    inputs = forward_names(model)
    reads_text_or_writes = "input_ids" in inputs or any(name.startswith(f"{DECODER_AXIS}_") for name in inputs)
    if model.config.is_encoder_decoder and reads_text_or_writes:
        return "encoder-decoder"
    if model.can_generate():
        return "causal"
    with suppress(Exception):  # configs of strangers may need arguments
        if type(model.config)().is_encoder_decoder and reads_text_or_writes:
            return "encoder-decoder"
    return "causal" if _is_causal(model) else "encoder"


def _is_causal(model: PreTrainedModel) -> bool:
    """Return whether a model without a generating head is a causal language model, one whose tokens attend only to
    earlier tokens."""
    text = model.config.get_text_config()
    writing = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if writing.isdisjoint({model.config.model_type, text.model_type}):
        return False
    flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    if flags:
        return any(flags)
    # attention of older code does not say it; what is also trained to fill in masks is an encoder, unless it says not
    return getattr(text, "is_decoder", False) or text.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
