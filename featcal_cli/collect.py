"""One block's features, task by task, become the systems of equations of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from featcal_cli.architecture import LINEAR_KINDS, Block, Module, linear_parameters, norm_parameters, normalise
from featcal_cli.features import Features, Visit, cls_weights, flatten_rows
from featcal_cli.moments import LinearMoments, NormMoments
from featcal_cli.solver import Affine, LinearSystem, NormSystem, Settings
from featcal_cli.walker import Walker

UNWEIGHTED = ("k_proj", "v_proj", "key", "value")
"""Key and value projections count every token alike even where the first counts most: attention reads them all."""


@dataclass
class BlockMoments:
    """The systems of equations of one block, with every task folded in."""

    linear: dict[tuple[str, ...], LinearSystem] = field(default_factory=dict)
    """By the modules that share an input (and its token weights)."""
    norms: dict[str, NormSystem] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Modules that cannot be calibrated, and why."""


def collect_moments(visit: Visit, settings: Settings, on_task: Callable[[str], None]) -> BlockMoments:
    """Read every task's features of the block and fold them into the block's systems of equations.

    `on_task` is told each task as it begins.
    """
    moments = BlockMoments()
    for task in visit.tasks:
        on_task(task)
        _fold_task(visit, task, settings, moments)
    for names in [names for names in moments.linear if all(name in moments.skipped for name in names)]:
        del moments.linear[names]
    for name in moments.skipped:
        moments.norms.pop(name, None)
    return moments


def parameters_of(walker: Walker, block: Block, module: Module) -> Affine:
    """The parameters of one of the block's modules in one of the models, [d_out, d_in] and [d_out] or [d] and [d]."""
    found = walker.module(f"{block.name}.{module.name}")
    return linear_parameters(found) if module.kind in LINEAR_KINDS else norm_parameters(found)


def _fold_task(visit: Visit, task: str, settings: Settings, moments: BlockMoments) -> None:
    modules = {module.name: module for module in visit.block.modules}
    linear: dict[tuple[str, ...], LinearMoments] = {}
    norms: dict[str, NormMoments] = {}
    for x_cal, x_exp, mask in visit.features(task):
        moments.skipped |= _unpaired(modules, x_cal, x_exp)
        for names in _shared_inputs(visit, x_cal):
            _add_linear(visit, names, x_cal, x_exp, mask, linear, moments.skipped)
        for name in (name for name in x_cal if modules[name].kind not in LINEAR_KINDS):
            _add_norm(visit, name, x_cal[name], mask, norms, moments.skipped)
    merged, expert = visit.merged, visit.expert(task)
    with expert.on_device(), merged.on_device():
        merged.bring(visit.block.name)
        expert.bring(visit.block.name)
        for names, sums in linear.items():
            if names not in moments.linear:
                of_merged = {name: parameters_of(merged, visit.block, modules[name]) for name in names}
                moments.linear[names] = LinearSystem(of_merged, settings)
            moments.linear[names].fold(
                sums, {name: parameters_of(expert, visit.block, modules[name]) for name in names}
            )
        for name, sum_ in norms.items():
            if name not in moments.norms:
                moments.norms[name] = NormSystem(parameters_of(merged, visit.block, modules[name]), settings)
            moments.norms[name].fold(sum_, parameters_of(expert, visit.block, modules[name]))


def _unpaired(modules: dict[str, Module], x_cal: Features, x_exp: Features) -> dict[str, str]:
    """Modules whose inputs on student and expert do not belong together."""
    skipped = {}
    for name in modules:
        if name not in x_cal and name not in x_exp:
            skipped[name] = "never called"
        elif name not in x_cal or name not in x_exp or x_cal[name].shape != x_exp[name].shape:
            skipped[name] = "student and expert call it differently"
    return skipped


def _shared_inputs(visit: Visit, x_cal: Features) -> list[tuple[str, ...]]:
    """Linear modules by the input that they share, those with other token weights apart."""
    groups: dict[tuple[int, bool], list[str]] = {}
    for module in visit.block.modules:
        if module.name in x_cal and module.kind in LINEAR_KINDS:
            groups.setdefault((id(x_cal[module.name]), _is_weighted(visit, module.name)), []).append(module.name)
    return [tuple(names) for names in groups.values()]


def _is_weighted(visit: Visit, name: str) -> bool:
    return visit.cls_tokens and name.rpartition(".")[2] not in UNWEIGHTED


def _weights(visit: Visit, name: str, x: Tensor, mask: Tensor | None) -> Tensor | None:
    return cls_weights(x) if _is_weighted(visit, name) else mask


def _add_linear(
    visit: Visit,
    names: tuple[str, ...],
    x_cal: Features,
    x_exp: Features,
    mask: Tensor | None,
    sums: dict[tuple[str, ...], LinearMoments],
    skipped: dict[str, str],
) -> None:
    name = names[0]
    if name in skipped:
        return
    weights = _weights(visit, name, x_cal[name], mask)
    ours, theirs = flatten_rows(x_cal[name], weights), flatten_rows(x_exp[name], weights)
    if ours is None or theirs is None:
        skipped |= dict.fromkeys(names, "its rows cannot be matched to tokens")
        return
    if names not in sums:
        sums[names] = LinearMoments(ours[0].shape[-1], ours[0].device)
    sums[names].add(ours[0], theirs[0], ours[1])


def _add_norm(
    visit: Visit, name: str, x: Tensor, mask: Tensor | None, sums: dict[str, NormMoments], skipped: dict[str, str]
) -> None:
    z = normalise(visit.merged.module(f"{visit.block.name}.{name}"), x)
    rows = flatten_rows(z, _weights(visit, name, z, mask))
    if rows is None:
        skipped[name] = "its rows cannot be matched to tokens"
    elif name not in skipped:
        sums.setdefault(name, NormMoments(z.shape[-1], z.device)).add(*rows)
