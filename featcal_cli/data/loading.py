"""Load a model's own tokenizer, image processor or feature extractor from its files, without running code in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some

Folders = Sequence[Path] | Mapping[Path, str]
"""Folders that are searched for a preprocessor, the likeliest first; a mapping names the model of each folder."""

SAFE = {"trust_remote_code": False, "local_files_only": True}
SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of image processors, feature extractors and processors."""
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
Automatic: Any = {
    "tokenizer": AutoTokenizer, "image processor": AutoImageProcessor, "feature extractor": AutoFeatureExtractor,
    "processor": AutoProcessor,
}  # fmt: skip
NEEDED = {"feature extractor": ["sampling_rate"], "processor": ["tokenizer", "image_processor", "image_token"]}
"""Attributes that a preprocessor must have to be usable."""


def load_preprocessor(kind: str, folders: Folders, where: str) -> tuple[Any, str]:
    """Load a tokenizer, image processor, feature extractor or processor (for images with texts) from the first folder
    that has a usable one. Return it with the name of its model or folder. Raises DataError if none can be loaded."""
    files = {"tokenizer": TOKENIZER_FILES, "processor": SETTINGS[::-1]}.get(kind, SETTINGS)
    # torchvision's results differ from Pillow's, and the choice would depend on what is installed
    options = {"backend": "pil"} if kind in ("image processor", "processor") else {}
    reasons: list[str] = []
    for folder in folders:
        if any((folder / file).is_file() for file in files):
            try:
                loaded = Automatic[kind].from_pretrained(folder, **options, **SAFE)
            except Exception as error:  # noqa: BLE001 - `tokenizers` raises no narrower kind for a broken file
                reasons.append(f"{_repo_name(folder)}: {exception_text(error)}")
                continue
            lacking = [name for name in NEEDED.get(kind, ()) if not hasattr(loaded, name)]
            if not lacking:
                return loaded, folders[folder] if isinstance(folders, Mapping) else _repo_name(folder)
            reasons.append(f"{_repo_name(folder)}: {type(loaded).__name__} has no {lacking[0]}")
    tried = "; ".join(reasons) or f"none of {list_some(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    fix = f"copy {files[0]} and the files it needs, as they were published, into a copy of the merged model"
    raise DataError(f"no {kind} can be loaded ({tried})", where=where, fix=fix)


def _repo_name(folder: Path) -> str:
    """Return the id of the Hub repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
