"""Repos of small text files on the Hub on loopback: cards and configs, beside weights that must not be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml
from hub_server import HubServer

Files = Mapping[str, str]
"""Path → text."""


def card(text: str = "", **metadata: Any) -> dict[str, str]:
    """A README.md."""
    return {"README.md": f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{dedent(text)}"}


def fill(text: Any, name: str) -> Any:
    """ORG replaced by the case's name in whatever holds text: the client's cache outlives a test."""
    if isinstance(text, str):
        return re.sub(r"\bORG/", f"{name}/", text)
    if isinstance(text, Mapping):
        return {fill(key, name): fill(value, name) for key, value in text.items()}
    return tuple(fill(part, name) for part in text) if isinstance(text, tuple) else text


def publish_texts(hub: HubServer, folder: Path, repos: Mapping[str, Files]) -> None:
    """Put repos on the Hub, by name: `ID[@REVISION]`, `data ID` for a dataset, `gated ID` for a gated model."""
    for number, (name, files) in enumerate(repos.items()):
        made = folder / "hub" / str(number)
        made.mkdir(parents=True)
        *kind, repo = name.split()
        repo, _, revision = repo.partition("@")
        weights = "adapter_model.safetensors" if "adapter_config.json" in files else "model.safetensors"
        for path, text in {**files, weights: "no weights"}.items():
            (made / path).write_text(text, encoding="utf-8")
        dataset, gated, revision = "data" in kind, "gated" in kind, revision or "main"
        hub.add_repo(repo, made, kind="dataset" if dataset else "model", gated=gated, revision=revision)
