"""Types of the names that a recipe may hold."""

from __future__ import annotations

from typing import Annotated
from unicodedata import category

from pydantic import AfterValidator

from featcal_cli.runtime.references import bare_model
from featcal_cli.runtime.sanitise import quoted


def _check_name(text: str) -> str:
    if any(category(character) == "Cc" for character in text):
        raise ValueError(f"{quoted(text)} has a control character")
    return text


Name = Annotated[str, AfterValidator(_check_name)]
"""A name without control characters, so that it can be shown on a terminal and be part of a path."""
ModelName = Annotated[Name, AfterValidator(bare_model)]
"""A model's Hub id or path, or the address of its page, which is converted to the id."""
