"""Running sums of matrices; one system's precision and its Cholesky factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from featcal_cli.runtime.errors import NumericsError

ACCUMULATE = torch.float64
"""Precision of the sums. Products are made in the features' precision (at least float32), sums in this one."""
PANELS = 8
"""A symmetric product is made in so many panels, of which only what lies on and below the diagonal is computed."""
NARROWEST_PANEL, NARROWEST_ON_DEVICE = 64, 1024
"""A matrix product loses speed when it is narrower: on a CPU, and on other devices."""
AddUp = Callable[[Tensor], None]
"""Replaces a tensor by its sum over several processes."""


class Sum:
    """A running sum; a single term stays as it is."""

    def __init__(self, dtype: torch.dtype = ACCUMULATE) -> None:
        self.value: Tensor | None = None
        self.dtype = dtype

    def add(self, term: Tensor, scale: Tensor | None = None) -> None:
        """Add a term, times a number []; the sum may keep the term."""
        if self.value is None:
            self.value = term if scale is None else in_sums(term, self.dtype) * scale
        else:
            self.value = _add_to(in_sums(self.value, self.dtype), term, scale)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left · right; in place where the factors are as precise as the sum."""
        if self.value is not None and self.value.dtype == left.dtype == self.dtype:
            self.value.addmm_(left, right)
        else:
            self.add(left @ right)

    def sum_over_ranks(self, zeros: Callable[[], Tensor], add_up: AddUp) -> None:
        """Become the sum of all ranks; `zeros` is what one that has no term has."""
        self.value = zeros() if self.value is None else in_sums(self.value, self.dtype).contiguous()
        add_up(self.value)


class RowSum:
    """A running sum of rows; those of each batch are kept, and added up at the end."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Add up rows [T, d]."""
        total = rows.sum(0)
        self._parts.append(total.to(sums_device(total.device)))

    @property
    def value(self) -> Tensor:
        """[d]; there must be some."""
        if len(self._parts) > 1 or self._parts[0].dtype != ACCUMULATE:
            self._parts = [torch.stack(self._parts).sum(0, dtype=ACCUMULATE)]
        return self._parts[0]

    def __bool__(self) -> bool:
        return bool(self._parts)


class Symmetric:
    """A running sum Σ XᵀWX [d, d], of which the panels on and below the diagonal are computed and held."""

    def __init__(self, d: int, device: torch.device, dtype: torch.dtype = ACCUMULATE) -> None:
        width = max(NARROWEST_PANEL if device.type == "cpu" else NARROWEST_ON_DEVICE, -(-d // PANELS))
        self.starts = range(0, d, width)
        self.stops = [min(start + width, d) for start in self.starts]
        self.panels: list[Tensor | None] = [None] * len(self.stops)
        self._d, self._device, self._dtype = d, sums_device(device, dtype), dtype

    def add_product(self, x: Tensor, weighted: Tensor) -> None:
        """Add xᵀ · weighted, which is symmetric: [T, d] and the same rows, each times its weight."""
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            left, right, panel = weighted[:, start:stop].T, x[:, :stop], self.panels[number]
            if panel is not None and panel.dtype == x.dtype == self._dtype:
                panel.addmm_(left, right)
            else:
                term = left @ right
                self.panels[number] = term if panel is None else _add_to(in_sums(panel, self._dtype), term)

    def add(self, other: Symmetric, scale: Tensor) -> None:
        """Add another such sum of the same width, times a number []."""
        for number, term in enumerate(other.panels):
            if term is not None:
                panel = self.panels[number]
                new = in_sums(term, self._dtype) * scale if panel is None else _add_to(panel, term, scale)
                self.panels[number] = new

    def sum_over_ranks(self, add_up: AddUp) -> None:
        """Become the sum of all ranks."""
        for number, (start, stop, panel) in enumerate(zip(self.starts, self.stops, self.panels, strict=True)):
            if panel is None:
                panel = torch.zeros(stop - start, stop, device=self._device)
            self.panels[number] = panel = in_sums(panel, self._dtype).contiguous()
            add_up(panel)

    def norm(self) -> Tensor:
        """Frobenius norm of the whole []."""
        squares = []
        for start, panel in zip(self.starts, self.panels, strict=True):
            if panel is not None:
                diagonal = in_sums(_dot(panel[:, start:]))
                squares.append(2 * in_sums(_dot(panel)) - diagonal if start else diagonal)
        return torch.stack(squares).sum().sqrt()

    def full(self, out: Tensor | None = None) -> Tensor:
        """The whole matrix [d, d]; in `out`, where it is given."""
        whole = torch.empty(self._d, self._d, dtype=self._dtype, device=self._device) if out is None else out
        if None in self.panels:
            whole.zero_()
        for start, stop, panel in zip(self.starts, self.stops, self.panels, strict=True):
            if panel is not None:
                whole[start:stop, :stop] = panel
                whole[:start, start:stop] = panel[:, :start].T
        return whole


def sums_device(device: torch.device, dtype: torch.dtype = ACCUMULATE) -> torch.device:
    """Where sums over features of `device` are held: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" and dtype == torch.float64 else device


def _add_to(total: Tensor, term: Tensor, scale: Tensor | None = None) -> Tensor:
    """Add a term, which may be less precise, to a sum, times a number []; in place."""
    term = term.to(total.device)
    return total.add_(term) if scale is None else total.addcmul_(term, scale)


def _dot(x: Tensor) -> Tensor:
    """Sum of squares []."""
    flat = x.flatten()
    return torch.dot(flat, flat)


def in_sums(x: Tensor, dtype: torch.dtype = ACCUMULATE) -> Tensor:
    """In the precision of some sums, where they are held."""
    return x.to(sums_device(x.device, dtype)).to(dtype)


EPSILON = 1e-8
"""ε of the paper: keeps 1/‖G‖ and the inverse finite."""
WELL_CONDITIONED = 1e3
"""Condition numbers at which float32 gives an update to four digits, and weights, of which it is a few per cent, to
six."""
APPROACHABLE = 1e-4
"""λ from which on float32 is enough to approach a solution by a few steps of conjugate gradients."""
ROWS_SOLVED = 1024
"""Rows of a right-hand side that are solved for at a time."""
SMALL_SYSTEM, FACTOR_PANEL = 1024, 384
"""Width of a system that is factorised as a whole on a CPU, and the columns that are made at a time of a larger one."""
MOST_RIDGES = 8
"""How often λ may be made ten times larger."""
MANY_TASKS = 32
"""More are not reckoned with where a condition number is foreseen."""


def choose_precision(dtype: torch.dtype, ridge: float, metric: str) -> torch.dtype:
    """What a system is summed and solved in: float32 where λ keeps its condition number low, as every ω_i G_i is of
    size 1, or where it is only approached, as in the metric of outputs; float64 else, and for weights that are."""
    enough = APPROACHABLE if metric == "output" else MANY_TASKS / WELL_CONDITIONED
    return torch.float32 if ridge >= enough and dtype != torch.float64 else ACCUMULATE


def factorise(gram: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Cholesky factor of gram + (λ + ε) I [d, d], or of many [g, d, d], which `gram` becomes, and λ: ten times the one
    that is given, a hundred times, …, where the system has no stable solution with it. Raises NumericsError when the
    features are not finite."""
    more = ridge
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(ridge + EPSILON)
    for _ in range(MOST_RIDGES):
        factor = _cholesky(gram)
        if torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all():
            return factor, more
        if not torch.isfinite(gram).all():
            what = f"the sums of features, with ridge {ridge:g} added, are not finite"
            raise NumericsError(what, fix="look for features that are too large; or give --dtype float32")
        step = 10 * max(more, EPSILON) - more
        diagonal.add_(step)
        more += step
    raise NumericsError(f"the equations have no stable solution at ridge {more:g}", fix="use a larger --ridge")


def _cholesky(gram: Tensor) -> Tensor:
    """The lower factor [d, d], of which only what lies on and below the diagonal is set, or many [g, d, d] at once;
    there is NaN on its diagonal where the matrix is not positive.

    A large one in panels on a CPU: more than half of what LAPACK's takes is torch's clearing of the other half.
    """
    if gram.ndim == 3:
        factors, failures = torch.linalg.cholesky_ex(gram)
        return torch.where(failures[:, None, None] == 0, factors, torch.nan)
    is_large = gram.device.type == "cpu" and len(gram) > SMALL_SYSTEM
    width = FACTOR_PANEL if is_large else max(1, len(gram))
    factor = torch.empty_like(gram)
    for start in range(0, len(gram), width):
        before, here, after = slice(start), slice(start, start + width), slice(start + width, None)
        panel = torch.addmm(gram[start:, here], factor[start:, before], factor[here, before].T, alpha=-1)
        top, failed = torch.linalg.cholesky_ex(panel[:width])
        factor[here, here] = torch.where(failed == 0, top, torch.nan)
        factor[after, here] = torch.linalg.solve_triangular(top.mT, panel[width:], upper=True, left=False)
    return factor


def solve_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """rows · (L Lᵀ)⁻¹ [n, d] of a factor L [d, d], in the place of `rows`: by two triangular solves, which are quicker
    than LAPACK's for both, and for some rows after the others, as they need room."""
    solve = partial(torch.linalg.solve_triangular, left=False)
    for part in rows.split(ROWS_SOLVED):
        part.copy_(solve(factor, solve(factor.mT, part, upper=True), upper=False))
    return rows
