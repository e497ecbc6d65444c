"""featcal: calibrate the features of merged models to those of their experts.

The packages, imports only downward (`lint-imports` holds it):

    cli          commands, options, what the terminal shows: the only place that imports typer and rich
    workflows    the verbs: calibrate, inspect_drift, evaluate, demo; what they check before, and what they write
    reporting    schemas of results, the model card, pictures, the HTML page, limits of drift
    evaluation   accuracy: protocols, and scores with their intervals
    calibration  the method: Algorithm 1, normal equations, closed forms, hyperparameters
    engine       expert and students run block by block side by side: hooks, token weights, offload, drift metrics
    models       checkpoints loaded, aligned, patched and merged; their blocks found
    data         a source of examples → model-ready batches
    lineage      a merged repo → its base, its experts and their data
    hub          repos at a commit: listed, downloaded, converted, written to
    recipe       a YAML file and options → one validated object
    runtime      what all others use: errors, files, processes, devices, memory, sanitising, logs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Recipe as Recipe
    from featcal_cli.workflows.evaluate import evaluate as evaluate
    from featcal_cli.workflows.verbs import calibrate as calibrate
    from featcal_cli.workflows.verbs import dry_run as dry_run

    __version__: str
__all__ = ["Recipe", "__version__", "calibrate", "dry_run", "evaluate"]


def __getattr__(name: str) -> Any:
    """Load the verbs, and read the version, when they are first asked for: importing featcal_cli stays fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("featcal-cli")
    if name in ("calibrate", "dry_run"):
        from featcal_cli.workflows import verbs

        return getattr(verbs, name)
    if name == "evaluate":
        from featcal_cli.workflows.evaluate import evaluate

        return evaluate
    if name == "Recipe":
        from featcal_cli.recipe.schema import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
