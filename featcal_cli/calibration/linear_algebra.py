"""Linear algebra: running sums of matrices, the precision of a system, and its Cholesky factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from featcal_cli.runtime.errors import NumericsError

ACCUMULATE = torch.float64
"""Precision of running sums. Products are computed in the features' precision (at least float32), and added up in this
one."""
PANELS = 8
"""Number of panels in which a symmetric product is computed; only blocks on and below the diagonal are."""
NARROWEST_PANEL, NARROWEST_ON_DEVICE = 64, 1024
"""Widths below which a matrix product loses speed: on a CPU, and on other devices."""
AddUp = Callable[[Tensor], None]
"""A function that replaces a tensor by its sum over several processes."""


class Sum:
    """A running sum; while it has one term, that term is kept as it is."""

    def __init__(self, dtype: torch.dtype = ACCUMULATE) -> None:
        self.value: Tensor | None = None
        self.dtype = dtype

    def add(self, term: Tensor, scale: Tensor | None = None) -> None:
        """Add a term, times a number []; the sum may keep the tensor."""
        if self.value is None:
            self.value = term if scale is None else to_accumulation_dtype(term, self.dtype) * scale
        else:
            self.value = _add_to(to_accumulation_dtype(self.value, self.dtype), term, scale)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left · right; in place where the factors are as precise as the sum."""
        if self.value is not None and self.value.dtype == left.dtype == self.dtype:
            self.value.addmm_(left, right)
        else:
            self.add(left @ right)

    def sum_over_ranks(self, zeros: Callable[[], Tensor], add_up: AddUp) -> None:
        """Replace the sum by that of all ranks; `zeros` makes the term of a rank that has none."""
        self.value = zeros() if self.value is None else to_accumulation_dtype(self.value, self.dtype).contiguous()
        add_up(self.value)


class RowSum:
    """A running sum of rows: each batch's sum is kept, and these are added up at the end."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Add all rows [T, d]."""
        total = rows.sum(0)
        self._parts.append(total.to(sums_device(total.device)))

    @property
    def value(self) -> Tensor:
        """The sum [d]; at least one batch must have been added."""
        if len(self._parts) > 1 or self._parts[0].dtype != ACCUMULATE:
            self._parts = [torch.stack(self._parts).sum(0, dtype=ACCUMULATE)]
        return self._parts[0]

    def __bool__(self) -> bool:
        return bool(self._parts)


class Symmetric:
    """A running sum Σ XᵀWX [d, d], of which only panels on and below the diagonal are computed and held."""

    def __init__(self, d: int, device: torch.device, dtype: torch.dtype = ACCUMULATE) -> None:
        width = max(NARROWEST_PANEL if device.type == "cpu" else NARROWEST_ON_DEVICE, -(-d // PANELS))
        self.starts = range(0, d, width)
        self.stops = [min(start + width, d) for start in self.starts]
        self.panels: list[Tensor | None] = [None] * len(self.stops)
        self._d, self._device, self._dtype = d, sums_device(device, dtype), dtype

    def add_product(self, x: Tensor, weighted: Tensor) -> None:
        """Add the symmetric product xᵀ · weighted of rows [T, d] and the same rows times their weights."""
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            left, right, panel = weighted[:, start:stop].T, x[:, :stop], self.panels[number]
            if panel is not None and panel.dtype == x.dtype == self._dtype:
                panel.addmm_(left, right)
            else:
                term = left @ right
                self.panels[number] = (
                    term if panel is None else _add_to(to_accumulation_dtype(panel, self._dtype), term)
                )

    def add(self, other: Symmetric, scale: Tensor) -> None:
        """Add another such sum of the same width, times a number []."""
        for number, term in enumerate(other.panels):
            if term is not None:
                panel = self.panels[number]
                new = to_accumulation_dtype(term, self._dtype) * scale if panel is None else _add_to(panel, term, scale)
                self.panels[number] = new

    def sum_over_ranks(self, add_up: AddUp) -> None:
        """Replace the sum by that of all ranks."""
        for number, (start, stop, panel) in enumerate(zip(self.starts, self.stops, self.panels, strict=True)):
            if panel is None:
                panel = torch.zeros(stop - start, stop, device=self._device)
            self.panels[number] = panel = to_accumulation_dtype(panel, self._dtype).contiguous()
            add_up(panel)

    def norm(self) -> Tensor:
        """Frobenius norm of the whole matrix []."""
        squares = []
        for start, panel in zip(self.starts, self.panels, strict=True):
            if panel is not None:
                diagonal = to_accumulation_dtype(_dot(panel[:, start:]))
                squares.append(2 * to_accumulation_dtype(_dot(panel)) - diagonal if start else diagonal)
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
    """The device that holds sums over features of `device`: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" and dtype == torch.float64 else device


def _add_to(total: Tensor, term: Tensor, scale: Tensor | None = None) -> Tensor:
    """Add a term, which may be less precise, to a sum in place, times a number []."""
    term = term.to(total.device)
    return total.add_(term) if scale is None else total.addcmul_(term, scale)


def _dot(x: Tensor) -> Tensor:
    """Sum of squares []."""
    flat = x.flatten()
    return torch.dot(flat, flat)


def to_accumulation_dtype(x: Tensor, dtype: torch.dtype = ACCUMULATE) -> Tensor:
    """The tensor in the dtype, and on the device, of running sums."""
    return x.to(sums_device(x.device, dtype)).to(dtype)


EPSILON = 1e-8
"""The paper's ε, which keeps 1/‖G‖ and the inverse finite."""
WELL_CONDITIONED = 1e3
"""Condition number up to which float32 gives an update to four digits, and weights, of which it is a few per cent, to
six."""
APPROACHABLE = 1e-4
"""The λ from which on float32 is enough to approach a solution by a few steps of conjugate gradients."""
ROWS_SOLVED = 1024
"""Rows of a right-hand side that are solved for at a time."""
SMALL_SYSTEM, FACTOR_PANEL = 1024, 384
"""Width up to which a system is factorised as a whole on a CPU, and the number of columns that are computed at a time
of a larger one."""
MOST_RIDGES = 8
"""How often λ may be made ten times larger."""
MANY_TASKS = 32
"""The number of tasks assumed when a condition number is estimated in advance."""


def choose_precision(dtype: torch.dtype, ridge: float, metric: str) -> torch.dtype:
    """The dtype in which a system is summed and solved: float32 where λ keeps its condition number low (every ω_i G_i
    is of size 1), or where the solution is only approached, as in the output metric; float64 otherwise, and for float64
    weights."""
    enough = APPROACHABLE if metric == "output" else MANY_TASKS / WELL_CONDITIONED
    return torch.float32 if ridge >= enough and dtype != torch.float64 else ACCUMULATE


def factorise(gram: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Cholesky factor of gram + (λ + ε) I [d, d] or [g, d, d], for which `gram` is overwritten, and λ. Where the system
    has no stable solution, λ is made ten times larger, a hundred times, and so on. Raises NumericsError when the
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
    """The lower Cholesky factor [d, d] or [g, d, d], of which only elements on and below the diagonal are set; the
    diagonal holds NaN where the matrix is not positive definite.

    A large matrix is factorised in panels on a CPU: more than half of the time of torch's own function goes into
    clearing the other half.
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
    """Compute rows · (L Lᵀ)⁻¹ [n, d] for a factor L [d, d], in the place of `rows`. Two triangular solves are faster
    than LAPACK's solve for both factors, and taking some rows at a time saves memory."""
    solve = partial(torch.linalg.solve_triangular, left=False)
    for part in rows.split(ROWS_SOLVED):
        part.copy_(solve(factor, solve(factor.mT, part, upper=True), upper=False))
    return rows
