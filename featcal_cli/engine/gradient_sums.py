"""Sum second moments of gradients at module outputs, and extract the few directions that hold most of them."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from featcal_cli.runtime.distributed import Ranks

WIDEST_SQUARE, SKETCH_ROWS = 1024, 4
"""Largest output width for which the full second moment is summed, and how many random combinations of its rows are
summed for wider outputs, for each direction that is kept."""
WIDEST_SQUARE_OF_EXPERTS, SKETCH_ROWS_OF_EXPERTS = 128, 64
"""Largest width and number of combinations, as above, for modules of a mixture's experts, of which a model has
thousands."""
PANEL_WIDTH = 256
"""Width of the panels in which a CPU computes symmetric products, to skip most of the entries above the diagonal."""
MOST_DIRECTIONS, FEWEST_DIRECTIONS, ALL_DIRECTIONS, SPARE_DIRECTIONS = 64, 16, 256, 32
"""Largest and smallest number of a task's output directions that are kept (those that move the outputs most), their
number over all tasks between these two, since systems are solved for all of them together, and the number of extra
directions that are used in the search for them."""
FLOAT32_ROUNDING = 1e-6
"""Relative rounding error of float32 sums."""


def count_directions(tasks: int) -> int:
    """Return the number of output directions that are kept of each of so many tasks."""
    return min(MOST_DIRECTIONS, max(FEWEST_DIRECTIONS, ALL_DIRECTIONS // tasks))


def count_sum_rows(d_out: int, directions: int, *, of_experts: bool) -> int:
    """Return the number of rows of the sum for gradients [.., d_out] of which so many directions are kept. `of_experts`
    says that the module is in an expert of a mixture."""
    if of_experts:
        return d_out if d_out <= WIDEST_SQUARE_OF_EXPERTS else SKETCH_ROWS_OF_EXPERTS
    return d_out if d_out <= WIDEST_SQUARE else SKETCH_ROWS * directions


class GradientSums:
    """Sums M = Σ g gᵀ of gradients g [.., d_out] at module outputs, by the module's path in merged.

    For narrow outputs the lower triangle of M [d_out, d_out] is kept; for wide outputs a sketch Ωᵀ M [`count_sum_rows`,
    d_out] with a random Ω [d_out, `count_sum_rows`] that depends on the seed alone. The result does not depend on how
    gradients are grouped into batches.
    """

    def __init__(self, seed: int, directions: int) -> None:
        """directions: the number of directions that are kept of each module's outputs."""
        self.sums: dict[str, Tensor] = {}
        self._traces: dict[str, Tensor] = {}
        """Sum of ‖g‖² for each module whose sum is a sketch."""
        self._seed, self._kept = seed, directions
        self._directions: dict[tuple[int, int], Tensor] = {}

    def add(self, name: str, gradient: Tensor, *, of_experts: bool = False) -> None:
        """Add the gradient [.., d_out] at a module's output. `of_experts` says that the module is in an expert of a
        mixture."""
        rows = gradient.reshape(-1, gradient.shape[-1]).float()
        d = rows.shape[1]
        sum_rows = count_sum_rows(d, self._kept, of_experts=of_experts)
        if name not in self.sums:
            self.sums[name] = rows.new_zeros(sum_rows, d)
            self._traces[name] = rows.new_zeros(())
        total = self.sums[name]
        # the product is symmetric: its lower triangle is enough
        if sum_rows == d:
            width = PANEL_WIDTH if rows.device.type == "cpu" else d
            for start in range(0, d, width):
                stop = min(start + width, d)
                total[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])
        else:
            total.addmm_((rows @ self._draw_directions(d, sum_rows, rows)).T, rows)
            self._traces[name].add_(rows.square().sum())

    def sum_over_ranks(self, ranks: Ranks, device: torch.device) -> None:
        """Replace sums by those over all ranks. Each rank keeps those of some modules. A rank may lack some of them at
        first, as those of a mixture's experts."""
        shapes = {name: tuple(total.shape) for name, total in self.sums.items()}
        for number, (name, (rows, d)) in enumerate(sorted(ranks.unite(shapes).items())):
            owner = number % ranks.size
            if name not in self.sums:
                self.sums[name], self._traces[name] = (torch.zeros(size, device=device) for size in ((rows, d), ()))
            ranks.add_up(self.sums[name], to=owner)
            if rows != d:
                ranks.add_up(self._traces[name], to=owner)
            if owner != ranks.rank:
                del self.sums[name], self._traces[name]

    def factors(self, ranks: Ranks) -> dict[str, Tensor]:
        """Compute, for each of this rank's modules, R [r, d_out], where RᵀR is M divided by its mean diagonal, in the
        directions of its r largest eigenvalues alone, at most as many as are kept. If M has values that are not finite,
        R is NaN. If gradients are so much smaller than other modules' that they are only rounding, r is 0."""
        traces = [
            total.trace() if len(total) == total.shape[1] else self._traces[name] for name, total in self.sums.items()
        ]
        sizes = torch.stack(traces).tolist() if traces else []
        factors: dict[str, Tensor] = {}
        bases: dict[str, Tensor] = {}
        projected: dict[int, dict[str, Tensor]] = {}
        scales: dict[str, float] = {}
        least = FLOAT32_ROUNDING**2 * max(ranks.gather(max(filter(isfinite, sizes), default=0.0)))
        for (name, total), size in zip(self.sums.items(), sizes, strict=True):
            rows, d = total.shape
            if size <= least:
                factors[name] = total[:0]
                continue
            scales[name] = (d / size) ** 0.5
            # no element of M is larger than its trace
            if not isfinite(size):
                factors[name] = torch.full_like(total[:1], torch.nan)
            elif rows != d:
                sketched = factor_of_sketch(total, self._draw_directions(d, rows, total), self._kept)
                factors[name] = scales[name] * sketched
            else:
                whole = total.tril_() + total.tril(-1).T
                bases[name] = self._find_basis(whole, self._kept + SPARE_DIRECTIONS)
                small = bases[name].T @ whole @ bases[name]
                projected.setdefault(len(small), {})[name] = small
        # a device takes as long for one small matrix as for many of the same width
        for of_width in projected.values():
            pairs = zip(*find_eigenvectors(torch.stack(list(of_width.values()))), strict=True)
            for name, (values, vectors) in zip(of_width, pairs, strict=True):
                # what is only rounding would change how far the approximate solution gets
                values = torch.where(values > FLOAT32_ROUNDING * values[-1], values, 0)
                largest = bases[name] @ vectors[:, -self._kept :] * values[-self._kept :].sqrt()
                factors[name] = scales[name] * largest.T
        return factors

    def _find_basis(self, total: Tensor, width: int) -> Tensor:
        """Compute an orthonormal basis [d, r] of a space that holds the largest eigenvectors of M [d, d], with r at
        most `width`."""
        d = len(total)
        if d <= width:
            return torch.eye(d).to(total)
        basis = self._draw_directions(d, width, total)
        # two steps of subspace iteration turn random directions towards the largest eigenvectors
        for _ in range(2):
            basis, _ = torch.linalg.qr(total @ basis)
        return basis

    def _draw_directions(self, d: int, count: int, like: Tensor) -> Tensor:
        """Draw Ω [d, count] with orthonormal columns, on the device of `like` and in its dtype. It is drawn once and
        reused for all modules of this width."""
        if (d, count) not in self._directions:
            drawn = torch.randn(d, count, generator=torch.Generator().manual_seed(self._seed))
            self._directions[d, count] = torch.linalg.qr(drawn).Q.to(like)
        return self._directions[d, count]


def factor_of_sketch(sketch: Tensor, drawn: Tensor, directions: int) -> Tensor:
    """Compute R [r, d] with RᵀR ≈ M, restricted to the directions of its r ≤ `directions` largest eigenvalues, from the
    sketch Ωᵀ M [k, d] and the orthonormal Ω [d, k] that was drawn. It uses M ≈ (MΩ) (Ωᵀ M Ω)⁻¹ (MΩ)ᵀ (Nyström; Tropp
    and others 2017, algorithm 3)."""
    omega = drawn.double()
    # a small multiple of Ω keeps the core positive definite where M has fewer directions than the sketch
    shift = FLOAT32_ROUNDING * sketch.double().norm()
    if not shift:
        return torch.zeros_like(sketch[:directions])
    y = sketch.double().T + shift * omega
    core = omega.T @ y
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    b = (vectors / values.clamp_min(shift).sqrt()).T @ y.T  # [k, d], with bᵀb about M + shift
    values, vectors = torch.linalg.eigh(b @ b.T)
    values, vectors = values[-directions:], vectors[:, -directions:]
    # what is not above the shift is only rounding
    kept = torch.where(values > 2 * shift, 1 - shift / values, 0).sqrt()
    factor: Tensor = (kept[:, None] * (vectors.T @ b)).to(sketch)
    return factor


def find_eigenvectors(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the eigenvalues [.., n] of symmetric matrices [.., n, n] in ascending order, and their eigenvectors
    [.., n, n] as columns."""
    # float32's rounding is ten times that of the sums, and its LAPACK often gives up where many rows are zero
    values, vectors = torch.linalg.eigh(matrices.double())
    return values.to(matrices), vectors.to(matrices)
