"""Complaints of pydantic about a recipe in words that fit into a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from featcal_cli.runtime.sanitise import quoted

if TYPE_CHECKING:
    from pydantic import ValidationError

_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a section of keys",
    "mapping_type": "a section of keys",
    "model_type": "a section of keys",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
}
"""Wanted values in words, by the type of pydantic's complaint, with figures from its context."""


def first_complaint(error: ValidationError) -> str:
    """The first of pydantic's complaints, described by `describe_complaint`."""
    return describe_complaint(error.errors()[0])


def describe_complaint(problem: Mapping[str, Any]) -> str:
    """One of pydantic's complaints, for the middle of a sentence: `must be …` where it is about one value."""
    if problem["type"] in _WANTED:
        wanted = _WANTED[problem["type"]].format(**problem.get("ctx", {})).replace("'", "")
        given = problem["input"]
        is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
        return f"must be {wanted}" + (f", not {quoted(str(given))}" if is_short else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"
