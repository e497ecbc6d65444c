"""Read rows of an image and a text, for models with two towers and for models that answer about an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from featcal_cli.data.batches import BadRowError, Example, padding_id
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import Samples, choose_text_roles, find_about
from featcal_cli.data.images import ImageReader, open_images
from featcal_cli.data.loading import load_preprocessor
from featcal_cli.data.messages import Message
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.data.text import MAX_TOKENS, RowFormatter, TextReader, open_text
from featcal_cli.data.vocabulary import TextTokens, Vocabulary, renumber
from featcal_cli.recipe.schema import Data

MARK = "<image>"
"""Placeholder that datasets write into a text in place of its image."""


@dataclass(frozen=True)
class PairReader(Reader):
    """Turns rows into an image and a text, each processed by its own preprocessor."""

    images: ImageReader
    texts: TextReader

    def read(self, row: Row) -> Example:
        return Example(self.images.read(row).inputs | self.texts.read(row).inputs)

    def unknown_share(self, example: Example) -> float:
        return self.texts.unknown_share(example)


@dataclass(frozen=True)
class DialogueReader(Reader):
    """Turns rows into an image and a text about it, both processed by the processor of a model that generates text."""

    images: ImageReader
    formatter: RowFormatter
    processor: Any
    tokens: TextTokens
    target: Target

    def read(self, row: Row) -> Example:
        text, token = self.formatter.compose(row).text, str(self.processor.image_token)
        text = text if token in text else f"{token}\n{text.replace(MARK, '').strip()}"
        if text.count(token) > 1:
            raise BadRowError(f"its text refers to {text.count(token)} images, and only one per row is read")
        picture = self.images.picture(row)
        process = partial(self.processor, images=[picture], text=[text], return_tensors="pt")
        inputs = self.target.preprocess("input_ids", process)
        ids, image = inputs["input_ids"][0].tolist(), self.processor.tokenizer.convert_tokens_to_ids(token)
        most = MAX_TOKENS + ids.count(image)
        if len(ids) > most:
            per_token = [name for name, x in inputs.items() if x.shape[:2] == inputs["input_ids"].shape]
            inputs |= {name: inputs[name][:, :most] for name in per_token}
            if image in ids[most:]:
                raise BadRowError(f"its image stands behind more than {MAX_TOKENS} tokens")
        if self.tokens.others:
            self.tokens.check(self.processor.tokenizer(text)["input_ids"], [text], MAX_TOKENS)
        inputs = renumber(inputs, self.tokens.table)
        self.target.check_ids(inputs["input_ids"][0].tolist())
        return Example(inputs)


@dataclass(frozen=True)
class _Turns:
    """A processor's chat template, used like a tokenizer's by RowFormatter; the image comes before the first
    question."""

    processor: Any
    chat_template: str | None

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


def open_pairs(data: Data, samples: Samples, target: Target) -> PairReader:
    """Open the reader for a model with two towers. Raises DataError like `open_images` and `open_text`."""
    images = open_images(data, samples, target)
    texts = open_text(data, _without(samples, images.column), target)
    return PairReader(f"{images.chosen}; {texts.chosen}", texts.padding, images, texts)


def open_dialogues(data: Data, samples: Samples, target: Target) -> DialogueReader:
    """Open the reader for a causal model that answers about an image. Raises DataError when a column is missing, or no
    folder has a processor."""
    processor, source = load_preprocessor("processor", target.folders, target.where)
    images = open_images(data, samples, target, processor=(processor.image_processor, source))
    others = _without(samples, images.column)
    roles = choose_text_roles(data, others, "causal", chat=bool(processor.chat_template), where=target.where)
    formatter = RowFormatter(
        roles, find_about(data, roles, others), data.template, "causal", _Turns(processor, processor.chat_template)
    )
    chosen = f"{images.chosen}; {formatter.describe()}, processor from {source}"
    cutting = Vocabulary("processor", source, processor.tokenizer, processor.tokenizer.get_vocab())
    models = target.text_models
    tokens = TextTokens(cutting) if models is None else models.relate(cutting, target.where)
    return DialogueReader(chosen, padding_id(target.model), images, formatter, processor, tokens, target)


def _without(samples: Samples, column: str) -> Mapping[str, Sequence[Any]]:
    return {name: values for name, values in samples.items() if name != column}
