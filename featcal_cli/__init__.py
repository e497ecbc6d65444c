"""featcal: calibrate the features of merged models to those of their experts.

Each package below says in its first line what it holds, and imports only packages below it: `lint-imports` checks this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Recipe as Recipe
    from featcal_cli.workflows.evaluate import evaluate as evaluate
    from featcal_cli.workflows.inspect_drift import inspect_drift as inspect_drift
    from featcal_cli.workflows.verbs import calibrate as calibrate
    from featcal_cli.workflows.verbs import calibrate_modules as calibrate_modules
    from featcal_cli.workflows.verbs import dry_run as dry_run

    __version__: str
__all__ = ["Recipe", "__version__", "calibrate", "calibrate_modules", "dry_run", "evaluate", "inspect_drift"]
PLACES = {
    "calibrate": "workflows.verbs",
    "calibrate_modules": "workflows.verbs",
    "dry_run": "workflows.verbs",
    "evaluate": "workflows.evaluate",
    "inspect_drift": "workflows.inspect_drift",
    "Recipe": "recipe.schema",
}
"""The module that holds each public name."""


def __getattr__(name: str) -> Any:
    """Load a verb, or read the version, only when it is first accessed, so that importing featcal_cli stays fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("featcal-cli")
    if name in PLACES:
        from importlib import import_module

        return getattr(import_module(f"featcal_cli.{PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
