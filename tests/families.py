"""Tiny random families (merged, base, experts) of many architectures, and model-ready inputs that exercise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

TASKS = ("red", "green", "blue")
WIDTH, LAYERS, VOCABULARY, TOKENS = 32, 2, 99, 9


@dataclass(frozen=True)
class Family:
    """One architecture at toy size."""

    name: str
    build: Callable[[], PreTrainedModel]
    inputs: Callable[[int], dict[str, Tensor]]
    """Model-ready inputs of that many examples."""
    blocks: str
    """Path of the blocks in the loaded model, with {} for the number."""
    cls: bool = False
    """Its output is read from the first token."""

    @property
    def block_names(self) -> list[str]:
        return [self.blocks.format(number) for number in range(LAYERS)]


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32)}


def text(count: int) -> dict[str, Tensor]:
    """Token ids of different lengths, padded on the right."""
    lengths = torch.randint(3, TOKENS + 1, (count,))
    lengths[0] = TOKENS
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return {"input_ids": torch.randint(3, VOCABULARY, (count, TOKENS)) * mask, "attention_mask": mask}


_VISION = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_TEXT = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = [
    Family(
        "clip-vision", lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**_VISION)), images, "encoder.layers.{}", True
    ),
    Family("vit", lambda: tf.ViTModel(tf.ViTConfig(**_VISION)), images, "layers.{}", True),
    Family("dinov2", lambda: tf.Dinov2Model(tf.Dinov2Config(**_VISION, mlp_ratio=2)), images, "encoder.layer.{}", True),
    Family("bert", lambda: tf.BertModel(tf.BertConfig(**_TEXT)), text, "encoder.layer.{}"),
    Family("roberta", lambda: tf.RobertaModel(tf.RobertaConfig(**_TEXT)), text, "encoder.layer.{}"),
    Family(
        "gpt2",
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY)),
        text,
        "transformer.h.{}",
    ),
    Family("llama", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)), text, "model.layers.{}"),
    Family("qwen2", lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)), text, "model.layers.{}"),
    Family("qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED)), text, "model.layers.{}"),
    Family("mistral", lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED)), text, "model.layers.{}"),
]


@dataclass(frozen=True)
class Saved:
    """A family on disk: a folder for each model, a .safetensors file of inputs for each task."""

    folder: Path
    family: Family
    inputs: dict[str, dict[str, Tensor]]

    def recipe(self, **calibration: object) -> dict[str, object]:
        """The job as recipe keys."""
        return {
            "merged": str(self.folder / "merged"),
            "base": str(self.folder / "base"),
            "tasks": {
                task: {"expert": str(self.folder / task), "data": str(self.folder / f"{task}.safetensors")}
                for task in self.inputs
            },
            "calibration": {"ridge": 0.05, "rho": 2.0, "alpha": 0.3, "examples": 12, **calibration},
        }


def save_family(
    folder: Path, family: Family, *, examples: int = 20, spread: float = 0.3, dtype: torch.dtype = torch.float32
) -> Saved:
    """Save base, merged and an expert per task: experts differ from base by `spread` of each tensor's own size."""
    torch.manual_seed(0)
    base = family.build().to(dtype).eval()
    _shake(base, 0.5)  # away from the zeros and ones of a fresh model: biases and norms must matter
    base.save_pretrained(folder / "base")
    start = {name: value.clone() for name, value in base.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in start.items() if value.is_floating_point()}
    inputs = {}
    for task in TASKS:
        base.load_state_dict(start)
        _shake(base, spread)
        base.save_pretrained(folder / task)
        for name in mean:
            mean[name] += (base.state_dict()[name] - start[name]) / len(TASKS)
        inputs[task] = family.inputs(examples)
        save_file(inputs[task], folder / f"{task}.safetensors")
    base.load_state_dict({**start, **{name: start[name] + vector for name, vector in mean.items()}})
    base.save_pretrained(folder / "merged")
    return Saved(folder, family, inputs)


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words w0, w1, … whose ids fit the families' vocabulary."""
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def _shake(model: PreTrainedModel, spread: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.float().std() if parameter.numel() > 1 else parameter.float().abs()
            scale = size if size > 0 else torch.tensor(0.1)
            parameter += (spread * scale * torch.randn(parameter.shape)).to(parameter.dtype)
