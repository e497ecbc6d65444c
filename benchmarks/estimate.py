"""How near a dry run's estimate of memory comes to what the run then takes, on three models of other kinds.

    python benchmarks/estimate.py [FOLDER]

Makes random models in FOLDER (by default a temporary one, 3 GB), and for each one starts two processes: a dry run, and
the run itself. Prints the estimated and the measured peak of resident memory, and their ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

TASKS = ("one", "two", "three")
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


MODELS: dict[str, tuple[type, Any, Inputs]] = {
    "CLIP vision, 6 of its 12 layers": (tf.CLIPVisionModel, tf.CLIPVisionConfig(num_hidden_layers=6), images),
    "Llama, 4 layers of width 512": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(
            hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, vocab_size=16_000
        ),
        lambda: tokens(60, 128, 16_000),
    ),
    "T5-small": (
        tf.T5ForConditionalGeneration,
        tf.T5Config(vocab_size=32_128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0),
        source_and_target,
    ),
}


def make(folder: Path, model_class: type, config: Any, inputs: Inputs) -> None:
    """Merged, base and experts that have nothing in common but their shapes, and inputs for each task."""
    for number, name in enumerate(("merged", "base", *TASKS)):
        torch.manual_seed(number)
        model_class(config).save_pretrained(folder / name)
    for task in TASKS:
        save_file(inputs(), folder / f"{task}.safetensors")


def calibrate(folder: Path, *options: str) -> Any:
    """What `featcal calibrate --json` prints, in a process of its own."""
    line = [sys.executable, "-m", "featcal_cli", "calibrate", "merged", "--base", "base", "-n", "48", "--json"]
    for task in TASKS:
        line += ["--expert", f"{task}={task}", "--data", f"{task}={task}.safetensors"]
    return json.loads(subprocess.run([*line, *options], cwd=folder, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """Make, estimate, run, compare."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        print(f"{'model':<34}{'estimated':>10}{'measured':>10}{'ratio':>7}{'seconds':>10}")
        for name, (model_class, config, inputs) in MODELS.items():
            folder = place / model_class.__name__
            make(folder, model_class, config, inputs)
            guess = calibrate(folder, "--dry-run")["estimate"]
            cost = calibrate(folder, "-o", "out")["cost"]
            memory, peak = guess["host_bytes"] / 1e9, cost["peak_rss_bytes"] / 1e9
            figures = f"{memory:>7.2f} GB{peak:>7.2f} GB{memory / peak:>7.2f}"
            print(f"{name:<34}{figures}{cost['seconds']:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
