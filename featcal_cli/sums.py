"""Running sums of matrices, in the precision that they ask for. Pure torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ACCUMULATE = torch.float64
"""Precision of the sums. Products are made in the features' precision (at least float32), sums in this one."""
PANELS = 8
"""A symmetric product is made in so many panels, of which only what lies on and below the diagonal is computed."""
NARROWEST_PANEL = 64
"""A matrix product loses speed when it is narrower."""
AddUp = Callable[[Tensor], None]
"""Replaces a tensor by its sum over several processes."""


class Sum:
    """A running sum; a single term stays as it is."""

    def __init__(self, dtype: torch.dtype = ACCUMULATE) -> None:
        self.value: Tensor | None = None
        self._dtype = dtype

    def add(self, term: Tensor, scale: float = 1.0) -> None:
        """Add a term times a number; the sum may keep the term."""
        if self.value is None:
            self.value = term if scale == 1.0 else in_sums(term, self._dtype) * scale
        else:
            self.value = in_sums(self.value, self._dtype).add_(in_sums(term, self._dtype), alpha=scale)

    def pool(self, zeros: Callable[[], Tensor], add_up: AddUp) -> None:
        """Become the sum of all ranks; `zeros` is what one that has no term has."""
        self.value = zeros() if self.value is None else in_sums(self.value, self._dtype).contiguous()
        add_up(self.value)


class Symmetric:
    """A running sum Σ XᵀWX [d, d], of which the panels on and below the diagonal are computed and held."""

    def __init__(self, d: int, device: torch.device, dtype: torch.dtype = ACCUMULATE) -> None:
        width = max(NARROWEST_PANEL, -(-d // PANELS))
        self.starts = range(0, d, width)
        self.stops = [min(start + width, d) for start in self.starts]
        self.panels: list[Tensor | None] = [None] * len(self.stops)
        self._d, self._device, self._dtype = d, sums_device(device, dtype), dtype

    def add_product(self, x: Tensor, weighted: Tensor) -> None:
        """Add xᵀ · weighted, which is symmetric: [T, d] and the same rows, each times its weight."""
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            term, panel = weighted[:, start:stop].T @ x[:, :stop], self.panels[number]
            self.panels[number] = term if panel is None else self._cast(panel).add_(self._cast(term))

    def add(self, other: Symmetric, scale: float) -> None:
        """Add another such sum of the same width, times a number."""
        for number, term in enumerate(other.panels):
            if term is not None:
                panel = self.panels[number]
                if panel is None:
                    self.panels[number] = self._cast(term) * scale
                else:
                    panel.add_(self._cast(term), alpha=scale)

    def pool(self, add_up: AddUp) -> None:
        """Become the sum of all ranks."""
        for number, panel in enumerate(self.panels):
            self.panels[number] = panel = self._zeros(number) if panel is None else self._cast(panel).contiguous()
            add_up(panel)

    def norm(self, add_up: AddUp | None = None) -> float:
        """Frobenius norm of the whole; with `add_up`, of the sum of all ranks, which is not kept."""
        total = 0.0
        for number, (start, panel) in enumerate(zip(self.starts, self.panels, strict=True)):
            if add_up is not None:
                panel = self._zeros(number) if panel is None else self._cast(panel).clone()
                add_up(panel)
            if panel is not None:
                flat, diagonal = panel.flatten(), panel[:, start:].flatten()
                total += 2 * float(torch.dot(flat, flat)) - float(torch.dot(diagonal, diagonal))
        return float(total**0.5)

    def full(self) -> Tensor:
        """The whole matrix [d, d]."""
        whole = torch.zeros(self._d, self._d, dtype=self._dtype, device=self._device)
        for start, stop, panel in zip(self.starts, self.stops, self.panels, strict=True):
            if panel is not None:
                whole[start:stop, :stop] = panel
                whole[:start, start:stop] = panel[:, :start].T
        return whole

    def _zeros(self, number: int) -> Tensor:
        start, stop = self.starts[number], self.stops[number]
        return torch.zeros(stop - start, stop, dtype=self._dtype, device=self._device)

    def _cast(self, panel: Tensor) -> Tensor:
        return in_sums(panel, self._dtype)


def sums_device(device: torch.device, dtype: torch.dtype = ACCUMULATE) -> torch.device:
    """Where sums over features of `device` are held: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" and dtype == torch.float64 else device


def in_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the precision of some sums, where they are held."""
    return x.to(sums_device(x.device, dtype)).to(dtype)


def to_precise(x: Tensor) -> Tensor:
    """The same for sums of the highest precision."""
    return in_sums(x, ACCUMULATE)
