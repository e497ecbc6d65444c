"""Rows of an image and a text become what a model that reads both is given."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from command_line import featcal
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from featcal_cli.data.examples import TaskExamples, draw_examples
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

COLOURS = ["red", "blue", "green"]
WORDS = ["[PAD]", "[UNK]", "[END]", "<image>", ":", "user", "assistant", "what", "is", "it", "a", *COLOURS]
LAYERS: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
SEEING = LAYERS | {"image_size": 28, "patch_size": 14}
TURNS = (
    "{% for m in messages %}{{ m['role'] }} : {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
built: Any = transformers


def make_tokenizer() -> Any:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast: Any = PreTrainedTokenizerFast
    special = {"additional_special_tokens": ["<image>"]}
    return fast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]", **special)


def make_model(kind: str) -> PreTrainedModel:
    reading = LAYERS | {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "clip":
        text = reading | {"max_position_embeddings": 16}
        model: PreTrainedModel = built.CLIPModel(
            built.CLIPConfig(text_config=text, vision_config=SEEING, projection_dim=8)
        )
        return model
    text = built.LlamaConfig(**reading, num_key_value_heads=2, max_position_embeddings=64)
    vision = built.CLIPVisionConfig(**SEEING)
    settings = {"image_token_index": 3, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    llava: PreTrainedModel = built.LlavaForConditionalGeneration(
        built.LlavaConfig(vision_config=vision, text_config=text, **settings)
    )
    return llava


def prepare(folder: Path, kind: str, template: str | None = TURNS) -> PreTrainedModel:
    """A model, with what reads images and texts in the folder of merged."""
    images: Any = CLIPImageProcessorPil
    images = images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    if kind == "clip":
        images.save_pretrained(folder / "merged")
        make_tokenizer().save_pretrained(folder / "merged")
    else:
        save_processor(folder / "merged", images, template)
    return make_model(kind)


def save_processor(folder: Path, images: Any, template: str | None) -> None:
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    built.LlavaProcessor(images, make_tokenizer(), chat_template=template, **settings).save_pretrained(folder)


def picture(number: int) -> dict[str, Any]:
    """Another one for each number, encoded."""
    colour = numpy.zeros((30, 30 + number % 2, 3), dtype=numpy.uint8)
    colour[: 5 + number, :, number % 3] = 255
    Image.fromarray(colour).save(file := io.BytesIO(), "PNG")
    return {"bytes": file.getvalue(), "path": f"{number}.png"}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    arrow: Any = pyarrow
    arrow.parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def draw(folder: Path, model: PreTrainedModel, source: Path, **keys: Any) -> TaskExamples:
    data = Data(path=str(source), **keys)
    return draw_examples("seen", data, model, [folder / "merged"], count=4, seed=0).cut(4)


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_two_towers_read_captions_and_images(tmp_path: Path) -> None:
    model = prepare(tmp_path, "clip")
    source = write(tmp_path, [{"image": picture(n), "caption": f"it is a {COLOURS[n % 3]}"} for n in range(4)])
    (batch,) = draw(tmp_path, model, source).fitted
    assert batch.keys() == {"pixel_values", "input_ids", "attention_mask"}
    for pixels, ids in zip(batch["pixel_values"], batch["input_ids"], strict=True):
        brightest = COLOURS[int(pixels.mean((1, 2)).argmax())]
        assert ids.tolist() == ids_of(f"it is a {brightest}")
    (alone,) = draw(tmp_path, model, source, columns={"image": "image"}).fitted
    assert alone.keys() == {"pixel_values"}
    (unseen,) = draw(tmp_path, model, source, columns={"text": "caption"}).fitted
    assert unseen.keys() == {"input_ids", "attention_mask"}


def test_labels_are_no_captions(tmp_path: Path) -> None:
    model = prepare(tmp_path, "clip")
    source = write(tmp_path, [{"image": picture(n), "label": n % 3, "name": "it is"} for n in range(4)])
    assert draw(tmp_path, model, source).fitted[0].keys() == {"pixel_values"}


ASKED = "user : <image> <image> <image> <image> what is it assistant : "


@pytest.mark.parametrize(
    "row",
    [
        lambda colour: {"question": "what is it", "answer": colour},
        lambda colour: {"question": "what is it", "answers": [colour, "a"]},
        lambda colour: {
            "conversations": [
                {"from": "human", "value": "<image>\nwhat is it"},
                {"from": "gpt", "value": colour},
            ]
        },
        lambda colour: {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what is it"}]},
                {"role": "assistant", "content": [{"type": "text", "text": colour}]},
            ]
        },
    ],
    ids=["answer", "answers", "conversation", "messages"],
)
def test_questions_about_images_take_the_chat_template(tmp_path: Path, row: Any) -> None:
    model = prepare(tmp_path, "llava")
    source = write(tmp_path, [{"image": picture(n), **row(COLOURS[n % 3])} for n in range(4)])
    (batch,) = draw(tmp_path, model, source).fitted
    for pixels, ids in zip(batch["pixel_values"], batch["input_ids"], strict=True):
        brightest = COLOURS[int(pixels.mean((1, 2)).argmax())]
        assert ids.tolist() == ids_of(ASKED + brightest)


def test_without_a_template_the_image_stands_first(tmp_path: Path) -> None:
    model = prepare(tmp_path, "llava", template=None)
    source = write(
        tmp_path, [{"image": picture(n), "question": "what is it", "answer": COLOURS[n % 3]} for n in range(4)]
    )
    for ids in draw(tmp_path, model, source).fitted[0]["input_ids"]:
        assert ids[:-1].tolist() == ids_of("<image> <image> <image> <image> what is it")


def test_rows_of_several_images_cannot_be_used(tmp_path: Path) -> None:
    model = prepare(tmp_path, "llava")
    turns = [
        {"role": "user", "content": "what <image> is it"},
        {"role": "assistant", "content": "<image> a <image> red"},
    ]
    source = write(tmp_path, [{"images": [picture(n), picture(n + 1)], "messages": turns} for n in range(4)])
    with pytest.raises(DataError, match="column images has 2 images, and only one per row is read"):
        draw(tmp_path, model, source)


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    model = prepare(tmp_path, "llava")
    (tmp_path / "merged/processor_config.json").unlink()
    source = write(tmp_path, [{"image": picture(n), "question": "what is it", "answer": "red"} for n in range(4)])
    with pytest.raises(DataError, match="no processor can be loaded"):
        draw(tmp_path, model, source)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["clip", "llava"])
def test_a_merge_that_sees_and_reads_is_calibrated(tmp_path: Path, kind: str) -> None:
    """Both of a task's towers, or the tower and the language model; with another task of text alone for the latter."""
    prepare(tmp_path, kind)
    for seed, name in enumerate(("merged", "base", "expert")):
        torch.manual_seed(seed)
        make_model(kind).save_pretrained(tmp_path / name)
    rows = [
        {"image": picture(n), "question": "what is it", "answer": COLOURS[n % 3], "caption": f"a {COLOURS[n % 3]}"}
        for n in range(20)
    ]
    write(tmp_path, rows)
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"it is {x} {y}"}) for x in COLOURS for y in WORDS)
    )
    arguments = "calibrate merged --base base --expert seen=expert --data seen=rows.parquet -n 8 -o out --json"
    further = " --expert read=expert --data read=text.jsonl"
    done = featcal(*(arguments + further).split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(not block["is_head"] for block in report["blocks"]) == 4
    assert all(block["modules"] for block in report["blocks"])
