"""Collection of normal equations: the features of one block, read task by task, are summed into the equations of its
modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import isfinite, prod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from featcal_cli.calibration.grouped_equations import GroupedEquations, GroupedMoments
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import ACCUMULATE, choose_precision
from featcal_cli.calibration.moments import LinearMoments, Names, NormMoments, Pair, TaskMoments, sum_over_ranks
from featcal_cli.calibration.output_metric import MetricEquations, weigh_tokens
from featcal_cli.calibration.solver import (
    PRECISE_COST,
    BlockEquations,
    DualEquations,
    LinearEquations,
    NormEquations,
    is_dual_cheaper,
)
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.hooks import Observation
from featcal_cli.engine.lockstep import BlockVisit
from featcal_cli.engine.token_weights import routed_rows
from featcal_cli.models.architecture import Block, Module
from featcal_cli.models.module_kinds import LINEAR_KINDS, Affine, normalise, read_parameters, read_patches, rows_shape
from featcal_cli.models.probing import UNMATCHED
from featcal_cli.models.token_rows import PerToken, Rows
from featcal_cli.runtime.errors import NumericsError

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
    equations = BlockEquations(held_out=BlockEquations() if visit.job.checked else None)
    with visit.job.ranks.on_its_own():
        for task in visit.tasks:
            on_task(task)
            with visit.expert_at(task):
                factors = (
                    visit.job.read_gradients(task, visit.part, "factors") if hyperparameters.metric == "output" else {}
                )
                checks = [_TaskCollector(visit, task, hyperparameters, equations, checked=False).add(factors)]
                if held_out := equations.held_out:
                    held_out.skipped, held_out.omegas = dict(equations.skipped), equations.omegas
                    checks.append(_TaskCollector(visit, task, hyperparameters, held_out, checked=True).add(factors))
                for number, checksum in enumerate(torch.stack(checks).tolist()):
                    if not isfinite(checksum):
                        raise _find_infinity(visit, task, checked=number == 1)
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
    for of_rank in visit.job.ranks.gather(here):
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


class _TaskCollector:
    """Adds one task to the equations of the visited part of a block: its calibration examples or, if `checked`, the
    held-out ones on which updates are checked."""

    def __init__(
        self,
        visit: BlockVisit,
        task: str,
        hyperparameters: Hyperparameters,
        equations: BlockEquations,
        *,
        checked: bool,
    ) -> None:
        self._visit, self._task, self._hyperparameters = visit, task, hyperparameters
        self._equations, self._checked = equations, checked
        self._modules = {module.name: module for module in visit.part.modules}
        self._sums = TaskMoments({}, {}, dict(equations.skipped), {})
        by_output = hyperparameters.metric == "output" and not checked
        self._sizes = visit.job.read_gradients(task, visit.part, "sizes") if by_output else {}
        """Sizes of gradients at the task's tokens, by module."""

    def add(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Add the task's sums, its expert's parameters and the `factors` of its output metric to the equations. Returns
        a number [] that is finite if all rows were finite."""
        visit, task, equations = self._visit, self._task, self._equations
        for seen in visit.features(task, checked=self._checked):
            self._add_batch(seen)
            del seen  # a batch's features are large, and the next one's are made before this name has them
        checksums = [moments.checksum for moments in self._sums.linear.values() if moments.rows]
        device, ranks = visit.job.merged.device, visit.job.ranks
        checksum = sum(checksums, start=torch.zeros((), dtype=ACCUMULATE, device=device))
        sums = sum_over_ranks(self._sums, ranks, visit.owners, self._holder_of, self._make_moments, device)
        equations.skipped |= sums.skipped
        for names, rows in ({names: moments.rows for names, moments in sums.linear.items()} | sums.elsewhere).items():
            if not rows:
                if self._checked or visit.is_routed:
                    continue
                what, fix = "no token of the examples counts: all is padding", "give examples with an attention_mask"
                raise NumericsError(what, where=task, fix=fix)
            group, moments, holder = self._find_group(names) or names, sums.linear.get(names), self._holder_of(names)
            if group not in equations.linear:
                equations.linear[group] = self._make_equations(group, moments)
            of_group = equations.linear[group]
            if moments is not None:
                # held-out rows have the weight of the calibration examples
                omega = equations.omegas.get((task, names[0]))
                moments.gradients = factors
                omega = of_group.add_task(moments, self._parameters(visit.job.experts[task], names), omega)
            else:
                omega = torch.empty((), dtype=ACCUMULATE, device=device)
            if holder is not None:
                ranks.copy(omega, holder)
            if moments is None and isinstance(of_group, MetricEquations):
                of_group.add_elsewhere(factors, names, omega, rows)
            equations.omegas |= {(task, name): omega for name in names}
        for name, norm_moments in sums.norms.items():
            if name not in equations.norms:
                of_merged = self._parameters(visit.job.merged, [name])
                equations.norms[name] = NormEquations(of_merged[name], self._hyperparameters)
            equations.norms[name].add_task(norm_moments, self._parameters(visit.job.experts[task], [name])[name])
        return checksum

    def _parameters(self, runner: BlockRunner, names: Iterable[str]) -> dict[str, Affine]:
        return {name: parameters_of(runner, self._visit.block, name) for name in names}

    def _find_group(self, names: Names) -> Names | None:
        """Return the modules whose equations hold those of `names`; a module that is skipped from this task on leaves
        its group smaller."""
        return next((group for group in self._equations.linear if set(names) <= set(group)), None)

    def _add_batch(self, seen: Observation) -> None:
        """Add the rows of one batch to the task's sums."""
        linear, norms, skipped, _ = self._sums
        skipped |= self._unpaired(seen)
        for names in self._shared_inputs(seen, skipped):
            first = self._modules[names[0]]
            weights = self._token_weights(first, seen, [self._sizes[name] for name in names if name in self._sizes])
            pair = [self._rows(first, x[names[0]], seen, weights) for x in (seen.x_cal, seen.x_exp)]
            if pair[0] is None or pair[1] is None:
                skipped |= dict.fromkeys(names, UNMATCHED)
                continue
            if not pair[0] or (first.is_routed and not any(len(x) for x, _ in pair[0])):
                continue  # a table, which was counted before, or an expert that is given nothing but padding
            if names not in linear:
                linear[names] = self._choose_moments(names, seen, sum(len(x) for x, _ in pair[0]))
            outputs = {
                name: self._rows(self._modules[name], seen.y_exp[name], seen, weights)
                for name in linear[names].pairs
                if name in seen.y_exp
            }
            for call, ((x, of_rows), (target, _)) in enumerate(zip(pair[0], pair[1], strict=True)):
                known = {name: found[call][0] for name, found in outputs.items() if found}
                linear[names].add(x, target, of_rows, known)
        for module in self._modules.values():
            if module.kind in LINEAR_KINDS or module.name in skipped:
                continue
            norm, weights = self._merged_module(module), self._token_weights(module, seen, ())
            normed = self._rows(module, [normalise(norm, x) for x in seen.x_cal[module.name]], seen, weights)
            if normed is None:
                skipped[module.name] = UNMATCHED
            for z, of_rows in normed or ():
                norms.setdefault(module.name, NormMoments()).add(z, of_rows)

    def _choose_moments(self, names: Names, seen: Observation, rows: int) -> LinearMoments:
        """Create empty moments for the modules `names`, which have `rows` rows in the first batch. They compute the
        right-hand side in the way that is cheapest for all rows to come."""
        visit, counts = self._visit, self._visit.token_counts[self._checked]
        of_task, in_all = counts[self._task], sum(counts.values())
        if visit.job.ranks.size == 1:  # of several, none may decide by its own rows
            of_task, in_all = (round(rows * part) for part in seen.row_multiples)
        weights = [of.weight for of in self._parameters(visit.job.merged, names).values()]
        d_in, d_out = weights[0].shape[1], sum(map(len, weights))
        group = self._find_group(names)
        is_dual = isinstance(self._equations.linear[group], DualEquations) if group else None
        keep_rows = is_dual_cheaper(in_all, d_in, d_out) if is_dual is None else is_dual
        if self._hyperparameters.metric == "output":
            # each step towards the solution multiplies with a task's rows twice, and with its G once
            keep_rows = 2 * of_task < d_in
        if visit.job.ranks.size > 1:
            # other ranks' rows can only be counted if they are tokens of the hidden states; and in the feature metric,
            # one rank would solve over the rows of all tasks
            first, hidden = self._modules[names[0]], visit.block.rows.axis
            counted = first.kind != "convolution" and [rows.axis for rows in first.rows] == [hidden]
            keep_rows = keep_rows and counted and self._hyperparameters.metric == "output"
        known = all(name in seen.y_exp for name in names)
        paired = keep_rows or is_residual_cheaper(of_task, d_in, d_out, outputs_known=known)
        return self._make_moments(names, paired=paired, keep_rows=keep_rows)

    def _make_moments(self, names: Names, *, paired: bool, keep_rows: bool = False) -> LinearMoments:
        """Create empty moments for the modules `names`. `paired`: whether their residuals r are summed."""
        of_merged = self._parameters(self._visit.job.merged, names)
        of_expert = self._parameters(self._visit.job.experts[self._task], names)
        first, used = of_merged[names[0]].weight, self._hyperparameters
        metric = "features" if first.ndim == 3 else used.metric
        precision = choose_precision(first.dtype, used.ridge, metric)
        if first.ndim == 3:
            return GroupedMoments(first.shape, first.device, used.alpha, precision)
        pairs = {name: Pair(expert, of_merged[name].weight) for name, expert in of_expert.items() if paired}
        return LinearMoments(first.shape[1], first.device, used.alpha, pairs, dtype=precision, keep_rows=keep_rows)

    def _make_equations(self, names: Names, moments: LinearMoments | None) -> LinearEquations:
        """Create empty equations for these moments, or for those that another rank has. Their class decides how all
        tasks are summed, solved and checked."""
        of_merged, used = self._parameters(self._visit.job.merged, names), self._hyperparameters
        if isinstance(moments, GroupedMoments):
            return GroupedEquations(of_merged, used, with_bias=self._checked)
        if used.metric == "output":
            ranks = None if self._holder_of(names) is None else self._visit.job.ranks
            return MetricEquations(of_merged, used, with_bias=self._checked, ranks=ranks)
        form = DualEquations if moments is not None and moments.kept is not None else LinearEquations
        return form(of_merged, used, with_bias=self._checked)

    def _holder_of(self, names: Names) -> int | None:
        """Return the rank that holds this task's sums of modules that all ranks solve together; None for modules that
        one rank solves: those whose errors are measured on features, of which many are solved at once, and a mixture's
        experts."""
        visit, ranks = self._visit, self._visit.job.ranks
        if ranks.size == 1 or self._checked or self._hyperparameters.metric != "output" or visit.is_routed:
            return None
        is_grouped = parameters_of(visit.job.merged, visit.block, names[0]).weight.ndim == 3
        return None if is_grouped else ranks.owner_of(self._task, visit.tasks)

    def _unpaired(self, seen: Observation) -> dict[str, str]:
        """List the modules whose inputs in student and expert cannot be matched, with the reasons."""
        skipped = {}
        for name, module in self._modules.items():
            ours, theirs = ([x.shape for x in features[name]] for features in (seen.x_cal, seen.x_exp))
            if not (ours or theirs or module.rows):
                skipped[name] = "never called"
            elif ours != theirs or (len(ours) != len(module.rows) and not module.is_routed):
                skipped[name] = "it is called differently in different models or batches"
        return skipped

    def _shared_inputs(self, seen: Observation, skipped: Mapping[str, str]) -> list[Names]:
        """Group the Linear modules that share an input and its token weights."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for module in self._modules.values():
            inputs = [id(x) for x in seen.x_cal[module.name]]
            if module.kind in LINEAR_KINDS and module.name not in skipped and (inputs or not module.is_routed):
                if module.kind == "convolution":  # which reads patches of its own
                    inputs = [id(module)]
                groups.setdefault((*inputs, self._is_weighted(module)), []).append(module.name)
        return [tuple(names) for names in groups.values()]

    def _is_weighted(self, module: Module) -> bool:
        return self._visit.cls_tokens and module.name.rpartition(".")[2] not in UNWEIGHTED

    def _token_weights(self, module: Module, seen: Observation, sizes: Sequence[Tensor]) -> PerToken:
        """Return the weight of each token for a module and for all modules that share its input, computed from `sizes`
        of gradients [n, longest] if there are any."""
        usual = seen.weights if self._is_weighted(module) else {}
        if not sizes or len(module.rows) > 1:
            return usual
        rows, count = module.rows[0], len(seen.examples)
        length = rows.count_tokens(rows_shape(self._merged_module(module), seen.x_cal[module.name][0].shape), count)
        measured = [of[seen.examples.start : seen.examples.stop, :length] for of in sizes]
        # tokens beyond the longest text that was measured have the mean, 1
        here = [pad(of, (0, length - of.shape[1]), value=1.0) for of in measured]
        mask = seen.masks.get(rows.axis)
        if not length or (mask is not None and mask.shape != here[0].shape):
            return usual
        return {rows.axis: weigh_tokens(here, mask)}

    def _rows(
        self, module: Module, features: Sequence[Tensor], seen: Observation, weights: PerToken
    ) -> list[tuple[Tensor, Tensor | None]] | None:
        """Return the rows and their weights for every call of a module; None if rows cannot be matched to tokens."""
        count = len(seen.examples)
        of_calls: list[tuple[Tensor, Tensor | None] | None]
        if module.is_routed:
            routed = zip(features, seen.routes[module.name], strict=True)
            of_calls = [routed_rows(x, route, module.rows[0], seen.masks, weights, count) for x, route in routed]
        elif module.kind == "convolution":
            held = self._merged_module(module)
            of_calls = [
                _choose_patches(read_patches(held, x), rows, weights, seen) if x.ndim == held.weight.ndim else None
                for rows, x in zip(module.rows, features, strict=True)
            ]
        else:
            of_calls = [
                rows.select(x, seen.masks, weights, count)
                for rows, x in zip(module.rows, features, strict=True)
                if seen.examples.start == 0 or not rows.is_table  # the same rows in every batch: they count once
            ]
        return None if any(rows is None for rows in of_calls) else [rows for rows in of_calls if rows is not None]

    def _merged_module(self, module: Module) -> nn.Module:
        return self._visit.job.merged.module(f"{self._visit.block.name}.{module.name}")


def _find_infinity(visit: BlockVisit, task: str, *, checked: bool) -> NumericsError:
    """Return the error for features that are not finite; it names model, module and example. All features are read
    again to find them."""
    kind = "held-out " if checked else ""
    fix = "look at this example, and take it out if need be"
    if visit.job.merged.dtype == torch.bfloat16:
        fix += "; if it is fine, give --dtype float32"
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
