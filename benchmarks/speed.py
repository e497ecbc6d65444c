"""What calibrations cost: time, operations a second, memory, bytes read; into RESULTS.md (a GPU's: RESULTS-cuda.md).

    python benchmarks/speed.py [clip experts mixture slice plan] [--examples 8 64] [--rounds 3]
                               [--device cpu] [--work FOLDER]
                               [--official CLONE --official-python ENVIRONMENT/bin/python]

clip     CLIP-ViT-B/32's shapes, 8 tasks: the whole command as it is and with the paper's settings, and the official
         code's process on the same weights and pixel values, turn about.
experts  The same shapes, 3 blocks, 4 to 32 experts: what more of them cost.
mixture  A layer of 64 experts, of OLMoE's shapes, beside a dense one: memory.
slice    8 of the 32 blocks of Llama-3.1-8B's shapes: a dry run's estimate of memory, and what the run takes.
plan     Families of Llama-3.1-8B's and Llama-3.3-70B's shapes as dry runs see them: the files hold headers alone.

Weights and examples are generated in FOLDER (by default a temporary one) and deleted: clip takes 4 GB of disk there,
slice 20. Every job is a process of its own, and its memory is that of the process. --official names a clone of
github.com/egangu/featcal, --official-python an interpreter that can run it (it wants transformers 4).
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from clip import measure_clip, measure_experts
from language import measure_mixture, measure_plan, measure_slice
from meters import describe_machine, gemm_speed
from results import Section, write_section
from runs import Asked

MEASURES: dict[str, Callable[[Asked, Path], Section]] = {
    "clip": measure_clip,
    "experts": measure_experts,
    "mixture": measure_mixture,
    "slice": measure_slice,
    "plan": measure_plan,
}


def _describe_run(found: Any, device: torch.device, peak: float) -> str:
    """The machine, the day and the command, without this machine's folders."""
    names = {found.official: "CLONE", found.official_python: "PYTHON", found.work: "FOLDER"}
    line = shlex.join(["python", "benchmarks/speed.py", *(names.get(word, word) for word in sys.argv[1:])])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    speed = f"float32 GEMM {peak / 1e9:.0f} GFLOP/s"
    return f"{describe_machine(device)}, {speed}; {versions}; {datetime.date.today()}; `{line}`"


def main() -> None:
    """Generate, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=", ".join(MEASURES))
    parser.add_argument("--examples", nargs="+", type=int, default=[8, 64], help="a task, for clip")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--work", metavar="FOLDER")
    parser.add_argument("--official", metavar="CLONE")
    parser.add_argument("--official-python", metavar="PYTHON", default=sys.executable)
    found = parser.parse_args()
    if unknown := set(found.measures) - set(MEASURES):
        parser.error(f"no measure is called {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    asked = Asked(found.examples, found.rounds, found.device, found.work, found.official, found.official_python)
    for name in found.measures or MEASURES:
        with tempfile.TemporaryDirectory(dir=asked.work) as folder:
            section = MEASURES[name](asked, Path(folder))
        machine = _describe_run(found, asked.device, gemm_speed(asked.device))
        write_section(section, machine, list(MEASURES), on_gpu=asked.device.type == "cuda")
        print(section.to_markdown(machine), flush=True)


if __name__ == "__main__":
    main()
