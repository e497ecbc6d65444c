"""Which column of a row plays which role: the recipe says so, or names and values tell."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from featcal_cli.errors import DataError
from featcal_cli.pixels import is_array
from featcal_cli.recipe import Data
from featcal_cli.tables import IMAGE_FILES, is_base64

Samples = Mapping[str, Sequence[Any]]
"""Column → its values in the first rows."""
TextKind = Literal["encoder", "causal", "encoder-decoder"]
"""How a model uses text."""

ROLES = ("image", "text", "text_pair", "messages", "prompt", "response", "label")
IMAGE_NAMES = ("image", "img", "images", "picture", "photo", "jpg", "png", "file_name")
ARRAY_NAMES = (*IMAGE_NAMES, "pixels", "array", "pixel_values")
"""Columns whose nested lists of numbers may be pictures."""
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat")
PROMPT_RESPONSE_NAMES = (
    ("instruction", "output"), ("query", "response"), ("instruction", "response"), ("inputs", "targets"),
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"),
)  # fmt: skip
SOURCE_TARGET_NAMES = (
    ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"), ("article", "summary"),
    ("text", "summary"), ("source", "target"), ("input", "output"), ("input", "target"),
)  # fmt: skip
"""Further pairs that only encoder-decoder models read as source and target."""
TEXT_PAIR_NAMES = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("question", "passage"), ("question", "context"), ("query", "passage"), ("text1", "text2"), ("text_a", "text_b"),
)  # fmt: skip
TEXT_NAMES = (
    "text", "sentence", "content", "review", "document", "article", "body", "tweet", "comment", "utterance",
    "prompt", "instruction", "question", "query",
)  # fmt: skip

LOOKED_AT = 1000
"""Characters of a text that tell whether it is one."""


def check_columns(data: Data, columns: Iterable[str], where: str) -> None:
    """Raise DataError for a role, a column or a template field that there is not."""
    for role, column in data.columns.items():
        if role not in ROLES:
            raise DataError(f"there is no role {role}", where=where, fix=f"use one of: {', '.join(ROLES)}")
        if column not in columns:
            raise DataError(f"there is no column {column}", where=where, fix=f"use one of: {', '.join(columns)}")
    try:
        fields = template_fields(data.template or "")
    except ValueError as error:
        raise DataError(
            f"the template is broken: {error}", where=where, fix="write e.g. {premise} {hypothesis}"
        ) from None
    for name in fields:
        if name not in columns:
            raise DataError(
                f"the template names a column that there is not: {{{name}}}",
                where=where,
                fix=f"use: {', '.join(columns)}",
            )


def template_fields(template: str) -> list[str]:
    """The columns that a template names. Raises ValueError for a broken one, and for one that asks for more than values
    of columns: it may be that of a recipe that somebody else wrote."""
    names = []
    for _, name, form, _ in string.Formatter().parse(template):
        if re.search(r"[.\[]_", name or ""):
            raise ValueError(f"{{{name}}} names what is no value of a column")
        if re.search(r"[0-9]{4}|[{}]", form or ""):
            raise ValueError(f"{{{name}:{form}}} may be of any length")
        names += [name] if name is not None else []
    return [name.replace("[", ".").split(".")[0] for name in names]


def needed_columns(data: Data) -> set[str] | None:
    """The columns that a task's examples are made of; None where they have yet to be found among all there are."""
    if data.template is None and not {"image", "text", "prompt", "messages"} & data.columns.keys():
        return None
    try:
        named = {*data.columns.values(), *template_fields(data.template or "")}
    except ValueError:  # a broken template, which `check_columns` explains
        return None
    return named | ({"input"} if "instruction" in named else set())


def no_column(what: str, roles: str, columns: Iterable[str], where: str) -> DataError:
    """The error that says which columns there are and how to name one."""
    return DataError(
        f"no column holds {what}; the columns are {', '.join(columns)}",
        where=where,
        fix=f"name it with columns: {{{roles}}}",
    )


def find_image_column(samples: Samples, where: str) -> str:
    """A column called like images, else the first that looks like some. Raises DataError for none."""
    likely = [name for name, values in samples.items() if any(map(_looks_like_image, values))]
    likely = likely or [name for name in ARRAY_NAMES if any(map(is_array, samples.get(name, ())))]
    by_name = [name for name in IMAGE_NAMES if name in likely]
    if not likely:
        raise no_column("images", "image: COLUMN", samples, where)
    return (by_name or likely)[0]


def has_image_column(samples: Samples) -> bool:
    """True when the values of some column look like images."""
    return any(_looks_like_image(value) for values in samples.values() for value in values)


def _looks_like_image(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and value.keys() <= {"bytes", "path"}
    if isinstance(value, list) and value:
        return _looks_like_image(value[0])
    return isinstance(value, bytes) or (
        isinstance(value, str) and (is_base64(value) or value.lower().endswith(IMAGE_FILES))
    )


def choose_text_roles(data: Data, samples: Samples, kind: TextKind, *, chat: bool, where: str) -> dict[str, str]:
    """Role → column: the user's where they name a text, else found. Raises DataError when they do not fit the model."""
    given = dict(data.columns)
    if "messages" in given and (kind != "causal" or not chat):
        why = "the tokenizer has no chat template" if kind == "causal" else "the model is no causal language model"
        raise DataError(f"messages cannot be read: {why}", where=where, fix="name a text column, or write a template")
    if data.template is None and not {"text", "prompt", "messages"} & given.keys():
        return _find_text_columns(samples, kind, chat=chat, where=where) | given
    return given


def _find_text_columns(samples: Samples, kind: TextKind, *, chat: bool, where: str) -> dict[str, str]:
    """Role → column. Raises DataError when no column holds text."""
    texts = [name for name, values in samples.items() if any(isinstance(value, str) for value in values)]
    if kind == "causal" and chat:
        for name in MESSAGES_NAMES:
            if any(isinstance(value, list) for value in samples.get(name, ())):
                return {"messages": name}
    if kind != "encoder":
        lists = [name for name, values in samples.items() if any(map(is_conversation, values))] if chat else []
        for prompt, response in PROMPT_RESPONSE_NAMES + (SOURCE_TARGET_NAMES if kind == "encoder-decoder" else ()):
            if prompt in texts + lists and response in texts + lists:
                return {"prompt": prompt, "response": response}
        if "prompt" in lists and kind == "causal":
            return {"messages": "prompt"}
    for first, second in TEXT_PAIR_NAMES:
        if first in texts and second in texts:
            return {"text": first, "text_pair": second}
    natural = [name for name in texts if _looks_natural(samples[name])]
    found = [name for name in TEXT_NAMES if name in texts] + natural
    if not found:
        messages = any(name in samples for name in MESSAGES_NAMES) and kind == "causal" and not chat
        hint = " (the tokenizer has no chat template, so messages cannot be read)" if messages else ""
        raise no_column(f"text{hint}", "text: COLUMN", samples, where)
    return {"text": found[0]}


def is_conversation(value: Any) -> bool:
    """True for a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _looks_natural(values: Sequence[Any]) -> bool:
    """True when most of the values are several words, unlike ids, paths and class names."""
    texts = [value[:LOOKED_AT] for value in values if isinstance(value, str) and value.strip()]
    return sum(len(text.split()) > 1 for text in texts) * 2 > len(texts)
