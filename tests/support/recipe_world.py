"""Tiny models and datasets on the Hub on loopback, under the ids and with the columns that the shipped recipes name."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import transformers
import yaml
from hub_server import HubServer
from PIL import Image
from tokenizers import Regex
from tokenizers.decoders import Fuse
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import nn
from vocabularies import word_tokenizer

from featcal_cli.recipe.schema import Draft, TaskDraft

CHARACTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>"]
VOCABULARY = 100
ROWS, CLASSES = 12, 3
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
arrow: Any = pyarrow
parquet: Any = pyarrow.parquet
GLUE = {
    "cola": ["sentence"], "sst2": ["sentence"], "mnli": ["premise", "hypothesis"], "qnli": ["question", "sentence"],
    "qqp": ["question1", "question2"], "mrpc": ["sentence1", "sentence2"], "rte": ["sentence1", "sentence2"],
    "stsb": ["sentence1", "sentence2"],
}  # fmt: skip
MERGEBENCH = {
    "MergeBench/instruction_val": ["instruction", "output"],
    "MergeBench/math_val": ["query", "response"],
    "MergeBench/coding_val": ["instruction", "response"],
    "ise-uiuc/Magicoder-Evol-Instruct-110K": ["instruction", "response"],
}


@dataclass
class World:
    """What was put on the Hub so far, each file made once."""

    hub: HubServer
    folder: Path

    def publish(self, recipe: Draft) -> None:
        tasks = recipe.tasks.values()
        base = str(recipe.base)
        kind = "clip" if "clip" in base else "t5" if "t5" in base else "llama"
        self.hub.add_repo(base, self._model(kind, "base"))
        for number, spec in enumerate(tasks):
            base_too, _, own = str(spec.expert).rpartition("+")
            expert = self._adapter(base_too, number % 3) if base_too else self._model(f"{kind}-expert", str(number % 3))
            self.hub.add_repo(own, expert)
        if isinstance(recipe.merged, str):
            self.hub.add_repo(recipe.merged, self._model(f"{kind}-expert", "0"))
        for name in {row["model"] for table in recipe.paper.values() for row in table["rows"] if "model" in row}:
            self.hub.add_repo(name, self._model(f"{kind}-expert", "1"))
        for dataset in {str(spec.data.dataset) for spec in tasks if spec.data}:
            self._add_dataset(dataset, [spec for spec in tasks if spec.data and spec.data.dataset == dataset])

    def _model(self, kind: str, name: str) -> Path:
        if not (folder := self.folder / f"{kind}-{name}").exists():
            save_model(folder, kind.partition("-")[0], name)
        return folder

    def _adapter(self, base: str, number: int) -> Path:
        from peft import LoraConfig

        if not (folder := self.folder / f"adapter-{number}").exists():
            config = LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
            save_adapter(folder, base, build("t5"), config, number + 1)
        return folder

    def _add_dataset(self, dataset: str, specs: Sequence[TaskDraft]) -> None:
        place = self.folder / "data" / dataset.replace("/", "--")
        place.mkdir(parents=True, exist_ok=True)
        configs = []
        for spec in specs:
            assert spec.data is not None
            own = spec.evaluate.split if spec.evaluate and not spec.evaluate.lm_eval else spec.data.split
            splits = {str(spec.data.split), str(own)}
            name = spec.data.config or "default"
            entries = []
            for split in sorted(splits):
                path = write_rows(place / name, dataset, spec, split)
                entries.append({"split": split, "path": f"{name}/{path.name}"})
            configs.append({"config_name": name, "data_files": entries})
        (place / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
        self.hub.add_repo(dataset, place, kind="dataset")


def save_model(folder: Path, kind: str, name: str) -> None:
    """A tiny base with all that it needs beside its weights; or an expert of it, weights and config alone."""
    torch.manual_seed(0)
    model = build(kind)
    if name != "base":
        shake(model, int(name) + 1)
        (model.vision_model if kind == "clip" else model).save_pretrained(folder)
        return
    model.save_pretrained(folder)
    save_tokenizer(folder, chat=kind == "llama")
    if kind == "clip":
        processor: Any = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
        processor.save_pretrained(folder)


def save_adapter(folder: Path, base: object, model: Any, config: Any, seed: int = 0) -> Path:
    """An adapter of random weights on a model that it calls `base`, as peft saves it."""
    import peft

    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(folder)
    return folder


def build(kind: str) -> Any:
    """A model of random weights, always the same, of the class that the recipes' models have."""
    torch.manual_seed(0)
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if kind == "clip":
        text, vision = {**TINY, **ids, "max_position_embeddings": 77}, {**TINY, "image_size": 16, "patch_size": 8}
        config: Any = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        model: Any = transformers.CLIPModel(config)
    elif kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, **ids, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.LlamaConfig(**TINY, **ids, num_key_value_heads=1, tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
    shake(model, 0)
    return model.eval()


def shake(model: nn.Module, seed: int) -> None:
    """Move all weights, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def save_tokenizer(folder: Path, *, chat: bool) -> None:
    """A token a character, so that no two texts are the same to a model."""
    parts = {"pre_tokenizer": Split(Regex(r"[\s\S]"), "isolated"), "decoder": Fuse()}
    if not chat:  # language models put no end behind what they are to go on with
        ends = {"single": "$A </s>", "pair": "$A </s> $B </s>"}
        parts["post_processor"] = TemplateProcessing(**ends, special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    fast = word_tokenizer([*SPECIAL, *CHARACTERS], "<unk>", parts, **names, model_max_length=77)
    if chat:
        fast.chat_template, fast.model_max_length = CHAT, 4096
    fast.save_pretrained(folder)


def write_rows(folder: Path, dataset: str, spec: TaskDraft, split: str) -> Path:
    """A split's file with the columns that the real dataset has."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(f"{dataset} {split}")
    file = folder / f"{split}.parquet"
    if dataset == "clip-benchmark/wds_fer2013":  # a webdataset, whose rows the Hub has as parquet
        images = [{"bytes": draw(random), "path": None} for _ in range(ROWS)]
        write_table(file, [{"jpg": image, "cls": random.randrange(CLASSES), "__key__": "a"} for image in images], {})
    elif dataset == "nyu-mll/glue":
        assert spec.data is not None
        write_table(file, [write_glue(str(spec.data.config), number, random) for number in range(ROWS)], {})
    elif dataset in MERGEBENCH:
        write_table(file, [{column: write_text(random) for column in MERGEBENCH[dataset]} for _ in range(ROWS)], {})
    elif dataset == "HuggingFaceH4/ultrachat_200k":
        chats = [[{"role": role, "content": write_text(random)} for role in ("user", "assistant")] for _ in range(ROWS)]
        write_table(file, [{"prompt": "a", "messages": chat} for chat in chats], {})
    else:
        further = {"image_id": "a", "label_cat_dog": 0} if dataset == "timm/oxford-iiit-pet" else {}
        labels: Sequence[Any] = [False, True] if dataset == "1aurent/PatchCamelyon" else range(CLASSES)
        if dataset == "nateraw/rendered-sst2":
            labels = range(2)
        images = [{"bytes": draw(random), "path": None} for _ in range(ROWS)]
        rows = [{"image": image, "label": random.choice(labels), **further} for image in images]
        names = [f"{spec.expert} {number}"[-12:] for number in range(len(labels))]
        write_table(file, rows, {} if labels[0] is False else {"label": {"names": names, "_type": "ClassLabel"}})
    return file


def write_glue(config: str, number: int, random: Random) -> dict[str, Any]:
    """A row of one of GLUE's tasks."""
    label = round(5 * random.random(), 2) if config == "stsb" else random.randrange(3 if config == "mnli" else 2)
    return {**{column: write_text(random) for column in GLUE[config]}, "label": label, "idx": number}


def write_text(random: Random) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=3)) for _ in range(4))


def draw(random: Random) -> bytes:
    """A PNG of four random colours."""
    stream = io.BytesIO()
    image = Image.frombytes("RGB", (2, 2), random.randbytes(12))
    image.resize((16, 16)).save(stream, "PNG")
    return stream.getvalue()


def write_table(file: Path, rows: Sequence[Mapping[str, Any]], features: Mapping[str, Any]) -> None:
    """A parquet file; in its footer are features, as `datasets` puts them there."""
    table = arrow.Table.from_pylist(list(rows))
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, file, row_group_size=6)
