"""Counts what a calibration computes: operations and one thread's CPU seconds, by what they are for.

    OMP_NUM_THREADS=1 python benchmarks/operations.py [paper featcal] [--examples 8 64 256] [--layers 2] [--tasks 3]

On CLIP-ViT-B/32's shapes with few blocks and tasks: everything but the stems and the end scales with both. An operation is
a multiplication or an addition of a product, a factorisation or a triangular solve.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from shapes import make_clip, recipe_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from featcal_cli.workflows.verbs import calibrate

KINDS = {
    ("gradient_sums", ""): "metric sums",
    ("output_gradients", "_run"): "gradients: forwards",
    ("output_gradients", "send_back"): "gradients: backwards",
    ("drift_probe", ""): "drift",
    ("linear_algebra", "add_product"): "Gram sums",
    ("moments", "add"): "pulls",
    ("normal_equations", "_add_task"): "pulls",
    ("algorithm", "solve_block"): "solves",
    ("backtracking", ""): "checks",
    ("lockstep", "finish"): "forwards at the end",
    ("lockstep", ""): "forwards",
}
"""Kinds by module and function; the innermost frame that has one decides. An empty name stands for any function."""


class Counter(TorchDispatchMode):
    """Adds up operations and CPU seconds of all torch functions by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        result = func(*args, **(kwargs or {}))
        spent, kind = time.thread_time() - started, find_kind()
        self.seconds[kind] += spent
        self.operations[kind] += count(str(func.overloadpacket).removeprefix("aten."), args, result)
        return result


def find_kind() -> str:
    """The kind of work that the calling function of featcal does; of forwards with the role of the model."""
    frame, role = sys._getframe(2), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "featcal_cli" in file:
            module, name = Path(file).stem, frame.f_code.co_name
            if (module, name) == ("paused_forward", "run_block"):
                role = "student's " if frame.f_locals["self"].runner.model.role == "merged" else "expert's "
            kind = KINDS.get((module, name)) or KINDS.get((module, ""))
            if kind:
                return role + kind if kind.startswith("forwards") else kind
        frame = frame.f_back
    return "rest"


def count(name: str, args: Any, result: Any) -> float:
    """The operations of one call."""
    x = [each for each in args if isinstance(each, Tensor)]
    if name in ("mm", "bmm"):
        return 2.0 * result.numel() * x[0].shape[-1]
    if name in ("addmm", "addmm_", "baddbmm"):
        return 2.0 * result.numel() * x[1].shape[-1]
    if name == "convolution":
        return 2.0 * result.numel() * x[1][0].numel()
    if name.startswith("_scaled_dot_product") and "backward" not in name:
        return 4.0 * x[0].numel() * x[1].shape[-2]
    if name == "linalg_solve_triangular":
        return float(result.numel() * x[0].shape[-1])
    if name == "linalg_cholesky_ex":
        return float(x[0].numel() * x[0].shape[-1]) / 3
    if name == "_linalg_eigh":
        return 9.0 * x[0].numel() * x[0].shape[-1]
    if name == "linalg_qr":
        return 4.0 * x[0].numel() * x[0].shape[-1]
    return 0.0


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
        for examples in given.examples:
            for method in given.methods:
                started = time.process_time()
                with Counter() as counter:
                    calibrate(recipe_of(folder, examples, method=method), output=folder / f"{method}-{examples}")
                seconds = time.process_time() - started
                total = sum(counter.operations.values())
                print(f"\n{method}, {examples} examples: {total / 1e9:,.0f} GFLOP, {seconds:.0f} s of CPU")
                for kind, number in sorted(counter.operations.items(), key=lambda pair: -pair[1]):
                    print(f"  {kind:<28}{number / 1e9:>9,.1f} GFLOP{counter.seconds[kind]:>8.1f} s", flush=True)


if __name__ == "__main__":
    main()
