"""A dry run of a generated family, as if on a machine that need not be this one; prints JSON.

python benchmarks/plan.py FAMILY EXAMPLES SELECT PLACE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from shapes import recipe_of

from featcal_cli.workflows.verbs import dry_run


@dataclass(frozen=True)
class Place:
    """A machine to plan for."""

    host: int
    """GiB of memory."""
    card: int
    """GiB of its GPU's memory; 0 where there is none."""

    def memory_of(self, device: torch.device) -> int:
        """All memory of a device, in bytes."""
        return (self.card if device.type == "cuda" else self.host) << 30


PLACES = {
    "laptop, no GPU": Place(16, 0),
    "laptop, 12 GiB GPU": Place(16, 12),
    "server, 80 GB GPU": Place(128, 80),
}


SETTINGS: dict[str, dict[str, object]] = {
    "the paper's for 8B": {"method": "paper", "ridge": 3.0, "rho": 0.5, "alpha": 0.15},
    "paper": {"method": "paper"},
    "featcal": {"method": "featcal"},
}
"""What a user may ask for: λ of 3 needs sums in float32 alone, that for other language models (1e-5) float64."""


def describe_places() -> str:
    """What the machines have, in a few sentences."""
    return " ".join(f"{name}: {place.host} GiB of memory." for name, place in PLACES.items())


@contextmanager
def as_if_on(place: Place) -> Iterator[None]:
    """Inside, a dry run sees that machine, and all the disk that it can ask for."""
    given: dict[str, object] = {
        "workflows.plan_checks.free_bytes": lambda _: 2**60,
        "workflows.plan.memory_of": place.memory_of,
        "workflows.estimates.memory_of": place.memory_of,
        "workflows.plan_checks.memory_of": place.memory_of,
        "runtime.hardware.memory_of": place.memory_of,
    }
    if place.card:
        given["runtime.hardware.choose_device"] = torch.device
    with ExitStack() as stack:
        for name, value in given.items():
            stack.enter_context(patch(f"featcal_cli.{name}", value))
        stack.enter_context(patch("torch.cuda.get_device_name", lambda _: "a GPU"))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda _: (8, 0)))
        yield


def main() -> None:
    """Plan, print."""
    family, examples, place = Path(sys.argv[1]), int(sys.argv[2]), PLACES[sys.argv[4]]
    recipe = recipe_of(family, examples, **SETTINGS[sys.argv[3]])
    with as_if_on(place):
        plan = dry_run(recipe, output=family / "out", device="cuda" if place.card else "cpu")
    print(json.dumps(asdict(plan.estimate)))


if __name__ == "__main__":
    main()
