"""A model's own image processor or tokenizer, from the first folder that has a usable one; its code is never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import bare, parse_json

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip

LONGEST_SIDES = dict.fromkeys(("height", "width", "size", "crop_size"), 2**14) | {"shortest_edge": 2**17}
"""Pixels; by the keys of a processor's settings. For some processors the shortest edge is a number of all pixels."""

image_processors: Any = AutoImageProcessor  # has no types


def load_image_processor(folders: Sequence[Path], where: str) -> tuple[Any, str]:
    """An image processor and the name of the repo or folder it is from. Raises DataError when there is none."""

    def load(folder: Path) -> Any:
        for file in IMAGE_PROCESSOR_FILES:
            _check_sides(folder / file)
        # torchvision's results differ from Pillow's, and the choice would depend on what is installed.
        return image_processors.from_pretrained(folder, backend="pil", trust_remote_code=False, local_files_only=True)

    return _load_first("image processor", IMAGE_PROCESSOR_FILES, load, folders, where)


def _check_sides(file: Path) -> None:
    """Raise ValueError for a processor that makes images of a size that no model reads: each would take gigabytes."""
    left = [("", parse_json(file.read_text(encoding="utf-8")))] if file.is_file() else []
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        elif isinstance(value, int | float) and value > LONGEST_SIDES.get(key, inf):
            raise ValueError(f"{file.name} says {key} {bare(str(value))}, and no model reads images of that size")


def load_tokenizer(folders: Sequence[Path], where: str) -> tuple[Any, str]:
    """A tokenizer and the name of the repo or folder it is from. Raises DataError when there is none."""

    def load(folder: Path) -> Any:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)

    return _load_first("tokenizer", TOKENIZER_FILES, load, folders, where)


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
                reasons.append(f"{_repo_name(folder)}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    tried = "; ".join(reasons) or f"none of {', '.join(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    raise DataError(
        f"no {what} can be loaded ({tried})",
        where=where,
        fix=f"copy {files[0]} and the files it needs from the base model into the merged folder",
    )


def _repo_name(folder: Path) -> str:
    """The repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
