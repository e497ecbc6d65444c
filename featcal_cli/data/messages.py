"""Turn the conversations of datasets into the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from featcal_cli.data.batches import BadRowError

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""The speaker's name in chat templates for each name that datasets use."""

Message = dict[str, Any]
"""One message: its role, its content, and further keys from the dataset."""


def is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def answer_of(value: Any) -> str | None:
    """Return the text of an answer: a text, the first of a list, or `text` or `value` of a mapping; None without
    text."""
    if isinstance(value, Mapping):
        value = value.get("text") or value.get("value")
    if isinstance(value, list) and value:
        value = value[0]
    return value if is_text(value) else None


def read_messages(value: Any) -> list[Message]:
    """Return messages as {role, content}. They may come as OpenAI's {role, content} or ShareGPT's {from, value}. A null
    content becomes empty, and so does a missing one in a message that calls a tool. Raises BadRowError."""
    if not is_conversation(value):
        raise BadRowError("the messages are not a list of messages")
    messages: list[Message] = []
    for message in value:
        role, content = (_first_of(message, keys) for keys in (("role", "from"), ("content", "value")))
        if not isinstance(role, str):
            raise BadRowError("a message has no role")
        if content is None and not message.keys() & {"content", "value"} and not _calls(message):
            raise BadRowError("a message has no content")
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
            content = "\n".join(texts) if texts or not content else content  # images are no text
        named = {"role": SPEAKERS.get(role.lower(), role), "content": "" if content is None else content}
        messages.append({**message, **named})
    if not any(map(_says_something, messages)):
        raise BadRowError("the messages have no text")
    return messages


def _says_something(message: Message) -> bool:
    """Whether a message has text or other parts, or calls a tool."""
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else content) or _calls(message)


def _calls(message: Mapping[str, Any]) -> bool:
    """Whether a message calls a tool."""
    return any(message.get(key) for key in ("tool_calls", "function_call"))


def _first_of(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value of the first key whose value is not null, or None."""
    return next((message[key] for key in keys if message.get(key) is not None), None)
