"""How near a dry run's estimate of memory comes to what the run then takes, on models of several kinds.

    python benchmarks/estimate.py [FOLDER]

Makes random models in FOLDER (by default a temporary one, 6 GB), and for each one starts two processes: a dry run, and
the run itself. Prints the estimated peak of resident memory, the one that was measured from outside of the run, and
their ratio.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from runs import run_command
from safetensors.torch import save_file
from shapes import data_of
from torch import Tensor

TASKS, EXAMPLES = ("one", "two", "three"), 48
PAPER = ("--method", "paper", "--ridge", "0.05", "--rho", "2", "--alpha", "0.3")
IMAGES, WORDS = (60, 3, 224, 224), 16_000
"""Pictures that weigh much themselves, and a vocabulary."""
LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": WORDS,
}
WIDE = {
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "vocab_size": WORDS,
}
VIT = {"num_hidden_layers": 3, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
T5 = {"vocab_size": 32_000, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[type, Any, tuple[int, ...], tuple[str, ...]]] = {
    "CLIP vision, 6 of its 12 layers": (tf.CLIPVisionModel, tf.CLIPVisionConfig(num_hidden_layers=6), IMAGES, ()),
    "Llama, 4 layers of width 512": (tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA), (60, 128), ()),
    "Llama in float32, run in bfloat16": (
        tf.LlamaForCausalLM, tf.LlamaConfig(**WIDE), (60, 128), (*PAPER, "--dtype", "bfloat16"),
    ),
    "ViT of width 384, 3 layers": (tf.ViTForImageClassification, tf.ViTConfig(**VIT), IMAGES, PAPER),
    "BERT, 3 of its 12 layers": (
        tf.BertForSequenceClassification, tf.BertConfig(num_hidden_layers=3, vocab_size=WORDS), (160, 128),
        (*PAPER, "-n", "128"),
    ),
    "T5-small": (tf.T5ForConditionalGeneration, tf.T5Config(**T5), (100, 128), ()),
}  # fmt: skip
"""Class, config, shape of the inputs, and options that leave nothing to be searched for."""


def make(folder: Path, model_class: type, config: Any, shape: tuple[int, ...]) -> None:
    """Merged, base and experts that have nothing in common but their shapes, and inputs without padding."""
    for number, place in enumerate(("merged", "base", *(f"experts/{task}" for task in TASKS))):
        torch.manual_seed(number)
        model_class(config).save_pretrained(folder / place)
    (folder / "data").mkdir()
    for task in TASKS:
        inputs: dict[str, Tensor] = {"pixel_values": torch.randn(shape)}
        if len(shape) == 2:
            ids = torch.randint(3, config.vocab_size, shape)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, config.vocab_size, (shape[0], 32))
        save_file(inputs, data_of(folder, task, EXAMPLES))


def main() -> None:
    """Make, estimate, run, compare."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        print(f"{'model':<34}{'estimated':>10}{'measured':>10}{'ratio':>7}{'seconds':>10}")
        for number, (name, (model_class, config, shape, options)) in enumerate(MODELS.items()):
            folder = place / str(number)
            make(folder, model_class, config, shape)
            planned = run_command(folder, EXAMPLES, *options, "--dry-run").printed["estimate"]["host_bytes"] / 1e9
            run = run_command(folder, EXAMPLES, *options, "-o", "out")
            peak = run.peak_rss / 1e9
            print(f"{name:<34}{planned:>7.2f} GB{peak:>7.2f} GB{planned / peak:>7.2f}{run.seconds:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
