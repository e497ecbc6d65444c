"""The command `reproduce`: a table of the paper, and what the terminal shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from featcal_cli.cli import options
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.logfile import recorded
from featcal_cli.runtime.process import interruptible
from featcal_cli.runtime.progress import tell_seconds
from featcal_cli.runtime.untrusted_text import write_json

if TYPE_CHECKING:  # what it imports is not waited for before it is needed
    from featcal_cli.reporting.reproduction import Figure, Reproduction


def reproduce(
    table: options.Table,
    recipe: options.Recipe = None,
    tasks: options.OnlyTasks = None,
    examples: options.Budgets = None,
    seeds: options.Seeds = None,
    corrupt: options.Corruptions = None,
    limit: options.Limit = None,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    batch_size: options.BatchSize = None,
    allow_code_execution: options.AllowCode = False,
    output: options.TableFolder = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    log_file: options.LogFile = None,
) -> None:
    """Calibrate and evaluate the models of a table of the paper, and show the paper's figures beside the measured ones.

    Finished work is kept: the same command goes on where it was interrupted. The folder gets the table as Markdown,
    JSON and a picture, and every calibrated model.

    **Examples**

        featcal reproduce 1

        featcal reproduce 1 --tasks mnist,svhn --limit 500 --examples 32

        featcal reproduce 12 --examples 8,16 --seeds 42
    """
    from featcal_cli.cli.console import Screen

    screen = Screen(quiet=quiet or json)
    options.check_files({"--log-file": log_file}, None, recipe)
    with recorded(screen, log_file) as log:
        with interruptible(), screen.live():
            from featcal_cli.workflows.reproduce import OUTPUT, Selection, find_table
            from featcal_cli.workflows.reproduce import reproduce as run
            from featcal_cli.workflows.session import RunOptions

            find_table(table, recipe)  # before torch is imported
            selection = Selection(
                tasks=_split(tasks), examples=_read_numbers("--examples", examples, 1),
                seeds=_read_numbers("--seeds", seeds, 0), corruptions=_read_corruptions(corrupt), limit=limit,
                allow_code=allow_code_execution,
            )  # fmt: skip
            how = RunOptions(device, batch_size, allow_pickle, trust_remote_code)
            result = run(table, selection, recipe=recipe, output=output, options=how, listener=log)
        if json:
            typer.echo(write_json(result.to_dict(), indent=2))
        else:
            show_reproduction(result, str(output or OUTPUT), screen.seconds)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _read_numbers(option: str, text: str | None, least: int) -> list[int]:
    """Whole numbers between commas. Raises RecipeError."""
    numbers = [int(part) if part.isdecimal() else -1 for part in _split(text)]
    if text is not None and (not numbers or min(numbers) < least or max(numbers) > 10**9):
        fix = f"write whole numbers of at least {least}, as {option} 8,16"
        raise RecipeError(f"{text[:40]!r} is no list of numbers", where=option, fix=fix)
    return numbers


def _read_corruptions(texts: list[str] | None) -> list[str]:
    """Raises RecipeError for what is no KIND:SEVERITY."""
    from featcal_cli.recipe.paper import check_corruption

    try:
        return [check_corruption(text) for text in texts or ()]
    except ValueError as error:
        raise RecipeError(str(error), where="--corrupt", fix="write --corrupt gaussian_noise:3") from None


def show_reproduction(result: Reproduction, folder: str, seconds: float) -> None:
    """The means, or the costs, of what was measured, and what was not; tasks are in the files."""
    from featcal_cli.cli.console import OUT, escape, fold
    from featcal_cli.cli.result_view import make_table
    from featcal_cli.reporting.reproduction import (
        MEAN,
        describe_figures,
        list_skipped,
        write_measured,
        write_number,
    )

    def write(name: str, figure: Figure) -> list[str]:
        mark = "*" if figure.misprint else ""
        return [name, write_measured(figure), write_number(figure.paper) + mark, write_number(figure.difference, "+")]

    for recipe, columns in result.columns.items():
        for column in [MEAN] if MEAN in columns else columns:
            OUT.print(f"{escape(recipe)}, {escape(column)}:")
            lines = [line for line in result.lines if line.recipe == recipe and not line.skipped]
            rows = [write(escape(line.name), line.figures[column]) for line in lines]
            OUT.print(make_table(("model", "measured", "paper", "difference"), rows, overflow="fold"))
            OUT.print()
    OUT.print(describe_figures(result))
    for line in result.lines:
        for column, figure in line.figures.items():
            if figure.misprint and not line.skipped:
                OUT.print(f"* a misprint, it seems: {escape(line.name)}, {escape(column)}: {escape(figure.misprint)}")
    for reason in list_skipped(result.lines):
        OUT.print(f"Not measured: {escape(reason)}.")
    for note in result.notes:
        OUT.print(f"Note: {escape(note)}.")
    measured = sum(not line.skipped for line in result.lines)
    rows_of_all = f"{measured} of {len(result.lines)} rows"
    OUT.print()
    for text in fold(
        f"{rows_of_all} of table {result.table} were measured in {tell_seconds(seconds)}; all columns are in "
        f"{folder}/{result.table}.md, .json and .png.",
        OUT.width,
        rest="",
    ):
        OUT.print(escape(text), soft_wrap=True)
