"""Which column of a row plays which role: the recipe says so, or names and values tell."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeGuard

from featcal_cli.data.cells import AUDIO_FILES, IMAGE_FILES, is_base64
from featcal_cli.recipe.schema import ROLES, Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain, quoted

Samples = Mapping[str, Sequence[Any]]
"""Column → its values in the first rows."""
TextKind = Literal["encoder", "causal", "encoder-decoder"]

IMAGE_NAMES = ("image", "img", "images", "picture", "photo", "jpg", "png", "file_name")
ARRAY_NAMES = (*IMAGE_NAMES, "pixels", "array", "pixel_values")
"""Columns whose nested lists of numbers may be pictures."""
AUDIO_NAMES = ("audio", "speech", "sound", "recording", "wav", "flac", "mp3", "file", "path", "file_name")
TRANSCRIPT_NAMES = ("text", "sentence", "transcription", "transcript", "normalized_text", "raw_text")
"""Columns of what is said in a recording."""
CAPTION_NAMES = (
    "caption", "captions", "text", "sentence", "alt_text", "description", "question", "query", "prompt", "instruction",
    "messages", "conversations", "conversation",
)  # fmt: skip
"""Columns of what is said about an image."""
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat")
PROMPT_RESPONSE_NAMES = (
    ("instruction", "output"), ("query", "response"), ("instruction", "response"), ("inputs", "targets"),
    ("prompt", "response"), ("prompt", "completion"), ("question", "response"), ("problem", "response"),
    ("problem", "generated_solution"), ("question", "generated_solution"), ("problem", "solution"),
    ("question", "solution"), ("prompt", "solution"), ("instruction", "solution"),
    ("question", "answer"), ("problem", "answer"), ("query", "answer"), ("prompt", "answer"), ("instruction", "answer"),
    ("question", "answers"), ("query", "answers"), ("prompt", "output"), ("instruction", "completion"),
    ("prompt", "chosen"), ("question", "chosen"), ("instruction", "chosen"), ("input", "chosen"),
    ("prompt", "canonical_solution"), ("prompt", "code"), ("text", "code"), ("instruction", "code"),
    ("question", "code"), ("question", "solutions"), ("sql_prompt", "sql"), ("question", "sql"), ("question", "query"),
    ("intent", "snippet"), ("question", "rationale"), ("question", "correct_answer"), ("question_title", "best_answer"),
    ("inputs_pretokenized", "targets_pretokenized"), ("message_1", "message_2"), ("user", "assistant"),
    ("human", "assistant"), ("prompt", "target"),
)  # fmt: skip
SOURCE_TARGET_NAMES = (
    ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"), ("article", "summary"),
    ("article", "abstract"), ("description", "abstract"), ("text", "summary"), ("source", "target"), ("src", "tgt"),
    ("input", "output"), ("input", "target"), ("input_text", "target_text"), ("text", "target"), ("input", "response"),
    ("input", "answer"),
)  # fmt: skip
ABOUT_NAMES = {
    "instruction": ("input", "context"), "question": ("context",), "query": ("context",), "prompt": ("context",),
}  # fmt: skip
"""Columns that hold what a prompt is about, where there is something."""
TEXT_PAIR_NAMES = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("question", "passage"), ("question", "context"), ("query", "passage"), ("text1", "text2"), ("text_a", "text_b"),
    ("sentence_a", "sentence_b"), ("sent1", "sent2"), ("query", "document"),
)  # fmt: skip
TEXT_NAMES = (
    "text", "sentence", "content", "review", "document", "article", "body", "tweet", "comment", "utterance",
    "prompt", "instruction", "question", "query", "chosen", "problem",
)  # fmt: skip
WORDS_NAMES = ("tokens", "words")
ANSWER_NAMES = tuple(dict.fromkeys(name for _, name in PROMPT_RESPONSE_NAMES + SOURCE_TARGET_NAMES))
QUESTION_NAMES = ("prompt", "instruction", "question", "query", "problem")
NO_ANSWERS = ("rejected", "system", "system_prompt", "title", "source", "context")

LABEL_NAMES = ("label", "labels", "class", "cls", "target")

LOOKED_AT_CHARACTERS = 1000
"""Characters of a text that tell whether it is one."""


def check_columns(data: Data, columns: Iterable[str], where: str) -> None:
    """Raise DataError for a role, a column or a template field that there is not."""
    for role, column in data.columns.items():
        if role not in ROLES:
            raise DataError(f"there is no role {role}", where=where, fix=f"use one of: {', '.join(ROLES)}")
        if column not in columns:
            raise DataError(f"there is no column {column}", where=where, fix=f"use one of: {list_some(columns)}")
    try:
        missing = [name for name in template_fields(data.template or "") if name not in columns]
    except ValueError as error:
        what = f"the template is broken: {error}"
        raise DataError(what, where=where, fix="write e.g. {premise} {hypothesis}") from None
    if missing:
        what = f"the template names a column that there is not: {{{missing[0]}}}"
        raise DataError(what, where=where, fix=f"use: {list_some(columns)}")


def template_fields(template: str) -> list[str]:
    """The columns that a template names. Raises ValueError for a broken one, and for one that asks for more than values
    of columns: it may be that of a recipe that somebody else wrote."""
    names = []
    for _, name, form, _ in string.Formatter().parse(template):
        if re.search(r"[.\[]_", name or ""):
            raise ValueError(f"{{{name}}} names what is no value of a column")
        if re.search(r"[0-9]{4}|[{}]", form or ""):
            raise ValueError(f"{{{name}:{form}}} may be of any length")
        if name is not None:
            names.append(name.replace("[", ".").split(".")[0])
    return names


def needed_columns(data: Data) -> set[str] | None:
    """The columns that a task's examples are made of; None where they have yet to be found among all there are."""
    if data.template is None and not {"image", "audio", "text", "prompt", "messages"} & data.columns.keys():
        return None
    try:
        return {*data.columns.values(), *template_fields(data.template or "")} | set(_given_about(data))
    except ValueError:  # a broken template, which `check_columns` explains
        return None


def _given_about(data: Data) -> Sequence[str]:
    """Columns that may lie beside the prompt that the user named, in datasets of instructions."""
    return ABOUT_NAMES["instruction"] if data.columns.get("prompt") == "instruction" else ()


def find_about(data: Data, roles: Mapping[str, str], columns: Iterable[str]) -> list[str]:
    prompt = roles.get("prompt", "")
    names = _given_about(data) if "prompt" in data.columns else ABOUT_NAMES.get(_bare_name(prompt), ())
    return [column for column in columns if _bare_name(column) in names and column not in roles.values()]


def name_columns(where: str, roles: str) -> str:
    """The option to type to name columns, for a task that `where` begins with."""
    return f"--columns {where.partition(': ')[0]}={roles} (in a recipe, columns: {{{roles.replace(':', ': ')}}})"


def no_column(what: str, roles: str, columns: Iterable[str], where: str) -> DataError:
    """The error that says which columns there are and how to name one."""
    what = f"no column holds {what}; the columns are {list_some(columns)}"
    return DataError(what, where=where, fix=f"name it: {name_columns(where, roles)}")


def find_image_column(samples: Samples, where: str) -> str:
    """A column called like images, else the first that looks like some. Raises DataError for none."""
    likely = find_encoded_images(samples)
    likely = likely or [name for name in ARRAY_NAMES if any(map(is_array, samples.get(name, ())))]
    if not likely:
        raise no_column("images", "image:COLUMN", samples, where)
    return next((name for name in IMAGE_NAMES if name in likely), likely[0])


def find_audio_column(samples: Samples, where: str) -> str:
    """A column called like recordings, else the first that looks like some. Raises DataError for none."""
    likely = [name for name, values in samples.items() if any(map(_looks_like_audio, values))]
    if not likely:
        raise no_column("recordings", "audio:COLUMN", samples, where)
    return next((name for name in AUDIO_NAMES if name in likely), likely[0])


def _looks_like_audio(value: Any) -> bool:
    match value:
        case dict():
            return bool(value) and (value.keys() <= {"bytes", "path"} or {"array", "sampling_rate"} <= value.keys())
        case str():
            return value.lower().endswith(AUDIO_FILES)
    return isinstance(value, bytes)


def find_encoded_images(samples: Samples) -> list[str]:
    """The columns whose values look like images: encoded, or the names of files."""
    return [name for name, values in samples.items() if any(map(_looks_like_image, values))]


def _looks_like_image(value: Any) -> bool:
    match value:
        case dict():
            return bool(value) and value.keys() <= {"bytes", "path"}
        case [first, *_]:
            return _looks_like_image(first)
        case str():
            return is_base64(value) or value.lower().endswith(IMAGE_FILES)
    return isinstance(value, bytes)


def is_array(value: Any) -> bool:
    """Whether a value may be a picture as nested lists of numbers."""
    for _ in range(2):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)


def names_text(columns: Collection[str]) -> bool:
    """Whether a user's roles name a text."""
    return bool({"text", "prompt", "messages"} & set(columns))


def choose_text_roles(data: Data, samples: Samples, kind: TextKind, *, chat: bool, where: str) -> dict[str, str]:
    """Role → column: the user's where they name a text, else found. `chat`: whether the tokenizer has a chat template.
    Raises DataError when no column holds text."""
    given = dict(data.columns)
    if data.template is not None or names_text(given):
        return given
    return _find_text_columns(samples, kind, chat, where) | given


def _find_text_columns(samples: Samples, kind: TextKind, chat: bool, where: str) -> dict[str, str]:
    names = {_bare_name(name): name for name in reversed(list(samples))}  # of names that differ in case the first
    texts = {name for name, column in names.items() if any(isinstance(value, str) for value in samples[column])}
    talks = {name for name, column in names.items() if any(map(is_conversation, samples[column]))}
    answers = {name for name, column in names.items() if any(map(answer_of, samples[column]))}
    messages = [{"messages": names[name]} for name in MESSAGES_NAMES if name in talks]
    if messages and kind == "causal" and (chat or "text" not in texts):
        return messages[0]
    if kind != "encoder":
        for prompt, response in PROMPT_RESPONSE_NAMES + SOURCE_TARGET_NAMES:
            if prompt in texts | talks and response in answers | talks:
                return {"prompt": names[prompt], "response": names[response]}
        for name in ("prompt", "chosen"):
            if name in talks and kind == "causal":
                return {"messages": names[name]}
    for first, second in TEXT_PAIR_NAMES:
        if first in texts and second in texts:
            return {"text": names[first], "text_pair": names[second]}
    single = [names[name] for name in TEXT_NAMES if name in texts]
    single += [column for column in samples if _looks_natural(samples[column])]
    single += [names[name] for name in WORDS_NAMES if name in answers]
    if single:
        return {"text": single[0]}
    if further := messages + [{"messages": names[name]} for name in names if name in talks]:
        return further[0]
    cells = ((name, value) for name, values in samples.items() for value in values if isinstance(value, dict))
    texts_inside = (f"{{{name}[{key}]}}" for name, value in cells for key, text in value.items() if _is_text(text))
    if inner := next(texts_inside, None):  # as a template names it
        what = f"no column holds text, but {inner} does; the columns are {list_some(samples)}"
        raise DataError(what, where=where, fix=f'write in a recipe, for example, template: "{inner}"')
    raise no_column("text", "text:COLUMN", samples, where)


def find_unused_answer(samples: Samples, roles: Mapping[str, str], data: Data) -> str | None:
    """A column that may hold the answers, by its name or as further text beside a question, where no answer is read."""
    if {"response", "messages"} & roles.keys():
        return None
    used = {*roles.values(), *template_fields(data.template or "")}
    further = [name for name in samples if name not in used and any(map(answer_of, samples[name]))]
    likely = [name for name in further if _bare_name(name) in ANSWER_NAMES]
    text = _bare_name(roles.get("text", ""))
    asks = "text_pair" not in roles and (text in QUESTION_NAMES or text not in TEXT_NAMES)
    if asks and not data.columns and not data.template:
        likely += [name for name in further if _bare_name(name) not in NO_ANSWERS and _looks_natural(samples[name])]
    return likely[0] if likely else None


def answer_of(value: Any) -> str | None:
    """The text of an answer: a text, the first of several, or that of {text: …} and {value: …}; None for no text."""
    if isinstance(value, Mapping):
        value = value.get("text") or value.get("value")
    if isinstance(value, list) and value:
        value = value[0]
    return value if _is_text(value) else None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _bare_name(column: str) -> str:
    """A column's name without what people spell differently."""
    return column.strip().lower().replace(" ", "_").replace("-", "_")


def is_conversation(value: Any) -> bool:
    """True for a list of messages, or lists of what each has: {role: […], content: […]}."""
    if isinstance(value, dict):
        kinds = value.keys() & {"role", "from"}, value.keys() & {"content", "value"}
        return all(kinds) and all(isinstance(value[name], list) for name in set().union(*kinds))
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _looks_natural(values: Sequence[Any]) -> bool:
    """True when most of the values are several words, unlike ids, paths and class names."""
    texts = [value[:LOOKED_AT_CHARACTERS] for value in values if _is_text(value)]
    return sum(len(text.split()) > 1 for text in texts) * 2 > len(texts)


def find_label_column(data: Data, columns: Collection[str], where: str) -> str:
    """The column of the labels: the one that the recipe names, else one that is called so. Raises DataError."""
    if column := data.columns.get("label") or next((name for name in LABEL_NAMES if name in columns), None):
        return column
    raise no_column("labels", "label:COLUMN", columns, where)


def number_label(value: Any, column: str, numbers: Mapping[str, int], where: str) -> int:
    """The class number of a label that is one, or a name in `numbers`. Raises DataError, also for a hidden one (−1)."""
    if isinstance(value, str) and value in numbers:
        return int(numbers[value])
    with suppress(TypeError, ValueError, OverflowError):  # no number at all
        if int(value) == float(value):
            if int(value) < 0:
                what = "the split hides its labels (some are below 0)"
                raise DataError(what, where=where, fix="evaluate another split")
            return int(value)
    what = (
        f"label {quoted(value) if isinstance(value, str) else plain(str(value))} in column {plain(column)} is no class"
    )
    what += " of the model's"
    raise DataError(what, where=where, fix="use class numbers, or the names in label2id of the model's config.json")
