"""Compare vocabularies token by token, because a token's id differs between models, and map ids between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal_cli.data.batches import BadRowError, Batch
from featcal_cli.data.loading import Folders, load_preprocessor
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain

TOKEN_IDS = ("input_ids", "decoder_input_ids")
"""Forward arguments that hold token ids."""
SHOWN = 3
"""Tokens that a message shows when it quotes a text or a list of tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer and the id of each token, including added and special ones."""

    role: str
    """The model's part in the job, such as `merged` or `expert red`."""
    name: str
    """The repo or folder that the tokenizer comes from."""
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
        """Return the tokens with these ids."""
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def cut(self, text: str) -> list[str]:
        """Return a text's tokens, without the special tokens that the tokenizer puts around it."""
        return self.spell(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def map_ids(source: Vocabulary, target: Vocabulary) -> Tensor | None:
    """Return a table of the id in `target` of each token id of `source` [ids of source], or None if all ids are equal.

    Padding is mapped to padding. A token that target lacks is mapped to padding, too: the caller must check that no
    such token is read. An id without a token stays as it is.
    """
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

    def look_up(ids: Tensor) -> Tensor:
        return torch.where(ids < len(own), own[ids.clamp(max=len(own) - 1)], ids)

    return batch | {name: look_up(batch[name]) for name in TOKEN_IDS if name in batch}


@dataclass
class Vocabularies:
    """The vocabularies of a job's models; each is loaded when it is first needed."""

    folders: Mapping[str, Sequence[Path]]
    """The folders that are searched for each model's tokenizer, by the model's role."""
    _found: dict[str, Vocabulary | None] = field(default_factory=dict)

    def find(self, role: str) -> Vocabulary | None:
        """Return the vocabulary of a model, or None if it has no tokenizer that can be loaded."""
        if role not in self._found:
            try:
                tokenizer, name = load_preprocessor("tokenizer", self.folders.get(role, ()), "")
                self._found[role] = Vocabulary(role, name, tokenizer, tokenizer.get_vocab())
            except DataError:
                self._found[role] = None
        return self._found[role]


@dataclass(frozen=True)
class TextModels:
    """The models that read a task's texts together, and the expert whose tokenizer cuts them."""

    vocabularies: Vocabularies
    expert: str
    """The role of the model whose tokenizer cuts the texts, if it has one."""
    readers: Sequence[str]
    """Roles of the other models that read the texts; their tokenizers have to cut texts into the same tokens."""
    target: str = ""
    """The role of the reader whose ids the batches hold; if empty, they hold the expert's ids."""

    def relate(self, cutting: Vocabulary, where: str) -> TextTokens:
        """Return the tokens that the tokenizer of `cutting` makes, with the ids that these models need."""
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
        return TextTokens(cutting, others, table, f"its expert ({text})", where)


def open_tokens(models: TextModels | None, folders: Folders, where: str) -> TextTokens:
    """Open the tokenizer for texts that these models read: the expert's, else that of the first reader that has one,
    else one found in `folders`. Without models, the tokenizer in `folders` is used. Raises DataError if none can be
    loaded."""
    if models is not None:
        for role in (models.expert, *models.readers):
            if (cutting := models.vocabularies.find(role)) is not None:
                return models.relate(cutting, where)
    tokenizer, name = load_preprocessor("tokenizer", folders, where)
    cutting = Vocabulary("", name, tokenizer, tokenizer.get_vocab())
    return TextTokens(cutting, source=name, where=where) if models is None else models.relate(cutting, where)


@dataclass(frozen=True)
class TextTokens:
    """The tokenizer that cuts texts into tokens, and the ids of these tokens in the model that batches are made for."""

    cutting: Vocabulary
    others: Sequence[Vocabulary] = ()
    """Vocabularies of other models that read the texts and have different ids."""
    table: Tensor | None = None
    """A table from the ids of `cutting` to those of the batches; None if they are equal."""
    source: str = ""
    """A phrase that says which model the tokenizer belongs to."""
    where: str = ""

    def number(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that batches hold for these ids of `cutting`."""
        return list(ids) if self.table is None else self.table[list(ids)].tolist()

    def encode(
        self, texts: Sequence[str], most: int, *, add_special_tokens: bool = True, is_target: bool = False
    ) -> dict[str, list[int]]:
        """Return the ids that batches hold, and the masks, of a text or a pair, cut at `most` tokens. Raises
        BadRowError if the tokenizer cannot read the text, and DataError like `check`."""
        tokenizer = self.cutting.tokenizer
        given = {"text_target": texts[0]} if is_target else dict(zip(("text", "text_pair"), texts, strict=False))
        options = {"truncation": True, "max_length": most, "return_attention_mask": True}
        try:
            encoded = dict(tokenizer(**given, **options, add_special_tokens=add_special_tokens))
        except Exception as error:  # what its files say may make a tokenizer raise anything
            raise BadRowError(f"the tokenizer cannot read it ({exception_text(error)})") from error
        ids = encoded["input_ids"]
        self.check(ids, texts, most, tokenizer.truncation_side)
        return {**encoded, "input_ids": self.number(ids)}

    def check(self, ids: Iterable[int], texts: Iterable[str], most: int, side: str = "right") -> None:
        """Raise DataError if another model's tokenizer cuts the texts differently, or lacks one of the tokens `ids`
        that the texts were cut into. Only `most` tokens of a text are compared, because the rest, on the `side` where
        texts are cut off, is not read."""
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
    """Return the first few tokens of two lists from where they begin to differ, for a message."""
    place = next(number for number, (x, y) in enumerate(zip_longest(one, other)) if x != y)
    shown = (" ".join(plain(token) for token in tokens[place : place + SHOWN]) or "nothing" for tokens in (one, other))
    return " against ".join(shown)
