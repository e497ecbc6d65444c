"""Sources of examples in a folder of a test's own, and what tiny models are given of them."""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from vocabularies import word_tokenizer

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.examples import TaskExamples, draw_examples
from featcal_cli.data.labelled import open_labelled
from featcal_cli.data.preprocessing import Target
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.workflows.verbs import calibrate

arrow: Any = pyarrow  # has no types
Row = Mapping[str, Any]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>"] + [f"w{number}" for number in range(50)]
WORDS += ["user", "assistant", "system", "tool"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


class Folder:
    """A folder for a source and, beside it, an expert's folder with its preprocessor."""

    def __init__(self, path: Path, shelf: Path) -> None:
        self.path = path
        self.expert = path / "expert"
        self.shelf = shelf
        """A folder for tokenizers that several tests need."""

    def tokenizer(self, *, chat: bool = False, words: Sequence[str] = WORDS, **settings: Any) -> None:
        """Save a word-level tokenizer, which has a pad token unless told otherwise."""
        settings = {"pad_token": "[PAD]", "eos_token": "</s>", "unk_token": "[UNK]", **settings}
        saved = self.shelf / str(zlib.crc32(repr((chat, words, settings)).encode()))
        if not saved.exists():
            pair, ends = "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
            around = TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ends)
            fast = word_tokenizer(words, "[UNK]", {"post_processor": around}, **settings)
            if chat:
                fast.chat_template = CHAT_TEMPLATE
            fast.save_pretrained(saved)
        shutil.copytree(saved, self.expert, dirs_exist_ok=True)

    def file(self, name: str, content: str | bytes | Sequence[Row], **settings: Any) -> Data:
        """A source of one file: as it is, or of rows (.parquet: row groups of 10)."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet") and not isinstance(content, str | bytes):
            arrow.parquet.write_table(arrow.Table.from_pylist(list(content)), file, row_group_size=10)
        else:
            content = content if isinstance(content, str | bytes) else lines(content)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return Data(path=str(file), **settings)

    def rows(self, *rows: Row, **settings: Any) -> Data:
        return self.file("rows.jsonl", rows, **settings)

    def tensors(self, **tensors: Tensor) -> Data:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, self.path / "a.safetensors")
        return Data(path=str(self.path / "a.safetensors"))

    def images(self, images: Mapping[str, Image.Image | bytes], place: str = "images", **options: Any) -> Data:
        for name, image in images.items():
            file = self.path / place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(image, bytes):
                file.write_bytes(image)
            else:
                image.save(file, **options)
        return Data(path=str(self.path / place))

    def prepare(self, model: PreTrainedModel) -> None:
        """Save the model's usual preprocessor, unless there is one."""
        if not self.expert.exists() and model.main_input_name == "pixel_values":
            ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(self.expert)
        elif not self.expert.exists():
            self.tokenizer()

    def load(
        self, model: PreTrainedModel, data: Data, *, count: int = 8, batch_size: int = 4, seed: int = 0, **options: Any
    ) -> TaskExamples:
        self.prepare(model)
        target = Target(model, [self.expert])
        return draw_examples("task", data, target, count=count, seed=seed, **options).cut(batch_size)

    def refuse(self, model: PreTrainedModel, data: Data, message: str, **options: Any) -> DataError:
        with pytest.raises(DataError, match=message) as caught:
            self.load(model, data, **options)
        return caught.value

    def labelled(
        self, model: PreTrainedModel, data: Data, split: str = "train", batch_size: int = 2
    ) -> tuple[list[Batch], list[int]]:
        self.prepare(model)
        rows = open_labelled("task", data, split, Target(model, [self.expert]))
        batches, labels = zip(*rows.batches(batch_size), strict=True)
        names = model.config.label2id
        return list(batches), [number_label(label, rows.column, names, rows.where) for part in labels for label in part]

    def check_merge(self, make: Callable[[], PreTrainedModel], blocks: int, **data: str) -> None:
        """Calibrate a merge in this folder of three random models, given the file of each task."""
        for seed, name in enumerate(("merged", "base", "expert")):
            torch.manual_seed(seed)
            make().save_pretrained(self.path / name)
        expert = str(self.path / "expert")
        tasks = {task: {"expert": expert, "data": str(self.path / name)} for task, name in data.items()}
        models = {name: str(self.path / name) for name in ("merged", "base")}
        recipe = {**models, "tasks": tasks, "calibration": {"examples": 8}}
        report = calibrate(recipe, output=self.path / "out").report
        assert sum(not block.is_head for block in report.blocks) == blocks
        assert all(block.modules for block in report.blocks)


def lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(batches: Sequence[Batch], name: str = "input_ids") -> list[list[Any]]:
    return [row.flatten().tolist() for batch in batches for row in batch[name]]


def words_of(batches: Sequence[Batch], name: str = "input_ids") -> list[str]:
    return [" ".join(WORDS[number] for number in row) for row in rows_of(batches, name)]
