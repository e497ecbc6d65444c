"""What it gains to calibrate the experts of a mixture, beside the rest of its blocks alone.

    python benchmarks/mixtures.py FOLDER [-n EXAMPLES]

FOLDER is a family whose models are mixtures (family_mixtures.py). It is calibrated at featcal's settings, with and
without the matrices of the mixtures' experts, for three choices of the examples (SEEDS), without the guard.
Prints Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

from experiments import SEEDS
from lab import Lab, gain

from featcal_cli.calibration.hyperparameters import FEATCAL
from featcal_cli.models.architecture import Architecture

LOOKED_AT = {"all but the mixtures' experts": (False,), "all": (False, True), "the mixtures' experts": (True,)}
"""By name: which modules are calibrated, of those that are of a mixture's experts and those that are not."""


def restrict(architecture: Architecture, wanted: tuple[bool, ...]) -> Architecture:
    """The same with only those modules whose `is_routed` is wanted."""
    modules = {block.name: tuple(x for x in block.modules if x.is_routed in wanted) for block in architecture.blocks}
    return replace(architecture, blocks=tuple(replace(x, modules=modules[x.name]) for x in architecture.blocks))


def main() -> None:
    """Measure one family."""
    parser = argparse.ArgumentParser(description="A mixture's experts calibrated, and left as merged.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    given = parser.parse_args()
    gains: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOKED_AT}
    for seed in SEEDS:
        lab = Lab(given.folder, given.examples, seed)
        whole, merged = lab.architecture, lab.score(lab.models.merged.module)
        for name, wanted in LOOKED_AT.items():
            lab.architecture = restrict(whole, wanted)
            with TemporaryDirectory() as folder:
                job = lab.calibrate({name: FEATCAL["module"]}, given.examples, gradients=Path(folder))
            gains[name].append(gain(lab.score(job.students[name].model.module), merged))
            job.retire()
    scores = lab.family.scores
    gap = fmean(scores["experts"].values()) - fmean(scores["merged"].values())
    print(f"\n**{lab.family.name}** (gap {gap:.2f})\n")
    print("| calibrated | gain | share of the gap | worst task |\n|---|---|---|---|")
    for name, of_seeds in gains.items():
        means, worst = zip(*of_seeds, strict=True)
        share = f"{100 * fmean(means) / gap:.0f} %"
        print(f"| {name} | {fmean(means):+.2f} ± {stdev(means):.2f} | {share} | {fmean(worst):+.2f} |")


if __name__ == "__main__":
    main()
