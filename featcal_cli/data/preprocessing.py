"""Load a model's own preprocessors without running code, map token ids between vocabularies, and prepare examples."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from featcal_cli.data.batches import (
    LABELS,
    Batch,
    Example,
    count_positions,
    count_target_vocabulary,
    count_vocabulary,
    forward_names,
    padding_id,
)
from featcal_cli.data.columns import BadRowError
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import parse_json, walk

TOKEN_IDS = ("input_ids", "decoder_input_ids", LABELS)
MAX_TOKENS = 2048
"""Most tokens of a text where the user does not say how many."""
SHOWN = 3
"""Tokens that a message shows when it quotes a text or a list of tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer and the id of each token, including added and special ones."""

    role: str
    """The model's part in the job, such as `merged` or `expert red`."""
    name: str
    tokenizer: Any
    ids: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.role} ({plain(self.name)})" if self.role else plain(self.name)

    @property
    def padding(self) -> int:
        """The id that replaces tokens of another vocabulary that this one lacks."""
        tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in tokens if token is not None), 0)

    def spell(self, ids: Iterable[int]) -> list[str]:
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def cut(self, text: str) -> list[str]:
        """Return a text's tokens, without the special tokens that the tokenizer puts around it."""
        return self.spell(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def map_ids(source: Vocabulary, target: Vocabulary) -> Tensor | None:
    """Return a table of the id in `target` of each token id of `source`, or None if all are equal. Tokens that target
    lacks are mapped to its padding: the caller must check that none is read."""
    if source.ids == target.ids:
        return None
    table = torch.arange(max(source.ids.values(), default=0) + 1)
    for token, number in source.ids.items():
        table[number] = target.ids.get(token, target.padding)
    return table


def renumber(batch: Batch, table: Tensor | None) -> Batch:
    """Return the batch with each token id replaced by the table's id for it, or the batch itself without a table."""
    if table is None:
        return batch
    own = table.to(next(iter(batch.values())).device)
    ids = {name: batch[name] for name in TOKEN_IDS if name in batch}
    return batch | {name: torch.where(x < len(own), own[x.clamp(max=len(own) - 1)], x) for name, x in ids.items()}


@dataclass
class Vocabularies:
    """The vocabularies of a job's models; each is loaded when it is first needed."""

    folders: Mapping[str, Sequence[Path]]
    """The folders that are searched for each model's tokenizer, by the model's role."""
    faults: dict[str, str] = field(default_factory=dict)
    """Reasons why tokenizers that are there cannot be loaded, by the model's role; `find` fills it."""
    _found: dict[str, Vocabulary | None] = field(default_factory=dict)

    def find(self, role: str) -> Vocabulary | None:
        """Return the vocabulary of a model, or None if it has no tokenizer that can be loaded."""
        if role not in self._found:
            try:
                tokenizer, name = load_preprocessor("tokenizer", self.folders.get(role, ()))
                self._found[role] = Vocabulary(role, name, tokenizer, tokenizer.get_vocab())
            except DataError as error:
                self._found[role] = None
                self.faults |= {role: error.what} if error.__cause__ else {}
        return self._found[role]


@dataclass(frozen=True)
class TextModels:
    """The models that read a task's texts together, and the expert whose tokenizer cuts them. By default, a tokenizer
    that is found in folders cuts them for all."""

    vocabularies: Vocabularies = field(default_factory=lambda: Vocabularies({}))
    expert: str = ""
    """The role of the model whose tokenizer cuts the texts, if it has one."""
    readers: Sequence[str] = ()
    """Roles of the other models that read the texts; their tokenizers have to cut texts into the same tokens."""
    target: str = ""
    """The role of the reader whose ids the batches hold; if empty, they hold the expert's ids."""

    def relate(self, cutting: Vocabulary) -> TextTokens:
        """Return the tokens that the tokenizer of `cutting` makes, with the ids that these models need."""
        found = map(self.vocabularies.find, (self.expert, *self.readers))
        others = [other for other in found if other is not None and other.ids != cutting.ids]
        target = self.vocabularies.find(self.target) if self.target else None
        table = None if target is None else map_ids(cutting, target)
        source = f"its expert ({self.target} has the same vocabulary)"
        if not self.expert:
            source = cutting.name
        elif cutting.role != self.expert:
            source = f"{cutting}, as its expert has none that can be loaded"
        elif target is None:
            source = f"its expert, as {self.target} has none that can be loaded" if self.target else "its expert"
        elif table is not None:
            source = f"its expert ({self.target} has another vocabulary: ids are mapped by token)"
        return TextTokens(cutting, others, table, source)


def open_tokens(models: TextModels, folders: Folders) -> TextTokens:
    """Open the tokenizer for texts that these models read: the expert's, that of the first reader that has one, or one
    found in `folders`. Raises DataError."""
    for role in (models.expert, *models.readers):
        if (cutting := models.vocabularies.find(role)) is not None:
            return models.relate(cutting)
    tokenizer, name = load_preprocessor("tokenizer", folders)
    return models.relate(Vocabulary("", name, tokenizer, tokenizer.get_vocab()))


@dataclass(frozen=True)
class TextTokens:
    """The tokenizer that cuts texts into tokens, and the ids of these tokens in the model that batches are made for."""

    cutting: Vocabulary
    others: Sequence[Vocabulary]
    """Vocabularies of other models that read the texts and have different ids."""
    table: Tensor | None
    """A table from the ids of `cutting` to those of the batches; None if they are equal."""
    source: str
    """A phrase that says which model the tokenizer belongs to."""

    def number(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that batches hold for these ids of `cutting`."""
        return list(ids) if self.table is None else self.table[list(ids)].tolist()

    def encode(
        self,
        texts: Sequence[str],
        most: int,
        *,
        add_special_tokens: bool = True,
        is_target: bool = False,
        is_padded: bool = False,
    ) -> dict[str, list[int]]:
        """Return ids and masks of a text or a pair, cut at `most` tokens or padded to as many. Raises BadRowError and
        DataError."""
        tokenizer = self.cutting.tokenizer
        given = {"text_target": texts[0]} if is_target else dict(zip(("text", "text_pair"), texts, strict=False))
        options: dict[str, Any] = {"truncation": True, "max_length": most, "return_attention_mask": True}
        if is_padded:
            options |= {"padding": "max_length", "padding_side": "right"}
        try:
            encoded = dict(tokenizer(**given, **options, add_special_tokens=add_special_tokens))
        except Exception as error:  # what its files say may make a tokenizer raise anything
            raise BadRowError(f"the tokenizer cannot read it ({exception_text(error)})") from error
        ids = encoded["input_ids"]
        self.check(ids, texts, most, tokenizer.truncation_side)
        return {**encoded, "input_ids": self.number(ids)}

    def check(self, ids: Iterable[int], texts: Iterable[str], most: int, side: str = "right") -> None:
        """Raise DataError if another model's tokenizer cuts the texts differently, or lacks one of the tokens `ids`.
        Only `most` tokens are compared: the rest, on the `side` where texts are cut off, is not read."""
        for other in self.others:
            for text in texts:
                kept = slice(-most, None) if side == "left" else slice(most)
                own, theirs = self.cutting.cut(text)[kept], other.cut(text)[kept]
                if own != theirs:
                    raise self._refuse(other, f"cut a text into different tokens: {_show_difference(own, theirs)}")
            if lacking := [token for token in self.cutting.spell(dict.fromkeys(ids)) if token not in other.ids]:
                raise self._refuse(other, f"have different tokens: {other.role} lacks {list_some(lacking)}")

    def _refuse(self, other: Vocabulary, what: str) -> DataError:
        fix = "merge with a tokenizer that cuts texts as this expert's does, or leave this task out"
        return DataError(f"the tokenizers of {self.cutting} and {other} {what}", fix=fix)


def _show_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """Return the first few tokens of two lists from where they begin to differ, for a message."""
    place = next(number for number, (x, y) in enumerate(zip_longest(one, other)) if x != y)
    shown = (" ".join(plain(token) for token in tokens[place : place + SHOWN]) or "nothing" for tokens in (one, other))
    return " against ".join(shown)


Folders = Sequence[Path] | Mapping[Path, str]
"""Folders that are searched for a preprocessor, the likeliest first; a mapping names the model of each folder."""

SAFE = {"trust_remote_code": False, "local_files_only": True}
SETTINGS = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
LARGEST = {
    **dict.fromkeys(("height", "width", "size", "crop_size"), 2**14), "shortest_edge": 2**17,
    "sampling_rate": 400_000, "n_samples": 2**24, "nb_max_samples": 2**24, "nb_max_frames": 2**16, "chunk_length": 600,
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
LACKING = re.compile(r"dependencies: (\w+)|requires the (\w+) library|requires `(\w+)|(?:need to|pip) install (\w+)")
"""Words of transformers about a package that a preprocessor needs and that is not installed."""


def load_preprocessor(kind: str, folders: Folders) -> tuple[Any, str]:
    """Load a preprocessor from the first folder that has a usable one, and return it with the name of its model or
    folder. Raises DataError if none can be loaded, whose cause is None if none is there."""
    files = {"tokenizer": TOKENIZER_FILES, "processor": SETTINGS[::-1]}.get(kind, SETTINGS)
    fix = f"copy {files[0]} and the files it needs, as they were published, into a copy of the merged model"
    reasons: dict[str, Exception] = {}
    for folder in folders:
        if any((folder / file).is_file() for file in files):
            try:
                with quiet_transformers():
                    return _load(kind, folder), folders[folder] if isinstance(folders, Mapping) else _repo_name(folder)
            except Exception as error:  # noqa: BLE001 - `tokenizers` raises no narrower kind for a broken file
                packages = _find_lacking(str(error), folder, kind)
                fix = f"install what it lacks: pip install {packages}" if packages else fix
                why = f"it needs {packages}, not installed here" if packages else exception_text(error)
                if "trust_remote_code" in str(error):
                    why = "it needs code of the repo's own, which is never run"
                    fix = "write model-ready inputs into a .safetensors file, and give that as the data; or, if a class"
                    fix += " of transformers does the same, take auto_map out of its settings (*_config.json)"
                reasons[f"{_repo_name(folder)}: {why}"] = error
    tried = "; ".join(reasons) or f"none of {list_some(map(_repo_name, folders))} has {' or '.join(files[:2])}"
    raise DataError(f"no {kind} can be loaded ({tried})", fix=fix) from next(iter(reasons.values()), None)


def _find_lacking(text: str, folder: Path, kind: str) -> str:
    """Return the packages that a preprocessor lacks, given the error's text, as pip takes them; empty if none."""
    installed = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    lacking = [name for name, is_there in installed.items() if not is_there]
    # where these lack, transformers names another one
    has_pieces = any(path.suffix in (".model", ".spm") for path in folder.glob("*"))
    if kind == "tokenizer" and lacking and has_pieces and not (folder / "tokenizer.json").is_file():
        return " ".join(lacking)
    named = LACKING.search(text)
    package = str(named[named.lastindex or 0]).lower() if named else ""
    return {"opencv": "opencv-python", "pil": "pillow", "pytorch": "torch"}.get(package, package)


def _load(kind: str, folder: Path) -> Any:
    otherwise = LARGEST_OF_SOUND if kind == "feature extractor" else inf
    for file in (folder / name for name in SETTINGS if (folder / name).is_file()):
        for (*_, key), value in walk(parse_json(file.read_text(encoding="utf-8"))):
            if isinstance(value, int | float) and value > LARGEST.get(key, otherwise):
                raise ValueError(f"{file.name} says {key} {plain(str(value))}, and no model reads inputs of that size")
    # torchvision's results differ from Pillow's; a model's config may want attentions beside a kernel without them
    chosen = {"image processor": {"backend": "pil"}, "tokenizer": dict[str, Any](output_attentions=False)}.get(kind, {})
    loaded = Automatic[kind].from_pretrained(folder, **chosen, **SAFE)
    if lacking := [name for name in NEEDED[kind] if not hasattr(loaded, name)]:
        raise ValueError(f"{type(loaded).__name__} has no {lacking[0]}")
    # the processor itself is loaded without a choice, as nothing but torchvision reads videos
    if kind == "processor":
        loaded.image_processor = _load("image processor", folder)
    for name in ("model_max_length", "sampling_rate"):
        if name in NEEDED[kind] and not isinstance(value := getattr(loaded, name), int | float):
            raise ValueError(f"its files say {name} {plain(str(value))}, which is no number")
    # what sentence-transformers does: it cuts texts, and writes them in small letters
    if kind == "tokenizer" and (file := folder / "sentence_bert_config.json").is_file():
        said = parse_json(file.read_text(encoding="utf-8"))
        loaded.model_max_length = min(loaded.model_max_length, said.get("max_seq_length") or inf)
        if said.get("do_lower_case") and (own := getattr(loaded, "backend_tokenizer", None)):
            own.normalizer = normalizers.Sequence([*filter(None, (normalizers.Lowercase(), own.normalizer))])
    return loaded


def _repo_name(folder: Path) -> str:
    """Return the id of the Hub repo whose snapshot the folder is, else the folder's name."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


@dataclass(frozen=True)
class Target:
    """The model that examples are made for, and the folders to search for its preprocessors, the likeliest first."""

    model: PreTrainedModel
    folders: Folders = ()
    text_models: TextModels = field(default_factory=TextModels)
    """The models that read the task's texts together; by default, all have the tokenizer's vocabulary."""
    max_length: int | None = None
    """Number of tokens of the longest text; None for what the model and its tokenizer allow, at most MAX_TOKENS."""

    def most_tokens(self, tokenizer: Any) -> int:
        """Return the number of tokens at which texts are cut."""
        own = (tokenizer.model_max_length, MAX_TOKENS) if self.max_length is None else (self.max_length,)
        limits = (*own, count_positions(self.model)[0])
        return int(min(limit for limit in limits if isinstance(limit, int | float) and limit >= 1))

    @cached_property
    def names(self) -> set[str]:
        """The names of the model's forward arguments."""
        return forward_names(self.model)

    @property
    def main_input(self) -> str:
        """The name of the model's main input; of its encoder's, where the model takes sound in any form."""
        own: str = self.model.main_input_name
        return str(getattr(getattr(self.model, "encoder", None), "main_input_name", own)) if own == "inputs" else own

    def check_ids(self, ids: Sequence[int], *, is_target: bool = False) -> None:
        """Raise DataError for token ids beyond the model's embeddings. is_target: the decoder reads them."""
        count = count_target_vocabulary(self.model) if is_target else count_vocabulary(self.model)
        if count is not None and (largest := max(ids, default=0)) >= count:
            what = f"the tokenizer has token {largest}, but the model only {count} tokens"
            raise DataError(what, fix="put each model's own tokenizer into its folder")

    def check_length(self, inputs: Batch) -> None:
        """Raise BadRowError for a recording that is too short for the model."""
        sound = inputs.get(self.main_input)
        if sound is None or not sound.is_floating_point():
            return
        # a model that reads samples [1, samples] makes frames of them, and has no layer for none
        count_frames = getattr(self.model, "_get_feat_extract_output_lengths", None) if sound.dim() == 2 else None
        # of which SEW joins some
        fewest = getattr(self.model.config, "squeeze_factor", 1)
        if not sound.numel() or (count_frames and count_frames(torch.tensor(sound.shape[1])) < fewest):
            raise BadRowError("the recording is too short for the model", "take out these rows, or give other data")

    def preprocess(self, main: str, call: Callable[[], Mapping[str, Any]]) -> Batch:
        """Call a preprocessor for one example, and return the tensors that the model takes, floating-point ones as
        float32. Raises BadRowError if the preprocessor fails, or makes no tensor `main`."""
        try:
            output = call()
        except Exception as error:  # what its files say may make a processor raise anything
            fix = "compare the expert's preprocessor_config.json with the data, or fix these rows"
            raise BadRowError(f"it cannot be processed ({exception_text(error)})", fix) from error
        made = {name: x for name, x in output.items() if name in self.names | {main} and isinstance(x, Tensor)}
        if main not in made:
            raise BadRowError(f"processing makes no tensor {main} of it")
        return {name: x.float() if x.is_floating_point() else x for name, x in made.items()}


@dataclass(frozen=True)
class Reader(ABC):
    """Turns rows into examples, each on its own, so that no example depends on its neighbours."""

    chosen: str
    """A note that says which columns and preprocessing were chosen."""
    target: Target

    @property
    def padding(self) -> int:
        """The token id that pads texts in batches."""
        return padding_id(self.target.model)

    def count_tokens(self, _: Example) -> int:
        """Return the number of tokens of an example that is a text; 0 for any other."""
        return 0

    @abstractmethod
    def read(self, row: Any) -> Example:
        """Turn a row into an example. Raises BadRowError."""
