"""Algorithm 1 of FeatCal: blocks are calibrated in forward order, each in closed form.

The student starts as the merged model. For each block, in the order in which a forward pass runs them:

1. Divide: the paper's method solves the whole block at once; featcal's solves the modules of one depth after another.
2. Collect: the student, with all earlier parts calibrated, and every expert run on the expert's examples; the inputs of
   each module are summed into the module's equations.
3. Solve: each module's weight and bias follow in closed form, as an update of the merged model's.
4. Check: if the method checks updates, each update is scaled by the factor that is best on held-out rows.
5. Load: all new parameters of the part are loaded into the student together, so that the next part's features depend on
   them.
6. Keep: the journal stores the finished block, so that an interrupted run can continue from there.

The head of a language model comes last (`calibration/head.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from featcal_cli.calibration.backtracking import backtrack_block
from featcal_cli.calibration.head import calibrate_head
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.journal import Journal, restore_block
from featcal_cli.calibration.normal_equations import collect_equations, parameters_of
from featcal_cli.calibration.results import BlockReport, ModuleReport
from featcal_cli.calibration.solver import BlockEquations, Solution, check_solutions, share_solutions
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.engine.lockstep import BlockVisit, forward_order
from featcal_cli.models.architecture import Block
from featcal_cli.models.module_kinds import ParameterPart, new_parameters
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.progress import Progress, Watch


def calibrate_blocks(
    job: Job, hyperparameters: Hyperparameters, journal: Journal | None, *, bias: bool, watch: Watch
) -> list[BlockReport]:
    """Calibrate the student of `job` block by block. `journal`: the journal on the first rank; None on all other ranks.
    Raises NumericsError when weights or features are not finite or the equations have no stable solution."""
    reports = []
    student, blocks = job.student, job.architecture.blocks
    for number, visit in enumerate(forward_order(job)):
        if number:
            watch(_tell_finished(job, number, journal))
        report = restore_block(journal, number, student, job.ranks)
        if report is None:
            here = Progress(visit.block.name, number, len(blocks))
            try:
                report = _calibrate_block(job, visit, hyperparameters, bias, here, watch)
            except NumericsError as error:
                for runner in (job.merged, job.base, *job.experts.values()):
                    runner.check_no_huge_weight()
                if error.where:
                    raise
                raise NumericsError(error.what, where=f"block {visit.block.name}", fix=error.fix) from error
            # 6. keep
            if journal is not None:
                journal.write(number, report, student)
        reports.append(report)
    watch(_tell_finished(job, len(blocks), journal))
    # its features depend on all blocks
    if job.head is not None:
        report = restore_block(journal, len(blocks), student, job.ranks)
        if report is None:
            watch(Progress("", 0, 1, unit="head"))
            report = calibrate_head(job, job.head)
            if journal is not None:
                journal.write(len(blocks), report, student)
        reports.append(report)
    return reports


def _calibrate_block(
    job: Job, visit: BlockVisit, hyperparameters: Hyperparameters, bias: bool, here: Progress, watch: Watch
) -> BlockReport:
    """Run steps 1 to 5 of the algorithm for one block."""
    started, block = time.monotonic(), visit.block
    reports: dict[str, ModuleReport] = {}
    skipped = dict(block.skipped)
    # 1. divide
    for part in visit.parts(by_depth=hyperparameters.order == "module"):
        # 2. collect
        equations = collect_equations(visit, hyperparameters, lambda task: watch(replace(here, task=task)))
        skipped |= equations.skipped
        solutions = _solve_on_all_ranks(
            visit, part, equations, bias, lambda module: watch(replace(here, module=module))
        )
        # equations are large: nothing may be left of them when the next ones are collected
        del equations
        # the next equations of a mixture, of other sizes, would not fit into the gaps
        if visit.is_routed:
            hardware.trim_heap()
        # 5. load
        load_block(job.student, part, solutions)
        reports |= _describe(block, solutions, hyperparameters.ridge)
        del solutions  # of a mixture, all parts' weights together are much larger than the block's
    modules = [reports[module.name] for module in block.modules if module.name in reports]
    reasons = [{"name": name, "reason": why} for name, why in skipped.items()]
    return BlockReport(block.name, time.monotonic() - started, modules, reasons)


def _solve_on_all_ranks(
    visit: BlockVisit, block: Block, equations: BlockEquations, bias: bool, on_module: Callable[[str], None]
) -> dict[str, Solution]:
    """Solve and check every module of the block. Each rank solves its own equations, and those of all ranks together;
    each solution is checked by the module's owner, and all ranks get it."""
    job, owners = visit.job, visit.owners

    def solve() -> dict[str, Solution]:
        # 3. solve
        solutions = solve_block(block, equations, job.base, bias, on_module)
        solutions = {name: of for name, of in solutions.items() if owners.get(name, job.ranks.rank) == job.ranks.rank}
        # 4. check
        if equations.held_out is None:
            return solutions
        merged = {name: parameters_of(job.merged, block, name) for name in solutions}
        return backtrack_block(solutions, equations.held_out, merged)

    return share_solutions(job.ranks, solve, job.merged.device)


def solve_block(
    block: Block,
    equations: BlockEquations,
    base: BlockRunner,
    bias: bool,
    on_module: Callable[[str], None] = lambda _: None,
) -> dict[str, Solution]:
    """Return the new parameters of every module of the block, by its path inside the block. `on_module` is called with
    the names of the modules before they are solved."""
    solutions: dict[str, Solution] = {}
    with base.on_device():
        if equations.linear or equations.norms:
            base.bring(block.name)
        # what one rank alone finds wrong keeps no other waiting
        for names, linear in sorted(equations.linear.items(), key=lambda item: not item[1].is_joint):
            if set(names) <= equations.skipped.keys():
                continue
            on_module(", ".join(name.rpartition(".")[2] for name in names))
            of_base = {name: parameters_of(base, block, name) for name in names}
            solutions |= linear.solve(of_base, bias=bias)
        for name, norm in equations.norms.items():
            solutions[name] = norm.solve(parameters_of(base, block, name))
    return check_solutions(
        block.name, {name: each for name, each in solutions.items() if name not in equations.skipped}
    )


def load_block(student: BlockRunner, block: Block, solutions: Mapping[str, Solution]) -> None:
    """Load all new parameters of a block into the student at once."""
    wholes: dict[nn.Parameter, Tensor] = {}
    for name, solution in solutions.items():
        for parameter, value in new_parameters(student.module(f"{block.name}.{name}"), solution.parameters):
            if not isinstance(parameter, ParameterPart):
                student.replace(parameter, value)
                continue
            if parameter.whole not in wholes:
                wholes[parameter.whole] = student.copy(parameter.whole)
            parameter.place.of(wholes[parameter.whole]).copy_(value)
    for parameter, value in wholes.items():
        student.replace(parameter, value)


def _describe(block: Block, solutions: Mapping[str, Solution], asked: float) -> dict[str, ModuleReport]:
    """Return reports on the solved modules by name. A module's λ is reported only if it is larger than `asked`, the λ
    of the settings."""
    kinds, reports = {module.name: module.kind for module in block.modules}, {}
    for name, (_, change, rows, ridge, step) in solutions.items():
        more = ridge if ridge is not None and ridge > asked else None
        reports[name] = ModuleReport(name, kinds[name], rows, float(change), step, more)
    return reports


def _tell_finished(job: Job, count: int, journal: Journal | None) -> Progress:
    """Return the progress after `count` finished blocks, with the drift after the last of them as far as it was already
    measured; no extra forward pass is run."""
    blocks, read = job.architecture.blocks, job.drift.meter.read
    name = blocks[count - 1].name
    drifts = {task: (read(name, task, MERGED), read(name, task, CALIBRATED)) for task in job.drift.batches}
    known = {task: (ours.relative, new.relative) for task, (ours, new) in drifts.items() if ours.tokens and new.tokens}
    restored = journal is not None and count <= journal.restored
    return Progress(name, count, len(blocks), drifts=known, by_outputs=bool(job.gradients), restored=restored)
