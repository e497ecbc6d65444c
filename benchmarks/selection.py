"""How near featcal's own settings, and the paper's, come to the best of a grid, and what the two methods cost.

    python benchmarks/selection.py FOLDER [-n EXAMPLES] [--draws COUNT] [--default λ α]

FOLDER is a family (see family_*.py). The grid, in both metrics, is calibrated without the guard; the two
methods are whole runs of `featcal_cli.calibrate`; for some choices of the examples. Test rows and labels are read by
the judges only, after everything is chosen. `--default` judges another default than featcal's, such
as the one that the other families choose (left_out.py). Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from experiments import SEEDS, Gain
from judge import load_model
from lab import Lab, Scores, gain, recipe_of

from featcal_cli import calibrate
from featcal_cli.calibration.hyperparameters import FEATCAL, Hyperparameters
from featcal_cli.reporting.report import Report

RIDGES, ALPHAS = (1e-5, 1e-4, 1e-3, 0.05), (0.3, 0.5, 0.8)
GRID = [
    Hyperparameters(ridge, 1.0, alpha, metric, order="module")
    for metric, ridge, alpha in itertools.product(("output", "features"), RIDGES, ALPHAS)
]
METHODS = ("paper", "featcal")


def run_grid(lab: Lab, fitted: int) -> dict[Hyperparameters, Scores]:
    """The scores of every setting of the grid."""
    named = {str(settings): settings for settings in GRID}
    with tempfile.TemporaryDirectory() as folder:
        job = lab.calibrate(named, fitted, gradients=Path(folder))
    return {settings: lab.score(job.students[name].model.module) for name, settings in named.items()}


def run_command(lab: Lab, examples: int, method: str, seed: int) -> tuple[float, Report, Scores]:
    """Seconds, report and scores of one whole run."""
    draft = recipe_of(lab.folder)
    calibration = draft.calibration.model_copy(update={"examples": examples, "method": method, "seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = calibrate(draft.model_copy(update={"calibration": calibration}), output=Path(folder) / "out")
        return time.perf_counter() - started, done.report, lab.score(load_model(done.output))


def main() -> None:
    """Print the figures of one family."""
    parser = argparse.ArgumentParser(description="How near the two methods come to the best of a grid.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    parser.add_argument("--draws", type=int, default=len(SEEDS), help="choices of the examples, 3 if not given")
    parser.add_argument("--default", type=float, nargs=2, metavar=("λ", "α"), help="instead of featcal's")
    given = parser.parse_args()
    if given.default:
        FEATCAL["module"] = replace(FEATCAL["module"], ridge=given.default[0], alpha=given.default[1])
    gains: dict[str, list[Gain]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    chosen: dict[str, list[str]] = defaultdict(list)
    for seed in range(1, given.draws + 1):
        lab = Lab(given.folder, given.examples, seed)
        merged = lab.score(lab.models.merged.module)
        for method in METHODS:
            took, report, scores = run_command(lab, given.examples, method, seed)
            seconds[method].append(took)
            gains[method].append(gain(scores, merged))
            names = ("ridge", "rho", "alpha", "metric", "order")
            chosen[method].append(str(Hyperparameters(**{name: report.settings[name] for name in names})))
        for settings, scores in run_grid(lab, given.examples).items():
            gains[str(settings)].append(gain(scores, merged))
    means = {name: (fmean(mean for mean, _ in each), fmean(worst for _, worst in each)) for name, each in gains.items()}
    best = max(mean for name, (mean, _) in means.items() if name not in METHODS)
    print(f"**{lab.family.name}**, {given.examples} examples a task, {given.draws} draws\n")
    print("| settings | mean gain | ± | of the best of the grid | worst task | time |\n|---|---|---|---|---|---|")
    least = fmean(seconds["paper"])
    for name, (mean, worst) in sorted(means.items(), key=lambda item: (item[0] not in METHODS, -item[1][0])):
        time_taken = f"{fmean(seconds[name]) / least:.2f} ×" if name in METHODS else ""
        error = stdev([of_draw for of_draw, _ in gains[name]]) / given.draws**0.5
        print(f"| {name} | {mean:+.3g} | {error:.2g} | {100 * mean / best:.1f} % | {worst:+.3g} | {time_taken} |")
    for method, choices in chosen.items():
        print(f"\n`{method}` took {'; '.join(dict.fromkeys(choices))}.", flush=True)


if __name__ == "__main__":
    main()
