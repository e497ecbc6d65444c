"""The closed forms solve what they say they solve, in whichever of the equal forms costs least; and so do the equations
in each task's own metric, and those of convolutions, which are linear maps of patches."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from featcal_cli.calibration import normal_equations, output_metric
from featcal_cli.calibration.grouped_equations import GroupedEquations, GroupedMoments
from featcal_cli.calibration.hyperparameters import FEATCAL, PAPER, Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON, Symmetric
from featcal_cli.calibration.moments import LinearMoments, Pair
from featcal_cli.calibration.normal_equations import is_residual_cheaper
from featcal_cli.calibration.output_metric import MOST_STEPS, SENSITIVITY, MetricEquations
from featcal_cli.calibration.solver import PRECISE_COST, DualEquations, LinearEquations, is_dual_cheaper
from featcal_cli.models.module_kinds import Affine, kind_of, new_parameters, read_parameters, read_patches, rows_shape
from featcal_cli.models.token_rows import Rows
from featcal_cli.runtime.errors import NumericsError

WAYS = ("drift", "residuals", "outputs", "rows")
"""By the drift of inputs; by what outputs lack of their targets, computed or with the expert's own output; all rows."""
SYSTEMS: dict[str, type[LinearEquations]] = {way: DualEquations if way == "rows" else LinearEquations for way in WAYS}


def draw(
    rows: int, d_in: int, d_out: int, *, weighted: bool = False, spread: float = 0.1, dtype: torch.dtype = torch.float32
) -> tuple[Affine, Affine, list[dict[str, Any]]]:
    """Merged, base, and three tasks' rows and experts: models near each other, and features too."""
    generator = torch.Generator().manual_seed(rows + d_in)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def near(other: Affine) -> Affine:
        return other.each(lambda x: x + spread * normal(*x.shape))

    merged, tasks = Affine(normal(d_out, d_in), normal(d_out)), []
    for _ in range(3):
        x_cal = normal(rows, d_in)
        weights = torch.rand(rows, generator=generator, dtype=dtype) + 0.1 if weighted else None
        x_exp = x_cal + spread * normal(rows, d_in)
        tasks.append({"x_cal": x_cal, "x_exp": x_exp, "weights": weights, "expert": near(merged)})
    return merged, near(merged), tasks


def sum_up(
    way: str,
    x_cal: Tensor,
    x_exp: Tensor,
    expert: Affine,
    merged: Affine,
    alpha: float,
    weights: Tensor | None = None,
    batches: int = 1,
) -> LinearMoments:
    """The moments of rows [T, d_in] for one module, called m."""
    pairs = None if way == "drift" else {"m": Pair(expert, merged.weight)}
    moments = LinearMoments(x_cal.shape[1], x_cal.device, alpha, pairs, keep_rows=way == "rows")
    outputs = {"m": linear(x_exp, expert.weight, expert.bias)} if way == "outputs" else {}
    size = -(-len(x_cal) // batches)
    for start in range(0, len(x_cal), size):
        rows = slice(start, start + size)
        known = {name: y[rows] for name, y in outputs.items()}
        moments.add(x_cal[rows], x_exp[rows], None if weights is None else weights[rows], known)
    return moments


def metric_of(gradients: Tensor) -> Tensor:
    """S [d, d] as it is defined."""
    m, d = gradients.T @ gradients, gradients.shape[1]
    rest = (1 - m.trace() / d) * torch.eye(d).double()
    return (1 - SENSITIVITY) * torch.eye(d).double() + SENSITIVITY * (m + rest)


def solve_plainly(
    merged: Affine, base: Affine, tasks: Sequence[Mapping[str, Any]], settings: Hyperparameters
) -> Affine:
    """W* and b* by one large dense system each, in float64: vec(S W G) = (S ⊗ G) vec(W) by rows. A task has x_cal,
    x_exp and expert, and may have weights of its rows, and gradients g, without which S is I."""
    ridge, rho = settings.ridge, settings.rho
    merged, base = merged.each(Tensor.double), base.each(Tensor.double)
    assert merged.bias is not None and base.bias is not None
    d_out, d_in = merged.weight.shape
    left = (ridge + EPSILON) * torch.eye(d_out * d_in).double()
    right = ridge * (1 - rho) * (base.weight - merged.weight)
    outer, parts = ridge * torch.eye(d_out).double(), []
    for task in tasks:
        x, expert = task["x_cal"].double(), task["expert"].each(Tensor.double)
        target = settings.alpha * task["x_exp"].double() + (1 - settings.alpha) * x
        weights = torch.ones(len(x)).double() if task.get("weights") is None else task["weights"].double()
        share = weights / weights.sum()
        gram, metric = x.T @ (share[:, None] * x), metric_of(task["g"]) if "g" in task else torch.eye(d_out).double()
        omega = 1 / gram.norm()
        lacking = linear(target, expert.weight) - linear(x, merged.weight)
        left = left + omega * torch.kron(metric, gram)
        right = right + omega * metric @ (lacking.T @ (share[:, None] * x))
        outer = outer + omega * metric
        parts.append((omega * metric, share @ lacking + expert.bias - merged.bias, share @ x))
    update = torch.linalg.solve(left, right.flatten()).view(d_out, d_in)
    pull = ridge * (1 - rho) * (base.bias - merged.bias) + sum(s @ (r - update @ mean) for s, r, mean in parts)
    return Affine(merged.weight + update, merged.bias + torch.linalg.solve(outer, pull))


def check_objective(
    system: LinearEquations, merged: Affine, new: Affine, tasks: Sequence[Mapping[str, Any]], alpha: float, rel: float
) -> None:
    """What a guard looks at is Σ ω E of squares in each task's metric over all rows, at every step from merged to new.
    A task may have an omega."""
    update, expected = new.minus(merged), dict.fromkeys((0.0, 0.25, 0.5, 1.0), 0.0)
    shift = torch.zeros(len(new.weight)).double() if update.bias is None else update.bias
    for task in tasks:
        x, expert = task["x_cal"], task["expert"]
        weights = torch.ones(len(x)).double() if task.get("weights") is None else task["weights"]
        share = weights / weights.sum()
        metric = metric_of(task["g"]) if "g" in task else torch.eye(len(new.weight)).double()
        omega = task.get("omega", 1 / (x.T @ (share[:, None] * x)).norm())
        target = linear(alpha * task["x_exp"] + (1 - alpha) * x, expert.weight, expert.bias)
        for t in expected:
            bias = None if merged.bias is None else merged.bias + t * shift
            error = linear(x, merged.weight + t * update.weight, bias) - target
            expected[t] += float(omega * (share * ((error @ metric) * error).sum(1)).sum())
    curvature, descent = map(float, system.objective("m", update.weight, shift))
    for t, value in expected.items():
        assert t * t * curvature - 2 * t * descent == pytest.approx(value - expected[0.0], rel=rel)


CPU = torch.device("cpu")
SHAPES = [(20, 12, 5), (20, 5, 12), (6, 40, 9), (70, 33, 33)]
"""Rows of a task, d_in and d_out."""


@pytest.mark.parametrize("settings", [PAPER["CLIP"], PAPER["Llama-3.1-8B"], Hyperparameters(0.05, 1.0, 1.0)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_are_equal(way: str, shape: tuple[int, int, int], weighted: bool, settings: Hyperparameters) -> None:
    merged, base, tasks = draw(*shape, weighted=weighted)
    system = SYSTEMS[way]({"m": merged}, settings)
    for task in tasks:
        moments = sum_up(way, **task, merged=merged, alpha=settings.alpha, batches=2)
        system.add_task(moments, {"m": task["expert"]})
    found, expected = system.solve({"m": base})["m"].parameters, solve_plainly(merged, base, tasks, settings)
    for ours, plain in zip(found, expected, strict=True):
        assert ours is not None and plain is not None
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_the_objective_is_that_of_all_rows(bias: bool, weighted: bool, way: str) -> None:
    merged, new, tasks = draw(7, 5, 3, weighted=weighted, dtype=torch.float64)
    for task, omega in zip(tasks, torch.tensor([0.5, 2.0, 0.1]).double(), strict=True):
        task |= {"omega": omega, "expert": Affine(task["expert"].weight, task["expert"].bias if bias else None)}
    merged, new = (Affine(each.weight, each.bias if bias else None) for each in (merged, new))
    system = SYSTEMS[way]({"m": merged}, Hyperparameters(0.05, 2.0, 0.4), with_bias=True)
    for task in tasks:
        given = {name: task[name] for name in ("x_cal", "x_exp", "expert", "weights")}
        moments = sum_up(way, **given, merged=merged, alpha=0.4, batches=2)
        system.add_task(moments, {"m": task["expert"]}, task["omega"])
    check_objective(system, merged, new, tasks, 0.4, rel=1e-10)


@pytest.mark.parametrize(("rows", "d_in", "d_out"), [(100, 256, 256), (1000, 64, 512), (400, 256, 64), (300, 64, 64)])
@pytest.mark.parametrize("outputs_known", [True, False])
def test_the_way_that_is_chosen_multiplies_less(rows: int, d_in: int, d_out: int, outputs_known: bool) -> None:
    """Counted where it runs; a float64 product counts as often as it costs."""
    merged, _, (task, *_) = draw(rows, d_in, d_out)
    counted = {}
    for way in ("drift", "outputs" if outputs_known else "residuals"):
        outputs_in_advance = FlopCounterMode(display=False)
        with outputs_in_advance:
            torch.nn.functional.linear(task["x_exp"], merged.weight)
        with FlopCounterMode(display=False) as counter:
            moments = sum_up(way, **task, merged=merged, alpha=0.3)
        summed = counter.get_total_flops() - (outputs_in_advance.get_total_flops() if way == "outputs" else 0)
        with FlopCounterMode(display=False) as counter:
            SYSTEMS[way]({"m": merged}, PAPER["CLIP"]).add_task(moments, {"m": task["expert"]})
        counted[way == "drift"] = summed + PRECISE_COST * counter.get_total_flops()
    chosen = not is_residual_cheaper(rows, d_in, d_out, outputs_known=outputs_known)
    assert counted[chosen] <= counted[not chosen]


@pytest.mark.parametrize("sizes", [(4, 0), (0, 3), (3, 0, 2), (2, 5, 1)])
def test_rows_of_several_ranks_are_those_of_one(sizes: tuple[int, ...]) -> None:
    """Each rank's rows follow those of the ranks before it; a rank may have none."""
    merged, _, (task, *_) = draw(sum(sizes), 16, 4, weighted=True)
    whole = sum_up("rows", **task, merged=merged, alpha=0.3)
    ranks, sent, before = [], [list[Tensor]() for _ in sizes], 0
    for number, size in enumerate(sizes):

        def add_up(x: Tensor, number: int = number) -> None:
            """The last rank is the one that gets the sums."""
            sent[number].append(x)
            if number == len(sizes) - 1:
                x += sum(of[len(sent[number]) - 1] for of in sent[:-1])

        rows = {name: task[name][before : before + size] for name in ("x_cal", "x_exp", "weights")}
        if size:
            ranks.append(sum_up("rows", **rows, expert=task["expert"], merged=merged, alpha=0.3))
        else:
            ranks.append(LinearMoments(16, CPU, 0.3, {"m": Pair(task["expert"], merged.weight)}, keep_rows=True))
        ranks[-1].sum_over_ranks(["m"], sum(sizes), before, add_up)
        before += size
    ours, theirs = ranks[-1].kept, whole.kept
    assert ours is not None and theirs is not None
    torch.testing.assert_close(ours.sum.rows, theirs.sum.rows)
    torch.testing.assert_close(ours.residuals_of("m"), theirs.residuals_of("m"))
    torch.testing.assert_close(ranks[-1].mean, whole.mean)
    torch.testing.assert_close(ranks[-1].size, whole.size)


def test_features_that_are_not_finite_are_an_error_not_a_result() -> None:
    merged, base, _ = draw(4, 7, 5)
    equations = LinearEquations({"m": merged}, PAPER["CLIP"])
    x = torch.full((4, 7), torch.nan)
    equations.add_task(sum_up("drift", x, x, merged, merged, 0.3), {"m": merged})
    with pytest.raises(NumericsError, match="not finite"):
        equations.solve({"m": base})


def test_few_rows_are_solved_in_token_space_and_many_are_not() -> None:
    assert is_dual_cheaper(100, 4096, 4096)
    assert not is_dual_cheaper(4000, 4096, 4096)
    assert not is_dual_cheaper(5000, 4096, 64)


@pytest.mark.parametrize("d", [1, 63, 200, 1030])
def test_half_a_symmetric_product_is_the_whole(d: int) -> None:
    torch.manual_seed(0)
    x, more, weights = torch.randn(9, d), torch.randn(5, d), torch.rand(9, 1)
    total, other = Symmetric(d, CPU), Symmetric(d, CPU)
    total.add_product(x, x * weights)
    other.add_product(more, more)
    total.add(other, torch.tensor(0.5))
    expected = (x.T @ (x * weights) + 0.5 * more.T @ more).double()
    torch.testing.assert_close(total.full(), expected, rtol=1e-5, atol=1e-5)
    assert float(total.norm()) == pytest.approx(float(expected.norm()), rel=1e-5)


# In each task's own metric


SETTINGS = [Hyperparameters(0.05, 2.0, 0.3), Hyperparameters(1e-3, 1.0, 0.6), Hyperparameters(1e-5, 0.5, 0.15)]
D_OUT = 6


def draw_answered(rank: int = D_OUT) -> tuple[Affine, Affine, list[dict[str, Any]]]:
    """With R, for each task, of as many rows as there are outputs, or of fewer."""
    merged, base, tasks = draw(30, 9, D_OUT, weighted=True, spread=0.3, dtype=torch.float64)
    for task in tasks:
        g = torch.randn(rank, D_OUT, dtype=torch.float64) * torch.arange(1, 1 + D_OUT)
        share = 1.0 if rank == D_OUT else 0.7  # of what the mean diagonal is 1 of
        task["g"] = g * (share * D_OUT / g.square().sum()).sqrt()
    return merged, base, tasks


def add_all(
    system: MetricEquations, merged: Affine, tasks: list[dict[str, Any]], alpha: float, way: str = "drift"
) -> None:
    for task in tasks:
        rows = {name: task[name] for name in ("x_cal", "x_exp", "weights", "expert")}
        moments = sum_up(way, **rows, merged=merged, alpha=alpha, batches=2)
        moments.gradients = {"m": task["g"]} if "g" in task else {}
        system.add_task(moments, {"m": task["expert"]})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("gradients", ["of all outputs", "a sketch", "none"])
def test_equations_are_solved(
    gradients: str, settings: Hyperparameters, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that does not reach the outputs has no gradients, and S = I: the paper's equations."""
    monkeypatch.setattr(output_metric, "TOLERANCE", 1e-10)
    monkeypatch.setattr(output_metric, "MOST_STEPS", 500)
    merged, base, tasks = draw_answered(2 if gradients == "a sketch" else D_OUT)
    for task in tasks if gradients == "none" else ():
        del task["g"]
    system = MetricEquations({"m": merged}, settings)
    add_all(system, merged, tasks, settings.alpha, way)
    solved, expected = system.solve({"m": base})["m"].parameters, solve_plainly(merged, base, tasks, settings)
    for ours, plain in zip(solved, expected, strict=True):
        assert ours is not None and plain is not None
        assert (ours - plain).norm() <= 1e-6 * plain.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_step_lowers_the_error(settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is minimised, with the anchor; the steps begin at merged, where the error is that of no update."""
    merged, base, tasks = draw_answered()
    best = solve_plainly(merged, base, tasks, settings).weight - merged.weight
    towards = (1 - settings.rho) * (base.weight - merged.weight)
    errors = []
    for steps in (1, 2, 4, MOST_STEPS):
        monkeypatch.setattr(output_metric, "MOST_STEPS", steps)
        system = MetricEquations({"m": merged}, settings)
        add_all(system, merged, tasks, settings.alpha)
        update = system.solve({"m": base}, bias=False)["m"].parameters.weight - merged.weight
        error = []
        for of in (update, best):
            curvature, descent = system.objective("m", of, torch.zeros(D_OUT).double())
            error.append(float(curvature - 2 * descent + settings.ridge * (of - towards).square().sum()))
        errors.append(error)
    ours, (least, *_) = zip(*errors, strict=True)
    none = settings.ridge * float(towards.square().sum())
    assert all(now <= before + 1e-12 for before, now in pairwise((none, *ours)))
    assert ours[-1] - least <= 0.02 * (none - least)


@pytest.mark.parametrize("way", WAYS)
def test_the_guard_looks_at_the_same_metric(way: str) -> None:
    merged, new, tasks = draw_answered()
    system = MetricEquations({"m": merged}, SETTINGS[0], with_bias=True)
    add_all(system, merged, tasks, 0.3, way)
    check_objective(system, merged, new, tasks, 0.3, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_few_outputs_have_axes(seed: int) -> None:
    """Where answers hang on few outputs of a module, most of R is zero, which LAPACK's float32 cannot decompose."""
    factor = torch.zeros(192, 300)
    chosen = torch.randperm(192, generator=torch.Generator().manual_seed(seed))[:25]
    factor[chosen, :3] = torch.randn(25, 3, generator=torch.Generator().manual_seed(seed + 5))
    values, vectors = output_metric._principal_axes(factor)
    assert len(values) == 3
    torch.testing.assert_close(vectors * values @ vectors.T, factor.T @ factor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_directions_that_are_only_rounding_change_nothing(settings: Hyperparameters) -> None:
    """Gradients that avoid an output, and those that have the least trace of it, give one update, however few steps are
    made: of which directions there is a trace depends on the order of sums."""
    merged, base, tasks = draw_answered()
    found = []
    for trace in (0.0, 1e-7):
        system = MetricEquations({"m": merged}, settings)
        for task in tasks:
            task["g"][:, 0], task["g"][0, 0] = 0.0, trace
        add_all(system, merged, tasks, settings.alpha)
        found.append(system.solve({"m": base}, bias=False)["m"].parameters.weight - merged.weight)
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm()


@pytest.mark.parametrize("way", ["drift", "rows"])
def test_float32_is_precise_where_inputs_have_a_large_mean_and_gradients_few_directions(way: str) -> None:
    """The few directions then ask for far more than all others, which must not lose their digits to them."""
    generator = torch.Generator().manual_seed(0)
    merged, base, tasks = draw(50, 128, 512, spread=0.02)
    for task in tasks:
        mean, scales = torch.randn(128, generator=generator), torch.logspace(0, -2, 128)
        task |= {name: mean + scales * task[name] for name in ("x_cal", "x_exp")}
        g = torch.randn(4, 512, generator=generator)
        task["g"] = g * (512 / g.square().sum()).sqrt()
    updates = []
    for dtype in (torch.float32, torch.float64):
        ours, anchor = (of.each(partial(Tensor.to, dtype=dtype)) for of in (merged, base))
        system = MetricEquations({"m": ours}, FEATCAL["module"])
        add_all(system, merged, tasks, FEATCAL["module"].alpha, way)
        solved = system.solve({"m": anchor})["m"].parameters
        updates.append(solved.each(Tensor.double).minus(merged.each(Tensor.double)))
    apart = [float((one - exact).norm() / exact.norm()) for one, exact in zip(*updates, strict=True)]
    assert apart[0] <= 4e-4 and apart[1] <= 1e-4


# Of convolutions


CONVOLUTIONS = [
    (nn.Conv1d(6, 4, 3, padding=1), (2, 6, 9)),
    (nn.Conv1d(6, 6, 4, stride=2, dilation=2, padding=3, groups=6, padding_mode="circular", bias=False), (2, 6, 11)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding="valid", groups=2), (3, 4, 8, 7)),
    (nn.Conv2d(4, 8, 3, padding="same", dilation=2, padding_mode="reflect", groups=4), (2, 4, 7, 8)),
    (nn.Conv3d(2, 3, 2, stride=2), (2, 2, 4, 6, 4)),
]


@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS, ids=lambda value: str(value)[:40])
def test_weights_times_patches_are_the_convolution(module: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    weight, bias = read_parameters(module)
    groups = module.groups
    patches = read_patches(module, x).flatten(x.ndim - 1)
    assert kind_of(module) == "convolution" and patches.shape == rows_shape(module, x.shape)
    rows = patches.unflatten(-1, (groups, -1))
    y = torch.einsum("...gd,god->...go", rows, weight.view(groups, -1, weight.shape[-1])).flatten(-2)
    y = y if bias is None else y + bias
    torch.testing.assert_close(y, module(x).movedim(1, -1))
    ((parameter, value), *_) = new_parameters(module, Affine(weight, bias))
    assert torch.equal(parameter, value)


def test_some_of_many_patches_are_drawn_the_same_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal_equations, "MOST_NUMBERS", 0)
    monkeypatch.setattr(normal_equations, "LEAST_PATCHES", 5)
    rows = Rows("own", tokens=1, examples=0)
    mask = torch.tensor([[1.0] * 20, [1.0] * 3 + [0.0] * 17, [1.0] * 12 + [0.0] * 8])
    x = torch.arange(60.0).view(3, 1, 20)

    def choose(examples: range) -> list[Tensor]:
        part = slice(examples.start, examples.stop)
        seen: Any = SimpleNamespace(masks={"own": mask[part]}, examples=examples)
        patches = read_patches(nn.Conv1d(1, 1, 1), x[part])
        chosen = normal_equations._choose_patches(patches, rows, {}, seen)
        assert chosen is not None and chosen[1] is None
        return list(chosen[0].flatten().split(1))

    together = choose(range(3))
    assert together == [row for number in range(3) for row in choose(range(number, number + 1))]
    counts = [sum(20 * n <= row < 20 * n + length for row in together) for n, length in enumerate((20, 3, 12))]
    assert counts == [5, 3, 5] and len(together) == 13


@pytest.mark.parametrize("bias", [True, False])
def test_groups_are_linears_of_their_own(bias: bool) -> None:
    torch.manual_seed(0)
    groups, d_out, d, rows = 3, 2, 4, 50
    settings = Hyperparameters(0.01, 1.5, 0.4)

    def make() -> Affine:
        return Affine(torch.randn(groups, d_out, d), torch.randn(groups * d_out) if bias else None)

    def part(whole: Affine, group: int) -> Affine:
        return Affine(whole.weight[group], None if whole.bias is None else whole.bias.view(groups, -1)[group])

    merged, base, experts = make(), make(), [make(), make()]
    features = [(torch.randn(rows, groups * d), torch.randn(rows, groups * d), torch.rand(rows)) for _ in experts]
    whole = GroupedEquations({"m": merged}, settings, with_bias=True)
    for expert, (x_cal, x_exp, weights) in zip(experts, features, strict=True):
        moments = GroupedMoments(merged.weight.shape, x_cal.device, settings.alpha, torch.float64)
        for turn in (slice(20), slice(20, None)):
            moments.add(x_cal[turn], x_exp[turn], weights[turn])
        whole.add_task(moments, {"m": expert})
    solution = whole.solve({"m": base})["m"].parameters
    update, shift = solution.minus(merged)
    objective = torch.stack(whole.objective("m", update, torch.zeros(groups) if shift is None else shift))
    sums = torch.zeros(2, dtype=torch.float64)
    for group in range(groups):
        equations = LinearEquations({"m": part(merged, group)}, settings, with_bias=True)
        columns = slice(group * d, (group + 1) * d)
        for expert, (x_cal, x_exp, weights) in zip(experts, features, strict=True):
            cal, exp, of_merged = x_cal[:, columns], x_exp[:, columns], part(merged, group)
            alone = sum_up("drift", cal, exp, part(expert, group), of_merged, settings.alpha, weights)
            equations.add_task(alone, {"m": part(expert, group)})
        expected = equations.solve({"m": part(base, group)})["m"].parameters
        torch.testing.assert_close(part(solution, group).weight, expected.weight, rtol=1e-5, atol=1e-6)
        if bias:
            torch.testing.assert_close(part(solution, group).bias, expected.bias, rtol=1e-5, atol=1e-6)
        change = part(solution, group).minus(part(merged, group))
        shift = torch.zeros(d_out) if change.bias is None else change.bias
        sums += torch.stack(equations.objective("m", change.weight, shift))
    torch.testing.assert_close(objective, sums, rtol=1e-4, atol=1e-5)
