"""What calibration gains on trained families: the default beside the paper's method, each as a user runs it.

    OMP_NUM_THREADS=1 python benchmarks/gains.py FOLDER... [-n EXAMPLES] [--seeds 0 1 2] [--featcal COMMAND...]

A FOLDER is a family (see family_*.py). Every figure is the mean over the seeds, which choose the examples, on the
family's test rows; a classifier's is measured under the experts' own heads. `--featcal` names the commands to compare,
for a change before and after; by default it is the one of this environment. Prints Markdown, a row as soon as it is
measured.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev

from judge import Family, evaluate, read_family

METHODS = ("paper", "featcal")


def calibrate(featcal: str, folder: Path, family: Family, output: Path, options: list[str]) -> float:
    """Calibrate the family's merged model by the command line, and return the seconds it took."""
    line = [featcal, "calibrate", str(folder / "merged"), "--base", str(folder / "base"), "-o", str(output), "--quiet"]
    for task in family.tasks:
        rows = next((folder / "data" / task).glob("train.*"))
        line += ["--expert", f"{task}={folder / 'experts' / task}", "--data", f"{task}={rows}"]
    started = time.perf_counter()
    subprocess.run([*line, *options], check=True)
    return time.perf_counter() - started


def gains(family: Family, scores: dict[str, float]) -> list[float]:
    """How much better than the merged model a model is on each task: points of accuracy, or nats a token."""
    sign = 1 if family.higher_is_better else -1
    return [sign * (scores[task] - family.scores["merged"][task]) for task in family.tasks]


def lost(family: Family) -> float:
    """How much worse than the experts the merged model is, on average over the tasks."""
    return fmean(gains(family, family.scores["experts"]))


def measure(featcal: str, folder: Path, method: str, examples: int, seeds: list[int]) -> str:
    """One row of the table."""
    family = read_family(folder)
    means, worst, seconds = [], [], []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as room:
            output = Path(room) / "calibrated"
            options = ["-n", str(examples), "--seed", str(seed), "--method", method, "--device", "cpu"]
            seconds.append(calibrate(featcal, folder, family, output, options))
            found = gains(family, evaluate(folder, output))
        means.append(fmean(found))
        worst.append(min(found))
    digits = 2 if family.higher_is_better else 4
    spread = stdev(means) if len(means) > 1 else 0.0
    share = 100 * fmean(means) / lost(family)
    columns = [
        family.name,
        method,
        f"{lost(family):.{digits}f}",
        f"{fmean(means):+.{digits}f} ± {spread:.{digits}f}",
        f"{share:.0f} %",
        f"{fmean(worst):+.{digits}f}",
        f"{fmean(seconds):.0f} s",
    ]
    return "| " + " | ".join(columns) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--featcal", nargs="+", default=["featcal"])
    given = parser.parse_args()
    for featcal in given.featcal:
        print(f"\n`{featcal}`, {given.examples} examples a task\n")
        print("| family | method | lost by merging | gain | of what was lost | worst task | time |")
        print("|---|---|---|---|---|---|---|")
        for folder in given.folders:
            for method in METHODS:
                print(measure(featcal, folder.resolve(), method, given.examples, given.seeds), flush=True)


if __name__ == "__main__":
    main()
