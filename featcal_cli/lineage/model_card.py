"""What the README.md of a repo says: the metadata at its top, and its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from featcal_cli.runtime.untrusted_text import MAX_CHARACTERS, split_front_matter

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})[ \t]*([\w-]*)")
_MERGE = re.compile(r"^[ \t>]*merge_method[ \t]*:", re.MULTILINE)
_AS_A_BASE = re.compile(r"\busing (?P<name>(?:(?!\busing\b)[^\n]){1,300}?) as a base\b")
_LINK = re.compile(r"\[([^\[\]]{1,200})\]\([^()\s]*\)")


@dataclass(frozen=True)
class Card:
    """A README.md, as far as it tells where a model or dataset comes from. What has a wrong type is left out."""

    base_models: Sequence[str]
    relation: str
    """`base_model_relation`: merge, finetune, adapter or quantized."""
    datasets: Sequence[str]
    evaluations: Sequence[tuple[str, str | None]]
    """Dataset and config of every figure in the model-index."""
    configs: Sequence[str]
    default_config: str | None
    bases_in_text: Sequence[str]
    """Every X of "using X as a base" that is a model and not prose, links taken off."""
    yaml_blocks: Sequence[str]
    """The code blocks that are marked as YAML, or not at all and name a merge_method."""
    problems: Sequence[str]
    """What could not be read, a phrase each."""


def read_card(text: str) -> Card:
    """The card in a README.md. Whatever the text holds, this raises nothing."""
    metadata, body, reason = split_front_matter(text)
    problems: list[str] = []
    if metadata is None:
        what = f"cannot be read: {reason}" if reason else "is not a mapping of keys to values"
        metadata, problems = {}, [f"the metadata {what}"]
    bases = []
    for match in _AS_A_BASE.finditer(body[:MAX_CHARACTERS]):
        # [a/x](https://…) + [b/y](https://…) is a/x+b/y
        name = re.sub(r"\s*\+\s*", "+", _LINK.sub(r"\1", match["name"])).strip(" `*_")
        if name and not re.search(r"\s", name) and ("/" in name or _LINK.match(match["name"])):
            bases.append(name)
    results = (result for model in _dicts(metadata.get("model-index")) for result in _dicts(model.get("results")))
    measured = (dataset for result in results for dataset in _dicts(result.get("dataset")))
    evaluations = [
        (dataset["type"].strip(), config if _is_config(config := dataset.get("config")) else None)
        for dataset in measured
        if isinstance(dataset.get("type"), str)
    ]
    relation = metadata.get("base_model_relation")
    configs, default = _read_configs(metadata)
    return Card(
        base_models=_read_names(metadata, "base_model", problems),
        relation=relation if isinstance(relation, str) else "",
        datasets=_read_names(metadata, "datasets", problems),
        evaluations=tuple(dict.fromkeys(evaluations)),
        configs=configs,
        default_config=default,
        bases_in_text=tuple(dict.fromkeys(bases)),
        yaml_blocks=tuple(_read_blocks(body[:MAX_CHARACTERS])),
        problems=problems,
    )


def _read_names(metadata: Mapping[Any, Any], key: str, problems: list[str]) -> tuple[str, ...]:
    value = metadata.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if len(names) < len(listed):
        problems.append(f"{key} holds something that is no name")
    return tuple(dict.fromkeys(names))


def _read_configs(metadata: Mapping[Any, Any]) -> tuple[tuple[str, ...], str | None]:
    """A dataset's configs, and the one that it takes by itself."""
    for key in ("configs", "dataset_info"):
        listed = [entry for entry in _dicts(metadata.get(key)) if _is_config(entry.get("config_name"))]
        if names := tuple(dict.fromkeys(entry["config_name"] for entry in listed)):
            marked = [entry["config_name"] for entry in listed if entry.get("default") is True]
            return names, marked[0] if marked else "default" if "default" in names else None
    return (), None


def _is_config(name: Any) -> bool:
    """Whether this is a config that a user could type."""
    return isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable() and ":" not in name


def _dicts(value: Any) -> list[dict[Any, Any]]:
    return [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, dict)]


def _read_blocks(body: str) -> Iterator[str]:
    """The text of every code block that may be YAML, as far left as it goes."""
    fence, kind, lines = "", "", list[str]()
    for line in body.splitlines():
        if fence and line.lstrip(" \t>").startswith(fence):
            text = dedent("\n".join(re.sub(r"^[ \t]*>[ \t]?", "", line) for line in lines)) + "\n"
            if kind in ("yaml", "yml") or (not kind and _MERGE.search(text)):
                yield text
            fence = ""
        elif fence:
            lines.append(line)
        elif begin := _FENCE.match(line):
            fence, kind, lines = begin[1], begin[2].lower(), []
