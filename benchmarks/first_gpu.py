"""What a CUDA device makes of featcal, as `first_gpu.sh` asks: its difference to the CPU, ‖CUDA − CPU‖ / ‖CPU − merged‖
over all weights, for a tiny family of each way in which weights are read; and kernels on CLIP-ViT-B/32's shapes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from clip import CLIP_LAYERS, CLIP_TASKS
from safetensors.torch import load_file
from shapes import make_clip, recipe_of
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from families import BY_NAME, TASKS, save_family

from featcal_cli.workflows.verbs import calibrate

FAMILIES = (
    "bert", "gpt2", "t5", "llama", "albert", "mixtral", "xlnet", "clip-vision", "segformer", "qwen3-next",
    "wavlm", "llava",
)  # fmt: skip
CHOSEN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {"paper": (TASKS, {}), "featcal": (TASKS[:1], {"rho": 1.0})}
"""Tasks and settings of each method: several random experts have nothing in common, and all updates would be undone."""
EXAMPLES = 8, 64
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
"""What the processor waits for the card in; events are those of the thread that copies weights."""


def distance(one: Path, other: Path) -> float:
    """Frobenius norm of the difference of two models, all weights together."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    squares: list[float] = [float((ours[name].double() - x.double()).norm()) ** 2 for name, x in theirs.items()]
    return float(sum(squares) ** 0.5)


def compare_with_cpu(folder: Path) -> None:
    """Print a row a family and method."""
    for name in FAMILIES:
        saved = save_family(folder / name, BY_NAME[name])
        for method, (tasks, settings) in CHOSEN.items():
            recipe: dict[str, Any] = saved.recipe(method=method, **settings)
            recipe["tasks"] = {task: recipe["tasks"][task] for task in tasks}
            cpu, one, two = (folder / f"{name}-{method}-{number}" for number in range(3))
            for output, device in ((cpu, "cpu"), (one, "cuda"), (two, "cuda")):
                calibrate(recipe, output=output, device=device)
            apart = distance(one, cpu) / distance(cpu, folder / name / "merged")
            print(
                f"{name:<12} {method:<8} from the CPU {apart:.1e}   between two runs {distance(two, one):.1e}",
                flush=True,
            )


def count_kernels(folder: Path) -> None:
    """Print time, kernels and waits of a block and task, all that is done counted, by method and examples."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=EXAMPLES, distinct=CLIP_TASKS)
    for method, examples in ((method, count) for method in CHOSEN for count in EXAMPLES):
        started, recipe = time.perf_counter(), recipe_of(folder, examples, method=method)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            calibrate(recipe, output=folder / f"{method}-{examples}", device="cuda")
        seconds, events = time.perf_counter() - started, seen.events() or []
        counts, visits = Counter(event.name for event in events), CLIP_LAYERS * CLIP_TASKS
        kernels = sum(count for name, count in counts.items() if "LaunchKernel" in name) / visits
        waits = sum(counts[name] for name in WAITS) / visits
        busy = sum(event.device_time_total for event in events if not event.name.startswith("cu")) / 1e6
        print(f"{method:<8} {examples:>3} examples: {seconds:.1f} s, {busy:.1f} s of kernels and copies", flush=True)
        print(f"         a block and task: {kernels:.0f} kernels, {waits:.1f} waits", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        compare_with_cpu(Path(temporary))
        count_kernels(Path(temporary) / "clip")
