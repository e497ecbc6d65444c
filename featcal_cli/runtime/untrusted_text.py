"""Text of strangers: YAML and JSON within bounds, names made fit to be shown, secrets taken out."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, islice, takewhile
from math import isfinite
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
MAX_DIGITS = 3000
"""Characters of a whole number in YAML, hexadecimal ones too: Python writes none of more than 4,300 decimal digits."""
CONTEXT = 20
"""Characters before a difference that a message shows."""
LISTED = 5
"""Names that a message shows of a list from outside."""
LONGEST_WORDS = 240
"""Characters of an exception's own words that a message quotes."""

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that move the cursor, turn the writing, or begin a command to the terminal."""
_YAML_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What yaml.SafeLoader raises at text that is no YAML: besides its own errors, slips at odd tags (`!!int ""`)."""


class _RefusedError(ValueError):
    """A text stands for more than can be read, or for two things."""


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
"""Types of values without quotation marks as YAML 1.2 has them, which the Hub reads: a name, what matches, and how that
begins. YAML 1.1, which PyYAML reads, also takes no, on, 12:30 and 2024-01-02 for other things than text, and 1e-3 for
text."""


def _resolve(types: Iterable[tuple[str, str, str]]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table of types: by the first character of a value, the tags that it may get."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first in types:
        for character in [*first, *([""] if name == "null" else [])]:
            table.setdefault(character, []).append((_TAG + name, re.compile(f"(?:{pattern})\\Z")))
    return table


class _Loader(yaml.SafeLoader):
    """Plain values only, of the types of YAML 1.2, and only as many as there is room for."""

    yaml_implicit_resolvers = _resolve((*_TYPES_OF_ALL, *_TYPES_OF_CARDS))

    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """The number that a scalar stands for, decimal or not. Raises _RefusedError for one that is too long."""
        text = str(self.construct_scalar(node))
        if len(text) > MAX_DIGITS:
            raise _RefusedError(f"line {node.start_mark.line + 1} holds {_describe_digits(len(text))}")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


class _RecipeLoader(_Loader):
    """Reads every value as text, of which the recipe's schema makes a number or a switch where one belongs; refuses a
    key that comes twice, of which YAML would believe the last one."""

    yaml_implicit_resolvers = _resolve(_TYPES_OF_ALL)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"
                if (first := known.setdefault(key.value, line)) != line:
                    raise _RefusedError(f"the key {bare(key.value)} is in line {first} and again in line {line}")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts text in quotation marks where YAML 1.1 or YAML 1.2 would take it for something else."""


for _name, _pattern, _first in _TYPES_OF_CARDS:
    _Dumper.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), list(_first))


def dump_yaml(content: Any, width: int = 80) -> str:
    """A value as YAML that every reader understands alike, keys in their order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def load_documents(text: str, *, recipe: bool = False) -> list[Any]:
    """The documents of a YAML text, empty ones left out; of a `recipe`, values are text and keys that come twice are
    refused. Raises ValueError with a short reason."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
    try:
        loader = _RecipeLoader if recipe else _Loader
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except _RefusedError:
        raise
    except _YAML_FAULTS as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        reason = f": {bare(problem)}" if problem else ""
        raise ValueError(f"it is not YAML (line {mark.line + 1}{reason})" if mark else "it is not YAML") from None


def find_line(text: str, path: Sequence[str | int]) -> int:
    """The line, from 1 on, of what lies at `path` in a YAML text that was loaded, or of the last part that is there."""
    node = yaml.compose(text, Loader=_RecipeLoader)
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


def replace_values(text: str, keys: Container[str], change: Callable[[str], str]) -> str:
    """The YAML text with the values of these keys changed, wherever they stand; comments and all else stay."""
    changed: list[tuple[int, int, str]] = []

    def walk(node: yaml.Node | None) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            walk(value)
            if isinstance(value, yaml.ScalarNode) and key.value in keys and (new := change(value.value)) != value.value:
                changed.append((value.start_mark.index, value.end_mark.index, new))

    walk(yaml.compose(text, Loader=_RecipeLoader))
    for start, end, new in sorted(changed, reverse=True):
        text = f"{text[:start]}{new}{text[end:]}"
    return text


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


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text; with `unique`, an object that has a key twice is refused. Raises JSONDecodeError for
    what is no JSON, and any other ValueError, with a short reason, for JSON that is not read."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError, _RefusedError):
        raise
    except ValueError as error:
        # Python's own limit: the JSON is right, and the number in it too long
        digits = re.search(r"value has (\d+) digits", str(error))
        raise ValueError(f"it holds {_describe_digits(int(digits[1]))}" if digits else str(error)) from None


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _RefusedError(f"an object in it has the key {show(name)} twice")
    return mapping


def _describe_digits(count: int) -> str:
    return f"a whole number of {count:,} digits, which is longer than can be read"


def write_json(value: Any, **settings: Any) -> str:
    """A value as JSON, with null for what is no finite number, as JSON has no word for it; settings of json.dumps."""
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


def show(text: str) -> str:
    """A foreign text for a message: short, and without control characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def bare(text: str) -> str:
    """The same without quotation marks around it."""
    return show(text)[1:-1]


def own_words(error: BaseException) -> str:
    """What an exception says, on one line and not too long; with its kind where the text alone says too little."""
    text = " ".join(visible(str(error)).split())
    if not text or isinstance(error, KeyError | AssertionError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text.rstrip(".") if len(text) <= LONGEST_WORDS else f"{text[: LONGEST_WORDS - 3].rstrip()}..."


def tell_apart(one: object, other: object, write: Callable[[Any], str] = str) -> tuple[str, str]:
    """Two different values for a message that compares them, written so that the difference is seen: as `write` does,
    or else in full from a little before the first difference."""
    texts = bare(write(one)), bare(write(other))
    if texts[0] != texts[1]:
        return texts
    full = repr(one), repr(other)
    if full[0] == full[1]:
        return f"{texts[0]} ({type(one).__name__})", f"{texts[1]} ({type(other).__name__})"
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*full, strict=False)))
    start = max(0, alike - CONTEXT)
    first, second = (("…" if start else "") + bare(text[start:]) for text in full)
    return first, second


def list_some(names: Iterable[str], *, between: str = ", ", last: str = "", write: Callable[[str], str] = bare) -> str:
    """A foreign list for a message: its first names, each as `write` writes it, and how many more there are. `last`
    stands before the last name of a list that is shown whole."""
    left = iter(names)
    shown = [write(name) for name in islice(left, LISTED)]
    more = sum(1 for _ in left)
    if last and not more and len(shown) > 1:
        return f"{between.join(shown[:-1])}{last}{shown[-1]}"
    return between.join(shown) + (f" and {more:,} more" if more else "")


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


TOKEN = re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{20,}")
"""What tokens of the Hub look like."""
SHORTEST_IN_FILES = 16
"""Characters of a secret that is taken out of files, which programs read."""


def redact(text: str) -> str:
    """The text without tokens, passwords in addresses, signatures of addresses, and values of secret variables."""
    text = _without_secret_values(text, SHORTEST)
    for pattern, hidden in PATTERNS:
        text = pattern.sub(hidden, text)
    return text


def without_tokens(text: str) -> str:
    """The text of a file that featcal composes (a card, a report, a recipe) without tokens and values of secret
    variables; everything else in it stays."""
    return TOKEN.sub(r"\1_…", _without_secret_values(text, SHORTEST_IN_FILES))


def _without_secret_values(text: str, shortest: int) -> str:
    secrets = {value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) >= shortest}
    try:
        from huggingface_hub import get_token

        token = get_token()
    except Exception:  # noqa: BLE001 - the report may be about this very package; then nobody has read its token file
        token = None
    if token:
        secrets.add(token)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
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
    """The first of pydantic's complaints, as `describe_complaint` has it."""
    return describe_complaint(error.errors()[0])


def describe_complaint(problem: Mapping[str, Any]) -> str:
    """One of pydantic's complaints, for the middle of a sentence: `must be …` where it is about one value."""
    if problem["type"] in _WANTED:
        wanted = _WANTED[problem["type"]].format(**problem.get("ctx", {})).replace("'", "")
        given = problem["input"]
        is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
        return f"must be {wanted}" + (f", not {show(str(given))}" if is_short else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"
