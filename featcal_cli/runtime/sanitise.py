"""Sanitise text of strangers for messages, terminals, Markdown and HTML, and remove secrets from text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from unicodedata import category

LISTED = 5
"""Maximum number of names that a message shows from a list; the rest are counted."""
LONGEST_WORDS = 240
"""Maximum number of characters that a message quotes from an exception."""
LONGEST_QUOTED = 80
"""Maximum number of characters that a message quotes from any other text."""
LONGEST_NAME = 200

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that move the cursor, change the writing direction, or start a terminal command."""
_REPLACED = {"Cc": " ", "Zl": " ", "Zp": " ", "Cf": "", "Cs": ""}
"""Replacement, in text of one line, for the characters of each category."""
_PATH = re.compile(r"(?<![\w:/.~&;])~?/(?:[^\s/,;:()'\"`<>|\\]+/)*([^\s/,;:()'\"`<>|\\]+)/?")


# Messages


def quoted(text: str) -> str:
    """Quote a foreign text for a message: shortened, and with control characters as escapes."""
    return repr(text if len(text) <= LONGEST_QUOTED else text[: LONGEST_QUOTED - 3] + "...")


def plain(text: str) -> str:
    """Return a foreign text for a message as `quoted` does, without the quotation marks."""
    return quoted(text)[1:-1]


def exception_text(error: BaseException) -> str:
    """Return an exception's text for a message: one line, shortened, with its type if it says too little."""
    text = for_terminal(" ".join(str(error).split()))
    if not text or isinstance(error, KeyError | AssertionError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text.rstrip(".") if len(text) <= LONGEST_WORDS else f"{text[: LONGEST_WORDS - 3].rstrip()}..."


def list_some(
    names: Iterable[str],
    *,
    between: str = ", ",
    last: str = "",
    most: int = LISTED,
    write: Callable[[str], str] = plain,
) -> str:
    """Shorten a foreign list to its first names, written by `write`, with `last` before the last, or a count."""
    left = iter(names)
    shown = [write(name) or '""' for name in islice(left, most)]
    more = sum(1 for _ in left)
    if last and not more and len(shown) > 1:
        return f"{between.join(shown[:-1])}{last}{shown[-1]}"
    return between.join(shown) + (f" and {more:,} more" if more else "")


def enumerate_names(names: Iterable[str], most: int = LISTED) -> str:
    """Join names as `a, b and c`; if there are more than `most`, only the first are shown and the rest counted."""
    return list_some(names, last=" and ", most=most, write=str)


# Terminal, Markdown, HTML


def for_terminal(text: str) -> str:
    """Return the text with a replacement sign for every character that would control a terminal, except line breaks."""
    return "".join("�" if category(char) in _OBEYED and char != "\n" else char for char in text)


def for_markdown(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a line of Markdown that shows the text, without tokens, in a paragraph, list or table cell."""
    shown = re.sub(r"([\\`*_\[\]!#~$@{}])", r"\\\1", one_line(text, longest))
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("://", "&#58;//")):
        shown = shown.replace(char, entity)
    return re.sub(r"^([-+=]+|\d+[.)])(?=\s|$)", lambda marker: f"{marker[0][:-1]}&#{ord(marker[0][-1])};", shown)


def for_html(text: str, longest: int = LONGEST_NAME, known: Iterable[str] = ()) -> str:
    """Return one line for data of a page or picture that users share; a page must insert it as text."""
    return one_line(for_sharing(text, known), longest)


def for_sharing(text: str, known: Iterable[str] = ()) -> str:
    """Return a text that users may share: without tokens and without the folders of this machine."""
    return without_folders(without_tokens(text), known)


def shorten_commits(text: str) -> str:
    """Shorten every commit in the text to seven digits; only for text that nobody has to type again."""
    return re.sub(r"@([0-9a-f]{7})[0-9a-f]{33}\b", r"@\1", text)


def one_line(text: str, longest: int = LONGEST_NAME) -> str:
    """Return the text on one line, cut, without tokens and control, direction and invisible characters."""
    shown = " ".join("".join(_REPLACED.get(category(char), char) for char in without_tokens(text)).split())
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def cut_middle(text: str, room: int, measure: Callable[[str], int] = len) -> str:
    """Cut a text in the middle to at most `room` columns, but not to none, as long names often differ at their ends.
    `measure`: returns the width of a text in columns."""
    if measure(text) <= room:
        return text
    start, end = text[: room // 2], text[-(room // 2) :]
    while measure(start) + measure(end) + 1 > max(room, 1):
        start, end = (start[:-1], end) if measure(start) >= measure(end) else (start, end[1:])
    return f"{start}…{end}"


def without_folders(text: str, known: Iterable[str] = ()) -> str:
    """Return the text with every absolute path shortened to its last part; those with spaces or brackets in them must
    be among the texts that are `known`."""
    paths = {name.rstrip("/") for name in known if name.startswith("/")} - {""}
    for path in sorted(paths, key=len, reverse=True):
        name = Path(path).name.replace("\\", r"\\")
        # not the /a of org/a or of /ab
        text = re.sub(rf"(?<![\w/.~-]){re.escape(path)}(?![\w-]|\.\w)", name, text)
    return _PATH.sub(r"\1", text)


# Secrets


SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""Words in the name of an environment variable that mark its value as a secret."""
SHORTEST = 6
"""Minimum length of a secret; removing shorter values would remove ordinary words."""
SHORTEST_IN_FILES = 16
"""Minimum length of a secret that is removed from files, which programs read."""
HIDDEN = "***"
TOKEN = re.compile(r"(?:\b|(?=(?:hf|api_org)_[A-Za-z0-9]{30}))(hf|api_org)_[A-Za-z0-9]{20,}")
"""Pattern of the Hub's tokens. A whole one is found behind a letter too, which may end an escape (`\\n`, `%3D`)."""
PATTERNS = (
    (TOKEN, rf"\1_{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), f"hf_{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+|authorization\W+basic\s+)[\w.~+/=-]{6,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)(https?://[^\s?#\"']+)\?[^\s\"'#]+"), rf"\1?{HIDDEN}"),  # signed addresses open what they name
)
"""Patterns of secrets in messages and logs, each with its replacement."""


def redact(text: str) -> str:
    """Remove tokens, passwords and signatures in addresses, and values of secret variables from a text."""
    text = _without_secret_values(text, SHORTEST)
    for pattern, hidden in PATTERNS:
        text = pattern.sub(hidden, text)
    return text


def without_tokens(text: str) -> str:
    """Remove tokens and values of secret variables from the text of a file that featcal composes."""
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
