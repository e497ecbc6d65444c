"""Made-up inspections: drift that grows with depth, of any number of tasks and blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from featcal_cli.reporting.report import BlockDrift, Inspection, ModelDrift, OutputDrift, PlaceDrift, TaskInspection

LEVELS = {"model": 1.0, "other": 0.6, "base": 1.5}
"""Relative drift of each role after the last block."""


def make_model(level: float, blocks: Sequence[str]) -> ModelDrift:
    """One whose drift grows evenly up to `level`, a third of it local."""
    drifts: list[BlockDrift] = []
    for number, name in enumerate(blocks, 1):
        e = level * number / len(blocks)
        drifts.append(BlockDrift(name, PlaceDrift(10 * e, e, 1 - e / 4, e / 3, e * 2 / 3), 0.9 / len(blocks)))
    output = OutputDrift("logits", level / 2, level, 0.9)
    return ModelDrift(PlaceDrift(0.1, 0.01, 1.0), drifts, output, 0.1)


def make_inspection(
    tasks: Sequence[str], blocks: int | Sequence[str] = 4, *, compare: bool = False, levels: Mapping[str, float] = {}
) -> Inspection:
    """The first task's drifts are `levels`; every further task drifts a hundredth more."""
    names = [f"encoder.layers.{number}" for number in range(blocks)] if isinstance(blocks, int) else blocks
    chosen = {role: level for role, level in {**LEVELS, **levels}.items() if compare or role != "other"}
    inspected = {}
    for number, task in enumerate(tasks):
        drifts = {role: make_model(level * (1 + number / 100), names) for role, level in chosen.items()}
        inspected[task] = TaskInspection(8, drifts)
    models = {role: f"user/{role}" for role in chosen}
    return Inspection("0.1.0", models, inspected, [], {}, {}, {})


def change(drift: ModelDrift, number: int, **values: float) -> ModelDrift:
    blocks = list(drift.blocks)
    blocks[number] = replace(blocks[number], drift=replace(blocks[number].drift, **values))
    return replace(drift, blocks=blocks)


def set_last(inspection: Inspection, task: str, role: str, relative: float) -> Inspection:
    """With another drift after the last block."""
    found = inspection.tasks[task]
    broken = {} if isfinite(relative) else {"distance": relative}  # it is the model's features that are no numbers
    models = {**found.models, role: change(found.models[role], -1, relative=relative, **broken)}
    return replace(inspection, tasks={**inspection.tasks, task: replace(found, models=models)})
