"""Linear algebra: running sums of matrices, the choice of precision, and Cholesky factorisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from featcal_cli.runtime.errors import NumericsError

ACCUMULATE = torch.float64
"""Precision of running sums. Products are computed in the features' precision (at least float32) and added up in this
precision."""
PANELS = 8
"""Number of panels in which a symmetric product is computed; blocks above the diagonal are not computed."""
NARROWEST_PANEL, NARROWEST_ON_DEVICE = 256, 1024
"""Panel widths below which a matrix product becomes slow: on a CPU, and on other devices."""
AddUp = Callable[[Tensor], None]
"""Function that replaces a tensor, in place, by its sum over several processes."""


class Sum:
    """A running sum. A single term that is added without a scale is stored unchanged, in its own dtype."""

    def __init__(self, dtype: torch.dtype = ACCUMULATE) -> None:
        self.value: Tensor | None = None
        self.dtype = dtype

    def add(self, term: Tensor, scale: Tensor | None = None) -> None:
        """Add a term, multiplied by a scalar [] if given. The sum may keep a reference to the tensor."""
        if self.value is None:
            self.value = term if scale is None else to_accumulation_dtype(term, self.dtype) * scale
        else:
            self.value = _add_to(to_accumulation_dtype(self.value, self.dtype), term, scale)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left · right, in place if the factors have the precision of the sum."""
        if self.value is not None and self.value.dtype == left.dtype == self.dtype:
            self.value.addmm_(left, right)
        else:
            self.add(left @ right)

    def sum_over_ranks(self, shape: Sequence[int], device: torch.device, add_up: AddUp) -> None:
        """Replace the sum by the sum over all ranks. `shape` and `device` are those of the sum."""
        if self.value is None:
            self.value = torch.zeros(*shape, device=device)
        self.value = to_accumulation_dtype(self.value, self.dtype).contiguous()
        add_up(self.value)


class RowSum:
    """A running sum of rows: the sum of each batch is stored, and these sums are added up when the value is read."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Add the sum of all rows [T, d]."""
        self._parts.append(rows.sum(0))

    def replace(self, total: Tensor) -> None:
        """Replace the sum by `total` [d]."""
        self._parts = [total]

    @property
    def value(self) -> Tensor:
        """The sum [d]; at least one batch must have been added."""
        if len(self._parts) > 1 or self._parts[0].dtype != ACCUMULATE:
            self._parts = [torch.stack(self._parts).sum(0, dtype=ACCUMULATE)]
        return self._parts[0]

    def __bool__(self) -> bool:
        return bool(self._parts)


def sum_rows_over_ranks(
    weight: Tensor | float, sums: Sequence[tuple[RowSum, int]], device: torch.device, add_up: AddUp
) -> Tensor:
    """Replace sums of rows of these widths by the sums over all ranks, and return the sum of the weights []."""
    zeros = torch.zeros(1 + sum(width for _, width in sums), dtype=ACCUMULATE, device=device)
    parts = zeros[1:].split([width for _, width in sums])
    zeros[0] += weight
    for (total, _), part in zip(sums, parts, strict=True):
        if total:
            part += total.value
    add_up(zeros)
    for (total, _), part in zip(sums, parts, strict=True):
        total.replace(part)
    return zeros[0]


class Symmetric:
    """A running sum Σ XᵀWX [d, d], stored in panels of rows; only blocks on and below the diagonal are computed and
    stored."""

    def __init__(self, d: int, device: torch.device, dtype: torch.dtype = ACCUMULATE) -> None:
        width = max(NARROWEST_PANEL if device.type == "cpu" else NARROWEST_ON_DEVICE, -(-d // PANELS))
        self.starts = range(0, d, width)
        self.stops = [min(start + width, d) for start in self.starts]
        self.panels: list[Tensor | None] = [None] * len(self.stops)
        self._d, self._device, self._dtype = d, device, dtype

    def add_product(self, x: Tensor, weighted: Tensor) -> None:
        """Add the symmetric product xᵀ · weighted, where x are rows [T, d] and weighted are these rows times their
        weights."""
        for number, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            left, right, panel = weighted[:, start:stop].T, x[:, :stop], self.panels[number]
            if panel is not None and panel.dtype == x.dtype == self._dtype:
                panel.addmm_(left, right)
            else:
                term = left @ right
                self.panels[number] = (
                    term if panel is None else _add_to(to_accumulation_dtype(panel, self._dtype), term)
                )

    def add(self, other: Symmetric | RowProduct, scale: Tensor) -> None:
        """Add another sum of the same width, multiplied by a scalar []."""
        if isinstance(other, RowProduct):
            self.add_product(other.rows, other.rows * scale)
            return
        for number, term in enumerate(other.panels):
            if term is not None:
                panel = self.panels[number]
                new = to_accumulation_dtype(term, self._dtype) * scale if panel is None else _add_to(panel, term, scale)
                self.panels[number] = new

    def sum_over_ranks(self, add_up: AddUp) -> None:
        """Replace the sum by the sum over all ranks."""
        for number, (start, stop, panel) in enumerate(zip(self.starts, self.stops, self.panels, strict=True)):
            if panel is None:
                panel = torch.zeros(stop - start, stop, device=self._device)
            self.panels[number] = panel = to_accumulation_dtype(panel, self._dtype).contiguous()
            add_up(panel)

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the whole matrix []."""
        squares = []
        for start, panel in zip(self.starts, self.panels, strict=True):
            if panel is not None:
                diagonal = to_accumulation_dtype(_dot(panel[:, start:]))
                squares.append(2 * to_accumulation_dtype(_dot(panel)) - diagonal if start else diagonal)
        return torch.stack(squares).sum().sqrt()

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product rows · S [n, d] with the whole matrix S."""
        product = torch.zeros_like(rows)
        for start, stop, panel in zip(self.starts, self.stops, self.panels, strict=True):
            if panel is not None:
                product[:, :stop].addmm_(rows[:, start:stop], panel.to(rows.dtype))
                if start:
                    product[:, start:stop].addmm_(rows[:, :start], panel[:, :start].to(rows.dtype).T)
        return product

    def full(self) -> Tensor:
        """Return the whole matrix [d, d]."""
        whole = torch.empty(self._d, self._d, dtype=self._dtype, device=self._device)
        if None in self.panels:
            whole.zero_()
        for start, stop, panel in zip(self.starts, self.stops, self.panels, strict=True):
            if panel is not None:
                whole[start:stop, :stop] = panel
                whole[:start, start:stop] = panel[:, :start].T
        return whole


class RowProduct(NamedTuple):
    """The product ZᵀZ [d, d] of rows Z [T, d], of which no more is computed than is asked for. Where rows are few, that
    is less than the product."""

    rows: Tensor

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the product [], computed from the products of all pairs of rows, whose norm is
        equal."""
        return to_accumulation_dtype(torch.linalg.matrix_norm(self.rows @ self.rows.T))

    def multiply(self, rows: Tensor) -> Tensor:
        """Return rows · ZᵀZ [n, d]."""
        z = self.rows.to(rows)
        return (rows @ z.T) @ z


def _add_to(total: Tensor, term: Tensor, scale: Tensor | None = None) -> Tensor:
    """Add a term, which may be less precise, to a sum in place, multiplied by a scalar [] if given."""
    return total.add_(term) if scale is None else total.addcmul_(term, scale)


def _dot(x: Tensor) -> Tensor:
    """Return the sum of squares []."""
    flat = x.flatten()
    return torch.dot(flat, flat)


def to_accumulation_dtype(x: Tensor, dtype: torch.dtype = ACCUMULATE) -> Tensor:
    """Return the tensor in the dtype of running sums."""
    return x.to(dtype)


EPSILON = 1e-8
"""The paper's ε, which keeps 1/‖G‖ and the inverse finite."""
WELL_CONDITIONED = 1e3
"""Condition number up to which float32 gives an update to four digits. The update is a few per cent of the weights, so
that the weights are correct to six."""
APPROACHABLE = 1e-4
"""The smallest λ for which float32 is enough if the solution is only approximated by a few conjugate gradient steps."""
ROWS_SOLVED = 1024
"""Rows of a right-hand side that are solved at a time."""
SMALL_SYSTEM, FACTOR_PANEL = 1024, 384
"""Largest width of a system that is factorised as a whole on a CPU, and the number of columns computed at a time for a
larger one."""
MOST_RIDGES = 8
"""Number of values of λ that are tried, each ten times the one before."""
MANY_TASKS = 32
"""Number of tasks assumed when a condition number is estimated in advance."""


def choose_precision(dtype: torch.dtype, ridge: float, metric: str) -> torch.dtype:
    """Choose the dtype in which a system is summed and solved. float32 is enough if λ keeps the condition number low
    (every ω_i G_i has norm 1); a smaller λ suffices in the output metric, whose solution is only approximated.
    Otherwise, and for float64 weights, it is float64."""
    enough = APPROACHABLE if metric == "output" else MANY_TASKS / WELL_CONDITIONED
    return torch.float32 if ridge >= enough and dtype != torch.float64 else ACCUMULATE


def factorise(gram: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return the Cholesky factor of gram + (λ + ε) I [d, d] or [g, d, d], and λ. `gram` is overwritten. If the system
    has no stable solution, λ is multiplied by ten until it has. Raises NumericsError if the features are not finite, or
    if no λ that is tried works."""
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
    """Return the lower Cholesky factor [d, d] or [g, d, d]. Elements above the diagonal are not set; the diagonal holds
    NaN if the matrix is not positive definite.

    On a CPU a large matrix is factorised in panels, because torch's own function spends more than half of its time on
    clearing the upper half.
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
    """Compute rows · (L Lᵀ)⁻¹ [n, d] for a factor L [d, d], overwriting `rows`. Two triangular solves are faster than
    LAPACK's solve with both factors, and solving a few rows at a time saves memory."""
    solve = partial(torch.linalg.solve_triangular, left=False)
    for part in rows.split(ROWS_SOLVED):
        part.copy_(solve(factor, solve(factor.mT, part, upper=True), upper=False))
    return rows
