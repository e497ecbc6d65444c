"""Moments: running sums over the calibration examples of one task, from which the closed forms are computed. Sums of
several ranks are added up on the rank that solves the module, or on the one that the task belongs to where all ranks
solve the module together.

Shapes: T rows (tokens), d_in input width, d_out output width. Rows of padding must be removed beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration.linear_algebra import (
    ACCUMULATE,
    AddUp,
    RowProduct,
    RowSum,
    Sum,
    Symmetric,
    sum_rows_over_ranks,
    to_accumulation_dtype,
)
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError

Names: TypeAlias = "tuple[str, ...]"
"""Names, inside the block, of the modules that share an input and its token weights."""


class Pair(NamedTuple):
    """Parameters of one module in the expert and in the merged model."""

    expert: Affine
    """The expert's weight W_i [d_out, d_in] and bias b_i [d_out]."""
    merged: Tensor
    """The merged model's weight W_merged [d_out, d_in]."""


class LinearMoments:
    """Moments for one task of an input that several modules of a block share (paper, section 3).

    Only this class forms the target x_tgt = α x_exp + (1 − α) x_cal. Besides G_i and the mean, the right-hand side
    needs E[r xᵀ], where r = W_i x_tgt − W_merged x_cal is the residual of the student's output. It is computed in one
    of three ways: from the drift of the input; from sums of r xᵀ, if `pairs` are given; or from all rows of x and r, if
    `keep_rows` is set. The results are equal, but the costs differ.
    """

    def __init__(
        self,
        d_in: int,
        device: torch.device,
        alpha: float,
        pairs: Mapping[str, Pair] | None = None,
        *,
        dtype: torch.dtype = ACCUMULATE,
        keep_rows: bool = False,
    ) -> None:
        """dtype: the dtype of sums of products. Sums of rows are always held in ACCUMULATE."""
        self.alpha, self.d_in, self._device = alpha, d_in, device
        self.pairs = dict(pairs or {})
        """Parameters of each module for which r is summed, by name."""
        self.sum = Symmetric(d_in, device, dtype)
        """The weighted sum Σ x_cal x_calᵀ; empty where rows are kept."""
        self.kept = Rows() if keep_rows else None
        self._dx, self._x, self._d = Sum(dtype), RowSum(), RowSum()
        self._rx, self._r = {name: Sum(dtype) for name in self.pairs}, {name: RowSum() for name in self.pairs}
        self._offsets: dict[tuple[str, bool], Tensor] = {}
        """The factor of x_cal in r [d_out, d_in], by module name and by whether the expert's outputs are known."""
        self._experts: dict[str, Tensor] = {}
        """W_i, in the dtype of the rows, for each module whose expert outputs are not known."""
        self.weight: Tensor | float = 0.0
        """Sum of the rows' weights []."""
        self.rows = 0
        """Number of rows added."""
        self.gradients: Mapping[str, Tensor] = {}
        """Factor R [r, d_out] by module name: RᵀR describes in which directions a change of the module's output changes
        the model's outputs, which the output metric uses. Modules that do not influence the outputs have none."""

    def add(
        self, x_cal: Tensor, x_exp: Tensor, weights: Tensor | None = None, outputs: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the student's and the expert's inputs for the same rows [T, d_in]; each row counts `weights` [T] times.
        outputs: the outputs of the expert's modules for x_exp [T, d_out], as far as they are known."""
        x, x_exp = _at_least_float32(x_cal), _at_least_float32(x_exp)
        column = None if weights is None else weights.to(x)[:, None]
        weighted = x if column is None else x * column
        residuals = {
            name: self._residual(name, pair, x, x_exp, (outputs or {}).get(name)) for name, pair in self.pairs.items()
        }
        if self.kept is not None:
            self.kept.add(x, x.new_ones(len(x), 1) if column is None else column.sqrt(), residuals)
        else:
            self.sum.add_product(x, weighted)
            for name, r in residuals.items():
                self._rx[name].add_product(r.T, weighted)
        for name, r in residuals.items():
            self._r[name].add(r if column is None else r * column)
        if not self.pairs:
            drift = x_exp - x
            self._dx.add_product(drift.T, weighted)
            self._d.add(drift if column is None else drift * column)
        self._x.add(weighted)
        self.weight += float(len(x)) if weights is None else to_accumulation_dtype(weights.sum())
        self.rows += len(x)

    def sum_over_ranks(self, names: Sequence[str], rows: int, before: int, add_up: AddUp) -> None:
        """Replace all sums by those over all ranks, for the modules `names`. rows: the number of rows of all ranks;
        before: of those with lower numbers than this one. No rows can be added afterwards."""
        of_rows, weights = [(self._x, self.d_in)], {name: self.pairs[name].merged for name in names if self.pairs}
        of_rows += [(self._r[name], len(weight)) for name, weight in weights.items()]
        if self.kept is not None:
            widths = {name: len(weight) for name, weight in weights.items()}
            like = _at_least_float32(next(iter(weights.values())))
            everything = like.new_zeros(rows, self.d_in + 1 + sum(widths.values()))
            self.kept.join(everything, slice(before, before + self.rows), widths, add_up)
        else:
            self.sum.sum_over_ranks(add_up)
            for name, weight in weights.items():
                self._rx[name].sum_over_ranks(weight.shape, self._device, add_up)
        if not self.pairs:
            self._dx.sum_over_ranks((self.d_in, self.d_in), self._device, add_up)
            of_rows.append((self._d, self.d_in))
        self.weight = sum_rows_over_ranks(self.weight, of_rows, self._device, add_up)
        self.rows = rows

    @property
    def checksum(self) -> Tensor:
        """A number [] that is finite if all rows of the student and the expert were finite."""
        sums = (self._x, self._d, *self._r.values())
        return torch.cat([total.value for total in sums if total]).sum()

    @property
    def products(self) -> Symmetric | RowProduct:
        """The weighted sum Σ x_cal x_calᵀ."""
        return self.sum if self.kept is None else self.kept.sum

    @property
    def gram(self) -> Tensor:
        """The second moments G = E[x_cal x_calᵀ] [d_in, d_in]."""
        return self.sum.full() / self.weight

    @property
    def size(self) -> Tensor:
        """The Frobenius norm ‖G‖_F []."""
        return self.products.norm() / self.weight

    @property
    def mean(self) -> Tensor:
        """The mean μ_cal = E[x_cal] [d_in]."""
        return self._x.value / self.weight

    @property
    def drift(self) -> Tensor:
        """The drift E[(x_exp − x_cal) x_calᵀ] [d_in, d_in], as the sums hold it. Not available if `pairs` are given."""
        assert self._dx.value is not None
        return to_accumulation_dtype(self._dx.value, self._dx.dtype) / self.weight

    @property
    def mean_drift(self) -> Tensor:
        """The mean drift E[x_exp − x_cal] [d_in]. Not available if `pairs` are given."""
        return self._d.value / self.weight

    def add_drift(self, total: Sum, omega: Tensor) -> Tensor:
        """Add ω E[(x_tgt − x_cal) x_calᵀ] [d_in, d_in] to `total` and return C = E[x_tgt x_calᵀ] in the precision of
        `total`. Not available if `pairs` are given."""
        drift = to_accumulation_dtype(self.drift, total.dtype)
        total.add(drift, omega * self.alpha)
        return to_accumulation_dtype(self.gram, total.dtype).add_(drift, alpha=self.alpha)

    def add_pull(self, name: str, total: Sum, omega: Tensor) -> None:
        """Add a module's ω E[r xᵀ] [d_out, d_in] to `total`. Available only if r is summed."""
        term = self._rx[name].value
        assert term is not None
        total.add(term, omega / self.weight)

    def mean_residual(self, name: str, expert: Tensor, merged: Tensor) -> Tensor:
        """Return the mean residual E[r] of a module [d_out], given its weights W_i and W_merged."""
        if self.pairs:
            return self._r[name].value / self.weight
        target = self.mean + self.alpha * self.mean_drift
        expert, merged, target, mean = (
            to_accumulation_dtype(x, self._dx.dtype) for x in (expert, merged, target, self.mean)
        )
        return to_accumulation_dtype(expert @ target - merged @ mean)

    def _residual(self, name: str, pair: Pair, x_cal: Tensor, x_exp: Tensor, y_exp: Tensor | None) -> Tensor:
        """Compute the residuals r [T, d_out]. y_exp: the expert's output for x_exp, including the bias, if it is
        known."""
        (weight, bias), merged = pair
        known = y_exp is not None
        if (name, known) not in self._offsets:
            of_expert = weight.to(x_cal)
            self._offsets[name, known] = of_expert.mul(1 - self.alpha if known else 1.0).sub_(merged)
            if not known:
                self._experts[name] = of_expert
            del of_expert  # where it is a copy, and the weights of mixtures' experts are many
        offset = self._offsets[name, known]
        if y_exp is not None:
            return linear(x_cal, offset, None if bias is None else -self.alpha * bias).add_(y_exp, alpha=self.alpha)
        return linear(x_cal, offset).add_(linear(x_exp - x_cal, self._experts[name]), alpha=self.alpha)


@dataclass
class Rows:
    """All rows of an input and their residuals. They are kept where they are fewer than input features."""

    x: list[Tensor] = field(default_factory=list)
    """Inputs [T, d_in]."""
    roots: list[Tensor] = field(default_factory=list)
    """Square roots of the rows' weights [T, 1]."""
    residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    """Residuals [T, d_out] by module."""

    def add(self, x: Tensor, root: Tensor, residuals: Mapping[str, Tensor]) -> None:
        self.x.append(x)
        self.roots.append(root)
        for name, r in residuals.items():
            self.residuals.setdefault(name, []).append(r)

    def join(self, everything: Tensor, own: slice, widths: Mapping[str, int], add_up: AddUp) -> None:
        """Replace all rows by those of all ranks. everything: zeros [T, d_in + 1 + Σ d_out] with a line for each row of
        any rank, of which `own` are this rank's; widths: d_out by module."""
        if self.x:
            parts = (self.x, self.roots, *(self.residuals[name] for name in widths))
            everything[own] = torch.cat([torch.cat(part) for part in parts], 1)
        add_up(everything)
        d_in = everything.shape[1] - 1 - sum(widths.values())
        x, root, *residuals = everything.split([d_in, 1, *widths.values()], 1)
        self.x, self.roots, self.residuals = [x], [root], {name: [r] for name, r in zip(widths, residuals, strict=True)}

    @cached_property
    def sum(self) -> RowProduct:
        """The weighted sum Σ w x xᵀ [d_in, d_in]; no rows can be added afterwards."""
        return RowProduct(torch.cat(self.x) * torch.cat(self.roots))

    def residuals_of(self, name: str, offset: Tensor | None = None) -> Tensor:
        """Return a module's residuals [T, d_out], with an offset [d_out] if given, times the roots of the weights."""
        r = torch.cat(self.residuals[name])
        return (r if offset is None else r + offset.to(r)) * torch.cat(self.roots)


class NormMoments:
    """Per-coordinate mean z̄ and second moment q [d] of one norm's normalised input in the student, for one task."""

    def __init__(self) -> None:
        self._z, self._zz = RowSum(), RowSum()
        self.weight: Tensor | float = 0.0
        self.rows = 0

    def add(self, z: Tensor, weights: Tensor | None = None) -> None:
        """Add normalised inputs z [T, d] (before scale and bias); each row counts `weights` [T] times."""
        weighted = z if weights is None else z * weights.to(z)[:, None]
        self._z.add(weighted)
        self._zz.add(weighted * z)
        self.weight += float(len(z)) if weights is None else to_accumulation_dtype(weights.sum())
        self.rows += len(z)

    @property
    def width(self) -> int:
        """The width d; at least one row must have been added."""
        return len(self._z.value)

    def sum_over_ranks(self, rows: int, width: int, device: torch.device, add_up: AddUp) -> None:
        """Replace all sums [`width`] by those over all ranks, which hold `rows` rows together."""
        self.weight = sum_rows_over_ranks(self.weight, [(self._z, width), (self._zz, width)], device, add_up)
        self.rows = rows

    @property
    def mean(self) -> Tensor:
        """The mean z̄ of the normalised inputs [d]."""
        return self._z.value / self.weight

    @property
    def second(self) -> Tensor:
        """The second moment q = E[z²] [d]."""
        return self._zz.value / self.weight


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class TaskMoments(NamedTuple):
    """Moments of every module of a block for one task."""

    linear: dict[Names, LinearMoments]
    """Moments by the names of the modules that share an input and its token weights."""
    norms: dict[str, NormMoments]
    skipped: dict[str, str]
    """Modules whose rows in student and expert cannot be matched, with the reasons."""
    elsewhere: dict[Names, int]
    """Modules that all ranks solve together and whose moments another rank has, with their number of rows."""


class _Form(NamedTuple):
    """A description of one rank's moments of modules that share an input."""

    rows: int
    paired: bool
    """Whether residuals are summed."""
    keep_rows: bool


class _Summary(NamedTuple):
    """Message of one rank to the others about its moments of a task."""

    linear: dict[Names, _Form]
    norms: dict[str, tuple[int, int]]
    """Number of rows, and width."""
    skipped: dict[str, str]


def sum_over_ranks(
    sums: TaskMoments,
    ranks: Ranks,
    owners: dict[str, int],
    holder_of: Callable[[Names], int | None],
    make: Callable[..., LinearMoments],
    device: torch.device,
) -> TaskMoments:
    """Add up one task's moments over all ranks. The owner of a module, or the holder of what all ranks solve together,
    gets its sums, and the other ranks lose theirs; `sums` is emptied. owners: the rank of each module, which is added
    for new ones. holder_of: returns the rank that holds the task's sums of modules that all ranks solve together, and
    None for others. make: creates the empty moments of a rank that has no rows for these modules. Raises FeatCalError
    if ranks treat the same modules differently."""
    if ranks.size == 1:
        return sums
    linear = {
        names: _Form(moments.rows, bool(moments.pairs), moments.kept is not None)
        for names, moments in sums.linear.items()
    }
    norms = {name: (moments.rows, moments.width) for name, moments in sums.norms.items()}
    summaries = ranks.gather(_Summary(linear, norms, sums.skipped))
    skipped = {name: why for summary in reversed(summaries) for name, why in summary.skipped.items()}
    total = TaskMoments({}, {}, skipped, {})
    own = {_without(names, total.skipped): moments for names, moments in sums.linear.items()}
    sums.linear.clear()  # what another rank owns is large
    for names, of_ranks in _group_modules(summaries, total.skipped).items():
        owner = owners[names[0]] if names[0] in owners else _least_busy(owners, ranks)
        owners |= dict.fromkeys(names, owner)
        _, paired, keep_rows = next(iter(of_ranks.values()))
        moments = own.pop(names, None) or make(names, paired=paired, keep_rows=keep_rows)
        together, rows = holder_of(names), sum(form.rows for form in of_ranks.values())
        before = sum(form.rows for rank, form in of_ranks.items() if rank < ranks.rank)
        holder = owner if together is None else together
        moments.sum_over_ranks(names, rows, before, partial(ranks.add_up, to=holder))
        if holder == ranks.rank:
            total.linear[names] = moments
        elif together is not None:
            total.elsewhere[names] = rows
        del moments
    for name in dict.fromkeys(name for summary in summaries for name in summary.norms if name not in total.skipped):
        widths = [summary.norms[name] for summary in summaries if name in summary.norms]
        owner = owners.setdefault(name, _least_busy(owners, ranks))
        norm = sums.norms.get(name) or NormMoments()
        norm.sum_over_ranks(sum(rows for rows, _ in widths), widths[0][1], device, partial(ranks.add_up, to=owner))
        if owner == ranks.rank:
            total.norms[name] = norm
    return total


def _least_busy(owners: Mapping[str, int], ranks: Ranks) -> int:
    return min(range(ranks.size), key=list(owners.values()).count)


def _without(names: Names, skipped: Mapping[str, str]) -> Names:
    return tuple(name for name in names if name not in skipped)


def _group_modules(summaries: Sequence[_Summary], skipped: Mapping[str, str]) -> dict[Names, dict[int, _Form]]:
    """Group the modules that share an input, and return what each rank that has them tells of each group; skipped
    modules are left out. Raises FeatCalError if modules share an input for some examples but not for others, or are
    summed in two ways."""
    groups: dict[Names, dict[int, _Form]] = {}
    for rank, summary in enumerate(summaries):
        seen: list[str] = []
        for names, form in summary.linear.items():
            if left := _without(names, skipped):
                groups.setdefault(left, {})[rank] = form
                seen += left
        if len(seen) > len(set(seen)):
            raise _differ(seen)
    members = [name for names in groups for name in names]
    if len(members) > len(set(members)) or any(len({form[1:] for form in of.values()}) > 1 for of in groups.values()):
        raise _differ(members)
    return groups


def _differ(names: Sequence[str]) -> FeatCalError:
    where = next((name for name in names if names.count(name) > 1), names[0])
    what = "examples of one task take different ways through the model"
    return FeatCalError(what, where=where, fix="run it in one process")
