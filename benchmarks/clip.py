"""CLIP-ViT-B/32's shapes: the whole command beside the official code's process, and with more and more experts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from meters import Measured
from results import Section, gib, mark
from runs import Asked, read_files, run_command, run_official
from safetensors.torch import load_file
from shapes import PREFIX, TOKENS, WIDTH, make_clip, tasks_of
from torch import Tensor

Tensors = dict[str, Tensor]
PAPER = ("--method", "paper", "--ridge", "0.05", "--rho", "2", "--alpha", "0.3")
SAME = 0.01
"""Two results of one job differ by less than this, over the size of the update: both compute in float32."""
CLIP_LAYERS, CLIP_TASKS = 12, 8
FASTER, RSS, READ = {8: 2.2, 32: 1.8}, {8: 1.1 * 2**30, 32: 1.5 * 2**30}, 1.05
"""Bars: times faster than the official code, process against process; bytes of resident memory; bytes read over the
bytes of the experts' blocks and stems."""
DEFAULT_EXAMPLES, DEFAULT_TIMES = (8, 64), 2.2
"""Examples that the default's cost is measured with; and its bar: times the paper's settings'."""
EXPERTS, EXPERT_LAYERS, EXPERT_EXAMPLES, DISTINCT = (4, 8, 16, 32), 3, 16, 4
GROWTH, LINEAR = 0.1, 1.1
"""Bars: of anonymous memory beyond the cached features, over that at the fewest experts; of the time for one more of
them, over the mean at the fewest."""


def _run(asked: Asked, folder: Path, examples: int, *options: str) -> Measured:
    """The command on a family whose files are in the system's memory."""
    read_files(folder)
    home = ("--device", str(asked.device), "--overwrite", "--output", "out")
    return run_command(folder, examples, *home, *options)


def _describe_range(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def _mark_if(text: str, bar: str, *, wanted: bool, kept: bool) -> str:
    """The figure with its bar, where there is one for it."""
    return mark(text, bar, kept) if wanted else text


def measure_clip(asked: Asked, folder: Path) -> Section:
    """Rows: the command and, where there is a clone of it, the official process, for each number of examples."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=asked.examples, distinct=CLIP_TASKS)
    needed, rows = _needed_bytes(folder), []
    for examples in asked.examples:
        ours, theirs = [], []
        for _ in range(asked.rounds):
            ours.append(_run(asked, folder, examples, *PAPER))
            if official := run_official(asked, folder, examples):
                theirs.append(official)
        times = [other.seconds / own.seconds for own, other in zip(ours, theirs, strict=False)]
        faster = "" if not times else _mark_if(
            _describe_range(times), f"≥ {FASTER.get(examples)}",
            wanted=examples in FASTER, kept=median(times) >= FASTER.get(examples, 0),
        )  # fmt: skip
        rss, bar = max(run.peak_rss for run in ours), RSS.get(examples, 0)
        memory = _mark_if(gib(rss), f"≤ {gib(bar)}", wanted=bar > 0, kept=rss <= bar)
        read = ours[0].printed["cost"]["expert_bytes_read"]
        bytes_read = mark(f"{gib(read)}, {read / needed:.2f} of what is needed", f"≤ {READ}", read <= READ * needed)
        rows.append([str(examples), "featcal", *_describe(ours), faster, memory, bytes_read])
        if theirs:
            apart = _compare(*(_open(folder / name) for name in ("out", "official", "merged")))
            if not apart < SAME:
                raise SystemExit(f"{examples} examples: the official code's updates differ by {apart:.1e}")
            name = f"official (its updates differ by {apart:.0e})"
            rows.append([str(examples), name, *_describe(theirs), "1", gib(max(run.peak_rss for run in theirs)), ""])
    return Section(
        "clip",
        f"CLIP-ViT-B/32's shapes, {CLIP_TASKS} tasks",
        f"Whole processes: `featcal calibrate {' '.join(PAPER)}`, which also measures drift before and after and reads "
        f"back what it wrote, and the official code. Median of {asked.rounds} rounds, in which they take turns. The "
        "family's files are read once before each, so that they are in the system's memory.",
        ["examples", "process", "time", "anonymous", "official's time over it", "peak RSS", "expert bytes"],
        rows,
    )


def _describe(runs: list[Measured]) -> list[str]:
    return [f"{median(run.seconds for run in runs):.1f} s", gib(max(run.peak_anonymous for run in runs))]


def _needed_bytes(folder: Path) -> int:
    """Bytes of the experts' blocks and stems: all that these towers hold but the last norm."""
    experts = (_open(folder / "experts" / task) for task in tasks_of(folder))
    needed = (x for expert in experts for name, x in expert.items() if not name.startswith("post_layernorm"))
    return sum(x.numel() * x.element_size() for x in needed)


def _compare(ours: Tensors, official: Tensors, merged: Tensors) -> float:
    """How far two results are apart, over how far the official one is from merged; Frobenius, all blocks together."""
    apart = sum(float((ours[name] - x).double().pow(2).sum()) for name, x in official.items())
    moved = sum(float((merged[name] - x).double().pow(2).sum()) for name, x in official.items())
    return float((apart / moved) ** 0.5)


def _open(folder: Path) -> Tensors:
    """The tensors of a folder, by the names that transformers 5 has for them."""
    return {
        name.removeprefix(PREFIX): x
        for file in sorted(folder.glob("*.safetensors"))
        for name, x in load_file(file).items()
    }


def measure_default(asked: Asked, folder: Path) -> Section:
    """Rows: the default and the paper's settings, for each number of examples."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=DEFAULT_EXAMPLES, distinct=CLIP_TASKS)
    rows = []
    for examples in DEFAULT_EXAMPLES:
        runs: list[tuple[Measured, Measured]] = []
        for _ in range(asked.rounds):
            default = _run(asked, folder, examples)
            runs.append((default, _run(asked, folder, examples, "--method", "paper")))
        times = [default.seconds / paper.seconds for default, paper in runs]
        seconds = [f"{median(run[at].seconds for run in runs):.0f} s" for at in (0, 1)]
        memory = [gib(max(run[at].peak_rss for run in runs)) for at in (0, 1)]
        share = mark(_describe_range(times), f"≤ {DEFAULT_TIMES}", median(times) <= DEFAULT_TIMES)
        rows.append([str(examples), *seconds, share, *memory])
    return Section(
        "default",
        f"CLIP-ViT-B/32's shapes, {CLIP_TASKS} tasks: the default beside the paper's settings",
        "The whole command, without settings and with `--method paper`, in turns; medians. The family's files are "
        "read once before each, so that they are in the system's memory.",
        ["examples", "default", "paper's settings", "times", "default's peak RSS", "with the paper's"],
        rows,
    )


def measure_experts(asked: Asked, folder: Path) -> Section:
    """Rows: the cost of a number of experts."""
    rows: list[list[str]] = []
    first = fewest = 0.0
    for tasks in EXPERTS:
        with tempfile.TemporaryDirectory(dir=folder) as home:
            family = Path(home)
            make_clip(family, layers=EXPERT_LAYERS, tasks=tasks, examples=[EXPERT_EXAMPLES], distinct=DISTINCT)
            found = [_run(asked, family, EXPERT_EXAMPLES, *PAPER) for _ in range(asked.rounds)]
        seconds = median(run.seconds for run in found)
        features = tasks * EXPERT_EXAMPLES * TOKENS * WIDTH * 4 * 2
        memory = max(run.peak_anonymous for run in found)
        beyond = memory - features
        first = first or beyond
        growth = mark(f"{beyond / first - 1:+.0%}", f"< {GROWTH:.0%}", beyond / first - 1 < GROWTH)
        each, fewest = seconds / tasks, fewest or seconds / tasks
        linear = mark(f"{each:.2f} s", f"≤ {LINEAR:.0%} of the first", each <= LINEAR * fewest)
        rows.append([str(tasks), f"{seconds:.1f} s", linear, gib(memory), gib(features), gib(beyond), growth])
    return Section(
        "experts",
        f"CLIP-ViT-B/32's shapes, {EXPERT_LAYERS} blocks, {EXPERT_EXAMPLES} examples a task",
        f"The whole command with the paper's settings; median time and largest memory of {asked.rounds} processes. "
        "Features are those of student and expert before one block (examples × tokens × width, float32). Experts after "
        f"the first {DISTINCT} are hard links to those, opened as models of their own. The examples' pixels are memory "
        f"too: {EXPERT_EXAMPLES * 3 * 224 * 224 * 4 / 2**20:.0f} MiB an expert.",
        ["experts", "time", "an expert", "peak anonymous", "features", "beyond them", "growth"],
        rows,
    )
