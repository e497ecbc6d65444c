"""How near a dry run's estimate of memory comes to what the run then takes, on models of several kinds.

    python benchmarks/estimate.py [FOLDER]

Makes random models in FOLDER (by default a temporary one, 6 GB), and for each one starts two processes: a dry run, and
the run itself. Prints the estimated peak of resident memory, the one that was measured from outside of the run, and
their ratio.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from meters import Measured, measure
from safetensors.torch import save_file
from torch import Tensor

TASKS = ("one", "two", "three")
GIVEN = ("--method", "paper", "--ridge", "0.05", "--rho", "2", "--alpha", "0.3")
"""Options that leave nothing to be searched for."""
Inputs = Callable[[], dict[str, Tensor]]


def images() -> dict[str, Tensor]:
    """Of a size at which the pictures themselves weigh much."""
    return {"pixel_values": torch.randn(60, 3, 224, 224)}


def tokens(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Without padding."""
    ids = torch.randint(3, vocabulary, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def source_and_target() -> dict[str, Tensor]:
    """For an encoder-decoder."""
    return tokens(100, 128, 32_000) | {"decoder_input_ids": torch.randint(3, 32_000, (100, 32))}


MODELS: dict[str, tuple[type, Any, Inputs, tuple[str, ...]]] = {
    "CLIP vision, 6 of its 12 layers": (tf.CLIPVisionModel, tf.CLIPVisionConfig(num_hidden_layers=6), images, ()),
    "Llama, 4 layers of width 512": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(
            hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, vocab_size=16_000
        ),
        lambda: tokens(60, 128, 16_000),
        (),
    ),
    "Llama in float32, run in bfloat16": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16, vocab_size=16_000
        ),
        lambda: tokens(60, 128, 16_000),
        (*GIVEN, "--dtype", "bfloat16"),
    ),
    "ViT of width 384, 3 layers": (
        tf.ViTForImageClassification,
        tf.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=3),
        images,
        GIVEN,
    ),
    "BERT, 3 of its 12 layers": (
        tf.BertForSequenceClassification,
        tf.BertConfig(num_hidden_layers=3, vocab_size=16_000),
        lambda: tokens(160, 128, 16_000),
        (*GIVEN, "-n", "128"),
    ),
    "T5-small": (
        tf.T5ForConditionalGeneration,
        tf.T5Config(vocab_size=32_128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0),
        source_and_target,
        (),
    ),
}


def make(folder: Path, model_class: type, config: Any, inputs: Inputs) -> None:
    """Merged, base and experts that have nothing in common but their shapes, and inputs for each task."""
    for number, name in enumerate(("merged", "base", *TASKS)):
        torch.manual_seed(number)
        model_class(config).save_pretrained(folder / name)
    for task in TASKS:
        save_file(inputs(), folder / f"{task}.safetensors")


def calibrate(folder: Path, *options: str) -> Measured:
    """`featcal calibrate --json` in a process of its own."""
    line = [sys.executable, "-m", "featcal_cli", "calibrate", "merged", "--base", "base", "-n", "48", "--json"]
    for task in TASKS:
        line += ["--expert", f"{task}={task}", "--data", f"{task}={task}.safetensors"]
    return measure([*line, *options], folder)


def main() -> None:
    """Make, estimate, run, compare."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        print(f"{'model':<34}{'estimated':>10}{'measured':>10}{'ratio':>7}{'seconds':>10}")
        for number, (name, (model_class, config, inputs, options)) in enumerate(MODELS.items()):
            folder = place / str(number)
            make(folder, model_class, config, inputs)
            estimated = calibrate(folder, *options, "--dry-run").printed["estimate"]["host_bytes"] / 1e9
            run = calibrate(folder, *options, "-o", "out")
            peak = run.peak_rss / 1e9
            print(
                f"{name:<34}{estimated:>7.2f} GB{peak:>7.2f} GB{estimated / peak:>7.2f}{run.seconds:>10.0f}", flush=True
            )


if __name__ == "__main__":
    main()
