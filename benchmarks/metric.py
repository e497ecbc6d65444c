"""The paper's way, errors measured by what they do to answers, module by module, and both, on a family's test rows.

    python benchmarks/metric.py FOLDER [-n EXAMPLES]

FOLDER is a family (see family_*.py). At every one of GRID it is calibrated in each of WAYS, for three choices of the
examples (SEEDS), without the guard. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

from experiments import SEEDS, TRIED, Gain, show
from lab import Lab, Scores, gain

from featcal_cli.calibration.hyperparameters import FEATCAL, Hyperparameters

DEFAULT = replace(FEATCAL["module"], metric="features", order="block")
GRID = (*TRIED, Hyperparameters(1e-3, 1.0, 0.15), DEFAULT, Hyperparameters(1e-4, 1.0, 0.8))
WAYS = {
    "the paper's": ("features", "block"),
    "output": ("output", "block"),
    "modules": ("features", "module"),
    "both": ("output", "module"),
}
"""Metric and order."""


def calibrate(lab: Lab, way: str, examples: int, folder: Path) -> tuple[dict[Hyperparameters, Scores], float]:
    """What all of GRID make of the test rows, and the seconds that calibrating took."""
    started = time.perf_counter()
    metric, order = WAYS[way]
    roles = {str(settings): replace(settings, metric=metric, order=order) for settings in GRID}
    job = lab.calibrate(roles, examples, gradients=folder if metric == "output" else None)
    seconds = time.perf_counter() - started
    scores = {settings: lab.score(job.students[str(settings)].model.module) for settings in GRID}
    job.retire()
    return scores, seconds


def print_table(lab: Lab, gains: dict[tuple[str, Hyperparameters], list[Gain]], times: Sequence[float]) -> None:
    """Mean gain, its standard deviation, share of the gap, and worst task."""
    sign, scores = 1 if lab.family.higher_is_better else -1, lab.family.scores
    gap = sign * (fmean(scores["experts"].values()) - fmean(scores["merged"].values()))
    digits = 2 if lab.family.higher_is_better else 4
    print(f"\n**{lab.family.name}** (gap {gap:.{digits}f}; both cost {fmean(times):.1f} times the paper's way)\n")
    print(f"| | {' | | '.join(WAYS)} | |\n|---|{'---|---|' * len(WAYS)}")
    for settings in GRID:
        cells = []
        for way in WAYS:
            means, worst = zip(*gains[way, settings], strict=True)
            share = f"{100 * fmean(means) / gap:.0f} %"
            cells.append(
                f"{fmean(means):+.{digits}f} ± {stdev(means):.{digits}f} ({share}) | {fmean(worst):+.{digits}f}"
            )
        print(f"| {show(settings)} | {' | '.join(cells)} |")
    best = {way: max(fmean(one for one, _ in gains[way, settings]) for settings in GRID) for way in WAYS}
    default, paper = fmean(one for one, _ in gains["both", DEFAULT]), best["the paper's"]
    print("\nBest: " + ", ".join(f"{way} {most:+.{digits}f} ({most / paper:.2f} times)" for way, most in best.items()))
    of_best = 100 * default / max(best.values())
    print(f"{show(DEFAULT)}, both: {of_best:.0f} % of the best, {default / paper:.2f} times the paper's.", flush=True)


def main() -> None:
    """Measure one family."""
    parser = argparse.ArgumentParser(description="Metrics and orders beside the paper's.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    given = parser.parse_args()
    gains: dict[tuple[str, Hyperparameters], list[Gain]] = defaultdict(list)
    times = []
    for seed in SEEDS:
        lab = Lab(given.folder, given.examples, seed)
        merged = lab.score(lab.models.merged.module)
        spent = {}
        for way in WAYS:
            with TemporaryDirectory() as folder:
                scores, spent[way] = calibrate(lab, way, given.examples, Path(folder))
            for settings, of_tasks in scores.items():
                gains[way, settings].append(gain(of_tasks, merged))
        times.append(spent["both"] / spent["the paper's"])
    print_table(lab, gains, times)


if __name__ == "__main__":
    main()
