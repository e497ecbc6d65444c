"""Errors measured by what they do to answers, beside the paper's way, on one family's test rows.

    python benchmarks/metric.py FOLDER [-n EXAMPLES]

FOLDER is a family (see family_*.py). At every one of GRID the blocks are calibrated with the paper's metric and with
that of the outputs, for three choices of the examples (SEEDS), without the guard. Prints Markdown for
docs/experiments.md.
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

GRID = (*TRIED, Hyperparameters(1e-3, 1.0, 0.15))
METRICS = ("features", "output")
DEFAULT = replace(FEATCAL, metric="features")
"""As it stands in GRID."""


def calibrate(lab: Lab, metric: str, examples: int, folder: Path) -> tuple[dict[Hyperparameters, Scores], float]:
    """What all of GRID make of the test rows, and the seconds that calibrating took."""
    started = time.perf_counter()
    roles = {str(settings): replace(settings, metric=metric) for settings in GRID}
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
    print(f"\n**{lab.family.name}** (gap {gap:.{digits}f}; cost {fmean(times):.1f} times the paper's)\n")
    print(f"| | {' | | '.join(METRICS)} | |\n|---|---|---|---|---|")
    for settings in GRID:
        cells = []
        for metric in METRICS:
            means, worst = zip(*gains[metric, settings], strict=True)
            share = f"{100 * fmean(means) / gap:.0f} %"
            cells.append(
                f"{fmean(means):+.{digits}f} ± {stdev(means):.{digits}f} ({share}) | {fmean(worst):+.{digits}f}"
            )
        print(f"| {show(settings)} | {' | '.join(cells)} |")
    best = [max(fmean(one for one, _ in gains[metric, settings]) for settings in GRID) for metric in METRICS]
    default = fmean(one for one, _ in gains["output", DEFAULT])
    print(f"\nBest: {best[0]:+.{digits}f} and {best[1]:+.{digits}f}, {best[1] / best[0]:.2f} times.")
    print(f"{show(DEFAULT)} by outputs: {100 * default / max(best):.0f} % of the best.", flush=True)


def main() -> None:
    """Measure one family."""
    parser = argparse.ArgumentParser(description="The metric of the outputs beside the paper's.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    given = parser.parse_args()
    gains: dict[tuple[str, Hyperparameters], list[Gain]] = defaultdict(list)
    times = []
    for seed in SEEDS:
        lab = Lab(given.folder, given.examples, seed)
        merged = lab.score(lab.models.merged.module)
        spent = {}
        for metric in METRICS:
            with TemporaryDirectory() as folder:
                scores, spent[metric] = calibrate(lab, metric, given.examples, Path(folder))
            for settings, of_tasks in scores.items():
                gains[metric, settings].append(gain(of_tasks, merged))
        times.append(spent["output"] / spent["features"])
    print_table(lab, gains, times)


if __name__ == "__main__":
    main()
