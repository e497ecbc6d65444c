"""Batches of a model's forward arguments; the model's own tokenizer or image processor, whose code is never run; and
what every reader of rows offers to make the batches."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedModel

from featcal_cli.data.hub_dataset import first_line
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain
from featcal_cli.runtime.structured_text import parse_json

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
LONGEST_SIDES = dict.fromkeys(("height", "width", "size", "crop_size"), 2**14) | {"shortest_edge": 2**17}
"""Pixels; by the keys of a processor's settings. For some processors the shortest edge is a number of all pixels."""
MOST_SOUND = {"sampling_rate": 400_000, "n_samples": 2**24, "nb_max_frames": 2**16, "chunk_length": 600}
"""The most that a feature extractor's settings may say; any other of its numbers is at most MOST_OF_SOUND."""
MOST_OF_SOUND = 2**16
GLOBAL_MASK = "global_attention_mask"
"""The name that Longformer and LED give to an input that is 1 for tokens that attend everywhere."""
SAFE = {"trust_remote_code": False, "local_files_only": True}

Folders = Sequence[Path] | Mapping[Path, str]
"""Folders in which a preprocessor may lie, the likeliest first; a mapping's values say whose folder each is."""

image_processors: Any = AutoImageProcessor  # has no types
feature_extractors: Any = AutoFeatureExtractor
processors: Any = AutoProcessor


def load_image_processor(folders: Folders, where: str) -> tuple[Any, str]:
    """An image processor, and whose it is or the name of the folder it is from. Raises DataError when there is none."""

    def load(folder: Path) -> Any:
        for file in IMAGE_PROCESSOR_FILES:
            _check_sizes(folder / file, LONGEST_SIDES, inf)
        # torchvision's results differ from Pillow's, and the choice would depend on what is installed.
        return image_processors.from_pretrained(folder, backend="pil", **SAFE)

    return _load_first("image processor", IMAGE_PROCESSOR_FILES, load, folders, where)


def load_feature_extractor(folders: Folders, where: str) -> tuple[Any, str]:
    """A feature extractor of sound, and whose it is or the folder it is from. Raises DataError when there is none."""

    def load(folder: Path) -> Any:
        for file in IMAGE_PROCESSOR_FILES:
            _check_sizes(folder / file, MOST_SOUND, MOST_OF_SOUND)
        extractor = feature_extractors.from_pretrained(folder, **SAFE)
        if not isinstance(getattr(extractor, "sampling_rate", None), int):
            raise ValueError("it says no sampling_rate")
        extractor.padding_side = "right"  # as all that is padded here
        return extractor

    return _load_first("feature extractor", IMAGE_PROCESSOR_FILES, load, folders, where)


def load_processor(folders: Folders, where: str) -> tuple[Any, str]:
    """A processor of images with texts, and whose it is or the folder it is from. Raises DataError if there is none."""

    def load(folder: Path) -> Any:
        for file in IMAGE_PROCESSOR_FILES:
            _check_sizes(folder / file, LONGEST_SIDES, inf)
        processor = processors.from_pretrained(folder, backend="pil", **SAFE)
        if any(not hasattr(processor, name) for name in ("tokenizer", "image_processor", "image_token")):
            raise ValueError(f"{type(processor).__name__} is none of images and texts")
        return processor

    return _load_first("processor", IMAGE_PROCESSOR_FILES[::-1], load, folders, where)


CHECK_PROCESSOR = "give --batch-size 1; if that fails too, check the processor's files beside the model (*_config.json)"
"""The fix where a processor fails at a batch: its examples may differ in size, or its files be wrong."""


def load_tokenizer(folders: Folders, where: str) -> tuple[Any, str]:
    """A tokenizer, and whose it is or the name of the folder it is from. Raises DataError when there is none."""
    return _load_first("tokenizer", TOKENIZER_FILES, _read_tokenizer, folders, where)


def find_tokenizer(folders: Folders) -> tuple[Any, str] | None:
    """A tokenizer and the name of the repo or folder it is from; None where no folder has one that can be loaded."""
    try:
        return load_tokenizer(folders, "")
    except DataError:
        return None


def _read_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
    longest = getattr(tokenizer, "model_max_length", None)
    if not isinstance(longest, int | float):
        raise ValueError(f"{TOKENIZER_FILES[0]} says model_max_length {plain(str(longest))}, which is no number")
    return tokenizer


def _check_sizes(file: Path, most: Mapping[str, float], otherwise: float) -> None:
    """Raise ValueError for a processor that makes what no model reads, by its numbers' keys: each example would take
    gigabytes."""
    left = [("", parse_json(file.read_text(encoding="utf-8")))] if file.is_file() else []
    while left:
        match left.pop():
            case _, dict(settings):
                left += settings.items()
            case key, list(values):
                left += [(key, value) for value in values]
            case key, int() | float() as value if value > most.get(key, otherwise):
                raise ValueError(f"{file.name} says {key} {plain(str(value))}, and no model reads inputs of that size")


def _load_first(
    what: str, files: Sequence[str], load: Callable[[Path], Any], folders: Folders, where: str
) -> tuple[Any, str]:
    """Load from the first folder that has one of the files; return the result, and the folder's owner or name."""
    reasons: list[str] = []
    for folder in folders:
        if any((folder / file).is_file() for file in files):
            try:
                return load(folder), folders[folder] if isinstance(folders, Mapping) else _repo_name(folder)
            except Exception as error:  # noqa: BLE001 - `tokenizers` raises no narrower kind for a broken file
                reasons.append(f"{_repo_name(folder)}: {first_line(error)}")
    tried = "; ".join(reasons) or f"none of {list_some(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    fix = f"copy {files[0]} and the files it needs from the base model into the merged folder"
    if reasons:
        fix = f"put {files[0]} and the files it needs, as they were published, into a copy of one of these models"
    raise DataError(f"no {what} can be loaded ({tried})", where=where, fix=fix)


def _repo_name(folder: Path) -> str:
    """The repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


Batch = dict[str, Tensor]
"""Forward arguments, dimension 0 the examples."""


OTHER_COLUMN = "name the right columns with --columns TASK=ROLE:COLUMN, or give other data"
OTHER_ROWS = "mend or take out these rows, or give other data"


class BadRowError(Exception):
    """One row that cannot become an example, why, and what mends many of the kind."""

    def __init__(self, reason: str, fix: str = OTHER_ROWS) -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True)
class Reader(ABC):
    """Turns rows into batches in two steps, so that bad rows are known before batches are cut."""

    chosen: str
    """The chosen columns and preprocessing."""

    @abstractmethod
    def read(self, row: Any) -> Any:
        """Return the part of one row that `batch` needs. Raises BadRowError."""

    @abstractmethod
    def key(self, item: Any) -> bytes:
        """Return a key that is equal for two items if and only if they become the same example."""

    @abstractmethod
    def batch(self, items: Sequence[Any]) -> Batch:
        """The batch of these items, dimension 0 in their order."""

    def remarks(self, items: Sequence[Any]) -> Sequence[str]:  # noqa: ARG002 - for those who have some
        """Return remarks about all these items together. Raises DataError where they mean nothing to the model."""
        return ()

    def unpadded_length(self, item: Any) -> int | None:  # noqa: ARG002 - for those who cannot pad
        """The length of an item that shares a batch only with items of that length, as the model cannot tell padding
        from what it reads; None for an item that shares a batch with any other."""
        return None

    def longest(self, items: Sequence[Any]) -> Sequence[Any]:
        """The one or two of these items (at least one) that a batch of all of them is as long as: any, where batches
        are of one size."""
        return items[:1]


def group_by_length(reader: Reader, items: Sequence[Any], size: int) -> list[list[int]]:
    """The positions of the items that make a batch each, at most `size` of them, those of one `unpadded_length`
    together. The order of all positions does not depend on the size."""
    by_length: dict[int | None, list[int]] = {}
    for position, item in enumerate(items):
        by_length.setdefault(reader.unpadded_length(item), []).append(position)
    return [alike[start : start + size] for alike in by_length.values() for start in range(0, len(alike), size)]


def forward_names(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters) - {"self", "args", "kwargs"}


def decoder_prompt(model: PreTrainedModel, count: int) -> Batch:
    """The token that decoding starts from [count, 1], for a decoder that does not make its input by itself."""
    names = forward_names(model)
    # A head that is trained on labels without generating (classification) builds the decoder's input from input_ids.
    builds_it = "labels" in names and not model.can_generate()
    if not model.config.is_encoder_decoder or "decoder_input_ids" not in names or builds_it:
        return {}
    configs = (model.config, getattr(model, "generation_config", None))
    keys = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    tokens = (getattr(config, key, None) for key in keys for config in configs)
    start = next((token for token in tokens if isinstance(token, int)), 0)
    return {"decoder_input_ids": torch.full((count, 1), start)}


def count_examples(batch: Batch) -> int:
    """Examples in a batch: a tensor may hold several rows an example (the patches of an image, say), but not fewer."""
    return min(len(tensor) for tensor in batch.values())


def take_examples(batch: Batch, positions: Sequence[int]) -> Batch:
    count = count_examples(batch)

    def rows_of(tensor: Tensor) -> Tensor:
        rows = len(tensor) // count
        return tensor[[position * rows + row for position in positions for row in range(rows)]]

    return {name: rows_of(tensor) for name, tensor in batch.items()}


def pad_on_the_right(batch: Batch) -> Batch:
    """The batch with the padding that stands before a text behind it, so that positions are those of a text alone. Ids,
    masks and all else that has a value for every token move together."""
    moved = dict(batch)
    for side in ("", "decoder_"):
        mask, ids = batch.get(f"{side}attention_mask"), batch.get(f"{side}input_ids")
        if mask is None or mask.ndim != 2 or ids is None or ids.shape != mask.shape or mask[:, 0].all():
            continue
        length = mask.shape[1]
        padding = mask.ne(0).int().argmax(1, keepdim=True)
        places = (torch.arange(length) + padding) % length
        for name, tensor in batch.items():
            if tensor.shape[:2] != mask.shape or not is_per_token(name, decoder=bool(side)):
                continue
            rows = places.view(*places.shape, *[1] * (tensor.ndim - 2)).expand_as(tensor)
            moved[name] = tensor.gather(1, rows)
    return moved


def is_per_token(name: str, *, decoder: bool) -> bool:
    """Whether an input of this name has a value for every token of the decoder's text, or of the other one."""
    is_of_text = name.startswith("decoder_") == decoder and not name.startswith("pixel_")
    return is_of_text and name.endswith(("ids", "mask", "embeds", "bbox", "labels"))


def take_range(batches: Sequence[Batch], start: int, stop: int) -> list[Batch]:
    """The examples from `start` up to `stop` of the batches, counted through all of them."""
    taken: list[Batch] = []
    before = 0
    for batch in batches:
        count = count_examples(batch)
        inside = range(max(0, start - before), min(count, stop - before))
        if inside:
            taken.append(batch if len(inside) == count else take_examples(batch, inside))
        before += count
    return taken


def count_positions(model: PreTrainedModel) -> tuple[int | None, bool]:
    """The most tokens that the model has positions for, None for any number; and whether more of them cannot be read at
    all, because each position has weights of its own."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None, False
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search(r"(^|[._])(w?pe|(embed_)?pos(ition)?s?_?)", name):
            if module.num_embeddings == most and module.padding_idx is not None:
                return most - module.padding_idx - 1, True  # RoBERTa's first position is behind the padding's
            if module.num_embeddings == most + int(getattr(module, "offset", 0)):
                return most, True
    return most, False


def text_config(model: PreTrainedModel) -> Any:
    """The config of the part that reads tokens; the whole one where there are several."""
    try:
        return model.config.get_text_config()
    except ValueError:
        return model.config


def count_vocabulary(model: PreTrainedModel) -> int | None:
    """Tokens that the model has embeddings for; None where it reads none."""
    weight = find_embeddings(model)
    return None if weight is None else len(weight)


def find_embeddings(model: PreTrainedModel) -> Tensor | None:
    """The embeddings of the tokens that the model reads [tokens, d]; None where it reads none, or has several kinds."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # models of two towers do not say which of them reads
        return None
    return weight.data if isinstance(weight, Tensor) and weight.ndim == 2 else None
