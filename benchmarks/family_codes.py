"""Make the family *code*: byte-level language models of five kinds of text, fine-tuned from one of them all.

    pip install --no-deps bokeh django                               (their files are read, nothing of them is run)
    OMP_NUM_THREADS=1 python benchmarks/family_codes.py FOLDER       (about ten minutes on one core)
    OMP_NUM_THREADS=1 python benchmarks/family_codes.py FOLDER tied  (other texts and seed; one weight for both ends)

The text is what installed packages ship (SOURCES): other packages make another family. The base learns a mixture of the
five, each expert one of them from there. A row is a window of 127 bytes of a file, which lies in one split only.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from judge import Family, finish, save, train, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW = 127  # bytes
BATCH = 16  # windows
ROWS = {"train": 1500, "validation": 300, "test": 600}
SHARES = {"train": 70, "validation": 12, "test": 18}  # per cent of the files
ENOUGH = 8_000_000  # characters of one kind
MIXED = 2000  # windows of each kind that the base learns from
SOURCES = (
    "Python of sympy, networkx and matplotlib, C++ headers of torch, TypeScript of bokeh, translations of django "
    "(BSD-like licences), and the descriptions of the installed packages (each under its own licence)",
    "YAML of lm-eval, stubs of numpy and torch, Cython of pyarrow and scikit-learn, JavaScript of django, models of "
    "transformers (MIT, BSD-like and Apache-2.0 licences)",
)


def files_of(package: str, pattern: str) -> Iterator[tuple[str, Path]]:
    """Name and place of an installed package's files; the package is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{package} is not installed: pip install --no-deps {package}")
    root = Path(spec.submodule_search_locations[0])
    return ((f"{package}/{file.relative_to(root).as_posix()}", file) for file in root.glob(pattern))


def descriptions() -> Iterator[tuple[str, str]]:
    """Name and description of every installed package that has a long one."""
    for package in metadata.distributions():
        yield package.metadata["Name"], package.read_text("METADATA") or ""


def texts_of(*sources: tuple[str, str]) -> Callable[[], Iterator[tuple[str, str]]]:
    """A reader of name and text of the files of several packages, each with a pattern."""
    return lambda: (
        (name, file.read_text("utf-8", errors="replace")) for source in sources for name, file in files_of(*source)
    )


KINDS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "python": texts_of(("sympy", "**/*.py"), ("networkx", "**/*.py"), ("matplotlib", "**/*.py")),
    "cpp": texts_of(("torch", "include/**/*.h")),
    "typescript": texts_of(("bokeh", "server/static/js/lib/**/*.d.ts")),
    "translations": texts_of(("django", "**/*.po")),
    "prose": descriptions,
}
TIED_KINDS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "yaml": texts_of(("lm_eval", "**/*.yaml")),
    "stubs": texts_of(("numpy", "**/*.pyi"), ("torch", "**/*.pyi")),
    "cython": texts_of(("pyarrow", "**/*.p[yx][xi]"), ("sklearn", "**/*.pyx")),
    "javascript": texts_of(("django", "**/*.js")),
    "models": texts_of(("transformers", "models/**/*.py")),
}


def split_of(name: str) -> str:
    """The split that a file belongs to."""
    place = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "train" if place < SHARES["train"] else "test" if place >= 100 - SHARES["test"] else "validation"


def windows_of(text: str) -> Iterator[str]:
    """The text cut into windows of WINDOW bytes, or a little less where a letter of several bytes is at the cut."""
    data, start = text.encode(), 0
    while start + WINDOW <= len(data):
        end = start + WINDOW
        while end < len(data) and data[end] & 0xC0 == 0x80:  # within a letter
            end -= 1
        yield data[start:end].decode()
        start = end


def read_windows(read: Callable[[], Iterator[tuple[str, str]]]) -> dict[str, list[str]]:
    """The windows of one kind of text, shuffled, by split; equal files are read once."""
    texts = {text: name for name, text in sorted(read(), reverse=True)}
    order = sorted(texts, key=lambda text: hashlib.sha256(texts[text].encode()).digest()[::-1])
    windows: dict[str, list[str]] = {split: [] for split in ROWS}
    size = 0
    for text in order:
        size += len(text)
        if size < ENOUGH:
            windows[split_of(texts[text])] += windows_of(text)
    for number, split in enumerate(windows):
        random.Random(number).shuffle(windows[split])
    return windows


def new_tokenizer() -> Any:
    """One token a byte, after one that begins a window."""
    begin, padding = "<|begin|>", "<|padding|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([padding, begin, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, vocabulary[begin])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, pad_token=padding, model_max_length=WINDOW + 1
    )


def new_model(tokenizer: Any, *, tied: bool) -> Any:
    """A Llama of four blocks, width 128, whose query heads share two key and value heads."""
    torch.manual_seed(int(tied))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW + 1, bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train_on(model: Any, tokenizer: Any, windows: list[str], steps: int, lr: float) -> float:
    """Train on the windows in order, from the start again at their end; returns the last steps' loss, nats a byte."""
    starts = iter(range(steps))

    def loss() -> Tensor:
        start = next(starts) * BATCH
        batch = tokenizer(
            [windows[k % len(windows)] for k in range(start, start + BATCH)], padding=True, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        value: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        return value

    return train(model.parameters(), loss, steps, lr, decay=0.05)


def main(out: Path, *, tied: bool) -> None:
    """Read, train, write, merge, and print the table."""
    torch.set_num_threads(1)  # sums in one fixed order
    started = time.monotonic()
    kinds = {kind: read_windows(read) for kind, read in (TIED_KINDS if tied else KINDS).items()}
    for kind, windows in kinds.items():
        print(kind, {split: len(rows) for split, rows in windows.items()})
        for split, count in ROWS.items():
            write_rows(out, kind, split, [{"text": text} for text in windows[split][:count]])
    tokenizer = new_tokenizer()
    base = new_model(tokenizer, tied=tied)
    mixture = [windows["train"][row] for row in range(MIXED) for windows in kinds.values()]
    loss = train_on(base, tokenizer, mixture, steps=600, lr=2e-3)
    save(base, tokenizer, out / "base")
    print(f"base: loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    for kind, windows in kinds.items():
        expert = LlamaForCausalLM.from_pretrained(out / "base").train()
        loss = train_on(expert, tokenizer, windows["train"], steps=350, lr=7e-4)
        save(expert, tokenizer, out / "experts" / kind)
        print(f"{kind}: loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    tasks = {kind: {"text": kind} for kind in kinds}
    finish(out, Family("tied code" if tied else "code", "causal", SOURCES[tied], tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), tied=sys.argv[2:] == ["tied"])
