"""The corruptions of images in table 6 of the paper."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "contrast", "pixelate", "jpeg")
"""What can be done to images, each at the severities 1 to 5."""


def check_corruption(text: str) -> str:
    """KIND:SEVERITY as it is. Raises ValueError for anything else."""
    kind, _, severity = text.partition(":")
    if kind not in CORRUPTIONS or severity not in ("1", "2", "3", "4", "5"):
        known = ", ".join(CORRUPTIONS)
        raise ValueError(f"{text!r} is no KIND:SEVERITY, of {known} and 1 to 5")
    return text


Corruption = Annotated[str, AfterValidator(check_corruption)]
