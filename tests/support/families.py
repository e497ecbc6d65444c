"""Tiny random families (merged, base, experts) of many architectures, and model-ready inputs that exercise them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families_language import VISION_LANGUAGE
from families_text import CAUSAL, ENCODER_DECODERS, ENCODERS, MIXTURES, SOUND
from families_vision import PAIRS, VISION
from family import VOCABULARY, WIDTH, Family, images, text
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from vocabularies import word_tokenizer

__all__ = [
    "BY_NAME", "FAMILIES", "SPREAD", "VOCABULARY", "WIDTH", "Family", "Saved", "build_lively", "changed_tensors",
    "few_of", "images", "save_family", "save_tokenizer", "shake", "text",
]  # fmt: skip

TASKS = ("red", "green", "blue")
FAMILIES = [*VISION, *ENCODERS, *CAUSAL, *MIXTURES, *ENCODER_DECODERS, *SOUND, *PAIRS, *VISION_LANGUAGE]
BY_NAME = {family.name: family for family in FAMILIES}
SPREAD = {
    "bert", "albert", "fnet", "gpt2", "llama", "mixtral", "t5", "clip", "vit", "swin", "wav2vec2", "llava",
}  # fmt: skip
"""Those that the default run tests: as different as twelve can be."""


def few_of(names: Iterable[str], default: Collection[str]) -> list[Any]:
    """Parameters of a test: by default these few alone, the others with -m matrix."""
    return [pytest.param(name, marks=[] if name in default else pytest.mark.matrix) for name in names]


@contextmanager
def changed_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of the model in a folder, which are written back as they are at the end."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Saved:
    """A family on disk: a folder for each model, a .safetensors file of inputs for each task."""

    folder: Path
    family: Family
    inputs: dict[str, dict[str, Tensor]]

    def only(self, count: int) -> Saved:
        """The job of the first so many tasks: where tasks are alike, fewer show the same sooner."""
        for task in list(self.inputs)[count:]:
            del self.inputs[task]
        return self

    def recipe(self, **calibration: object) -> dict[str, object]:
        """The job as recipe keys: by the paper's method, unless λ, ρ or α is left open by None."""
        is_open = any(calibration.get(name, "") is None for name in ("ridge", "rho", "alpha"))
        method = "featcal" if is_open else "paper"
        return {
            "merged": str(self.folder / "merged"),
            "base": str(self.folder / "base"),
            "tasks": {
                task: {"expert": str(self.folder / task), "data": str(self.folder / f"{task}.safetensors")}
                for task in self.inputs
            },
            "calibration": {"method": method, "ridge": 0.05, "rho": 2.0, "alpha": 0.3, "examples": 12, **calibration},
        }

    def arguments(self) -> dict[str, object]:
        """The job but for merged, as it is typed."""
        experts = [f"{task}={self.folder / task}" for task in self.inputs]
        data = [f"{expert}.safetensors" for expert in experts]
        return {"--base": self.folder / "base", "--expert": experts, "--data": data, "--device": "cpu"}


_KEPT = tempfile.TemporaryDirectory(prefix="featcal-families-")
_MADE: dict[str, tuple[Saved, Tensor]] = {}
"""What was saved before in this process, with the state of the random numbers after that."""


def save_family(
    folder: Path, family: Family, *, examples: int = 20, spread: float = 0.3, dtype: torch.dtype = torch.float32
) -> Saved:
    """Save base, merged and an expert per task: experts differ from base by `spread` of each tensor's own size.

    Each is made once in a process, and copied from then on.
    """
    key = f"{family.name} {family.model} {family.config} {family.inputs} {examples} {spread} {dtype}"
    if key not in _MADE:
        made = _make_family(Path(_KEPT.name) / str(len(_MADE)), family, examples, spread, dtype)
        _MADE[key] = made, torch.get_rng_state()
    made, state = _MADE[key]
    torch.set_rng_state(state)
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    inputs = {task: {name: value.clone() for name, value in given.items()} for task, given in made.inputs.items()}
    return Saved(folder, family, inputs)


def _make_family(folder: Path, family: Family, examples: int, spread: float, dtype: torch.dtype) -> Saved:
    torch.manual_seed(0)
    model = build_lively(family).to(dtype)
    model.save_pretrained(folder / "base")
    start = [parameter.detach().clone() for parameter in model.parameters()]
    mean = [torch.zeros_like(value) for value in start]
    inputs = {}
    for task in TASKS:
        _load(model, start)
        shake(model, spread)
        model.save_pretrained(folder / task)
        for total, now, then in zip(mean, model.parameters(), start, strict=True):
            total += (now.detach() - then) / len(TASKS)
        layout = torch.contiguous_format
        given = {name: value.clone(memory_format=layout) for name, value in family.inputs(examples).items()}
        save_file(given, folder / f"{task}.safetensors")
        inputs[task] = behind_the_text(given)
    _load(model, [then + total for then, total in zip(start, mean, strict=True)])
    model.save_pretrained(folder / "merged")
    return Saved(folder, family, inputs)


def behind_the_text(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Texts that are padded on the left, with their padding on the right: what each text is to a model alone."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or bool(mask[:, 0].all()):
        return inputs
    starts = mask.argmax(1).tolist()
    rolled = {name: inputs[name] for name in inputs if inputs[name].shape[:2] == mask.shape}
    for name, value in rolled.items():
        rolled[name] = torch.stack([row.roll(-start, 0) for row, start in zip(value, starts, strict=True)])
    return {**inputs, **rolled}


def build_lively(family: Family) -> PreTrainedModel:
    """The family's model, away from the zeros, ones and near-zeros of a fresh one: biases, norms, positions and
    attention must matter."""
    model = family.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            least = 0.15 if parameter.ndim > 1 else 0.05
            if parameter.requires_grad and 0 < (size := _spread(parameter)) < least:
                parameter *= least / size
    shake(model, 0.5)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words w0, w1, … whose ids fit the families' vocabulary."""
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(2, VOCABULARY))]
    word_tokenizer(words, "[UNK]", pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def _load(model: PreTrainedModel, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.clone()


def shake(model: PreTrainedModel, spread: float) -> None:
    """Move every parameter by noise of `spread` times its own size."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # else a table of sines: models make it anew when they are loaded
                size = _spread(parameter) if parameter.numel() > 1 else abs(float(parameter))
                parameter += (spread * (size or 0.1) * torch.randn(parameter.shape)).to(parameter.dtype)


def _spread(parameter: Tensor) -> float:
    """Standard deviation, exactly 0 for a constant."""
    constant = parameter.numel() == 1 or parameter.amax() == parameter.amin()
    return 0.0 if constant else float(parameter.float().std())
