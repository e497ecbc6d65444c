"""Rows of an image and a text, for models that read both: two towers, and models that answer about an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from featcal_cli.data.batches import (
    BadRowError,
    Batch,
    Reader,
    count_vocabulary,
    load_processor,
    pad_on_the_right,
)
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import CAPTION_NAMES, Samples, choose_text_roles, find_about, is_conversation, names_text
from featcal_cli.data.images import EncodedImage, ImageReader, open_images
from featcal_cli.data.preprocessing import Target
from featcal_cli.data.text import MAX_TOKENS, Message, RowFormatter, TextReader, describe_roles, open_text
from featcal_cli.data.vocabulary import TextTokens
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

MARK = "<image>"
"""Placeholder that datasets write into a text at the place of its image."""


@dataclass(frozen=True)
class PairReader(Reader):
    """An image and a text, each through its own preprocessor; an item is a pair of their readers' items."""

    images: ImageReader
    texts: TextReader

    def read(self, row: Row) -> tuple[EncodedImage, Any]:
        return self.images.read(row), self.texts.read(row)

    def key(self, item: tuple[EncodedImage, Any]) -> bytes:
        return self.images.key(item[0]) + self.texts.key(item[1])

    def batch(self, items: Sequence[tuple[EncodedImage, Any]]) -> Batch:
        """pixel_values [examples, …] and input_ids, attention_mask [examples, tokens]."""
        images, texts = zip(*items, strict=True)
        return self.images.batch(images) | self.texts.batch(texts)

    def remarks(self, items: Sequence[tuple[EncodedImage, Any]]) -> Sequence[str]:
        return self.texts.remarks([text for _, text in items])

    def unpadded_length(self, item: tuple[EncodedImage, Any]) -> int | None:
        return self.texts.unpadded_length(item[1])

    def longest(self, items: Sequence[tuple[EncodedImage, Any]]) -> Sequence[tuple[EncodedImage, Any]]:
        image = items[0][0]
        return [(image, text) for text in self.texts.longest([text for _, text in items])]


@dataclass(frozen=True)
class DialogueReader(Reader):
    """An image and what is said about it, through the processor of a model that writes; an item is the image, still
    encoded, and the whole text."""

    images: ImageReader
    formatter: RowFormatter
    processor: Any
    tokens: TextTokens
    target: Target

    def read(self, row: Row) -> tuple[EncodedImage, str]:
        text = self.formatter.compose(row).text
        token = str(self.processor.image_token)
        text = text if token in text else f"{token}\n{text.replace(MARK, '').strip()}"
        if text.count(token) > 1:
            raise BadRowError(f"its text speaks of {text.count(token)} images, and one is read of a row")
        text = self._shorten(text)
        if self.tokens.others:
            self.tokens.check(self.processor.tokenizer(text)["input_ids"], [text], MAX_TOKENS)
        return self.images.read(row), text

    def key(self, item: tuple[EncodedImage, str]) -> bytes:
        return self.images.key(item[0]) + item[1].encode()

    def longest(self, items: Sequence[tuple[EncodedImage, str]]) -> Sequence[tuple[EncodedImage, str]]:
        return [max(items, key=lambda item: len(item[1]))]

    def batch(self, items: Sequence[tuple[EncodedImage, str]]) -> Batch:
        """input_ids, attention_mask [examples, tokens], pixel_values and what else of the output the model takes."""
        images, texts = zip(*items, strict=True)
        pictures = [self.images.picture(image) for image in images]
        process = partial(self.processor, images=pictures, text=list(texts), padding=True, return_tensors="pt")
        batch = self.target.preprocess("rows", process, len(items), "input_ids")
        batch = self.tokens.renumber(batch)
        uneven = [name for name, x in batch.items() if len(x) % len(items)]
        uneven += [name for name, x in batch.items() if name.endswith("_thw") and not (x == x[0]).all()]
        if uneven:
            what = f"images of different sizes do not make one batch of {uneven[0]}"
            raise DataError(what, where=self.target.where, fix="--batch-size 1")
        vocabulary, largest = count_vocabulary(self.target.model), int(batch["input_ids"].max())
        if vocabulary is not None and largest >= vocabulary:
            what = f"the processor has token {largest}, but the model only {vocabulary} tokens"
            raise DataError(what, where=self.target.where, fix="put the merged model's own processor files beside it")
        return pad_on_the_right(batch)

    def _shorten(self, text: str) -> str:
        """The text up to its MAX_TOKENS-th token."""
        tokenizer = self.processor.tokenizer
        if not tokenizer.is_fast:
            return text[: MAX_TOKENS * 4]
        ends = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=MAX_TOKENS)["offset_mapping"]
        return text[: max((stop for _, stop in ends), default=0)] if len(ends) >= MAX_TOKENS else text


@dataclass(frozen=True)
class _Turns:
    """A processor's chat template, as RowFormatter uses a tokenizer's: the image stands before the first question."""

    processor: Any

    @property
    def chat_template(self) -> str | None:
        template: str | None = self.processor.chat_template
        return template

    def apply_chat_template(self, messages: Sequence[Message], *, tokenize: bool) -> str:
        asked = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
        turns = []
        for number, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content.replace(MARK, "").strip()}]
            parts = [part for part in content if part.get("type") != "image"]
            turns.append({**message, "content": [{"type": "image"}, *parts] if number == asked else parts})
        return str(self.processor.apply_chat_template(turns, tokenize=tokenize))


def reads_pairs(data: Data, samples: Samples) -> bool:
    """Whether rows with images hold texts about them: the user names one, or a column is called like one."""
    if data.template is not None or names_text(data.columns):
        return True
    texts = {name.lower(): values for name, values in samples.items()}
    return not data.columns and any(
        isinstance(value, str) or is_conversation(value) for name in CAPTION_NAMES for value in texts.get(name, ())
    )


def open_pairs(data: Data, samples: Samples, target: Target) -> PairReader:
    """The reader of rows for two towers. Raises DataError like those of images and of texts."""
    images = open_images(data, samples, target)
    texts = open_text(data, _without(samples, images.column), target)
    return PairReader(f"{images.chosen}; {texts.chosen}", images, texts)


def open_dialogues(data: Data, samples: Samples, target: Target) -> DialogueReader:
    """The reader of rows for a causal model that answers about an image. Raises DataError when a column lacks, or no
    folder has a processor."""
    processor, source = load_processor(target.folders, target.where)
    images = open_images(data, samples, target, processor=(processor.image_processor, source))
    others = _without(samples, images.column)
    roles = choose_text_roles(data, others, "causal", chat=bool(processor.chat_template), where=target.where)
    about = find_about(data, roles, others) if data.template is None else []
    formatter = RowFormatter(roles, about, data.template, "causal", _Turns(processor))
    chosen = f"{images.chosen}; {describe_roles(formatter, data, others, target.where)}, processor from {source}"
    return DialogueReader(chosen, images, formatter, processor, target.tokens_of(processor, source), target)


def _without(samples: Samples, column: str) -> Mapping[str, Sequence[Any]]:
    return {name: values for name, values in samples.items() if name != column}
