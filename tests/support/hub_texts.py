"""Repos of small text files without a server: cards and configs, beside weights that must not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import dedent
from typing import Any

import yaml
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

from featcal_cli.hub.repo import Kind, Opener, Repo, open_repo
from featcal_cli.recipe.references import existing_path
from featcal_cli.runtime.errors import HubError

Files = Mapping[str, str]
"""Path → text."""


def card(text: str = "", **metadata: Any) -> dict[str, str]:
    """A README.md."""
    return {"README.md": f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{dedent(text)}"}


@dataclass(frozen=True)
class TextRepo(Repo):
    """A repo of text files without a server."""

    texts: Files = field(default_factory=dict)
    is_gated: bool = False

    @cached_property
    def files(self) -> Mapping[str, int]:
        weights = "adapter_model.safetensors" if "adapter_config.json" in self.texts else "model.safetensors"
        return dict.fromkeys((*self.texts, weights), 1)

    def read_text(self, path: str, errors: str = "strict") -> str | None:  # noqa: ARG002 - as every repo has it
        assert not path.endswith(".safetensors"), "weights are not read for it"
        if self.is_gated:
            raise lost(self.name, f"{self.name} is gated")
        return self.texts.get(path)


def lost(name: str, what: str) -> HubError:
    """The error for a repo that is not there, or may not be read."""
    error = HubError(what, where=name, fix="check the name")
    error.__cause__ = RepositoryNotFoundError(
        "404", response=httpx.Response(404, request=httpx.Request("GET", "https://h"))
    )
    return error


def open_texts(repos: Mapping[str, Files]) -> Opener:
    """What opens these repos, by name: `ID[@REVISION]`, `data ID` for a dataset, `gated ID` for a gated model; and
    folders of this machine."""

    def open_one(name: str, kind: Kind = "model") -> Repo:
        if existing_path(name):
            return open_repo(name, kind)
        key = ("data " if kind == "dataset" else "") + name.removesuffix("@main")
        is_gated = f"gated {key}" in repos
        if key not in repos and not is_gated:
            raise lost(name, f"there is no {kind} {name}, or it is private")
        texts = repos[f"gated {key}" if is_gated else key]
        return TextRepo(name.partition("@")[0], kind, "0" * 40, None, texts, is_gated)

    return open_one
