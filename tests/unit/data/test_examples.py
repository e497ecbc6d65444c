"""Rows become batches: the right columns, the right rows, the right shapes, and errors that say what to do."""

import copy
import io
import json
import logging
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import pytest
import torch
import transformers
from example_folder import CHAT_TEMPLATE, WORDS, Folder, Row, rows_of, words_of
from families import BY_NAME
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.utils import is_torchvision_available

from featcal_cli.data.batches import Batch, count_examples, count_positions, find_along, remove_padding, token_masks
from featcal_cli.data.columns import parse_conversation
from featcal_cli.data.examples import TaskExamples, draw_examples
from featcal_cli.data.preprocessing import Target
from featcal_cli.runtime.errors import DataError

TINY: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 64,
}  # fmt: skip
TINY_BART: dict[str, Any] = {
    "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 64,
}  # fmt: skip
TURNS = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
SHARED = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]


def build(name: str, **settings: Any) -> PreTrainedModel:
    model_class = getattr(transformers, name)
    model: PreTrainedModel = model_class(model_class.config_class(**settings))
    return model


@cache
def tiny(name: str) -> Any:
    match name:
        case "vit":
            return build("ViTForImageClassification", **{**TINY, "vocab_size": None}, image_size=8, patch_size=4)
        case "bert":
            labels = {"label2id": {"bad": 0, "good": 1}, "id2label": {0: "bad", 1: "good"}}
            return build("BertForSequenceClassification", **TINY, max_position_embeddings=16, **labels)
        case "roberta":
            return build("RobertaModel", **TINY, max_position_embeddings=16, pad_token_id=1)
        case "llama":
            return build("LlamaForCausalLM", **TINY, num_key_value_heads=2)
        case "series":
            sizes = {"context_length": 8, "patch_length": 2, "patch_stride": 2, "d_model": 8, "num_hidden_layers": 1}
            return build("PatchTSTModel", **sizes, num_input_channels=1, num_attention_heads=2, ffn_dim=8)
        case "bark":
            part = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "block_size": 16}
            parts = {f"{name}_config": part for name in ("semantic", "coarse_acoustics", "fine_acoustics")}
            return build("BarkModel", **parts, codec_config={"num_filters": 2, "hidden_size": 8})
        case "llama body":
            return build("LlamaModel", **TINY, num_key_value_heads=2)
        case "t5":
            sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
            return build("T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)


def encode_image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (6, 6), value).save(stream, "PNG")
    return stream.getvalue()


def image_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose image has the row's number as its colour."""
    return [{"image": {"bytes": encode_image(number), "path": None}, "label": number} for number in range(count)]


def text_rows(count: int) -> list[dict[str, Any]]:
    return [{"idx": number, "text": f"w{number % 20} w{number // 20}"} for number in range(count)]


def colours(batches: Sequence[Batch]) -> list[int]:
    """The colours that the images had before they were normalised to −1 … 1."""
    return [round((float(row.mean()) + 1) * 127.5) for batch in batches for row in batch["pixel_values"]]


def sides_of(found: TaskExamples, name: str) -> list[set[tuple[Any, ...]]]:
    """The different examples that are fitted, held out for choices, and held out for figures: none in two of them."""
    sides = [{tuple(row) for row in rows_of(part, name)} for part in (found.fitted, found.selection, found.held_out)]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    return sides


# --- which rows ---


def test_exactly_n_are_fitted_and_the_held_out_rows_are_others(at: Folder) -> None:
    data = at.file("a.parquet", image_rows(200))
    found = at.load(tiny("vit"), data, count=40)
    assert [len(side) for side in sides_of(found, "pixel_values")] == [40, 5, 5]
    assert (found.fitted_count, found.held_out_count) == (40, 5)
    assert len({colour // 20 for colour in colours(found.fitted)}) >= 8  # of rows that are sorted by label
    first, second, other = (colours(at.load(tiny("vit"), data, seed=seed).fitted) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize(
    ("rows", "count", "parts", "held_out"),
    [
        (5, 8, (5, 0, 0), (5, 0, 0)), (9, 8, (8, 0, 0), (8, 0, 0)), (10, 8, (8, 1, 1), (6, 2, 2)),
        (11, 8, (8, 1, 2), (7, 2, 2)), (16, 8, (8, 4, 4), (8, 4, 4)), (99, 8, (8, 4, 4), (8, 4, 4)),
        (9, 256, (9, 0, 0), (9, 0, 0)), (20, 20, (20, 0, 0), (16, 2, 2)),
        (300, 256, (256, 22, 22), (240, 30, 30)), (319, 256, (256, 31, 32), (255, 32, 32)),
        (400, 256, (256, 32, 32), (256, 32, 32)), (10, 4, (4, 3, 3), (4, 3, 3)), (1, 1, (1, 0, 0), (1, 0, 0)),
    ],
)  # fmt: skip
def test_held_out_rows_are_what_is_left_in_two_halves_or_a_fifth_where_that_is_asked_for(
    at: Folder, rows: int, count: int, parts: tuple[int, int, int], held_out: tuple[int, int, int]
) -> None:
    """A fifth is taken of ten rows or more; what is held out is not fitted, and nothing is lost."""
    data = at.rows(*text_rows(rows))
    for hold_out, expected in ((False, parts), (True, held_out)):
        found = at.load(tiny("bert"), data, count=count, seed=3, hold_out=hold_out)
        assert (found.fitted_count, found.selection_count, found.held_out_count) == expected
        assert sum(map(len, sides_of(found, "input_ids"))) == sum(expected)
        few = f"fitted ({count} requested) and {expected[1] + expected[2] or 'none'} held out"
        assert any(few in note for note in found.notes) == (expected[0] < count)
        assert any("measured on the calibration examples" in note for note in found.notes) == (not expected[2])


@pytest.mark.parametrize("hold_out", [True, False])
@pytest.mark.parametrize(("different", "copies"), [(1, 40), (5, 8), (10, 4), (20, 2), (200, 2)])
def test_equal_rows_are_never_on_both_sides(at: Folder, different: int, copies: int, hold_out: bool) -> None:
    """Whether they are the same row or only become the same tokens."""
    rows = [{"text": row["text"] + " " * copy} for copy in range(copies) for row in text_rows(different)]
    found = at.load(tiny("bert"), at.rows(*rows), count=30, batch_size=8, hold_out=hold_out)
    sides = sides_of(found, "input_ids")
    assert (found.selection_count, found.held_out_count) == (len(sides[1]), len(sides[2]))
    if hold_out or different == 200:
        assert bool(sides[2]) == (different >= 10)
    few = f"only {different} different usable rows: {found.fitted_count} are fitted, counting copies (30 requested)"
    assert any(few in note for note in found.notes) == (found.fitted_count < 30 and different > 1)


def test_equal_tensors_and_images_are_never_on_both_sides(at: Folder) -> None:
    """Also where the same picture is stored in another format."""
    pixels = torch.randn(12, 3, 8, 8)
    pictures = {f"{number}.{ending}": Image.new("RGB", (8, 8), (20 * number, 0, 0))
                for number in range(12) for ending in ("png", "bmp")}  # fmt: skip
    for data in (at.tensors(pixel_values=torch.cat([pixels, pixels, pixels])), at.images(pictures)):
        found = at.load(tiny("vit"), data, count=24, hold_out=True)
        assert [len(side) for side in sides_of(found, "pixel_values")] == [8, 2, 2]


def test_bad_rows_are_replaced_by_good_ones_and_counted(at: Folder) -> None:
    rows = image_rows(60)
    for number in range(0, 60, 4):
        rows[number]["image"] = {"bytes": b"no image", "path": None} if number % 8 else None
    found = at.load(tiny("vit"), at.file("a.parquet", rows), count=30)
    assert found.fitted_count == 30
    assert all(colour % 4 for colour in colours(found.fitted + found.held_out))
    assert any(re.match(r"task: [1-9]\d* rows cannot be used and were left out", note) for note in found.notes)


# --- tensors ---

IDS = torch.ones(4, 6).long()
HALF_MASK = torch.ones(4, 6).long().index_fill(0, torch.tensor([2]), 0)


def test_tensors_are_taken_in_file_order_and_need_no_preprocessor(at: Folder) -> None:
    values = torch.arange(20.0).reshape(20, 1, 1, 1).expand(20, 3, 8, 8).contiguous()
    drawn = draw_examples("task", at.tensors(pixel_values=values.half()), Target(tiny("vit")), count=6, seed=0)
    found = drawn.cut(4)
    batches = [*found.fitted, *found.selection, *found.held_out]
    assert [row[0] for row in rows_of(batches, "pixel_values")] == list(range(14))
    assert [len(batch["pixel_values"]) for batch in found.fitted] == [4, 2]
    assert found.fitted[0]["pixel_values"].dtype == torch.float32
    labelled = at.tensors(input_ids=torch.ones(3, 5).long(), labels=torch.tensor([0, 2, 1]))
    assert set(at.load(tiny("bert"), labelled).fitted[0]) == {"input_ids"}
    batches, labels = at.labelled(tiny("bert"), labelled)
    assert labels == [0, 2, 1] and len(batches) == 2


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        ("bert", {"pixels": torch.ones(2, 3)}, "no input called pixels"),
        ("bert", {"input_ids": IDS, "attention_mask": IDS[:3]}, "do not agree"),
        ("bert", {"input_ids": torch.tensor(1)}, "do not agree"),
        ("bert", {"labels": torch.tensor([1, 2])}, "nothing but labels"),
        ("bert", {"input_ids": torch.ones(4, 17).long()}, "17 tokens per [^$]* only 16 pos[^$]*cut the examples"),
        ("roberta", {"input_ids": torch.full((4, 15), 5)}, "15 tokens per example, but the model has only 14 pos"),
        ("bert", {"input_ids": IDS[:, :0]}, r"do not agree [^\n]*input_ids \[4, 0\]"),
        ("bert", {"input_ids": IDS.index_fill(0, torch.tensor([1]), 64)}, "of example 2 holds 64, and ids are 0 to 63"),
        ("bert", {"input_ids": -IDS}, "of example 1 holds -1"),
        ("bert", {"input_ids": IDS.float()}, r"input_ids \[4, 6\] is torch.float32"),
        ("bert", {"input_ids": IDS[:, 0]}, r"input_ids \[4\] is torch.int64"),
        ("bert", {"input_ids": IDS, "token_type_ids": 2 * IDS}, "token_type_ids of example 1 holds 2"),
        ("t5", {"input_ids": IDS, "decoder_input_ids": 64 * IDS}, "decoder_input_ids of example 1 holds 64"),
        ("bert", {"input_ids": IDS, "attention_mask": HALF_MASK}, "of example 3 holds other values than 0 and 1, or"),
        ("bert", {"input_ids": IDS, "attention_mask": 1e4 * (HALF_MASK - 1)}, "of example 3 holds other values than 0"),
        ("bert", {"input_ids": IDS, "attention_mask": IDS[:, :5]}, "differ"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_tensors_of_no_use_are_refused(at: Folder, model: str, tensors: dict[str, Tensor], message: str) -> None:
    at.refuse(tiny(model), at.tensors(**tensors), message)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_fewer_bits_are_ids(at: Folder, kind: torch.dtype) -> None:
    [batch] = at.load(tiny("bert"), at.tensors(input_ids=IDS.to(kind), attention_mask=torch.ones(4, 6).bool())).fitted
    assert batch["input_ids"].dtype == torch.int64
    assert tiny("bert")(**batch).logits.shape == (4, 2)


def test_positions_are_counted_behind_paddings_and_those_that_turn_are_no_limit(at: Folder) -> None:
    assert count_positions(tiny("roberta")) == (14, True)
    tiny("roberta")(input_ids=torch.full((1, 14), 5))
    assert count_positions(tiny("llama")) == (2048, False)
    assert at.load(tiny("llama"), at.tensors(input_ids=torch.ones(4, 2050).long())).fitted


def test_padding_of_model_ready_inputs_moves_behind_the_text_with_all_that_is_per_token(at: Folder) -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    [batch] = at.load(tiny("llama"), at.tensors(input_ids=ids, attention_mask=mask, position_ids=ids + 1)).fitted
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0], [7, 8, 9, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[6, 7, 0, 0], [8, 9, 10, 5]]


# --- images ---


def test_the_largest_batch_has_padding_if_any_of_its_length_has() -> None:
    short, full, padded = (
        {"input_ids": torch.ones(2, n).long(), "attention_mask": torch.ones(2, n)} for n in (3, 5, 5)
    )
    padded["attention_mask"][0, 4] = short["attention_mask"][0, 2] = 0
    rows = TaskExamples(2, [short, full], [padded], [], [], 4, 2, 0, (4, 2))
    assert rows.largest is padded


def test_images_of_every_form_become_float32_pixel_values_that_the_model_takes(at: Folder) -> None:
    at.images({"a.png": encode_image(7)}, "pictures")
    image = {"bytes": encode_image(7), "path": None}
    frames = [Image.new("RGB", (8, 8), (value,) * 3) for value in (7, 200)]
    for data in (
        at.rows({"picture": "pictures/a.png"}),
        at.file("bytes.parquet", [{"x": encode_image(7)}]),
        at.file("list.parquet", [{"images": [image], "label": 1}]),
        at.images({"a.gif": frames[0]}, "frames", save_all=True, append_images=frames[1:]),
    ):
        found = at.load(tiny("vit"), data)
        assert found.fitted[0]["pixel_values"].dtype == torch.float32
        assert colours(found.fitted) == [7]
        assert tiny("vit")(**found.fitted[0]).logits.shape[0] == 1


def test_images_that_cannot_be_used_are_refused_with_the_reason(at: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = Image.fromarray(numpy.full((8, 8), 40_000, dtype=numpy.uint16))
    at.refuse(tiny("vit"), at.images({"0.png": deep}, "deep"), "not 8-bit colours, but of mode I;16")
    images = [{"bytes": encode_image(7), "path": None}] * 2
    at.refuse(tiny("vit"), at.file("two.parquet", [{"image": images}]), "has 2 images")
    at.refuse(tiny("vit"), at.file("numbers.parquet", [{"image": list(range(784))}]), "no column holds images")
    monkeypatch.setattr("featcal_cli.data.rows.LARGEST_FILE", 20)
    at.refuse(tiny("vit"), at.file("large.parquet", image_rows(3)), r"cannot be decoded \(it has more than 20 bytes\)")
    at.refuse(tiny("vit"), at.images({"a.png": encode_image(1)}), r"bytes \(at most 20 are read\)")


def test_images_of_other_sizes_are_in_other_batches_and_none_is_padded(at: Folder) -> None:
    DetrImageProcessorPil(do_resize=False, do_normalize=False).save_pretrained(at.expert)
    data = at.images({f"{number}.png": Image.new("L", (8 + 4 * (number == 19), 6), 255) for number in range(20)})
    images = [batch["pixel_values"] for batch in at.load(tiny("vit"), data, count=20, batch_size=20).fitted]
    assert [tuple(batch.shape) for batch in images] == [(4, 3, 6, 8), (15, 3, 6, 8), (1, 3, 6, 12)]


def test_a_model_of_one_channel_reads_shades_of_gray(at: Folder) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    model = build("ViTForImageClassification", **{**TINY, "vocab_size": None}, **sizes)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])
    processor.save_pretrained(at.expert)
    image = Image.fromarray(numpy.arange(64, dtype=numpy.uint8).reshape(8, 8))
    for name, given in (("gray", image), ("colours", image.convert("RGB"))):
        [batch] = at.load(model, at.images({"a.png": given}, name)).fitted
        assert torch.equal(batch["pixel_values"], processor(images=[image], return_tensors="pt")["pixel_values"])
        assert model(**batch).logits.shape == (1, 2)


def test_a_photograph_is_turned_as_its_exif_says_whatever_else_that_says(at: Folder) -> None:
    pixels = numpy.zeros((8, 8, 3), dtype=numpy.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112], exif[0x0132] = 3, "x" * 40
    broken = exif.tobytes().replace(b"\x01\x32\x00\x02\0\0\0\x29", b"\x01\x32\x00\x0c\0\0\0\x05")  # a date in floats
    for name, written in (("whole", exif.tobytes()), ("broken", broken)):
        [batch] = at.load(tiny("vit"), at.images({"a.png": Image.fromarray(pixels)}, name, exif=written)).fitted
        assert batch["pixel_values"][0, 0, 0, 0] < 0 < batch["pixel_values"][0, 0, 7, 0]


def test_the_first_folder_with_a_processor_gives_it(at: Folder) -> None:
    snapshot = at.path / "models--openai--clip" / "snapshots" / "abc"
    for side, folder in ((4, snapshot), (8, at.expert)):
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    images = at.file("a.parquet", image_rows(3))
    (at.path / "bare").mkdir()
    drawn = draw_examples("task", images, Target(tiny("vit"), [at.path / "bare", snapshot, at.expert]), count=3, seed=0)
    assert drawn.cut(3).fitted[0]["pixel_values"].shape[-1] == 4
    assert "task: column image (of image, label), image processor from openai/clip" in drawn.notes
    for model, data, file in (("vit", images, "preprocessor"), ("bert", at.rows(*text_rows(3)), "tokenizer")):
        with pytest.raises(DataError, match=f"copy {file}_config.json"):
            draw_examples("task", data, Target(tiny(model), [at.path / "bare"]), count=3, seed=0)


@pytest.mark.skipif(is_torchvision_available(), reason="the package that is needed is there")
def test_a_processor_that_needs_another_package_names_it(at: Folder) -> None:
    source = at.file("a.parquet", image_rows(3))
    at.tokenizer()
    for model, kind in ((tiny("vit"), "DINOv3ViT"), (BY_NAME["qwen2-vl"].build(), "Qwen2VL")):
        model.config.save_pretrained(at.expert)
        settings = {"image_processor_type": f"{kind}ImageProcessorFast", "processor_class": f"{kind}Processor"}
        at.file("expert/preprocessor_config.json", json.dumps(settings))
        error = at.refuse(model, source, "it needs torchvision, not installed here")
        assert error.fix == "install what it lacks: pip install torchvision"


# --- text ---


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"id": "a b", "text": "w1"}, {}, "w1"),
        ({"sentence": "w1", "label": 1}, {}, "w1"),
        ({"premise": "w1", "hypothesis": "w2"}, {}, "w1 [SEP] w2"),
        ({"question": "w1", "sentence": "w2"}, {}, "w1 [SEP] w2"),
        ({"text": "w1", "text_pair": "w2"}, {}, "w1 [SEP] w2"),
        ({"instruction": "w1", "output": "w2"}, {}, "w1"),
        ({"code": "x1", "blurb": "w1 w2"}, {}, "w1 w2"),
        ({"id": "7", "tokens": ["w1", "w2"], "ner_tags": [0, 1]}, {}, "w1 w2"),
        ({"text": "w1", "a": "w2", "b": "w3"}, {"columns": {"text": "b", "text_pair": "a"}}, "w3 [SEP] w2"),
        ({"text": "w1", "a": "w2", "b": "w3"}, {"template": "w9 {b} w8 {a}"}, "w9 w3 w8 w2"),
        ({"a": {"de": "w1"}, "b": ["w2", "w3"]}, {"template": "{{{a[de]}}} w4 {b[1]}"}, "[UNK] w1 [UNK] w4 w3"),
        ({"conversations": SHARED}, {}, "w1 w2"),
        ({"chosen": TURNS, "rejected": TURNS[:1]}, {}, "w1 w2"),
    ],
)
def test_an_encoder_reads_texts_or_what_is_named(at: Folder, row: Row, settings: dict[str, Any], expected: str) -> None:
    [batch] = at.load(tiny("bert"), at.rows(row, **settings)).fitted
    assert words_of([batch]) == [f"[CLS] {expected} [SEP]"]
    assert tiny("bert")(**batch).logits.shape == (1, 2)


NUMBERS = {"n": 1, "kind": "a"}
REFUSED: list[tuple[str, list[Row], dict[str, Any], str]] = [
    ("bert", [NUMBERS], {}, r"no column holds text; the columns are n, kind[^$]*--columns task="),
    ("bert", [{"text": {"en": "w1"}, "n": 1}], {}, r"the columns are text \(dict\), n[^$]*--columns task="),
    ("llama", [{"input_ids": [3, 4], "labels": [3, 4]}], {}, r"columns are input_ids, labels[^$]*\.safetensors"),
    ("vit", [NUMBERS], {}, r"no column holds images; the columns are n, kind[^$]*--columns task="),
    ("series", [{"text": "w1"}], {}, r"reads past_values[^$]*safetensors"),
    ("bark", [{"text": "w1"}], {}, r"reads none of the usual inputs[^$]*safetensors"),
    ("bert", [{"text": "w1", "n": 1}], {"columns": {"text": "txt"}}, "no column txt[^$]*text, n"),
    ("bert", [{"text": 1, **dict.fromkeys(map(str, range(3000)), "x")}], {"columns": {"text": "txt"}},
     "text, 0, 1, 2, 3 and 2,996 more"),
    ("bert", [{"text": "w1"}], {"columns": {"messages": "text"}}, "not a list of messages"),
    ("llama", [{"messages": "[{'role': 'user', 'content': 'w1'}]", "source": "w2 w3"}], {}, "as Python prints them"),
    ("bert", [{"text": "w1"}], {"template": "{texts}"}, "names a column that does not exist: {texts}"),
    ("bert", [{"text": "w1"}], {"template": "{text"}, r"template is broken[^$]*\{premise\}"),
    ("bert", [{"text": "w1"}], {"template": "{text.__class__}"}, "column that does not exist: {text.__class__}"),
    ("bert", [{"a": {"de": "w1"}}], {"template": "{a[fr]}"}, r"\{a\[fr\]\} of the template is empty"),
    ("bert", [{"a": ["w1"]}], {"template": "{a[1]}"}, r"\{a\[1\]\} of the template is empty"),
    ("bert", [{"text": "w1" if number % 3 == 0 else ""} for number in range(30)], {},
     "rows cannot be used; the first: column text has no text"),
    ("llama", [{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]}], {},
     r"rows cannot be used[^$]*name the right columns"),
    ("llama", [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant"}]}], {},
     r"rows cannot be used[^$]*name the right columns"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "rows", "settings", "message"), REFUSED)
def test_bad_rows_are_refused(at: Folder, model: str, rows: list[Row], settings: dict[str, Any], message: str) -> None:
    if model != "vit":
        at.tokenizer(chat=model == "llama")
    at.refuse(tiny(model), at.rows(*rows, **settings), message, count=20)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}, TURNS[1]]},
        {"conversations": SHARED, "text": "w9 w9"},
        {"messages": json.dumps(TURNS, indent=1), "source": "w9 w9"},
        {"conversations": json.dumps(SHARED), "text": "w9 w9"},
        {"messages": [json.dumps(turn) for turn in TURNS], "prompt": "w9 w9"},
        {"conversations": {"from": ["human", "gpt"], "value": ["w1", "w2"]}, "text": "w9 w9"},
        {"prompt": "w1", "chosen": json.dumps(TURNS), "rejected": json.dumps(TURNS[:1])},
        {"instruction": "w1", "output": "w2", "input": ""},
        {"instruction": "w1", "response": "w2", "category": "w9 w9"},
        {"inputs": "w1", "targets": "w2"},
        {"input": "w1", "output": "w2"},
        {"prompt": "w1", "response": "w2"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"prompt": TURNS[:1], "response": "w2"},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        {"prompt": TURNS, "answer": "w9"},
        {"prompt": "w1", "chosen": "w2", "rejected": "w9"},
        {"prompt": "w1", "prompt_id": "w9", "chosen": TURNS, "rejected": TURNS},
        {"chosen": TURNS, "rejected": TURNS[:1]},
        {"query": "w1", "response": "w2", "original": "w9 w9"},
        {"query": "w1", "answers": ["w2", "w9"], "passages": {"text": ["w9 w9"]}},
        {"question": "w1", "answer": "w2"},
        {"question": "w1", "answer": {"value": "w2", "aliases": ["w9"]}, "question_id": "w9 w9"},
        {"question": "w1", "generated_solution": "w2", "expected_answer": "w9"},
        {"title": "w9 w9", "question": "w1", "answers": {"text": ["w2", "w9"], "answer_start": [3, 4]}},
        {"id": "a b", "system_prompt": "", "question": "w1", "response": "w2"},
        {"source": "w9 w9", "problem": "w1", "solution": "w2", "answer": "w9"},
        {"problem": "w1", "answer": "w2", "level": "w9 w9"},
        {"task_id": 2, "text": "w1", "code": "w2", "test_list": ["w9"]},
        {"task_id": "w9 w9", "prompt": "w1", "canonical_solution": "w2", "test": "w9", "entry_point": "w9"},
        {"Question": "w1", "Complex_CoT": "w9 w9", "Response": "w2"},
        {"article": "w1", "highlights": "w2", "id": "w9 w9"},
        {"sql_prompt": "w1", "sql": "w2", "sql_context": "w9 w9"},
    ],
    ids=lambda row: "-".join(row),
)
def test_conversations_of_all_names_go_through_the_chat_template_and_get_no_more_tokens(at: Folder, row: Row) -> None:
    at.tokenizer(chat=True)
    [batch] = at.load(tiny("llama"), at.rows(row)).fitted
    assert words_of([batch]) == ["user w1 assistant w2"]
    assert "token_type_ids" not in batch


@pytest.mark.parametrize("text", ["w1", "[CLS] w1"])
def test_a_text_that_was_formatted_beforehand_begins_once(at: Folder, text: str) -> None:
    at.tokenizer(bos_token="[CLS]")
    assert words_of(at.load(tiny("llama"), at.rows({"text": text})).fitted) == ["[CLS] w1 [SEP]"]


CALL = {"function": {"name": "w8", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "text", "joined"),
    [
        ([{"role": "system", "content": ""}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        ([{"role": "system", "content": None}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        ([{"role": "system", "content": []}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        ([{"from": "system", "value": ""}, *SHARED], "system user w1 assistant w2", "w1 w2"),
        ([{"human": "w1", "assistant": "w2"}], "user w1 assistant w2", "w1 w2"),
        ([{"system": "w3", "input": "w1", "output": "w2"}], "system w3 user w1 assistant w2", "w3 w1 w2"),
        ([{**turn, "input": None, "output": "w7"} for turn in TURNS], "user w1 assistant w2", "w1 w2"),
        ([{"role": None, "from": "human", "content": None, "value": "w1"}, TURNS[1]], "user w1 assistant w2", "w1 w2"),
        ([TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "user w1 assistant", "w1"),
        ([TURNS[0], {"role": "assistant", "tool_calls": [CALL]}], "user w1 assistant", "w1"),
        ([TURNS[0], {"role": "tool", "name": "w8", "content": "w3"}], "user w1 tool w3", "w1 w3"),
        # most templates leave out a message by a speaker whom they do not know
        ([TURNS[0], {"role": "function", "name": "w8", "content": "w3"}], "user w1 tool w3", "w1 w3"),
        (
            [SHARED[0], {"from": "function_call", "value": "w4"}, {"from": "observation", "value": "w3"}, SHARED[1]],
            "user w1 assistant w4 tool w3 assistant w2",
            "w1 w4 w3 w2",
        ),
    ],
)
def test_empty_messages_and_calls_are_part_of_a_conversation(at: Folder, messages: Any, text: str, joined: str) -> None:
    """Its turns are joined where there is no chat template, and a note says so."""
    row = {"messages": messages}
    at.tokenizer(chat=True)
    examples = at.load(tiny("llama"), at.rows(row))
    assert words_of(examples.fitted) == [text] and "messages, in a chat template," in examples.notes[0]
    (at.expert / "chat_template.jinja").unlink()
    examples = at.load(tiny("llama"), at.rows(row))
    assert words_of(examples.fitted) == [f"[CLS] {joined} [SEP]"]
    assert "messages, joined by line breaks without a chat template," in examples.notes[0]


@pytest.mark.parametrize(("known", "speaker"), [("'tool'", "tool"), ("'observation'", "w9")])
def test_a_tools_message_has_the_speaker_that_the_template_knows(at: Folder, known: str, speaker: str) -> None:
    """GLM-4 has a token for observations, and templates that know these, tools' messages, or both."""
    at.tokenizer(additional_special_tokens=["<|observation|>"])
    named = "{{ 'w9' if m.role == 'observation' else m.role }} {{ m.content }} "
    read = f"{{% if m.role in ['user', 'assistant', {known}] %}}{named}{{% endif %}}"
    (at.expert / "chat_template.jinja").write_text(f"{{% for m in messages %}}{read}{{% endfor %}}")
    messages = [TURNS[0], {"role": "observation", "content": "w3"}, {"role": "tool", "content": "w4"}, TURNS[1]]
    examples = at.load(tiny("llama"), at.rows({"messages": messages}))
    assert words_of(examples.fitted) == [f"user w1 {speaker} w3 {speaker} w4 assistant w2"]


@pytest.mark.parametrize("cell", [{"role": ["user", "assistant"], "content": ["w1"]}, {"from": ["a"], "value": [3]}])
def test_what_only_looks_like_a_conversation_stays_as_it_is(cell: dict[str, list[Any]]) -> None:
    assert parse_conversation(cell) is cell


CALLS = "{%% for m in messages %%}{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
AS_MAPPING = "{{ c.function.arguments.values() | join }} {{ c.function.arguments | length }}"
AS_TEXT = "{% set a = c.function.arguments %}{{ a }} {{ 'w4' if a is string }}"
TOOLS = "{% for tool in tools or [] %}tool {{ tool['function']['name'] }} {{ tool | length }} {% endfor %}"
REFUSING = """{% for m in messages %}{% if m['role'] == 'system' or (loop.previtem or {}).role == m['role'] %}
{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"""
FIRST = {"role": "user", "content": "w3"}
SYSTEM = {**FIRST, "role": "system"}
REFUSED_TURNS: list[Any] = [
    [SYSTEM, *TURNS],
    [{**SYSTEM, "content": ""}, FIRST, *TURNS],
    [FIRST, *TURNS],
    [{"from": "system", "value": "w3"}, *SHARED],
    [{**message, "name": None} for message in (SYSTEM, *TURNS)],
]


def call(arguments: Any) -> Row:
    """A conversation that ends in the call of a tool."""
    calls = [{"function": {"name": "w8", "arguments": arguments}}]
    return {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        # a mapping without the nulls of a table, which texts in JSON become unless the template wants these
        (CALLS % AS_MAPPING, call('{"q": "w3"}'), "w3 [UNK]"),
        (CALLS % AS_MAPPING, call({"q": "w3", "other": None}), "w3 [UNK]"),
        (CALLS % "{{ 'w4' + c.function.arguments[:0] }}", call('{"q": "w3"}'), "w4"),
        (CALLS % AS_TEXT, call('{"q": "w3"}'), f"{4 * '[UNK] '}w3 [UNK] w4"),
        *(
            (TOOLS, {"messages": TURNS, "Tools": tools}, "tool w8 [UNK]")
            for tools in ([{**CALL, "strict": None}], json.dumps([CALL]), [json.dumps(CALL)])
        ),
        (f"{TOOLS}w4", {"messages": TURNS, "Tools": None}, "w4"),
        # a column of system messages begins the conversations that have none
        (CHAT_TEMPLATE, {"System": "w9", "conversations": SHARED}, "system w9 user w1 assistant w2"),
        (CHAT_TEMPLATE, {"system_prompt": "w9", "question": "w1", "response": "w2"}, "system w9 user w1 assistant w2"),
        (CHAT_TEMPLATE, {"system": "w9", "messages": [SYSTEM, *TURNS]}, "system w3 user w1 assistant w2"),
        (CHAT_TEMPLATE, {"system": None, "messages": TURNS}, "user w1 assistant w2"),
        # the numbers that pandas writes before each row, in a column without a name, are none
        (CHAT_TEMPLATE, {"": "w9", "question": "w1", "response": "w2"}, "user w1 assistant w2"),
        # messages are joined for a template that refuses them
        *((REFUSING + CHAT_TEMPLATE, {"messages": turns}, "user w3 w1 assistant w2") for turns in REFUSED_TURNS),
    ],
)
def test_a_chat_template_is_given_what_it_takes(at: Folder, template: str, row: Row, text: str) -> None:
    at.tokenizer(chat=True)
    (at.expert / "chat_template.jinja").write_text(template)
    examples = at.load(tiny("llama"), at.rows(row))
    assert words_of(examples.fitted) == [text]
    has_column = any(name.lower().startswith("system") for name in row)
    assert ("as the system's message (of" in examples.notes[0]) == has_column


NO_MESSAGES = ('[{"from": "w1", "to": "w2"}]', '[{"role": "w1"}, {"role": "w2"}]', "[w1 w2")
NO_IMAGES = ("/9j/ w1 w2", "R0lGODlhAQABAAAAACw=", f"/9j/{'A' * 64}{' ' * 2**20}w1!")


@pytest.mark.parametrize("text", [*NO_MESSAGES, *NO_IMAGES], ids=lambda text: text[:9])
def test_a_text_that_only_begins_as_messages_or_images_do_stays_text(at: Folder, text: str) -> None:
    """However long it is: looking for its end takes no longer than reading it."""
    at.tokenizer(chat=True)
    assert at.load(tiny("llama"), at.rows({"text": text})).fitted


def test_a_tokenizer_names_what_it_needs(
    at: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever transformers says: it asks for tiktoken then, and warns of each folder."""
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    monkeypatch.setattr("featcal_cli.data.preprocessing.is_sentencepiece_available", lambda: False)
    at.expert.mkdir()
    (at.expert / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (at.expert / "tokenizer.model").write_bytes(b"pieces")
    error = at.refuse(tiny("llama"), at.rows({"text": "w1"}), "no tokenizer can be loaded")
    assert error.fix.startswith("install what it lacks: pip install sentencepiece") and not caplog.records


def test_a_tokenizer_with_code_of_its_own_is_not_run_and_the_way_out_is_said(at: Folder) -> None:
    at.tokenizer()
    config = at.expert / "tokenizer_config.json"
    settings = {**json.loads(config.read_text()), "tokenizer_class": "OwnTokenizer"}
    config.write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}))
    error = at.refuse(tiny("llama"), at.rows({"text": "w1"}), "it needs code of the repo's own, which is never run")
    assert error.fix.endswith("take auto_map out of its settings (*_config.json)")
    config.write_text(json.dumps(settings))
    assert words_of(at.load(tiny("llama"), at.rows({"text": "w1"})).fitted) == ["[CLS] w1 [SEP]"]


def test_a_template_that_refuses_says_so_in_its_own_words(at: Folder) -> None:
    at.tokenizer(chat=True)
    (at.expert / "chat_template.jinja").write_text("{{ raise_exception('Only French') }}")
    error = at.refuse(tiny("llama"), at.rows({"messages": TURNS}), "Only French")
    assert "the chat template refuses the messages: Only French" in error.what
    assert error.fix.endswith("or correct that template in its files")


@pytest.mark.parametrize(("most", "text"), [(8, 8), (11, 8), (12, 12), (15, 12), (16, 16), (None, 16)])
def test_a_long_chat_is_cut_behind_an_answer(at: Folder, most: int | None, text: int) -> None:
    at.tokenizer(chat=True)
    row = {"messages": TURNS * 4}
    target = Target(tiny("llama"), [at.expert], max_length=most)
    [batch] = draw_examples("red", at.rows(row), target, count=1, seed=1).cut(1).fitted
    assert batch["input_ids"].shape == (1, text)
    answer = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 " * 20}]
    [cut] = draw_examples("red", at.rows({"messages": answer}), target, count=1, seed=1).cut(1).fitted
    assert cut["input_ids"].shape == (1, most or 23)


def test_of_long_texts_fewer_are_taken_so_that_they_hold_512_tokens_an_example(at: Folder) -> None:
    at.tokenizer()
    data = at.file("long.jsonl", [{"text": f"w{number % 50} w{number // 50} " * 700} for number in range(200)])
    target = Target(tiny("llama"), [at.expert])
    found = draw_examples("red", data, target, count=120, seed=1)
    assert len(found.fitted) == 64 and len(found.selection) == len(found.held_out) == 8
    assert any("64 texts are fitted and 16 held out, as they are long" in note for note in found.notes)
    assert all(len(draw_examples("red", data, target, count=n, seed=1).fitted) == n for n in (8, 64))
    short = draw_examples("red", data, Target(tiny("llama"), [at.expert], max_length=700), count=120, seed=1)
    assert len(short.fitted) == -(-512 * 120 // 700)
    # a dry run reads eight and foresees what a run takes
    assert draw_examples("red", data, target, count=120, seed=1, sampled=8).expected == found.expected == (64, 16)


@pytest.mark.parametrize(
    ("texts", "hold_out", "expected"),
    [
        ([f"w{number % 8}" for number in range(90)], False, (40, 0)),  # much alike
        *(
            ([f"w{number % 10} w{number // 10} w1 w2" for number in range(rows)], True, expected)
            for rows, expected in ((20, (16, 4)), (45, (36, 9)), (99, (40, 10)))
        ),
    ],
    ids=["alike", "20", "45", "99"],
)
def test_a_sample_foresees_what_is_drawn(
    at: Folder, texts: list[str], hold_out: bool, expected: tuple[int, int]
) -> None:
    """And that a file has too few rows."""
    at.tokenizer()
    data, target = at.file("few.jsonl", [{"text": text} for text in texts]), Target(tiny("bert"), [at.expert])
    found = [draw_examples("red", data, target, count=40, seed=1, hold_out=hold_out, sampled=n) for n in (8, None)]
    assert [each.expected for each in found] == [expected] * 2
    assert hold_out or found[0].notes == found[1].notes


_ENGLISH_FIRST = {"columns": {"prompt": "translation.en", "response": "translation.de"}}


@pytest.mark.parametrize(
    ("row", "settings", "source", "target"),
    [
        ({"instruction": "w1", "context": "w5", "response": "w2", "category": "w9"}, {}, "w1 w5", "w2"),
        ({"context": "w5", "question": "w1", "answers": {"text": ["w2"], "answer_start": [0]}}, {}, "w1 w5", "w2"),
        ({"instruction": "w1", "input": "w5", "output": "w2"}, {}, "w1 w5", "w2"),
        ({"document": "w1", "summary": "w2"}, {}, "w1", "w2"),
        ({"source": "w1", "target": "w2"}, {}, "w1", "w2"),
        ({"question": "w1", "answer": "w2"}, {}, "w1", "w2"),
        ({"conversations": SHARED}, {}, "w1", "w2"),
        ({"messages": json.dumps(TURNS)}, {}, "w1", "w2"),
        ({"id": "w9", "translation": {"de": "w1", "en": "w2"}}, {}, "w1", "w2"),
        ({"translation": {"en": "w1", "de": "w2"}}, {}, "w1", "w2"),
        ({"translation": {"de": "w1", "en": "w2"}}, _ENGLISH_FIRST, "w2", "w1"),
        ({"a": "w1", "b": "w2", "c": "w3", "text": "w9"}, {"columns": {"prompt": "b", "response": "c"}}, "w2", "w3"),
    ],
)
def test_pairs_are_read_in_order(at: Folder, row: Row, settings: dict[str, Any], source: str, target: str) -> None:
    data = at.rows(row, **settings)
    batches = at.load(tiny("t5"), data).fitted
    assert words_of(batches) == [f"[CLS] {source} [SEP]"]
    assert words_of(batches, "decoder_input_ids") == [f"[PAD] [CLS] {target}"]
    for causal in ("llama", "llama body"):
        assert words_of(at.load(tiny(causal), data).fitted) == [f"[CLS] {source} {target} [SEP]"]


def test_an_encoder_decoder_gets_the_target_shifted_right_or_its_start_token(at: Folder) -> None:
    found = at.load(tiny("t5"), at.rows({"inputs": "w1 w2", "targets": "w3"}, {"inputs": "w4", "targets": "w5 w6"}))
    by_source = dict(zip(words_of(found.fitted), words_of(found.fitted, "decoder_input_ids"), strict=True))
    assert by_source == {"[CLS] w1 w2 [SEP]": "[PAD] [CLS] w3 [PAD]", "[CLS] w4 [SEP] [PAD]": "[PAD] [CLS] w5 w6"}
    [batch] = found.fitted
    assert sorted(batch["decoder_attention_mask"].sum(1).tolist()) == [3, 4]
    assert tiny("t5")(**batch).logits.shape[:2] == (2, 4)
    [batch] = at.load(tiny("t5"), at.rows({"sentence": "w1", "label": 0})).fitted
    assert batch["decoder_input_ids"].tolist() == [[0]]
    assert tiny("t5")(**batch).logits.shape[:2] == (1, 1)
    templated = at.rows({"a": "w1", "b": "w2", "c": "w3"}, template="w8 {a} {b}", columns={"response": "c"})
    [batch] = at.load(tiny("t5"), templated).fitted
    assert words_of([batch], "decoder_input_ids") == ["[PAD] [CLS] w3"]
    [batch] = at.load(tiny("t5"), at.rows({"prompt": "w1", "messages": TURNS})).fitted
    assert words_of([batch], "decoder_input_ids") == ["[PAD] [CLS] w2"]


@pytest.mark.parametrize("name", ["M2M100", "Blenderbot"])
def test_models_that_shift_targets_only_inside_their_forward_get_them_too(at: Folder, name: str) -> None:
    """As NLLB's class, M2M100, does."""
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    model = build(f"{name}ForConditionalGeneration", **TINY_BART, **ids, max_position_embeddings=20)
    [batch] = at.load(model, at.rows({"translation": {"en": "w1 w2", "de": "w3"}})).fitted
    assert words_of([batch]) == ["[CLS] w1 w2 [SEP]"]
    assert words_of([batch], "decoder_input_ids") == ["[SEP] [CLS] w3"]


def test_the_longest_example_is_as_long_as_any_batch(at: Folder) -> None:
    """In its text and in its target, which may be of two rows, fitted or held out."""
    rows = [{"inputs": f"w{number % 5 + 1}", "targets": f"w{number // 5 + 1}"} for number in range(20)]
    rows[3]["inputs"], rows[7]["targets"] = "w1 w2 w3 w4", "w1 w2 w3"
    at.tokenizer()
    drawn = draw_examples("task", at.rows(*rows), Target(tiny("t5"), [at.expert]), count=8, seed=0)
    found, longest = drawn.cut(3), drawn.longest()
    for name in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"):
        lengths = [batch[name].shape[1] for batch in (*found.fitted, *found.selection, *found.held_out)]
        assert len(lengths) == 7 and longest[name].shape == (1, max(lengths))


def test_a_target_is_cut_at_the_positions_of_the_decoder(at: Folder) -> None:
    """LED has fewer of them than its encoder, and no name for both."""
    sizes = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 16, "attention_window": 4}
    model = build("LEDForConditionalGeneration", **TINY_BART, **sizes, decoder_start_token_id=2)
    [batch] = at.load(model, at.rows({"document": "w1 " * 30, "summary": "w2 " * 30})).fitted
    assert (batch["input_ids"].shape[1], batch["decoder_input_ids"].shape[1]) == (32, 16)


def test_a_start_token_that_only_the_settings_of_generation_name_is_used(at: Folder) -> None:
    model = copy.deepcopy(tiny("t5"))
    model.generation_config.decoder_start_token_id = 2
    del model.config.decoder_start_token_id
    [batch] = at.load(model, at.rows({"inputs": "w1 w2", "targets": "w3"})).fitted
    assert words_of([batch], "decoder_input_ids") == ["[CLS] [CLS] w3"]


def test_an_encoder_decoder_classifier_runs_on_its_batches(at: Folder) -> None:
    ids = {"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 2, "decoder_start_token_id": 3}
    model = build("BartForSequenceClassification", **TINY_BART, **ids, max_position_embeddings=20)
    [batch] = at.load(model, at.rows({"premise": "w1", "hypothesis": "w2"})).fitted
    assert words_of([batch]) == ["[CLS] w1 [SEP] w2 [SEP]"]
    assert model(**batch).logits.shape[0] == 1


def test_the_first_token_attends_globally_where_a_model_leaves_that_to_its_user(at: Folder) -> None:
    longformer = build("LongformerModel", **TINY, max_position_embeddings=16, attention_window=4)
    [batch] = at.load(longformer, at.rows({"text": "w1 w2 w3"}, {"text": "w4"})).fitted
    assert batch["global_attention_mask"].tolist() == [[1, 0, 0, 0, 0]] * 2
    [pairs] = at.load(longformer, at.rows({"question": "w1", "context": "w2 w3"})).fitted
    assert "global_attention_mask" not in pairs
    led = build("LEDForConditionalGeneration", **TINY_BART, attention_window=4)
    [pairs] = at.load(led, at.rows({"a": "w1", "b": "w2"}, columns={"text": "a", "text_pair": "b"})).fitted
    assert pairs["global_attention_mask"].tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_padding_is_on_the_right_and_masked_even_without_a_pad_token(at: Folder, side: str, pad: str | None) -> None:
    at.tokenizer(pad_token=pad, padding_side=side)
    [batch] = at.load(tiny("llama"), at.rows({"text": "w1"}, {"text": "w1 w2 w3"})).fitted
    mask = batch["attention_mask"][batch["attention_mask"].sum(1).argmin()].tolist()
    assert mask == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("model", ["fnet", "xlnet"])
def test_texts_are_not_padded_for_models_that_would_read_the_padding(at: Folder, model: str) -> None:
    """FNet takes no mask, and mixes all tokens; what XLNet answers is read from the last position, padding or not."""
    at.tokenizer(padding_side="left" if model == "xlnet" else "right")
    rows = at.rows(*({"text": "w1 " * (1 + number % 2) + f"w{number}"} for number in range(2, 8)))
    batches = at.load(BY_NAME[model].build(), rows).fitted
    assert {batch["input_ids"].shape[1] for batch in batches} == {4, 5}
    assert sum(len(batch["input_ids"]) for batch in batches) == 6 and max(map(count_examples, batches)) == 3
    assert all(bool(batch["attention_mask"].all()) for batch in batches if "attention_mask" in batch)


@pytest.mark.parametrize(
    ("model", "limit", "asked", "length"),
    [
        ("bert", 10**30, None, 16), ("bert", 7, None, 7), ("bert", 7, 12, 12), ("bert", 7, 1500, 16),
        ("roberta", 10**30, None, 14), ("llama", 10**30, None, 2048), ("llama", 900, None, 900),
        ("llama", 900, 1500, 1500), ("llama", 900, 9000, 2048), ("pooled", 7, None, 5), ("pooled", 5, None, 5),
    ],
)  # fmt: skip
def test_the_shortest_limit_cuts_texts(at: Folder, model: str, limit: int, asked: int | None, length: int) -> None:
    """What the user asks for counts more than what the tokenizer and sentence-transformers say, but nothing is read
    beyond the positions."""
    at.tokenizer(model_max_length=limit)
    if model == "pooled":
        at.file("expert/sentence_bert_config.json", json.dumps({"max_seq_length": 5 if limit == 7 else None}))
    target = Target(tiny("bert" if model == "pooled" else model), [at.expert], max_length=asked)
    [batch] = draw_examples("red", at.rows({"text": "w1 " * 3000}), target, count=1, seed=1).cut(1).fitted
    assert batch["input_ids"].shape == (1, length)


@pytest.mark.parametrize("normalizer", [None, {"type": "Replace", "pattern": {"String": "w1"}, "content": "w3"}])
def test_texts_are_in_small_letters_where_sentence_transformers_lowers_them(at: Folder, normalizer: object) -> None:
    at.tokenizer()
    file = at.expert / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    for lower, read in ((False, "[UNK] [UNK]"), (True, "w3 w2" if normalizer else "w1 w2")):
        at.file("expert/sentence_bert_config.json", json.dumps({"max_seq_length": 9, "do_lower_case": lower}))
        assert words_of(at.load(tiny("bert"), at.rows({"text": "W1 W2"})).fitted) == [f"[CLS] {read} [SEP]"]


@pytest.mark.parametrize(("columns", "read"), [({}, "w1"), ({"text": "a", "text_pair": "b"}, "w1 [SEP] w2")])
def test_a_pooling_encoder_reads_one_text_at_a_time(at: Folder, columns: dict[str, str], read: str) -> None:
    at.tokenizer()
    (at.expert / "1_Pooling").mkdir()
    row = {"a": "w1", "b": "w2"} if columns else {"sentence1": "w1", "sentence2": "w2"}
    assert words_of(at.load(tiny("bert"), at.rows(row, columns=columns)).fitted) == [f"[CLS] {read} [SEP]"]


def test_a_tokenizer_beside_a_config_that_contradicts_itself_is_read(at: Folder) -> None:
    at.tokenizer()
    config = {"model_type": "llama", "attn_implementation": "flash_attention_2", "output_attentions": True}
    (at.expert / "config.json").write_text(json.dumps(config))
    assert len(at.load(tiny("llama"), at.rows({"text": "w1"})).fitted) == 1


@pytest.mark.parametrize("row", [{"text": "w1 x9"}, {"inputs": "w1", "targets": "w1 x9"}])
def test_tokens_that_the_model_has_no_embeddings_for_are_refused(at: Folder, row: Row) -> None:
    at.tokenizer(words=[*WORDS, *(f"x{number}" for number in range(10))])
    at.refuse(tiny("t5"), at.rows(row), r"the tokenizer has token 68, but the model only 64 tokens[^$]*own tokenizer")
    with pytest.raises(DataError, match="token 68"):
        at.labelled(tiny("t5"), at.rows({**row, "label": 0}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "a;b\nw1;0\n"),
        ("a.tsv", "a,b\nw1,0\n"),
        ("a.jsonl", [{"a;b": "w;0"}]),
        ("a.parquet", [{"a;b": "w;0"}]),
    ],
)
def test_a_column_that_was_several_is_not_read_unless_it_is_named(at: Folder, name: str, content: Any) -> None:
    source = at.file(name, content)
    error = at.refuse(tiny("bert"), source, "the only column is called 'a[;,]b', which looks like several")
    assert error.fix.endswith("--columns task=text:COLUMN")
    column = "a,b" if name == "a.tsv" else "a;b"
    assert at.load(tiny("bert"), source.model_copy(update={"columns": {"text": column}})).fitted


# --- labels ---


def test_labelled_rows_keep_their_order_and_the_named_label_column_counts(at: Folder) -> None:
    rows = [{"text": f"w{number}", "label": 0, "answer": number % 2} for number in range(25)]
    batches, labels = at.labelled(tiny("bert"), at.file("a.parquet", rows, columns={"label": "answer"}), batch_size=10)
    assert labels == [number % 2 for number in range(25)]
    assert words_of(batches) == [f"[CLS] w{number} [SEP]" for number in range(25)]


@pytest.mark.parametrize(("column", "label", "number"), [("label", "good", 1), ("Label", 1, 1), ("class", "1", 1)])
def test_labels_are_numbers_or_names_that_the_model_knows(at: Folder, column: str, label: object, number: int) -> None:
    assert at.labelled(tiny("bert"), at.rows({"text": "w1", column: label}))[1] == [number]


@pytest.mark.parametrize(
    ("rows", "split", "message"),
    [
        ([{"text": "w1", "label": "fine"}], "train", "is no class"),
        ([{"text": "w1", "label": 0.5}], "train", "is no class"),
        ([{"text": "w1", "label": -1}], "train", "hides its labels"),
        ([{"text": "w1"}, {"text": "w2", "label": 0}], "train", "a row has no label in column label"),
        ([*({"text": "w1", "label": 0} for _ in range(9)), {"text": "", "label": 1}], "train", "row 10 cannot be used"),
        ([{"text": "w1", "label": 0}], "test", "it has no split test"),
    ],
)
def test_labels_of_no_class_and_bad_rows_are_refused(at: Folder, rows: list[Row], split: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        at.labelled(tiny("bert"), at.rows(*rows), split)


# --- padding ---

LENGTHS = (3, 1, 3, 2, 1)


def make_texts(longest: int) -> dict[str, Tensor]:
    """Ids that tell the example and the token, padded with 0."""
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    ids = (10 * torch.arange(1, 6)[:, None] + torch.arange(longest)) * mask
    boxes = ids[..., None].float().expand(-1, -1, 4).contiguous()
    return {"input_ids": ids, "attention_mask": mask, "bbox": boxes, "pixel_values": torch.rand(5, longest, 2, 2)}


def test_examples_are_cut_and_those_of_equal_length_share_batches() -> None:
    batch = make_texts(4)
    full = remove_padding([batch], 2)
    assert [x["input_ids"].tolist() for x in full] == [[[10, 11, 12], [30, 31, 32]], [[20], [50]], [[40, 41]]]
    assert all(x["attention_mask"].all() and x["bbox"].shape[:2] == x["input_ids"].shape for x in full)
    assert torch.equal(torch.cat([x["pixel_values"] for x in full]), batch["pixel_values"][[0, 2, 1, 4, 3]])
    assert all(not token_masks(x) for x in full)


def test_ids_with_a_mask_of_their_own_are_cut_by_it() -> None:
    """InstructBLIP reads a question a second time, with another tokenizer."""
    texts = make_texts(4)
    named = {f"qformer_{name}": texts[name].flip(0) for name in ("input_ids", "attention_mask")}
    for example in remove_padding([texts | named], 1):
        number = int(example["input_ids"][0, 0]) // 10
        assert example["qformer_input_ids"].shape[1] == example["qformer_attention_mask"].sum() == LENGTHS[-number]


def test_what_a_model_wants_of_one_size_is_not_cut() -> None:
    """Whisper's spectrograms have features before frames."""
    batch = {"input_features": torch.rand(2, 4, 6), "attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])}
    assert find_along(batch, "encoder") == ["attention_mask"]
    [full] = remove_padding([batch], 2)
    assert torch.equal(full["attention_mask"], batch["attention_mask"])


def test_a_mask_of_floating_point_numbers_cuts_like_any_other() -> None:
    sound = {"input_values": torch.rand(2, 4), "attention_mask": torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]])}
    assert [x["input_values"].shape for x in remove_padding([sound], 2)] == [(1, 4), (1, 2)]
