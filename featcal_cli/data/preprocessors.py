"""A model's own image processor or tokenizer, from the first folder that has a usable one; its code is never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer

from featcal_cli.data.hub_dataset import first_line
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import bare, parse_json

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
LONGEST_SIDES = dict.fromkeys(("height", "width", "size", "crop_size"), 2**14) | {"shortest_edge": 2**17}
"""Pixels; by the keys of a processor's settings. For some processors the shortest edge is a number of all pixels."""
SAFE = {"trust_remote_code": False, "local_files_only": True}

image_processors: Any = AutoImageProcessor  # has no types


def load_image_processor(folders: Sequence[Path], where: str) -> tuple[Any, str]:
    """An image processor and the name of the repo or folder it is from. Raises DataError when there is none."""

    def load(folder: Path) -> Any:
        for file in IMAGE_PROCESSOR_FILES:
            _check_sides(folder / file)
        # torchvision's results differ from Pillow's, and the choice would depend on what is installed.
        return image_processors.from_pretrained(folder, backend="pil", **SAFE)

    return _load_first("image processor", IMAGE_PROCESSOR_FILES, load, folders, where)


def load_tokenizer(folders: Sequence[Path], where: str) -> tuple[Any, str]:
    """A tokenizer and the name of the repo or folder it is from. Raises DataError when there is none."""
    return _load_first(
        "tokenizer", TOKENIZER_FILES, lambda folder: AutoTokenizer.from_pretrained(folder, **SAFE), folders, where
    )


def _check_sides(file: Path) -> None:
    """Raise ValueError for a processor that makes images of a size that no model reads: each would take gigabytes."""
    left = [("", parse_json(file.read_text(encoding="utf-8")))] if file.is_file() else []
    while left:
        match left.pop():
            case _, dict(settings):
                left += settings.items()
            case key, list(values):
                left += [(key, value) for value in values]
            case key, int() | float() as value if value > LONGEST_SIDES.get(key, inf):
                raise ValueError(f"{file.name} says {key} {bare(str(value))}, and no model reads images of that size")


def _load_first(
    what: str, files: Sequence[str], load: Callable[[Path], Any], folders: Sequence[Path], where: str
) -> tuple[Any, str]:
    """What the first folder that has one of the files gives, and that folder's name."""
    reasons: list[str] = []
    for folder in folders:
        if any((folder / file).is_file() for file in files):
            try:
                return load(folder), _repo_name(folder)
            except Exception as error:  # noqa: BLE001 - `tokenizers` raises no narrower kind for a broken file
                reasons.append(f"{_repo_name(folder)}: {first_line(error)}")
    tried = "; ".join(reasons) or f"none of {', '.join(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    fix = f"copy {files[0]} and the files it needs from the base model into the merged folder"
    raise DataError(f"no {what} can be loaded ({tried})", where=where, fix=fix)


def _repo_name(folder: Path) -> str:
    """The repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
