"""Measure gradients of an expert's outputs at its modules: how far a change at each module and token moves the
outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from featcal_cli.data.batches import (
    Batch,
    Part,
    axis_lengths,
    count_examples,
    count_tokens,
    count_vocabulary,
    seed_examples,
    share_batches,
    split_first,
    take_range,
)
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.gradient_sums import GradientSums
from featcal_cli.engine.hooks import intercept_matmuls
from featcal_cli.engine.outputs import choose_rows, draw_noise, find_owners, gives_logits, project_randomly, read_output
from featcal_cli.engine.paused_forward import start_forward
from featcal_cli.engine.token_weights import padding_masks
from featcal_cli.engine.weight_uploads import drop_weights, fetch_weights
from featcal_cli.models.architecture import Architecture, Block, Module
from featcal_cli.models.module_kinds import LINEAR_KINDS, channels_last, keep_layout, read_parameters
from featcal_cli.models.products import Routing
from featcal_cli.models.token_rows import OWN_AXIS, PerToken
from featcal_cli.models.tracing import BlockCall
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.hardware import is_out_of_memory, trim_heap

ENOUGH_GRADIENTS, MOST_PROJECTIONS = 64, 2
"""Number of random projections of outputs up to which examples have more than one each, and the largest number of
projections per example (benchmarks/NOTES.md)."""
MOST_TOKENS = 1 << 14
"""Largest number of text tokens that are used of a task, as examples of language models are long."""
PREDICTIONS = 64
"""Largest number of predictions that are projected per example, as a causal model predicts at every token, over its
whole vocabulary."""
KEPT_BYTES = 1 << 28
"""Size in bytes of the stored block arguments at which a group of batches is full."""
GRAPH_BYTES, SAVED_TENSORS = 1 << 29, 2
"""Size in bytes that the graphs of a group of batches may take, or that of one batch where batches are split; and
number of tensors that a graph is taken to save for each output of a Linear module."""


class OutputGradients(NamedTuple):
    """Summary of the gradients of an expert's outputs at its Linear modules, by the module's path in merged, on the
    CPU. Modules that have no effect on the outputs are left out, and those whose rows all examples share: their
    gradients are sums over a batch."""

    factors: dict[str, Tensor]
    """R [r, d_out], where RᵀR is the mean of g gᵀ divided by its mean diagonal, in its largest directions
    (`GradientSums.factors`). g [d_out] is the gradient of a random projection of the outputs with respect to the
    module's output."""
    sizes: dict[str, Tensor]
    """‖g‖² at the tokens of each example [n, longest], divided by its mean over all tokens except padding. It is 1 for
    examples that were not used. Modules whose rows are not single tokens are left out."""


@dataclass
class GradientGroup:
    """State and settings that passes share which run block by block together."""

    expert: BlockRunner
    sums: GradientSums
    """The sums to which gradients at modules are added."""
    projections: int
    """Number of random projections of each example's outputs."""
    seed: int
    places: Tensor | None
    """The place of each of the expert's token ids in an order that does not depend on ids; None if it is not known."""
    keeps_weights: bool
    """Whether the weights of all blocks stay on the device."""
    graph_room: int = GRAPH_BYTES
    """Bytes that are left for their graphs."""
    latest: str = ""
    """Name of the block that ran last, whose weights are in use."""

    def enter(self, block: Block) -> None:
        """Note that a block's weights are in use, and release those of the one before. On a CPU, which reads them where
        they lie, only their memory is released."""
        if self.latest not in ("", block.name) and (self.expert.device.type == "cpu" or not self.keeps_weights):
            self.expert.release(self.latest)
        self.latest = block.name


def choose_places(places: Tensor | None, module: PreTrainedModel, count: int) -> Tensor | None:
    """Return the places of the token ids if the first of the `count` classes of a model's outputs are these tokens;
    None if not."""
    # a decoder may write tokens of a vocabulary of its own, which is not the tokenizer's
    sizes = {count, len(getattr(module.get_output_embeddings(), "weight", ())), count_vocabulary(module)}
    return places if places is not None and len(places) <= count and len(sizes) == 1 else None


class GradientPass:
    """One forward pass of an expert over one batch, and the backward pass of its outputs' gradients by autograd.

    Hooks at the outputs of the Linear modules of each block record the gradients there. The graph of a block is kept
    while there is room for it. After that, blocks are checkpoints: each stores only its arguments, and runs again in
    the backward pass.
    """

    def __init__(self, group: GradientGroup, entry: str, batch: Batch) -> None:
        expert = group.expert
        self.paused = start_forward(expert, expert.place(batch), entry)
        self._expert, self._group = expert, group
        own_ids = None if expert.token_ids is None else expert.token_ids.cpu()
        # by tokens, not by ids: these may be in any order, merged's as well as the expert's
        self._seeds = seed_examples(renumber(renumber(batch, own_ids), group.places), group.seed)
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        """Inputs of blocks at which the backward pass ends, by id, each with the leaf tensor that replaces it."""
        self.sizes: dict[str, Tensor] = {}
        """Sums of ‖g‖² over projections for each token [B, length], by the module's path; 0 for padding."""
        self.counts: dict[str, Tensor] = {}
        """Number of tokens [] that are not padding, by the module's path."""

    def run_block(self, block: Block) -> None:
        """Run a block for as long as the pass is paused before it."""
        while self.paused.call is not None and self.paused.is_at(block):
            args, kwargs = tree_map_only(Tensor, self._as_leaf, (self.paused.call.args, self.paused.call.kwargs))
            call = self.paused.call._replace(args=args, kwargs=kwargs)
            masks, hidden = padding_masks(self.paused, block), self.paused.hidden
            lengths = axis_lengths(self.paused.batch) | ({OWN_AXIS: hidden.shape[1]} if hidden.ndim > 2 else {})
            run = partial(self._run, block, call, masks, lengths)
            with torch.enable_grad():
                # a graph refers to weights, which must not be moved before it is through
                if self._group.graph_room > 0 and self._group.keeps_weights:
                    output = run()
                else:
                    output = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
            self.paused.advance(output, gradients=True)

    def _run(self, block: Block, call: BlockCall, masks: PerToken, lengths: Mapping[str, int]) -> Any:
        """Run a block, forwards or again on the way back."""
        self._group.enter(block)
        # also on the way back: intercepted products may be computed in another way, and both runs must be the same
        with self._watching(block, masks, lengths):
            return self.paused.run_block(block, call=call, gradients=True)

    def _as_leaf(self, x: Tensor) -> Tensor:
        """Return a leaf that requires gradients in place of a floating-point tensor that does not. Other tensors are
        returned as they are."""
        if x.requires_grad or not x.is_floating_point():
            return x
        if id(x) not in self._leaves:
            self._leaves[id(x)] = x, x.detach().requires_grad_()
        return self._leaves[id(x)][1]

    @contextmanager
    def _watching(self, block: Block, masks: PerToken, lengths: Mapping[str, int]) -> Iterator[None]:
        """Hook the outputs of a block's Linear modules, so that gradients at them are received later."""
        linear = [module for module in block.modules if module.kind in LINEAR_KINDS]
        functional = {module.functional.weight: module for module in linear if module.functional is not None}
        calls = Counter[str]()

        def watch(module: Module, y: Any) -> None:
            if isinstance(y, Tensor) and y.requires_grad:
                self._group.graph_room -= SAVED_TENSORS * y.nbytes
                calls[module.name] += 1
                y.register_hook(partial(self._receive, block, module, masks, lengths, calls))

        def watch_output(module: Module, y: Any) -> Any:
            # a view, as a Linear may return, would lose its hook when the block changes it in place
            own = torch.ops.aten._unsafe_view(y, y.shape) if isinstance(y, Tensor) and y._is_view() else y
            watch(module, own)
            return own

        with ExitStack() as hooks:
            for module in (module for module in linear if module.functional is None):
                held = self._expert.module(f"{block.name}.{module.name}")
                hooks.callback(held.register_forward_hook(lambda _, __, y, of=module: watch_output(of, y)).remove)
            if functional:
                watcher = intercept_matmuls(
                    self._expert,
                    block,
                    after=lambda weight, y: watch(functional[weight], y),
                    routing=Routing() if block.is_mixture else None,
                )
                hooks.enter_context(watcher)
            yield

    def _receive(
        self,
        block: Block,
        module: Module,
        masks: PerToken,
        lengths: Mapping[str, int],
        calls: Mapping[str, int],
        gradient: Tensor,
    ) -> None:
        """Add the gradient at a module's output to the module's sums, and to the sizes at tokens."""
        path = f"{block.name}.{module.name}"
        self._group.enter(block)
        held = self._expert.module(path)
        gradient = channels_last(held, gradient)
        # a long text may need more calls than the probes, as CANINE's in parts does
        if not module.is_routed and calls[module.name] == len(module.rows):
            self._add_sizes(path, module, gradient, masks, lengths)
        # a row that all examples read has the sum of their gradients, which depends on the batch
        if not any(rows.is_shared for rows in module.rows):
            # a function may return [.., heads, d]
            rows = gradient.reshape(-1, read_parameters(held).weight[..., 0].numel())
            self._group.sums.add(path, rows, of_experts=module.is_routed)

    def _add_sizes(
        self, path: str, module: Module, gradient: Tensor, masks: PerToken, lengths: Mapping[str, int]
    ) -> None:
        """Add ‖g‖² to the sizes at tokens, if the module is called once and its rows are tokens."""
        rows = module.rows[0] if len(module.rows) == 1 else None
        sizes = rows and rows.sum_by_token(gradient.float().square(), count_examples(self.paused.batch))
        if rows is None or sizes is None:
            return
        # padding of a convolution makes more, which the model drops
        sizes = sizes[:, : lengths.get(rows.axis)]
        mask = masks.get(rows.axis)
        if mask is None:
            mask = torch.ones_like(sizes)
        elif mask.shape != sizes.shape:
            return  # which tokens count is not known
        self.counts[path] = mask.sum()
        sizes = sizes * mask
        self.sizes[path] = self.sizes[path].add_(sizes) if path in self.sizes else sizes

    def send_back(self) -> None:
        """Run the backward pass from random projections of the model's outputs, once the forward pass has ended. The
        projections of each example are drawn from its own seed, so they do not depend on the rest of the batch."""
        are_logits = gives_logits(self.paused.module, self.paused.output)
        output = read_output(self.paused.output)
        rows, owners = choose_rows(output, self.paused.batch), find_owners(output, self.paused.batch).cpu()
        generators = [torch.Generator().manual_seed(seed) for seed in self._seeds]
        chosen: list[Tensor] = []
        for number, generator in enumerate(generators):
            own = (owners == number).nonzero()[:, 0]
            if len(own) > PREDICTIONS:
                own = own[torch.randperm(len(own), generator=generator)[:PREDICTIONS]]
            chosen.append(own)
        places = choose_places(self._group.places, self._expert.model.module, rows.shape[1])
        # rows of padding behind the tokens are no choice, and models of one family have different numbers of them
        last = None if places is None else len(places)
        with torch.enable_grad():
            rows = rows[torch.cat(chosen).to(rows.device), :last]
        leaves = [leaf for _, leaf in self._leaves.values()]
        for projection in range(self._group.projections if rows.requires_grad else 0):
            pairs = zip(chosen, generators, strict=True)
            drawn = torch.cat([draw_noise(len(own), rows.shape[1], generator) for own, generator in pairs])
            drawn = drawn.to(rows.device)
            drawn = drawn if places is None else drawn[:, places.to(rows.device)]
            direction = project_randomly(rows, drawn, are_logits=are_logits)
            again = projection + 1 < self._group.projections
            torch.autograd.grad([rows], leaves, [direction], retain_graph=again, allow_unused=True)
        for of_modules in (self.sizes, self.counts):
            fetched = fetch_weights(list(of_modules.values()))
            of_modules.update(zip(of_modules, (x.clone() for x in fetched), strict=True))
        self.close()

    def close(self) -> None:
        """End the pass and drop its graph, wherever it is."""
        self.paused.close()
        self.paused.output = None
        self._leaves.clear()


def measure_output_gradients(
    expert: BlockRunner,
    architecture: Architecture,
    entry: str,
    batches: Sequence[Batch],
    directions: int,
    seed: int,
    ranks: Ranks,
    places: Tensor | None = None,
) -> OutputGradients:
    """Measure the gradients of random projections of an expert's outputs at its Linear modules, on the first of its
    calibration examples, and keep so many directions of each module's output. `places`: the place of each of the
    expert's token ids in an order of tokens that does not depend on ids. Every rank measures its part of the
    examples and returns the whole result. Raises RuntimeError on all ranks if a pass fails on one.

    Batches are processed in groups whose stored block arguments take about KEPT_BYTES. Each block runs forward on all
    batches of a group in turn, so its weights are moved to the device once per group, and stay there if all blocks have
    room. In the backward pass of each batch, blocks run once more with gradients, except the first ones, whose graphs
    take GRAPH_BYTES; on a CPU batches are split, so that these are all.
    """
    sums, hooks = GradientSums(seed, directions), ExitStack()
    for module in expert.model.module.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
            hooks.callback(module.register_forward_hook(keep_layout).remove)
    used = take_range(batches, 0, count_chosen(batches))
    projections = min(MOST_PROJECTIONS, max(1, round(ENOUGH_GRADIENTS / max(1, sum(map(count_examples, used))))))
    group = GradientGroup(expert, sums, projections, seed, places, expert.keeps_weights())
    done, problem = list[tuple[range, GradientPass]](), ""
    try:
        try:
            done = _run_in_groups(group, architecture, entry, share_batches(used, ranks))
        except RuntimeError as error:
            if ranks.size == 1 or is_out_of_memory(error):
                raise
            problem = str(error) or type(error).__name__
        # no rank waits for the sums of one that has none
        for failure in ranks.gather(problem):
            if failure:
                raise RuntimeError(failure)
        sizes = _relative_sizes(done, batches, ranks)
        sums.sum_over_ranks(ranks, expert.device)
        found = {name: factor for name, factor in sums.factors(ranks).items() if len(factor)}
        own = {name: x.clone() for name, x in zip(found, fetch_weights(list(found.values())), strict=True)}
        factors = ranks.exchange(own, torch.device("cpu"))
    finally:
        hooks.close()
        expert.give_back()
        drop_weights(expert.device)
        trim_heap()
    # sizes of gradients that are only rounding would differ from batch to batch
    return OutputGradients(factors, {name: of for name, of in sizes.items() if name in factors})


def _run_in_groups(
    shared: GradientGroup, architecture: Architecture, entry: str, parts: list[Part]
) -> list[tuple[range, GradientPass]]:
    """Run all passes in groups like `shared`, and return them with the numbers of their examples; `parts` is emptied.
    Where a CPU uses weights where they lie, each pass has as many examples as there is room for graphs: no block runs
    twice."""
    done: list[tuple[range, GradientPass]] = []
    expert, blocks = shared.expert, architecture.blocks
    with expert.on_device():
        most, is_split = 1.0, shared.keeps_weights and expert.device.type == "cpu"
        while parts:
            passes: list[GradientPass] = []
            kept, group = 0, replace(shared)
            while parts and kept < (1 if is_split else KEPT_BYTES):
                part = split_first(parts, most) if is_split else parts.pop(0)
                passes.append(GradientPass(group, entry, part.batch))
                done.append((part.examples, passes[-1]))
                kept += max(1, sum(tensor.nbytes for tensor in passes[-1].paused.tensors) * len(blocks))
            try:
                while not all(each.paused.dead for each in passes):
                    for block, each in product(blocks, passes):
                        each.run_block(block)
                for each in passes:
                    each.send_back()
            finally:
                for each in passes:
                    each.close()
            # a graph grows with its inputs, be they pixels or tokens
            most = GRAPH_BYTES / max(1, GRAPH_BYTES - group.graph_room) * sum(x.numel() for x in part.batch.values())
    return done


def _relative_sizes(
    done: Sequence[tuple[range, GradientPass]], batches: Sequence[Batch], ranks: Ranks
) -> dict[str, Tensor]:
    """Compute the sizes of gradients at the tokens of all examples [n, longest] by module, divided by their mean over
    all tokens except padding; 1 for examples that were not used. Modules whose sizes are not known for all used
    examples are left out. `done`: this rank's passes, with the numbers of their examples."""
    examples = sum(map(count_examples, batches))
    own = [(numbers, {name: (of, int(each.counts[name])) for name, of in each.sizes.items()}) for numbers, each in done]
    passes = [one for of_rank in ranks.gather(own) for one in of_rank]
    names = set[str]().union(*(sizes for _, sizes in passes))
    relative: dict[str, Tensor] = {}
    for name in sorted(name for name in names if all(name in sizes for _, sizes in passes)):
        found = [(numbers, *sizes[name]) for numbers, sizes in passes]
        total, counted = sum(float(of.sum()) for _, of, _ in found), sum(count for *_, count in found)
        relative[name] = torch.ones(examples, max(of.shape[1] for _, of, _ in found))
        for numbers, of, _ in found if total > 0 else ():
            # a total below what float32 can be divided by is one all the same
            relative[name][numbers.start : numbers.stop, : of.shape[1]] = of.double() / (total / counted)
    return relative


def count_chosen(batches: Sequence[Batch]) -> int:
    """Count the leading examples to use: as many as have at most MOST_TOKENS text tokens together, but at least one;
    all examples if they are not text."""
    lengths = [length for batch in batches for length in count_tokens(batch)]
    return max(1, sum(total <= MOST_TOKENS for total in accumulate(lengths)))
