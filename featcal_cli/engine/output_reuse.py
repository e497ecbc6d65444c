"""Reuse outputs of a block's submodules: a block runs once for each of its parts, and most of what it computes is the
same each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from featcal_cli.engine.hooks import PLAIN_FORWARDS
from featcal_cli.engine.paused_forward import KeptOutput, PausedForward
from featcal_cli.models.architecture import Block
from featcal_cli.models.module_kinds import read_parameters
from featcal_cli.models.tracing import first_tensor


class OutputRoom:
    """The room, in bytes, that is left for outputs which passes keep while they are paused before one block."""

    def __init__(self, size: int) -> None:
        self.size = size

    def give_back(self, outputs: Collection[KeptOutput]) -> None:
        """Make room for others: these outputs are not kept any more."""
        self.size += sum(output.bytes for output in outputs)

    def take(self, size: int) -> bool:
        """Take `size` bytes of the room, if there are as many; return whether there were."""
        fits = size <= self.size
        self.size -= size if fits else 0
        return fits


@contextmanager
def reusing_outputs(
    paused: PausedForward,
    block: Block,
    room: OutputRoom,
    final: Collection[str],
    unneeded: Collection[str] = (),
    *,
    depth: int = 0,
) -> Iterator[None]:
    """Return a context in which runs of the block, before which the pass is paused, reuse what earlier ones computed.

    final: the Linear modules whose weights and inputs stay as they are until the pass goes on. Submodules that are
    final at this `depth` are so too. Their outputs are kept with the pass as far as there is room, and returned again
    instead of being computed; not if the block has changed one in place since. unneeded: modules on whose outputs
    nothing depends that the run is for: they return zeros.
    """
    linear = {x.name for x in block.modules if not (x.functional or x.is_routed) and len(x.rows) == 1}
    plain = {name for name in linear if type(_held(paused, block, name)).forward in PLAIN_FORWARDS}
    reused = {*(plain & {*final}), *(path for path, final_at in block.final_at if final_at <= depth)}
    with ExitStack() as undo:
        for name in reused | (plain & {*unneeded}):
            held = _held(paused, block, name)
            if "forward" in held.__dict__:
                continue
            if name in reused:
                held.forward = partial(_reuse, paused.outputs, name, room, held.forward)
            else:
                held.forward = partial(_return_zeros, len(read_parameters(held).weight))
            undo.callback(held.__dict__.pop, "forward")
        yield


def _held(paused: PausedForward, block: Block, name: str) -> nn.Module:
    return paused.runner.module(f"{block.name}.{name}")


def _reuse(
    outputs: dict[str, KeptOutput],
    name: str,
    room: OutputRoom,
    forward: Callable[..., Any],
    *given: Any,
    **named: Any,
) -> Any:
    """Return the kept output of a module; or compute it, and keep it if there is room. What was kept inside of the
    module is not needed any more then."""
    kept = outputs.get(name)
    if kept is not None and kept.is_unchanged:
        return kept.value
    # without the base that a view has, which would hold the memory when it is moved to a file
    value = tree_map_only(Tensor, lambda y: y.data, forward(*given, **named))
    output = KeptOutput(value)
    if kept is not None or room.take(output.bytes):
        outputs[name] = output
        room.give_back([outputs.pop(inner) for inner in [*outputs] if inner.startswith(f"{name}.")])
    return value


def _return_zeros(d_out: int, *given: Any, **named: Any) -> Tensor:
    x = first_tensor((*given, *named.values()))
    assert x is not None
    return x.new_zeros(*x.shape[:-1], d_out)
