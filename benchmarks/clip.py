"""CLIP-ViT-B/32's shapes: the calibration stage beside the official code's, and with more and more experts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meters import Measured, gemm_speed
from results import Section, gib, gigabytes, mark
from runs import Asked, read_files, run_command, run_official, run_stage
from safetensors.torch import load_file
from shapes import PREFIX, TOKENS, WIDTH, make_clip, tasks_of
from stage import PAPER
from torch import Tensor

Tensors = dict[str, Tensor]
SAME = 0.01
"""Two results of one job differ by less than this, over the size of the update: both compute in float32."""
CLIP_LAYERS, CLIP_TASKS = 12, 8
FIXED = {8: 3.4e12, 32: 10.7e12}
"""Operations that the CLIP job can be done with, by examples a task."""
FASTER = {8: 2.3, 32: 1.7}
"""Bars: times faster than the official code, stage against stage."""
COMMAND_FASTER, OUTSIDE = {8: 2.2, 32: 1.8}, {32: 0.2}
"""The same, process against process; and the part of the command that is not its stage."""
SHARE, CLIP_RSS, READ = 0.65, {8: 1.1 * 2**30, 32: 1.5 * 2**30}, 1.05
"""Bars: of the GEMM peak; bytes of resident memory; bytes read over the bytes of the experts' blocks and stems."""
GPU_EXAMPLES, GPU_SECONDS, GPU_FASTER = 256, 5.0, 10.0
"""Bars on a GPU, and the number of examples that they are for."""
DEFAULT_EXAMPLES, DEFAULT_TIMES = (8, 64), 2.5
"""Of the default's cost; and its bar: times the paper's settings'."""
EXPERTS, EXPERT_LAYERS, EXPERT_EXAMPLES, DISTINCT = (4, 8, 16, 32), 3, 16, 4
GROWTH, LINEAR = 0.1, 1.1
"""Bars: of anonymous memory beyond the cached features, over that at the fewest experts; of the time for one more of
them, over the mean at the fewest."""


class Round(NamedTuple):
    """The jobs of one round, turn about."""

    ours: Measured
    official: Measured | None
    command: Measured
    peak: float
    """Operations a second of a large product, the best of before and after ours."""


def count_operations(examples: int) -> float:
    """Those that the CLIP job can be done with.

    The line through the two fixed figures: 0.30 TFLOP for each example of the 8 tasks, 0.97 TFLOP whatever their
    number. The slope is, for each token and block of width d, 107 d²: three passes of 24 d² without the student's
    last module, 24 d² for the experts' outputs against the student's inputs, and 19 d² for half of each symmetric G.
    """
    (few, low), (many, high) = FIXED.items()
    return FIXED.get(examples, low + (high - low) / (many - few) * (examples - few))


def measure_clip(asked: Asked, folder: Path) -> Section:
    """Rows: a stage, the command, and the official ones beside them."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=asked.examples, distinct=CLIP_TASKS)
    rows = []
    for examples in asked.examples:
        rounds = [_run_round(asked, folder, examples) for _ in range(asked.rounds)]
        rows += _describe_clip(asked, folder, examples, rounds)
    return Section(
        "clip",
        f"CLIP-ViT-B/32's shapes, {CLIP_TASKS} tasks",
        "The calibration stage: from loaded models and read examples to all blocks solved, finding the blocks and "
        f"running the stems included; λ 0.05, ρ 2.0, α 0.3, LayerNorms and biases too. Median of {asked.rounds} "
        "rounds, in which all take turns; every job is a process of its own, and memory is the process's "
        "from its start to its end. The rate is a fixed number of operations "
        f"({', '.join(f'{count_operations(n) / 1e12:.1f} TFLOP for {n} examples' for n in asked.examples)}) over the "
        "time, and its share that of a large float32 product's rate, measured before and after. The whole command "
        "(λ, ρ and α given) also starts, reads, measures drift before and after on some of the examples, writes and "
        "reads back what it wrote; the official process starts, loads the models, and writes the blocks. The "
        "family's files are read once before each job, so that they are in the system's memory.",
        ["examples", "job", "time", "official's over it", "share of GEMM peak", "peak RSS", "anonymous",
         "expert bytes", "device memory"],
        rows,
    )  # fmt: skip


def _run_round(asked: Asked, folder: Path, examples: int) -> Round:
    before = gemm_speed(asked.device)
    ours = run_stage(asked, folder, examples)
    peak = max(before, gemm_speed(asked.device))
    official = run_official(asked, folder, examples)
    settings = [part for key, value in PAPER.items() for part in (f"--{key}", str(value))]
    settings += ["--method", "paper", "--device", str(asked.device), "--overwrite", "--output", "out"]
    read_files(folder)
    return Round(ours, official, run_command(folder, examples, *settings), peak)


def _describe_clip(asked: Asked, folder: Path, examples: int, rounds: list[Round]) -> list[list[str]]:
    ours = [each.ours for each in rounds]
    theirs = [each.official for each in rounds if each.official is not None]
    rss, read, needed = max(each.peak_rss for each in ours), ours[0].printed["expert_bytes_read"], _needed_bytes(folder)
    row = [
        str(examples), "featcal, stage", *_describe_speed(asked, examples, rounds),
        gib(rss) if asked.device.type == "cuda" else _mark_memory(rss, examples),
        gib(max(each.peak_anonymous for each in ours)),
        mark(f"{gigabytes(read)}, {read / needed:.2f} of blocks and stems", f"≤ {READ}", read <= READ * needed),
        _describe_gpu(ours),
    ]  # fmt: skip
    commands = [each.command for each in rounds]
    outside = 1 - median(each.ours.printed["seconds"] / each.command.seconds for each in rounds)
    part, rss = f"{outside:.0%} outside of the stage", max(each.peak_rss for each in commands)
    if examples in OUTSIDE:
        part = mark(part, f"≤ {OUTSIDE[examples]:.0%}", outside <= OUTSIDE[examples])
    times = [each.official.seconds / each.command.seconds for each in rounds if each.official]
    whole = [
        str(examples), f"featcal, whole command: {part}", f"{median(each.seconds for each in commands):.1f} s",
        _describe_times(times, COMMAND_FASTER.get(examples)), "", _mark_memory(rss, examples),
        gib(max(each.peak_anonymous for each in commands)),
        gigabytes(commands[0].printed["cost"]["expert_bytes_read"]), "",
    ]  # fmt: skip
    if not theirs:
        return [row, whole]
    apart = _compare(*(_open(folder / name) for name in ("ours", "official", "merged")))
    if not apart < SAME:
        raise SystemExit(f"{examples} examples: the official code's updates differ by {apart:.1e}: not the same job")
    memory = [gib(max(each.peak_rss for each in theirs)), gib(max(each.peak_anonymous for each in theirs))]
    return [row, [
        str(examples), f"official, stage (its updates differ by {apart:.0e})",
        f"{median(each.printed['seconds'] for each in theirs):.1f} s", "1", "", *memory, "", _describe_gpu(theirs),
    ], whole, [
        str(examples), "official, whole process", f"{median(each.seconds for each in theirs):.1f} s", "1", "", *memory,
        "", "",
    ]]  # fmt: skip


def _mark_memory(rss: int, examples: int) -> str:
    bar = CLIP_RSS.get(examples)
    return mark(gib(rss), f"≤ {gib(bar)}", rss <= bar) if bar else gib(rss)


def _describe_times(times: list[float], wanted: float | None) -> str:
    """How many times faster, with the bar."""
    if not times:
        return ""
    text = f"{median(times):.2f} ({min(times):.2f} … {max(times):.2f})"
    return mark(text, f"≥ {wanted}", median(times) >= wanted) if wanted else text


def _describe_speed(asked: Asked, examples: int, rounds: list[Round]) -> list[str]:
    """Time, times faster than the official code, and share of the GEMM peak, with their bars."""
    seconds = [each.ours.printed["seconds"] for each in rounds]
    shares = [count_operations(examples) / own / each.peak for own, each in zip(seconds, rounds, strict=True)]
    found = [each.official.printed["seconds"] / own for own, each in zip(seconds, rounds, strict=True) if each.official]
    time = f"{median(seconds):.1f} s"
    share = f"{median(shares):.0%} of {median(each.peak for each in rounds) / 1e9:.0f} GFLOP/s"
    wanted = FASTER.get(examples)
    if asked.device.type == "cuda":
        wanted = GPU_FASTER if examples == GPU_EXAMPLES else None
        if examples == GPU_EXAMPLES:
            time = mark(time, f"≤ {GPU_SECONDS:.0f} s", median(seconds) <= GPU_SECONDS)
    else:
        share = mark(share, f"≥ {SHARE:.0%}", median(shares) >= SHARE)
    return [time, _describe_times(found, wanted), share]


def _describe_gpu(jobs: list[Measured]) -> str:
    """Peak memory there; empty where there is none."""
    peak = max(each.printed["device_bytes"] for each in jobs)
    return gib(peak) if peak else ""


def _needed_bytes(folder: Path) -> int:
    """Of the experts' blocks and stems: all that these towers hold but the last norm."""
    experts = (_open(folder / "experts" / task) for task in tasks_of(folder))
    needed = (x for expert in experts for name, x in expert.items() if not name.startswith("post_layernorm"))
    return sum(x.numel() * x.element_size() for x in needed)


def _compare(ours: Tensors, official: Tensors, merged: Tensors) -> float:
    """How far two results are apart, over how far the official one is from merged; Frobenius, all blocks together."""
    apart = sum(float((ours[name] - x).double().pow(2).sum()) for name, x in official.items())
    moved = sum(float((merged[name] - x).double().pow(2).sum()) for name, x in official.items())
    return float((apart / moved) ** 0.5)


def _open(folder: Path) -> Tensors:
    """What the files in a folder hold, by the name that transformers 5 has for it."""
    return {
        name.removeprefix(PREFIX): x
        for file in sorted(folder.glob("*.safetensors"))
        for name, x in load_file(file).items()
    }


def measure_default(asked: Asked, folder: Path) -> Section:
    """Rows: a number of examples."""
    make_clip(folder, layers=CLIP_LAYERS, tasks=CLIP_TASKS, examples=DEFAULT_EXAMPLES, distinct=CLIP_TASKS)
    home = ["--device", str(asked.device), "--output", "out", "--overwrite"]
    rows = []
    for examples in DEFAULT_EXAMPLES:
        runs: list[tuple[Measured, Measured]] = []
        for _ in range(asked.rounds):
            read_files(folder)
            default = run_command(folder, examples, *home)
            read_files(folder)
            runs.append((default, run_command(folder, examples, *home, "--method", "paper")))
        times = [default.seconds / paper.seconds for default, paper in runs]
        text = f"{median(times):.2f} ({min(times):.2f} … {max(times):.2f})"
        seconds = [f"{median(run[at].seconds for run in runs):.0f} s" for at in (0, 1)]
        memory = [gib(max(run[at].peak_rss for run in runs)) for at in (0, 1)]
        share = mark(text, f"≤ {DEFAULT_TIMES}", median(times) <= DEFAULT_TIMES)
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
    """Rows: a number of experts."""
    rows: list[list[str]] = []
    first = fewest = 0.0
    for tasks in EXPERTS:
        with tempfile.TemporaryDirectory(dir=folder) as home:
            family, counts = Path(home), [EXPERT_EXAMPLES]
            make_clip(family, layers=EXPERT_LAYERS, tasks=tasks, examples=counts, distinct=DISTINCT)
            found = [run_stage(asked, family, EXPERT_EXAMPLES) for _ in range(asked.rounds)]
        seconds = median(run.printed["seconds"] for run in found)
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
        f"The calibration stage, as above; median time and largest memory of {asked.rounds} processes. Features are "
        "those of student and expert before one block (examples × tokens × width, float32). Experts after the first "
        f"{DISTINCT} are hard links to those, opened as models of their own. The examples' pixels are memory too: "
        f"{EXPERT_EXAMPLES * 3 * 224 * 224 * 4 / 2**20:.0f} MiB an expert.",
        ["experts", "time", "an expert", "peak anonymous", "features", "beyond them", "growth"],
        rows,
    )
