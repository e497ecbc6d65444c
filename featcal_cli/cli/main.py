"""Run the command line: silence all but the first process, turn errors into messages, and set the exit code."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

from featcal_cli.cli.commands import app
from featcal_cli.cli.options import check_words
from featcal_cli.runtime.errors import COMMAND_LINE, GONE, FeatCalError, RecipeError
from featcal_cli.runtime.process import Launch, read_launch


def main() -> None:
    """Run the command line; errors that the user can fix become one message and exit code 2."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # it writes of every retry, with the address
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads to read what is mapped would only take time
    # matplotlib refuses what it does not know, such as the backend that Jupyter's shells hand on to other environments
    os.environ |= {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
    # libraries mean them for their developers; PYTHONWARNINGS shows them
    warnings.simplefilter("ignore", append=True)
    launch = Launch()
    try:
        launch = read_launch()
        with _silent() if launch.rank else nullcontext():
            _call()
    except FeatCalError as error:
        if error.where == COMMAND_LINE:
            error.where = _name_command()
        elif error.where.startswith("--"):
            error.where = f"{_name_command()} {error.where}"
        if launch.by_torchrun:
            from featcal_cli.runtime.distributed import is_first_to_fail

            if not is_first_to_fail():
                _leave(error.exit_code)
        from featcal_cli.cli.console import show_error

        with suppress(OSError):  # where messages cannot be written, the exit code is what tells
            show_error(error, f"rank {launch.rank}: " if launch.by_torchrun else "")
        _leave(error.exit_code)
    except SystemExit as end:
        if end.code and isinstance(end.__context__, BrokenPipeError):  # rich and typer make a 1 of it
            _leave(GONE)
        if launch.by_torchrun and not end.code:
            from featcal_cli.runtime.distributed import leave_ranks

            leave_ranks()
        raise
    except BrokenPipeError:  # whoever read our output has gone
        _leave(GONE)
    except Exception as error:  # noqa: BLE001 - a fault of ours, whatever it is, becomes a message too
        from featcal_cli.cli.console import show_error
        from featcal_cli.runtime.logfile import explain

        known = explain(error)
        with suppress(OSError):
            show_error(known)
        _leave(known.exit_code)


def _call() -> None:
    """Run the command and flush its output; raise RecipeError for arguments that typer cannot parse."""
    words = sys.argv[1:]
    check_words(words)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        code = app(words, standalone_mode=not words)  # alone, it shows the help and ends
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except SystemExit:
        sys.stdout.flush()
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        from featcal_cli.recipe.reading import suggest_for_option, tell_wanted  # with PyYAML, which the help lacks

        # what typer could not read, as a message like all others
        what, asked, guess = error.format_message().strip().rstrip(".").partition(". Did you mean ")
        fix = f"did you mean {guess}" if asked else ""
        # an option that is unknown, unlike one whose value is missing, comes with its possibilities
        if hasattr(error, "possibilities") and hasattr(error, "option_name"):
            what = str(getattr(error, "message", ""))
            fix = suggest_for_option(error.option_name, error.possibilities or ())
        what = tell_wanted(re.sub(r"^Invalid value for '([^']+)': Input should be", r"\1 must be", what))
        what, command = what[:1].lower() + what[1:], _name_command()
        help_line = "" if fix else f"{command} --help"
        raise RecipeError(what, where=command, fix=fix or "see its options and examples", command=help_line) from None


def _name_command() -> str:
    """Return the typed command as `featcal VERB`, or `featcal` alone if no verb was typed."""
    verbs = {str(known.name or getattr(known.callback, "__name__", "")) for known in app.registered_commands}
    return " ".join(["featcal", *[word for word in sys.argv[1:] if word in verbs][:1]])


def _leave(code: int) -> NoReturn:
    """Exit with `code`. Output that cannot be written is dropped, or Python would exit with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


@contextmanager
def _silent() -> Iterator[None]:
    """Discard stdout and stderr in this context. Every process but the first uses it; errors are printed outside it."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
