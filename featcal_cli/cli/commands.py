"""The command line: everything that imports typer. Commands parse, call a verb, and show what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from featcal_cli import __version__
from featcal_cli.cli import options
from featcal_cli.cli.doctor import doctor
from featcal_cli.cli.modules import modules
from featcal_cli.recipe.reading import (
    collect_overrides,
    find_recipe,
    names_merged,
    print_shipped,
    read_draft,
    read_tasks,
    shipped_recipes,
)
from featcal_cli.recipe.schema import Calibration, Output
from featcal_cli.runtime.logfile import recorded
from featcal_cli.runtime.process import MEASURING, check_surroundings, interruptible
from featcal_cli.runtime.structured_text import write_json

HELP = """Calibrate merged models: move their features back to the experts', in closed form, without training.

**Examples**

    featcal demo

    featcal calibrate user/merged --push-to user/merged-featcal

    featcal inspect-drift user/merged --max-drift 0.8
"""
EPILOG = """
**Exit codes**: 0 done; 2 something that you can fix (one message says what, where and how); 3 the result was measured
and is not good enough (drift above --max-drift; larger than before on a task, with --strict, or on average, with
--push-to); 130 interrupted, and the same command goes on from there (143 by SIGTERM, 129 by SIGHUP); 141 the reader of
the output has gone (`| head`); 1 a bug (a report of it is written), or a problem that `featcal doctor` found.

**Environment**: HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE, as for every client of the Hub.
"""
app = typer.Typer(
    cls=options.Group,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help=HELP,
    epilog=EPILOG,
)


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
    check_surroundings()


@app.command(cls=options.Command)
@options.with_keys(settings=Calibration, publishing=Output)
def calibrate(
    context: typer.Context,
    *,
    merged: options.Merged = None,
    base: options.Base = None,
    expert: options.Experts = None,
    data: options.Sources = None,
    skip_expert: options.SkipExperts = None,
    columns: options.Columns = None,
    split: options.Splits = None,
    merge: options.MergeMethod = None,
    recipe: options.Recipe = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    settings: Mapping[str, Any],
    device: options.Device = "auto",
    batch_size: options.BatchSize = None,
    output: options.Folder = None,
    overwrite: options.Overwrite = False,
    restart: options.Restart = False,
    as_adapter: options.AsAdapter = None,
    strict: options.Strict = False,
    evaluate: options.EvaluateToo = False,
    allow_code_execution: options.AllowCode = False,
    dry_run: options.DryRun = False,
    save: options.Save = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
    publishing: Mapping[str, Any],
    create_pr: options.CreatePr = False,
    overwrite_repo: options.OverwriteRepo = False,
    push_anyway: options.PushAnyway = False,
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
    from featcal_cli.cli import result_view
    from featcal_cli.cli.console import Screen
    from featcal_cli.reporting.gates import check_grown, check_pushable
    from featcal_cli.workflows.output_files import check_save, save_recipe
    from featcal_cli.workflows.workspace import default_output

    said: dict[str, Any] = {
        "merged": merged, "merge": merge, "base": base, "expert": expert, "data": data, "skip_expert": skip_expert,
        "columns": columns, "split": split, **settings, **publishing,
    }  # fmt: skip
    draft = read_draft(find_recipe(recipe) if recipe else None, collect_overrides(**said))
    if save:
        check_save(save, overwrite=overwrite, dry_run=dry_run)
    place = {"--output": output or default_output(draft.name)}
    options.check_files({**place, "--log-file": log_file, "--save": save}, draft, recipe)
    screen = Screen(quiet=quiet or json)
    with recorded(screen, log_file) as log:
        with interruptible(), screen.live():
            from featcal_cli.workflows import verbs

            common: dict[str, Any] = {
                "output": output, "overwrite": overwrite, "create_pr": create_pr, "overwrite_repo": overwrite_repo,
                "device": device, "batch_size": batch_size, "allow_pickle": allow_pickle,
                "trust_remote_code": trust_remote_code, "strict": strict, "as_adapter": as_adapter, "restart": restart,
                "evaluate": evaluate, "allow_code": allow_code_execution, "listener": log,
            }  # fmt: skip
            if dry_run:
                preflight = verbs.dry_run(draft, **common, raise_stops=False)
            else:
                result = verbs.calibrate(draft, **common, push_anyway=push_anyway)
        if dry_run:
            if save:
                save_recipe(save, preflight.recipe, preflight.findings, overwrite=overwrite)
                log.note(result_view.describe_saved(context, save, said))
            typer.echo(write_json(preflight.to_dict(), indent=2)) if json else result_view.show_preflight(preflight)
            if preflight.stops:
                raise verbs.join_stops(preflight.stops)
            return
        if json:
            pushed = asdict(result.pushed) if result.pushed else None
            content = {"output": str(result.output), "pushed": pushed, **result.report.to_dict()}
            typer.echo(write_json(content, indent=2))
        elif evaluate or not result.was_done:
            hint = None if quiet else result_view.suggest_again(context, result.output, said)
            result_view.show_calibration(result.report, result.output, result.pushed, screen.seconds, hint)
        elif quiet:
            typer.echo(verbs.ALREADY_DONE.format(result.output))
        if strict:
            check_grown(result.report, result.output)
        if not push_anyway:
            check_pushable(result.report, result.output, draft.output.push_to)


@app.command("inspect-drift", cls=options.Command)
def inspect_drift(
    model: options.Model,
    base: options.Base = None,
    expert: options.Experts = None,
    data: options.Sources = None,
    skip_expert: options.SkipExperts = None,
    columns: options.Columns = None,
    split: options.Splits = None,
    recipe: options.Recipe = None,
    compare: options.Compare = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    examples: options.Measured = None,
    seed: options.MeasuredSeed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
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
    from featcal_cli.cli.console import OUT, Screen

    overrides = collect_overrides(
        merged=model, base=base, expert=expert, data=data, skip_expert=skip_expert, columns=columns, split=split,
        examples=examples, dtype=dtype, seed=seed,
    )  # fmt: skip
    draft = read_draft(find_recipe(recipe) if recipe else None, overrides)
    written = {"--plot": plot, "--html": html, "--markdown": markdown}
    options.check_files({"--log-file": log_file, **written}, draft, recipe)
    options.check_finite("--max-drift", max_drift)
    screen = Screen(quiet=quiet or json)
    with recorded(screen, log_file) as log:
        with interruptible(MEASURING), screen.live():
            from featcal_cli.cli.drift_view import show_inspection
            from featcal_cli.reporting.gates import check_gate
            from featcal_cli.workflows.inspect_drift import inspect_drift as run

            inspection = run(
                draft, compare=compare, device=device, batch_size=batch_size, allow_pickle=allow_pickle,
                trust_remote_code=trust_remote_code, plot=plot, html=html, markdown=markdown,
                max_drift=max_drift, listener=log,
            )  # fmt: skip
        if json:
            typer.echo(inspection.to_json(), nl=False)
        else:
            show_inspection(inspection, OUT, written)
        if max_drift is not None:
            check_gate(inspection, max_drift)


@app.command(cls=options.Command)
def evaluate(
    models: options.Evaluated = None,
    base: options.Base = None,
    expert: options.Experts = None,
    data: options.Sources = None,
    skip_expert: options.SkipExperts = None,
    columns: options.Columns = None,
    split: options.Splits = None,
    merge: options.MergeMethod = None,
    recipe: options.Recipe = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    limit: options.Limit = None,
    device: options.Device = "auto",
    batch_size: options.BatchSize = None,
    allow_code_execution: options.AllowCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
) -> None:
    """Measure accuracy on a recipe's tasks: each expert on its task, the merged model and every MODEL on all.

    **Examples**

        featcal evaluate -r clip-vit-b32-8 ./clip-vit-b32-8-featcal

        featcal evaluate ./my-merge-featcal --limit 500

        featcal evaluate -r mine.yaml user/merged-featcal user/other-merge --json
    """
    from featcal_cli.cli.console import Screen

    options.check_files({"--log-file": log_file}, None, recipe)
    screen = Screen(quiet=quiet or json)
    with recorded(screen, log_file) as log:
        with interruptible(), screen.live():
            from featcal_cli.cli.result_view import show_evaluation
            from featcal_cli.workflows.evaluate import evaluate as run
            from featcal_cli.workflows.evaluate import find_own_recipe

            given = list(models or [])
            file = find_recipe(recipe) if recipe else find_own_recipe(given)
            merged = given.pop(0) if given and not merge and not (file and names_merged(file)) else None
            overrides = collect_overrides(
                merged=merged, merge=merge, base=base, expert=expert, data=data, skip_expert=skip_expert,
                columns=columns,
            )  # fmt: skip
            for task, name in read_tasks("--split", "NAME", split).items():  # of the labelled data, here
                overrides["tasks"] = overrides["tasks"] or {}
                overrides["tasks"].setdefault(task, {})["evaluate"] = {"split": name}
            draft = read_draft(file, overrides)
            evaluation = run(
                draft, given, limit=limit, device=device, batch_size=batch_size, allow_pickle=allow_pickle,
                trust_remote_code=trust_remote_code, allow_code=allow_code_execution, listener=log,
            )  # fmt: skip
        if json:
            typer.echo(write_json(evaluation.to_dict(), indent=2))
        else:
            show_evaluation(evaluation, screen.seconds)


app.command(cls=options.Command)(doctor)


@app.command(cls=options.Command)
def recipes(name: options.RecipeName = None) -> None:
    """List the recipes that come with the package, or print one.

    **Examples**

        featcal recipes

        featcal recipes clip-vit-b32-8 > mine.yaml

        featcal recipes ci/featcal.yml > featcal.yml
    """
    from featcal_cli.cli.result_view import show_recipes

    if name:
        typer.echo(print_shipped(name), nl=False)
    else:
        show_recipes(shipped_recipes())


app.command(cls=options.Command)(modules)


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
    from featcal_cli.cli import result_view
    from featcal_cli.cli.console import Screen

    screen = Screen(quiet=quiet or json)
    if not (quiet or json):
        result_view.show_demo(find_recipe("demo"))
    with recorded(screen, None) as log, interruptible(), screen.live():
        from featcal_cli.workflows.verbs import run_demo

        result = run_demo(output, device, log)
    if json:
        typer.echo(write_json(result.to_dict(), indent=2))
        return
    report = replace(result.report, accuracy=dict(result.scores))
    result_view.show_calibration(report, result.output, None, screen.seconds, None if quiet else result_view.OWN_MODEL)
