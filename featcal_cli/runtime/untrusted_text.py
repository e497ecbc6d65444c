"""Text of strangers: YAML and JSON within bounds, names made fit to be shown, secrets taken out."""

from __future__ import annotations

import json
import os
import re
from itertools import chain
from typing import TYPE_CHECKING, Any
from unicodedata import category

import yaml

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_CHARACTERS = 1_000_000
"""A longer YAML text is not parsed: no card or config is that long."""
MAX_VALUES = 1_000_000
"""Values that a YAML text may unfold to: a few lines of aliases (&a, *a, <<) unfold to more than any memory holds."""
MAX_DEPTH = 60
"""Values inside of values."""

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that move the cursor, turn the writing, or begin a command to the terminal."""
_YAML_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What yaml.SafeLoader raises at text that is no YAML: besides its own errors, slips at odd tags (`!!int ""`)."""


class _RefusedError(ValueError):
    """A text stands for more than can be read, or for two things."""


class _Loader(yaml.SafeLoader):
    """Plain values only, and only as many as there is room for."""

    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)


class _UniqueLoader(_Loader):
    """Refuses a key that comes twice, of which YAML would believe the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := known.setdefault(key.value, line)) != line:
                raise _RefusedError(f"the key {bare(key.value)} is in line {first} and again in line {line}")
        return super().construct_mapping(node, deep)


def load_documents(text: str, *, unique: bool = False) -> list[Any]:
    """The documents of a YAML text, empty ones left out; with `unique`, keys that come twice are refused. Raises
    ValueError with a short reason."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
    try:
        loader = _UniqueLoader if unique else _Loader
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except _RefusedError:
        raise
    except _YAML_FAULTS as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        reason = f": {bare(problem)}" if problem else ""
        raise ValueError(f"it is not YAML (line {mark.line + 1}{reason})" if mark else "it is not YAML") from None


def split_front_matter(text: str) -> tuple[dict[Any, Any] | None, str, str]:
    """The metadata at the top of a card ({} without any, None where they are no mapping), the text below them, and
    why they cannot be read, if so."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if (top := REGEX_YAML_BLOCK.search(text)) is None:
        return {}, text, ""
    body = text[top.end() :]
    try:
        metadata: Any = next(iter(load_documents(top[2])), {})
    except ValueError as error:
        return None, body, str(error)
    return metadata if isinstance(metadata, dict) else None, body, ""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError with a short reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def show(text: str) -> str:
    """A foreign text for a message: short, and without control characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def bare(text: str) -> str:
    """The same without quotation marks around it."""
    return show(text)[1:-1]


def visible(text: str) -> str:
    """A text without what a terminal would obey, in place of which a sign stands."""
    return "".join("�" if category(char) in _OBEYED and char != "\n" else char for char in text)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """How many values a node unfolds to, and how deep they lie in each other. Raises _RefusedError."""
    if id(node) in known:
        if (size := known[id(node)]) is None:
            raise _RefusedError("a value in it contains itself (an alias inside its own anchor)")
        return size
    known[id(node)] = None
    parts: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = list(chain.from_iterable(parts)) if isinstance(node, yaml.MappingNode) else parts
    count, depth = 1, 1
    for part in parts:
        values, levels = _measure(part, known)
        count, depth = count + values, max(depth, 1 + levels)
    if count > MAX_VALUES or depth > MAX_DEPTH:
        raise _RefusedError(
            f"it unfolds to more than {MAX_VALUES:,} values, or more than {MAX_DEPTH} inside each other"
        )
    known[id(node)] = count, depth
    return count, depth


SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""In the name of an environment variable, these say that nobody else is to see its value."""
SHORTEST = 6
"""Characters of a secret; shorter values would take ordinary words out."""
HIDDEN = "***"
PATTERNS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), f"hf_{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+|authorization\W+basic\s+)[\w.~+/=-]{6,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)(https?://[^\s?#\"']+)\?[^\s\"'#]+"), rf"\1?{HIDDEN}"),  # signed addresses open what they name
)


def redact(text: str) -> str:
    """The text without tokens, passwords in addresses, signatures of addresses, and values of secret variables."""
    secrets = {value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) >= SHORTEST}
    try:
        from huggingface_hub import get_token

        token = get_token()
    except Exception:  # noqa: BLE001 - the report may be about this very package; then nobody has read its token file
        token = None
    if token:
        secrets.add(token)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, hidden in PATTERNS:
        text = pattern.sub(hidden, text)
    return text


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
"""What a value should be where pydantic complains, by the kind of complaint, with figures from its context."""


def first_complaint(error: ValidationError) -> str:
    """The first of pydantic's complaints, for the middle of a sentence: `must be …` where it is about one value."""
    problem = error.errors()[0]
    if problem["type"] in _WANTED:
        wanted = _WANTED[problem["type"]].format(**problem.get("ctx", {})).replace("'", "")
        given = problem["input"]
        is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
        return f"must be {wanted}" + (f", not {show(str(given))}" if is_short else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"
