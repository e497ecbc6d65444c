"""Names of tasks: those that tell experts apart, and whether two names mean the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from featcal_cli.hub.model_source import repo_of

_SEPARATORS = re.compile(r"([-_.])")


def name_tasks(references: Sequence[str]) -> list[str]:
    """A task name for each expert, in their order.

    The names of the repos (of BASE+ADAPTER the adapter's), in lower case, without the words at their start and end
    that all of them share; a word ends at - _ or a dot, and one word always stays. One expert alone keeps its whole
    name. Names that would be the same get their owner's, then their number.

        org/vit_mnist, org/vit_sun397           → mnist, sun397
        org/t5_glue-cola_lora, org/t5_glue-sst2_lora → cola, sst2
        a/math, b/math                          → a, b
    """
    paths = [repo_of(reference).lower().replace("\\", "/").rstrip("/") for reference in references]
    names = _strip_shared([Path(path).name for path in paths])
    if len(set(names)) < len(names):
        names = _strip_shared([re.sub(r"[^\w.-]+", "-", path) for path in paths])
    names = [re.sub(r"[^\w.-]+", "-", name).strip("-_.") or "task" for name in names]
    times, taken = Counter(names), set(names)
    for place, name in enumerate(names):
        if times[name] > 1:
            names[place] = next(other for number in count(1) if (other := f"{name}-{number}") not in taken)
            taken.add(names[place])
    return names


def _strip_shared(names: list[str]) -> list[str]:
    if len(names) < 2:
        return names
    pieces = [_SEPARATORS.split(name) for name in names]  # word, separator, word, …
    for end in (0, -1):
        while min(map(len, pieces)) > 1 and len({piece[end] for piece in pieces}) == 1:
            pieces = [piece[2:] if end == 0 else piece[:-2] for piece in pieces]
    return ["".join(piece) for piece in pieces]


def same_name(one: str, other: str) -> bool:
    """Whether two names differ in nothing but case and - for _ or a dot."""
    return words(one) == words(other)


def words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def holds(long: str, short: str) -> bool:
    """Whether the words of a name stand one after another in those of another name."""
    whole, part = words(long), words(short)
    return bool(part) and any(whole[at : at + len(part)] == part for at in range(len(whole)))
