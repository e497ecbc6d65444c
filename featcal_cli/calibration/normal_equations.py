"""Collection of normal equations: the features of one block, read task by task, are summed into the equations of its
modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from math import isfinite, prod
from typing import TypeAlias

import torch
from torch import Tensor

from featcal_cli.calibration.distributed_sums import sum_over_ranks
from featcal_cli.calibration.grouped_equations import GroupedEquations, GroupedMoments
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.calibration.moments import LinearMoments, NormMoments, Pair, TaskMoments
from featcal_cli.calibration.output_metric import MetricEquations, weigh_tokens
from featcal_cli.calibration.solver import (
    PRECISE_COST,
    BlockEquations,
    DualEquations,
    LinearEquations,
    Names,
    NormEquations,
    is_dual_cheaper,
)
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.hooks import Observation
from featcal_cli.engine.lockstep import BlockVisit
from featcal_cli.engine.token_weights import routed_rows
from featcal_cli.models.architecture import Block, Module
from featcal_cli.models.block_lists import UNMATCHED
from featcal_cli.models.module_kinds import (
    LINEAR_KINDS,
    Affine,
    normalise,
    read_parameters,
    read_patches,
    rows_shape,
)
from featcal_cli.models.token_rows import PerToken, Rows
from featcal_cli.runtime.errors import NumericsError

Choose: TypeAlias = "Callable[[Names, Observation, int], LinearMoments]"
LEAST_ROUTED = 32
"""Number of tokens over all tasks that must be routed to an expert of a mixture for it to be calibrated."""
UNWEIGHTED = ("k_proj", "v_proj", "key", "value")
"""Key and value projections. They weight all tokens equally even where the first token has a larger weight, because
attention reads every token's keys and values."""


def collect_equations(
    visit: BlockVisit, hyperparameters: Hyperparameters, on_task: Callable[[str], None] = lambda _: None
) -> BlockEquations:
    """Read the student's and the experts' features for every task in the visited part of the block, and build the
    equations from them. Each rank gets the equations that it is to solve. An expert's weights are not needed after its
    task is added."""
    equations = BlockEquations(held_out=BlockEquations() if visit.checks else None)
    with visit.ranks.on_its_own():
        for task in visit.tasks:
            on_task(task)
            with visit.expert_at(task):
                factors = visit.gradients(task, "factors") if hyperparameters.metric == "output" else {}
                checks = [_add_task(visit, task, hyperparameters, factors, equations)]
                if equations.held_out is not None:
                    equations.held_out.skipped = dict(equations.skipped)
                    held_out, omegas = equations.held_out, equations.omegas
                    checks.append(_add_task(visit, task, hyperparameters, factors, held_out, omegas))
                _check_features(visit, task, checks)
    if not visit.tasks:
        equations.skipped = {module.name: "no expert's examples reach it" for module in visit.part.modules}
    else:
        equations.skipped |= _take_out_starved(visit, equations)
    return equations


def _take_out_starved(visit: BlockVisit, equations: BlockEquations) -> dict[str, str]:
    """Remove the equations of a mixture's experts to which too few tokens are routed, counted over all tasks and ranks;
    return the reasons why they are left unchanged."""
    if not visit.is_routed:
        return {}
    here = {name: linear.rows for names, linear in equations.linear.items() for name in names}
    rows = Counter[str]()
    for of_rank in visit.ranks.gather(here):
        rows.update(of_rank)
    few = {
        module.name: f"{rows[module.name]} tokens are routed to it; it takes {LEAST_ROUTED} to calibrate it"
        for module in visit.part.modules
        if rows[module.name] < LEAST_ROUTED and module.name not in equations.skipped
    }
    for held in filter(None, (equations, equations.held_out)):
        held.linear = {names: linear for names, linear in held.linear.items() if not set(names) <= few.keys()}
    return few


def parameters_of(runner: BlockRunner, block: Block, module: str) -> Affine:
    """Return the weight and bias of a module of the block in the model of `runner`: [d_out, d_in] and [d_out] for a
    Linear, [d] and [d] for a norm."""
    return read_parameters(runner.module(f"{block.name}.{module}"))


def _add_batch(
    visit: BlockVisit, seen: Observation, sums: TaskMoments, choose: Choose, sizes: Mapping[str, Tensor]
) -> None:
    """Add the rows of one batch to a task's sums."""
    modules = {module.name: module for module in visit.part.modules}
    linear, norms, skipped = sums
    skipped |= _unpaired(modules, seen)
    for names in _shared_inputs(visit, seen, skipped):
        first = modules[names[0]]
        weights = _token_weights(visit, first, seen, [sizes[name] for name in names if name in sizes])
        pair = [_rows(visit, first, x[names[0]], seen, weights) for x in (seen.x_cal, seen.x_exp)]
        if pair[0] is None or pair[1] is None:
            skipped |= dict.fromkeys(names, UNMATCHED)
            continue
        if not pair[0] or (first.is_routed and not any(len(x) for x, _ in pair[0])):
            continue  # a table, which was counted before, or an expert that is given nothing but padding
        if names not in linear:
            linear[names] = choose(names, seen, sum(len(x) for x, _ in pair[0]))
        outputs = {
            name: _rows(visit, modules[name], seen.y_exp[name], seen, weights)
            for name in linear[names].pairs
            if name in seen.y_exp
        }
        for call, ((x, of_rows), (target, _)) in enumerate(zip(pair[0], pair[1], strict=True)):
            known = {name: found[call][0] for name, found in outputs.items() if found}
            linear[names].add(x, target, of_rows, known)
    for module in (m for m in visit.part.modules if m.kind not in LINEAR_KINDS and m.name not in skipped):
        norm = visit.merged.module(f"{visit.block.name}.{module.name}")
        weights = _token_weights(visit, module, seen, ())
        normed = _rows(visit, module, [normalise(norm, x) for x in seen.x_cal[module.name]], seen, weights)
        if normed is None:
            skipped[module.name] = UNMATCHED
        for z, of_rows in normed or ():
            norms.setdefault(module.name, NormMoments()).add(z, of_rows)


def _check_features(visit: BlockVisit, task: str, checksums: Sequence[Sequence[Tensor]]) -> None:
    """Raise NumericsError if the sums of features are not finite. `checksums` are those of one task's calibration
    examples and, if there are any, those of the held-out examples on which updates are checked. All are copied from the
    device at once."""
    flat = [checksum for of_rows in checksums for checksum in of_rows]
    values = iter(torch.stack(flat).tolist() if flat else ())
    for checked, of_rows in enumerate(checksums):
        if not all(isfinite(next(values)) for _ in of_rows):
            raise _find_infinity(visit, task, checked=bool(checked))


def _find_infinity(visit: BlockVisit, task: str, *, checked: bool) -> NumericsError:
    """Return the error for features that are not finite; it names model, module and example. All features are read
    again to find them."""
    kind = "held-out " if checked else ""
    fix = "look at this example, and take it out if need be; if it is fine, give --dtype float32"
    for seen in visit.features(task, checked=checked, again=True):
        sides = ((f"the expert of {task}", seen.x_exp), ("the calibrated model", seen.x_cal))
        for module, (who, features) in product(visit.part.modules, sides):
            broken = next((x for x in features[module.name] if not torch.isfinite(x).all()), None)
            if broken is None:
                continue
            # the rows of a batch's examples follow each other
            first = int((~torch.isfinite(broken)).flatten(1).any(1).int().argmax())
            number = seen.examples.start + 1 + first * len(seen.examples) // len(features[module.name][0])
            what = f"the features of {who} are not finite at {visit.block.name}.{module.name}"
            return NumericsError(what, where=f"{task}: {kind}example {number}", fix=fix)
    return NumericsError(f"the features are too large in {visit.block.name}", where=f"{task}: {kind}examples", fix=fix)


def _choose_moments(
    visit: BlockVisit,
    task: str,
    names: Names,
    seen: Observation,
    of_task: int,
    in_all: int,
    hyperparameters: Hyperparameters,
    form: type | None,
) -> LinearMoments:
    """Create empty moments for the modules `names`. They compute the right-hand side in the way that is cheapest for
    all rows to come: about `of_task` of this task, and `in_all` of all tasks. `form`: the class of the equations to
    which earlier tasks were added, if any."""
    weights = [parameters_of(visit.merged, visit.block, name).weight for name in names]
    d_in, d_out = weights[0].shape[1], sum(map(len, weights))
    keep_rows = form is DualEquations or (form is None and is_dual_cheaper(in_all, d_in, d_out))
    # rows of several ranks do not add up, and a metric of the outputs wants G itself
    keep_rows = keep_rows and visit.ranks.size == 1 and hyperparameters.metric == "features"
    known = all(name in seen.y_exp for name in names)
    paired = keep_rows or is_residual_cheaper(of_task, d_in, d_out, outputs_known=known)
    return _make_moments(visit, task, names, hyperparameters, paired=paired, keep_rows=keep_rows)


def _make_moments(
    visit: BlockVisit,
    task: str,
    names: Names,
    hyperparameters: Hyperparameters,
    *,
    paired: bool,
    keep_rows: bool = False,
) -> LinearMoments:
    """Create empty moments for the modules `names`. `paired`: whether their residuals r are summed."""
    of_merged, of_expert = (
        {name: parameters_of(runner, visit.block, name) for name in names}
        for runner in (visit.merged, visit.expert(task))
    )
    first = of_merged[names[0]].weight
    metric = "features" if first.ndim == 3 else hyperparameters.metric
    precision = choose_precision(first.dtype, hyperparameters.ridge, metric)
    if first.ndim == 3:
        return GroupedMoments(first.shape, first.device, hyperparameters.alpha, precision)
    pairs = {name: Pair(expert, of_merged[name].weight) for name, expert in of_expert.items() if paired}
    return LinearMoments(
        first.shape[1], first.device, hyperparameters.alpha, pairs, dtype=precision, keep_rows=keep_rows
    )


def _choose_equations(moments: LinearMoments, hyperparameters: Hyperparameters) -> type[LinearEquations]:
    """Choose the class of equations for these moments: it decides how all tasks are summed, solved and checked."""
    if isinstance(moments, GroupedMoments):
        return GroupedEquations
    if hyperparameters.metric == "output":
        return MetricEquations
    return LinearEquations if moments.kept is None else DualEquations


def _add_task(
    visit: BlockVisit,
    task: str,
    hyperparameters: Hyperparameters,
    factors: Mapping[str, Tensor],
    equations: BlockEquations,
    omegas: Mapping[tuple[str, str], Tensor] | None = None,
) -> list[Tensor]:
    """Add one task's sums, its expert's parameters and the factors of its output metric to the equations. `omegas` is
    given for held-out rows only. Returns numbers that are finite if all rows were finite."""

    def find_group(names: Names) -> Names | None:  # a module that is skipped from this task on leaves its group smaller
        return next((group for group in equations.linear if set(names) <= set(group)), None)

    def choose(names: Names, seen: Observation, rows: int) -> LinearMoments:
        form = type(equations.linear[group]) if (group := find_group(names)) else None
        counts = visit.token_counts[checked]
        of_task, in_all = counts[task], sum(counts.values())
        if visit.ranks.size == 1:  # of several, none may decide by its own rows
            of_task, in_all = (round(rows * part) for part in seen.row_multiples)
        return _choose_moments(visit, task, names, seen, of_task, in_all, hyperparameters, form)

    def parameters(runner: BlockRunner, names: Iterable[str]) -> dict[str, Affine]:
        return {name: parameters_of(runner, visit.block, name) for name in names}

    expert, checked = visit.expert(task), omegas is not None
    sizes = visit.gradients(task, "sizes") if hyperparameters.metric == "output" and not checked else {}
    sums = TaskMoments({}, {}, dict(equations.skipped))
    for seen in visit.features(task, checked=checked):
        _add_batch(visit, seen, sums, choose, sizes)
        del seen  # a batch's features are large, and the next one's are made before this name has them
    checksums = [moments.checksum for moments in sums.linear.values() if moments.rows]
    order = [module.name for module in visit.part.modules]
    make = partial(_make_moments, visit, task, hyperparameters=hyperparameters)
    sums = sum_over_ranks(sums, visit.ranks, visit.owners, order, make, visit.merged.device)
    equations.skipped |= sums.skipped
    for names, moments in sums.linear.items():
        if not moments.rows:
            if checked or visit.is_routed:
                continue
            what, fix = "no token of the examples counts: all is padding", "give examples with an attention_mask"
            raise NumericsError(what, where=task, fix=fix)
        group = find_group(names) or names
        if group not in equations.linear:
            form, of_merged = _choose_equations(moments, hyperparameters), parameters(visit.merged, group)
            equations.linear[group] = form(of_merged, hyperparameters, with_bias=checked)
        omega = omegas.get((task, names[0])) if omegas else None
        moments.gradients = factors
        omega = equations.linear[group].add_task(moments, parameters(expert, names), omega)
        equations.omegas |= {(task, name): omega for name in names}
    for name, norm_moments in sums.norms.items():
        if name not in equations.norms:
            equations.norms[name] = NormEquations(parameters_of(visit.merged, visit.block, name), hyperparameters)
        equations.norms[name].add_task(norm_moments, parameters_of(expert, visit.block, name))
    return checksums


def _unpaired(modules: Mapping[str, Module], seen: Observation) -> dict[str, str]:
    """List the modules whose inputs in student and expert cannot be matched, with the reasons."""
    skipped = {}
    for name, module in modules.items():
        ours, theirs = ([x.shape for x in features[name]] for features in (seen.x_cal, seen.x_exp))
        if not (ours or theirs or module.rows):
            skipped[name] = "never called"
        elif ours != theirs or (len(ours) != len(module.rows) and not module.is_routed):
            skipped[name] = "it is called differently in different models or batches"
    return skipped


def _shared_inputs(visit: BlockVisit, seen: Observation, skipped: Mapping[str, str]) -> list[Names]:
    """Group the Linear modules that share an input; modules with different token weights are in different groups."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for module in visit.part.modules:
        inputs = [id(x) for x in seen.x_cal[module.name]]
        if module.kind in LINEAR_KINDS and module.name not in skipped and (inputs or not module.is_routed):
            if module.kind == "convolution":  # which reads patches of its own
                inputs = [id(module)]
            groups.setdefault((*inputs, _is_weighted(visit, module)), []).append(module.name)
    return [tuple(names) for names in groups.values()]


def _is_weighted(visit: BlockVisit, module: Module) -> bool:
    return visit.cls_tokens and module.name.rpartition(".")[2] not in UNWEIGHTED


def _token_weights(visit: BlockVisit, module: Module, seen: Observation, sizes: Sequence[Tensor]) -> PerToken:
    """Return the weight of each token for a module and for all modules that share its input. If `sizes` of gradients
    [n, longest] are given, the weights are computed from them."""
    usual = seen.weights if _is_weighted(visit, module) else {}
    if not sizes or len(module.rows) > 1:
        return usual
    held, rows, count = visit.merged.module(f"{visit.block.name}.{module.name}"), module.rows[0], len(seen.examples)
    length = rows.count_tokens(rows_shape(held, seen.x_cal[module.name][0].shape), count)
    here = [_pad_sizes(of[seen.examples.start : seen.examples.stop, :length], length) for of in sizes]
    mask = seen.masks.get(rows.axis)
    if not length or (mask is not None and mask.shape != here[0].shape):
        return usual
    return {rows.axis: weigh_tokens(here, mask)}


def _pad_sizes(sizes: Tensor, length: int) -> Tensor:
    """Pad the sizes [B, length] of gradients with their mean, 1, at tokens beyond the longest text that was
    measured."""
    return torch.nn.functional.pad(sizes, (0, length - sizes.shape[1]), value=1.0)


def _rows(
    visit: BlockVisit, module: Module, features: Sequence[Tensor], seen: Observation, weights: PerToken
) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return the rows and their weights for every call of a module; None if rows cannot be matched to tokens."""
    count = len(seen.examples)
    of_calls: list[tuple[Tensor, Tensor | None] | None]
    if module.is_routed:
        routed = zip(features, seen.routes[module.name], strict=True)
        of_calls = [routed_rows(x, route, module.rows[0], seen.masks, weights, count) for x, route in routed]
    elif module.kind == "convolution":
        held = visit.merged.module(f"{visit.block.name}.{module.name}")
        of_calls = [
            _choose_patches(read_patches(held, x), rows, weights, seen) if x.ndim == held.weight.ndim else None
            for rows, x in zip(module.rows, features, strict=True)
        ]
    else:
        of_calls = [
            rows.select(x, seen.masks, weights, count)
            for rows, x in zip(module.rows, features, strict=True)
            if seen.first or not rows.is_table  # the same rows in every batch: they count once
        ]
    return None if any(rows is None for rows in of_calls) else [rows for rows in of_calls if rows is not None]


MOST_NUMBERS, LEAST_PATCHES = 1 << 21, 64
"""Most numbers that are used of one example's patches, and the number of patches that are used even if they hold
more."""


def _choose_patches(
    patches: Tensor, rows: Rows, weights: PerToken, seen: Observation
) -> tuple[Tensor, Tensor | None] | None:
    """Return rows [T, d] of the patches [B, *positions, C, *kernel] at the positions that count, and their weights [T];
    None if positions cannot be matched to tokens. If an example has too many patches, a sample is drawn, seeded by the
    example's number, so that it is the same in every model and for every batch size."""
    sizes = patches.shape[: patches.ndim // 2]
    positions, width = prod(sizes), prod(patches.shape[patches.ndim // 2 :])
    count, most = len(seen.examples), max(LEAST_PATCHES, MOST_NUMBERS // width)
    every = torch.arange(positions, device=patches.device).view(*sizes, 1)
    counted = rows.select(every, seen.masks, weights, count)
    if counted is None:
        return None
    numbers, of_rows = counted[0].view(-1), counted[1]
    if positions > most * count and positions % count == 0:
        generators = (torch.Generator().manual_seed(number) for number in seen.examples)
        drawn = torch.stack([torch.rand(positions // count, generator=generator) for generator in generators])
        scores = torch.full((positions,), torch.inf, device=patches.device)
        scores[numbers] = drawn.to(scores).flatten()[numbers]
        least = scores.view(count, -1).topk(most, largest=False).values[:, -1:]
        chosen = (scores.view(count, -1) <= least.clamp_max(1.0)).flatten()[numbers]
        numbers, of_rows = numbers[chosen], None if of_rows is None else of_rows[chosen]
    return patches[torch.unravel_index(numbers, sizes)].flatten(1), of_rows


def is_residual_cheaper(rows: int, d_in: int, d_out: int, *, outputs_known: bool) -> bool:
    """Return whether E[r xᵀ] is cheaper to compute from the modules' outputs row by row than from the drift of their
    shared input, Σ (x_exp − x_cal) xᵀ, which is multiplied with the weights once. `d_out`: the outputs of all modules
    together."""
    by_drift = rows * d_in * d_in + PRECISE_COST * d_out * d_in * d_in
    by_rows = (2 if outputs_known else 3) * rows * d_in * d_out
    return by_rows < by_drift
