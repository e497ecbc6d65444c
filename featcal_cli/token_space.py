"""The same normal equations over rows instead of input dimensions: for when all tasks have fewer rows than d_in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from featcal_cli.factor import EPSILON, condition_number, factorise, solve_rows
from featcal_cli.modules import Affine
from featcal_cli.moments import LinearMoments
from featcal_cli.solver import LinearSystem, Settings


class TokenSystem(LinearSystem):
    """Holds the rows themselves. With X [T, d_in] the rows times √(ω_i w), R [T, d_out] what they lack of their targets
    and A the anchor's pull over λ,

        (RᵀX + λ A) (XᵀX + λ I)⁻¹ = A + (R − X Aᵀ)ᵀ (X Xᵀ + λ I)⁻¹ X.
    """

    def __init__(self, merged: Mapping[str, Affine], settings: Settings, *, with_bias: bool = False) -> None:
        super().__init__(merged, settings, with_bias=with_bias)
        self._x: list[Tensor] = []
        self._residuals: dict[str, list[Tensor]] = {name: [] for name in merged}

    def _add(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: float) -> None:
        assert moments.kept is not None
        scale = torch.cat(moments.kept.roots) * (omega / moments.weight) ** 0.5
        self._x.append(torch.cat(moments.kept.x) * scale)
        for name, expert in experts.items():
            lacking = torch.cat(moments.kept.residuals[name])
            if self._with_bias:
                lacking = lacking + self._bias_offset(name, expert).to(lacking)
            self._residuals[name].append(lacking * scale)

    def _factorise(self) -> tuple[Callable[[str, Tensor], Tensor], float, float]:
        x, ridge = self._cast(torch.cat(self._x)), self._settings.ridge
        products = x @ x.T
        factor, ridge = factorise(products, ridge)
        # where no row reaches, the smallest eigenvalue is that of the ridge alone
        condition = condition_number(products, factor, smallest=ridge + EPSILON)

        def update_of(name: str, towards: Tensor) -> Tensor:
            share = ridge / (ridge + EPSILON)
            lacking = self._lacking_rows(name) - (x @ towards.T).mul_(share)
            return (solve_rows(lacking.T, factor) @ x).add_(towards, alpha=share)

        return update_of, condition, ridge

    def _along(self, name: str, update: Tensor) -> tuple[float, float]:
        moved = self._cast(torch.cat(self._x)) @ update.T
        return float(moved.square().sum()), float((moved * self._lacking_rows(name)).sum())

    def _lacking_rows(self, name: str) -> Tensor:
        return self._cast(torch.cat(self._residuals[name]))
