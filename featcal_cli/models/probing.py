"""Two small probe runs of a model, which show what tokens the rows are that a block's modules read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch, forward_names
from featcal_cli.models import token_layout
from featcal_cli.models.module_kinds import rows_shape
from featcal_cli.models.text_rows import TextRows, find_text_rows, see_text_change
from featcal_cli.models.token_layout import (
    BLOCK_AXIS,
    CROSS_ATTENTION_AXIS,
    DECODER_AXIS,
    ENCODER_AXIS,
    MASK,
    Axes,
    Layout,
    learn_layout,
)
from featcal_cli.models.tracing import ForwardError, Trace, as_hook, find_blocks, is_sequence, leaves_in, trace
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text

Layouts = tuple[Layout, ...]
"""Layout of the input of each call of a module in one run of its block."""


class Padding(NamedTuple):
    """Means of recognising the padding rows of a sequence that is no known token axis."""

    holds_text: bool = False
    """Whether the sequence holds the text, beside other rows or padded by the model."""
    text_rows: TextRows | None = None
    """Position of the text in the sequence, if it could be found."""
    mask: int | None = None
    """Position of the sequence's mask among a block's arguments. The argument is None in calls where nothing is
    masked."""


class CrossAttentionInput(NamedTuple):
    """The sequence that cross-attention reads beside the hidden states of its block, such as an encoder's output."""

    place: int
    """Position among the arguments of a block."""
    width: int
    """Its last dimension, d."""
    padding: Padding


class OtherRows(NamedTuple):
    """Layouts of a block's modules, once rows along no known token axis have been looked at."""

    layouts: dict[str, Layouts]
    """Layouts of all modules of the block, by name."""
    cross_attention: CrossAttentionInput | None


@dataclass
class ProbeRun:
    """Results of the two probes of one kind of inputs."""

    model: nn.Module
    entry: str
    first: Trace
    second: Trace
    axes: Axes
    blocks: list[str]
    module: nn.Module
    """The module that ran: the model or a tower of it."""
    probe: Batch
    """Inputs of the first run."""
    _texts: dict[str, TextRows | None] = field(default_factory=dict)
    """Position of the text in each stack of blocks, found once."""
    _masks: dict[tuple[str, int], int | None] = field(default_factory=dict)

    def block_axis(self, block: str) -> tuple[Layout, Axes]:
        """The layout of the block's hidden states, and all token axes, with the block's own axis if it has one."""
        axes = dict(self.axes)
        if block not in self.first.shapes:
            return Layout(None), axes
        first, second = self.first.shapes[block][0], self.second.shapes[block][0]
        layout = learn_layout(first, second, axes)
        is_batch = len(first) == len(second) == 3 and (first[0], second[0]) == token_layout.PROBE_EXAMPLES  # [B, S, d]
        if layout.axis is None and is_batch:
            axes[BLOCK_AXIS] = (first[1], second[1])
            layout = learn_layout(first, second, axes)
        return layout, axes

    def layouts(self, path: str, block_calls: int, axes: Axes, module: nn.Module | None = None) -> Layouts:
        """The layout of the input of each call of a module in one run of its block."""
        first, second = (
            [rows_shape(module, shape) for shape in of.shapes.get(path, [])] for of in (self.first, self.second)
        )
        calls, rest = divmod(len(first), max(block_calls, 1))
        if len(first) != len(second) or rest:
            return (Layout(None),)
        return tuple(learn_layout(a, b, axes) for a, b in zip(first[:calls], second[:calls], strict=True))

    def gives_no_rows(self, path: str) -> bool:
        """Whether a module is only ever given no rows, such as the adapter of a language that no example is in."""
        shapes = [shape for of in (self.first, self.second) for shape in of.shapes.get(path, ())]
        return bool(shapes) and all(0 in shape for shape in shapes)

    def source_layout(self, paths: Collection[str], axes: Axes) -> Layouts:
        """The layout of the features that a mixture takes the tokens of these experts' modules from."""
        routed = [[trace.routed[path] for path in paths if path in trace.routed] for trace in (self.first, self.second)]
        return (learn_layout(routed[0][0], routed[1][0], axes) if all(routed) else Layout(None),)

    def find_padding(self, block: str, layout: Layout, axes: Axes) -> Padding:
        """Find how padding among a block's hidden states is recognised."""
        if layout.axis != BLOCK_AXIS:
            return Padding()
        text = self._look_for_text(block, layout, axes)
        sequences = self.first.sequences.get(block, {})  # its hidden states are the first
        return self._complete(block, min(sequences), *text) if sequences else Padding(*text)

    def _complete(self, block: str, place: int, holds_text: bool, text_rows: TextRows | None) -> Padding:
        """Find how padding in a sequence that a block is given is recognised. Its mask is looked for once a stack, and
        only if nothing else helps."""
        # else the masks are about the text, which is not in it
        is_about = holds_text or "input_ids" not in self.probe
        if text_rows is not None or not is_about:
            return Padding(holds_text, text_rows)
        key = block.rpartition(".")[0], place
        if key not in self._masks:
            self._masks[key] = self._find_mask(block, place)
        return Padding(holds_text, text_rows, self._masks[key])

    def _look_for_text(self, block: str, layout: Layout, axes: Axes) -> tuple[bool, TextRows | None]:
        """Whether a block's own token axis holds the text, and the text's position."""
        only_text = not any(tensor.is_floating_point() for tensor in self.probe.values())
        holds_text = layout.axis == BLOCK_AXIS and (len(set(axes[BLOCK_AXIS])) > 1 or only_text)
        is_fixed = "input_ids" in self.probe and len(set(self.axes.get(ENCODER_AXIS, ()))) == 1
        if layout.axis != BLOCK_AXIS or not (holds_text or is_fixed):
            return holds_text, None
        # needed where the text has one length in both probes
        rows = self._find_text_rows(block)
        return holds_text or rows is not None, rows

    def _find_text_rows(self, block: str) -> TextRows | None:
        """Position of the text in the input of the stack that this block belongs to; looked for once."""
        path = block.rpartition(".")[0]
        if path not in self._texts:
            stack = [other for other in self.blocks if other.rpartition(".")[0] == path]
            self._texts[path] = find_text_rows(self.model, self.module, self.probe, stack, self.axes[ENCODER_AXIS][0])
        return self._texts[path]

    def match_others(self, block: str, modules: Mapping[str, tuple[nn.Module, Layouts]], axes: Axes) -> OtherRows:
        """Layouts of a block's modules, improved for those that read rows of unknown padding, such as a second
        sequence."""
        layouts = {name: of for name, (_, of) in modules.items()}
        for name in self._find_apart(block, layouts):
            layouts[name] = tuple(replace(layout, is_apart=True) for layout in layouts[name])
        unclear = {name: modules[name][0] for name, of in layouts.items() if any(layout.is_unclear for layout in of)}
        first, second = (of.sequences.get(block, {}) for of in (self.first, self.second))
        for place in [at for at in first if at in second]:
            one, other = first[place], second[place]
            with_cross_attention = {**axes, CROSS_ATTENTION_AXIS: (one[1], other[1])}
            calls = self.first.calls.count(block)
            matched = {
                name: self.layouts(f"{block}.{name}", calls, with_cross_attention, module)
                for name, module in unclear.items()
            }
            reading = {
                name: of for name, of in matched.items() if {layout.axis for layout in of} == {CROSS_ATTENTION_AXIS}
            }
            if reading and (one[0], other[0]) == token_layout.PROBE_EXAMPLES:
                padding = self._complete(
                    block, place, *self._find_cross_attention_text(block, with_cross_attention[CROSS_ATTENTION_AXIS])
                )
                return OtherRows(layouts | reading, CrossAttentionInput(place, one[2], padding))
        return OtherRows(layouts, None)

    def _find_cross_attention_text(self, block: str, lengths: tuple[int, int]) -> tuple[bool, TextRows | None]:
        """Whether a sequence of these lengths in the two probes may hold the text, and the text's position. Both are
        those of the last stack before this block whose hidden states have as many rows."""
        for other in reversed(self.blocks[: self.blocks.index(block)]):
            layout, axes = self.block_axis(other)
            if layout.axis == BLOCK_AXIS and axes[BLOCK_AXIS] == lengths:
                return self._look_for_text(other, layout, axes)
        return True, None

    def _find_mask(self, block: str, place: int) -> int | None:
        """Position of a sequence's mask among a block's arguments; None if there is none. The second half of all inputs
        but a decoder's is masked: the mask is the argument that then hides the last row and not the first."""
        masks = {
            name: mask.clone()
            for name, mask in self.probe.items()
            if token_layout.is_mask(name) and not name.startswith(DECODER_AXIS)
        }
        if not masks or next(self.model.parameters()).is_meta:
            return None
        for mask in masks.values():
            mask[:, mask.shape[1] // 2 :] = 0
        given: list[Any] = []
        hook = self.model.get_submodule(block).register_forward_pre_hook(
            as_hook(lambda _, args, kwargs: given.extend(leaves_in((args, kwargs)))), with_kwargs=True
        )
        try:
            trace(self.module, {**self.probe, **masks}, next(self.model.parameters()).dtype)
        except ForwardError:
            return None
        finally:
            hook.remove()
        sequence = given[place] if place < len(given) else None
        if not is_sequence(sequence):
            return None
        for at, leaf in enumerate(given):
            seen = read_mask(leaf, sequence)
            if seen is not None and seen[:, 0].all() and not seen[:, -1].any():
                return at
        return None

    def _find_apart(self, block: str, layouts: Mapping[str, Layouts]) -> set[str]:
        """Modules that read rows apart from the text, among those that may read windows of it. They read the same
        whatever the text is, or as many rows as another stack has patches: images in cross-attention, for example."""
        unclear = {
            name: {dim.factor for layout in of for dim in layout.dims or ()}
            for name, of in layouts.items()
            if f"{block}.{name}" not in self.first.functional and any(layout.may_be_windows for layout in of)
        }
        if not unclear or next(self.model.parameters()).is_meta:
            return set()
        patches = self._count_patches()
        apart = {name for name, factors in unclear.items() if factors & patches}
        names = [name for name in unclear if name not in apart]
        paths = [f"{block}.{name}" for name in names]
        if names and (pair := see_text_change(self.model, self.module, self.probe, paths)):
            apart |= {name for name in names if all(map(torch.equal, *(inputs[f"{block}.{name}"] for inputs in pair)))}
        return apart

    def _count_patches(self) -> set[int]:
        """Numbers of rows of the stacks that read no text, none of which is padding."""
        if MASK in self.probe and "input_ids" not in self.probe:
            return set()  # which it is then about
        owned = ((name, *self.block_axis(name)) for name in self.blocks)
        return {
            axes[BLOCK_AXIS][0]
            for name, layout, axes in owned
            if layout.axis == BLOCK_AXIS and not self._look_for_text(name, layout, axes)[0]
        } - {1}


MASKED = -1e3
"""Threshold between masks and position biases: what a mask adds to attention scores to hide a row is below it."""


def read_mask(x: Any, sequence: Tensor) -> Tensor | None:
    """Rows of a sequence [B, n, d] that any row may attend to, [B, n], read from a mask. A mask is boolean or integer
    [B, n], or is added to attention scores as [B, 1, .., n]. None if x is no mask of this sequence."""
    count, frames = sequence.shape[:2]
    if not isinstance(x, Tensor) or x.ndim not in (2, 3, 4) or (x.shape[0], x.shape[-1]) != (count, frames):
        return None
    if x.ndim > 2 and x.shape[1] != 1:
        return None
    if x.is_floating_point() and (x.ndim == 2 or not bool(((x == 0) | (x <= MASKED)).all())):
        return None
    seen = x == 0 if x.is_floating_point() else x.bool()
    return seen.reshape(count, -1, frames).any(1)


def probe_model(model: PreTrainedModel, task: str, batch: Batch) -> ProbeRun:
    """Run the model, or the tower that takes these inputs, on two probes. Raises DataError if none can run."""
    problem: Exception | None = None
    for entry, module in _entries(model, batch):
        for resize in ({ENCODER_AXIS, DECODER_AXIS}, {DECODER_AXIS}, {ENCODER_AXIS}, set[str]()):
            (first, second), axes = token_layout.make_probes(batch, resize)
            try:
                one, other = (trace(module, probe, model.dtype).with_prefix(entry) for probe in (first, second))
            except ForwardError as error:
                problem = problem or error
            else:
                return ProbeRun(model, entry, one, other, axes, find_blocks(model, one), module, first)
    shapes = {name: list(tensor.shape[1:]) for name, tensor in batch.items()}
    assert problem is not None
    raise DataError(
        f"merged cannot run on the examples: {exception_text(problem)}",
        where=f"{task}: an example has {shapes}",
        fix="give all inputs that its forward needs, no more tokens than it takes, and check merged's config.json",
    ) from problem


def _entries(model: PreTrainedModel, batch: Batch) -> Iterator[tuple[str, nn.Module]]:
    """Yield the whole model, then its towers that take these inputs, outermost first."""
    yield "", model
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and forward_names(module).issuperset(batch):
            yield name, module
