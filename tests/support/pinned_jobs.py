"""The jobs whose results a rebuild must leave equal, made without a line of the package or of other tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import peft
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

CLASSIFIER = [
    "calibrate -r job.yaml --select search -n 128 --log-file log.jsonl -o out",
    "calibrate -r out/featcal.yaml -o again --dry-run --save found.yaml",
    "evaluate -r out/featcal.yaml out --json",
    "evaluate -r job.yaml out",
    "inspect-drift out --json -n 16 --plot drift.png --projection places.svg --html drift.html",
    "inspect-drift merged -r job.yaml --compare out -n 16 --markdown drift.md",
]
RECIPE = """merged: merged
base: base
tasks:
  red: {expert: red, data: {path: red.jsonl}, evaluate: {split: train, metric: accuracy}}
  green: {expert: green, data: {path: green.jsonl}, evaluate: {split: train, metric: accuracy}}
"""
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

TASKS = ("red", "green")
WORDS, WIDTH = 99, 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Models and data in a folder, and the commands that run there one after the other."""

    name: str
    prepare: Callable[[Path], None]
    commands: list[list[str]]


def parity(checkout: Path, result: str) -> Job:
    """The job whose result the official implementation left in the tests' data."""
    data = next((checkout / "tests").rglob("clip-tiny"))
    official = data / f"{result}.safetensors"

    def prepare(folder: Path) -> None:
        shutil.copytree(data, folder, dirs_exist_ok=True)
        for task in range(3):
            save_file({"pixel_values": load_file(official)[f"pixel_values.t{task}"]}, folder / f"t{task}.safetensors")

    with safe_open(official, framework="pt") as file:
        told = file.metadata()
    sources = [
        word
        for task in range(3)
        for word in ("--expert", f"t{task}=expert{task}", "--data", f"t{task}=t{task}.safetensors")
    ]
    settings = ["--ridge", told["lambda"], "--rho", told["rho"], "--alpha", told["alpha"]]
    return Job(result, prepare, [["calibrate", "merged", "--base", "base", *sources, *settings, "-o", "out"]])


def small(name: str, prepare: Callable[[Path], None], options: str, *further: str, images: bool = False) -> Job:
    """A job of two tasks on what `prepare` writes: merged, base, red, green, and data of both."""
    files = ("red.images", "green.safetensors") if images else ("red.jsonl", "green.jsonl")
    sources = [f"--expert {task}={task} --data {task}={file}" for task, file in zip(TASKS, files, strict=True)]
    line = f"calibrate {'' if '--merge' in options else 'merged'} --base base {' '.join(sources)} {options} -o out"
    return Job(name, prepare, [line.split(), *(command.split() for command in further)])


@torch.no_grad()
def save_family(folder: Path, model: Any) -> None:
    """Save base, merged, and an expert a task."""

    def shake(size: float) -> None:
        for value in model.parameters():
            spread = float(value.std()) if value.numel() > 1 else 0.0
            value += size * (spread or 0.3) * torch.randn(value.shape)

    for value in model.parameters():
        if value.ndim > 1:  # fresh ones are so small that inputs hardly matter
            value *= 0.2 / value.std()
    shake(0.5)
    model.save_pretrained(folder / "base")
    start = [value.detach().clone() for value in model.parameters()]
    merged = [value.clone() for value in start]
    for task in TASKS:
        model.load_state_dict(type(model).from_pretrained(folder / "base").state_dict())
        shake(0.3)
        model.save_pretrained(folder / task)
        for total, now, then in zip(merged, model.parameters(), start, strict=True):
            total += (now.detach() - then) / len(TASKS)
    for value, total in zip(model.parameters(), merged, strict=True):
        value.copy_(total)
    model.save_pretrained(folder / "merged")


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words w3, w4, …"""
    words = {"[PAD]": 0, "[UNK]": 1, "[END]": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[END]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder / "base")


def write_rows(folder: Path, *columns: str) -> None:
    """Texts of all tasks, with a label of two."""
    for task in TASKS:
        random = Random(task)
        rows = []
        for number in range(200):
            texts = {
                name: " ".join(f"w{random.randrange(3, WORDS)}" for _ in range(6 + number % 5)) for name in columns
            }
            rows.append(json.dumps({**texts, "label": number % 2}) + "\n")
        (folder / f"{task}.jsonl").write_text("".join(rows))


def causal(folder: Path) -> None:
    """A Llama, one expert of which is a LoRA adapter."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=2)
    save_family(folder, transformers.LlamaForCausalLM(config))
    settings = peft.LoraConfig(r=4, target_modules=r".*\.(q_proj|v_proj|down_proj)", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(folder / "base"), settings)
    with torch.no_grad():
        for value in (value for value in model.parameters() if value.requires_grad):
            value += 0.1 * torch.randn(value.shape)
    shutil.rmtree(folder / "green")
    model.save_pretrained(folder / "green")
    save_tokenizer(folder)
    write_rows(folder, "prompt", "completion")


def text_to_text(folder: Path) -> None:
    """A T5."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    save_family(folder, transformers.T5ForConditionalGeneration(config))
    save_tokenizer(folder)
    write_rows(folder, "question", "answer")


def classifier(folder: Path) -> None:
    """A BERT with a head."""
    torch.manual_seed(0)
    save_family(folder, transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **TEXT)))
    save_tokenizer(folder)
    write_rows(folder, "text")
    (folder / "job.yaml").write_text(RECIPE)


def two_towers(folder: Path) -> None:
    """A CLIP with images for one task, and images with texts for the other."""
    torch.manual_seed(0)
    images = {**SIZES, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(vision_config=images, text_config={**SIZES, **TEXT}, projection_dim=16)
    save_family(folder, transformers.CLIPModel(config))
    size = {"shortest_edge": 32}
    transformers.CLIPImageProcessorPil(size=size, crop_size=32).save_pretrained(folder / "base")
    (folder / "red.images").mkdir()
    for number in range(30):
        pixels = torch.randint(0, 256, (40, 36, 3), dtype=torch.uint8)
        Image.frombytes("RGB", (36, 40), bytes(pixels.flatten().tolist())).save(folder / "red.images" / f"{number}.png")
    ids = torch.randint(3, WORDS, (30, 9))
    pairs = {"pixel_values": torch.randn(30, 3, 32, 32), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    save_file(pairs, folder / "green.safetensors")


def jobs(checkout: Path) -> list[Job]:
    """All that are recorded."""
    return [
        Job("demo", lambda _: None, [["demo", "-o", "out"]]),
        parity(checkout, "official-a"),
        parity(checkout, "official-b"),
        small(
            "causal",
            causal,
            "-n 24 --select preset --merge task_arithmetic:0.5 --batch-size 5",
            "modules merged --json",
            "modules merged",
        ),
        small("text-to-text", text_to_text, "-n 24 --merge average --ridge 0.01 --rho 1 --alpha 0.5 --json"),
        small("two-towers", two_towers, "-n 16 --ridge 0.05 --rho 2 --alpha 0.3 --norms all", images=True),
        Job("classifier", classifier, [command.split() for command in CLASSIFIER]),
    ]
