"""Turn conversations into messages, and find the column for each role: the recipe names it, or names and values do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeGuard
from urllib.parse import unquote, urlsplit

from featcal_cli.data.files import AUDIO_FILES, IMAGE_FILES, bare_name
from featcal_cli.recipe.data_formats import Row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain, quoted
from featcal_cli.runtime.structured_text import parse_json

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "function_call": "assistant", "system": "system",
    "observation": "tool", "function": "tool",
}  # fmt: skip
"""The speaker's name in chat templates for each name that datasets use."""
EXCHANGES = ("user", "assistant"), ("human", "assistant"), ("input", "output")
"""Keys of items that hold a question and its answer, as the_cauldron's and XTuner's do."""
OTHER_COLUMNS = "name the right columns with --columns TASK=ROLE:COLUMN, fix these rows, or give other data"
LONGEST_CONVERSATION = 1 << 20
"""Most characters of a text that is parsed to see whether it is a conversation: parsed, it takes many times as much."""


class BadRowError(Exception):
    """Raised for a row that cannot become an example; says why, and how to fix rows with this fault."""

    def __init__(self, reason: str, fix: str = OTHER_COLUMNS) -> None:
        super().__init__(reason)
        self.fix = fix


Message = dict[str, Any]
"""One message: its role, its content, and further keys from the dataset."""


def is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def parse_conversation(cell: Any) -> Any:
    """Return the messages of a cell that holds them as a text in JSON, or as `datasets` stores them: a list of such
    texts (its Json), or a mapping of lists (its Sequence). Return any other cell as it is."""
    messages: Any = None
    lists = [*cell.values()] if isinstance(cell, dict) and _is_message(cell) else []
    if lists and all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists):
        messages = [dict(zip(cell, values, strict=True)) for values in zip(*lists, strict=True)]
    is_list = isinstance(cell, list) and all(isinstance(message, str) for message in cell)
    text = f"[{','.join(cell)}]" if is_list else cell
    if isinstance(text, str) and len(text) <= LONGEST_CONVERSATION and text.lstrip().startswith("["):
        with suppress(ValueError):
            messages = parse_json(text)
    return messages if is_conversation(messages) and all(map(_is_message, messages)) else cell


def _is_exchange(value: Mapping[str, Any], keys: Sequence[str]) -> bool:
    # a message of a table has all keys of any
    are_texts = all(isinstance(value.get(key, 0), str | None) for key in keys)
    return are_texts and not (value.get("role") or value.get("from"))


def _is_message(value: Mapping[str, Any]) -> bool:
    # lists of flights, too, go from a place to another, and those of edges have numbers as values
    is_pair = value.keys() >= {"from", "value"} and not isinstance(value["value"], int | float)
    # {input, output} is left out: test cases of programs have these keys, too
    is_pair = is_pair or any(value.keys() >= set(keys) for keys in EXCHANGES[:2])
    return is_pair or ("role" in value and bool(value.keys() & {"content", "tool_calls"}))


def answer_of(value: Any) -> str | None:
    """Return the text of an answer (a text, the first of a list, `text` or `value` of a mapping), or None."""
    if isinstance(value, Mapping):
        value = value.get("text") or value.get("value")
    if isinstance(value, list) and value:
        value = value[0]
    return value if is_text(value) else None


def read_messages(value: Any) -> list[Message]:
    """Return messages as {role, content}. They may come as OpenAI's {role, content}, ShareGPT's {from, value} or
    one of EXCHANGES, beside which there may be a system message. A null content becomes empty, and so does a missing
    one in a message that calls a tool. Raises BadRowError."""
    if not is_conversation(value):
        raise BadRowError("the messages are not a list of messages")
    messages: list[Message] = []
    for asked, answered in EXCHANGES:
        if all(_is_exchange(message, (asked, answered)) for message in value):
            turns = (("system", "system"), ("user", asked), ("assistant", answered))
            said = [(role, message.get(key)) for message in value for role, key in turns]
            value = [{"role": role, "content": text} for role, text in said if role != "system" or is_text(text)]
    for message in value:
        given = {key: value for key, value in message.items() if value is not None}
        role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
        if not isinstance(role, str):
            raise BadRowError("a message has no role")
        if content is None and not message.keys() & {"content", "value"} and not _calls(message):
            raise BadRowError("a message has no content")
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
            content = "\n".join(texts) if texts or not content else content  # images are no text
        named = {"role": SPEAKERS.get(role.lower(), role), "content": "" if content is None else content}
        messages.append({key: kept for key, kept in given.items() if key not in ("from", "value")} | named)
    contents = (message["content"] for message in messages)
    held = [content.strip() if isinstance(content, str) else content for content in contents]
    if not any(held) and not any(map(_calls, messages)):
        raise BadRowError("the messages have no text")
    return messages


def find_images(messages: Sequence[Message]) -> list[Any]:
    """Return the images that stand inside of messages, as the cells of a column have them."""
    found: list[Any] = []
    for message in messages:
        content: Any = message.get("content")
        for part in content if is_conversation(content) else ():
            if str(part.get("type")).startswith("image"):
                image = next((part[key] for key in ("image", "path", "url", "image_url") if part.get(key)), None)
                image = image.get("url", image) if isinstance(image, dict) else image
                if isinstance(image, str):
                    image = {"path": unquote(urlsplit(image).path) if image.startswith("file://") else image}
                found += [image] if image else []
    return found


def read_tools(row: Row) -> list[Message]:
    """Return the tools that a conversation may call, which a column `tools` describes as a list or in JSON."""
    tools = next((value for name, value in row.items() if name.lower() == "tools"), None)
    with suppress(ValueError):
        if isinstance(tools, list):
            tools = [parse_json(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in tools]
        elif isinstance(tools, str):
            tools = parse_json(tools)
    return tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else []


def find_system(columns: Iterable[str]) -> str | None:
    """Return the column with the system message that begins each row's conversation, or None if there is none."""
    return next((name for name in columns if bare_name(name) in ("system", "system_prompt")), None)


def _without_nulls(value: Any) -> Any:
    """Return nested values without the nulls of dicts: where rows differ in their keys, a table has all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_calls(message: Message) -> Message:
    """Return a message with the arguments of its calls of tools as mappings, as chat templates take them. They may be
    texts in JSON, as in OpenAI's API, or hold the nulls of a table."""
    calls = []
    for call in message["tool_calls"] if is_conversation(message.get("tool_calls")) else ():
        function = call.get("function")
        if isinstance(function, dict) and function.get("arguments"):
            arguments = _without_nulls(function["arguments"])
            with suppress(ValueError, TypeError):  # no text, or none in JSON
                arguments = parse_json(arguments)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def join_turns(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation for a chat template that refuses system messages, or two messages in a row by one speaker:
    a system message becomes the beginning of the user's next one, and such messages are joined."""
    joined: list[Message] = []
    for message in messages:
        turn = {**message, "role": "user" if message["role"] == "system" else message["role"]}
        last = joined[-1] if joined else {}
        goes_on = last.keys() == turn.keys() == {"role", "content"} and last["role"] == turn["role"]
        if goes_on and all(isinstance(one["content"], str) for one in (last, turn)):
            turn["content"] = "\n\n".join(filter(is_text, (last["content"], turn["content"])))
            joined.pop()
        joined.append(turn)
    return joined


def _calls(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) for key in ("tool_calls", "function_call"))


Samples = Mapping[str, Sequence[Any]]
"""The values of each column in the first rows."""
TextKind = Literal["encoder", "causal", "encoder-decoder"]

NAMES = {
    "image": ("image", "img", "images", "picture", "photo", "jpg", "png", "file_name"),
    "audio": ("audio", "speech", "sound", "recording", "wav", "flac", "mp3", "file", "path", "file_name"),
    "messages": ("messages", "conversations", "conversation", "chat", "texts"),
    "prompt": ("instruction", "prompt", "question", "query", "problem", "inputs", "sql_prompt", "intent",
               "question_title", "inputs_pretokenized", "message_1", "user", "human", "document", "article", "dialogue",
               "input", "input_text", "text", "description", "source", "src"),
    "response": ("output", "response", "targets", "completion", "generated_solution", "solution", "answer",
                 "multiple_choice_answer", "answers", "chosen", "canonical_solution", "code", "solutions", "sql",
                 "snippet", "rationale", "correct_answer", "best_answer", "targets_pretokenized", "message_2",
                 "assistant", "summary", "highlights", "abstract", "target", "tgt", "target_text", "query"),
    "text": ("text", "sentence", "content", "review", "document", "article", "body", "tweet", "comment", "utterance",
             "prompt", "instruction", "question", "query", "chosen", "problem"),
    "words": ("tokens", "words"),
    "transcript": ("text", "sentence", "transcription", "transcript", "normalized_text", "raw_text", "caption"),
    "caption": ("caption", "captions", "text", "sentence", "alt_text", "description", "question", "query", "prompt",
                "instruction", "messages", "conversations", "conversation"),
    "label": ("label", "labels", "class", "cls", "target"),
}  # fmt: skip
"""Names of columns that may play each role, the likeliest first. Besides a recipe's roles: `words` (the words of one
text, in a list), `transcript` (the text that a decoder writes of a recording or an image) and `caption` (a text about
an image)."""
TEXT_PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("question", "passage"), ("question", "context"), ("query", "passage"), ("text1", "text2"), ("text_a", "text_b"),
    ("text", "text_pair"), ("sentence_a", "sentence_b"), ("sent1", "sent2"), ("query", "document"),
)  # fmt: skip
ABOUT = {
    "instruction": ("input", "context"), "question": ("context",), "query": ("context",), "prompt": ("context",),
}  # fmt: skip
"""Columns that may hold the text that a prompt is about, by the name of the prompt's column."""
TRANSLATION = "translation"
"""Name of a column of mappings from languages to texts. A row has a further column for each: translation.de."""
FIELD = re.compile(r"\{\{|\}\}|\{([^{}\[\]]+)(?:\[([^{}\[\]]+)\])?\}")
"""A field of a template: {column}, or {column[key]} for a column of mappings or lists; {{ and }} are braces. It asks
for nothing but values of the row, because a template may come from a recipe by somebody else."""
MEDIA = {"image": IMAGE_FILES, "audio": AUDIO_FILES}
"""Endings of the files that columns of encoded media may name."""
LOOKED_AT_CHARACTERS = 1000
"""Characters at the start of a text that are examined to tell natural language from ids and paths."""


# --- what the recipe names ---


def check_columns(data: Data, columns: Iterable[str]) -> None:
    """Raise DataError if the recipe names a column or template field that does not exist."""
    for column in data.columns.values():
        if column not in columns:
            raise DataError(f"there is no column {column}", fix=f"use one of: {list_some(columns)}")
    if set(FIELD.sub("", data.template or "")) & set("{}"):
        what = "the template is broken: a brace in it belongs to no column"
        raise DataError(what, fix="write {premise} for a column, and {{ or }} for a brace")
    fields = [name for name, _ in FIELD.findall(data.template or "") if name]
    if data.template is not None and not fields:
        raise DataError("the template names no column", fix="write e.g. {premise} {hypothesis}")
    if missing := [name for name in fields if name not in columns]:
        what = f"the template names a column that does not exist: {{{missing[0]}}}"
        raise DataError(what, fix=f"use: {list_some(columns)}")


def names_text(data: Data) -> bool:
    return data.template is not None or bool({"text", "prompt", "messages"} & data.columns.keys())


def find_about(data: Data, roles: Mapping[str, str], columns: Iterable[str]) -> list[str]:
    """Return the columns with the text that the prompt is about, such as `context`."""
    if data.template is not None:
        return []
    names = ABOUT.get(bare_name(roles.get("prompt", "")), ())
    if "prompt" in data.columns and data.columns["prompt"] != "instruction":
        names = ()  # the user may want no more than was named, but in datasets of instructions
    return [column for column in columns if bare_name(column) in names and column not in roles.values()]


def _no_column(what: str, role: str, columns: Samples) -> DataError:
    """Return the error that lists the columns and says how to name the one of a role."""
    if not columns:
        return DataError(f"no column holds {what}", fix=f"give data that hold {what} too")
    kinds = {name: f" ({type(x[0]).__name__})" if isinstance(x[0], bytes | dict) else "" for name, x in columns.items()}
    what = f"no column holds {what}; the columns are {list_some(map(''.join, kinds.items()))}"
    fix = f"name it: --columns TASK={role}:COLUMN (in a recipe, columns: {{{role}: COLUMN}})"
    if role == "text" and "input_ids" in columns:
        fix = "give the texts that these tokens were made from, or put input_ids and attention_mask into .safetensors"
    return DataError(what, fix=fix)


# --- what names and values tell ---


def find_column(role: str, data: Data, samples: Samples) -> str:
    """Return the column of images, recordings or labels: the recipe's, else one with a usual name, else the first whose
    values look so. Raises DataError if there is none."""
    if role in data.columns:
        return data.columns[role]
    usual = find_usual(role, samples)
    likely = find_media(role, samples) if role in MEDIA else usual
    if not likely:
        raise _no_column(f"{role}s" if role != "audio" else "recordings", role, samples)
    return next((name for name in usual if name in likely), likely[0])


def find_usual(role: str, samples: Samples) -> list[str]:
    """Return the columns with names that are usual for a role, the likeliest first."""
    return [column for name in NAMES[role] for column in samples if bare_name(column) == name]


def find_media(role: str, samples: Samples) -> list[str]:
    """Return the columns whose values look like encoded images or recordings (`role`), or like names of such files."""
    return _find_likely(samples, lambda value: _is_encoded(value, MEDIA[role]))


def _find_likely(samples: Samples, test: Callable[[Any], Any]) -> list[str]:
    return [name for name, values in samples.items() if any(map(test, values))]


def _is_encoded(value: Any, endings: tuple[str, ...]) -> bool:
    match value:
        case dict():
            return bool(value) and value.keys() <= {"bytes", "path"}
        case [first, *_]:
            return _is_encoded(first, endings)
        case str():
            return value.lower().endswith(endings)
    return isinstance(value, bytes)


def has_caption(data: Data, samples: Samples) -> bool:
    """Whether rows with images hold texts about them: the recipe names one, or a column has a usual name."""
    texts = {name.lower(): values for name, values in samples.items()}
    found = (value for name in NAMES["caption"] for value in texts.get(name, ()))
    return names_text(data) or (not data.columns and any(isinstance(x, str) or is_conversation(x) for x in found))


def choose_text_roles(data: Data, samples: Samples, kind: TextKind, *, chat: bool) -> dict[str, str]:
    """Return the column of each text role: the recipe's if it names a text, else found by names and values. `chat` says
    whether the tokenizer has a chat template. Raises DataError when no column holds text."""
    named: dict[str, str] = dict(data.columns.items())
    return named if names_text(data) else _find_text_columns(samples, kind, chat) | named


def _find_text_columns(samples: Samples, kind: TextKind, chat: bool) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in samples:  # of names that differ in case the first
        names.setdefault(bare_name(name), name)
    bare = {name: samples[column] for name, column in names.items()}
    texts = _find_likely(bare, lambda value: isinstance(value, str))
    talks, answers = _find_likely(bare, is_conversation), _find_likely(bare, answer_of)
    messages = [names[name] for name in NAMES["messages"] if name in talks]
    if messages and kind == "causal" and (chat or "text" not in texts):
        return {"messages": messages[0]}
    for name in NAMES["messages"]:
        if any(is_text(value) and value.lstrip().startswith("[{'") for value in bare.get(name, ())):
            what = f"column {plain(names[name])} holds lists as Python prints them, which is not JSON"
            raise DataError(what, fix="write them with json.dumps, or keep them as lists in .jsonl or .parquet")
    languages = [name for name in samples if bare_name(name).startswith(f"{TRANSLATION}.")]
    if kind != "encoder" and len(languages) == 2:
        return {"prompt": languages[0], "response": languages[1]}
    if kind != "encoder":
        prompt = next((name for name in NAMES["prompt"] if name in [*texts, *talks]), "")
        responses = [name for name in NAMES["response"] if name in [*answers, *talks] and name != prompt]
        if prompt and responses:
            return {"prompt": names[prompt], "response": names[responses[0]]}
        # an encoder-decoder wants an answer, which a single text has not
        for name in (*(NAMES["messages"] if kind == "encoder-decoder" else ()), "prompt", "chosen"):
            if name in talks:
                return {"messages": names[name]}
    for first, second in TEXT_PAIRS:
        if first in texts and second in texts:
            return {"text": names[first], "text_pair": names[second]}
    single = [names[name] for name in NAMES["text"] if name in texts]
    single += [column for column in samples if _looks_natural(samples[column])]
    single += [names[name] for name in NAMES["words"] if name in answers]
    if single:
        return {"text": single[0]}
    if messages or talks:
        return {"messages": (messages or [names[name] for name in talks])[0]}
    raise _no_column("text", "text", samples)


def name_among(chosen: str, samples: Samples) -> str:
    """Return the words for the chosen columns, with all columns behind them if there are several."""
    return f"{chosen} (of {list_some(samples)})" if len(samples) > 1 else chosen


def _looks_natural(values: Sequence[Any]) -> bool:
    """Whether most of the values are several words long, unlike ids, paths and class names."""
    texts = [value[:LOOKED_AT_CHARACTERS] for value in values if is_text(value)]
    return sum(len(text.split()) > 1 for text in texts) * 2 > len(texts)


def number_label(value: Any, column: str, numbers: Mapping[str, int], where: str) -> int:
    """Return the class number of a label, which is a number or a name in `numbers`. Raises DataError."""
    if isinstance(value, str) and value in numbers:
        return int(numbers[value])
    with suppress(TypeError, ValueError, OverflowError):  # no number at all
        # programs write whole numbers as 1.0 where others are missing
        if (number := int(float(value))) == float(value):
            if number < 0:
                what = "the split hides its labels (some are below 0)"
                raise DataError(what, where=where, fix="evaluate another split")
            return number
    shown = quoted(value) if isinstance(value, str) else plain(str(value))
    what = f"label {shown} in column {plain(column)} is no class of the model's"
    raise DataError(what, where=where, fix="use class numbers, or the names in label2id of the model's config.json")
