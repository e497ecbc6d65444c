"""Text rows become phrases: what the tokenizer is given, as the model's kind and chat template want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featcal_cli.batches import BadRowError
from featcal_cli.columns import WORDS_NAMES, TextKind, answer_of, is_conversation, template_fields
from featcal_cli.tables import Row

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""What datasets call the speakers → what chat templates do."""


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
    about: Sequence[str]
    """Columns with what the prompt is about."""
    template: str | None
    kind: TextKind
    tokenizer: Any

    @property
    def joins_turns(self) -> bool:
        """Whether the turns of a conversation become one text, for want of a chat template."""
        return self.template is None and (self.kind != "causal" or not self.tokenizer.chat_template)

    def compose(self, row: Row) -> Phrase:
        """The row's phrase. Raises BadRowError for a value that is missing or not text."""
        if self.template is None:
            if "messages" in self.roles:
                return self._talk(_read_messages(row.get(self.roles["messages"])))
            if "prompt" in self.roles and "response" in self.roles and self.kind != "encoder":
                return self._answered(row)
        if self.kind == "encoder-decoder":
            target = self._answer(row) if "response" in self.roles else None
            return Phrase(*self._source(row), target=target)
        text, pair = self._source(row)
        if self.kind == "causal" and pair is not None:
            return Phrase(f"{text}\n{pair}")
        return Phrase(text, pair)

    def _source(self, row: Row) -> tuple[str, str | None]:
        if self.template is not None:
            return self._filled(row, self.template), None
        if "text" in self.roles:
            return self._text(row, "text"), self._text(row, "text_pair") if "text_pair" in self.roles else None
        pair = self._answer(row) if self.kind == "encoder" and "response" in self.roles else None
        return self._prompt(row), pair

    def _text(self, row: Row, role: str) -> str:
        value = row.get(self.roles[role])
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            value = (" " if self.roles[role].lower() in WORDS_NAMES else "\n").join(value)
        if not isinstance(value, str) or not value.strip():
            empty = value is None or isinstance(value, str) or value in ([], {})
            raise BadRowError(f"column {self.roles[role]} has {'no text' if empty else type(value).__name__}")
        return value

    def _answer(self, row: Row) -> str:
        return answer_of(row.get(self.roles["response"])) or self._text(row, "response")

    def _prompt(self, row: Row) -> str:
        values = [self._text(row, "prompt"), *(row.get(name) for name in self.about)]
        return "\n".join(value for value in values if isinstance(value, str) and value.strip())

    def _answered(self, row: Row) -> Phrase:
        asked, answered = (row.get(self.roles[role]) for role in ("prompt", "response"))
        if is_conversation(asked) and (talk := _read_messages(asked))[-1]["role"] == "assistant":
            return self._talk(talk)  # it holds its answer
        answer = _read_messages(answered) if is_conversation(answered) else _say("assistant", self._answer(row))
        if answer[0]["role"] in ("system", "user"):
            return self._talk(answer)  # the whole conversation, the prompt with it
        if not is_conversation(asked) and not is_conversation(answered) and self.joins_turns:
            prompt, reply = self._prompt(row), self._answer(row)
            return Phrase(prompt, target=reply) if self.kind == "encoder-decoder" else Phrase(f"{prompt}\n{reply}")
        return self._talk(
            [*(_read_messages(asked) if is_conversation(asked) else _say("user", self._prompt(row))), *answer]
        )

    def _talk(self, messages: list[dict[str, Any]]) -> Phrase:
        """The conversation by the chat template; without one, its turns one below the other."""
        if not self.joins_turns:
            return self._chat(messages)
        turns = [message["content"] for message in messages]
        if not all(isinstance(turn, str) for turn in turns) or not any(turn.strip() for turn in turns):
            raise BadRowError("the messages have no text")
        if self.kind == "encoder-decoder" and len(turns) > 1:
            return Phrase("\n".join(turns[:-1]), target=turns[-1])
        return Phrase("\n".join(turns))

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
    """OpenAI's {role, content}, ShareGPT's {from, value} or {human, assistant} messages, as the first. Raises
    BadRowError."""
    if not is_conversation(value):
        raise BadRowError("the messages are not a list of messages")
    if isinstance(value, dict):
        value = [dict(zip(value, parts, strict=False)) for parts in zip(*value.values(), strict=False)]
    messages = []
    for message in value:
        role, content = (
            message.get(key) or message.get(other) for key, other in (("role", "from"), ("content", "value"))
        )
        if role is None and (turns := [name for name in message if name.lower() in SPEAKERS]):
            messages += [{"role": SPEAKERS[name.lower()], "content": message[name]} for name in turns]
            continue
        if not isinstance(role, str) or content is None:
            raise BadRowError("a message has no role or no content")
        messages.append({**message, "role": SPEAKERS.get(role.lower(), role), "content": _join_parts(content)})
    if not messages:
        raise BadRowError("the messages are none")
    return messages


def _join_parts(content: Any) -> Any:
    """The text of a content that lists parts, all of them text; others as they are."""
    if isinstance(content, list) and content and all(isinstance(part, dict) and "text" in part for part in content):
        return "\n".join(str(part["text"]) for part in content)
    return content
