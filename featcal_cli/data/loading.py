"""Load a model's own tokenizer, image processor or feature extractor from its files, without running code in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import parse_json

Folders = Sequence[Path] | Mapping[Path, str]
"""Folders that are searched for a preprocessor, the likeliest first; a mapping names the model of each folder."""

SAFE = {"trust_remote_code": False, "local_files_only": True}
SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of image processors, feature extractors and processors."""
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
LARGEST = {
    **dict.fromkeys(("height", "width", "size", "crop_size"), 2**14), "shortest_edge": 2**17,
    "sampling_rate": 400_000, "n_samples": 2**24, "nb_max_frames": 2**16, "chunk_length": 600,
}  # fmt: skip
"""The largest allowed values of a processor's settings, in pixels, samples and the like; with larger ones, each example
would take gigabytes. For some processors the shortest edge is a total number of pixels."""
LARGEST_OF_SOUND = 2**16
"""The largest allowed value of every other setting of a feature extractor."""

Automatic: Any = {
    "tokenizer": AutoTokenizer, "image processor": AutoImageProcessor, "feature extractor": AutoFeatureExtractor,
    "processor": AutoProcessor,
}  # fmt: skip
NEEDED = {
    "tokenizer": ("model_max_length",), "image processor": (), "feature extractor": ("sampling_rate",),
    "processor": ("tokenizer", "image_processor", "image_token"),
}  # fmt: skip
"""Attributes that each kind of preprocessor must have to be usable."""


def load_preprocessor(kind: str, folders: Folders, where: str) -> tuple[Any, str]:
    """Load a tokenizer, image processor, feature extractor or processor (for images with texts) from the first folder
    that has a usable one. Return it with the name of its model or folder. Raises DataError if none can be loaded."""
    files = {"tokenizer": TOKENIZER_FILES, "processor": SETTINGS[::-1]}.get(kind, SETTINGS)
    reasons: list[str] = []
    for folder in folders:
        if any((folder / file).is_file() for file in files):
            try:
                return _load(kind, folder), folders[folder] if isinstance(folders, Mapping) else _repo_name(folder)
            except Exception as error:  # noqa: BLE001 - `tokenizers` raises no narrower kind for a broken file
                reasons.append(f"{_repo_name(folder)}: {exception_text(error)}")
    tried = "; ".join(reasons) or f"none of {list_some(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    fix = f"copy {files[0]} and the files it needs, as they were published, into a copy of the merged model"
    raise DataError(f"no {kind} can be loaded ({tried})", where=where, fix=fix)


def _load(kind: str, folder: Path) -> Any:
    for file in SETTINGS:
        _check_sizes(folder / file, LARGEST_OF_SOUND if kind == "feature extractor" else inf)
    # torchvision's results differ from Pillow's, and the choice would depend on what is installed
    options = {"backend": "pil"} if kind in ("image processor", "processor") else {}
    loaded = Automatic[kind].from_pretrained(folder, **options, **SAFE)
    if lacking := [name for name in NEEDED[kind] if not hasattr(loaded, name)]:
        raise ValueError(f"{type(loaded).__name__} has no {lacking[0]}")
    for name in ("model_max_length", "sampling_rate"):
        if name in NEEDED[kind] and not isinstance(value := getattr(loaded, name), int | float):
            raise ValueError(f"its files say {name} {plain(str(value))}, which is no number")
    return loaded


def _check_sizes(file: Path, otherwise: float) -> None:
    """Raise ValueError if a settings file asks for inputs larger than any model reads."""
    left = [("", parse_json(file.read_text(encoding="utf-8")))] if file.is_file() else []
    while left:
        match left.pop():
            case _, dict(settings):
                left += settings.items()
            case key, list(values):
                left += [(key, value) for value in values]
            case key, int() | float() as value if value > LARGEST.get(key, otherwise):
                raise ValueError(f"{file.name} says {key} {plain(str(value))}, and no model reads inputs of that size")


def _repo_name(folder: Path) -> str:
    """Return the id of the Hub repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
