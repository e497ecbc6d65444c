"""`python -m featcal_cli` (and torchrun's `-m`) is the `featcal` command."""

from featcal_cli.cli import main

if __name__ == "__main__":
    main()
