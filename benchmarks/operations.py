"""Counts what a calibration computes: operations and one thread's CPU seconds, by what they are for.

    OMP_NUM_THREADS=1 python benchmarks/operations.py [paper featcal] [--examples 8 64 256] [--layers 2] [--tasks 3]

On CLIP-ViT-B/32's shapes with few blocks and tasks: all but "rest" (stems above all) grows with blocks, and all but
"solves" with tasks. Operations are the multiplications and additions of products and factorisations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from shapes import make_clip, recipe_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from featcal_cli.workflows.verbs import calibrate

KINDS = {
    ("gradient_sums", ""): "metric sums",
    ("output_gradients", "_run"): "gradients: forwards",
    ("output_gradients", "send_back"): "gradients: backwards",
    ("drift_probe", ""): "drift",
    ("linear_algebra", "add_product"): "Gram sums",
    ("linear_algebra", "norm"): "Gram sums",
    ("moments", "add"): "pulls",
    ("normal_equations", "_add_task"): "pulls",
    ("algorithm", "solve_block"): "solves",
    ("backtracking", ""): "checks",
    ("lockstep", ""): "forwards",
}
"""Kinds by module and function; the innermost frame that has one decides. An empty name stands for any function."""
FACTORISATIONS = {"linalg_cholesky_ex": 1 / 3, "_linalg_eigh": 9.0, "linalg_qr": 4.0}
"""Operations over the elements of a matrix times its columns."""


class Counter(TorchDispatchMode):
    """Adds up operations and CPU seconds of all torch functions by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        result = func(*args, **(kwargs or {}))
        spent, kind = time.thread_time() - started, find_kind()
        self.seconds[kind] += spent
        self.operations[kind] += count(func.overloadpacket, args, kwargs or {}, result)
        return result


def find_kind() -> str:
    """The kind of work that the calling function of featcal does; of forwards with the role of the model."""
    frame: FrameType | None = sys._getframe(2)
    role = ""
    while frame is not None:
        module, name = Path(frame.f_code.co_filename).stem, frame.f_code.co_name
        if (module, name) == ("paused_forward", "run_block"):
            role = "student's " if frame.f_locals["self"].runner.model.role == "merged" else "experts' "
        if kind := KINDS.get((module, name)) or KINDS.get((module, "")):
            return role + kind if kind == "forwards" else kind
        frame = frame.f_back
    return "rest"


def count(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The operations of one call."""
    name = str(packet).removeprefix("aten.")
    if name == "addmm_":
        packet = torch.ops.aten.addmm
    if name == "linalg_solve_triangular":
        return float(result.numel() * args[0].shape[-1])
    if name in FACTORISATIONS:
        return FACTORISATIONS[name] * float(args[0].numel() * args[0].shape[-1])
    return float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0


def main() -> None:
    """Make, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["paper", "featcal"])
    parser.add_argument("--examples", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_clip(folder, layers=given.layers, tasks=given.tasks, examples=given.examples, distinct=given.tasks)
        for examples, method in ((number, method) for number in given.examples for method in given.methods):
            with Counter() as counter:
                calibrate(recipe_of(folder, examples, method=method), output=folder / f"{method}-{examples}")
            total, seconds = sum(counter.operations.values()), sum(counter.seconds.values())
            print(f"\n{method}, {examples} examples: {total / 1e9:,.0f} GFLOP, {seconds:.0f} s of CPU")
            for kind, number in sorted(counter.operations.items(), key=lambda pair: -pair[1]):
                print(f"  {kind:<28}{number / 1e9:>9,.1f} GFLOP{counter.seconds[kind]:>8.1f} s", flush=True)


if __name__ == "__main__":
    main()
