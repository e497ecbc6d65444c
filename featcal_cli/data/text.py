"""Turn text rows into token ids: first into the texts that the tokenizer is given, then into tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from featcal_cli.data.batches import GLOBAL_MASK, Example, count_vocabulary, decoder_inputs
from featcal_cli.data.columns import (
    FIELD,
    NAMES,
    BadRowError,
    Message,
    Samples,
    TextKind,
    answer_of,
    choose_text_roles,
    find_about,
    find_system,
    is_conversation,
    is_text,
    join_turns,
    name_among,
    read_calls,
    read_messages,
    read_tools,
)
from featcal_cli.data.preprocessing import Reader, Target, TextTokens, open_tokens
from featcal_cli.recipe.data_formats import Row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.sanitise import exception_text, list_some, plain


@dataclass(frozen=True)
class TokenizerInput:
    """The texts of a row as they are given to a tokenizer."""

    text: str
    pair: str | None = None
    target: str | None = None
    has_special_tokens: bool = False


@dataclass(frozen=True)
class RowFormatter:
    """Turns a row into the tokenizer's input, by the roles of its columns."""

    roles: Mapping[str, str]
    about: Sequence[str]
    template: str | None
    kind: TextKind
    tokenizer: Any

    @property
    def has_turns(self) -> bool:
        """Whether rows are shown as conversations: messages, or a prompt and its response, which an encoder reads as a
        pair of texts instead. A template makes a single text of any row."""
        has_answers = self.kind != "encoder" and {"prompt", "response"} <= self.roles.keys()
        return self.template is None and ("messages" in self.roles or has_answers)

    def compose(self, row: Row) -> TokenizerInput:
        """Return the tokenizer's input for a row. Raises BadRowError for a value that is missing or not text."""
        if self.has_turns:
            return self._join(self._read_turns(row), read_tools(row))
        pair = target = None
        if self.template is not None:
            text = _fill(self.template, row)
        elif "text" in self.roles:
            text = self._text(row, "text")
            pair = self._text(row, "text_pair") if "text_pair" in self.roles else None
        else:
            text = self._prompt(row)
            pair = self._answer(row) if self.kind == "encoder" and "response" in self.roles else None
        if self.kind == "encoder-decoder" and "response" in self.roles:
            target = self._answer(row)
        if self.kind == "causal" and pair is not None:
            return TokenizerInput(f"{text}\n{pair}")
        return TokenizerInput(text, pair, target)

    def _text(self, row: Row, role: str) -> str:
        column = self.roles[role]
        value = row.get(column)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            value = (" " if column.lower() in NAMES["words"] else "\n").join(value)
        if is_text(value):
            return value
        is_empty = value is None or isinstance(value, str) or value in ([], {})
        raise BadRowError(f"column {plain(column)} has {'no text' if is_empty else type(value).__name__}")

    def _answer(self, row: Row) -> str:
        return answer_of(row.get(self.roles["response"])) or self._text(row, "response")

    def _prompt(self, row: Row) -> str:
        return "\n".join(filter(is_text, [self._text(row, "prompt"), *(row.get(name) for name in self.about)]))

    def _read_turns(self, row: Row) -> list[Message]:
        messages, name = self._read_messages(row), find_system(row)
        system = None if name is None else row[name]
        if self.kind == "causal" and messages[0]["role"] != "system" and is_text(system):
            return [_say("system", system), *messages]
        return messages

    def _read_messages(self, row: Row) -> list[Message]:
        if "messages" in self.roles:
            return read_messages(row.get(self.roles["messages"]))
        prompt, response = (row.get(self.roles[role]) for role in ("prompt", "response"))
        asked = read_messages(prompt) if is_conversation(prompt) else [_say("user", self._prompt(row))]
        if asked[-1]["role"] == "assistant":
            return asked  # it holds its answer
        if not is_conversation(response):
            return [*asked, _say("assistant", self._answer(row))]
        answered = read_messages(response)
        is_whole = answered[0]["role"] in ("system", "user")  # with the prompt in it
        return answered if is_whole else [*asked, *answered]

    def _join(self, messages: list[Message], tools: Sequence[Message] = ()) -> TokenizerInput:
        """Format a conversation by the chat template, with the tools that it may call. Without a template, join its
        turns with line breaks; in an encoder-decoder, the last turn becomes the decoder's target."""
        if self.kind == "causal" and self.tokenizer.chat_template:
            return TokenizerInput(self._apply_template(messages, tools), has_special_tokens=True)
        turns = [message["content"] for message in messages if is_text(message["content"])]
        if not turns or not all(isinstance(message["content"], str) for message in messages):
            raise BadRowError("the messages have no text")
        if self.kind == "encoder-decoder" and not is_text(messages[-1]["content"]):
            raise BadRowError("the last message has no text")
        if self.kind == "encoder-decoder" and len(turns) > 1:
            return TokenizerInput("\n".join(turns[:-1]), target=turns[-1])
        return TokenizerInput("\n".join(turns))

    def _apply_template(self, messages: list[Message], tools: Sequence[Message]) -> str:
        """Format messages as they are, or joined if the template refuses them, or in parts if it reads nothing else, as
        those of models that read images."""
        apply = partial(self.tokenizer.apply_chat_template, tools=[*tools] or None, tokenize=False)

        # GLM-4 calls an observation what other models call a tool's message
        has_observations = "<|observation|>" in getattr(self.tokenizer, "added_tokens_encoder", ())
        if has_observations and not re.search("""["']tool["']""", str(self.tokenizer.chat_template)):
            messages = [{**x, "role": "observation"} if x["role"] == "tool" else x for x in messages]

        def format_chat(messages: Sequence[Message]) -> str:
            with suppress(Exception):
                read = [*map(read_calls, messages)]
                # some templates want the arguments of a call as the text that they may be, and write Python's otherwise
                calls = [call.get("function") for message in read for call in message.get("tool_calls") or ()]
                text = str(apply(read))
                if not any(call and call.get("arguments") and str(call["arguments"]) in text for call in calls):
                    return text
            return str(apply([*messages]))

        said = [message["content"].strip() for message in messages if is_text(message["content"])]
        try:
            text = format_chat(messages)
            empty = [{**message, "content": ""} for message in messages]
            if said and not any(one in text for one in said) and text.split() == format_chat(empty).split():
                text = format_chat([{**x, "content": [{"type": "text", "text": x["content"]}]} for x in messages])
            return text
        except Exception as error:  # a template is a program, and raises what it likes
            with suppress(Exception):
                return format_chat(join_turns(messages))
            reason = f"the chat template refuses the messages: {exception_text(error)}"
            fix = "give conversations that the model's chat template takes, or correct that template in its files"
            raise BadRowError(reason, fix) from error

    def beginnings(self, row: Row) -> Iterator[TokenizerInput]:
        """Yield the conversation up to each answer but the last, the shortest first, as far as the chat template takes
        it."""
        messages, tools = self._read_turns(row), read_tools(row)
        for number, (last, _) in enumerate(pairwise(messages), start=1):
            if last["role"] == "assistant":
                with suppress(BadRowError):
                    yield self._join(messages[:number], tools)

    def describe(self, samples: Samples) -> str:
        """Describe which of the columns plays which role, for a note."""
        shown = [(role, column) for role, column in self.roles.items() if role not in ("image", "audio", "label")]
        columns = (f"column {column}" + (f" as {role}" if role != column else "") for role, column in shown)
        used = f"template {self.template!r}" if self.template else " and ".join(columns)
        if self.about:
            used += f", with {list_some(self.about)} behind the prompt"
        is_chat = self.kind == "causal" and self.has_turns
        if is_chat and (system := find_system(samples)):
            used += f", with {system} as the system's message"
        used = name_among(used, samples)
        if not is_chat:
            return used
        return f"{used}, {'in' if self.tokenizer.chat_template else 'joined by line breaks without'} a chat template"


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _fill(template: str, row: Row) -> str:
    def value_of(field: re.Match[str]) -> str:
        name, key = field.groups()
        if name is None:
            return field[0][0]  # one of the doubled braces
        value = row.get(name)
        if key is not None:
            if isinstance(value, list):
                value = {str(place): item for place, item in enumerate(value)}
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            raise BadRowError(f"{plain(field[0])} of the template is empty")
        return str(value)

    text = FIELD.sub(value_of, template)
    if not text.strip():
        raise BadRowError("the template's columns are empty")
    return text


@dataclass(frozen=True)
class TextReader(Reader):
    """Turns texts into tokens with an expert's tokenizer; the ids are those of the model that the examples are for."""

    formatter: RowFormatter
    tokens: TextTokens
    max_tokens: int

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that cuts the texts. Examples hold other ids if the model has another vocabulary."""
        return self.tokens.cutting.tokenizer

    @property
    def is_padded(self) -> bool:
        """Whether texts are padded to the full length, as a tower that reads them unmasked was trained (SigLIP)."""
        return "pixel_values" in self.target.names and "attention_mask" not in self.tokenizer.model_input_names

    def count_tokens(self, example: Example) -> int:
        return example.inputs["input_ids"].numel()

    def read(self, row: Row) -> Example:
        given = self.formatter.compose(row)
        encoded = self._encode(given)
        if given.has_special_tokens and self._is_cut(given):
            for beginning in self.formatter.beginnings(row):
                if self._is_cut(beginning):
                    break
                encoded = self._encode(beginning)
        target = []
        if given.target is not None:
            positions = getattr(self.target.model.config, "max_decoder_position_embeddings", None)  # LED
            most = min(self.max_tokens, positions or self.max_tokens)
            target = self.tokens.encode([given.target], most, is_target=True)["input_ids"]
        if not encoded["input_ids"] or (given.target is not None and not target):
            raise BadRowError("a text has no tokens")
        self.target.check_ids(encoded["input_ids"])
        self.target.check_ids(target, is_target=True)
        if self.is_padded or (self.formatter.kind == "encoder" and self.tokenizer.padding_side == "left"):
            # the model may answer from the last position, padding or not: without a mask, texts are never padded
            del encoded["attention_mask"]
        inputs = {name: torch.tensor([values]) for name, values in encoded.items() if name in self.target.names}
        if GLOBAL_MASK in self.target.names and (given.pair is None or self.formatter.kind == "encoder-decoder"):
            # classifiers and summarisers are trained so; of a pair, Longformer itself lets the question attend globally
            inputs[GLOBAL_MASK] = torch.zeros_like(inputs["input_ids"])
            inputs[GLOBAL_MASK][:, 0] = 1
        return Example(inputs | decoder_inputs(self.target.model, target))

    def _encode(self, given: TokenizerInput, *, more: int = 0) -> dict[str, list[int]]:
        texts = [given.text] if given.pair is None else [given.text, given.pair]
        options = {"add_special_tokens": not given.has_special_tokens, "is_padded": self.is_padded}
        encoded = self.tokens.encode(texts, self.max_tokens + more, **options)
        begin, is_causal = self.tokenizer.bos_token_id, self.formatter.kind == "causal"
        # a chat template was applied to the text beforehand
        if is_causal and begin is not None and encoded["input_ids"][:2] == self.tokens.number([begin, begin]):
            return {name: values[1:] for name, values in encoded.items()}
        return encoded

    def _is_cut(self, given: TokenizerInput) -> bool:
        return len(self._encode(given, more=1)["input_ids"]) > self.max_tokens


def open_text(data: Data, samples: Samples, target: Target) -> TextReader:
    """Open the reader for rows with text. Raises DataError when no column holds text or no folder has a tokenizer."""
    model, tokens = target.model, open_tokens(target.text_models, target.folders)
    tokenizer, vocabulary = tokens.cutting.tokenizer, count_vocabulary(model)
    pad = tokenizer.pad_token_id
    if pad is None or (vocabulary is not None and tokens.number([pad])[0] >= vocabulary):
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    kind: TextKind
    if model.config.is_encoder_decoder:
        # Only a model that answers can take an answer; a classifier reads its text like an encoder.
        kind = "encoder-decoder" if model.can_generate() else "encoder"
    else:  # a causal body without a head cannot generate, but its attention says what it is
        causal = model.can_generate() or any(getattr(module, "is_causal", False) for module in model.modules())
        kind = "causal" if causal else "encoder"
    roles = choose_text_roles(data, samples, kind, chat=bool(tokenizer.chat_template))
    if "text_pair" not in data.columns and any([*folder.glob("*_Pooling")] for folder in target.folders):
        roles.pop("text_pair", None)  # sentence-transformers gives an encoder that pools one text at a time
    formatter = RowFormatter(roles, find_about(data, roles, samples), data.template, kind, tokenizer)
    max_tokens, used = target.most_tokens(tokenizer), formatter.describe(samples)
    chosen = f"{used}, at most {max_tokens} tokens, tokenizer from {tokens.source}"
    return TextReader(chosen, target, formatter, tokens, max_tokens)
