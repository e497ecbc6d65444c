"""Read YAML and JSON from outside within fixed limits, and write them so that every reader understands them alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Any

import yaml

from featcal_cli.runtime.sanitise import plain

MAX_CHARACTERS = 1_000_000
"""Maximum number of characters of a YAML text that is parsed; no card or config is longer."""
MAX_VALUES = 1_000_000
"""Maximum number of values that a YAML text may unfold to; a few lines of aliases can unfold to gigabytes."""
MAX_DEPTH = 60
_YAML_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors that yaml.SafeLoader raises for text that is not YAML: its own ones, and others for odd tags (`!!int ""`)."""


class _RefusedError(ValueError):
    """Raised for a text that is too large to be read, or ambiguous."""


_TAG = "tag:yaml.org,2002:"
_TYPES_OF_ALL = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)
_TYPES_OF_CARDS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
)
"""Types of unquoted values in YAML 1.2, which the Hub reads: a name, a pattern, and the characters it may begin with.
PyYAML reads YAML 1.1, which takes no, on, 12:30 and 2024-01-02 for other types than text, and 1e-3 for text."""


def _resolve(types: Iterable[tuple[str, str, str]]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Make PyYAML's table of types: the tags that a value may get, by its first character."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first in types:
        for character in [*first, *([""] if name == "null" else [])]:
            table.setdefault(character, []).append((_TAG + name, re.compile(f"(?:{pattern})\\Z")))
    return table


class _Loader(yaml.SafeLoader):
    """A YAML loader that knows only the plain types of YAML 1.2 and refuses texts with too many values."""

    yaml_implicit_resolvers = _resolve((*_TYPES_OF_ALL, *_TYPES_OF_CARDS))

    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return the number, decimal or not. Raises ValueError for one that Python cannot write again."""
        text = str(self.construct_scalar(node))
        number = int(text, 0 if text[:2] in ("0o", "0x") else 10)
        str(number)
        return number


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


class _RecipeLoader(_Loader):
    """A YAML loader that refuses repeated keys and leaves values as text, which the schema converts."""

    yaml_implicit_resolvers = _resolve(_TYPES_OF_ALL)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"
                first = known.setdefault(key.value, key.start_mark)
                if first.index != key.start_mark.index:
                    again = f"is in line {first.line + 1} and again in line {line}"
                    raise _RefusedError(f"the key {plain(key.value)} {again}")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text which YAML 1.1 or YAML 1.2 would take for another type."""


for _name, _pattern, _first in _TYPES_OF_CARDS:
    _Dumper.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), list(_first))


def dump_yaml(content: Any, width: int = 80) -> str:
    """Write a value as YAML that every reader understands alike, with keys in their given order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def load_documents(text: str, *, recipe: bool = False) -> list[Any]:
    """Return a YAML text's documents that are not empty; with `recipe`, values as text. Raises ValueError."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
    try:
        loader = _RecipeLoader if recipe else _Loader
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except _RefusedError:
        raise
    except _YAML_FAULTS as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        reason = f": {plain(problem)}" if problem else ""
        raise ValueError(f"it is not YAML (line {mark.line + 1}{reason})" if mark else "it is not YAML") from None


@lru_cache(maxsize=1)
def _compose(text: str) -> yaml.MappingNode | None:
    """Return the first mapping of a YAML text; kept, as a text may have many mistakes whose lines are asked for."""
    documents = yaml.compose_all(text, Loader=_RecipeLoader)
    return next((document for document in documents if isinstance(document, yaml.MappingNode)), None)


def find_line(text: str, path: Sequence[str | int]) -> int:
    """Return the line, from 1 on, of the value at `path` in a YAML text, or of the last part that exists."""
    node: yaml.Node | None = _compose(text)
    line = 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        else:
            found = None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def split_front_matter(text: str) -> tuple[dict[Any, Any] | None, str, str]:
    """Split a card into metadata (None if they cannot be read), the text below, and the reason if not."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if (top := REGEX_YAML_BLOCK.search(text)) is None:
        return {}, text, ""
    body = text[top.end() :]
    try:
        metadata: Any = next(iter(load_documents(top[2])), {})
    except ValueError as error:
        return None, body, str(error)
    return metadata if isinstance(metadata, dict) else None, body, ""


def parse_json(text: str | bytes, **settings: Any) -> Any:
    """Parse a JSON text; `settings` are those of json.loads. Raises JSONDecodeError, or another ValueError for JSON
    beyond Python's limits."""
    try:
        return json.loads(text, **settings)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def walk(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value of a parsed JSON text that is neither a mapping nor a list, with "" and the keys that lead to
    it."""
    left: list[tuple[tuple[str, ...], Any]] = [(("",), value)]
    while left:
        keys, part = left.pop()
        if isinstance(part, dict):
            left += [((*keys, key), inner) for key, inner in part.items()]
        elif isinstance(part, list):
            left += [(keys, inner) for inner in part]
        else:
            yield keys, part


def write_json(value: Any, **settings: Any) -> str:
    """Write a value as JSON, with null for numbers that are not finite; `settings` are those of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:
        return json.dumps(_without_nan(value), allow_nan=False, **settings)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return number and depth of values that a node unfolds to. Raises _RefusedError for too many."""
    if id(node) in known:
        if (size := known[id(node)]) is None:
            raise _RefusedError("a value in it contains itself (an alias inside its own anchor)")
        return size
    known[id(node)] = None
    parts: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
    count, depth = 1, 1
    for part in chain.from_iterable(parts) if isinstance(node, yaml.MappingNode) else parts:
        values, levels = _measure(part, known)
        count, depth = count + values, max(depth, 1 + levels)
    if count > MAX_VALUES or depth > MAX_DEPTH:
        what = f"it unfolds to more than {MAX_VALUES:,} values, or more than {MAX_DEPTH} inside each other"
        raise _RefusedError(what)
    known[id(node)] = count, depth
    return count, depth
