"""How this process was started: alone, or by torchrun as one of several, which its environment says."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from featcal_cli.documents import show
from featcal_cli.errors import RecipeError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets."""


@dataclass(frozen=True)
class Launch:
    """This process among all of a run."""

    rank: int = 0
    """Its number; 0 is the one that speaks and writes."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Its number on this machine."""
    local_size: int = 1
    """How many there are on this machine."""
    by_torchrun: bool = False


def read_launch() -> Launch:
    """How this process was started; alone unless the environment holds all of NAMES. Raises RecipeError where these
    are no numbers."""
    if not all(os.environ.get(name) for name in NAMES):
        return Launch()
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in NAMES[:4])
    except ValueError:
        what = f"the environment says that torchrun started this, and not as what: {', '.join(NAMES[:4])}"
        raise RecipeError(what, where="the environment", fix="unset them, or start it with torchrun") from None
    return Launch(rank, size, local_rank, local_size, by_torchrun=True)


def check_device(name: str) -> None:
    """Raise RecipeError for what cannot be a device; whether it is there, `machine.choose_device` finds out."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise RecipeError(f"unknown device {show(name)}", where="--device", fix="give auto, cpu or cuda[:K]")
