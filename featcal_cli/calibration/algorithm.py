"""Algorithm 1 of FeatCal: visit the blocks in forward order, solve each in closed form, load it, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from featcal_cli.calibration.backtracking import backtrack_block
from featcal_cli.calibration.distributed_sums import BlockSolution, share_solutions
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.journal import Journal, restore_block
from featcal_cli.calibration.normal_equations import collect_equations, parameters_of
from featcal_cli.calibration.results import BlockReport, ModuleReport
from featcal_cli.calibration.solver import BlockEquations, Solution
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.job import CALIBRATED, Job
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.weight_checks import name_huge_weight
from featcal_cli.models.architecture import Block
from featcal_cli.models.module_kinds import new_parameters
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.progress import Progress, Watch


def calibrate_blocks(
    job: Job, hyperparameters: Hyperparameters, journal: Journal | None, *, bias: bool, watch: Watch
) -> list[BlockReport]:
    """Calibrate the student of `job` block by block; return what was done. Every finished block is in the journal,
    which the first rank alone has.

    Updates are checked on the examples `job.checked`, where there are some.

    Raises NumericsError when weights or features are not finite or a system has no stable solution.
    """
    reports = []
    student = job.students[CALIBRATED]
    for number, visit in enumerate(forward_order(job)):
        block = visit.block
        here = Progress(block.name, number, len(job.architecture.blocks))
        report = restore_block(journal, number, student, job.ranks)
        if report is None:
            started = time.monotonic()
            nearby = job.architecture.blocks[max(0, number - 1) : number + 1]
            with name_huge_weight(nearby, (job.merged, job.base, *job.experts.values())):
                moments = collect_equations(visit, CALIBRATED, hyperparameters, here.at_task(watch))
                solved = solve_together(job, block, moments, bias, here.at_module(watch))
            load_block(student, block, solved.solutions)
            report = _describe(block, moments.skipped, solved, hyperparameters.ridge, time.monotonic() - started)
            if journal is not None:
                journal.write(number, report, student)
        reports.append(report)
        watch(Progress(block.name, number + 1, len(job.architecture.blocks)))
    return reports


def solve_together(
    job: Job, block: Block, moments: BlockEquations, bias: bool, on_module: Callable[[str], None] = lambda _: None
) -> BlockSolution:
    """What becomes of the block's modules, on all ranks, of which each solves its systems, and checks the updates on
    the rows that are held out for that, if there are some."""

    def solve() -> BlockSolution:
        solutions = solve_block(block, moments, job.base, bias, on_module)
        steps: dict[str, float] = {}
        if moments.held_out is not None:
            own = {m.name: parameters_of(job.merged, block, m) for m in block.modules if m.name in solutions}
            solutions, steps = backtrack_block(solutions, moments.held_out, own)
        rows = {name: system.rows for names, system in moments.linear.items() for name in names}
        return BlockSolution(solutions, rows | {name: norm.rows for name, norm in moments.norms.items()}, steps)

    return share_solutions(job.ranks, solve, job.merged.device)


def solve_block(
    block: Block,
    moments: BlockEquations,
    base: BlockRunner,
    bias: bool,
    on_module: Callable[[str], None] = lambda _: None,
) -> dict[str, Solution]:
    """New parameters of every module of the block, by its path inside the block; `on_module` is told what is solved."""
    modules = {module.name: module for module in block.modules}
    solutions: dict[str, Solution] = {}
    with base.on_device():
        if moments.linear or moments.norms:
            base.bring(block.name)
        for names, system in moments.linear.items():
            if not set(names) - set(moments.skipped):
                continue
            on_module(", ".join(name.rpartition(".")[2] for name in names))
            of_base = {name: parameters_of(base, block, modules[name]) for name in names}
            solutions |= system.solve(of_base, bias=bias)
        for name, norm in moments.norms.items():
            solutions[name] = norm.solve(parameters_of(base, block, modules[name]))
    solutions = {name: found for name, found in solutions.items() if name not in moments.skipped}
    for name, solution in solutions.items():
        if not all(torch.isfinite(part).all() for part in solution.parameters if part is not None):
            what = f"the solution of {block.name}.{name} is not finite"
            raise NumericsError(what, fix="use a larger --ridge, or another --rho")
    return solutions


def load_block(student: BlockRunner, block: Block, solutions: Mapping[str, Solution]) -> None:
    """Put all new parameters of a block into the student together."""
    for name, solution in solutions.items():
        for parameter, value in new_parameters(student.module(f"{block.name}.{name}"), solution.parameters):
            student.replace(parameter, value)


def _describe(
    block: Block, left: Mapping[str, str], solved: BlockSolution, asked: float, seconds: float
) -> BlockReport:
    modules = [
        ModuleReport(
            name=module.name,
            kind=module.kind,
            rows=solved.rows[module.name],
            condition_number=solved.solutions[module.name].condition_number,
            relative_change=solved.solutions[module.name].relative_change,
            step=solved.steps.get(module.name),
            ridge=ridge if (ridge := solved.solutions[module.name].ridge) is not None and ridge > asked else None,
        )
        for module in block.modules
        if module.name in solved.solutions
    ]
    skipped = [*block.skipped, *left.items()]
    return BlockReport(block.name, seconds, modules, [{"name": name, "reason": reason} for name, reason in skipped])
