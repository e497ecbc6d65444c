"""The command line: everything that imports typer. Commands parse, call a verb, and show what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from featcal_cli import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Mend merged models: calibrate their features to the experts', in closed form, without gradients.",
)

NORMS = ("auto", "layernorm", "all", "none")
MODELS, METHOD, MACHINE, OUTPUT = "Models and data", "Method (what is left out is chosen)", "Machine", "Output"

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", metavar="FILE", help="A recipe, or its name; options override it.", rich_help_panel=MODELS
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda[:K].", rich_help_panel=MACHINE)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the result.", rich_help_panel=OUTPUT)]
Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Output folder [./NAME-featcal].", rich_help_panel=OUTPUT),
]


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
    merged: Annotated[
        str | None, typer.Argument(metavar="MERGED", help="The merged model: Hub id[@revision] or folder.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="The model that the experts were fine-tuned from.", rich_help_panel=MODELS),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=REPO", help="An expert; repeat for each task.", rich_help_panel=MODELS),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=SOURCE",
            help="Examples of a task, without labels: Hub dataset ID[:CONFIG[:SPLIT]], folder of images, "
            ".jsonl, .csv, .parquet, or .safetensors of model-ready inputs.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Build the merged model: average or task_arithmetic:0.3.", rich_help_panel=MODELS
        ),
    ] = None,
    recipe: Recipe = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="Read pickled .bin weights (tensors only, no code).", rich_help_panel=MODELS
        ),
    ] = False,
    examples: Annotated[
        int | None,
        typer.Option("--examples", "-n", metavar="N", help="Examples fitted per task [256].", rich_help_panel=METHOD),
    ] = None,
    ridge: Annotated[
        float | None, typer.Option(metavar="F", help="λ: weight of the anchor.", rich_help_panel=METHOD)
    ] = None,
    rho: Annotated[
        float | None, typer.Option(metavar="F", help="ρ: anchor = ρ·merged + (1−ρ)·base.", rich_help_panel=METHOD)
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="F", help="α: target = α·expert + (1−α)·calibrated features.", rich_help_panel=METHOD),
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="auto, layernorm, all (RMSNorm too) or none.", rich_help_panel=METHOD),
    ] = None,
    bias: Annotated[
        bool | None, typer.Option("--bias/--no-bias", help="Calibrate Linear biases [yes].", rich_help_panel=METHOD)
    ] = None,
    token_weights: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="auto, uniform, or cls: the first token counts most in the last block.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the choice of examples [42].", rich_help_panel=METHOD)
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the forward passes: auto, float32 or bfloat16.", rich_help_panel=MACHINE),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Examples per forward pass [16].", rich_help_panel=MACHINE)
    ] = None,
    output: Folder = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output folder.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate a merged model to its experts' features and write the mended model to a folder.

    **Example**

        featcal calibrate user/merged --base user/base \\
          --expert mnist=user/mnist --data mnist=ylecun/mnist \\
          --expert svhn=user/svhn --data svhn=ufldl-stanford/svhn:cropped_digits
    """
    from featcal_cli.console import Screen, show_drift, show_result
    from featcal_cli.recipe import build_recipe, find_recipe

    calibration = {
        "examples": examples, "dtype": dtype, "ridge": ridge, "rho": rho, "alpha": alpha, "norms": norms, "bias": bias,
        "token_weights": token_weights, "seed": seed,
    }  # fmt: skip
    overrides = _overrides(merged, merge, base, expert or [], data or [], calibration)
    job = build_recipe(find_recipe(recipe) if recipe else None, overrides)
    screen = Screen(quiet=quiet or json)
    with screen.live(), _interruptible():
        from featcal_cli.workflow import calibrate as run

        result = run(
            job,
            output=output,
            overwrite=overwrite,
            device=device,
            batch_size=batch_size,
            allow_pickle=allow_pickle,
            listener=screen,
        )
    if json:
        typer.echo(result.report.to_json())
    else:
        show_drift(result.report)
        show_result(result.output, hints=not quiet)


@app.command()
def modules(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id[@revision] or folder.")],
    norms: Annotated[str, typer.Option(metavar="KIND", help="auto, layernorm, all (RMSNorm too) or none.")] = "auto",
    json: Json = False,
) -> None:
    """Show what would be calibrated in a model, block by block; only its config is read."""
    from featcal_cli.console import show_inventory
    from featcal_cli.errors import RecipeError
    from featcal_cli.hub import resolve_config
    from featcal_cli.inventory import take_inventory

    if norms not in NORMS:
        raise RecipeError(f"unknown kind of norms {norms}", where="--norms", fix=f"give one of: {', '.join(NORMS)}")
    inventory = take_inventory(resolve_config(model), norms)
    if json:
        typer.echo(dumps(inventory.to_dict(), indent=2))
    else:
        show_inventory(inventory)


@app.command()
def demo(
    device: Device = "auto",
    output: Folder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate a small merged model that comes with the package, and show the accuracy before and after."""
    from featcal_cli.console import Screen, show_accuracy, show_demo, show_drift, show_next, show_result
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
    show_result(result.output, hints=not quiet)
    if not quiet:
        show_next()


def main() -> None:
    """Run the command line; errors that the user can mend become one message and exit code 2."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from featcal_cli.errors import FeatCalError

    try:
        app()
    except FeatCalError as error:
        from featcal_cli.console import show_error

        show_error(error)
        sys.exit(error.exit_code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C says how to go on; typer makes exit code 130 of it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from the last finished block", err=True)
        raise


def _overrides(
    merged: str | None,
    merge: str | None,
    base: str | None,
    experts: list[str],
    data: list[str],
    calibration: dict[str, Any],
) -> dict[str, Any]:
    """The command line in the nesting of a recipe; None means not given."""
    from featcal_cli.address import parse_merge, parse_source
    from featcal_cli.errors import RecipeError

    if merged and merge:
        raise RecipeError("both MERGED and --merge are given", where="the command line", fix="give one of them")
    tasks: dict[str, dict[str, Any]] = {}
    for option, values in (("expert", experts), ("data", data)):
        for value in values:
            task, equals, found = value.partition("=")
            if not (task and equals and found):
                raise RecipeError(f"cannot read {value!r}", where=f"--{option}", fix=f"write --{option} TASK=…")
            if option in tasks.setdefault(task, {}):
                raise RecipeError(f"task {task} has two of them", where=f"--{option}", fix="name every task once")
            tasks[task][option] = found if option == "expert" else parse_source(found)
    return {
        "merged": parse_merge(merge) if merge else merged,
        "base": base,
        "tasks": tasks or None,
        "calibration": {key: value for key, value in calibration.items() if value is not None},
    }
