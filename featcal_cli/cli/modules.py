"""`featcal modules`: what would be calibrated in a model."""

from __future__ import annotations

import typer

from featcal_cli.cli import options
from featcal_cli.runtime.logfile import recorded
from featcal_cli.runtime.process import MEASURING, interruptible
from featcal_cli.runtime.structured_text import write_json


def modules(model: options.Model, json: options.Json = False) -> None:
    """Show what would be calibrated in a model, block by block; only its config is read.

    **Examples**

        featcal modules openai/clip-vit-base-patch32

        featcal modules ./my-merge --json
    """
    from featcal_cli.cli.console import Screen
    from featcal_cli.cli.result_view import show_inventory

    screen = Screen(quiet=json)
    with recorded(screen, None) as log, interruptible(MEASURING), screen.live():
        from featcal_cli.hub.snapshot import resolve_config

        log.stage("reading the config")
        snapshot = resolve_config(model)
        from featcal_cli.models.inventory import take_inventory

        inventory = take_inventory(snapshot)
    if json:
        typer.echo(write_json(inventory.to_dict(), indent=2))
    else:
        show_inventory(inventory)
