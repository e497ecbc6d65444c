"""Rows of an image and a text become what a model that reads both is given."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import transformers
from example_folder import Folder
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from vocabularies import word_tokenizer

from featcal_cli.recipe.schema import Data

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
library: Any = transformers


def make_model(kind: str) -> PreTrainedModel:
    reading = LAYERS | {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "clip":
        text = reading | {"max_position_embeddings": 16}
        config = library.CLIPConfig(text_config=text, vision_config=SEEING, projection_dim=8)
        model: PreTrainedModel = library.CLIPModel(config)
        return model
    text = library.LlamaConfig(**reading, num_key_value_heads=2, max_position_embeddings=64)
    settings = {"image_token_index": 3, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    config = library.LlavaConfig(vision_config=library.CLIPVisionConfig(**SEEING), text_config=text, **settings)
    llava: PreTrainedModel = library.LlavaForConditionalGeneration(config)
    return llava


def prepare(folder: Path, kind: str, template: str | None = TURNS) -> PreTrainedModel:
    """A model, with what reads images and texts in a folder."""
    names: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[END]"}
    tokenizer = word_tokenizer(WORDS, "[UNK]", **names, additional_special_tokens=["<image>"])
    images: Any = CLIPImageProcessorPil
    images = images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    if kind == "clip":
        images.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        settings = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        library.LlavaProcessor(images, tokenizer, chat_template=template, **settings).save_pretrained(folder)
    return make_model(kind)


def picture(number: int) -> dict[str, Any]:
    """Another one for each number, encoded."""
    colour = numpy.zeros((30, 30 + number % 2, 3), dtype=numpy.uint8)
    colour[: 5 + number, :, number % 3] = 255
    Image.fromarray(colour).save(file := io.BytesIO(), "PNG")
    return {"bytes": file.getvalue(), "path": f"{number}.png"}


def pictures(at: Folder, row: Callable[[int], dict[str, Any]]) -> Data:
    """Four rows of a picture and what `row` makes of the number of its colour."""
    return at.file("rows.parquet", [{"image": picture(number), **row(number % 3)} for number in range(4)])


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def brightest(pixels: Tensor) -> str:
    return COLOURS[int(pixels.mean((1, 2)).argmax())]


def test_two_towers_read_captions_and_images(at: Folder) -> None:
    model = prepare(at.expert, "clip")
    source = pictures(at, lambda colour: {"caption": f"it is a {COLOURS[colour]}"})
    (batch,) = at.load(model, source).fitted
    assert batch.keys() == {"pixel_values", "input_ids", "attention_mask"}
    for pixels, ids in zip(batch["pixel_values"], batch["input_ids"], strict=True):
        assert ids.tolist() == ids_of(f"it is a {brightest(pixels)}")
    kept = (({"image": "image"}, {"pixel_values"}), ({"text": "caption"}, {"input_ids", "attention_mask"}))
    for columns, keys in kept:
        (alone,) = at.load(model, source.model_copy(update={"columns": columns})).fitted
        assert alone.keys() == keys
    labels = pictures(at, lambda colour: {"label": colour, "name": "it is"})
    assert at.load(model, labels).fitted[0].keys() == {"pixel_values"}


def test_captions_are_padded_where_the_tokenizer_makes_no_masks(at: Folder) -> None:
    """So SigLIP was trained, which reads the last place of the text and pads it to its full length."""
    prepare(at.expert, "clip")
    settings = at.expert / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_input_names": ["input_ids"]}))
    text = LAYERS | {"vocab_size": len(WORDS), "max_position_embeddings": 8, "projection_size": 16}
    model = library.SiglipModel(library.SiglipConfig(text_config=text, vision_config=SEEING))
    (batch,) = at.load(model, pictures(at, lambda colour: {"caption": f"it is {COLOURS[colour]}"})).fitted
    assert batch.keys() == {"pixel_values", "input_ids"}
    for pixels, ids in zip(batch["pixel_values"], batch["input_ids"], strict=True):
        assert ids.tolist() == ids_of(f"it is {brightest(pixels)}") + [0] * 5


@pytest.mark.parametrize("column", ["caption", "text", ""])
def test_a_decoder_gets_what_it_writes_of_an_image(at: Folder, column: str) -> None:
    """As TrOCR's; it gets its start token alone where no column has it, and a note says so."""
    prepare(at.expert, "clip")
    writing = library.BertConfig(**LAYERS, vocab_size=len(WORDS), is_decoder=True, add_cross_attention=True)
    config = library.VisionEncoderDecoderConfig.from_encoder_decoder_configs(library.ViTConfig(**SEEING), writing)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = library.VisionEncoderDecoderModel(config)
    examples = at.load(model, pictures(at, lambda colour: {column or "name": f"{COLOURS[colour]} it is"}))
    (batch,) = examples.fitted
    for pixels, ids in zip(batch["pixel_values"], batch["decoder_input_ids"], strict=True):
        assert ids.tolist() == [1, *ids_of(f"{brightest(pixels)} it" if column else "")]
    assert f", {column or 'no target'} for the decoder" in examples.notes[0]


ASKED = "user : <image> <image> <image> <image> what is it assistant : "
PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "what is it"}]


ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "answer": lambda said: {"question": "what is it", "answer": said},
    "answers": lambda said: {"question": "what is it", "answers": [said, "a"]},
    "choice": lambda said: {"question": "what is it", "answers": [{"answer": "a"}], "multiple_choice_answer": said},
    "turns": lambda said: {"texts": [{"user": "what is it", "assistant": said, "source": "VQA"}], "source": "a b"},
    "turns in JSON": lambda said: {"texts": json.dumps([{"user": "what is it", "assistant": said}])},
    "conversation": lambda said: {"conversations": [
        {"from": "human", "value": "<image>\nwhat is it"}, {"from": "gpt", "value": said}]},
    "messages": lambda said: {"messages": [
        {"role": "user", "content": PARTS}, {"role": "assistant", "content": [{"type": "text", "text": said}]}]},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_questions_about_images_take_the_chat_template(at: Folder, row: Callable[[str], dict[str, Any]]) -> None:
    model = prepare(at.expert, "llava")
    (batch,) = at.load(model, pictures(at, lambda colour: row(COLOURS[colour]))).fitted
    for pixels, ids in zip(batch["pixel_values"], batch["input_ids"], strict=True):
        assert ids.tolist() == ids_of(ASKED + brightest(pixels))


def test_images_may_stand_inside_of_messages_and_a_template_of_parts_gets_texts_alone_too(at: Folder) -> None:
    model = prepare(at.expert, "llava")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
    for name in ("0.png", "0 a.png"):
        (at.path / name).write_bytes(picture(0)["bytes"])
    shown = [{"type": "image", "image": "0.png"}, {"type": "image_url", "image_url": {"url": "0.png"}}]
    encoded = base64.b64encode(picture(0)["bytes"]).decode()
    shown += [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}]
    shown += [{"type": "image", "image": url} for url in (encoded, (at.path / "0 a.png").as_uri())]
    for image in (*shown, {"type": "image", "path": "0.png"}, None):
        asked = {"role": "user", "content": [*([image] if image else []), PARTS[1]]}
        (batch,) = at.load(model, at.rows({"messages": [asked, answer]})).fitted
        assert batch["input_ids"][0].tolist() == ids_of((ASKED if image else ASKED.replace("<image> ", "")) + "red")
        assert ("pixel_values" in batch) == bool(image)


def test_without_a_template_the_image_stands_first_and_without_a_processor_nothing_is_read(at: Folder) -> None:
    model = prepare(at.expert, "llava", template=None)
    source = pictures(at, lambda colour: {"question": "what is it", "answer": COLOURS[colour]})
    for ids in at.load(model, source).fitted[0]["input_ids"]:
        assert ids[:-1].tolist() == ids_of("<image> <image> <image> <image> what is it")
    (at.expert / "processor_config.json").unlink()
    at.refuse(model, source, "no processor can be loaded")


ONE_OF_TWO = "the first: it has 2 images, and only one per row is read[^$]*fix: give rows with one image, or name"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (lambda shown: {"images": shown}, ONE_OF_TWO),
        (lambda shown: {"image_1": shown[0], "image_2": shown[1]}, ONE_OF_TWO),
        (lambda shown: {"image_1": shown[0], "image_2": None}, ""),
    ],
)
def test_rows_of_several_images_cannot_be_used(at: Folder, columns: Any, message: str) -> None:
    turns = [{"role": "user", "content": "what <image> is it"}, {"role": "assistant", "content": "<image> a red"}]
    source = at.file("rows.parquet", [{**columns([picture(n), picture(n + 1)]), "messages": turns} for n in range(4)])
    if message:
        at.refuse(prepare(at.expert, "llava"), source, message)
    else:
        assert "pixel_values" in at.load(prepare(at.expert, "llava"), source).fitted[0]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["clip", "llava"])
def test_a_merge_that_sees_and_reads_is_calibrated(at: Folder, kind: str) -> None:
    """Both of a task's towers, or the tower and the language model; with another task of text alone for the latter."""
    prepare(at.path / "merged", kind)
    colours = [COLOURS[number % 3] for number in range(20)]
    rows = [{"question": "what is it", "answer": colour, "caption": f"a {colour}"} for colour in colours]
    at.file("rows.parquet", [{"image": picture(number), **row} for number, row in enumerate(rows)])
    at.file("text.jsonl", [{"text": f"it is {x} {y}"} for x in COLOURS for y in WORDS])
    at.check_merge(lambda: make_model(kind), 4, seen="rows.parquet", read="text.jsonl")
