"""Ideas beyond the paper, and other methods, next to the paper's way on the same examples of one family.

    python benchmarks/experiments.py FOLDER [-n EXAMPLES] [--curve]

FOLDER is a family (see family_*.py). Every figure is the mean over three choices of the examples (SEEDS) on the
family's test rows; the settings that ideas are tried at are those at which the paper's way is best on these rows, so
gains are comparable with each other but flatter all of them alike. `--curve` adds what the best settings make of 8 to
512 examples. Prints Markdown, a table as soon as it is measured.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any, ClassVar

import torch
from lab import Lab, Scores, gain
from plain import PlainSystem
from torch import Tensor
from yardsticks import ProbSurgery, merge_by_regression, operate

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.solver import DeviceSolution, precise, relative_change
from featcal_cli.models.module_kinds import Affine

SEEDS = (1, 2, 3)
TRIED = tuple(
    Hyperparameters(*point)
    for point in (
        *((0.05, 2.0, 0.3), (1e-5, 2.0, 0.6), (1e-5, 0.5, 0.15)),  # the paper's, but for its largest λ
        *((1e-3, 1.0, 0.3), (1e-3, 1.0, 0.6), (0.5, 2.0, 0.6), (1e-5, 1.0, 1.0)),
    )
)
IDEAS_AT = 2
"""So many of them, the best, are what ideas are tried at."""
LOW, HIGH = 0.15, 0.6
"""α of the first and the last block where it grows with depth."""
SIZES = (8, 16, 32, 64, 128, 256, 512)
Gain = tuple[float, float]
"""Over merged: on average, and of the task that gains least."""


class Together(PlainSystem):
    """Weight and bias solved as one: a 1 is appended to the input, and λ holds the bias as it holds the weight."""

    def __init__(self, merged: Mapping[str, Affine], settings: Hyperparameters, *, with_bias: bool = False) -> None:
        with_bias = with_bias or all(each.bias is not None for each in merged.values())
        super().__init__(merged, settings, with_bias=with_bias)

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, DeviceSolution]:
        if any(merged.bias is None for merged in self._merged.values()):
            return super().solve(base, bias=bias)
        ridge, rho, corner = self._settings.ridge, self._settings.rho, self._omega.view(1)
        system = torch.cat([torch.cat([self._gram, self._mean[None]]), torch.cat([self._mean, corner])[:, None]], 1)
        factor = torch.linalg.cholesky(system + (ridge + EPSILON) * torch.eye(len(system), dtype=system.dtype))
        solutions = {}
        for name, merged in self._merged.items():
            start, anchor = _augment(merged), _augment(precise(base[name]))
            pull = torch.cat([self._pull[name], self._bias_pull[name][:, None]], 1)
            new = start + torch.cholesky_solve((pull + ridge * (1 - rho) * (anchor - start)).T, factor).T
            found = Affine(new[:, :-1], new[:, -1])
            solutions[name] = DeviceSolution(found, relative_change(merged, found))
        return solutions


def _augment(parameters: Affine) -> Tensor:
    """[W, b], [d_out, d_in + 1]."""
    assert parameters.bias is not None
    return torch.cat([parameters.weight, parameters.bias[:, None]], 1)


class BySpectrum(PlainSystem):
    """λ in units of the mean eigenvalue of Σ ω_i G_i, which differs from module to module."""

    times: ClassVar[float] = 1.0
    seen: ClassVar[list[float]] = []
    """Mean eigenvalues of the modules solved so far."""

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, DeviceSolution]:
        mean = float(self._gram.trace()) / len(self._gram)
        self.seen.append(mean)
        self._settings = replace(self._settings, ridge=self.times * self._settings.ridge * mean)
        return super().solve(base, bias=bias)


class BySpectrumAsLarge(BySpectrum):
    """The same in other units: on average over the modules it is the λ that is given."""


class Reweighted(PlainSystem):
    """Task weights other than 1/‖G‖_F, in units that leave the trace of Σ ω_i G_i as it was: λ means the same."""

    def __init__(self, merged: Mapping[str, Affine], settings: Hyperparameters, *, with_bias: bool = False) -> None:
        super().__init__(merged, settings, with_bias=with_bias)
        self._usual_trace = 0.0

    def add_task(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor | None = None) -> Tensor:
        self._usual_trace += float(super().weigh(moments) * moments.gram.trace())
        return super().add_task(moments, experts, omega)

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, DeviceSolution]:
        ridge = self._settings.ridge * float(self._gram.trace()) / self._usual_trace
        self._settings = replace(self._settings, ridge=ridge)
        return super().solve(base, bias=bias)


class ByTrace(Reweighted):
    """1/trace G."""

    def weigh(self, moments: LinearMoments) -> Tensor:
        return moments.gram.trace().clamp_min(EPSILON).reciprocal()


class Equal(Reweighted):
    """1: a task with larger features counts more."""

    def weigh(self, moments: LinearMoments) -> Tensor:
        return torch.ones_like(moments.size)


class ByDrift(Reweighted):
    """More for the task whose input has drifted farther, in relation to its size."""

    def weigh(self, moments: LinearMoments) -> Tensor:
        size = moments.size.clamp_min(EPSILON)
        drift: Tensor = torch.linalg.matrix_norm(moments.drift)
        return (drift / size + 0.05) / size


IDEAS: dict[str, type[PlainSystem]] = {
    "weight and bias together": Together,
    "λ × mean eigenvalue": BySpectrum,
    "the same, λ on average as given": BySpectrumAsLarge,
    "ω = 1/trace G": ByTrace,
    "ω equal": Equal,
    "ω = drift/‖G‖": ByDrift,
}
DEPTHS = {f"α {LOW} → {HIGH}": LOW, f"α {HIGH} → {LOW}": HIGH, f"α {(LOW + HIGH) / 2:g} throughout": (LOW + HIGH) / 2}
"""α of the first block; the last has LOW + HIGH less that."""


def change_with_depth(settings: Hyperparameters, depth: float) -> Hyperparameters:
    """The settings of a block at `depth`, 0 … 1."""
    return replace(settings, alpha=settings.alpha + depth * (LOW + HIGH - 2 * settings.alpha))


@dataclass
class Bench:
    """One family with several choices of its examples."""

    labs: list[Lab]
    merged: Scores
    gap: float
    """Experts − merged, on average."""
    examples: int

    def run(self, candidates: Mapping[str, Hyperparameters], **options: Any) -> dict[str, list[Gain]]:
        """Each candidate's gains, by choice of examples; options of Lab.calibrate."""
        found = defaultdict(list)
        for lab in self.labs:
            job = lab.calibrate(candidates, self.examples, **options)
            for name in candidates:
                found[name].append(gain(lab.score(job.students[name].model.module), self.merged))
        return found

    def print_row(self, name: str, found: list[Gain], usual: list[Gain] | None = None) -> None:
        """One row of a table; `usual` is what to compare it with."""
        mean, worst = (fmean(each) for each in zip(*found, strict=True))
        row = f"| {name} | {self.show(mean)} | {self.show(worst)} | {100 * mean / self.gap:.0f} % |"
        if usual is not None:
            more = [one[0] - other[0] for one, other in zip(found, usual, strict=True)]
            row += f" {self.show(fmean(more))} ± {self.show(stdev(more))[1:]} |"
        print(row, flush=True)

    def show(self, value: float) -> str:
        return f"{value:+.2f}" if self.labs[0].family.higher_is_better else f"{value:+.3f}"


def prepare(folder: Path, examples: int) -> Bench:
    """The family in a folder, once for every seed."""
    labs = [Lab(folder, examples, seed) for seed in SEEDS]
    first = labs[0]
    merged = first.score(first.models.merged.module)
    sign = 1 if first.family.higher_is_better else -1
    experts = {task: sign * score for task, score in first.family.scores["experts"].items()}
    return Bench(labs, merged, gain(experts, merged)[0], examples)


def show(settings: Hyperparameters) -> str:
    return f"λ {settings.ridge:g}, ρ {settings.rho:g}, α {settings.alpha:g}"


def print_head(title: str, *columns: str) -> None:
    names = ("mean gain", "worst task", "of the gap", *columns)
    print(f"\n#### {title}\n\n| | {' | '.join(names)} |\n|---|{'---|' * len(names)}", flush=True)


def try_settings(bench: Bench) -> dict[Hyperparameters, list[Gain]]:
    """The paper's way at all settings, without and with the guard."""
    named = {show(settings): settings for settings in TRIED}
    found, guarded = bench.run(named), bench.run(named, guarded=True)
    print_head("The paper's way, and with the guard", "more than without it")
    for name in named:
        bench.print_row(name, found[name])
        bench.print_row(f"{name}, guarded", guarded[name], found[name])
    return {settings: found[name] for name, settings in named.items()}


def try_ideas(bench: Bench, usual: Mapping[Hyperparameters, list[Gain]], best: list[Hyperparameters]) -> None:
    """Every idea at the best settings."""
    print_head("Ideas", "more than the paper's way")
    for settings in best:
        bench.print_row(f"**paper's way: {show(settings)}**", usual[settings])
        BySpectrum.seen.clear()
        bench.labs[0].calibrate({"": settings}, bench.examples, systems={"": BySpectrum})
        BySpectrumAsLarge.times = 1 / geometric_mean(BySpectrum.seen)
        found = bench.run(dict.fromkeys(IDEAS, settings), systems=IDEAS)
        if bench.labs[0].family.kind == "classification":
            found |= try_token_weights(bench, settings)
        starts = {name: replace(settings, alpha=start) for name, start in DEPTHS.items()}
        found |= bench.run(starts, at_depth=change_with_depth)
        for name, gains in found.items():
            bench.print_row(name, gains, usual[settings])


def try_token_weights(bench: Bench, settings: Hyperparameters) -> dict[str, list[Gain]]:
    """The weights of tokens in the last block that `auto` does not choose."""
    chosen = bench.labs[0].calibrate({"": settings}, 1).cls_blocks
    other = "uniform" if chosen else "cls"
    plans = [lab.plan for lab in bench.labs]
    for lab, plan in zip(bench.labs, plans, strict=True):
        calibration = plan.recipe.calibration.model_copy(update={"token_weights": other})
        lab.plan = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration}))
    found = bench.run({f"token weights {other}": settings})
    for lab, plan in zip(bench.labs, plans, strict=True):
        lab.plan = plan
    return found


def try_yardsticks(bench: Bench, usual: Mapping[Hyperparameters, list[Gain]], best: Hyperparameters) -> None:
    """Other methods on the same examples."""
    print_head("Yardsticks")
    bench.print_row("merged", [(0.0, 0.0)])

    def measure(score: Callable[[Lab], Scores]) -> list[Gain]:
        return [gain(score(lab), bench.merged) for lab in bench.labs]

    def operate_on_calibrated(lab: Lab) -> Scores:
        job = lab.calibrate({"": best}, bench.examples)
        return operate(lab, job.students[""].model.module, bench.examples)

    bench.print_row("RegMean", measure(lambda lab: lab.score(merge_by_regression(lab, bench.examples))))
    bench.print_row("Surgery", measure(lambda lab: operate(lab, lab.models.merged.module, bench.examples)))
    probable = measure(lambda lab: operate(lab, lab.models.merged.module, bench.examples, ProbSurgery))
    bench.print_row("ProbSurgery", probable)
    bench.print_row(f"FeatCal: {show(best)}", usual[best])
    bench.print_row("Surgery on top of that", measure(operate_on_calibrated))


def print_curve(folder: Path, bench: Bench, best: list[Hyperparameters]) -> None:
    """Mean gains over the number of examples, as far as the data goes: mean and standard deviation over SEEDS."""
    named = {show(settings): settings for settings in best}
    columns = [*named, "RegMean", "Surgery", "ProbSurgery"]
    print(f"\n#### Mean gain by examples a task\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    labs = [Lab(folder, SIZES[-1], seed) for seed in SEEDS]
    most = min(examples.fitted_count for examples in labs[0].plan.examples.values())
    for size in sorted({min(size, most) for size in SIZES}):
        found: dict[str, list[float]] = defaultdict(list)
        for lab in labs:
            job = lab.calibrate(named, size)
            scores = {name: lab.score(job.students[name].model.module) for name in named}
            scores["RegMean"] = lab.score(merge_by_regression(lab, size))
            scores["Surgery"] = operate(lab, lab.models.merged.module, size)
            scores["ProbSurgery"] = operate(lab, lab.models.merged.module, size, ProbSurgery)
            for name, score in scores.items():
                found[name].append(gain(score, bench.merged)[0])
        cells = [f"{bench.show(fmean(found[name]))} ± {bench.show(stdev(found[name]))[1:]}" for name in columns]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables of one family."""
    parser = argparse.ArgumentParser(description="Ideas and other methods next to the paper's way.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    parser.add_argument("--curve", action="store_true")
    given = parser.parse_args()
    bench = prepare(given.folder, given.examples)
    family = bench.labs[0].family
    print(f"### {family.name}: {len(bench.merged)} tasks, {given.examples} examples a task")
    usual = try_settings(bench)
    best = sorted(TRIED, key=lambda settings: fmean(each[0] for each in usual[settings]), reverse=True)[:IDEAS_AT]
    try_yardsticks(bench, usual, best[0])
    try_ideas(bench, usual, best)
    if given.curve:
        print_curve(given.folder, bench, best)


if __name__ == "__main__":
    main()
