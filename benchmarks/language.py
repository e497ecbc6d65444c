"""Language models' shapes: what a dry run foresees, and what a slice of one takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers as tf
from meters import measure
from plan import PLACES, SETTINGS, describe_places
from results import Section, gib, mark
from runs import HERE, Asked, run_command
from shapes import Llama, make_layers, make_llama

SLICE = Llama(4096, 14_336, layers=8, heads=32, vocabulary=8_192)
ON_CPU, ON_GPU = (8, 64), (256, 512)
"""Examples a task of the slice, and tokens of one."""
PLANNED = {
    "Llama-3.1-8B": Llama(4096, 14_336, layers=32, heads=32),
    "Llama-3.3-70B": Llama(8192, 28_672, layers=80, heads=64),
}
LAYER: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = {
    "dense, 8192 wide": tf.LlamaConfig(**LAYER, intermediate_size=8192),
    "64 experts, each 1024 wide, 8 a token": tf.OlmoeConfig(
        **LAYER, intermediate_size=1024, num_experts=64, num_experts_per_tok=8
    ),
}
"""One block each; as many weights are used for a token."""
LAYER_EXAMPLES, LAYER_LENGTH, LAYER_MEMORY = 8, 256, 1.5
"""Examples a task and tokens of one; and the bar: memory of the mixture over that of the dense layer."""
TASKS, PLAN_EXAMPLES, PLAN_LENGTH = 3, 256, 512
BARRED, BARRED_PLACE = "Llama-3.1-8B", "laptop, 12 GiB GPU"
BARS = {"host_bytes": 16 << 30, "device_bytes": 12 << 30}
"""Bars, and the family and the place that they are for."""


def measure_slice(asked: Asked, folder: Path) -> Section:
    """One row: estimated and measured."""
    on_gpu = asked.device.type == "cuda"
    examples, length = ON_GPU if on_gpu else ON_CPU
    make_llama(folder, SLICE, tasks=TASKS, examples=examples, length=length, sparse=False)
    options = ["--device", str(asked.device), "--method", "paper", "--output", "out"]
    guess = run_command(folder, examples, *options, "--dry-run").printed["estimate"]
    found = run_command(folder, examples, *options)
    cost, bar = found.printed["cost"], "≤ the estimate"
    row = [gib(guess["host_bytes"]), mark(gib(found.peak_rss), bar, found.peak_rss <= guess["host_bytes"])]
    row += [gib(found.peak_anonymous), f"{found.seconds:.0f} s"]
    row += [gib(cost["expert_bytes_read"])]
    if on_gpu:
        peak, limit = cost["peak_device_bytes"], guess["device_bytes"]
        row += [gib(limit), mark(gib(peak), bar, peak <= limit)]
    header = ["estimated memory", "peak RSS", "anonymous", "time", "expert bytes"]
    return Section(
        "slice",
        f"a quarter of Llama-3.1-8B's blocks, {TASKS} experts, on {asked.device.type}",
        f"{SLICE.layers} blocks of its shapes in bfloat16, with a vocabulary of {SLICE.vocabulary:,} to save disk; "
        f"{examples} examples of {length} tokens a task. `featcal calibrate --method paper`, and its dry run.",
        [*header, "estimated device memory", "device memory"][: len(row)],
        [row],
    )


def measure_mixture(asked: Asked, folder: Path) -> Section:
    """Rows: settings, and both layers."""
    for name, config in LAYERS.items():
        make_layers(folder / name, config, tasks=2, examples=LAYER_EXAMPLES, length=LAYER_LENGTH)
    rows = []
    for settings, options in {"paper's": ["--method", "paper"], "featcal's": []}.items():
        dense = 0
        for name in LAYERS:
            home = ["--device", str(asked.device), "--output", "out", "--overwrite"]
            found = run_command(folder / name, LAYER_EXAMPLES, *options, *home)
            dense = dense or found.peak_anonymous
            times = found.peak_anonymous / dense
            share = "" if times == 1 else mark(f"{times:.2f}", f"≤ {LAYER_MEMORY}", times <= LAYER_MEMORY)
            rows.append([name, settings, gib(found.peak_anonymous), share, gib(found.peak_rss)])
    return Section(
        "mixture",
        "a mixture's layer beside a dense one",
        f"One block 2048 wide in bfloat16, {LAYER_EXAMPLES} examples of {LAYER_LENGTH} tokens in each of two tasks; "
        "`featcal calibrate`, with and without `--method paper`. RSS counts mapped files too, whose pages the system "
        "takes back when it wants them.",
        ["layer", "settings", "anonymous", "times the dense one's", "peak RSS"],
        rows,
    )


def measure_plan(_: Asked, folder: Path) -> Section:
    """Rows: a family, how its settings are chosen, and where it runs."""
    rows = []
    for name, shape in PLANNED.items():
        family = folder / name
        make_llama(family, shape, tasks=TASKS, examples=PLAN_EXAMPLES, length=PLAN_LENGTH, sparse=True)
        for settings in SETTINGS:
            for place in PLACES:
                arguments = [str(family), str(PLAN_EXAMPLES), settings, place]
                found = measure([sys.executable, str(HERE / "plan.py"), *arguments])
                needs = found.printed
                is_barred = name == BARRED and place == BARRED_PLACE
                host, card = (_show_need(needs[key], bar if is_barred else None) for key, bar in BARS.items())
                cost = [gib(needs["disk_bytes"]), f"{found.seconds:.0f} s"]
                rows.append([name, settings, place, host, card, *cost])
    return Section(
        "plan",
        f"whole language models, {TASKS} experts, {PLAN_EXAMPLES} examples of {PLAN_LENGTH} tokens a task",
        f"What `--dry-run` says, of files that have their whole size and hold nothing. {describe_places()}",
        ["family", "λ, ρ, α", "on", "host memory", "device memory", "disk", "planned in"],
        rows,
    )


def _show_need(count: int, bar: int | None) -> str:
    if bar and count:
        return mark(gib(count), f"< {gib(bar)}", count < bar)
    return gib(count) if count else ""
