"""A cache of module outputs that cannot change any more, for passes that run one block several times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn

from featcal_cli.engine.offload import Offloader


class MemoryBudget:
    """A budget in bytes for cached outputs; what does not fit is computed again."""

    def __init__(self, size: int) -> None:
        self._left = size

    def reserve(self, size: int) -> bool:
        """Reserve this many bytes, if there are as many left, and return whether there were."""
        fits = size <= self._left
        self._left -= size if fits else 0
        return fits


class OutputCache:
    """Outputs of a block's modules in one pass, call by call. Large ones lie in files while they are not read."""

    def __init__(self, budget: MemoryBudget, offloader: Offloader | None) -> None:
        self._budget, self._offloader = budget, offloader
        self._kept: dict[nn.Module, list[tuple[Tensor, int]]] = {}
        """Outputs with the version that torch gives each; a change in place raises it."""

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Cache these modules from now on: neither their weights nor anything that their inputs depend on changes any
        more."""
        self._kept |= {module: [] for module in modules}

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Make the modules return their cached outputs; outputs of first calls are cached."""
        with ExitStack() as undo:
            for module, kept in self._kept.items():
                undo.callback(module.__dict__.pop, "forward")
                module.forward = partial(self._replay, module.forward, kept, count())
            try:
                yield
            finally:
                self._kept = {module: kept for module, kept in self._kept.items() if not _is_changed(kept)}
                if self._offloader is not None:
                    self._offloader.put_aside(y for kept in self._kept.values() for y, _ in kept)

    def _replay(
        self,
        forward: Callable[..., Any],
        kept: list[tuple[Tensor, int]],
        calls: Iterator[int],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        number = next(calls)
        if number < len(kept):
            return kept[number][0]
        y = forward(*args, **kwargs)
        if number == len(kept) and type(y) is Tensor and self._budget.reserve(y.nbytes):
            kept.append((y, y._version))
        return y


def _is_changed(kept: Iterable[tuple[Tensor, int]]) -> bool:
    """Whether the model has changed any of these outputs in place."""
    return any(y._version != version for y, version in kept)
