"""What the paper prints, as data in the recipes that make it: tables, their rows, and the corruptions of table 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from featcal_cli.runtime.references import bare_model, complaining

KEYS = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "contrast", "pixelate", "jpeg")
"""What can be done to images, each at the severities 1 to 5."""


def check_corruption(text: str) -> str:
    """KIND:SEVERITY as it is. Raises ValueError for anything else."""
    kind, _, severity = text.partition(":")
    if kind not in CORRUPTIONS or severity not in ("1", "2", "3", "4", "5"):
        known = ", ".join(CORRUPTIONS)
        raise ValueError(f"{text!r} is no KIND:SEVERITY, of {known} and 1 to 5")
    return text


Corruption = Annotated[str, AfterValidator(check_corruption)]


class PaperRow(BaseModel):
    """A row of a table of the paper: a model, and its figures."""

    model_config = KEYS

    method: Literal["pretrained", "experts", "best", "multitask", "merged", "featcal", "surgery", "probsurgery"]
    """`merged` is an upstream merge as it is; `featcal`, `surgery` and `probsurgery` are methods applied to it."""
    merge: str | None = None
    """The upstream merge; one that featcal does not build has a `model`, or is not measured."""
    model: Annotated[str, AfterValidator(complaining(bare_model))] | None = None
    """The checkpoint, if the row is about a public one."""
    examples: int | None = Field(default=None, ge=1)
    """Examples fitted per task; like the keys below, only if it differs from the recipe."""
    ridge: float | None = None
    """λ."""
    rho: float | None = None
    """ρ."""
    alpha: float | None = None
    """α."""
    corrupt: Corruption | None = None
    """How the fitted images were corrupted: KIND:SEVERITY."""
    figures: tuple[float | None, ...] = ()
    """The paper's figures in the order of the columns; left out if the paper prints none."""
    spread: float | None = None
    """Their standard deviation over the seeds."""
    misprints: Mapping[str, str] = {}
    """Column → why the printed figure cannot be right."""


class PaperTable(BaseModel):
    """What the paper prints, for `featcal reproduce`."""

    model_config = KEYS

    columns: tuple[str, ...] = Field(min_length=1)
    """Tasks of the recipe or of lm-eval; `mean` over all; or what a run costs: seconds, energy_wh, rss_gib."""
    rows: tuple[PaperRow, ...] = ()
    """The models."""
    seeds: tuple[int, ...] = ()
    """Each row is calibrated once per seed; if left out, with the recipe's seed."""

    @model_validator(mode="after")
    def _fits(self) -> PaperTable:
        for row in self.rows:
            if row.figures and len(row.figures) != len(self.columns):
                raise ValueError(
                    f"a row of {row.method} has {len(row.figures)} figures for {len(self.columns)} columns"
                )
            if unknown := [column for column in row.misprints if column not in self.columns]:
                raise ValueError(f"there is no column {unknown[0]}")
        return self
