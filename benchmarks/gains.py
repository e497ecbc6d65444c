"""What calibration gains on trained families: the default beside the paper's method and a plain distillation.

    OMP_NUM_THREADS=1 python benchmarks/gains.py FOLDER... [-n 64] [--seeds 0 1 2] [--methods NAME...] [--featcal ...]

A FOLDER is a family (see family_*.py). Every figure is the mean over the seeds, which choose the examples, on the
family's test rows; a classifier's is measured under the experts' own heads. `--featcal` names the commands to compare;
by default it is the one of this environment. Prints Markdown, a row as soon as it is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev

import torch
from judge import Family, body_of, decode_row, evaluate, load_model, make_judge, read_family
from torch.func import functional_call
from torch.nn.functional import kl_div

from featcal_cli.data.rows import draw_rows
from featcal_cli.recipe.schema import Data

METHODS = ("paper", "featcal", "distillation")
DISTILLED = {"classification": (90, 1e-4, 16), "causal": (200, 1e-3, 8), "seq2seq": (200, 1e-3, 8)}
"""Of the distillation: steps, peak learning rate, and rows of each task in a step."""


def calibrate(featcal: str, folder: Path, family: Family, output: Path, options: list[str]) -> float:
    """Calibrate the family's merged model by the command line, and return the seconds it took."""
    line = [featcal, "calibrate", str(folder / "merged"), "--base", str(folder / "base"), "-o", str(output), "--quiet"]
    for task in family.tasks:
        rows = next((folder / "data" / task).glob("train.*"))
        line += ["--expert", f"{task}={folder / 'experts' / task}", "--data", f"{task}={rows}"]
    started = time.perf_counter()
    subprocess.run([*line, *options], check=True)
    return time.perf_counter() - started


def distil(folder: Path, family: Family, output: Path, examples: int, seed: int) -> float:
    """Fit all weights to the experts' probabilities by AdamW (one cycle, no decay), on the rows that featcal draws:
    what anybody would do instead. Returns the seconds it took."""
    started, (steps, peak, size) = time.perf_counter(), DISTILLED[family.kind]
    model, judges = load_model(folder / "merged"), []
    weights = dict(body_of(model, family.kind).named_parameters())
    for task in family.tasks:
        file = next((folder / "data" / task).glob("train.*"))
        drawn = islice(draw_rows(Data(path=str(file)), examples, seed, lambda _: None), examples)
        judges.append(make_judge(folder, family, task, [decode_row(row) for row in drawn], size))
    optimizer = torch.optim.AdamW(weights.values(), peak, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    for step in range(steps):
        for judge in judges:
            batch = judge.batches[step % len(judge.batches)]
            prefix = f"{judge.expert.base_model_prefix}." if family.kind == "classification" else ""
            with torch.no_grad():
                wanted = judge.expert(**batch).logits.log_softmax(-1)
            own = {prefix + name: weight for name, weight in weights.items()}
            given = functional_call(judge.expert, own, kwargs=batch).logits.log_softmax(-1)
            kl_div(given, wanted, log_target=True, reduction="none").sum(-1)[batch["labels"] != -100].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(output)
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
            if method == "distillation":
                seconds.append(distil(folder, family, output, examples, seed))
            else:
                options = ["-n", str(examples), "--seed", str(seed), "--method", method, "--device", "cpu"]
                seconds.append(calibrate(featcal, folder, family, output, options))
            found = gains(family, evaluate(folder, output))
        means.append(fmean(found))
        worst.append(min(found))
    digits = 2 if family.higher_is_better else 4
    spread = stdev(means) if len(means) > 1 else 0.0
    share = 100 * fmean(means) / lost(family)
    gain = f"{fmean(means):+.{digits}f} ± {spread:.{digits}f}"
    shares = [gain, f"{share:.0f} %", f"{fmean(worst):+.{digits}f}", f"{fmean(seconds):.0f} s"]
    columns = [family.name, method, f"{lost(family):.{digits}f}", *shares]
    return "| " + " | ".join(columns) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--featcal", nargs="+", default=["featcal"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    given = parser.parse_args()
    for featcal in given.featcal:
        print(f"\n`{featcal}`, {given.examples} examples a task\n")
        print("| family | method | lost by merging | gain | of what was lost | worst task | time |")
        print("|---|---|---|---|---|---|---|")
        for folder in given.folders:
            for method in given.methods:
                print(measure(featcal, folder.resolve(), method, given.examples, given.seeds), flush=True)


if __name__ == "__main__":
    main()
