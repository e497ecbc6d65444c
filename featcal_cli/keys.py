"""What all groups of recipe keys have in common."""

from __future__ import annotations

from typing import Annotated
from unicodedata import category

from pydantic import AfterValidator, BaseModel, ConfigDict

from featcal_cli.documents import show


def _check_name(text: str) -> str:
    if any(category(character) == "Cc" for character in text):
        raise ValueError(f"{show(text)} has a control character")
    return text


Name = Annotated[str, AfterValidator(_check_name)]
"""What names something; it may be shown on a terminal, and be a part of a path."""

ROLES = ("image", "text", "text_pair", "messages", "prompt", "response", "label")
"""What a column of a dataset can be."""


class Section(BaseModel):
    """A group of recipe keys; unknown keys are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
