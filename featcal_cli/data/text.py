"""Text rows → token ids, by way of what the tokenizer is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from featcal_cli.data.batches import (
    GLOBAL_MASK,
    OTHER_COLUMN,
    BadRowError,
    Batch,
    Reader,
    count_positions,
    count_vocabulary,
    decoder_prompt,
    forward_names,
)
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import (
    WORDS_NAMES,
    Samples,
    TextKind,
    answer_of,
    choose_text_roles,
    find_about,
    find_unused_answer,
    is_conversation,
    name_columns,
    template_fields,
)
from featcal_cli.data.hub_dataset import first_line
from featcal_cli.data.preprocessing import Target
from featcal_cli.data.vocabulary import TextTokens
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some, plain

MAX_TOKENS = 512
MOST_UNKNOWN, SOME_UNKNOWN = 0.5, 0.1
"""Shares of unknown tokens: with more of them texts and tokenizer do not fit, or that is said."""
LONGEST_TOKEN = 100
"""Characters; what is beyond MAX_TOKENS such tokens is cut off before a tokenizer takes minutes over it."""
SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""Name of a speaker in datasets → the one in chat templates."""

OTHER_TEMPLATE = "write another template, or give other data"
OTHER_CONVERSATIONS = (
    "give conversations that this chat template takes, or a template of your own in the recipe: template: '{COLUMN}'"
)
Message = dict[str, Any]
"""{role, content}, as chat templates take it."""
Tokens = tuple[dict[str, list[int]], list[int]]
"""A row's forward arguments, [tokens] each, and the ids of its target."""


@dataclass(frozen=True)
class TokenizerInput:
    text: str
    pair: str | None = None
    target: str | None = None
    has_special_tokens: bool = False


@dataclass(frozen=True)
class RowFormatter:
    """How a row becomes the tokenizer's input, by the roles of its columns."""

    roles: Mapping[str, str]
    about: Sequence[str]
    template: str | None
    kind: TextKind
    tokenizer: Any

    @property
    def joins_turns(self) -> bool:
        """Whether the turns of a conversation become one text, for want of a chat template."""
        return self.template is None and (self.kind != "causal" or not self.tokenizer.chat_template)

    @property
    def gives_pairs(self) -> bool:
        """Whether the tokenizer's input is a pair of texts."""
        answers = self.kind == "encoder" and {"prompt", "response"} <= self.roles.keys()
        return self.template is None and ("text_pair" in self.roles or answers)

    def compose(self, row: Row) -> TokenizerInput:
        """The tokenizer's input of a row. Raises BadRowError for a value that is missing or not text."""
        if self.template is None and "messages" in self.roles:
            return self._conversation(_read_messages(row.get(self.roles["messages"])))
        if self.template is None and {"prompt", "response"} <= self.roles.keys() and self.kind != "encoder":
            return self._prompt_and_answer(row)
        target = self._answer(row) if self.kind == "encoder-decoder" and "response" in self.roles else None
        text, pair = self._source(row)
        if self.kind == "causal" and pair is not None:
            return TokenizerInput(f"{text}\n{pair}")
        return TokenizerInput(text, pair, target)

    def _source(self, row: Row) -> tuple[str, str | None]:
        if self.template is not None:
            try:
                text = self.template.format(**row)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise BadRowError(f"the template does not fit ({plain(first_line(error))})", OTHER_TEMPLATE) from error
            if empty := [name for name in template_fields(self.template) if row.get(name) is None]:
                raise BadRowError(f"column {plain(empty[0])} of the template is empty", OTHER_TEMPLATE)
            if not text.strip():
                raise BadRowError("the template's columns are empty", OTHER_TEMPLATE)
            return text, None
        if "text" in self.roles:
            return self._text(row, "text"), self._text(row, "text_pair") if "text_pair" in self.roles else None
        pair = self._answer(row) if self.kind == "encoder" and "response" in self.roles else None
        return self._prompt(row), pair

    def _text(self, row: Row, role: str) -> str:
        column = self.roles[role]
        value = row.get(column)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            value = (" " if column.lower() in WORDS_NAMES else "\n").join(value)
        if isinstance(value, str) and value.strip():
            return value
        is_empty = value is None or isinstance(value, str) or value in ([], {})
        raise BadRowError(f"column {plain(column)} has {'no text' if is_empty else type(value).__name__}", OTHER_COLUMN)

    def _answer(self, row: Row) -> str:
        return answer_of(row.get(self.roles["response"])) or self._text(row, "response")

    def _prompt(self, row: Row) -> str:
        values = [self._text(row, "prompt"), *(row.get(name) for name in self.about)]
        return "\n".join(value for value in values if isinstance(value, str) and value.strip())

    def _prompt_and_answer(self, row: Row) -> TokenizerInput:
        prompt, response = (row.get(self.roles[role]) for role in ("prompt", "response"))
        asked = _read_messages(prompt) if is_conversation(prompt) else None
        if asked and asked[-1]["role"] == "assistant":
            return self._conversation(asked)  # it holds its answer
        answered = _read_messages(response) if is_conversation(response) else None
        if answered and answered[0]["role"] in ("system", "user"):
            return self._conversation(answered)  # the whole conversation, the prompt with it
        answer = "" if answered else self._answer(row)
        if not asked and not answered and self.joins_turns:
            if self.kind == "encoder-decoder":
                return TokenizerInput(self._prompt(row), target=answer)
            return TokenizerInput(f"{self._prompt(row)}\n{answer}")
        asked = asked or [{"role": "user", "content": self._prompt(row)}]
        return self._conversation([*asked, *(answered or [{"role": "assistant", "content": answer}])])

    def _conversation(self, messages: list[Message]) -> TokenizerInput:
        """The conversation by the chat template; without one, its turns one below the other."""
        contents = [message["content"] for message in messages]
        if not any(map(_says_something, messages)):
            raise BadRowError("the messages have no text", OTHER_COLUMN)
        if not self.joins_turns:
            return TokenizerInput(self._render(messages), has_special_tokens=True)
        if not all(isinstance(content, str) for content in contents):
            raise BadRowError("the messages have no text", OTHER_COLUMN)
        turns = [content for content in contents if content.strip()]
        if not turns or (self.kind == "encoder-decoder" and not contents[-1]):
            which = "the last message has" if turns else "the messages have"
            raise BadRowError(f"{which} no text", OTHER_COLUMN)
        if self.kind == "encoder-decoder" and len(turns) > 1:
            return TokenizerInput("\n".join(turns[:-1]), target=turns[-1])
        return TokenizerInput("\n".join(turns))

    def _render(self, messages: list[Message]) -> str:
        """The conversation as the chat template writes it. Raises BadRowError with the template's own words."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is a program, and raises what it likes
            reason = f"the chat template refuses the messages: {plain(first_line(error))}"
            raise BadRowError(reason, OTHER_CONVERSATIONS) from error


def _says_something(message: Message) -> bool:
    """Whether a message has text or parts, or calls a tool."""
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else content) or _calls(message)


def _calls(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) for key in ("tool_calls", "function_call"))


def _read_messages(value: Any) -> list[Message]:
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
    if not messages:
        raise BadRowError("the messages are none", OTHER_COLUMN)
    return messages


def _first_of(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value under one of the keys that is not null."""
    return next((message[key] for key in keys if message.get(key) is not None), None)


@dataclass(frozen=True)
class TextReader(Reader):
    """Text through an expert's tokenizer; an item is a row's token ids in its vocabulary, not yet padded."""

    formatter: RowFormatter
    tokens: TextTokens
    max_tokens: int
    model: PreTrainedModel
    where: str
    names: set[str]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that cuts the texts; batches have other ids where `model` has another vocabulary."""
        return self.tokens.cutting.tokenizer

    def read(self, row: Row) -> Tokens:
        """The row's tokens. Raises BadRowError when there are none."""
        given = self.formatter.compose(row)
        text, pair, answer = map(self._shorten, (given.text, given.pair, given.target))
        encoded = self._encode(text, pair, add_special_tokens=not given.has_special_tokens)
        target = self._encode(text_target=answer)["input_ids"] if answer is not None else []
        if not encoded["input_ids"] or (given.target is not None and not target):
            raise BadRowError("a text has no tokens")
        return encoded, target

    def key(self, item: Tokens) -> bytes:
        return sha256(repr(item).encode()).digest()

    def batch(self, items: Sequence[Tokens]) -> Batch:
        """input_ids, attention_mask, … [examples, tokens], padded to the longest on the right, whatever the tokenizer
        does: positions are then those of a text alone. The ids are those of the model that the batches are for."""
        padded = self.tokenizer.pad(
            [encoded for encoded, _ in items], padding="longest", padding_side="right", return_tensors="pt"
        )
        batch = self.tokens.renumber(dict(padded.items())) | self._decoder_input([target for _, target in items])
        if self.attends_from_first:
            first = padded["attention_mask"].argmax(1, keepdim=True)
            batch[GLOBAL_MASK] = torch.zeros_like(padded["attention_mask"]).scatter_(1, first, 1)
        return {name: tensor for name, tensor in batch.items() if name in self.names}

    @property
    def attends_from_first(self) -> bool:
        """Whether the first token is to attend to all others, and they to it, in a model that leaves this to its user
        (Longformer, LED): a classifier or summariser is trained so. Of a pair, Longformer chooses the question itself.
        """
        leaves_it = self.formatter.kind == "encoder-decoder" or not self.formatter.gives_pairs
        return GLOBAL_MASK in self.names and leaves_it

    def remarks(self, items: Sequence[Tokens]) -> list[str]:
        """Unknown tokens, texts that are cut, and texts that are all alike. Raises DataError where most are unknown."""
        texts = [encoded["input_ids"] for encoded, _ in items]
        remarks = []
        unknown, unknown_id, share = self.tokenizer.unk_token, self.tokenizer.unk_token_id, 0.0
        others = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        if unknown_id is not None and unknown_id not in others:  # as some tokenizers without an unknown token say
            around = self.tokenizer("")["input_ids"]  # what stands around any text, special or not
            special = {*self.tokenizer.all_special_ids, *around} - {unknown_id}
            tokens = chain.from_iterable([*texts, *(target for _, target in items)])
            counts = Counter(token for token in tokens if token not in special)
            share = counts[unknown_id] / max(1, counts.total())
        if share > MOST_UNKNOWN:
            what = f"{share:.0%} of the tokens are {unknown}: the tokenizer does not know these texts"
            fix = "give texts of the kind and language that the expert was trained on, or check that its tokenizer is"
            raise DataError(what, where=self.where, fix=f"{fix} the model's own")
        if share > SOME_UNKNOWN:
            remarks.append(f"{share:.0%} of the tokens are unknown to the tokenizer ({unknown})")
        if cut := sum(len(ids) >= self.max_tokens for ids in texts):
            remarks.append(f"{cut} of {len(texts)} texts fill all {self.max_tokens} tokens: what is beyond is cut off")
        if len(texts) > 1 and all(item == items[0] for item in items):
            remarks.append(f"all {len(texts)} examples become the same tokens: look whether it is the right column")
        return remarks

    def unpadded_length(self, item: Tokens) -> int | None:
        """The number of tokens where padding on the right would change what a model makes of them: it takes no mask, or
        it is no causal one and wants padding on the left, so that it may read the last position."""
        reads_last = self.formatter.kind == "encoder" and self.tokenizer.padding_side == "left"
        return len(item[0]["input_ids"]) if reads_last or "attention_mask" not in self.names else None

    def longest(self, items: Sequence[Tokens]) -> Sequence[Tokens]:
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
            raise BadRowError(f"the tokenizer cannot read it ({plain(first_line(error))})") from error
        given = [*texts, options.get("text_target")]
        self.tokens.check(encoded["input_ids"], given, self.max_tokens, self.tokenizer.truncation_side)
        vocabulary, ids = count_vocabulary(self.model), self.tokens.number(encoded["input_ids"])
        if vocabulary is not None and (largest := max(ids, default=0)) >= vocabulary:
            what = f"the tokenizer has token {largest}, but the model only {vocabulary} tokens"
            fix = "put the tokenizer that belongs to each model into its folder, or check that they belong together"
            raise DataError(what, where=self.where, fix=fix)
        return {name: encoded[name] for name in encoded if name in self.names}

    def _decoder_input(self, targets: Sequence[list[int]]) -> Batch:
        if not all(targets):
            return decoder_prompt(self.model, len(targets))
        # The shift to the right that follows must not push padding in front of the first token.
        padded = self.tokenizer.pad(
            {"input_ids": list(targets)}, padding="longest", padding_side="right", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        labels = self.tokens.renumber(dict(padded.items()))["input_ids"]
        shifted = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        # A decoder token counts when what it is to predict is a token of the target.
        return {"decoder_input_ids": shifted, "decoder_attention_mask": padded["attention_mask"]}


def open_text(data: Data, samples: Samples, target: Target) -> TextReader:
    """The reader of text rows. Raises DataError when no column holds text or no folder has a tokenizer."""
    model, where = target.model, target.where
    tokens = target.open_tokens()
    tokenizer, vocabulary = tokens.cutting.tokenizer, count_vocabulary(model)
    pad = tokenizer.pad_token_id
    if pad is None or (vocabulary is not None and tokens.number([pad])[0] >= vocabulary):
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    kind: TextKind
    if model.config.is_encoder_decoder:
        # Only a model that answers can take an answer; a classifier reads its text like an encoder.
        kind = "encoder-decoder" if hasattr(model, "prepare_decoder_input_ids_from_labels") else "encoder"
    else:  # a causal body without a head cannot generate, but its attention says what it is
        causal = model.can_generate() or any(getattr(module, "is_causal", False) for module in model.modules())
        kind = "causal" if causal else "encoder"
    roles = choose_text_roles(data, samples, kind, chat=bool(tokenizer.chat_template), where=where)
    about = find_about(data, roles, samples) if data.template is None else []
    formatter = RowFormatter(roles, about, data.template, kind, tokenizer)
    limits = (tokenizer.model_max_length, count_positions(model)[0], MAX_TOKENS)
    max_tokens = int(min(limit for limit in limits if isinstance(limit, int | float) and limit >= 1))
    used = describe_roles(formatter, data, samples, where)
    chosen = f"{used} (of {list_some(samples)}), at most {max_tokens} tokens, tokenizer from {tokens.source}"
    if not formatter.joins_turns and {"messages", "response"} & roles.keys() and tokens.template is not None:
        chosen += f", with its chat template ({tokens.template})"
    reader = TextReader(chosen, formatter, tokens, max_tokens, model, where, forward_names(model))
    if reader.attends_from_first:
        reader = replace(reader, chosen=f"{chosen}, the first token attends globally")
    return reader


def describe_roles(formatter: RowFormatter, data: Data, samples: Samples, where: str) -> str:
    """Which columns become what, in words."""
    roles, kind = formatter.roles, formatter.kind
    columns = [
        f"column {column} as {role}" for role, column in roles.items() if role not in ("image", "audio", "label")
    ]
    used = f"template {data.template!r}" if data.template else " and ".join(columns)
    if formatter.about:
        used += f", with {list_some(formatter.about)} behind the prompt"
    if formatter.joins_turns and any(is_conversation(value) for name in roles.values() for value in samples[name]):
        why = "the tokenizer has no chat template" if kind == "causal" else f"the model is an {kind}"
        used += f", its turns joined by line breaks as {why}"
    if kind == "encoder-decoder" and not {"response", "messages"} & roles.keys():
        used += ", no target for the decoder"
    if kind != "encoder" and (unused := find_unused_answer(samples, roles, data)):
        command = name_columns(where, f"prompt:{roles.get('text', 'COLUMN')},response:{unused}")
        used += f"; {unused}, which may be the answer, is not read: to have it read, type {command}"
    return used
