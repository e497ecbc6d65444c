"""Second moments of gradients at the outputs of modules, and the few directions that hold most of them."""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_SQUARE, SKETCH_ROWS = 1024, 256
"""Outputs up to so wide have all products of their gradients summed; wider ones so many random combinations of them."""
WIDEST_SQUARE_OF_EXPERTS, SKETCH_ROWS_OF_EXPERTS = 128, 64
"""The same of a mixture's experts, of which a model has thousands."""
PANEL = 256
"""On a CPU symmetric products are made in panels so wide, of which what lies above the diagonal is left out."""
DIRECTIONS, SPARE_DIRECTIONS = 64, 64
"""Of a module's output that are told apart in the end, those that move answers most; and how many more are looked at to
find them."""
ROUNDING = 1e-6
"""Of sums in float32, over what is summed."""


def count_sum_rows(d_out: int, *, of_experts: bool) -> int:
    """Rows of the sum that gradients [.., d_out] make; of_experts: of a module of a mixture's experts."""
    if of_experts:
        return d_out if d_out <= WIDEST_SQUARE_OF_EXPERTS else SKETCH_ROWS_OF_EXPERTS
    return d_out if d_out <= WIDEST_SQUARE else SKETCH_ROWS


class GradientSums:
    """M = Σ g gᵀ of the gradients g [.., d_out] at the outputs of modules, by their paths in merged: [d_out, d_out], of
    which what lies on and below the diagonal is summed, or for wide ones the sketch Ωᵀ M [`count_sum_rows`, d_out] with
    a random Ω [d_out, `count_sum_rows`] that depends on the seed alone. Neither depends on how gradients are grouped.
    """

    def __init__(self, seed: int) -> None:
        self.sums: dict[str, Tensor] = {}
        self._traces: dict[str, Tensor] = {}
        """Σ ‖g‖² of modules with a sketch."""
        self._seed = seed
        self._directions: dict[tuple[int, int], Tensor] = {}

    def add(self, name: str, gradient: Tensor, *, of_experts: bool = False) -> None:
        """Add the gradient at one output [.., d_out]; of_experts: of a module of a mixture's experts."""
        rows = gradient.reshape(-1, gradient.shape[-1]).float()
        d = rows.shape[1]
        sum_rows = count_sum_rows(d, of_experts=of_experts)
        if name not in self.sums:
            self.sums[name] = rows.new_zeros(sum_rows, d)
            self._traces[name] = rows.new_zeros(())
        total = self.sums[name]
        if sum_rows == d:
            width = PANEL if rows.device.type == "cpu" else d
            for start in range(0, d, width):
                stop = min(start + width, d)
                total[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])
        else:
            total.addmm_((rows @ self._draw_directions(d, sum_rows).to(rows)).T, rows)
            self._traces[name].add_(rows.square().sum())

    def factor(self, name: str) -> Tensor:
        """R [r, d_out] of the r ≤ DIRECTIONS largest eigenvalues of M over its mean diagonal, which is RᵀR in these
        directions. What is not finite stays so."""
        total = self.sums[name]
        d = total.shape[1]
        is_square = total.shape[0] == d
        if is_square:
            total = total.tril() + total.tril(-1).T
        if not total.isfinite().all():
            return torch.full_like(total[:1], torch.nan)
        size = float(total.trace() if is_square else self._traces[name])
        scale = (d / size) ** 0.5 if size > 0 else 0.0
        if not is_square:
            sketched: Tensor = scale * factor_of_sketch(total, self._draw_directions(d, len(total)).to(total))
            return sketched
        basis = torch.eye(d).to(total)
        if d > DIRECTIONS + SPARE_DIRECTIONS:
            basis = self._draw_directions(d, DIRECTIONS + SPARE_DIRECTIONS).to(total)
            for _ in range(2):
                basis, _ = torch.linalg.qr(total @ basis)
        values, vectors = find_eigenvectors(basis.T @ total @ basis)
        largest: Tensor = basis @ vectors[:, -DIRECTIONS:] * values[-DIRECTIONS:].clamp_min(0).sqrt()
        return scale * largest.T

    def _draw_directions(self, d: int, count: int) -> Tensor:
        """Ω [d, count] with orthonormal columns, the same for all modules of this width."""
        if (d, count) not in self._directions:
            drawn = torch.randn(d, count, generator=torch.Generator().manual_seed(self._seed))
            self._directions[d, count] = torch.linalg.qr(drawn).Q
        return self._directions[d, count]


def factor_of_sketch(sketch: Tensor, directions: Tensor) -> Tensor:
    """R [r, d] of the r ≤ DIRECTIONS largest eigenvalues of M ≈ (MΩ) (Ωᵀ M Ω)⁻¹ (MΩ)ᵀ, from the sketch Ωᵀ M [k, d] and
    the directions Ω [d, k] with orthonormal columns (Nyström; Tropp and others 2017, algorithm 3)."""
    omega = directions.double()
    # a small multiple of Ω keeps the core positive definite where M has fewer directions than the sketch
    shift = ROUNDING * sketch.double().norm()
    if not shift:
        return torch.zeros_like(sketch[:DIRECTIONS])
    y = sketch.double().T + shift * omega
    core = omega.T @ y
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    b = (vectors / values.clamp_min(shift).sqrt()).T @ y.T  # [k, d], with bᵀb about M + shift
    values, vectors = torch.linalg.eigh(b @ b.T)
    values, vectors = values[-DIRECTIONS:], vectors[:, -DIRECTIONS:]
    kept = ((values - shift).clamp_min(0) / values.clamp_min(shift)).sqrt()
    factor: Tensor = (kept[:, None] * (vectors.T @ b)).to(sketch)
    return factor


def find_eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues [n] of a symmetric matrix [n, n], ascending, and its eigenvectors [n, n], in columns."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # in float32 LAPACK often gives up where many rows are zero
        values, vectors = (x.to(matrix) for x in torch.linalg.eigh(matrix.double()))
    return values, vectors
