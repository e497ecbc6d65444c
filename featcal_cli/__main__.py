"""Entry point of the `featcal` command, also run by `python -m featcal_cli` and torchrun's `-m`."""

import gc
import os
import sys


def main() -> None:
    """Import and run the command line."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for some takes longer than to read a recipe
    # torch then allocates large tensors in huge pages, where Linux offers them, which speeds up matrix products
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    share_cores()
    # the next file to be opened would get the number of a closed stream, and messages would be written into it
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    gc.disable()  # nothing that is imported is garbage, and looking through it takes longer than some of it
    # first: the run's time counts from here
    from featcal_cli.runtime.errors import INTERRUPTED
    from featcal_cli.runtime.process import end_at_once, exit_code, stop_when_signalled

    try:
        stop_when_signalled()
        from featcal_cli.cli.main import main

        gc.freeze()
        gc.enable()
        main()
    except SystemExit as end:
        end_at_once(exit_code() if end.code == INTERRUPTED else end.code)
        raise
    except Exception as error:
        from featcal_cli.runtime.errors import explain_broken_package

        if (known := explain_broken_package(error)) is None:
            raise
        # rich shows all other messages, and may be what is broken
        sys.stderr.write(f"error: {known}\n")
        sys.exit(known.exit_code)


def share_cores() -> None:
    """Let the threads of a matrix product wait for each other only briefly (some microseconds) before they sleep. By
    default they hold their cores for milliseconds, in which nobody else computes: two runs on two cores then take ten
    times as long as one. libgomp reads this environment variable when torch loads it; what the user has set is kept."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    main()
