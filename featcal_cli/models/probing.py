"""Run a model on two small probes, which show its blocks, the order in which they run, and the tokens that the rows of
each module's input belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from featcal_cli.data.batches import (
    DECODER_AXIS,
    ENCODER_AXIS,
    Batch,
    Example,
    axis_lengths,
    collate,
    count_examples,
    find_along,
    forward_inputs,
    forward_names,
    is_mask,
    padding_id,
    take_examples,
    token_masks,
)
from featcal_cli.models.module_kinds import FunctionalLinear, kind_of, rows_shape
from featcal_cli.models.token_rows import OWN_AXIS, PROBE_EXAMPLES, Axes, Rows, learn_rows
from featcal_cli.models.tracing import CONTAINERS, ForwardError, Trace, first_tensor, run_forward, tensors_in, trace
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import ArchitectureError, DataError
from featcal_cli.runtime.sanitise import exception_text, list_some

PROBE_TOKENS = 8
"""Number of text tokens in a probe. Short probes are enough to show the shapes, and cheap on large models."""
PADDING_ROUNDING = 8
"""Features with and without padding are alike if they differ by less than this times the precision of their dtype."""
AXIS_STEPS = {ENCODER_AXIS: 1, DECODER_AXIS: 2}
"""Token axes whose length can differ between the probes, each with its own step."""
UNSEEN = "no run has shown what is multiplied with it"
SHARED = "another module shares its weight, and forward order solves a weight where it is used once"
UNMATCHED = "its rows cannot be matched to tokens"
ROUTER = "it is the router of a mixture; `routers: true` calibrates it"


@dataclass
class ProbeRun:
    """The traces of two probes that have the same kind of inputs, and the blocks found in them."""

    entry: str
    first: Trace
    second: Trace
    axes: Axes
    blocks: list[str]
    other_inputs: bool = False
    """Whether the model has other inputs than text, and the text's length differs between the probes."""
    minds_padding: bool = False
    """Whether the model's outputs for a text change when padding follows the text, despite its mask."""

    @property
    def has_token_logits(self) -> bool:
        """Whether the model's logits [B, length] are one for each token, and not one for each class."""
        lengths = tuple(shape[1] for shape in (self.first.logits, self.second.logits) if len(shape) == 2)
        return any(lengths == axis and axis[0] != axis[1] for axis in self.axes.values())


class BlockProbe:
    """The facts that the probes show of one block."""

    def __init__(self, run: ProbeRun, block: str) -> None:
        self.name, self.first, self._run = block, run.first, run
        self.calls = run.first.calls.count(block)
        self.rows = Rows()
        """Meaning of the rows of the block's hidden states."""
        self._axes = dict(run.axes)
        """All token axes, including the block's own axis if it has one."""
        if block not in run.first.shapes:
            return
        first, second = run.first.shapes[block][0], run.second.shapes[block][0]
        self.rows = self._learn(first, second)
        if not self.rows.axis and len(first) == len(second) == 3 and (first[0], second[0]) == PROBE_EXAMPLES:
            self._axes[OWN_AXIS] = (first[1], second[1])  # [B, n, d]
            self.rows = self._learn(first, second)

    @property
    def holds(self) -> Literal["text", "padded text", "patches"]:
        """The content of the block's hidden states [B, n, d]. If texts of different lengths give equally many rows, the
        rows are patches when the model has other inputs than text, else a text that the model pads itself (as windowed
        attention may need)."""
        lengths = self._axes.get(OWN_AXIS) if self.rows.axis == OWN_AXIS else None
        if lengths is None or lengths[0] != lengths[1]:
            return "text"
        return "patches" if self._run.other_inputs else "padded text"

    def rows_of_module(self, path: str, module: nn.Module | None = None) -> tuple[Rows, ...]:
        """Return the meaning of the rows that a module reads, for each of its calls in one run of the block."""
        first, second = (
            [rows_shape(module, shape) for shape in of.shapes.get(path, [])] for of in (self.first, self._run.second)
        )
        calls, rest = divmod(len(first), max(self.calls, 1))
        if len(first) != len(second) or rest:
            return (Rows(may_hold_padding=True),)
        return tuple(self._learn(*pair) for pair in zip(first[:calls], second[:calls], strict=True))

    def rows_of_experts(self, paths: Collection[str]) -> tuple[Rows, ...]:
        """Return the meaning of the rows from which a mixture takes the tokens for these modules of its experts."""
        routed = [[of.routed[path] for path in paths if path in of.routed] for of in (self.first, self._run.second)]
        if not all(routed):
            return (Rows(may_hold_padding=True),)
        return (self._learn(routed[0][0], routed[1][0]),)

    def gives_no_rows(self, path: str) -> bool:
        """Tell whether every input of a module has no rows. An adapter for a language that no example is in has such
        inputs."""
        shapes = [shape for of in (self.first, self._run.second) for shape in of.shapes.get(path, ())]
        return bool(shapes) and all(0 in shape for shape in shapes)

    def _learn(self, first: torch.Size, second: torch.Size) -> Rows:
        return learn_rows(first, second, self._axes, other_inputs=self._run.other_inputs)


def probe_model(model: PreTrainedModel, task: str, batch: Batch) -> ProbeRun:
    """Run two probes through the model, or through a tower that takes these inputs. Raises DataError if neither can
    run."""
    problem: Exception | None = None
    batch = forward_inputs(batch)
    for entry in _entries(model, batch):
        for resize in ({ENCODER_AXIS, DECODER_AXIS}, {DECODER_AXIS}, {ENCODER_AXIS}, set[str]()):
            (first, second), axes = make_probes(batch, resize)
            try:
                one, other = (trace(model, probe, model.dtype, entry) for probe in (first, second))
            except ForwardError as error:
                problem = problem or error
            else:
                # ids of several choices have no axis of tokens
                lengths = axes.get(ENCODER_AXIS, (0, 0)) if "input_ids" in batch else (0, 1)
                has_others = lengths[0] != lengths[1] and any(x.is_floating_point() for x in batch.values())
                run = ProbeRun(entry, one, other, axes, find_blocks(model, one), has_others)
                run.minds_padding = bool(token_masks(batch)) and _minds_padding(model, second, batch, run)
                return run
    shapes = {name: list(tensor.shape[1:]) for name, tensor in batch.items()}
    assert problem is not None
    raise DataError(
        f"merged cannot run on the examples: {exception_text(problem)}",
        where=f"{task}: an example has {shapes}",
        fix="give all inputs that its forward needs, no more tokens than it takes, and check merged's config.json",
    ) from problem


def _minds_padding(model: PreTrainedModel, probe: Batch, batch: Batch, run: ProbeRun) -> bool:
    """Tell whether padding behind the probe's texts changes their features: its mask may be ignored, or decide how the
    texts are read."""
    numbers, longer = range(count_examples(probe)), take_examples(batch, [0])
    if not any(tensor.is_floating_point() for tensor in batch.values()):  # else the probe's texts are not cut either
        along = {name for axis in axis_lengths(batch) for name in find_along(batch, axis)}
        longer = {name: x[:, : 2 * PROBE_TOKENS] if name in along else x for name, x in longer.items()}
    examples = [*(take_examples(probe, [number]) for number in numbers), longer]
    padded = take_examples(collate([*map(Example, examples)], padding_id(model)), numbers)
    try:
        pairs = [*zip(*(_run_blocks(model, inputs, run) for inputs in (probe, padded)), strict=False)]
    except ForwardError:
        return True
    most = max(1e-4, PADDING_ROUNDING * torch.finfo(model.dtype).eps)
    cut = ((x, y[tuple(map(slice, x.shape))]) for x, y in pairs)
    return any(x.shape != y.shape or not (x - y).norm() <= most * x.norm() for x, y in cut)


def _run_blocks(model: PreTrainedModel, batch: Batch, run: ProbeRun) -> list[Tensor]:
    """Run a model without a trace, and return what its blocks and itself return for each example."""
    returned: list[Any] = []
    with ExitStack() as hooks, hardware.drawing_alike(), torch.no_grad():
        for block in run.blocks:
            hook = model.get_submodule(block).register_forward_hook(lambda _, __, y: returned.append(first_tensor(y)))
            hooks.callback(hook.remove)
        floats = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        returned.append(run_forward(model.get_submodule(run.entry), floats))
    return [x.float() for x in tensors_in(returned) if x.ndim > 1]


def _entries(model: PreTrainedModel, batch: Batch) -> Iterator[str]:
    """Yield the path of the whole model (an empty string), then the paths of its towers that take these inputs,
    outermost first."""
    yield ""
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and forward_names(module).issuperset(batch):
            yield name


def make_probes(batch: Batch, resize: Collection[str]) -> tuple[tuple[Batch, Batch], dict[str, tuple[int, int]]]:
    """Make two small batches that differ in the number of examples and in length along the token axes `resize`. Returns
    them with the lengths of all token axes in both."""
    count = count_examples(batch)
    probes = [take_examples(batch, [number % count for number in range(examples)]) for examples in PROBE_EXAMPLES]
    has_floats = any(tensor.is_floating_point() for tensor in batch.values())
    axes = {}
    for axis, length in axis_lengths(batch).items():
        axes[axis] = (length, length)
        names = find_along(batch, axis)
        if axis not in resize or all(is_mask(name, batch[name]) for name in names):
            continue
        samples = any(batch[name].is_floating_point() for name in names)
        long = length if has_floats else min(length, PROBE_TOKENS)
        short = long - (long // 4 if samples else AXIS_STEPS[axis])
        axes[axis] = (long, short if short > 0 else long + AXIS_STEPS[axis])
        for probe, size in zip(probes, axes[axis], strict=True):
            for name in names:
                # the last column is repeated where there are fewer
                columns = torch.arange(size).clamp_max(probe[name].shape[1] - 1)
                resized = probe[name][:, columns]
                probe[name] = torch.ones_like(resized) if is_mask(name, batch[name]) else resized
    return (probes[0], probes[1]), axes


def find_blocks(model: nn.Module, run: Trace) -> list[str]:
    """Find the transformer blocks of a model: the members of its outermost suitable lists, in execution order.

    1. Lists are examined from the outermost inwards. Lists inside a suitable list belong to its blocks and are skipped.
    2. A list is suitable if its members hold several Linear modules each, and at least half of the members that ran
       returned hidden states with the shape of their input, as blocks on a residual stream do and heads do not.
    3. A list of stages, each of which is itself a chain of blocks (as in Swin), is skipped in favour of the lists
       inside it.
    """
    taken: list[str] = []
    blocks: list[str] = []
    for name, module in model.named_modules():  # from the outside in
        if not isinstance(module, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, run)
        # half is enough: blocks that merge patches or change the width return another shape
        residual = sum(member in run.residual for member in members)
        stages = (_is_stage(member, model.get_submodule(member), run) for member in members)
        if residual > 0 and 2 * residual >= len(members) and not any(stages):
            taken.append(name)
            blocks += members
    # the order of registration may be another: CLIP registers its text first and runs its images first
    return sort_by_first_call(run, blocks)


def sort_by_first_call(run: Trace, names: Iterable[str]) -> list[str]:
    """Sort module names by the first call of each module in the trace."""
    started = {name: number for number, name in reversed(list(enumerate(run.calls)))}
    return sorted(names, key=started.__getitem__)


def find_stems(model: nn.Module, run: Trace, blocks: Sequence[str]) -> list[str]:
    """Find the stems: patch embeddings and feature extractors that run before the blocks. A stem is an outermost module
    that holds a convolution but no block, is called once, and starts before the blocks next to it. A bare convolution
    called directly by a module that holds blocks is not a stem."""
    around = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."} | {""}
    stems = []
    for name, module in model.named_modules():
        holder = name.rpartition(".")[0]
        if name in around or holder not in around or name in blocks or run.calls.count(name) != 1:
            continue
        beside = [block for block in blocks if block.startswith(f"{holder}.") or not holder]
        inner = (other for other in module.modules() if other is not module)
        is_before = bool(beside) and sort_by_first_call(run, [name, *beside])[0] == name
        if is_before and any(kind_of(other) == "convolution" for other in inner):
            stems.append(name)
    return stems


def wildcard_path(block: nn.Module, path: str) -> str:
    """Replace the keys of lists and dictionaries in a path by `*`, so that all experts of a mixture share one
    pattern."""
    parts: list[str] = []
    holder: nn.Module | None = block
    for key in path.split("."):
        parts.append("*" if isinstance(holder, (nn.ModuleList, nn.ModuleDict)) else key)
        holder = holder and dict(holder.named_children()).get(key)
    return ".".join(parts)


def _members(name: str, container: nn.Module, run: Trace) -> list[str]:
    """Return the paths of a list's members that have run and hold several Linear modules."""
    paths = [f"{name}.{key}" for key, child in container.named_children() if len(_linears(child)) > 1]
    ran = set(run.calls)
    return [path for path in paths if path in ran]


def _is_stage(name: str, module: nn.Module, run: Trace) -> bool:
    """Tell whether a list member is itself a chain of equal blocks (a stage of Swin), not a block made of parts (a
    layer of T5)."""
    for path, inner in module.named_modules():
        if not isinstance(inner, CONTAINERS) or not path:
            continue
        members = _members(f"{name}.{path}", inner, run)
        # parts of a layer are of several classes, hold less than half of its weights, or run side by side
        same = len({type(child) for child in inner}) == 1
        if members and same and 2 * len(_linears(inner)) > len(_linears(module)) and run.is_chain(members):
            return True
    return False


def _linears(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, (nn.Linear, Conv1D)) and inner is not module]


def merge_orders(sequences: Sequence[list[str]]) -> list[str]:
    """Merge the block orders of several inputs into one order that agrees with all of them. Raises ArchitectureError if
    there is no such order."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for sequence in sequences:
        for number, name in enumerate(sequence):
            graph.add(name, *sequence[number - 1 : number])
    try:
        return list(graph.static_order())
    except CycleError as error:
        raise ArchitectureError(
            f"the blocks run in different orders for different inputs: {list_some(error.args[1], between=' → ')}",
            fix="give all tasks the same kind of inputs",
        ) from None


def unreached_lists(model: nn.Module, blocks: Sequence[str], called: Collection[str]) -> Iterator[str]:
    """Yield the outermost lists, apart from the lists of `blocks`, whose members hold several Linear modules each and
    were never called."""
    taken = list(blocks)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        apart = not any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in taken)
        apart = apart and not any(f"{path}.{key}" in called for key, _ in module.named_children())
        if apart and all(len(_linears(child)) > 1 for child in module):
            taken.append(path)
            yield path


def explain_skipped(
    module: nn.Module, value: Tensor, holders: Mapping[int, int], parts: Mapping[str, FunctionalLinear], run: Trace
) -> str:
    """Return the reason why a parameter of a module that is neither a Linear nor a norm is left unchanged. The reason
    is empty if functions use slices of it (`parts`) as weights, which can then be calibrated."""
    if not parts:
        # a stack of matrices may be a mixture's, whose experts the run did not reach, if there was a run at all
        is_convolution = any("conv" in base.__name__.lower() for base in type(module).__mro__)
        is_stack = value.ndim == 3 and len(value) > 1 and not is_convolution
        return UNSEEN if is_stack and (run.routed or not run.calls) else "neither a Linear nor a norm"
    if any(map(run.is_router, parts)):
        return ROUTER
    if holders[id(value)] > 1:
        return SHARED
    if sum(prod(part.weight.size) for part in parts.values()) > value.numel():
        return "it is multiplied with in parts that overlap"
    return ""


def find_called_before_end(run: Trace, blocks: Sequence[str]) -> set[str]:
    """Return the modules that start before the last call of a block ends, including the modules inside that block."""
    last = max((number for number, name in enumerate(run.calls) if name in set(blocks)), default=-1)
    inside = [name for name in run.calls if any(name.startswith(f"{block}.") for block in blocks[-1:])]
    return {*run.calls[: last + 1], *inside}


def count_holders(model: nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by the parameter's id."""
    held = (value for module in model.modules() for value in module._parameters.values())
    return Counter(id(value) for value in held if value is not None)
