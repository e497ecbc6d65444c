"""Recognise and check a PEFT adapter: its name, the base that it was trained on, and whether the two can be merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from featcal_cli.hub.weight_files import PICKLES, SAFETENSORS
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import list_some, plain
from featcal_cli.runtime.structured_text import parse_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""The prefix that peft puts before every tensor name of the model that it wraps."""


@dataclass(frozen=True)
class Adapter:
    name: str
    folder: Path
    config: Mapping[str, Any]
    """Content of adapter_config.json."""

    @property
    def base(self) -> str:
        """The base that the adapter was trained on, as a reference for `resolve`; empty if its config names none."""
        base, revision = (str(self.config.get(key) or "") for key in ("base_model_name_or_path", "revision"))
        return f"{base}@{revision}" if base and revision and not existing_path(base) else base

    @property
    def trained_as(self) -> str:
        """Name of the model class that the adapter was trained on; empty if its config names none."""
        mapping = self.config.get("auto_mapping")
        return str(mapping.get("base_model_class") or "") if isinstance(mapping, dict) else ""

    def __str__(self) -> str:
        kind, rank = str(self.config["peft_type"]), self.config.get("r")
        return f"{kind}, rank {rank}" if isinstance(rank, int) and rank > 0 else kind


def is_adapter(files: Collection[str]) -> bool:
    return ADAPTER_CONFIG in files and not any(name in files for name in (*SAFETENSORS, *PICKLES))


def split_adapter(name: str, exists: Callable[[str], bool]) -> tuple[str, str] | None:
    """Split `BASE[@REV]+ADAPTER[@REV]` into BASE and ADAPTER; return None if `name` is a single model. An existing path
    is never split. BASE may itself contain an adapter: adapters stack from left to right. `exists` tells whether a text
    is the path of something on this machine."""
    if "+" not in name or exists(name):
        return None
    halves = [(name[: plus.start()], name[plus.end() :]) for plus in re.finditer(r"(?<=.)\+(?=.)", name, re.DOTALL)]
    # a revision may hold a plus too: then what follows it is neither USER/NAME nor there, and what precedes it neither
    likely = (half for half in reversed(halves) if "/" in half[1] or exists(half[0]))
    return next((half for half in halves if exists(half[1])), None) or next(likely, None)


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read the adapter in `folder`. Raises HubError if its config cannot be read, if the installed peft does not know
    its kind or a setting, or if it cannot be merged into a model's weights."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType, __version__

    def refusal(what: str, fix: str) -> HubError:
        return HubError(f"{name} is an adapter{what}", where=f"{name}/{ADAPTER_CONFIG}", fix=fix)

    try:
        config = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(f", but its {ADAPTER_CONFIG} cannot be read", "download it again") from error
    if not isinstance(config, dict) or not config.get("peft_type"):
        fix = "give an adapter that was saved with peft, or a full model"
        raise refusal(f", but its {ADAPTER_CONFIG} names no peft_type", fix)
    adapter, kind, update = (
        Adapter(name, folder, config),
        str(config["peft_type"]),
        "update peft, or give the full model",
    )
    if kind not in PeftType.__members__ or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise refusal(f" of a kind that peft {__version__} does not know: {plain(kind)}", update)
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])} | {"runtime_config"}
    # settings that are off change nothing, and newer versions of peft write many of them
    if unknown := sorted(key for key, value in config.items() if value and key not in known):
        raise refusal(f" with settings that peft {__version__} does not know: {list_some(unknown)}", update)
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        raise refusal(f" of the kind {adapter}, which cannot be folded into weights", "give a LoRA or a full model")
    if config.get("layer_replication"):
        raise refusal(" that repeats layers, and cannot be folded into weights", "give the full model")
    return adapter
