"""Choose the settings of `featcal demo` on validation images, which nothing else uses.

Run it from anywhere: `python recipes/demo/choose.py` (about five minutes on two cores). It calibrates the demo's merged
model with every λ, ρ and α of a grid and prints the mean validation accuracy of each, best first.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from featcal_cli.checkpoint import load_model
from featcal_cli.evaluate import measure_accuracy
from featcal_cli.examples import load_labelled
from featcal_cli.hub import resolve
from featcal_cli.recipe import Recipe, build_recipe
from featcal_cli.workflow import Result, calibrate

RIDGES, RHOS, ALPHAS = (1e-5, 1e-3, 0.05, 0.5), (0.5, 1.0, 2.0), (0.15, 0.3, 0.6, 1.0)


def validation_accuracy(recipe: Recipe, result: Result) -> tuple[list[float], list[float], list[float]]:
    """Accuracy of experts, merged and calibrated model in percent, task by task."""
    calibrated = load_model("calibrated", resolve(str(result.output)), type(result.merged.module))
    rows = []
    for task, spec in recipe.tasks.items():
        expert = result.experts[task]
        data = load_labelled(task, spec.data, "validation", expert.module, [expert.snapshot.folder], batch_size=100)
        rows.append([100 * measure_accuracy(expert, body, *data) for body in (None, result.merged, calibrated)])
    experts, merged, mended = (list(column) for column in zip(*rows, strict=True))
    return experts, merged, mended


def main() -> None:
    """Print the grid, best first."""
    recipe = build_recipe(Path(__file__).resolve().parent.parent / "demo.yaml", {})
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ridge, rho, alpha in itertools.product(RIDGES, RHOS, ALPHAS):
            settings = recipe.calibration.model_copy(update={"ridge": ridge, "rho": rho, "alpha": alpha})
            trial = recipe.model_copy(update={"calibration": settings})
            experts, merged, mended = validation_accuracy(
                recipe, calibrate(trial, output=Path(folder) / "out", overwrite=True, batch_size=64)
            )
            worst = min(after - before for after, before in zip(mended, merged, strict=True))
            found.append((sum(mended) / len(mended), worst, ridge, rho, alpha))
    print(f"experts {sum(experts) / len(experts):.1f}, merged {sum(merged) / len(merged):.1f}")
    for mean, worst, ridge, rho, alpha in sorted(found, reverse=True):
        print(f"{mean:.1f} (worst task {worst:+.1f})  ridge {ridge:g}  rho {rho:g}  alpha {alpha:g}")


if __name__ == "__main__":
    main()
