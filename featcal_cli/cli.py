"""The command line: everything that imports typer. Commands parse, call a verb, and show what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from featcal_cli import __version__, options
from featcal_cli.launch import read_launch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Mend merged models: calibrate their features to the experts', in closed form, without gradients.",
)

NORMS = ("auto", "layernorm", "all", "none")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"featcal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    merged: options.Merged = None,
    base: options.Base = None,
    expert: options.Experts = None,
    data: options.Sources = None,
    merge: options.MergeMethod = None,
    recipe: options.Recipe = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    examples: options.Examples = None,
    ridge: options.Ridge = None,
    rho: options.Rho = None,
    alpha: options.Alpha = None,
    select: options.Select = None,
    norms: options.Norms = None,
    bias: options.Bias = None,
    token_weights: options.TokenWeights = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    output: options.Folder = None,
    overwrite: options.Overwrite = False,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    push_to: options.PushTo = None,
    private: options.Private = None,
    create_pr: options.CreatePr = False,
    overwrite_repo: options.OverwriteRepo = False,
    commit_message: options.CommitMessage = None,
) -> None:
    """Calibrate a merged model to its experts' features, write the mended model to a folder, and push it to the Hub.

    **Examples**

        featcal calibrate user/merged --dry-run

        featcal calibrate user/merged --push-to user/merged-featcal

        featcal calibrate user/merged --base user/base \\
          --expert mnist=user/mnist --data mnist=ylecun/mnist \\
          --expert svhn=user/svhn --data svhn=ufldl-stanford/svhn:cropped_digits
    """
    from featcal_cli.console import Screen, show_drift, show_preflight, show_result, warn_of_growth
    from featcal_cli.gate import check_grown
    from featcal_cli.recipe import find_recipe, read_draft

    calibration = {
        "examples": examples, "dtype": dtype, "ridge": ridge, "rho": rho, "alpha": alpha, "select": select,
        "norms": norms, "bias": bias, "token_weights": token_weights, "seed": seed,
    }  # fmt: skip
    place = {"push_to": push_to, "private": private}
    overrides = options.collect_overrides(merged, merge, base, expert, data, calibration, place)
    draft = read_draft(find_recipe(recipe) if recipe else None, overrides)
    screen = Screen(quiet=quiet or json)
    with screen.live(), _interruptible():
        from featcal_cli import workflow

        common: dict[str, Any] = {
            "output": output, "overwrite": overwrite, "create_pr": create_pr, "overwrite_repo": overwrite_repo,
            "device": device, "batch_size": batch_size, "allow_pickle": allow_pickle,
            "trust_remote_code": trust_remote_code, "listener": screen,
        }  # fmt: skip
        if dry_run:
            preflight = workflow.dry_run(draft, **common)
        else:
            result = workflow.calibrate(draft, **common, commit_message=commit_message, strict=strict)
    if dry_run:
        typer.echo(dumps(preflight.to_dict(), indent=2)) if json else show_preflight(preflight)
    elif json:
        written: dict[str, Any] = {
            "output": str(result.output),
            "pushed": asdict(result.pushed) if result.pushed else None,
        }
        typer.echo(dumps(written | asdict(result.report), indent=2, ensure_ascii=False))
    else:
        show_drift(result.report)
        show_result(result.output, result.pushed, hints=not quiet)
    if not dry_run:
        warn_of_growth(result.report)
        if strict:
            check_grown(result.report, result.output)


@app.command("inspect-drift")
def inspect_drift(
    model: options.Model,
    base: options.Base = None,
    expert: options.Experts = None,
    data: options.Sources = None,
    recipe: options.Recipe = None,
    compare: options.Compare = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    examples: options.Measured = None,
    norms: options.Norms = None,
    token_weights: options.TokenWeights = None,
    seed: options.MeasuredSeed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    plot: options.Plot = None,
    projection: options.Projection = None,
    html: options.Html = None,
    max_drift: options.MaxDrift = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show how far a model's features are from each expert's, block by block, and where that comes from.

    **Examples**

        featcal inspect-drift user/merged

        featcal inspect-drift user/merged --compare user/merged-featcal --html drift.html

        featcal inspect-drift user/merged --max-drift 0.8
    """
    from featcal_cli.console import OUT, Screen
    from featcal_cli.recipe import find_recipe, read_draft

    calibration = {
        "examples": examples, "dtype": dtype, "norms": norms, "token_weights": token_weights, "seed": seed,
    }  # fmt: skip
    overrides = options.collect_overrides(model, None, base, expert, data, calibration, {})
    draft = read_draft(find_recipe(recipe) if recipe else None, overrides)
    screen = Screen(quiet=quiet or json)
    with screen.live():
        from featcal_cli.drift_view import show_inspection
        from featcal_cli.gate import check_gate
        from featcal_cli.inspector import inspect_drift as run

        found = run(
            draft, compare=compare, device=device, batch_size=batch_size, allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code, plot=plot, projection=projection, html=html, listener=screen,
        )  # fmt: skip
    if json:
        typer.echo(found.to_json(), nl=False)
    else:
        show_inspection(found, OUT)
    if max_drift is not None:
        check_gate(found, max_drift)


@app.command()
def modules(
    model: options.Model,
    norms: options.Norms = "auto",
    json: options.Json = False,
) -> None:
    """Show what would be calibrated in a model, block by block; only its config is read."""
    from featcal_cli.console import show_inventory
    from featcal_cli.errors import RecipeError
    from featcal_cli.hub import resolve_config
    from featcal_cli.inventory import take_inventory

    if norms is not None and norms not in NORMS:
        raise RecipeError(f"unknown kind of norms {norms}", where="--norms", fix=f"give one of: {', '.join(NORMS)}")
    inventory = take_inventory(resolve_config(model), norms or "auto")
    if json:
        typer.echo(dumps(inventory.to_dict(), indent=2))
    else:
        show_inventory(inventory)


@app.command()
def demo(
    device: options.Device = "auto",
    output: options.Folder = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Calibrate a small merged model that comes with the package, and show the accuracy before and after."""
    from featcal_cli.console import (
        Screen,
        show_accuracy,
        show_demo,
        show_drift,
        show_next,
        show_result,
        warn_of_growth,
    )
    from featcal_cli.recipe import find_recipe

    screen = Screen(quiet=quiet or json)
    if not (quiet or json):
        show_demo(find_recipe("demo"))
    with screen.live(), _interruptible():
        from featcal_cli.demo import run_demo

        result = run_demo(output, device, screen)
    if json:
        typer.echo(dumps(result.to_dict(), indent=2))
        return
    show_drift(result.report)
    show_accuracy(result.accuracy)
    show_result(result.output, None, hints=not quiet)
    warn_of_growth(result.report)
    if not quiet:
        show_next()


def main() -> None:
    """Run the command line; errors that the user can mend become one message and exit code 2."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # it writes of every retry, with the address
    from featcal_cli.errors import FeatCalError

    launch = read_launch()
    try:
        with _silent() if launch.rank else nullcontext():
            app()
    except FeatCalError as error:
        if launch.by_torchrun:
            from featcal_cli.ranks import is_first_to_fail

            if not is_first_to_fail():
                sys.exit(error.exit_code)
        from featcal_cli.console import show_error

        show_error(error, f"rank {launch.rank}: " if launch.by_torchrun else "")
        sys.exit(error.exit_code)
    except SystemExit as end:
        if launch.by_torchrun and not end.code:
            from featcal_cli.ranks import leave_ranks

            leave_ranks()
        raise


@contextmanager
def _silent() -> Iterator[None]:
    """Of several processes the first one speaks; of what fails, each."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C says how to go on; typer makes exit code 130 of it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from here", err=True)
        raise
