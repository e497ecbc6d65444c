"""Conversations as datasets write them → messages as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from featcal_cli.data.batches import OTHER_COLUMN, BadRowError

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""Name of a speaker in datasets → the one in chat templates."""

Message = dict[str, Any]
"""{role, content}, and what else the dataset says."""


def is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, or lists of what each has: {role: […], content: […]}."""
    if isinstance(value, dict):
        kinds = value.keys() & {"role", "from"}, value.keys() & {"content", "value"}
        return all(kinds) and all(isinstance(value[name], list) for name in set().union(*kinds))
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def answer_of(value: Any) -> str | None:
    """The text of an answer: a text, the first of several, or that of {text: …} and {value: …}; None for no text."""
    if isinstance(value, Mapping):
        value = value.get("text") or value.get("value")
    if isinstance(value, list) and value:
        value = value[0]
    return value if is_text(value) else None


def read_messages(value: Any) -> list[Message]:
    """OpenAI's {role, content}, ShareGPT's {from, value} or {human, assistant} messages, as the first; a null content
    is empty, as is that of a call of a tool without words. Raises BadRowError."""
    if not is_conversation(value):
        raise BadRowError("the messages are not a list of messages", OTHER_COLUMN)
    if isinstance(value, dict):
        lists = {name: listed for name, listed in value.items() if isinstance(listed, list)}
        value = [dict(zip(lists, parts, strict=False)) for parts in zip(*lists.values(), strict=False)]
    messages: list[Message] = []
    for message in value:
        role, content = (_first_of(message, keys) for keys in (("role", "from"), ("content", "value")))
        if role is None and (turns := [name for name in message if name.lower() in SPEAKERS]):
            messages += [{"role": SPEAKERS[name.lower()], "content": message[name] or ""} for name in turns]
            continue
        if not isinstance(role, str):
            raise BadRowError("a message has no role", OTHER_COLUMN)
        if content is None and not message.keys() & {"content", "value"} and not _calls(message):
            raise BadRowError("a message has no content", OTHER_COLUMN)
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
            content = "\n".join(texts) if texts or not content else content  # images are no text
        named = {"role": SPEAKERS.get(role.lower(), role), "content": "" if content is None else content}
        messages.append({**message, **named})
    if not any(map(_says_something, messages)):
        raise BadRowError("the messages have no text", OTHER_COLUMN)
    return messages


def _says_something(message: Message) -> bool:
    """Whether a message has text or parts, or calls a tool."""
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else content) or _calls(message)


def _calls(message: Mapping[str, Any]) -> bool:
    """Whether a message calls a tool."""
    return any(message.get(key) for key in ("tool_calls", "function_call"))


def _first_of(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value under one of the keys that is not null."""
    return next((message[key] for key in keys if message.get(key) is not None), None)
