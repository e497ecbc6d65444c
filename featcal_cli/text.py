"""Text rows become token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from featcal_cli.batches import BadRowError, Batch, count_positions, count_vocabulary, decoder_prompt, forward_names
from featcal_cli.columns import (
    Samples,
    TextKind,
    choose_text_roles,
    find_about,
    find_unused_answer,
    is_conversation,
    name_columns,
)
from featcal_cli.delimited import BrokenRow
from featcal_cli.documents import bare
from featcal_cli.errors import DataError
from featcal_cli.hub_data import first_line
from featcal_cli.phrases import Phrasing
from featcal_cli.preprocessors import load_tokenizer
from featcal_cli.recipe import Data
from featcal_cli.tables import Row

MAX_TOKENS = 512
MOST_UNKNOWN, SOME_UNKNOWN = 0.5, 0.1
"""Shares of unknown tokens: with more of them texts and tokenizer do not fit, or that is said."""
LONGEST_TOKEN = 100
"""Characters; what is beyond MAX_TOKENS such tokens is cut off before a tokenizer takes minutes over it."""


@dataclass(frozen=True)
class TextReader:
    """Text through a model's own tokenizer; an item is a row's token ids, not yet padded."""

    chosen: str
    phrasing: Phrasing
    tokenizer: Any
    max_tokens: int
    model: PreTrainedModel
    where: str
    names: set[str]
    """The model's forward arguments."""

    def read(self, row: Row) -> tuple[dict[str, list[int]], list[int]]:
        """The forward arguments of one row, [tokens] each, and the ids of its target. Raises BadRowError when empty."""
        if isinstance(row, BrokenRow):
            raise BadRowError(row.reason)
        phrase = self.phrasing.compose(row)
        text, pair, answer = map(self._shorten, (phrase.text, phrase.pair, phrase.target))
        encoded = self._encode(text, pair, add_special_tokens=not phrase.has_special_tokens)
        target = self._encode(text_target=answer)["input_ids"] if answer is not None else []
        if not encoded["input_ids"] or (phrase.target is not None and not target):
            raise BadRowError("a text has no tokens")
        return encoded, target

    def key(self, item: tuple[dict[str, list[int]], list[int]]) -> bytes:
        """The token ids, as text."""
        return sha256(repr(item).encode()).digest()

    def batch(self, items: Sequence[tuple[dict[str, list[int]], list[int]]]) -> Batch:
        """input_ids, attention_mask, … [examples, tokens], padded to the longest on the tokenizer's own side."""
        found = self.tokenizer.pad([encoded for encoded, _ in items], padding="longest", return_tensors="pt")
        batch = dict(found.items()) | self._decoder_input([target for _, target in items])
        return {name: tensor for name, tensor in batch.items() if name in self.names}

    def remarks(self, items: Sequence[tuple[dict[str, list[int]], list[int]]]) -> list[str]:
        """Unknown tokens, texts that are cut, and texts that are all alike. Raises DataError where most are unknown."""
        texts = [encoded["input_ids"] for encoded, _ in items]
        said = []
        if (share := self._unknown_part([*texts, *(target for _, target in items)])) > MOST_UNKNOWN:
            raise DataError(
                f"{share:.0%} of the tokens are {self.tokenizer.unk_token}: the tokenizer does not know these texts",
                where=self.where,
                fix="give texts of the kind and language that the expert was trained on, or check that its tokenizer is"
                " the model's own",
            )
        if share > SOME_UNKNOWN:
            said.append(f"{share:.0%} of the tokens are unknown to the tokenizer ({self.tokenizer.unk_token})")
        if cut := sum(len(ids) >= self.max_tokens for ids in texts):
            said.append(f"{cut} of {len(texts)} texts fill all {self.max_tokens} tokens: what is beyond is cut off")
        if len(texts) > 1 and all(item == items[0] for item in items):
            said.append(f"all {len(texts)} examples become the same tokens: look whether it is the right column")
        return said

    def _unknown_part(self, texts: Sequence[list[int]]) -> float:
        """The share of tokens that the tokenizer does not know, of those that stand for text."""
        unknown = self.tokenizer.unk_token_id
        others = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        if unknown is None or unknown in others:  # which some tokenizers without an unknown token say
            return 0.0
        around = self.tokenizer("")["input_ids"]  # what stands around any text, special or not
        special = {*self.tokenizer.all_special_ids, *around} - {unknown}
        counted = Counter(token for ids in texts for token in ids if token not in special)
        return counted[unknown] / max(1, counted.total())

    def longest(
        self, items: Sequence[tuple[dict[str, list[int]], list[int]]]
    ) -> Sequence[tuple[dict[str, list[int]], list[int]]]:
        """The longest text, and the one with the longest target."""
        return [max(items, key=lambda item: len(item[0]["input_ids"])), max(items, key=lambda item: len(item[1]))]

    def _shorten(self, text: str | None) -> str | None:
        """The end of a text that the tokenizer keeps, with more characters than any of its tokens could have."""
        most = LONGEST_TOKEN * self.max_tokens
        if text is None or len(text) <= most:
            return text
        return text[-most:] if self.tokenizer.truncation_side == "left" else text[:most]

    def _encode(self, *texts: str | None, **options: Any) -> dict[str, list[int]]:
        try:
            encoded = self.tokenizer(
                *texts, truncation=True, max_length=self.max_tokens, return_attention_mask=True, **options
            )
        except Exception as error:  # what its files say may make a tokenizer raise anything
            raise BadRowError(f"the tokenizer cannot read it ({bare(first_line(error))})") from error
        known = count_vocabulary(self.model)
        if known is not None and max(encoded["input_ids"], default=0) >= known:
            raise DataError(
                f"the tokenizer has token {max(encoded['input_ids'])}, but the model only {known} tokens",
                where=self.where,
                fix="put the merged model's own tokenizer files into the expert's folder, or check the pair",
            )
        return {name: encoded[name] for name in encoded if name in self.names}

    def _decoder_input(self, targets: Sequence[list[int]]) -> Batch:
        if not all(targets):
            return decoder_prompt(self.model, len(targets))
        # The shift to the right that follows must not push padding in front of the first token.
        padded = self.tokenizer.pad(
            {"input_ids": list(targets)}, padding="longest", padding_side="right", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        shift: Any = self.model.prepare_decoder_input_ids_from_labels
        shifted = shift(labels=padded["input_ids"])
        # A decoder token counts when what it is to predict is a token of the target.
        return {"decoder_input_ids": shifted, "decoder_attention_mask": padded["attention_mask"]}


def open_text(data: Data, samples: Samples, model: PreTrainedModel, folders: Sequence[Path], where: str) -> TextReader:
    """The reader of text rows. Raises DataError when no column holds text or no folder has a tokenizer."""
    tokenizer, source = load_tokenizer(folders, where)
    known = count_vocabulary(model)
    if tokenizer.pad_token_id is None or (known is not None and tokenizer.pad_token_id >= known):
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    kind = _text_kind(model)
    roles = choose_text_roles(data, samples, kind, chat=bool(tokenizer.chat_template), where=where)
    limits = (tokenizer.model_max_length, count_positions(model)[0], MAX_TOKENS)
    max_tokens = int(min(limit for limit in limits if isinstance(limit, int | float) and limit >= 1))
    read = [f"column {column} as {role}" for role, column in roles.items() if role not in ("image", "label")]
    about = find_about(data, roles, samples) if data.template is None else []
    phrasing = Phrasing(roles, about, data.template, kind, tokenizer)
    used = f"template {data.template!r}" if data.template else " and ".join(read)
    used += f", with {' and '.join(about)} behind the prompt" if about else ""
    if phrasing.joins_turns and any(is_conversation(value) for name in roles.values() for value in samples[name]):
        why = "the tokenizer has no chat template" if kind == "causal" else f"the model is an {kind}"
        used += f", its turns joined by line breaks as {why}"
    if kind == "encoder-decoder" and not {"response", "messages"} & roles.keys():
        used += ", no target for the decoder"
    if kind != "encoder" and (unused := find_unused_answer(samples, roles, data)):
        asked = roles.get("text", "COLUMN")
        form = name_columns(where, f"prompt:{asked},response:{unused}")
        used += f"; {unused}, which may be the answer, is not read: to have it read, type {form}"
    return TextReader(
        chosen=f"{used} (of {', '.join(samples)}), at most {max_tokens} tokens, tokenizer from {source}",
        phrasing=phrasing,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        model=model,
        where=where,
        names=forward_names(model),
    )


def _text_kind(model: PreTrainedModel) -> TextKind:
    if model.config.is_encoder_decoder:
        # Only a model that answers can take an answer; a classifier reads its text like an encoder.
        return "encoder-decoder" if hasattr(model, "prepare_decoder_input_ids_from_labels") else "encoder"
    # A causal body without a head cannot generate, but its attention says what it is.
    causal = model.can_generate() or any(getattr(module, "is_causal", False) for module in model.modules())
    return "causal" if causal else "encoder"
