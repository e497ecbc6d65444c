"""Reuse outputs of a block's Linear modules: a block runs once for each of its parts, and most of what it computes is
the same each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from featcal_cli.engine.hooks import PLAIN_FORWARDS
from featcal_cli.engine.paused_forward import PausedForward
from featcal_cli.models.architecture import Block
from featcal_cli.models.module_kinds import read_parameters
from featcal_cli.models.tracing import first_tensor


class OutputRoom:
    """The room, in bytes, that is left for outputs which passes keep while they are paused before one block."""

    def __init__(self, size: int) -> None:
        self.size = size

    def take(self, size: int) -> bool:
        """Take `size` bytes of the room, if there are as many; return whether there were."""
        fits = size <= self.size
        self.size -= size if fits else 0
        return fits


@contextmanager
def reusing_outputs(
    paused: PausedForward, block: Block, room: OutputRoom, final: Collection[str], unneeded: Collection[str] = ()
) -> Iterator[None]:
    """Return a context in which runs of the block, before which the pass is paused, reuse what earlier ones computed.

    final: the modules whose weights and inputs stay as they are until the pass goes on. Their outputs are kept with the
    pass as far as there is room, and returned again instead of being computed; not if the block has changed one in
    place since. unneeded: modules on whose outputs nothing depends that the run is for: they return zeros.
    """
    with ExitStack() as undo:
        for module in block.modules:
            if module.functional is not None or module.is_routed or len(module.rows) != 1:
                continue
            held = paused.runner.module(f"{block.name}.{module.name}")
            if type(held).forward not in PLAIN_FORWARDS or "forward" in held.__dict__:
                continue
            if module.name in final:
                held.forward = partial(_reuse, paused.outputs, module.name, room, held.forward)
            elif module.name in unneeded:
                held.forward = partial(_return_zeros, len(read_parameters(held).weight))
            else:
                continue
            undo.callback(held.__dict__.pop, "forward")
        yield


def _reuse(
    outputs: dict[str, tuple[Tensor, int]],
    name: str,
    room: OutputRoom,
    forward: Callable[..., Tensor],
    *given: Any,
    **named: Any,
) -> Tensor:
    """Return the kept output of a module; or compute it, and keep it if there is room."""
    kept, version = outputs.get(name, (None, 0))
    x = first_tensor((*given, *named.values()))
    # a block whose features overflow bfloat16 runs again in float32
    if kept is not None and kept._version == version and x is not None and kept.dtype == x.dtype:
        return kept
    # without the base that a view has, which would hold the memory when it is moved to a file
    y = forward(*given, **named).data
    if kept is not None or room.take(y.nbytes):
        outputs[name] = y, y._version
    return y


def _return_zeros(d_out: int, *given: Any, **named: Any) -> Tensor:
    x = first_tensor((*given, *named.values()))
    assert x is not None
    return x.new_zeros(*x.shape[:-1], d_out)
