"""Tiny tokenizers of three kinds whose tokens lie in any order, and models whose embeddings follow them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
WORDS = [f"w{number}" for number in range(40)]
PIECES = ["w", *"0123456789"]


def shuffled(tokens: Sequence[str], seed: int) -> list[str]:
    """The tokens in another order; of 0 in this one."""
    return list(tokens) if seed == 0 else Random(seed).sample(list(tokens), len(tokens))


def spell(kind: str) -> list[str]:
    """All tokens of a kind of tokenizer, special ones first."""
    space = {"words": "", "bytes": "Ġ", "unigram": "▁"}[kind]
    if kind == "words":
        return [*SPECIAL, *WORDS]
    return [*SPECIAL, space, *PIECES, f"{space}w", *(f"{space}{word}" for word in WORDS)]


def word_tokenizer(words: Iterable[str], unknown: str, parts: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """A tokenizer of whole words, whose ids are their places. parts: of the tokenizer, such as its decoder."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    for name, part in {"pre_tokenizer": pre_tokenizers.Whitespace(), **(parts or {})}.items():
        setattr(made, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=made, **settings)


def make_tokenizer(kind: str, tokens: Sequence[str], *, begins: bool = False, merges: bool = True) -> Any:
    """A tokenizer with these tokens, in this order. begins: it puts <s> before a text. merges: a byte-level one joins
    the letters of a word; else only the first of them with the space before it."""
    ids = {token: number for number, token in enumerate(tokens)}
    if kind == "words":
        made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "bytes":
        joined = [("Ġ", "w"), *((f"Ġ{word[:-1]}", word[-1]) for word in WORDS if merges)]
        made = Tokenizer(models.BPE(ids, joined, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        made.decoder = decoders.ByteLevel()
    else:
        scores = [(token, -1.0 if len(token) > 2 else -9.0) for token in tokens]
        made = Tokenizer(models.Unigram(scores, unk_id=ids["<unk>"]))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    if begins:
        start = [("<s>", ids["<s>"])]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **names)


def reorder(module: Any, old: Sequence[str], new: Sequence[str]) -> None:
    """Put a model's embeddings, and the rows of its head, into the order of the tokens `new`; tokens that are not among
    `old` get random ones."""
    module.resize_token_embeddings(len(new))
    place = {token: number for number, token in enumerate(old)}
    torch.manual_seed(0)
    matrices = {id(x.weight): x.weight for x in (module.get_input_embeddings(), module.get_output_embeddings()) if x}
    for weight in matrices.values():
        held, fresh = weight.data.clone(), torch.randn_like(weight) * weight.std()
        rows = [held[place[token]] if token in place else fresh[number] for number, token in enumerate(new)]
        weight.data.copy_(torch.stack(rows))
    for name in ("pad", "bos", "eos"):
        token = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}[name]
        setattr(module.config, f"{name}_token_id", list(new).index(token))
        if getattr(module, "generation_config", None) is not None:
            setattr(module.generation_config, f"{name}_token_id", list(new).index(token))


def add_tokens(tokenizer: Any, *names: str) -> Any:
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def make_texts(seed: int) -> list[str]:
    random = Random(seed)
    return [" ".join(random.choices(WORDS, k=random.randint(4, 12))) for _ in range(40)]


def write_rows(file: Path, seed: int) -> str:
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in make_texts(seed)))
    return str(file)
