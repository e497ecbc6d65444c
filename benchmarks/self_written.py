"""How much of the gain is left where experts write the examples themselves, next to real ones.

    python benchmarks/self_written.py FOLDER [-n EXAMPLES] [--scale SCALE]

FOLDER is a family of language models or of encoder-decoders (family_codes.py, family_seq2seq.py). Gains are on the
family's test rows, the mean over three seeds, at the settings that are best with real examples and at those that are
best with each other kind. Encoder-decoders, which `--data TASK=self` refuses, are asked in several ways for sources, to
which they write the targets. `--scale` merges the family anew, by task arithmetic. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from experiments import SEEDS, TRIED
from judge import evaluate, load_model, merge_states, read_family, read_rows, save, write_family
from lab import Lab, gain
from transformers import AutoTokenizer

AT = 5
"""So many of the settings are tried: the paper's, and the best of earlier tables."""
Rows = list[dict[str, str]]
KINDS = ("random letters", "its decoder's, unasked", "all decoders', unasked", "real ones")
"""Where the sources of encoder-decoders come from."""


def sample(model: Any, tokenizer: Any, sources: list[str], most: int = 24) -> list[str]:
    """What an encoder-decoder, whose tokens are letters, writes to each source, by its own probabilities."""
    given = tokenizer(sources, padding=True, return_tensors="pt")
    kept = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        written = model.generate(**kept, do_sample=True, top_k=0, max_new_tokens=most)
    letters = (tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True) for ids in written.tolist())
    return ["".join(text) for text in letters]


def write_pairs(folder: Path, count: int, seed: int) -> dict[str, dict[str, Rows]]:
    """Rows {source, target} by kind and task, whose targets the task's expert writes."""
    torch.manual_seed(seed)
    random, tasks = Random(seed), list(read_family(folder).tasks)
    experts = {task: load_model(folder / "experts" / task) for task in tasks}
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    letters = [token for token in tokenizer.get_vocab() if len(token) == 1]
    unasked = {task: [x for x in sample(experts[task], tokenizer, [""] * 2 * count) if x.strip()] for task in tasks}
    mixed = [text for texts in unasked.values() for text in texts]

    def sources_of(kind: str, task: str) -> list[str]:
        if kind == KINDS[0]:
            return ["".join(random.choices(letters, k=random.randint(4, 14))) for _ in range(count)]
        if kind == KINDS[3]:
            return [row["source"] for row in random.sample(read_rows(folder, task, "train"), count)]
        return random.sample(unasked[task] if kind == KINDS[1] else mixed, count)

    written: dict[str, dict[str, Rows]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for task in tasks:
            sources = sources_of(kind, task)
            targets = sample(experts[task], tokenizer, sources)
            pairs = zip(sources, targets, strict=True)
            written[kind][task] = [{"source": one, "target": other} for one, other in pairs if other.strip()]
    return written


def name_sources(folder: Path, scratch: Path, examples: int, seed: int) -> dict[str, Mapping[str, str] | None]:
    """Where the examples come from, by what they are called; None for the family's own."""
    if read_family(folder).kind == "causal":
        return {"real": None, "self": dict.fromkeys(read_family(folder).tasks, "self")}
    sources: dict[str, Mapping[str, str] | None] = {"real": None}
    for kind, tasks in write_pairs(folder, 2 * examples + 16, seed).items():
        files = {}
        for task, rows in tasks.items():
            file = scratch / f"{seed} {kind} {task}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            files[task] = str(file)
        sources[f"sources: {kind}"] = files
    return sources


def merge_again(folder: Path, scale: float, place: Path) -> Path:
    """The family with a merged model of another scale, in a folder below `place`."""
    family, other = read_family(folder), place / "family"
    other.mkdir()
    for name in ("base", "experts", "data"):
        (other / name).symlink_to((folder / name).resolve())
    base = load_model(folder / "base")
    experts = [load_model(folder / "experts" / task).state_dict() for task in family.tasks]
    base.load_state_dict(merge_states(base.state_dict(), experts, scale))
    save(base, AutoTokenizer.from_pretrained(folder / "base"), other / "merged")
    scores = {**family.scores, "merged": evaluate(folder, other / "merged")}
    write_family(replace(family, scale=scale, scores=scores), other)
    return other


def measure(folder: Path, examples: int, show: Callable[[str], None]) -> None:
    """Print the table."""
    gains: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with TemporaryDirectory() as scratch:
        for seed in SEEDS:
            for kind, sources in name_sources(folder, Path(scratch), examples, seed).items():
                lab = Lab(folder, examples, seed, sources)
                merged = lab.score(lab.models.merged.module)
                candidates = {f"{s.ridge:g}, {s.rho:g}, {s.alpha:g}": s for s in TRIED[:AT]}
                students = lab.calibrate(candidates, examples).students
                for name in candidates:
                    found = gain(lab.score(students[name].model.module), merged)
                    gains.setdefault(kind, {}).setdefault(name, []).append(found)
                    print(seed, kind, name, *found, file=sys.stderr, flush=True)
    family = read_family(folder)
    sign = 1 if family.higher_is_better else -1
    scores = family.scores
    gap = sign * (fmean(scores["experts"].values()) - fmean(scores["merged"].values()))

    def mean(kind: str, name: str) -> float:
        return fmean(value for value, _ in gains[kind][name])

    best_real = max(gains["real"], key=lambda name: mean("real", name))
    show(
        f"\n#### {family.name}, merged at {family.scale:g}, {gap:.3g} behind the experts; {examples} examples a task\n"
    )
    show("| examples | settings (λ, ρ, α) | mean gain | worst task | of the gap | of the gain with real ones |")
    show("|---|---|---|---|---|---|")
    for kind, by_name in gains.items():
        for name in dict.fromkeys((best_real, max(by_name, key=lambda name: mean(kind, name)))):
            values = [value for value, _ in by_name[name]]
            worst = fmean(value for _, value in by_name[name])
            share = f"{fmean(values) / gap:.0%} | {fmean(values) / mean('real', best_real):.0%}"
            show(f"| {kind} | {name} | {fmean(values):+.3g} ± {stdev(values):.2g} | {worst:+.3g} | {share} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    parser.add_argument("--scale", type=float)
    arguments = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = merge_again(arguments.folder, arguments.scale, Path(place)) if arguments.scale else arguments.folder
        measure(folder, arguments.examples, lambda line: print(line, flush=True))
