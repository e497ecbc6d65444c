"""Families of generated models in well-known shapes, written whole or as headers over files that hold no data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

SIDE, TOKENS, WIDTH = 224, 50, 768
"""CLIP-ViT-B/32: pixels of a side of its images, tokens of one, width of its features."""
DRIFT = 0.1
"""Size of a task vector over that of the weights it is added to."""
ROLES = ("merged", "base")
PREFIX = "vision_model."
"""Of every tensor of a published tower; in transformers 5 its modules are called without it."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Llama:
    """The shape of a language model, held in bfloat16 with a head of its own."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int = 8
    vocabulary: int = 128_256

    @property
    def config(self) -> Any:
        """As transformers has it."""
        return tf.LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            max_position_embeddings=131_072, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )  # fmt: skip

    def shards(self) -> list[dict[str, Tensor]]:
        """Tensors without values, by name: what is outside of the blocks, and each block."""
        with torch.device("meta"):
            tensors: dict[str, Tensor] = tf.LlamaForCausalLM(self.config).bfloat16().state_dict()
        blocks = [f"model.layers.{number}." for number in range(self.layers)]
        stem = {name: x for name, x in tensors.items() if not name.startswith(tuple(blocks))}
        return [stem, *({name: x for name, x in tensors.items() if name.startswith(block)} for block in blocks)]


def tasks_of(folder: Path) -> list[str]:
    """The tasks of a family, in order."""
    return sorted(expert.name for expert in (folder / "experts").iterdir())


def data_of(folder: Path, task: str, examples: int) -> Path:
    """The file of a task's examples."""
    return folder / "data" / f"{task}-{examples}.safetensors"


def recipe_of(folder: Path, examples: int, **calibration: Any) -> dict[str, Any]:
    """The recipe that calibrates a family."""
    tasks = {
        task: {"expert": str(folder / "experts" / task), "data": {"path": str(data_of(folder, task, examples))}}
        for task in tasks_of(folder)
    }
    models = {role: str(folder / role) for role in ROLES}
    return {**models, "tasks": tasks, "calibration": {"examples": examples, **calibration}}


def make_clip(folder: Path, *, layers: int, tasks: int, examples: Sequence[int], distinct: int) -> None:
    """A family of CLIP-ViT-B/32's vision towers: merged is the experts' mean, and images are noise.

    Experts and their images after the first `distinct` are hard links to those: models of their own, for less disk.
    """
    torch.manual_seed(0)
    model = tf.CLIPVisionModel(tf.CLIPVisionConfig(num_hidden_layers=layers))
    model.config.architectures = ["CLIPVisionModel"]
    base = model.state_dict()
    total = {name: torch.zeros_like(x) for name, x in base.items()}
    _save_clip(folder / "base", model.config, base)
    names = [f"task{number:02}" for number in range(tasks)]
    for number, task in enumerate(names):
        twin = names[number % distinct]
        if number >= distinct:
            _link(folder / "experts" / twin, folder / "experts" / task)
            for count in examples:
                data_of(folder, task, count).hardlink_to(data_of(folder, twin, count))
            continue
        expert = {name: x + _task_vector(x) for name, x in base.items()}
        _save_clip(folder / "experts" / task, model.config, expert)
        share = len(names[number::distinct]) / tasks
        total = {name: x + share * expert[name] for name, x in total.items()}
        (folder / "data").mkdir(exist_ok=True)
        for count in examples:
            save_file({"pixel_values": torch.randn(count, 3, SIDE, SIDE)}, data_of(folder, task, count))
    _save_clip(folder / "merged", model.config, total)


def _save_clip(home: Path, config: Any, values: Mapping[str, Tensor]) -> None:
    """Under the names that published models have, which every transformers knows."""
    home.mkdir(parents=True)
    save_file({f"{PREFIX}{name}": x for name, x in values.items()}, home / "model.safetensors", {"format": "pt"})
    config.save_pretrained(home)


def make_llama(folder: Path, shape: Llama, *, tasks: int, examples: int, length: int, sparse: bool) -> None:
    """A family of language models, and rows of random tokens to fit and to hold out.

    All blocks of a model hold the same values, and all experts are hard links to the first. sparse: the files have
    their full size and take no disk, and what they hold is zeros.
    """
    torch.manual_seed(0)
    names = [f"task{number}" for number in range(tasks)]
    stem, block, *_ = shape.shards()
    base = {} if sparse else {name: _random(name, x) for name, x in (stem | block).items()}
    vector = {name: _task_vector(x) for name, x in base.items()}
    for place, scale in (("base", 0.0), (f"experts/{names[0]}", 1.0), ("merged", 0.5)):
        home = folder / place
        home.mkdir(parents=True)
        values = {name: x + scale * vector[name] for name, x in base.items()}
        _write_shards(home, shape, values)
    for task in names[1:]:
        _link(folder / "experts" / names[0], folder / "experts" / task)
    (folder / "data").mkdir()
    rows = examples + min(64, max(8, examples // 4))
    for task in names:
        ids = torch.randint(3, shape.vocabulary, (rows, length))
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        save_file(tokens, data_of(folder, task, examples))


def make_layers(folder: Path, config: Any, *, tasks: int, examples: int, length: int) -> None:
    """A family of whole models of a config, in bfloat16, and rows of random tokens to fit and to hold out."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base = {name: x.clone() for name, x in model.state_dict().items()}
    total = {name: torch.zeros_like(x) for name, x in base.items()}
    model.save_pretrained(folder / "base")
    (folder / "data").mkdir()
    rows = examples + min(64, max(8, examples // 4))
    for task in (f"task{number}" for number in range(tasks)):
        expert = {name: x + _task_vector(x) for name, x in base.items()}
        total = {name: x + expert[name] / tasks for name, x in total.items()}
        model.load_state_dict(expert)
        model.save_pretrained(folder / "experts" / task)
        ids = torch.randint(3, config.vocab_size, (rows, length))
        save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, data_of(folder, task, examples))
    model.load_state_dict(total)
    model.save_pretrained(folder / "merged")


def _write_shards(home: Path, shape: Llama, values: Mapping[str, Tensor]) -> None:
    """One file for the stem and one a block, with an index; without data where there are no values."""
    shards = shape.shards()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = home / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(shard, file.name)
        if values:
            first = [name.replace(f".layers.{number - 1}.", ".layers.0.") for name in shard]
            save_file({name: values[of] for name, of in zip(shard, first, strict=True)}, file, {"format": "pt"})
        else:
            _write_header(file, shard)
    total = sum(x.numel() * x.element_size() for shard in shards for x in shard.values())
    (home / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    shape.config.save_pretrained(home)


def _write_header(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A whole file of bfloat16 tensors, of which the disk holds the header alone."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        start, end = end, end + 2 * prod(x.shape)
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _random(name: str, x: Tensor) -> Tensor:
    """What a new model would hold."""
    return torch.ones(x.shape, dtype=x.dtype) if "norm" in name else torch.empty_like(x, device="cpu").normal_(0, 0.02)


def _task_vector(x: Tensor) -> Tensor:
    """Noise, in proportion to the weights."""
    if not x.is_floating_point():
        return torch.zeros_like(x)
    return torch.randn(x.shape, dtype=x.dtype) * (DRIFT * x.float().pow(2).mean().sqrt().to(x.dtype))


def _link(model: Path, place: Path) -> None:
    """The same files under another name."""
    place.mkdir(parents=True)
    for file in model.iterdir():
        (place / file.name).hardlink_to(file)
