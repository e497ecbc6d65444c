"""Read from a README.md where a model or a dataset comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from featcal_cli.runtime.structured_text import split_front_matter

MOST_TEXT = 200_000
"""The most characters of a card's text that are searched."""
_FENCED = re.compile(r"^[ \t>]*(`{3,20}|~{3,20})[ \t]*([\w-]*)[^\n]*\n(.*?)^[ \t>]*\1", re.MULTILINE | re.DOTALL)
_MERGE = re.compile(r"^[ \t>]*merge_method[ \t]*:", re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """The statements of a model's or dataset's card; values of a wrong type are left out."""

    base_models: Sequence[str]
    datasets: Sequence[str]
    evaluations: Sequence[tuple[str, str | None]]
    """Dataset and config of every result in the model-index."""
    configs: Sequence[str]
    default_config: str | None
    yaml_blocks: Sequence[str]
    """Text of the code blocks marked as YAML, and of unmarked ones that contain merge_method."""
    problem: str
    """Why the card's metadata cannot be read; empty if it can."""


def read_card(text: str) -> Card:
    """Parse the text of a README.md; never raises, whatever the text holds."""
    metadata, body, problem = split_front_matter(text)
    if metadata is None:
        problem = f"the metadata cannot be read{f': {problem}' if problem else ''}"
        metadata = {}
    body = body[:MOST_TEXT]
    results = (result for model in _dicts(metadata.get("model-index")) for result in _dicts(model.get("results")))
    measured = [dataset for result in results for dataset in _dicts(result.get("dataset"))]
    evaluations = [(name, dataset.get("config")) for dataset in measured for name in _names(dataset.get("type"))]
    configs, default = _read_configs(metadata)
    return Card(
        base_models=_names(metadata.get("base_model")),
        datasets=_names(metadata.get("datasets")),
        evaluations=[(name, config if _is_config(config) else None) for name, config in evaluations],
        configs=configs,
        default_config=default,
        yaml_blocks=list(_yaml_blocks(body)),
        problem=problem,
    )


def _yaml_blocks(body: str) -> Iterator[str]:
    """Yield the text of every code block that may be YAML, without its common indentation."""
    for _, kind, content in _FENCED.findall(body):
        text = dedent(re.sub(r"^[ \t]*>[ \t]?", "", content, flags=re.MULTILINE))
        if kind.lower() in ("yaml", "yml") or (not kind and _MERGE.search(text)):
            yield text


def _read_configs(metadata: Mapping[Any, Any]) -> tuple[list[str], str | None]:
    """Return the names of a dataset's configs and of its default config (None if it has no default)."""
    for key in ("configs", "dataset_info"):
        listed = [entry for entry in _dicts(metadata.get(key)) if _is_config(entry.get("config_name"))]
        if names := list(dict.fromkeys(entry["config_name"] for entry in listed)):
            marked = [entry["config_name"] for entry in listed if entry.get("default") is True]
            return names, marked[0] if marked else "default" if "default" in names else None
    return [], None


def _is_config(name: Any) -> bool:
    """Whether this is the name of a config that a user could type."""
    return isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable() and ":" not in name


def _names(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(name.strip() for name in listed if isinstance(name, str) and name.strip()))


def _dicts(value: Any) -> list[dict[Any, Any]]:
    return [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, dict)]
