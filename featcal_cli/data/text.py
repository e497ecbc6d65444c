"""Turn text rows into token ids: first into the texts that the tokenizer is given, then into tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from featcal_cli.data.batches import (
    GLOBAL_MASK,
    OTHER_COLUMN,
    BadRowError,
    Example,
    count_positions,
    count_vocabulary,
    decoder_inputs,
    padding_id,
)
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import (
    NAMES,
    Samples,
    TextKind,
    choose_text_roles,
    find_about,
    template_fields,
)
from featcal_cli.data.messages import Message, answer_of, is_conversation, is_text, read_messages
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.data.vocabulary import TextTokens
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain

MAX_TOKENS = 512
MOST_UNKNOWN, SOME_UNKNOWN = 0.5, 0.1
"""Shares of unknown tokens. Above the first, texts and tokenizer do not fit, which is an error; above the second, a
note reports them."""

OTHER_TEMPLATE = "write another template, or give other data"
OTHER_CONVERSATIONS = (
    "give conversations that this chat template takes, or a template of your own in the recipe: template: '{COLUMN}'"
)


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
    def joins_turns(self) -> bool:
        """Whether the turns of a conversation are joined to one text, because no chat template is used."""
        return self.kind != "causal" or not self.tokenizer.chat_template

    @property
    def holds_turns(self) -> bool:
        """Whether rows are conversations. A prompt with its response counts as one, except for an encoder, which reads
        it as a pair of texts."""
        has_answers = self.kind != "encoder" and {"prompt", "response"} <= self.roles.keys()
        return self.template is None and ("messages" in self.roles or has_answers)

    def compose(self, row: Row) -> TokenizerInput:
        """Return the tokenizer's input for a row. Raises BadRowError for a value that is missing or not text."""
        if self.holds_turns:
            return self._join(self._read_turns(row))
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
        raise BadRowError(f"column {plain(column)} has {'no text' if is_empty else type(value).__name__}", OTHER_COLUMN)

    def _answer(self, row: Row) -> str:
        return answer_of(row.get(self.roles["response"])) or self._text(row, "response")

    def _prompt(self, row: Row) -> str:
        return "\n".join(filter(is_text, [self._text(row, "prompt"), *(row.get(name) for name in self.about)]))

    def _read_turns(self, row: Row) -> list[Message]:
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

    def _join(self, messages: list[Message]) -> TokenizerInput:
        """Format a conversation by the chat template. Without one, join its turns with line breaks; in an
        encoder-decoder, the last turn becomes the decoder's target."""
        if not self.joins_turns:
            try:
                text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
            except Exception as error:  # a template is a program, and raises what it likes
                reason = f"the chat template refuses the messages: {exception_text(error)}"
                raise BadRowError(reason, OTHER_CONVERSATIONS) from error
            return TokenizerInput(text, has_special_tokens=True)
        turns = [message["content"] for message in messages if is_text(message["content"])]
        if not turns or not all(isinstance(message["content"], str) for message in messages):
            raise BadRowError("the messages have no text", OTHER_COLUMN)
        if self.kind == "encoder-decoder" and not is_text(messages[-1]["content"]):
            raise BadRowError("the last message has no text", OTHER_COLUMN)
        if self.kind == "encoder-decoder" and len(turns) > 1:
            return TokenizerInput("\n".join(turns[:-1]), target=turns[-1])
        return TokenizerInput("\n".join(turns))

    def describe(self, samples: Samples) -> str:
        """Describe which column plays which role, for a note."""
        shown = [(role, column) for role, column in self.roles.items() if role not in ("image", "audio", "label")]
        used = " and ".join(f"column {column} as {role}" for role, column in shown)
        used = f"template {self.template!r}" if self.template else used
        if self.about:
            used += f", with {list_some(self.about)} behind the prompt"
        values = (value for column in self.roles.values() for value in samples[column])
        if self.holds_turns and self.joins_turns and any(map(is_conversation, values)):
            why = "the tokenizer has no chat template" if self.kind == "causal" else f"the model is an {self.kind}"
            used += f", its turns joined by line breaks as {why}"
        if self.kind == "encoder-decoder" and not {"response", "messages"} & self.roles.keys():
            used += ", no target for the decoder"
        return used


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _fill(template: str, row: Row) -> str:
    """Fill a template with the values of a row. Raises BadRowError."""
    try:
        text = template.format(**row)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadRowError(f"the template does not fit ({exception_text(error)})", OTHER_TEMPLATE) from error
    if empty := [name for name in template_fields(template) if row.get(name) is None]:
        raise BadRowError(f"column {plain(empty[0])} of the template is empty", OTHER_TEMPLATE)
    if not text.strip():
        raise BadRowError("the template's columns are empty", OTHER_TEMPLATE)
    return text


@dataclass(frozen=True)
class TextReader(Reader):
    """Turns texts into tokens with an expert's tokenizer; the ids are those of the model that the examples are for."""

    formatter: RowFormatter
    tokens: TextTokens
    max_tokens: int
    target: Target

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that cuts the texts. Examples hold other ids if the model has another vocabulary."""
        return self.tokens.cutting.tokenizer

    def read(self, row: Row) -> Example:
        given = self.formatter.compose(row)
        texts = [given.text] if given.pair is None else [given.text, given.pair]
        encoded = self._encode(texts, *texts, add_special_tokens=not given.has_special_tokens)
        target = [] if given.target is None else self._encode([given.target], text_target=given.target)["input_ids"]
        if not encoded["input_ids"] or (given.target is not None and not target):
            raise BadRowError("a text has no tokens")
        is_cut = len(encoded["input_ids"]) >= self.max_tokens
        if self.formatter.kind == "encoder" and self.tokenizer.padding_side == "left":
            # the model may answer from the last position, padding or not: without a mask, texts are never padded
            del encoded["attention_mask"]
        inputs = {name: torch.tensor([values]) for name, values in encoded.items() if name in self.target.names}
        if self.attends_from_first:
            inputs[GLOBAL_MASK] = torch.zeros_like(inputs["input_ids"])
            inputs[GLOBAL_MASK][:, 0] = 1
        return Example(inputs | decoder_inputs(self.target.model, target), is_cut)

    @property
    def attends_from_first(self) -> bool:
        """Whether the first token is to attend globally, in a model that leaves this to its user (Longformer, LED) and
        whose classifiers and summarisers are trained so. For a pair of texts, Longformer itself lets the question
        attend globally."""
        roles = self.formatter.roles.keys() if self.formatter.template is None else set()
        gives_pairs = "text_pair" in roles or {"prompt", "response"} <= roles
        return GLOBAL_MASK in self.target.names and (self.formatter.kind == "encoder-decoder" or not gives_pairs)

    def remarks(self, examples: Sequence[Example]) -> list[str]:
        """Return notes about unknown tokens, cut texts, and texts that are all alike. Raises DataError if most tokens
        are unknown."""
        remarks = []
        share, unknown = self._share_of_unknown(examples), self.tokenizer.unk_token
        if share > MOST_UNKNOWN:
            what = f"{share:.0%} of the tokens are {unknown}: the tokenizer does not know these texts"
            fix = "give texts of the kind and language that the expert was trained on, or check that its tokenizer is"
            raise DataError(what, where=self.target.where, fix=f"{fix} the model's own")
        if share > SOME_UNKNOWN:
            remarks.append(f"{share:.0%} of the tokens are unknown to the tokenizer ({unknown})")
        count = len(examples)
        if cut := sum(example.is_cut for example in examples):
            remarks.append(f"{cut} of {count} texts fill all {self.max_tokens} tokens: what is beyond is cut off")
        if count > 1 and len({example.key for example in examples}) == 1:
            remarks.append(f"all {count} examples become the same tokens: look whether it is the right column")
        return remarks

    def _share_of_unknown(self, examples: Sequence[Example]) -> float:
        unknown = self.tokenizer.unk_token_id
        others = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        if unknown is None or unknown in others:  # as some tokenizers without an unknown token say
            return 0.0
        around = self.tokenizer("")["input_ids"]  # what stands around any text, special or not
        special = self.tokens.number([*{*self.tokenizer.all_special_ids, *around} - {unknown}])
        counts: Counter[int] = Counter()
        for example in examples:
            for name in {"input_ids", "decoder_input_ids"} & example.inputs.keys():
                counts.update(example.inputs[name].flatten().tolist())
        total = sum(count for token, count in counts.items() if token not in special)
        return counts[self.tokens.number([unknown])[0]] / max(1, total)

    def _encode(self, given: Sequence[str], *texts: str, **options: Any) -> dict[str, list[int]]:
        """Return a text's ids and masks [tokens], cut at `max_tokens`. Raises BadRowError if the tokenizer cannot read
        the text, and DataError for tokens that a model does not know."""
        try:
            encoded = dict(self.tokenizer(*texts, truncation=True, max_length=self.max_tokens,
                                          return_attention_mask=True, **options))  # fmt: skip
        except Exception as error:  # what its files say may make a tokenizer raise anything
            raise BadRowError(f"the tokenizer cannot read it ({exception_text(error)})") from error
        self.tokens.check(encoded["input_ids"], given, self.max_tokens, self.tokenizer.truncation_side)
        encoded["input_ids"] = self.tokens.number(encoded["input_ids"])
        vocabulary, largest = count_vocabulary(self.target.model), max(encoded["input_ids"], default=0)
        if vocabulary is not None and largest >= vocabulary:
            what = f"the tokenizer has token {largest}, but the model only {vocabulary} tokens"
            fix = "put the tokenizer that belongs to each model into its folder, or check that they belong together"
            raise DataError(what, where=self.target.where, fix=fix)
        return encoded


def open_text(data: Data, samples: Samples, target: Target) -> TextReader:
    """Open the reader for rows with text. Raises DataError when no column holds text or no folder has a tokenizer."""
    model, tokens = target.model, target.open_tokens()
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
    roles = choose_text_roles(data, samples, kind, chat=bool(tokenizer.chat_template), where=target.where)
    formatter = RowFormatter(roles, find_about(data, roles, samples), data.template, kind, tokenizer)
    limits = (tokenizer.model_max_length, count_positions(model)[0], MAX_TOKENS)
    max_tokens = int(min(limit for limit in limits if isinstance(limit, int | float) and limit >= 1))
    used = formatter.describe(samples)
    chosen = f"{used} (of {list_some(samples)}), at most {max_tokens} tokens, tokenizer from {tokens.source}"
    reader = TextReader(chosen, padding_id(model), formatter, tokens, max_tokens, target)
    if reader.attends_from_first:
        reader = replace(reader, chosen=f"{chosen}, the first token attends globally")
    return reader
