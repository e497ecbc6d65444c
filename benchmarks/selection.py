"""How near `--select auto` comes to the best settings of a grid, and what it costs.

    python benchmarks/selection.py FOLDER [-n EXAMPLES] [--rounds N]

FOLDER is a family (see benchmarks/family_*.py). The grid is calibrated without the guard, on all examples; `auto` and
`preset` are whole runs of `featcal_cli.calibrate`, in turns, of which the fastest counts. Test rows and labels are
read by the judges only, after everything is chosen. Prints Markdown for docs/experiments.md.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from judge import load_model
from lab import Lab, Scores, gain, recipe_of

from featcal_cli import calibrate
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.reporting.report import Report

RIDGES, RHOS, ALPHAS = (1e-5, 1e-3, 0.05, 0.5), (0.5, 1.0, 2.0), (0.15, 0.3, 0.6, 1.0)


def run_grid(lab: Lab, fitted: int) -> dict[Hyperparameters, Scores]:
    """The scores of every setting of the grid; a few at a time, because each holds weights of its own."""
    grid = [Hyperparameters(*point) for point in itertools.product(RIDGES, RHOS, ALPHAS)]
    found: dict[Hyperparameters, Scores] = {}
    for start in range(0, len(grid), 12):
        named = {str(settings): settings for settings in grid[start : start + 12]}
        job = lab.calibrate(named, fitted)
        found |= {settings: lab.score(job.students[name].model.module) for name, settings in named.items()}
    return found


def run_command(lab: Lab, examples: int, select: str) -> tuple[float, Report, Scores]:
    """Seconds, report and scores of one whole run."""
    draft = recipe_of(lab.folder)
    calibration = draft.calibration.model_copy(update={"examples": examples, "select": select})
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = calibrate(draft.model_copy(update={"calibration": calibration}), output=Path(folder) / "out")
        return time.perf_counter() - started, done.report, lab.score(load_model(done.output))


def main() -> None:
    """Print the figures of one family."""
    parser = argparse.ArgumentParser(description="How near --select auto comes to the best of a grid.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    lab = Lab(given.folder, given.examples)
    merged = lab.score(lab.models.merged.module)
    seconds: dict[str, list[float]] = {"preset": [], "auto": []}
    for _, select in itertools.product(range(given.rounds), seconds):
        took, report, scores = run_command(lab, given.examples, select)
        seconds[select].append(took)
        if select == "preset":
            preset = scores
    chosen = report.settings
    grid = {settings: gain(found, merged) for settings, found in run_grid(lab, given.examples).items()}
    order = sorted(grid, key=lambda settings: grid[settings], reverse=True)
    best, auto = grid[order[0]][0], gain(scores, merged)
    ratio = min(seconds["auto"]) / min(seconds["preset"])
    print(f"### {lab.family.name}: {len(merged)} tasks, {given.examples} examples a task\n")
    print("| settings | mean gain | of the best | worst task |\n|---|---|---|---|")
    rows = [("auto: λ {ridge:g}, ρ {rho:g}, α {alpha:g}".format(**chosen), auto), ("preset", gain(preset, merged))]
    rows += [(f"grid: λ {s.ridge:g}, ρ {s.rho:g}, α {s.alpha:g}", grid[s]) for s in (*order[:3], *order[-2:])]
    for name, (mean, worst) in rows:
        print(f"| {name} | {mean:+.3g} | {100 * mean / best:.0f} % | {worst:+.3g} |")
    print(f"\nWhole runs: preset {min(seconds['preset']):.1f} s, auto {ratio:.2f} times as long.")


if __name__ == "__main__":
    main()
