"""Vocabularies compared token by token: an id means nothing in another model, so each gets its own of the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal_cli.data.batches import Batch
from featcal_cli.data.loading import Folders, load_tokenizer
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain

TOKEN_IDS = ("input_ids", "decoder_input_ids")
"""Forward arguments that hold ids of tokens."""
SHOWN = 3
"""Tokens that a message shows of a text, or of a list of tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer, and the id of each of its tokens, added and special ones included."""

    role: str
    """The model's part in the job, such as `merged` or `expert red`."""
    name: str
    """The repo or folder that the tokenizer is from."""
    tokenizer: Any
    ids: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.role} ({plain(self.name)})" if self.role else plain(self.name)

    @property
    def padding(self) -> int:
        """The id that becomes of tokens that another vocabulary lacks."""
        tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in tokens if token is not None), 0)

    def spell(self, ids: Iterable[int]) -> list[str]:
        """The tokens with these ids."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def cut(self, text: str) -> list[str]:
        """A text's tokens, without those that the tokenizer puts around it."""
        return self.spell(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def map_ids(source: Vocabulary, target: Vocabulary) -> Tensor | None:
    """The id that each token of `source` has in `target` [ids of source]; None where all ids are the same ones.

    Padding becomes padding. A token that target lacks becomes its padding, too: whoever uses the map checks that no
    such token is read. An id that is no token's stays as it is.
    """
    if source.ids == target.ids:
        return None
    table = torch.arange(max(source.ids.values(), default=0) + 1)
    for token, number in source.ids.items():
        table[number] = target.ids.get(token, target.padding)
    return table


def renumber(batch: Batch, table: Tensor | None) -> Batch:
    """The batch with each id replaced by the one that the table has for it; without a table the batch itself."""
    if table is None:
        return batch
    own = table.to(next(iter(batch.values())).device)

    def look_up(ids: Tensor) -> Tensor:
        return torch.where(ids < len(own), own[ids.clamp(max=len(own) - 1)], ids)

    return batch | {name: look_up(batch[name]) for name in TOKEN_IDS if name in batch}


@dataclass
class Vocabularies:
    """The vocabularies of a job's models, each read when it is first asked for."""

    folders: Mapping[str, Sequence[Path]]
    """Folders in which the tokenizer of each model may lie, by role."""
    _found: dict[str, Vocabulary | None] = field(default_factory=dict)

    def find(self, role: str) -> Vocabulary | None:
        """The vocabulary of a model; None where it has no tokenizer that can be loaded."""
        if role not in self._found:
            try:
                tokenizer, name = load_tokenizer(self.folders.get(role, ()), "")
                self._found[role] = Vocabulary(role, name, tokenizer, tokenizer.get_vocab())
            except DataError:
                self._found[role] = None
        return self._found[role]


@dataclass(frozen=True)
class TextModels:
    """The models that read a task's texts together, and whose tokenizer cuts them."""

    vocabularies: Vocabularies
    expert: str
    """The role whose tokenizer cuts the texts, if it has one."""
    readers: Sequence[str]
    """Roles of the other models that read the texts; their tokenizers have to cut them into the same tokens."""
    target: str = ""
    """The reader whose ids the batches hold; without one they hold the expert's."""

    def relate(self, cutting: Vocabulary, where: str) -> TextTokens:
        """The tokens that the tokenizer of `cutting` makes, for these models."""
        found = map(self.vocabularies.find, (self.expert, *self.readers))
        others = [other for other in found if other is not None and other.ids != cutting.ids]
        target = self.vocabularies.find(self.target) if self.target else None
        table = None if target is None else map_ids(cutting, target)
        if cutting.role != self.expert:
            return TextTokens(cutting, others, table, f"{cutting}, as its expert has none", where)
        if target is None:
            source = f"its expert, as {self.target} has none" if self.target else "its expert"
            return TextTokens(cutting, others, table, source, where)
        text = f"{self.target} has the same vocabulary"
        if table is not None:
            text = f"{self.target} has another vocabulary: ids are mapped by token"
        around = [vocabulary.spell(vocabulary.tokenizer("")["input_ids"]) for vocabulary in (target, cutting)]
        if around[0] != around[1]:
            text += f"; {self.target} puts other special tokens around a text: the expert's are used"
        return TextTokens(cutting, others, table, f"its expert ({text})", where)


def open_tokens(models: TextModels | None, folders: Folders, where: str) -> TextTokens:
    """The tokens of texts that these models read, cut by the expert's tokenizer, or that of the first reader that has
    one, or what `folders` hold; without models, of one model whose tokenizer lies in `folders`. Raises DataError where
    none can be loaded."""
    if models is not None:
        for role in (models.expert, *models.readers):
            if (cutting := models.vocabularies.find(role)) is not None:
                return models.relate(cutting, where)
    tokenizer, name = load_tokenizer(folders, where)
    cutting = Vocabulary("", name, tokenizer, tokenizer.get_vocab())
    return TextTokens(cutting, source=name, where=where) if models is None else models.relate(cutting, where)


@dataclass(frozen=True)
class TextTokens:
    """The tokens that texts are cut into, and their ids in the vocabulary of the model that batches are made for."""

    cutting: Vocabulary
    others: Sequence[Vocabulary] = ()
    """Vocabularies of further models that read the texts, as far as they differ."""
    table: Tensor | None = None
    """From the ids of `cutting` to those of the batches; None where they are the same."""
    source: str = ""
    """Whose tokenizer it is, in words."""
    where: str = ""

    def number(self, ids: Sequence[int]) -> list[int]:
        """The ids that batches hold for these ids of `cutting`."""
        return list(ids) if self.table is None else self.table[list(ids)].tolist()

    def check(self, ids: Iterable[int], texts: Iterable[str], most: int, side: str = "right") -> None:
        """Raise DataError where another model's tokenizer cuts the texts otherwise, or lacks one of the tokens `ids`,
        which the tokenizer has made of them. Only `most` tokens of a text are compared; what is beyond them, on the
        `side` where texts are cut off, is not read."""
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
        return DataError(f"the tokenizers of {self.cutting} and {other} {what}", where=self.where, fix=fix)


def _show_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """Some tokens of two lists, from where they begin to differ."""
    place = next(number for number, (x, y) in enumerate(zip_longest(one, other)) if x != y)
    shown = (" ".join(plain(token) for token in tokens[place : place + SHOWN]) or "nothing" for tokens in (one, other))
    return " against ".join(shown)
