"""Commands of the command line. Each one parses its options, calls a verb and shows the result.

A command imports its verb only when it runs, so that `featcal --help` stays fast; a verb imports torch only after all
steps that do not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featcal_cli.cli import options
from featcal_cli.recipe.schema import Calibration, Output
from featcal_cli.runtime.errors import EXIT_CODES, RecipeError

if TYPE_CHECKING:
    from featcal_cli.workflows.session import RunOptions
    from featcal_cli.workflows.verbs import Result

HELP = """Calibrate merged models: move their features and outputs back to the experts', without labels.

**Examples**

    featcal demo

    featcal calibrate user/merged --push-to user/merged-featcal

    featcal inspect-drift user/merged --max-drift 0.8
"""
CODES = "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
EPILOG = f"""
{fill(f"**Exit codes**: {CODES}.", 120)}

**Environment**: HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE, as for every client of the Hub.
"""
app = typer.Typer(
    cls=options.Group,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help=HELP,
    epilog=EPILOG,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from featcal_cli import __version__

        typer.echo(f"featcal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Run the command in N processes, each on a GPU of its own."),
    ] = None,
) -> None:
    from featcal_cli.runtime.process import check_surroundings

    check_surroundings()
    if gpus is not None:
        from featcal_cli.runtime.distributed import start_ranks

        words = sys.argv[1:]
        while words[0].startswith("--gpus"):  # the only option here that has a command after it
            del words[: 1 if "=" in words[0] else 2]
        raise typer.Exit(start_ranks(gpus, words))


def _print_json(value: object) -> None:
    from featcal_cli.runtime.structured_text import write_json

    typer.echo(write_json(value, indent=2))


@app.command(cls=options.Command)
@options.with_groups(
    inputs=options.INPUTS, settings=options.list_keys(Calibration), running=options.RUNNING, writing=options.WRITING,
    publishing=options.list_keys(Output), pushing=options.PUSHING,
)  # fmt: skip
def calibrate(
    context: typer.Context,
    *,
    merged: options.Merged = None,
    inputs: Mapping[str, Any],
    merge: options.MergeMethod = None,
    recipe: options.Recipe = None,
    settings: Mapping[str, Any],
    running: Mapping[str, Any],
    writing: Mapping[str, Any],
    save: options.Save = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
    publishing: Mapping[str, Any],
    pushing: Mapping[str, Any],
) -> None:
    """Calibrate a merged model to its experts' features, write the result to a folder, and push it to the Hub.

    **Examples**

        featcal calibrate user/merged --dry-run

        featcal calibrate user/merged --push-to user/merged-featcal

        featcal calibrate user/merged --base openai/clip-vit-base-patch32 \\
          --expert mnist=user/clip-mnist --data mnist=ylecun/mnist \\
          --expert svhn=user/clip-svhn \\
          --data svhn=ufldl-stanford/svhn:cropped_digits
    """
    from featcal_cli.cli import results
    from featcal_cli.cli.console import begin
    from featcal_cli.recipe.reading import collect_overrides, find_recipe, read_draft
    from featcal_cli.workflows import verbs
    from featcal_cli.workflows.inputs import check_save, save_recipe
    from featcal_cli.workflows.session import RunOptions, Session
    from featcal_cli.workflows.workspace import default_output

    how = RunOptions(**running, **writing, **pushing)
    said: dict[str, Any] = {"merged": merged, "merge": merge, **inputs, **settings, **publishing}
    draft = read_draft(find_recipe(recipe) if recipe else None, collect_overrides(**said))
    if save:
        check_save(save, overwrite=how.overwrite, dry_run=how.dry_run)
    place = {"--output": Path(how.output or default_output(draft.name))}
    options.check_files({**place, "--log-file": log_file, "--save": save}, draft, recipe)
    with begin(json=json, quiet=quiet, log_file=log_file) as (screen, log):
        with screen.live():
            session = Session(draft, how, log)
            found, target = verbs.find(session)
            if not how.dry_run:
                done = verbs.run(session, found, target)
            else:
                if not json:
                    with screen.paused():
                        results.show_inputs(found)
                plan = verbs.plan_only(session, found)
        if not how.dry_run:
            _finish(done, how, draft.output.push_to, screen.seconds, json=json, quiet=quiet)
            return
        if save:
            save_recipe(save, plan.recipe, found.findings, overwrite=how.overwrite)
            log.note(results.describe_saved(context, save, said))
        _print_json(plan.to_dict()) if json else results.show_plan(plan)
        if plan.stops:
            raise verbs.join_stops(plan.stops)


def _finish(done: Result, how: RunOptions, push_to: str | None, seconds: float, *, json: bool, quiet: bool) -> None:
    """Show the result of a calibration that took so many seconds. Raises GateError if it should fail a pipeline."""
    from featcal_cli.cli import results
    from featcal_cli.reporting.verdict import check_grown, check_pushable
    from featcal_cli.workflows.verbs import ALREADY_DONE

    if json:
        _print_json(done.to_dict())
    elif how.evaluate or not done.was_done:
        made = done.report, done.output, done.pushed
        next_steps = [] if quiet else results.list_next_steps(*made, how)
        results.show_calibration(*made, seconds if done.models else None, next_steps)
    elif quiet:
        typer.echo(ALREADY_DONE.format(done.output))
    if how.strict:
        check_grown(done.report, done.output)
    if not how.push_anyway:
        check_pushable(done.report, done.output, push_to)


@app.command("inspect-drift", cls=options.Command)
@options.with_groups(inputs=options.INPUTS, running=options.RUNNING)
def inspect_drift(
    model: options.Model,
    *,
    inputs: Mapping[str, Any],
    recipe: options.Recipe = None,
    compare: options.Compare = None,
    examples: options.Measured = None,
    seed: options.MeasuredSeed = None,
    running: Mapping[str, Any],
    dtype: options.Dtype = None,
    plot: options.Plot = None,
    html: options.Html = None,
    markdown: options.Markdown = None,
    max_drift: options.MaxDrift = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
) -> None:
    """Show how far a model's features have drifted from each expert's, block by block, and where that begins.

    **Examples**

        featcal inspect-drift user/merged

        featcal inspect-drift user/merged --compare user/merged-featcal \\
          --html drift.html

        featcal inspect-drift user/merged --max-drift 0.8
    """
    from featcal_cli.cli.console import OUT, begin
    from featcal_cli.cli.drift import show_inspection
    from featcal_cli.recipe.reading import collect_overrides, find_recipe, read_draft
    from featcal_cli.reporting.verdict import check_gate
    from featcal_cli.runtime.process import MEASURING
    from featcal_cli.workflows.inspect_drift import inspect_drift as run

    overrides = collect_overrides(merged=model, **inputs, examples=examples, dtype=dtype, seed=seed)
    draft = read_draft(find_recipe(recipe) if recipe else None, overrides)
    written = {"plot": plot, "html": html, "markdown": markdown}
    by_option = {f"--{name}": file for name, file in written.items()}
    options.check_files({"--log-file": log_file, **by_option}, draft, recipe)
    if max_drift is not None and not isfinite(max_drift):
        fix = "give --max-drift a number such as 0.8"
        raise RecipeError(f"{max_drift} is no finite number", where="--max-drift", fix=fix)
    with begin(json=json, quiet=quiet, log_file=log_file) as (screen, log):
        with screen.live(MEASURING):
            inspection = run(draft, compare=compare, seed=seed, **running, **written, max_drift=max_drift, listener=log)
        if json:
            typer.echo(inspection.to_json(), nl=False)
        else:
            show_inspection(inspection, OUT, by_option)
        if max_drift is not None:
            check_gate(inspection, max_drift)


@app.command(cls=options.Command)
@options.with_groups(inputs=options.INPUTS, running=options.RUNNING)
def evaluate(
    models: options.Evaluated = None,
    *,
    inputs: Mapping[str, Any],
    merge: options.MergeMethod = None,
    recipe: options.Recipe = None,
    limit: options.Limit = None,
    running: Mapping[str, Any],
    allow_code: options.AllowCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
) -> None:
    """Measure accuracy or perplexity on a recipe's tasks: each expert on its task, merged and every MODEL on all.

    **Examples**

        featcal evaluate -r clip-vit-b32-8 ./clip-vit-b32-8-featcal

        featcal evaluate ./my-merge-featcal --limit 500

        featcal evaluate -r mine.yaml user/merged-featcal user/other-merge --json
    """
    from featcal_cli.cli.console import begin
    from featcal_cli.cli.results import show_evaluation
    from featcal_cli.recipe.reading import collect_overrides, find_recipe, names_merged, read_draft, read_tasks
    from featcal_cli.workflows.evaluate import evaluate as run
    from featcal_cli.workflows.evaluate import find_own_recipe

    options.check_files({"--log-file": log_file}, None, recipe)
    with begin(json=json, quiet=quiet, log_file=log_file) as (screen, log):
        with screen.live():
            given = list(models or [])
            file = find_recipe(recipe) if recipe else find_own_recipe(given)
            merged = given.pop(0) if given and not merge and not (file and names_merged(file)) else None
            overrides = collect_overrides(merged=merged, merge=merge, **{**inputs, "split": None})
            for task, name in read_tasks("--split", "NAME", inputs["split"]).items():  # of the labelled data, here
                overrides["tasks"] = overrides["tasks"] or {}
                overrides["tasks"].setdefault(task, {})["evaluate"] = {"split": name}
            draft = read_draft(file, overrides)
            evaluation = run(draft, given, limit=limit, **running, allow_code=allow_code, listener=log)
        _print_json(evaluation.to_dict()) if json else show_evaluation(evaluation, screen.seconds)


@app.command(cls=options.Command)
def doctor(json: options.Json = False) -> None:
    """Check this machine: versions, device, memory, caches, the Hub and your token, with a fix for whatever is wrong.

    Exit code 1 means that something would stop a run. No secret is printed: add the output to a bug report.

    **Examples**

        featcal doctor

        featcal doctor --json
    """
    from featcal_cli.cli.results import show_findings
    from featcal_cli.workflows.doctor import examine

    findings = list(examine())
    is_well = all(finding.state != "problem" for finding in findings)
    if json:
        _print_json({"ok": is_well, "findings": [asdict(item) for item in findings]})
    else:
        show_findings(findings)
    if not is_well:
        raise typer.Exit(1)


@app.command(cls=options.Command)
def recipes(name: options.RecipeName = None) -> None:
    """List the recipes that come with the package, or print one.

    **Examples**

        featcal recipes

        featcal recipes clip-vit-b32-8 > mine.yaml

        featcal recipes ci/featcal.yml > featcal.yml
    """
    from featcal_cli.cli.results import show_recipes
    from featcal_cli.recipe.reading import print_shipped, shipped_recipes

    if name:
        typer.echo(print_shipped(name), nl=False)
    else:
        show_recipes(shipped_recipes())


@app.command(cls=options.Command)
def modules(model: options.Model, json: options.Json = False) -> None:
    """Show what would be calibrated in a model, block by block; only its config is read.

    **Examples**

        featcal modules openai/clip-vit-base-patch32

        featcal modules ./my-merge --json
    """
    from featcal_cli.cli.console import begin
    from featcal_cli.cli.results import show_inventory
    from featcal_cli.hub.snapshot import resolve_config
    from featcal_cli.runtime.process import MEASURING

    with begin(json=json) as (screen, log), screen.live(MEASURING):
        log.stage("reading the config")
        snapshot = resolve_config(model)
        log.stage("loading libraries")
        from featcal_cli.models.inventory import take_inventory

        inventory = take_inventory(snapshot)
    _print_json(inventory.to_dict()) if json else show_inventory(inventory)


@app.command(cls=options.Command)
def demo(
    device: options.Device = "auto",
    output: options.DemoFolder = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Calibrate a small merged model that comes with the package, and show the accuracy before and after.

    **Examples**

        featcal demo

        featcal demo -o my-demo --json
    """
    from featcal_cli.cli import results
    from featcal_cli.cli.console import begin
    from featcal_cli.runtime.process import read_launch

    if read_launch().size > 1:
        raise RecipeError("the demo is made for one process", where="featcal demo", fix="leave --gpus out")
    if not (quiet or json):
        results.show_demo()
    with begin(json=json, quiet=quiet) as (screen, log), screen.live():
        from featcal_cli.workflows.verbs import calibrate as run

        place = output or Path("featcal-demo")
        done = run("demo", output=place, overwrite=True, evaluate=True, device=device, listener=log)
    if json:
        _print_json(done.to_dict())
    else:
        next_steps = [] if quiet else [results.OWN_MODEL]
        results.show_calibration(done.report, done.output, None, screen.seconds, next_steps)
