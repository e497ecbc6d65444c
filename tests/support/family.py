"""What a tiny family is: a model class at toy size, inputs that exercise it, and what a calibration must make of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

WIDTH, LAYERS, VOCABULARY, TOKENS, PROMPT = 32, 2, 99, 9, 7
IMAGE_TOKEN = VOCABULARY - 1

VISION_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8}  # fmt: skip
TEXT_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED_SIZES = {**TEXT_SIZES, "num_key_value_heads": 2}
"""With fewer key and value heads than query heads."""
BART_SIZES = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": 2}  # fmt: skip
T5_SIZES = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16}  # fmt: skip

Batch = dict[str, Tensor]
MaskRule = Callable[[str, int, Batch], Tensor | None]
"""(path of a module, number of its call in one forward, inputs) → [B, S], 1 where a token's row counts and 0 where it
is padding; None where every row counts."""


def padding(_path: str, _call: int, batch: Batch) -> Tensor | None:
    """Every module sees the tokens of `attention_mask`."""
    return batch.get("attention_mask")


@dataclass(frozen=True)
class Family:
    """One architecture at toy size."""

    name: str
    model: str
    """A class of transformers."""
    config: Mapping[str, Any]
    """What the class's config is made of."""
    inputs: Callable[[int], Batch]
    """Model-ready inputs of that many examples."""
    blocks: str
    """Paths of the blocks in the loaded model, in execution order; {a,b} is both, {} is {0,1}."""
    cls: str = ""
    """The last block of the vision tower, where its pooled output reads the first token alone."""
    mask: MaskRule = padding
    alone: bool = False
    """Whether padding stands among the rows, or changes them: examples then run without it, one by one in the oracle,
    and every row counts."""
    stays: str = r"(?!)"
    """Pattern of the paths of modules that run and yet stay as merged."""
    distances: str = r"(?!)"
    """Pattern of the paths of modules that read a table of the distances between tokens."""
    functional: str = r"(?!)"
    """Pattern of the paths of parameters that functions multiply with; a bias beside one is named `_bias`."""

    def __post_init__(self) -> None:
        if self.alone:
            object.__setattr__(self, "mask", lambda *_: None)

    def build(self) -> PreTrainedModel:
        """A fresh model."""
        model_class: Any = getattr(transformers, self.model)
        model: PreTrainedModel = model_class(model_class.config_class(**self.config))
        return model

    @property
    def block_names(self) -> list[str]:
        return [name for pattern in self.blocks.split() for name in _unfold(pattern)]


def alike(names: str, *shape: Any) -> list[Family]:
    """Architectures that differ in name and class alone: `name Class, name Class, …`."""
    pairs = (pair.split() for pair in names.split(", "))
    return [Family(name, model, *shape) for name, model in pairs]


def _unfold(pattern: str) -> list[str]:
    if not (choice := re.search(r"\{(.*?)\}", pattern)):
        return [pattern]
    head, tail = pattern[: choice.start()], pattern[choice.end() :]
    return [name for part in (choice[1] or "0,1").split(",") for name in _unfold(head + part + tail)]


# Inputs. Lengths differ between the examples of a batch; the first example has the full length.


def text(count: int, tokens: int = TOKENS) -> Batch:
    """Token ids padded on the right."""
    mask = _prefixes(count, tokens, 3)
    return {"input_ids": torch.randint(3, IMAGE_TOKEN - 3, (count, tokens)) * mask, "attention_mask": mask}


def left_text(count: int) -> Batch:
    """Token ids padded on the left."""
    return {name: value.flip(1) for name, value in text(count).items()}


def prompt(count: int) -> Batch:
    """Decoder token ids of lengths of their own, fewer than the encoder's."""
    return {f"decoder_{name}": value for name, value in text(count, PROMPT).items()}


def text_to_text(count: int) -> Batch:
    return {**text(count), **prompt(count)}


def images(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 32, 32)}


def videos(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 4, 3, 32, 32)}


def pairs(count: int) -> Batch:
    return {**images(count), **text(count)}


def boxes(count: int) -> Batch:
    """Where the words stand on a page."""
    return {"bbox": torch.randint(0, 30, (count, TOKENS, 4)).sort(-1).values}


def images_in_text(image_tokens: int) -> Callable[[int], Batch]:
    """An image's tokens, then text of different lengths."""

    def build(count: int) -> Batch:
        words = text(count)
        places = torch.full((count, image_tokens), IMAGE_TOKEN)
        ids, mask = torch.cat([places, words["input_ids"]], 1), torch.ones_like(places)
        return {**images(count), "input_ids": ids, "attention_mask": torch.cat([mask, words["attention_mask"]], 1)}

    return build


def audio(count: int, samples: int = 400) -> Batch:
    """Sound waves of different lengths, silent after their end."""
    mask = _prefixes(count, samples, 150)
    return {"input_values": torch.randn(count, samples) * mask, "attention_mask": mask}


def spectrograms(count: int, frames: int = 20, bins: int = 16) -> Batch:
    """Frames of different numbers, zero after the end."""
    mask = _prefixes(count, frames, 8)
    return {"input_features": torch.randn(count, frames, bins) * mask[..., None], "attention_mask": mask}


def _prefixes(count: int, size: int, shortest: int) -> Tensor:
    lengths = torch.randint(shortest, size + 1, (count,))
    lengths[0] = size
    return (torch.arange(size) < lengths[:, None]).long()


CROSS = re.compile(
    r"(encoder_attn|EncDecAttention|cross_attn|crossattention|cross_attention|encoder_decoder_attention)\b.*"
    r"\.(k|v|k_proj|v_proj|k_norm|key|value)$"
)


def encoder_decoder(path: str, _call: int, batch: Batch) -> Tensor | None:
    """The decoder's own tokens, but the encoder's for the keys and values of cross-attention."""
    in_decoder = "decoder" in path.split(".") and not CROSS.search(path)
    return batch.get("decoder_attention_mask" if in_decoder else "attention_mask")


def padding_in(part: str) -> MaskRule:
    """Tokens of `attention_mask` where the path has this part, every row elsewhere and in cross-attention."""

    def rule(path: str, _call: int, batch: Batch) -> Tensor | None:
        return batch["attention_mask"] if part in path and not CROSS.search(path) else None

    return rule
