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
ENDS = ("out", "official", "merged")
DEFAULT, PAPERS, OFFICIAL = "default", "paper's settings", "official code"
OVER = {DEFAULT: {8: 1.6, 64: 1.6, 256: 1.4}}
"""Bars by process and examples: its time over that of the paper's settings."""
FASTER = {PAPERS: {8: 2.0, 32: 1.4}}
"""The official code's time over its own."""
RSS = {DEFAULT: {64: 1.6 * 2**30}, PAPERS: {8: 1.1 * 2**30, 32: 1.5 * 2**30}}
"""Bytes of resident memory."""
READ = 1.05
"""Bar: bytes read over the bytes of the experts' blocks and stems."""
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


def _mark_if(bar: float | None, text: str, value: float, *, at_least: bool = False) -> str:
    """The figure with its bar, if there is one."""
    if bar is None:
        return text
    shown = gib(bar) if bar > 2**20 else f"{bar:g}"
    return mark(text, f"{'≥' if at_least else '≤'} {shown}", value >= bar if at_least else value <= bar)


def measure_clip(asked: Asked, folder: Path) -> Section:
    """Rows: the default, the paper's settings and, where there is a clone of it, the official process, for each number
    of examples."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=asked.examples, distinct=CLIP_TASKS)
    needed, rows = _needed_bytes(folder), []
    for examples in asked.examples:
        runs: dict[str, list[Measured]] = {DEFAULT: [], PAPERS: [], OFFICIAL: []}
        for _ in range(asked.rounds):
            runs[DEFAULT].append(_run(asked, folder, examples))
            runs[PAPERS].append(_run(asked, folder, examples, *PAPER))
            if official := run_official(asked, folder, examples):
                runs[OFFICIAL].append(official)
        for name, found in ((name, of) for name, of in runs.items() if of):
            over = [own.seconds / paper.seconds for own, paper in zip(found, runs[PAPERS], strict=True)]
            times = _mark_if(OVER.get(name, {}).get(examples), _describe_range(over), median(over))
            faster, read, apart = "", "", ""
            if runs[OFFICIAL]:
                shares = [other.seconds / own.seconds for own, other in zip(found, runs[OFFICIAL], strict=True)]
                bar = FASTER.get(name, {}).get(examples)
                faster = _mark_if(bar, _describe_range(shares), median(shares), at_least=True)
            if name == PAPERS:
                share = found[0].printed["cost"]["expert_bytes_read"] / needed
                read = mark(f"{share:.2f}", f"≤ {READ}", share <= READ)
            if name == OFFICIAL:
                apart = f"{_compare(*(_open(folder / end) for end in ENDS)):.0e}"
                if not float(apart) < SAME:
                    raise SystemExit(f"{examples} examples: the official code's updates differ by {apart}")
            rss = max(run.peak_rss for run in found)
            memory = _mark_if(RSS.get(name, {}).get(examples), gib(rss), rss), gib(max(x.peak_anonymous for x in found))
            seconds = f"{median(run.seconds for run in found):.1f} s"
            rows.append([str(examples), name, seconds, times, faster, *memory, read, apart])
    return Section(
        "clip",
        f"CLIP-ViT-B/32's shapes, {CLIP_TASKS} tasks",
        f"Whole processes: `featcal calibrate`, the same with `{' '.join(PAPER)}`, and the official code. Median of "
        f"{asked.rounds} rounds, in which they take turns; the files are read once before each, so that they are in "
        "the system's memory. featcal also measures drift before and after and reads back what it wrote. Expert bytes "
        "are those read over those of the experts' blocks and stems; the last column is how far the official code's "
        "updates are from featcal's with the paper's settings, over their size.",
        ["examples", "process", "time", "over the paper's", "official's over it", "peak RSS", "anonymous",
         "expert bytes", "apart"],
        rows,
    )  # fmt: skip


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
