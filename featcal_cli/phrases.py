"""Text rows become phrases: what the tokenizer is given, as the model's kind and chat template want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal_cli.batches import BadRowError
from featcal_cli.columns import TextKind, is_conversation, template_fields
from featcal_cli.tables import Row

SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""ShareGPT's names of the speakers, as chat templates call them."""


@dataclass(frozen=True)
class Phrase:
    """What the tokenizer is given of one row."""

    text: str
    pair: str | None = None
    target: str | None = None
    """What an encoder-decoder model should answer."""
    has_special_tokens: bool = False
    """The chat template wrote them."""


@dataclass(frozen=True)
class Phrasing:
    """How a row becomes a phrase, by the roles of its columns."""

    roles: Mapping[str, str]
    template: str | None
    kind: TextKind
    tokenizer: Any

    def compose(self, row: Row) -> Phrase:
        """The row's phrase. Raises BadRowError for a value that is missing or not text."""
        if self.kind == "encoder-decoder":
            target = self._text(row, "response") if "response" in self.roles else None
            return Phrase(*self._source(row), target=target)
        if self.kind == "causal" and self.template is None:
            if "messages" in self.roles:
                return self._chat(_read_messages(row.get(self.roles["messages"])))
            if "prompt" in self.roles and "response" in self.roles:
                return self._answered(row)
        text, pair = self._source(row)
        if self.kind == "causal" and pair is not None:
            return Phrase(f"{text}\n{pair}")
        return Phrase(text, pair)

    def _source(self, row: Row) -> tuple[str, str | None]:
        if self.template is not None:
            return self._filled(row, self.template), None
        if "text" in self.roles:
            return self._text(row, "text"), self._text(row, "text_pair") if "text_pair" in self.roles else None
        pair = self._text(row, "response") if self.kind == "encoder" and "response" in self.roles else None
        return self._prompt(row), pair

    def _text(self, row: Row, role: str) -> str:
        value = row.get(self.roles[role])
        if not isinstance(value, str) or not value.strip():
            raise BadRowError(f"column {self.roles[role]} has {'no text' if not value else type(value).__name__}")
        return value

    def _prompt(self, row: Row) -> str:
        prompt = self._text(row, "prompt")
        # Instruction data keeps what the instruction is about in a column of its own, empty where there is nothing.
        about = row.get("input") if self.roles["prompt"] == "instruction" else None
        return f"{prompt}\n{about}" if isinstance(about, str) and about.strip() else prompt

    def _answered(self, row: Row) -> Phrase:
        if not self.tokenizer.chat_template:
            return Phrase(f"{self._prompt(row)}\n{self._text(row, 'response')}")
        asked, answered = (row.get(self.roles[role]) for role in ("prompt", "response"))
        return self._chat(
            [
                *(_read_messages(asked) if is_conversation(asked) else _say("user", self._prompt(row))),
                *(
                    _read_messages(answered)
                    if is_conversation(answered)
                    else _say("assistant", self._text(row, "response"))
                ),
            ]
        )

    def _chat(self, messages: list[dict[str, Any]]) -> Phrase:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program, and raises what it likes
            raise BadRowError(f"the chat template refuses the messages ({error})") from error
        return Phrase(str(text), has_special_tokens=True)

    def _filled(self, row: Row, template: str) -> str:
        try:
            text = template.format(**row)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BadRowError(f"the template does not fit ({error})") from error
        if not text.strip() or any(row.get(name) is None for name in template_fields(template)):
            raise BadRowError("the template's columns are empty")
        return text


def _say(role: str, content: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def _read_messages(value: Any) -> list[dict[str, Any]]:
    """OpenAI's {role, content} or ShareGPT's {from, value} messages, as the former. Raises BadRowError."""
    if not is_conversation(value):
        raise BadRowError("the messages are not a list of messages")
    messages = []
    for message in value:
        role, content = (
            message.get(key) or message.get(other) for key, other in (("role", "from"), ("content", "value"))
        )
        if not isinstance(role, str) or content is None:
            raise BadRowError("a message has no role or no content")
        messages.append({**message, "role": SPEAKERS.get(role, role), "content": content})
    return messages
