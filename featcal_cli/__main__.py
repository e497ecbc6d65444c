"""The `featcal` command, which is also `python -m featcal_cli` (and torchrun's `-m`)."""


def main() -> None:
    """Run the command line. It takes a moment to be there, and may be interrupted even then."""
    try:
        from featcal_cli.cli import main

        main()
    except (KeyboardInterrupt, SystemExit) as end:
        from featcal_cli.interruption import EXIT_CODE, STARTING, stop

        if isinstance(end, KeyboardInterrupt) or end.code == EXIT_CODE:
            stop(STARTING)
        raise


if __name__ == "__main__":
    main()
