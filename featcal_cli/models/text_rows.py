"""Where the text lies in what a stack of blocks is given, and what its last token changes: both are tried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from featcal_cli.data.batches import Batch
from featcal_cli.models.tracing import ForwardError, as_hook, first_tensor, trace


class TextRows(NamedTuple):
    """A text among the rows of what a stack of blocks is given."""

    start: int
    """Where it begins."""
    around_counts: tuple[bool, bool]
    """Whether what stands before it, and after it, counts: patches do, prompts that a model has learnt do, and the
    padding that a model adds does not."""


def find_text_rows(
    model: nn.Module, module: nn.Module, probe: Batch, stack: Sequence[str], length: int
) -> TextRows | None:
    """Where a text of this length is in the sequence that the first block of a stack is given when the module runs on
    the probe: the one row that changes with the last token tells, or all rows of the text, which a stack before has
    mixed. None where other rows change, or none."""
    pair = see_text_change(model, module, probe, stack[:1])
    if pair is None:
        return None
    one, other = (inputs[stack[0]][0] for inputs in pair)
    if one.shape != other.shape:  # how many frames a voice takes depends on what it says
        return None
    rows = (one != other).any(-1).any(0).nonzero().flatten().tolist()
    start = rows[0] - length + 1 if len(rows) == 1 else -1
    if rows and rows == [*range(rows[0], rows[0] + length)]:
        start = rows[0]
    if start < 0:
        return None
    if any(tensor.is_floating_point() for tensor in probe.values()):
        return TextRows(start, (True, True))
    text = slice(start, start + length)
    around = slice(start), slice(text.stop, one.shape[1])
    before, after = (_changes_text(model, module, probe, stack, rows, text) for rows in around)
    return TextRows(start, (before, after))


def _changes_text(
    model: nn.Module, module: nn.Module, probe: Batch, stack: Sequence[str], rows: slice, text: slice
) -> bool:
    """Whether rows of what the first block of a stack is given change what the last one makes of the text."""
    if rows.start == rows.stop or not rows.stop:
        return False
    made: list[Tensor] = []
    first, last = model.get_submodule(stack[0]), model.get_submodule(stack[-1])

    def disturb(_: nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
        hidden = cast(Tensor, first_tensor((args, kwargs)))
        hidden[:, rows] += hidden.std() * torch.linspace(-1, 1, hidden.shape[-1]).to(hidden)

    def keep(_: nn.Module, __: object, output: object) -> None:
        made.append(cast(Tensor, first_tensor(output))[:, text].clone())

    with ExitStack() as hooks:
        hooks.callback(last.register_forward_hook(as_hook(keep)).remove)
        trace(module, probe, next(model.parameters()).dtype)
        hooks.callback(first.register_forward_pre_hook(as_hook(disturb), with_kwargs=True).remove)
        trace(module, probe, next(model.parameters()).dtype)
    return not all(map(torch.equal, made[: len(made) // 2], made[len(made) // 2 :]))


def see_text_change(
    model: nn.Module, module: nn.Module, probe: Batch, paths: Sequence[str]
) -> list[dict[str, list[Tensor]]] | None:
    """What modules of the model are given when one of them runs on the probe, and on the same with other last tokens;
    None where it has no text, or cannot be changed so."""
    changed = _change_last_token(probe)
    if changed is None:
        return None
    pair = []
    for batch in (probe, changed):
        given: dict[str, list[Tensor]] = {path: [] for path in paths}
        with ExitStack() as hooks:
            for path, seen in given.items():
                hook = model.get_submodule(path).register_forward_pre_hook(
                    as_hook(
                        lambda _, args, kwargs, seen=seen: seen.append(
                            cast(Tensor, first_tensor((*args, *kwargs.values()))).clone()
                        )
                    ),
                    with_kwargs=True,
                )
                hooks.callback(hook.remove)
            try:
                trace(module, batch, next(model.parameters()).dtype)
            except ForwardError:  # the last token marks an image, for example
                return None
        pair.append(given)
    return pair


def _change_last_token(probe: Batch) -> Batch | None:
    """The probe with another token, of the same batch, at the end of each text; None where there is none, or no values
    to change."""
    ids = probe.get("input_ids")
    if ids is None or ids.is_meta:
        return None
    last = ids[:, -1].tolist()
    others = [token for token in ids.unique().tolist() if token not in last]
    if not others:
        return None
    changed = ids.clone()
    changed[:, -1] = others[-1]
    return {**probe, "input_ids": changed}
