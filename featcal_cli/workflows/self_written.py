"""Examples that an expert writes itself where a recipe names no data: sampled once, and kept in the cache."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from featcal_cli.data.batches import Example
from featcal_cli.data.examples import TOKENS_AN_EXAMPLE, DrawnExamples, draw_examples, most_held_out
from featcal_cli.data.preprocessing import Target
from featcal_cli.data.rows import naming_task
from featcal_cli.data.text import TextReader, open_text
from featcal_cli.hub.snapshot import Origin
from featcal_cli.models.loading import find_class, load_model
from featcal_cli.recipe.data_formats import Row
from featcal_cli.recipe.schema import SELF, Data, Recipe
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import DataError, FeatCalError, OutputError, ShortageError
from featcal_cli.runtime.files import cache_folder, name_reason, tell_fix, write_file
from featcal_cli.runtime.hardware import is_out_of_memory, release_memory
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.sanitise import exception_text
from featcal_cli.workflows.estimates import TEXTS_WRITTEN as AT_ONCE
from featcal_cli.workflows.session import EXPERT, Session

VERSION = 1
"""Version of the sampling procedure; rows written by another version are not reused."""
PASSES = 4
"""Factor by which more texts than needed may be generated, because some are empty or repeat others."""
WRITTEN = Data(dataset=SELF)
MARK = "featcal"
"""Text that stands for the user's message while a chat template is split into the parts before and after it."""


def open_self_written(task: str, model_class: type[PreTrainedModel], target: Target) -> TextReader:
    """Open a reader of the examples that an expert of `model_class` writes. Raises DataError."""
    names = inspect.signature(model_class.forward).parameters.keys()
    others = {"pixel_values", "input_features", "decoder_input_ids"} & names
    if model_class.main_input_name != "input_ids" or others or not model_class.can_generate():
        what = f"this expert cannot write examples: {model_class.__name__} is no causal language model"
        fix = f"name some, of the kind it was made for: --data {task}=SOURCE"
        raise DataError(what, where=f"{task}: {SELF}", fix=fix)
    return _open(task, target)


def _open(task: str, target: Target) -> TextReader:
    with naming_task(task, WRITTEN):
        return open_text(WRITTEN, {"text": [MARK]}, _shorten(target))


def _shorten(target: Target) -> Target:
    """Return the target with texts as long as an expert writes them."""
    return replace(target, max_length=min(target.max_length or TOKENS_AN_EXAMPLE, TOKENS_AN_EXAMPLE))


def reserve_examples(task: str, reader: TextReader, count: int, sampled: int | None) -> DrawnExamples:
    """Return placeholders of the greatest length for `sampled` (None: `count`) examples that are to be written."""
    kept = min(count, sampled or count)
    inputs = {
        "input_ids": torch.zeros(1, reader.max_tokens).long(),
        "attention_mask": torch.ones(1, reader.max_tokens).long(),
    }
    example = Example({name: values for name, values in inputs.items() if name in reader.target.names})
    total = count + most_held_out(count)
    note = f"{task}: the expert is to write {total} examples of at most {reader.max_tokens} tokens itself"
    half = most_held_out(kept) // 2
    lists = [example] * kept, [example] * half, [example] * (most_held_out(kept) - half)
    return DrawnExamples(reader, *lists, [note], (count, most_held_out(count)), is_whole=False)


def write_examples(
    session: Session, recipe: Recipe, origins: Mapping[str, Origin], targets: Mapping[str, Target], *, fits: bool
) -> dict[str, DrawnExamples]:
    """Let the expert of each task in `targets` write examples, on the rank that has the task; rows in the cache are
    reused. fits: False where they are only measured. Raises FeatCalError."""
    calibration = recipe.calibration
    count, seed = calibration.examples, calibration.seed
    written: dict[str, list[Row]] = {}
    files: dict[str, Path] = {}
    for task, target in targets.items():
        reader = _open(task, target)
        total, expert = count + most_held_out(count), origins[f"{EXPERT}{task}"]
        about = [VERSION, expert.key, total, seed, reader.max_tokens, reader.tokenizer.chat_template]
        files[task] = cache_folder() / "self-written" / f"{sha256(json.dumps(about).encode()).hexdigest()[:32]}.jsonl"
        if task in session.ranks.own(recipe.tasks):
            written[task] = _read_kept(files[task]) or _write_rows(session, task, expert, reader, total, seed)
    drawn = {}
    for task, rows in session.ranks.unite(written).items():
        _keep(rows, files[task])
        data = Data(path=str(files[task]))
        drawn[task] = draw_examples(task, data, _shorten(targets[task]), count=count, seed=seed, fits=fits)
        session.note(f"{task}: its expert has written the examples, which are in {data}", *drawn[task].notes)
    return drawn


def _write_rows(session: Session, task: str, origin: Origin, reader: TextReader, count: int, seed: int) -> list[Row]:
    """Load the whole expert onto the run's device and let it write `count` rows. Raises FeatCalError."""
    session.stage(f"downloading {origin.name}")
    snapshot, device = session.fetch(origin), session.device
    session.stage(f"writing examples of {task}")
    model: Any = load_model(f"{EXPERT}{task}", snapshot, find_class(snapshot)).module
    fix = f"name examples: --data {task}=SOURCE"
    try:
        with naming_task(task, WRITTEN):
            writer, about = Writer(model.to(device), reader), f"writing examples of {task}"
            rows = writer.write(count, seed, lambda done: session.stage(f"{about}: {done} of {count}"))
    except FeatCalError:
        raise
    except Exception as error:  # what it is like, or its tokenizer, may make any part of transformers raise anything
        if is_out_of_memory(error):
            what = f"the memory of {device} does not suffice for a whole expert that writes {AT_ONCE} texts at once"
            raise ShortageError(what, where=f"{task}: {SELF}", fix=fix) from error
        what = f"this expert cannot write examples: {exception_text(error)}"
        raise DataError(what, where=f"{task}: {SELF}", fix=fix) from error
    if device.type == "cpu":
        hardware.give_back(model.parameters())
    del model
    release_memory(device)
    return rows


def _read_kept(file: Path) -> list[Row]:
    """Read the rows that an earlier run has written; an empty list if there are none."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError):
        return []


def _keep(rows: Sequence[Row], file: Path) -> None:
    """Store the rows in the cache, for this run and later ones. Raises OutputError."""
    try:
        if _read_kept(file) != rows:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        fix = tell_fix(error, "point FEATCAL_CACHE to a folder that can be written")
        raise OutputError(f"cannot write: {name_reason(error)}", where=str(file), fix=fix) from error


@dataclass(frozen=True)
class Writer:
    """An expert that writes conversations if it has a chat template, otherwise plain texts."""

    model: PreTrainedModel
    """The whole model, on the device on which it generates."""
    reader: TextReader

    def write(self, count: int, seed: int, tell: Callable[[int], None]) -> list[Row]:
        """Write `count` different rows, the same for the same seed and device. Raises DataError if there are too
        few."""
        rows: dict[str, Row] = {}
        seeds = Random(seed)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        write = self._write_texts if (turn := self._find_turn()) is None else lambda seed: self._converse(*turn, seed)
        for _ in range(PASSES * -(-count // AT_ONCE)):
            with torch.random.fork_rng(devices=devices), torch.inference_mode(), quiet_transformers():
                for row in write(seeds.getrandbits(63)):
                    rows.setdefault(json.dumps(row), row)
            tell(min(len(rows), count))
            if len(rows) >= count:
                return list(rows.values())[:count]
        what = f"the expert has written {len(rows)} different texts, and {count} are needed"
        raise DataError(what, fix="name examples: --data TASK=SOURCE, or fewer with -n")

    def _write_texts(self, seed: int) -> Iterator[Row]:
        """Yield texts that start from the tokenizer's begin or end token; if it has neither, from random tokens."""
        tokenizer = self.reader.tokenizer
        start = next((x for x in (tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None), None)
        random = Random(seed)
        starts = [[random.randrange(len(tokenizer)) if start is None else start] for _ in range(AT_ONCE)]
        for first, ids in zip(starts, self._sample(starts, self.reader.max_tokens - 1, seed), strict=True):
            text = tokenizer.decode([*first, *ids], skip_special_tokens=True)
            if (text := text.rstrip("\ufffd")).strip():  # the last letter may be there in part
                yield {"text": text}

    def _converse(self, prefix: list[int], end: str, seed: int) -> Iterator[Row]:
        """Yield conversations: the expert writes a question between `prefix` and `end`, and then its own answer."""
        tokenizer, most = self.reader.tokenizer, self.reader.max_tokens
        asked = self._sample([prefix] * AT_ONCE, max(1, most // 2 - len(prefix)), seed)
        questions = [tokenizer.decode(ids, skip_special_tokens=True).partition(end or "\0")[0] for ids in asked]
        turns = [{"role": "user", "content": text.strip()} for text in questions if text.strip()]
        prompts = [tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True) for turn in turns]
        ids = [self._encode(prompt) for prompt in prompts]
        room = most - max(map(len, ids), default=most)
        if room < 1:
            return
        for turn, answer in zip(turns, self._sample(ids, room, seed + 1), strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True).rstrip("\ufffd").strip()
            if text:
                yield {"messages": [turn, {"role": "assistant", "content": text}]}

    def _find_turn(self) -> tuple[list[int], str] | None:
        """Return what the chat template puts before the user's message (tokens) and after it (text), or None."""
        if not self.reader.tokenizer.chat_template:
            return None
        try:
            text = self.reader.tokenizer.apply_chat_template(
                [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
            )
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return None
        prefix, mark, end = str(text).rpartition(MARK)
        ids = self._encode(prefix) if mark else []
        return (ids, end.strip()) if ids else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.reader.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _sample(self, prompts: Sequence[list[int]], most: int, seed: int) -> list[list[int]]:
        """Sample a continuation of each prompt from the model's own probabilities, without the token that ends it."""
        if not prompts:
            return []
        tokenizer, model = self.reader.tokenizer, self.model
        given: dict[str, Tensor] = tokenizer.pad(
            {"input_ids": list(prompts)}, padding_side="left", return_attention_mask=True, return_tensors="pt"
        ).to(model.device)
        ends = self._ends()
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=most, use_cache=True,
            eos_token_id=sorted(ends) or None, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        torch.manual_seed(seed)
        module: Any = model
        module.generation_config = settings  # nothing of what the repo wants: penalties, greedy search
        written = module.generate(**given)[:, given["input_ids"].shape[1] :].tolist()
        return [ids[: next((place for place, x in enumerate(ids) if x in ends), len(ids))] for ids in written]

    def _ends(self) -> set[int]:
        tokenizer, known = self.reader.tokenizer, getattr(self.model.config, "eos_token_id", None)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        return {*special, *tokenizer.all_special_ids, *([known] if isinstance(known, int) else known or [])}
