"""Position of the text in the input of a stack of blocks, found by experiments: changed tokens and disturbed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from featcal_cli.data.batches import Batch
from featcal_cli.models.tracing import ForwardError, as_hook, first_tensor, trace


class TextRows(NamedTuple):
    """The text's rows in the input of a stack of blocks."""

    start: int
    """Row at which the text begins."""
    around_counts: tuple[bool, bool]
    """Whether the rows before the text, and those after it, count. Patches and learnt prompts do; padding that a model
    adds does not."""


def find_text_rows(
    model: nn.Module, module: nn.Module, probe: Batch, stack: Sequence[str], length: int
) -> TextRows | None:
    """Find the rows of a text of this length in the input of a stack's first block, while the module runs on the probe.
    Changing the last token changes one row, or all rows of the text if an earlier stack has mixed them. None if other
    rows change, or none."""
    pair = see_text_change(model, module, probe, stack[:1])
    if pair is None:
        return None
    one, other = (inputs[stack[0]][0] for inputs in pair)
    # how many frames a voice takes depends on what it says
    if one.shape != other.shape:
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
    """Whether disturbing some rows of the first block's input changes what the last block returns for the text."""
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
    """Inputs of modules during two runs, on the probe and on the probe with other last tokens. None if it has no text,
    or cannot run so changed."""
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
    """The probe with another of its tokens at the end of each text; None if there is no text, no values, or no other
    token."""
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
