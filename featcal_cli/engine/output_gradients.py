"""Gradients of an expert's outputs at its modules: how far a change at each module and token moves the outputs. They
are computed by a checkpointed backward pass of our own, block by block, so that neither the graph of a whole pass nor
the weights of more than one block are ever in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from featcal_cli.data.batches import Batch, count_examples, take_range
from featcal_cli.data.vocabulary import renumber
from featcal_cli.engine.answers import choose_rows, find_owners, gives_logits, project_randomly, read_output
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.gradient_sums import GradientSums
from featcal_cli.engine.hooks import intercept_matmuls
from featcal_cli.engine.token_weights import token_weights
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.models.module_kinds import LINEAR_KINDS, channels_last, read_parameters
from featcal_cli.models.products import Routing
from featcal_cli.models.token_layout import (
    Layout,
    Weights,
    count_tokens,
    seed_examples,
    token_lengths,
)
from featcal_cli.models.tracing import BlockCall, first_tensor, tensors_in

ENOUGH_GRADIENTS, MOST_PROJECTIONS = 128, 3
"""Number of random projections at which a task has enough, and largest number for each example."""
MOST_TOKENS = 1 << 14
"""Largest number of a task's tokens that are looked at, as a language model's examples are long."""
PREDICTIONS = 64
"""Largest number of an example's predictions that are projected: a causal model makes one a token, each over its
vocabulary."""
KEPT_BYTES = 1 << 28
"""Bytes of block arguments up to which batches are processed together."""


class OutputGradients(NamedTuple):
    """Summary of the gradients of an expert's outputs at its Linear modules, by their paths in merged, on the CPU.
    Modules that do not reach the outputs are missing."""

    factors: dict[str, Tensor]
    """R [r, d_out] with RᵀR = the mean of g gᵀ over its mean diagonal, in its largest directions
    (`GradientSums.factor`). g [d_out] is the gradient of a random projection of the outputs at the module's output."""
    fitted: dict[str, Tensor]
    """‖g‖² at the tokens of each calibration example [n, longest], over its mean at all tokens that count. It is 1 for
    examples that were not looked at. Modules whose rows are not single tokens are missing."""
    checked: dict[str, Tensor]
    """‖g‖² at the tokens of the examples that updates are checked on, in the same form."""


@dataclass
class _BlockStep:
    """One call of a block in a pass, with what the backward pass needs of it."""

    call: BlockCall
    padding: Weights
    """Masks by token axis: 1 for tokens that count and 0 for padding."""
    leaves: list[Tensor]
    """Floating-point tensors of the block's output, detached: all that follows was computed from these."""
    gradients: list[list[Tensor | None]]
    """Gradients at the leaves, by projection."""


class CheckpointedPass:
    """One pass of an expert over one batch, forwards and then backwards, with every block as a checkpoint.

    1. `forward_block` runs each block without a graph and keeps its arguments. Its output is cut off as leaves, so that
       only the model's code between two blocks is differentiated.
    2. `backward_projections` sends random projections of the outputs back to the leaves of the last blocks.
    3. `backward_block` runs the last remaining block again, with a graph, from its kept arguments. The gradients at its
       leaves give those at its modules' outputs, which are summed, and those at its arguments, which go on to the
       leaves of earlier blocks.
    """

    def __init__(self, expert: BlockRunner, entry: str, batch: Batch, projections: int, seed: int) -> None:
        (self._paused,) = expert.start([expert.place(batch)], entry)
        self._expert, self._projections = expert, projections
        # by the expert's own ids: those of merged may be in any order
        own_ids = None if expert.token_ids is None else expert.token_ids.cpu()
        self._seeds = seed_examples(renumber(batch, own_ids), seed)
        self.steps: list[_BlockStep] = []
        self.sizes: dict[str, Tensor] = {}
        """Sums of ‖g‖² over projections at each token [B, length], by the module's path; 0 for padding."""
        self.counts: dict[str, int] = {}
        """Number of tokens that count, by the module's path."""

    @property
    def bytes_a_block(self) -> int:
        """Bytes of the arguments of one block."""
        return sum(tensor.nbytes for tensor in self._paused.tensors)

    @property
    def batch(self) -> Batch:
        return self._paused.batch

    def forward_block(self, block: Block) -> None:
        """Run all calls of a block that the pass is paused at."""
        while (call := self._paused.call) is not None and self._paused.is_at(block):
            padding = token_weights(self._paused, block, cls_tokens=False)
            output = tree_map_only(Tensor, _as_leaf, self._paused.run_block(block))
            leaves = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
            self.steps.append(
                _BlockStep(call, padding, leaves, [[None] * len(leaves) for _ in range(self._projections)])
            )
            # a model may change in place what a block has returned, which a leaf does not bear
            self._paused.advance(tree_map_only(Tensor, torch.clone, output), gradients=True)

    @property
    def is_through(self) -> bool:
        return bool(self._paused.dead)

    def backward_projections(self) -> None:
        """Send random projections of the model's outputs back to the leaves of the last blocks. Each example draws from
        its own seed, so that the rest of the batch changes nothing."""
        are_logits = gives_logits(self._paused.module, self._paused.output)
        output = read_output(self._paused.output)
        rows, owners = choose_rows(output, self.batch), find_owners(output, self.batch).cpu()
        generators = [torch.Generator().manual_seed(seed) for seed in self._seeds]
        chosen: list[Tensor] = []
        for number, generator in enumerate(generators):
            own = (owners == number).nonzero()[:, 0]
            if len(own) > PREDICTIONS:
                own = own[torch.randperm(len(own), generator=generator)[:PREDICTIONS]]
            chosen.append(own)
        rows = rows[torch.cat(chosen).to(rows.device)]
        for projection in range(self._projections):
            pairs = zip(chosen, generators, strict=True)
            noise = torch.cat([torch.randn(len(own), rows.shape[1], generator=generator) for own, generator in pairs])
            direction = project_randomly(rows, noise.to(rows), are_logits=are_logits)
            self._backward_to_leaves([(rows, direction)], projection)

    def backward_block(self, block: Block, sums: GradientSums | None) -> None:
        """Send gradients back through the last remaining step, a call of `block`, and add those at its modules to
        `sums`, if given, and to `sizes`."""
        step = self.steps.pop()
        if all(gradient is None for gradients in step.gradients for gradient in gradients):
            return  # nothing of it reaches the outputs
        of_experts = {f"{block.name}.{module.name}" for module in block.modules if module.is_routed}
        layouts = {f"{block.name}.{module.name}": module.layouts for module in block.modules}
        given = {id(x): x for x in tensors_in(step.call) if x.is_floating_point()}
        copies = {key: _as_leaf(x) for key, x in given.items()}
        with self._run_again(step.call, block, copies) as (output, inside):
            returned = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]
            origins = [(x, copies[key]) for key, x in given.items() if x.requires_grad]
            wanted = [*(y for _, y in inside), *(copy for _, copy in origins)]
            for projection, gradients in enumerate(step.gradients):
                ends = [(x, g) for x, g in zip(returned, gradients, strict=True) if g is not None and x.requires_grad]
                at = _differentiate(ends, wanted, again=projection + 1 < self._projections)
                for (name, _), gradient in zip(inside, at, strict=False):
                    if gradient is None:
                        continue
                    module = self._expert.module(name)
                    gradient = channels_last(module, gradient)
                    if name not in of_experts:
                        self._add_sizes(layouts[name], name, gradient, step)
                    if sums is not None:  # a function may return [.., heads, d]
                        rows = gradient.reshape(-1, read_parameters(module).weight[..., 0].numel())
                        sums.add(name, rows, of_experts=name in of_experts)
                before = zip((x for x, _ in origins), at[len(inside) :], strict=True)
                self._backward_to_leaves([(x, gradient) for x, gradient in before if gradient is not None], projection)

    def _add_sizes(self, layouts: Sequence[Layout], path: str, gradient: Tensor, step: _BlockStep) -> None:
        """Add ‖g‖² at the tokens of a module that is called once, as far as its rows are tokens."""
        axis = layouts[0].axis if len(layouts) == 1 else None
        if (
            axis is None
            or (sizes := layouts[0].sum_tokens(gradient.float().square(), count_examples(self.batch))) is None
        ):
            return
        hidden = first_tensor((step.call.args, step.call.kwargs))
        # padding of a convolution makes more, which the model drops
        if hidden is not None:
            sizes = sizes[:, : token_lengths(self.batch, hidden).get(axis)]
        mask = step.padding.get(axis)
        if mask is None:
            mask = torch.ones_like(sizes)
        elif mask.shape != sizes.shape:
            return  # which tokens count is not known
        self.counts[path] = int(mask.sum())
        sizes = (sizes * mask).cpu()
        self.sizes[path] = self.sizes[path].add_(sizes) if path in self.sizes else sizes

    @contextmanager
    def _run_again(
        self, call: BlockCall, block: Block, copies: Mapping[int, Tensor]
    ) -> Iterator[tuple[Any, list[tuple[str, Tensor]]]]:
        """Run a block again on copies of its arguments, with a graph. Yields its output and those of its Linear
        modules, with their paths."""
        inside: list[tuple[str, Tensor]] = []
        with ExitStack() as hooks, ExitStack() as precision:
            linear = [module for module in block.modules if module.kind in LINEAR_KINDS]
            for module in (module for module in linear if module.functional is None):
                path = f"{block.name}.{module.name}"
                hook = self._expert.module(path).register_forward_hook(partial(_keep_output, inside, path))
                hooks.callback(hook.remove)
            paths = {x.functional.weight: f"{block.name}.{x.name}" for x in linear if x.functional is not None}
            dtype = None
            if block.name in self._expert.overflowed_blocks:
                precision.enter_context(self._expert.precise(block.name))
                dtype = torch.float32
            self._expert.bring(block.name)
            if paths:
                watch = intercept_matmuls(
                    self._expert,
                    block,
                    after=lambda weight, y: _keep_output(inside, paths[weight], None, None, y),
                    routing=Routing() if block.is_mixture else None,
                )
                hooks.enter_context(watch)
            with torch.enable_grad():
                args, kwargs = tree_map_only(Tensor, partial(_copy_argument, copies, dtype), (call.args, call.kwargs))
                output = self._expert.module(block.name).forward(
                    *args, **kwargs
                )  # outside of a pass, so it does not pause
            hooks.close()
            yield output, inside

    def _backward_to_leaves(self, ends: Sequence[tuple[Tensor, Tensor]], projection: int) -> None:
        """Add the gradients at leaves of the remaining steps that follow from the gradients of `ends`."""
        leaves = [leaf for step in self.steps for leaf in step.leaves]
        at = iter(_differentiate([(x, g) for x, g in ends if x.requires_grad], leaves, again=True))
        for step in self.steps:
            for number in range(len(step.leaves)):
                if (gradient := next(at, None)) is not None:
                    known = step.gradients[projection][number]
                    step.gradients[projection][number] = gradient if known is None else known + gradient


def _differentiate(
    ends: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor], *, again: bool
) -> Sequence[Tensor | None]:
    """Gradients at the `wanted` tensors, given pairs of tensor and gradient as `ends`; None where nothing depends on
    them. The graph is kept if it is needed `again`."""
    if not ends or not wanted:
        return [None] * len(wanted)
    outputs, gradients = zip(*ends, strict=True)
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=again, allow_unused=True)


def measure_output_gradients(
    expert: BlockRunner,
    architecture: Architecture,
    entry: str,
    fitted: Sequence[Batch],
    checked: Sequence[Batch],
    seed: int,
) -> OutputGradients:
    """Measure gradients of random projections of an expert's outputs on the calibration examples, and only their sizes
    on those that updates are checked on.

    Each block runs forwards, and once more with gradients, on one batch after the other, so that its weights are
    brought once for every KEPT_BYTES of block arguments.
    """
    sums = GradientSums(seed)
    of_fitted = _measure_batches(expert, architecture, entry, fitted, seed, sums)
    factors = {name: sums.factor(name).cpu() for name in sums.sums}
    of_checked = _measure_batches(expert, architecture, entry, checked, seed, None)
    expert.give_back()
    return OutputGradients(factors, of_fitted, of_checked)


def _measure_batches(
    expert: BlockRunner,
    architecture: Architecture,
    entry: str,
    batches: Sequence[Batch],
    seed: int,
    sums: GradientSums | None,
) -> dict[str, Tensor]:
    """Add the gradients of some batches to the sums, if given, and return their sizes at each token."""
    chosen = take_range(batches, 0, _count_chosen(batches))
    examples = sum(map(count_examples, chosen))
    projections = min(MOST_PROJECTIONS, max(1, ceil(ENOUGH_GRADIENTS / max(1, examples)))) if sums is not None else 1
    done: list[CheckpointedPass] = []
    with expert.on_device():
        while chosen:
            passes: list[CheckpointedPass] = []
            kept = 0
            while chosen and kept < KEPT_BYTES:
                passes.append(CheckpointedPass(expert, entry, chosen.pop(0), projections, seed))
                kept += passes[-1].bytes_a_block * len(architecture.blocks)
            _run_passes(architecture.blocks, expert, passes, sums)
            done += passes
    names = set[str]().union(*(traced.sizes for traced in done))
    everywhere = [name for name in sorted(names) if all(name in traced.sizes for traced in done)]
    return {name: _relative_sizes(name, done, sum(map(count_examples, batches))) for name in everywhere}


def _relative_sizes(name: str, passes: Sequence[CheckpointedPass], examples: int) -> Tensor:
    """Sizes of a module's gradients at the tokens of all examples [n, longest], over their mean at tokens that count.
    Examples that were not looked at come last and have 1."""
    sizes = [traced.sizes[name] for traced in passes]
    total, counted = sum(float(of.sum()) for of in sizes), sum(traced.counts[name] for traced in passes)
    relative = torch.ones(examples, max(of.shape[1] for of in sizes))
    start = 0
    for of in sizes if total > 0 else ():
        # a total below what float32 can be divided by is one all the same
        relative[start : start + len(of), : of.shape[1]] = of.double() / (total / counted)
        start += len(of)
    return relative


def _count_chosen(batches: Sequence[Batch]) -> int:
    """Number of leading examples to look at: as many as have MOST_TOKENS text tokens together, at least one, or all if
    they are no text."""
    lengths = [length for batch in batches for length in count_tokens(batch)]
    return max(1, sum(total <= MOST_TOKENS for total in accumulate(lengths)))


def _run_passes(
    blocks: Sequence[Block],
    expert: BlockRunner,
    passes: Sequence[CheckpointedPass],
    sums: GradientSums | None,
) -> None:
    """Run passes to their ends, and the gradients of their outputs back, block by block."""
    by_path = {path: block for block in blocks if (path := expert.model.own_path(block.name)) is not None}
    while not all(traced.is_through for traced in passes):
        for block in blocks:
            for traced in passes:
                traced.forward_block(block)
            expert.give_back(block.name)
    for traced in passes:
        traced.backward_projections()
    while any(traced.steps for traced in passes):
        for traced in (traced for traced in passes if traced.steps):
            block = by_path[traced.steps[-1].call.block]
            traced.backward_block(block, sums)
        expert.give_back(block.name)


def _as_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _copy_argument(copies: Mapping[int, Tensor], dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """The copy of a tensor among a block's arguments. It is cloned, as a block may change it in place and a leaf must
    not be."""
    copy = copies.get(id(x))
    return x if copy is None else copy.clone() if dtype is None else copy.to(dtype, copy=True)


def _keep_output(kept: list[tuple[str, Tensor]], path: str, _: object, __: object, y: Any) -> None:
    """Keep a module's output; used as a hook."""
    if isinstance(y, Tensor) and y.requires_grad:
        kept.append((path, y))
