"""Check weights without running the models: find broken checkpoints, and merges that these experts do not explain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from featcal_cli.engine.weight_uploads import is_finite
from featcal_cli.models.alignment import SAME_LAYERS
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.loading import Model
from featcal_cli.models.module_kinds import LINEAR_KINDS
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import CheckpointError, NumericsError
from featcal_cli.runtime.sanitise import list_some

VANISHING = 1e-12
"""Largest absolute weight at which a module counts as empty."""
SAMPLED_ROWS = 8
"""Number of rows that are sampled from a weight."""
OTHER_LAYER_RATIO = 0.5
"""Ratio of distances below which a layer of merged is taken to come from another layer of base: its distance to that
layer over its distance to its own counterpart. Fine-tuning moves layers far less."""
FIX = "use another checkpoint; this one is broken"


def check_values(merged: Model, others: Sequence[Model], architecture: Architecture) -> list[str]:
    """Check weights whose faults would be found too late or not at all while blocks run, and return sentences to
    report.

    `others` is base, then the experts. Raises NumericsError if merged has NaN or infinity outside of blocks, which
    would be copied to the output. Raises CheckpointError if the blocks of a model hold only zeros, or if the blocks of
    merged are in another order than base's.
    """
    for model in (merged, *others):
        check_not_empty(model, architecture)
    check_order(merged, others[0], architecture)
    if name := next(_broken_outside(merged, architecture), None):
        raise NumericsError(f"merged has NaN or infinity in {name}", where=merged.snapshot.name, fix=FIX)
    # what runs before the blocks is checked when it runs
    return [
        f"{model.role} has NaN or infinity in {name}, which runs after its blocks: the effect of drift on its outputs "
        "is not measured"
        for model in others
        for name in _broken_outside(model, architecture)
        if name.rpartition(".")[0] not in {model.own_path(path) for path in architecture.reached}
    ][:4]


def check_not_empty(model: Model, architecture: Architecture) -> None:
    """Raise CheckpointError if all Linear weights in a model's blocks are zero or vanishingly small."""
    empty = []
    for name, weight in linear_weights(model, architecture):
        if float(sample_rows(weight).abs().max()) > VANISHING:
            return
        empty.append(name)
    if empty:
        what = f"{model.role} holds nothing but zeros in its blocks ({empty[0]} and all others): it computes nothing"
        raise CheckpointError(what, where=model.snapshot.name, fix=FIX)


def check_order(merged: Model, base: Model, architecture: Architecture) -> None:
    """Raise CheckpointError if a layer of merged is much closer to another layer of base than to its own counterpart,
    which shows that layers were reordered or repeated."""
    lists: dict[tuple[str, str, torch.Size], dict[str, tuple[Tensor, Tensor]]] = {}
    known, seen = base.parameters, set[str]()
    for name, weight in linear_weights(merged, architecture):
        block = next(block.name for block in architecture.blocks if name.startswith(f"{block.name}."))
        if block not in seen and name in known and known[name].shape == weight.shape:
            seen.add(block)  # one weight of every layer is enough
            kind = block.rpartition(".")[0], name.removeprefix(block), weight.shape
            lists.setdefault(kind, {})[block] = sample_rows(weight), sample_rows(known[name].detach())
    for layers in lists.values():
        for block, (ours, own) in layers.items():
            # a layer that was moved or repeated is at the distance of fine-tuning from its origin
            others = {other: float((ours - start).norm()) for other, (_, start) in layers.items() if other != block}
            nearest = min(others, key=others.__getitem__, default="")
            if nearest and others[nearest] < OTHER_LAYER_RATIO * float((ours - own).norm()):
                what = f"merged's {block} is made of base's {nearest}: its layers are in another order"
                raise CheckpointError(what, where=merged.snapshot.name, fix=SAME_LAYERS)


def linear_weights(model: Model, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the calibrated Linear modules that the model has, with their names in merged."""
    parameters = model.parameters
    for block in architecture.blocks:
        for module in (module for module in block.modules if module.kind in LINEAR_KINDS):
            name = f"{block.name}.{module.name}.weight"
            if name in parameters:
                yield name, parameters[name].detach()


def sample_rows(weight: Tensor, rows: int = SAMPLED_ROWS) -> Tensor:
    """Return evenly spread rows of a weight [rows, d], in float32; the other rows are not read from the disk."""
    step = max(1, len(weight) // rows)
    return weight[::step][:rows].float()


def _broken_outside(model: Model, architecture: Architecture) -> Iterator[str]:
    """Yield the names of parameters outside of blocks that hold NaN or infinity, and of buffers that hold NaN. Infinity
    in a buffer may be intended."""
    inside = tuple(f"{own}." for block in architecture.blocks if (own := model.own_path(block.name)) is not None)
    for name, value in model.module.named_parameters():
        if value.is_floating_point() and not name.startswith(inside) and name not in model.missing:
            broken = not is_finite(value)
            hardware.give_back([value])
            if broken:
                yield name
    for name, value in model.module.named_buffers():
        if value.is_floating_point() and not name.startswith(inside) and torch.isnan(value).any():
            yield name


SAMPLED_TENSORS, ROWS_PER_TENSOR = 12, 16
"""Number of weights that are sampled, spread over the depth of the model, and number of rows of each."""
LEAST_SHARE = 0.03
"""Smallest share of merged − base that the experts must explain to be taken for the merged ones."""
LEAST_COEFFICIENT = 0.02
"""Smallest coefficient, relative to the largest, at which an expert counts as part of the merge."""
UNRELATED_DISTANCE = 0.7
"""Ratio ‖expert − base‖ / ‖base‖ above which models count as unrelated. No fine-tuning reaches it, and unrelated
weights have 1.4."""


def describe_merge_fit(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    architecture: Architecture,
    *,
    built: bool = False,
    is_calibrated: bool = False,
) -> list[str]:
    """Describe, in sentences, what is suspicious about these models as a merge. `built` says that this run merged them
    itself. `is_calibrated` says that featcal calibrated merged before, so the experts need not explain it."""
    # some weights that all models have, spread over the depth of the model
    known = set.intersection(*(set(model.parameters) for model in (merged, base, *experts.values())))
    names = [name for name, _ in linear_weights(merged, architecture) if name in known]
    names = names[:: max(1, -(-len(names) // SAMPLED_TENSORS))]
    if not names:
        return []
    start, end = _sample(base, names), _sample(merged, names)
    tuned = {task: _sample(expert, names) for task, expert in experts.items()}
    notes = [*_describe_equals(end, start, tuned, built=built)]
    steps = {task: weights - start for task, weights in tuned.items() if not torch.equal(weights, start)}
    if notes or built or not steps:
        return notes
    far = min(float(step.norm() / start.norm().clamp_min(1e-30)) for step in steps.values())
    if far > UNRELATED_DISTANCE:
        return [
            f"the experts are as far from base as other models are (‖expert − base‖ is {far:.2f} of ‖base‖, on sampled "
            f"weights): is {base.snapshot.name} the base that they were fine-tuned from?"
        ]
    if is_calibrated:
        return notes
    share, parts = explain(end - start, torch.stack(list(steps.values())), _rounding(end, merged))
    return [*_describe_fit(share, dict(zip(steps, parts, strict=True)), base)]


def explain(target: Tensor, steps: Tensor, noise: float = 0.0) -> tuple[float | None, list[float]]:
    """Compute the share (0 to 1) of the sum of squares of `target` [n] that the span of `steps` [k, n] explains, and
    the coefficients. `noise` is the sum of squares that comes from rounding; the share is None if it is most of the
    target's."""
    whole = float(target @ target)
    gram = steps @ steps.T
    # a little ridge keeps the system solvable where two experts are equal
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    parts = torch.linalg.solve(gram, steps @ target)
    explained = float(parts @ (steps @ target))
    left = whole - noise
    return (min(1.0, explained / left) if left > noise else None), parts.tolist()


def _describe_fit(share: float | None, parts: Mapping[str, float], base: Model) -> Iterator[str]:
    """Describe experts that do not explain merged − base, or that hardly contribute to it."""
    if share is None:
        return
    if share < LEAST_SHARE:
        yield (
            f"the merge does not look like a mix of these experts (they explain {100 * share:.1f} % of merged − base, "
            f"on sampled weights): check that {base.snapshot.name} is the model that the merge started from, and these "
            "its experts"
        )
        return
    largest = max(map(abs, parts.values()))
    if absent := [task for task, part in parts.items() if abs(part) < LEAST_COEFFICIENT * largest]:
        named = f"expert {absent[0]}" if len(absent) == 1 else f"experts {list_some(absent, last=' and ')}"
        those = "is it one" if len(absent) == 1 else "are they some"
        yield f"nothing of {named} is in merged (on sampled weights): {those} of those that were merged?"


def _describe_equals(merged: Tensor, base: Tensor, experts: Mapping[str, Tensor], *, built: bool) -> Iterator[str]:
    """Describe which of the models are equal in the sampled weights."""
    if torch.equal(merged, base) and not built:
        yield "merged holds the same weights as base (where they were sampled): is it a merge?"

    def hold(tasks: Sequence[str], same: str) -> str:
        named = list_some(tasks, last=" and ")
        who = f"expert {named} holds" if len(tasks) == 1 else f"experts {named} hold"
        return f"{who} the same weights{same} (where they were sampled)"

    of_base = [task for task, expert in experts.items() if torch.equal(expert, base)]
    if of_base:
        yield f"{hold(of_base, ' as base')}: {'is it' if len(of_base) == 1 else 'are they'} the fine-tuned model?"
    alike: dict[bytes, list[str]] = {}
    for task, expert in experts.items():
        if task not in of_base:
            alike.setdefault(expert.numpy().tobytes(), []).append(task)
    for tasks in alike.values():
        if len(experts) > 1 and torch.equal(experts[tasks[0]], merged):
            yield f"{hold(tasks, ' as merged')}: is merged a merge?"
        if len(tasks) > 1:
            yield f"{hold(tasks, '')}: is one a mistake?"


def _sample(model: Model, names: list[str]) -> Tensor:
    """Return the sampled entries of these weights, concatenated, in float64."""
    parameters = model.parameters
    return torch.cat([sample_rows(parameters[name].detach(), ROWS_PER_TENSOR).flatten() for name in names]).double()


def _rounding(values: Tensor, model: Model) -> float:
    """Estimate the sum of squared rounding errors when values are stored in the model's dtype."""
    spacing = torch.finfo(model.dtype).eps * torch.exp2(values.abs().clamp_min(1e-30).log2().floor())
    return float((spacing.square() / 12).sum())
