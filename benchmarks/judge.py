"""What all families share: their layout on disk, training, merging, and the score of any model on every task.

A family is a merge to try a method on: a base, experts fine-tuned from it, their merge, and data. Its folder:

    family.json                                   what it is (class Family)
    base/  merged/  experts/TASK/                 transformers folders with tokenizer or image processor
    data/TASK/{train,validation,test}.jsonl       rows {"text", "label"}, {"text"} or {"source", "target"}
    data/TASK/{train,validation,test}.parquet     rows {"image", "label"}, as the `datasets` library stores images

`python benchmarks/judge.py FOLDER [MODEL...]` prints how base, merged, experts, and the models named score.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

SCALES = [step / 10 for step in range(1, 11)]
METRICS = {"classification": "accuracy, %", "causal": "loss, nats a token", "seq2seq": "token accuracy, %"}
ROWS_A_BATCH = 250

Row = dict[str, Any]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """What family.json says."""

    name: str
    kind: str
    """classification, causal or seq2seq."""
    source: str
    """Where the data comes from, and under which licence."""
    tasks: dict[str, Row]
    """By name: whatever the maker wants to say of a task, such as its question and its labels."""
    scale: float = math.nan
    """Of the task arithmetic: merged = base + scale * sum(expert - base)."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """What base, merged and experts score on the test rows of each task, as `evaluate` measures it."""

    @property
    def higher_is_better(self) -> bool:
        """Whether scores are accuracies and not losses."""
        return self.kind != "causal"


def read_family(folder: Path) -> Family:
    """The family in a folder."""
    return Family(**json.loads((folder / "family.json").read_text(encoding="utf-8")))


def write_family(family: Family, folder: Path) -> None:
    """Write family.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "family.json").write_text(json.dumps(asdict(family), indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_rows(folder: Path, task: str, split: str, rows: Sequence[Row]) -> None:
    """Write rows of text as data/TASK/SPLIT.jsonl."""
    file = folder / "data" / task / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def read_rows(folder: Path, task: str, split: str) -> list[Row]:
    """The rows of one task and split; images as PIL images."""
    file = folder / "data" / task / f"{split}.jsonl"
    if file.exists():
        with file.open(encoding="utf-8") as lines:  # splitlines() would also cut at U+2028 inside a text
            return [json.loads(line) for line in lines]
    return [decode_row(row) for row in pq.read_table(file.with_suffix(".parquet")).to_pylist()]


def decode_row(row: Mapping[str, Any]) -> Row:
    """The row with its image, if it has one, as a PIL image."""
    return {**row, "image": Image.open(io.BytesIO(row["image"]["bytes"]))} if "image" in row else dict(row)


def train(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float, decay: float) -> float:
    """AdamW with a short warm-up and a cosine to zero; `loss` draws its own batch. The mean loss of the last tenth."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    last = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step >= 0.9 * steps:
            last.append(value.item())
    return sum(last) / len(last)


def save(model: Any, preprocessor: Any, folder: Path) -> None:
    """Write weights, config, and tokenizer or image processor."""
    model.save_pretrained(folder)
    preprocessor.save_pretrained(folder)


def load_model(folder: Path) -> Any:
    """The model of a folder, in the class that its config names, ready to run."""
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder).eval()


def body_of(model: Any, kind: str) -> Any:
    """The part of a model that is merged: everything below the head of a classifier, else the whole model."""
    return model.base_model if kind == "classification" else model


def merge_states(base: State, experts: Sequence[State], scale: float) -> State:
    """Task arithmetic: base + scale * sum(expert - base)."""
    return {k: v + scale * sum((other[k] - v for other in experts), torch.zeros_like(v)) for k, v in base.items()}


@dataclass(frozen=True)
class Judge:
    """One task's expert and labelled rows, ready to score any model's body under the expert's head."""

    kind: str
    expert: Any
    batches: list[dict[str, Tensor]]
    """The expert's forward arguments, with labels: classes [examples], or tokens [examples, tokens], -100 for none."""

    def score(self, body: Mapping[str, Tensor] | None = None) -> float:
        """Accuracy in percent, or loss in nats a token; `body` replaces the expert's own, tensor by tensor."""
        if body is not None:
            body_of(self.expert, self.kind).load_state_dict(body)  # strict: all of them, by name
        total, count = 0.0, 0
        with torch.inference_mode():
            for batch in self.batches:
                right, of = self._score_batch(batch)
                total, count = total + right, count + of
        return total / count if self.kind == "causal" else 100 * total / count

    def _score_batch(self, batch: dict[str, Tensor]) -> tuple[float, int]:
        labels = batch["labels"]
        if self.kind == "classification":
            logits = self.expert(**{name: value for name, value in batch.items() if name != "labels"}).logits
        else:
            logits = self.expert(**batch).logits
        if self.kind == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
            loss = nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="sum")
            return loss.item(), int((labels != -100).sum())
        return float((logits.argmax(-1) == labels).sum()), int((labels != -100).sum())


def load_judge(folder: Path, family: Family, task: str, split: str = "test") -> Judge:
    """The judge of one task on the rows of a split."""
    return make_judge(folder, family, task, read_rows(folder, task, split), ROWS_A_BATCH)


def make_judge(folder: Path, family: Family, task: str, rows: list[Row], size: int) -> Judge:
    """The judge of one task on these rows, in batches of a size."""
    expert = folder / "experts" / task
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    encode = _image_encoder(expert) if "image" in rows[0] else _text_encoder(expert, family.kind)
    return Judge(family.kind, load_model(expert), [encode(part) for part in parts])


def evaluate(folder: Path, model_folder: Path, split: str = "test") -> dict[str, float]:
    """The score of a model on each task of the family in `folder`: accuracy in percent, or loss in nats a token.

    A classifier's score is that of the expert's own head on the model's body; other models are scored whole. Raises
    RuntimeError when the model's tensors are not those of the experts.
    """
    family = read_family(folder)
    body = body_of(load_model(model_folder), family.kind).state_dict()
    return {task: load_judge(folder, family, task, split).score(body) for task in family.tasks}


def finish(folder: Path, family: Family) -> Family:
    """Merge what lies in base/ and experts/, write merged/ and family.json, and print the table of scores.

    The scale is the one of SCALES whose merge is best on the validation rows, on average over the tasks.
    """
    base = load_model(folder / "base")
    start = body_of(base, family.kind).state_dict()
    judges = {task: load_judge(folder, family, task, "validation") for task in family.tasks}
    others = [_copy(body_of(judge.expert, family.kind).state_dict()) for judge in judges.values()]
    by_scale = {}
    for scale in SCALES:
        merged = merge_states(start, others, scale)
        by_scale[scale] = sum(judge.score(merged) for judge in judges.values()) / len(judges)
    best = (max if family.higher_is_better else min)(by_scale, key=by_scale.__getitem__)
    print("merged on validation:", "  ".join(f"{scale}: {value:.4g}" for scale, value in by_scale.items()))
    body_of(base, family.kind).load_state_dict(merge_states(start, others, best))
    save(base, _preprocessor(folder / "base"), folder / "merged")
    family = Family(family.name, family.kind, family.source, family.tasks, best)
    write_family(family, folder)
    named = {name: evaluate(folder, folder / name) for name in ("base", "merged")}
    experts = {task: load_judge(folder, family, task).score() for task in family.tasks}
    family = Family(family.name, family.kind, family.source, family.tasks, best, {**named, "experts": experts})
    write_family(family, folder)
    print_table(family, {})
    return family


def print_table(family: Family, more: Mapping[str, dict[str, float]]) -> None:
    """Print the scores of base, merged, experts and of further models, by task and on average."""
    columns = {**family.scores, **more}
    wide = max(10, *(len(name) + 2 for name in columns))
    print(f"{METRICS[family.kind]:20}" + "".join(f"{name:>{wide}}" for name in columns))
    digits = 1 if family.higher_is_better else 3
    for task in family.tasks:
        print(f"{task:20}" + "".join(f"{scores[task]:{wide}.{digits}f}" for scores in columns.values()))
    means = [sum(scores.values()) / len(scores) for scores in columns.values()]
    print(f"{'mean':20}" + "".join(f"{mean:{wide}.{digits}f}" for mean in means))


def _copy(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def _preprocessor(folder: Path) -> Any:
    if (folder / "tokenizer_config.json").exists():
        return transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def _image_encoder(expert: Path) -> Callable[[list[Row]], dict[str, Tensor]]:
    processor = _preprocessor(expert)

    def encode(rows: list[Row]) -> dict[str, Tensor]:
        pixels = processor(images=[row["image"] for row in rows], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}

    return encode


def _text_encoder(expert: Path, kind: str) -> Callable[[list[Row]], dict[str, Tensor]]:
    tokenizer = _preprocessor(expert)

    def tokens(texts: list[str]) -> dict[str, Tensor]:
        found = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def encode(rows: list[Row]) -> dict[str, Tensor]:
        batch = tokens([row["source" if kind == "seq2seq" else "text"] for row in rows])
        if kind == "classification":
            return {**batch, "labels": torch.tensor([row["label"] for row in rows])}
        target = tokens([row["target"] for row in rows]) if kind == "seq2seq" else batch
        return {**batch, "labels": target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)}

    return encode


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print_table(read_family(where), {Path(model).name: evaluate(where, Path(model)) for model in sys.argv[2:]})
