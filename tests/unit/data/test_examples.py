"""Rows become batches: the right columns, the right rows, the right shapes, and errors that say what to do."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import shutil
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from hub_server import HubServer
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from featcal_cli.data.batches import Batch, count_positions
from featcal_cli.data.examples import TaskExamples, draw_examples, load_labelled
from featcal_cli.data.images import DECODED, to_rgb
from featcal_cli.data.local_tables import KEPT, open_file, shorten_row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

arrow: Any = pyarrow  # has no types
parquet: Any = pyarrow.parquet
FastTokenizer: Any = PreTrainedTokenizerFast
TINY: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 64,
}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>", *(f"w{number}" for number in range(50))]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def build(name: str, config_name: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = getattr(transformers, name)(getattr(transformers, config_name)(**settings))
    return model


@pytest.fixture(scope="module")
def vit() -> PreTrainedModel:
    return build("ViTForImageClassification", "ViTConfig", **{**TINY, "vocab_size": None}, image_size=8, patch_size=4)


@pytest.fixture(scope="module")
def bert() -> PreTrainedModel:
    labels = {"label2id": {"bad": 0, "good": 1}, "id2label": {0: "bad", 1: "good"}}
    return build("BertForSequenceClassification", "BertConfig", **TINY, max_position_embeddings=16, **labels)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("LlamaForCausalLM", "LlamaConfig", **TINY, num_key_value_heads=2)


@pytest.fixture(scope="module")
def t5() -> PreTrainedModel:
    return build(
        "T5ForConditionalGeneration", "T5Config",
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0,
    )  # fmt: skip


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """A model folder with an image processor for 8 × 8 images."""
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "expert")
    return tmp_path / "expert"


def save_tokenizer(folder: Path, *, chat: bool = False, words: Sequence[str] = WORDS, **settings: Any) -> Path:
    """A word-level tokenizer, which has a pad token unless told otherwise."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    settings = {"pad_token": "[PAD]", "eos_token": "</s>", "unk_token": "[UNK]", **settings}
    fast: Any = FastTokenizer(tokenizer_object=tokenizer, **settings)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "expert")


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "expert", chat=True)


def encode_image(value: int) -> bytes:
    """A PNG of one colour."""
    stream = io.BytesIO()
    Image.new("L", (6, 6), value).save(stream, "PNG")
    return stream.getvalue()


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def write_parquet(file: Path, rows: Sequence[Mapping[str, Any]], group: int = 10) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(list(rows)), file, row_group_size=group)
    return str(file)


def image_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose image has the row's number as its colour."""
    return [{"image": {"bytes": encode_image(number), "path": None}, "label": number} for number in range(count)]


def text_rows(count: int, column: str = "text") -> list[dict[str, Any]]:
    return [{"idx": number, column: f"w{number % 50} w1", "label": number % 2} for number in range(count)]


def load(
    data: Data, model: PreTrainedModel, *folders: Path, count: int = 8, batch_size: int = 4, seed: int = 0
) -> TaskExamples:
    return draw_examples("task", data, model, folders, count=count, seed=seed).cut(batch_size)


def rows_of(batches: Sequence[Batch], name: str) -> list[list[Any]]:
    """Every row of one argument, as lists, over all batches."""
    return [row.flatten().tolist() for batch in batches for row in batch[name]]


def colours(batches: Sequence[Batch]) -> list[int]:
    """The colours that the images had before they were normalised to −1 … 1."""
    return [round((float(row.mean()) + 1) * 127.5) for batch in batches for row in batch["pixel_values"]]


# --- which rows ---


def test_exactly_n_are_fitted_and_the_held_out_rows_are_others(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", image_rows(200)))
    found = load(data, vit, image_folder, count=40)
    parts = [colours(part) for part in (found.fitted, found.selection, found.held_out)]
    assert [len(part) for part in parts] == [40, 5, 5]
    assert len({colour for part in parts for colour in part}) == 50
    assert (found.fitted_count, found.held_out_count) == (40, 5)


def test_label_sorted_rows_give_many_classes(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", image_rows(250)))
    classes = {colour // 25 for colour in colours(load(data, vit, image_folder, count=50).fitted)}
    assert len(classes) >= 9


def test_one_seed_always_gives_the_same_rows_and_another_gives_others(
    tmp_path: Path, vit: Any, image_folder: Path
) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", image_rows(200)))
    first, second, other = (colours(load(data, vit, image_folder, seed=seed).fitted) for seed in (1, 1, 2))
    assert first == second != other


def test_only_the_row_groups_that_hold_chosen_rows_are_read(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    file = Path(write_parquet(tmp_path / "a.parquet", text_rows(4000), group=40))
    group = parquet.ParquetFile(file).metadata.row_group(0).column(1)
    start = group.dictionary_page_offset or group.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    file.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_labelled("task", Data(path=str(file)), "train", bert, [text_folder], batch_size=100)
    readable = 0
    for seed in range(12):
        with contextlib.suppress(DataError):  # raised for seeds that choose a row of the broken group
            readable += load(Data(path=str(file)), bert, text_folder, count=1, seed=seed).fitted_count
    assert readable >= 6


def test_a_source_with_fewer_rows_is_fitted_whole_and_the_notes_say_so(
    tmp_path: Path, bert: Any, text_folder: Path
) -> None:
    found = load(Data(path=write_jsonl(tmp_path / "a.jsonl", text_rows(5))), bert, text_folder)
    assert (found.fitted_count, found.held_out_count, found.selection) == (5, 0, [])
    assert any("all of them are fitted (8 were asked for)" in note for note in found.notes)
    assert any("drift is measured on the fitted rows" in note for note in found.notes)


@pytest.mark.parametrize(("rows", "halves"), [(9, (0, 0)), (10, (1, 1)), (11, (1, 2)), (16, (4, 4)), (99, (4, 4))])
def test_held_out_rows_are_what_is_left_in_two_halves(
    tmp_path: Path, bert: Any, text_folder: Path, rows: int, halves: tuple[int, int]
) -> None:
    found = load(Data(path=write_jsonl(tmp_path / "a.jsonl", text_rows(rows))), bert, text_folder)
    assert (len(rows_of(found.selection, "input_ids")), found.held_out_count) == halves
    assert found.fitted_count == 8


@pytest.mark.parametrize(
    ("rows", "count", "parts"),
    [
        (9, 256, (9, 0, 0)), (10, 256, (6, 2, 2)), (11, 256, (7, 2, 2)), (20, 20, (16, 2, 2)), (40, 256, (32, 4, 4)),
        (300, 256, (240, 30, 30)), (319, 256, (255, 32, 32)), (400, 256, (256, 32, 32)), (20, 12, (12, 4, 4)),
        (19, 12, (12, 3, 4)), (10, 4, (4, 3, 3)), (9, 4, (4, 2, 3)), (30, 1, (1, 4, 4)), (3, 256, (3, 0, 0)),
        (1, 1, (1, 0, 0)),
    ],
)  # fmt: skip
def test_about_a_fifth_is_held_out_where_there_are_too_few_rows(
    tmp_path: Path, bert: Any, text_folder: Path, rows: int, count: int, parts: tuple[int, int, int]
) -> None:
    """If it is asked for, and of ten rows or more; what is held out is not fitted, and nothing is lost."""
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", different_rows(rows)))
    drawn = draw_examples("task", data, bert, [text_folder], count=count, seed=3, hold_out=True)
    found = drawn.cut(8)
    assert (found.fitted_count, found.selection_count, found.held_out_count) == parts
    texts = [tuple(row) for part in (found.fitted, found.selection, found.held_out) for row in words_in(part)]
    assert len(set(texts)) == len(texts) == min(rows, sum(parts))
    if parts[1] > 0 and parts[0] < count:
        assert any(f"{parts[0]} are fitted ({count} were asked for)" in note for note in found.notes)
    left = draw_examples("task", data, bert, [text_folder], count=count, seed=3)
    assert len(left.fitted) == min(rows, count)


def different_rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"w{number % 20} w{number // 20}"} for number in range(count)]


def words_in(batches: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    return rows_of(batches, "input_ids")  # type: ignore[arg-type]


@pytest.mark.parametrize("hold_out", [True, False])
@pytest.mark.parametrize(("different", "copies"), [(1, 40), (5, 8), (10, 4), (20, 2), (200, 2)])
def test_equal_rows_are_never_on_both_sides(
    tmp_path: Path, bert: Any, text_folder: Path, different: int, copies: int, hold_out: bool
) -> None:
    """Whether they are the same row or only become the same tokens."""
    rows = [{"text": row["text"] + " " * copy} for copy in range(copies) for row in different_rows(different)]
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", rows))
    found = draw_examples("task", data, bert, [text_folder], count=30, seed=0, hold_out=hold_out).cut(8)
    sides = [{tuple(row) for row in words_in(part)} for part in (found.fitted, found.selection, found.held_out)]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert found.held_out_count == len(sides[2]) and found.selection_count == len(sides[1])
    if hold_out or different == 200:
        assert bool(sides[2]) == (different >= 10)
    if different < 200:
        assert any("rows are equal to others" in note for note in found.notes)
    if different < 10:
        assert any("drift is measured on the fitted rows" in note for note in found.notes)


def test_equal_tensors_and_images_are_never_on_both_sides(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    """Also where the same picture is stored in another format."""
    pixels = torch.randn(12, 3, 8, 8)
    save_file({"pixel_values": torch.cat([pixels, pixels, pixels])}, tmp_path / "a.safetensors")
    (tmp_path / "images").mkdir()
    for number in range(12):
        for ending in ("png", "bmp"):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / "images" / f"{number}.{ending}")
    for source in ("a.safetensors", "images"):
        drawn = draw_examples(
            "task", Data(path=str(tmp_path / source)), vit, [image_folder], count=24, seed=0, hold_out=True
        )
        found = drawn.cut(4)
        sides = [
            {row.numpy().tobytes() for batch in part for row in batch["pixel_values"]}
            for part in (found.fitted, found.selection, found.held_out)
        ]
        assert [len(side) for side in sides] == [8, 2, 2]
        assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_bad_rows_are_replaced_by_good_ones_and_counted(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    rows = image_rows(60)
    for number in range(0, 60, 4):
        rows[number]["image"] = {"bytes": b"no image", "path": None} if number % 8 else None
    found = load(Data(path=write_parquet(tmp_path / "a.parquet", rows)), vit, image_folder, count=30)
    assert found.fitted_count == 30
    assert all(colour % 4 for colour in colours(found.fitted + found.held_out))
    assert found.rows_skipped > 0
    assert f"task: {found.rows_skipped} rows cannot be used and were left out" in " ".join(found.notes)


def test_mostly_bad_rows_are_an_error_that_gives_the_first_reason(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    rows = [{"text": "w1 w2" if number % 3 == 0 else ""} for number in range(30)]
    with pytest.raises(DataError, match="rows cannot be used; the first: column text has no text"):
        load(Data(path=write_jsonl(tmp_path / "a.jsonl", rows)), bert, text_folder, count=20)


# --- which source ---


def test_every_kind_of_file_gives_the_same_batches(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    rows = [{"text": f"w{number} w1,\nw2", "label": str(number)} for number in range(20)]
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    files = [
        write_jsonl(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "a.parquet", rows),
        str(tmp_path / "a.csv"),
    ]
    first, *others = (rows_of(load(Data(path=file), bert, text_folder).fitted, "input_ids") for file in files)
    assert all(first == other for other in others)


def test_a_folder_of_images_of_any_depth_is_read(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    for number, suffix in enumerate(("png", "jpg", "bmp", "webp", "gif", "tiff", "JPEG")):
        folder = tmp_path / "images" / "deep" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 9), (number, 0, 0)).save(folder / f"{number}.{suffix}")
    found = load(Data(path=str(tmp_path / "images")), vit, image_folder, count=7)
    assert found.fitted_count == 7
    assert "task: column image (of image, label), image processor from expert" in found.notes


def test_image_folders_called_like_splits_are_splits(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    for split, colour in (("train", 10), ("test", 200)):
        for name in ("bus", "cat"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(encode_image(colour + (name == "cat")))
    data = Data(path=str(tmp_path / "images"))
    assert sorted(colours(load(data, vit, image_folder).fitted)) == [10, 11]
    batches, labels = load_labelled("task", data, "test", vit, [image_folder], batch_size=1)
    assert (colours(batches), labels.tolist()) == ([200, 201], [0, 1])


def test_a_class_called_train_is_no_split(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    for number, name in enumerate(("bus", "train")):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(encode_image(number))
    assert load(Data(path=str(tmp_path / "images")), vit, image_folder).fitted_count == 2


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (("train.jsonl", "test.jsonl"), None, "train.jsonl"),
        (("train.jsonl", "test.jsonl"), "test", "test.jsonl"),
        (("data/valid-00000-of-00001.jsonl", "test.jsonl"), "val", "data/valid-00000-of-00001.jsonl"),
        (("data/extra-00000-of-00001.jsonl", "train.jsonl"), "extra", "data/extra-00000-of-00001.jsonl"),
        (("dev/a.jsonl", "train/a.jsonl"), "validation", "dev/a.jsonl"),
        (("anything.jsonl",), None, "anything.jsonl"),
    ],
)  # fmt: skip
def test_data_files_are_found_by_split(
    tmp_path: Path, bert: Any, text_folder: Path, names: Sequence[str], split: str | None, expected: str
) -> None:
    for number, name in enumerate(names):
        write_jsonl(tmp_path / "data" / name, [{"text": f"w{number} w{number}"}])
    found = load(Data(path=str(tmp_path / "data"), split=split), bert, text_folder)
    word = WORDS.index(f"w{names.index(expected)}")
    assert rows_of(found.fitted, "input_ids") == [[2, word, word, 3]]


def test_a_split_that_is_not_there_is_an_error_that_lists_those_that_are(
    tmp_path: Path, bert: Any, text_folder: Path
) -> None:
    for name in ("train", "test"):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", text_rows(3))
    with pytest.raises(DataError, match=r"no split validation[^$]*test, train"):
        load(Data(path=str(tmp_path / "data"), split="validation"), bert, text_folder)


def test_a_single_file_has_no_split_but_train(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", text_rows(3)))
    with pytest.raises(DataError, match="it has no split test"):
        load_labelled("task", data, "test", bert, [text_folder], batch_size=2)
    assert len(load_labelled("task", data, "train", bert, [text_folder], batch_size=2)[1]) == 3


def test_a_hub_dataset_is_read_with_its_splits_and_encoded_images(
    tmp_path: Path, vit: Any, image_folder: Path, hub: HubServer
) -> None:
    import datasets

    library: Any = datasets
    for split, start in (("train", 0), ("test", 100)):
        rows = image_rows(140)[start : start + 40]
        features = library.Features({"image": library.Image(), "label": library.Value("int64")})
        file = tmp_path / "repo" / "data" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        library.Dataset.from_list(rows, features=features).to_parquet(file)
    hub.add_repo("user/encoded", tmp_path / "repo", kind="dataset")
    data = Data(dataset="user/encoded")
    found = load(data, vit, image_folder, count=16)
    seen = colours(found.fitted + found.selection + found.held_out)
    assert len(set(seen)) == 24 and max(seen) < 40
    batches, labels = load_labelled("task", data, "test", vit, [image_folder], batch_size=16)
    assert colours(batches) == labels.tolist() == list(range(100, 140))


def test_a_large_batch_of_images_is_decoded_in_parts(
    tmp_path: Path, vit: Any, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", image_rows(50)))
    sizes: list[int] = []
    whole = ViTImageProcessorPil.preprocess

    def watch(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(images))
        return whole(self, images, *args, **options)

    monkeypatch.setattr(ViTImageProcessorPil, "preprocess", watch)
    [batch] = load(data, vit, image_folder, count=40, batch_size=40).fitted
    assert max(sizes) == DECODED
    few = load(data, vit, image_folder, count=40, batch_size=7).fitted
    assert torch.equal(batch["pixel_values"], torch.cat([part["pixel_values"] for part in few]))


def test_images_that_are_padded_are_so_to_the_largest_of_the_whole_batch(tmp_path: Path, vit: Any) -> None:
    DetrImageProcessorPil(do_resize=False, do_normalize=False).save_pretrained(tmp_path / "expert")
    for number in range(20):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("L", (8 + 4 * (number == 19), 6), 255).save(tmp_path / "images" / f"{number}.png")
    [batch] = load(Data(path=str(tmp_path / "images")), vit, tmp_path / "expert", count=20, batch_size=20).fitted
    assert batch["pixel_values"].shape == (20, 3, 6, 12)
    assert sorted(batch["pixel_values"].sum((1, 2, 3)).tolist()) == [144.0] * 19 + [216.0]


@pytest.mark.parametrize("zipped", [False, True])
def test_images_that_lie_as_files_in_a_hub_dataset_are_fetched(
    tmp_path: Path, vit: Any, image_folder: Path, hub: HubServer, zipped: bool
) -> None:
    (tmp_path / "repo" / "train").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "repo" / "train" / f"{number}.png").write_bytes(encode_image(number))
    if zipped:
        shutil.make_archive(str(tmp_path / "repo" / "train"), "zip", tmp_path / "repo", "train")
        shutil.rmtree(tmp_path / "repo" / "train")
    hub.add_repo(f"user/pictures-{zipped}", tmp_path / "repo", kind="dataset")
    found = load(Data(dataset=f"user/pictures-{zipped}"), vit, image_folder)
    assert sorted(colours(found.fitted)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.safetensors"])
def test_missing_and_broken_files_are_data_errors(tmp_path: Path, bert: Any, text_folder: Path, name: str) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load(Data(path=str(tmp_path / name)), bert, text_folder)
    (tmp_path / name).write_bytes(b"\xff\xfe\x00broken" * 9)
    with pytest.raises(DataError):
        load(Data(path=str(tmp_path / name)), bert, text_folder)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_an_empty_source_is_an_error(tmp_path: Path, bert: Any, text_folder: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="no rows"):
        load(Data(path=str(tmp_path / name)), bert, text_folder)


def test_a_line_that_is_no_json_is_an_error_with_its_number(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2"}\n\n{"text": \n')
    with pytest.raises(DataError, match="row 2 is not JSON"):
        load(Data(path=str(tmp_path / "a.jsonl")), bert, text_folder)


# --- files as people have them ---

ROWS = [{"text": f"w{number} w2, w3", "label": str(number % 2)} for number in range(12)]
LINES = "".join(f'"{row["text"]}",{row["label"]}\n' for row in ROWS)
TABLE = "text,label\n" + LINES
OBJECTS = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TABLE.encode("utf-8-sig")),
        ("a.csv", TABLE.encode("utf-16")),
        ("a.csv", TABLE.encode("utf-16-le")),
        ("a.csv", TABLE.replace("\n", "\r\n").encode()),
        ("a.csv", TABLE.replace(",", ";").replace("; w3", ", w3").encode()),
        ("a.csv", b"sep=;\r\n" + TABLE.replace(",", ";").replace("; w3", ", w3").encode()),
        ("a.csv", TABLE.replace(",", "\t").replace("\t w3", ", w3").encode()),
        ("a.csv", TABLE.replace("\n", ",\n").encode()),
        ("a.csv", gzip.compress(TABLE.encode(), mtime=0)),
        ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0)),
        ("a.tsv", TABLE.replace(",", "\t").replace("\t w3", ", w3").encode()),
        ("a.jsonl", OBJECTS.encode("utf-16")),
        ("a.jsonl", OBJECTS.encode("utf-8-sig")),
        ("a.jsonl", OBJECTS.replace("\n", "\r\n").encode()),
        ("a.jsonl", json.dumps(ROWS).encode()),
        ("a.jsonl", json.dumps(ROWS, indent=1).encode()),
        ("a.jsonl.gz", gzip.compress(OBJECTS.encode(), mtime=0)),
        ("a.json", json.dumps(ROWS).encode("utf-8-sig")),
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("a.json", json.dumps({"data": ROWS}, indent=2).encode()),
        ("a.json", OBJECTS.encode()),
        ("a.ndjson", OBJECTS.encode()),
        ("a.txt", "".join(f"{row['text']}\r\n" for row in ROWS).encode()),
    ],
)
def test_files_are_read_as_people_have_them(
    tmp_path: Path, bert: Any, text_folder: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    found = load(Data(path=str(tmp_path / name), columns={"text": "text"}), bert, text_folder, count=12)
    assert sorted(rows_of(found.fitted, "input_ids")) == sorted(
        [2, WORDS.index(f"w{number}"), WORDS.index("w2"), 1, WORDS.index("w3"), 3] for number in range(12)
    )


def test_what_datasets_saves_to_a_disk_is_read(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    import datasets

    library: Any = datasets
    parts = {name: library.Dataset.from_list(ROWS[:count]) for name, count in (("train", 4), ("test", 7))}
    library.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    parts["train"].save_to_disk(tmp_path / "alone")
    for data, count in ((Data(path="saved"), 4), (Data(path="saved", split="test"), 7), (Data(path="alone"), 4)):
        local = data.model_copy(update={"path": str(tmp_path / str(data.path))})
        assert load(local, bert, text_folder).fitted_count == count


UNCLOSED = TABLE.replace('"w3 w2, w3"', '"w3 w2, w3', 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", UNCLOSED, r"quote in line 5 is not closed: lines 5 to 6 become one row\nin: .*, line 5"),
        ("a.csv", "text,label\n" + '"w1,1\n' + "w2,0\n" * 61, "line 2 is not closed: lines 2 to 63 become one row"),
        ("a.csv", "text,label\n" + '"w1,1\n' + "w2,0\n" * 61 + 'w3",1\nw4,0\n', "line 2 is not closed"),
        ("a.csv", "text\nw1\n" + '"w1 w2', "line 3 is not closed: it is the last line"),
        ("a.csv", LINES, "names no columns: '0' is a number"),
        ("a.csv", "".join(f"w{number} w2,good\n" for number in range(20)), "names no columns: 'good' is a value that"),
        ("a.csv", "text,text\nw1,w2\n", "several columns are called 'text'"),
        ("a.csv", "text,label\n" + "w1, w2, w3,1\n" * 20, "has 4 values for 2 columns"),
        ("a.csv", TABLE.replace("w2", "caf\xe9").encode("latin-1"), r"may be WINDOWS-1252[^$]*iconv -f WINDOWS-1252"),
        ("a.jsonl", OBJECTS.encode().replace(b"w5", b"caf\xe9"), r"row 6 is not UTF-8[^$]*WINDOWS-1252"),
        ("a.csv", b"PK\x03\x04" + bytes(99), "a zip archive or a spreadsheet[^$]*fix: unpack it, or save"),
        ("a.xlsx", b"PK\x03\x04" + bytes(99), r"a.xlsx is not a kind[^$]*save the sheet as .csv"),
        ("a.parquet", TABLE, "cannot be read"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS[^$]*git lfs pull"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS[^$]*git lfs pull"),
        ("a.csv", "<!DOCTYPE html><html>", "a web page"),
        ("a.jsonl", b"PAR1" + bytes(99), "a parquet file"),
        ("a.csv.gz", gzip.compress(TABLE.encode() * 99, mtime=0)[:-40], "cannot be read"),
        ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0)[:-12] + bytes(12), "cannot be read"),
        ("a.arrow", b"ARROW1" + bytes(99), "cannot be read"),
        ("a.json", "{", "a.json is not JSON"),
        ("a.json", "[1, 2]", "no list of JSON objects"),
        ("a.json", "", "not JSON|no rows"),
    ],
)
def test_files_that_would_be_misread_are_refused_with_the_place(
    tmp_path: Path, bert: Any, text_folder: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        load(Data(path=str(tmp_path / name)), bert, text_folder)


def test_rows_of_csv_with_too_many_values_are_left_out_and_lines_in_quotes_are_read(
    tmp_path: Path, bert: Any, text_folder: Path
) -> None:
    long = "w1 w2\n" * 30
    content = f'text,label\nw1,1\nw2, w3,1\nw4\n"{long}",0\ntext,label\n5" w5,1\n"w6" w7,0\n'
    (tmp_path / "a.csv").write_text(content)
    found = load(Data(path=str(tmp_path / "a.csv")), bert, text_folder)
    assert (found.fitted_count, found.rows_skipped) == (5, 2)
    notes = " ".join(found.notes)
    assert "line 3 has 3 values for 2 columns" in notes or "line 36 names the columns again" in notes


def test_a_file_that_grows_is_read_as_it_was_and_one_that_is_replaced_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(OBJECTS)
    [table] = open_file(file, "a")
    with file.open("a") as stream:
        stream.write(OBJECTS)
    assert [row["text"] for row in table.read(range(table.length))] == [row["text"] for row in ROWS]
    file.write_text("[]\n")
    with pytest.raises(DataError, match="changed while it was read"):
        list(table.read([5]))


# --- tensors ---


def save_tensors(file: Path, **tensors: Tensor) -> Data:
    save_file(tensors, file)
    return Data(path=str(file))


def test_tensors_are_taken_in_file_order(tmp_path: Path, vit: Any) -> None:
    values = torch.arange(20.0).reshape(20, 1, 1, 1).expand(20, 3, 8, 8).contiguous()
    found = load(save_tensors(tmp_path / "a.safetensors", pixel_values=values.half()), vit, count=6, batch_size=4)
    order = [
        row[0] for part in (found.fitted, found.selection, found.held_out) for row in rows_of(part, "pixel_values")
    ]
    assert order == list(range(14))
    assert [len(batch["pixel_values"]) for batch in found.fitted] == [4, 2]
    assert found.fitted[0]["pixel_values"].dtype == torch.float32


def test_tensors_need_no_preprocessor_and_labels_stay_out_of_the_batch(tmp_path: Path, bert: Any) -> None:
    data = save_tensors(tmp_path / "a.safetensors", input_ids=torch.ones(3, 5).long(), labels=torch.tensor([0, 2, 1]))
    assert set(load(data, bert).fitted[0]) == {"input_ids"}
    batches, labels = load_labelled("task", data, "train", bert, [], batch_size=2)
    assert labels.tolist() == [0, 2, 1] and len(batches) == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pixels": torch.ones(2, 3)}, "does not take pixels"),
        ({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(3, 3).long()}, "do not agree"),
        ({"input_ids": torch.ones(0, 3).long()}, "do not agree"),
        ({"input_ids": torch.tensor(1)}, "do not agree"),
        ({"labels": torch.tensor([1, 2])}, "nothing but labels"),
    ],
)
def test_tensors_that_the_model_cannot_take_are_refused(
    tmp_path: Path, bert: Any, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(save_tensors(tmp_path / "a.safetensors", **tensors), bert)


IDS = torch.ones(4, 6).long()
HALF_MASK = torch.ones(4, 6).long().index_fill(0, torch.tensor([2]), 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"input_ids": torch.ones(4, 17).long()}, "17 tokens an example, and the model positions for 16"),
        ({"input_ids": IDS[:, :0]}, r"input_ids \[4, 0\] holds nothing"),
        ({"input_ids": IDS.index_fill(0, torch.tensor([1]), 64)}, "of example 2 has 64, and the model knows 0 to 63"),
        ({"input_ids": -IDS}, "of example 1 has -1"),
        ({"input_ids": IDS.float()}, "ids are whole numbers"),
        ({"input_ids": IDS[:, 0].contiguous()}, "without a dimension of tokens"),
        ({"input_ids": IDS, "token_type_ids": 2 * IDS}, "token_type_ids of example 1 has 2"),
        ({"input_ids": IDS, "attention_mask": HALF_MASK}, "of example 3 is all 0"),
        ({"input_ids": IDS, "attention_mask": IDS[:, :5].contiguous()}, "differ"),
        ({"input_ids": IDS, "attention_mask": 5 * IDS}, "holds 5 to 5"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(4, 6, 8, dtype=torch.complex64)}, "complex64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ids_and_masks_that_a_model_cannot_read_are_refused_with_numbers(
    tmp_path: Path, bert: Any, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(save_tensors(tmp_path / "a.safetensors", **tensors), bert)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_fewer_bits_are_ids(tmp_path: Path, bert: Any, kind: torch.dtype) -> None:
    mask = torch.ones(4, 6).bool()
    [batch] = load(save_tensors(tmp_path / "a.safetensors", input_ids=IDS.to(kind), attention_mask=mask), bert).fitted
    assert batch["input_ids"].dtype == torch.int64
    assert bert(**batch).logits.shape == (4, 2)


def test_positions_of_roberta_begin_behind_the_paddings(tmp_path: Path) -> None:
    roberta = build("RobertaModel", "RobertaConfig", **TINY, max_position_embeddings=16, pad_token_id=1)
    assert count_positions(roberta) == (14, True)
    roberta(input_ids=torch.full((1, 14), 5))
    with pytest.raises(DataError, match="15 tokens an example, and the model positions for 14"):
        load(save_tensors(tmp_path / "a.safetensors", input_ids=torch.full((4, 15), 5)), roberta)
    folder = save_tokenizer(tmp_path / "expert")
    [batch] = load(one(tmp_path, {"text": "w1 " * 600}), roberta, folder).fitted
    assert batch["input_ids"].shape == (1, 14)


def test_more_tokens_than_a_model_with_turning_positions_was_made_for_are_its_users_affair(
    tmp_path: Path, llama: Any
) -> None:
    assert count_positions(llama) == (2048, False)
    assert load(save_tensors(tmp_path / "a.safetensors", input_ids=torch.ones(4, 2050).long()), llama).fitted


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.safetensors", "pictures"])
def test_a_pipe_is_refused_and_nobody_waits_for_it(tmp_path: Path, bert: Any, text_folder: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"is a pipe, a socket or a device[^$]*into a file"):
        load(Data(path=str(tmp_path / name)), bert, text_folder)


def test_pipes_in_a_folder_are_no_files_of_it(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "a.jsonl")
    with pytest.raises(DataError, match="no images and no data files"):
        load(Data(path=str(tmp_path / "data")), bert, text_folder)
    write_jsonl(tmp_path / "data" / "b.jsonl", text_rows(3))
    assert load(Data(path=str(tmp_path / "data")), bert, text_folder).fitted_count == 3


# --- images ---


def test_images_of_every_form_become_float32_pixel_values_that_the_model_takes(
    tmp_path: Path, vit: Any, image_folder: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(encode_image(7))
    relative = Data(path=write_jsonl(tmp_path / "a.jsonl", [{"picture": "pictures/a.png"}]))
    raw = Data(path=write_parquet(tmp_path / "a.parquet", [{"x": encode_image(7)}]))
    for data in (relative, raw):
        found = load(data, vit, image_folder)
        assert found.fitted[0]["pixel_values"].dtype == torch.float32
        assert colours(found.fitted) == [7]
        assert vit(**found.fitted[0]).logits.shape[0] == 1


def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    pixels = numpy.zeros((8, 8, 3), dtype=numpy.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images" / "a.png", exif=exif)
    [batch] = load(Data(path=str(tmp_path / "images")), vit, image_folder).fitted
    assert batch["pixel_values"][0, 0, 0, 0] < 0 < batch["pixel_values"][0, 0, 7, 0]


def ramp(dtype: str, most: float) -> Any:
    """Pixels from 0 at the left to `most` at the right, [4, 256]."""
    return numpy.tile(numpy.linspace(0, most, 256), (4, 1)).round(6).astype(dtype)


DEEP: dict[str, Any] = {
    "16 bits, PNG": (Image.fromarray(ramp("uint16", 65535)), "PNG"),
    "16 bits, TIFF": (Image.fromarray(ramp("uint16", 65535)), "TIFF"),
    "16 bits, big-endian": (Image.frombytes("I;16B", (256, 4), ramp(">u2", 65535).tobytes()), "TIFF"),
    "16 bits, PGM": (Image.fromarray(ramp("int32", 65535)), "PPM"),
    "32 bits": (Image.fromarray(ramp("int32", 65535)), "TIFF"),
    "eight bits in 32": (Image.fromarray(ramp("int32", 255)), "TIFF"),
    "floats up to 1": (Image.fromarray(ramp("float32", 1)), "TIFF"),
    "floats up to 255": (Image.fromarray(ramp("float32", 255)), "TIFF"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_greys_are_scaled_to_eight_bits(kind: str) -> None:
    stream = io.BytesIO()
    image, name = DEEP[kind]
    image.save(stream, name)
    found = numpy.asarray(to_rgb(Image.open(stream)))
    assert found.shape == (4, 256, 3)
    assert abs(found[..., 0].astype(int) - numpy.arange(256)).max() <= 1


@pytest.mark.parametrize(
    "values",
    [ramp("int32", 10**6), ramp("int32", 100) - 50, ramp("float32", 4000), ramp("float32", numpy.nan)],
    ids=["beyond 16 bits", "below zero", "floats beyond 255", "NaN"],
)
def test_pixels_without_a_known_scale_are_bad_rows(tmp_path: Path, vit: Any, image_folder: Path, values: Any) -> None:
    (tmp_path / "images").mkdir()
    Image.fromarray(values).save(tmp_path / "images" / "0.tiff")
    with pytest.raises(DataError, match="pixels"):
        load(Data(path=str(tmp_path / "images")), vit, image_folder)


def see_through(mode: str) -> Image.Image:
    """Left half black, right half black but transparent."""
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (4, 0, 8, 8))
    return image if mode == "RGBA" else image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_white_as_in_transformers(mode: str, recwarn: pytest.WarningsRecorder) -> None:
    stream = io.BytesIO()
    see_through(mode).save(stream, "PNG")
    found = numpy.asarray(to_rgb(Image.open(stream)))
    assert (found[:, :4] == 0).all() and (found[:, 4:] == 255).all()
    assert not recwarn.list


def test_other_kinds_of_images_look_as_they_do_elsewhere(tmp_path: Path) -> None:
    red = Image.new("RGB", (8, 8), (250, 10, 10))
    frames = [red, Image.new("RGB", (8, 8), (10, 10, 250))]
    red.save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    red.convert("CMYK").save(tmp_path / "b.jpg", quality=100)
    frames[0].save(tmp_path / "c.tiff", save_all=True, append_images=frames[1:])
    for file in sorted(tmp_path.iterdir()):
        mean = numpy.asarray(to_rgb(Image.open(file))).mean((0, 1))
        assert abs(mean - [250, 10, 10]).max() < 8, file.name
    Image.new("1", (8, 8), 1).save(tmp_path / "d.png")
    assert to_rgb(Image.open(tmp_path / "d.png")).getpixel((0, 0)) == (255, 255, 255)


GREY_7 = numpy.full((6, 6), 7, dtype=int)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("pixels", GREY_7.tolist()),
        ("image", numpy.stack([GREY_7] * 3).tolist()),
        ("image", numpy.stack([GREY_7] * 3, axis=-1).tolist()),
        ("img", (GREY_7 / 255).tolist()),
        ("image", b64encode(encode_image(7)).decode()),
        ("x", "data:image/png;base64," + b64encode(encode_image(7)).decode()),
        ("images", [{"bytes": encode_image(7), "path": None}]),
    ],
    ids=["grey", "channels first", "channels last", "floats", "base64", "data URL", "a list of one"],
)
def test_arrays_and_base64_are_images(tmp_path: Path, vit: Any, image_folder: Path, column: str, cell: Any) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", [{column: cell, "label": 1}]))
    assert colours(load(data, vit, image_folder).fitted) == [7]


def test_base64_of_a_large_image_is_not_shortened() -> None:
    text = "iVBORw0KGgo" + "A" * (3 * KEPT)
    assert shorten_row({"image": text, "text": "A" * (3 * KEPT)}) == {"image": text, "text": "A" * (2 * KEPT)}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (list(range(784)), "no column holds images"),
        (numpy.ones((6, 5, 2)).tolist(), r"an array of \[6, 5, 2\] is no picture"),
        ([[1, 2], [3]], "differ in length"),
        ([{"bytes": encode_image(7)}] * 2, "has 2 images"),
    ],
)
def test_lists_that_are_no_picture_are_refused(
    tmp_path: Path, vit: Any, image_folder: Path, cell: Any, message: str
) -> None:
    data = Data(path=write_parquet(tmp_path / "a.parquet", [{"image": cell}]))
    with pytest.raises(DataError, match=message):
        load(data, vit, image_folder)


def test_the_first_folder_with_a_processor_gives_it(tmp_path: Path, vit: Any, image_folder: Path) -> None:
    (tmp_path / "bare").mkdir()
    snapshot = tmp_path / "models--openai--clip" / "snapshots" / "abc"
    ViTImageProcessorPil(size={"height": 4, "width": 4}).save_pretrained(snapshot)
    data = Data(path=write_parquet(tmp_path / "a.parquet", image_rows(3)))
    found = load(data, vit, tmp_path / "bare", snapshot, image_folder)
    assert found.fitted[0]["pixel_values"].shape[-1] == 4
    assert any("image processor from openai/clip" in note for note in found.notes)


def test_no_processor_is_an_error_that_says_what_to_copy(tmp_path: Path, vit: Any, bert: Any) -> None:
    with pytest.raises(DataError, match=r"copy preprocessor_config.json"):
        load(Data(path=write_parquet(tmp_path / "a.parquet", image_rows(3))), vit, tmp_path)
    with pytest.raises(DataError, match=r"copy tokenizer_config.json"):
        load(Data(path=write_parquet(tmp_path / "b.parquet", text_rows(3))), bert, tmp_path)


def test_code_that_comes_with_a_processor_is_never_run(tmp_path: Path, vit: Any) -> None:
    config = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(DataError, match="no image processor can be loaded"):
        load(Data(path=write_parquet(tmp_path / "a.parquet", image_rows(3))), vit, tmp_path)
    assert not (tmp_path / "ran").exists()


# --- text ---


def words_of(batch: Batch, name: str = "input_ids") -> list[str]:
    return [" ".join(WORDS[number] for number in row) for row in batch[name].tolist()]


def one(tmp_path: Path, row: Mapping[str, Any], **settings: Any) -> Data:
    return Data(path=write_jsonl(tmp_path / "one.jsonl", [row]), **settings)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a b", "text": "w1"}, "[CLS] w1 [SEP]"),
        ({"sentence": "w1", "label": 1}, "[CLS] w1 [SEP]"),
        ({"premise": "w1", "hypothesis": "w2"}, "[CLS] w1 [SEP] w2 [SEP]"),
        ({"question": "w1", "sentence": "w2"}, "[CLS] w1 [SEP] w2 [SEP]"),
        ({"instruction": "w1", "output": "w2"}, "[CLS] w1 [SEP]"),
        ({"code": "x1", "blurb": "w1 w2"}, "[CLS] w1 w2 [SEP]"),
    ],
)
def test_an_encoder_reads_the_columns_that_hold_text(
    tmp_path: Path, bert: Any, text_folder: Path, row: dict[str, Any], expected: str
) -> None:
    [batch] = load(one(tmp_path, row), bert, text_folder).fitted
    assert words_of(batch) == [expected]
    assert bert(**batch).logits.shape == (1, 2)


def test_columns_and_template_of_the_recipe_come_first(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    row = {"text": "w1", "a": "w2", "b": "w3"}
    named = one(tmp_path, row, columns={"text": "b", "text_pair": "a"})
    assert words_of(load(named, bert, text_folder).fitted[0]) == ["[CLS] w3 [SEP] w2 [SEP]"]
    built = one(tmp_path, row, template="w9 {b} w8 {a}")
    assert words_of(load(built, bert, text_folder).fitted[0]) == ["[CLS] w9 w3 w8 w2 [SEP]"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"text": "txt"}}, "no column txt[^$]*text, n"),
        ({"columns": {"txt": "text"}}, "no role txt"),
        ({"template": "{texts}"}, "names a column that there is not: {texts}"),
        ({"template": "{text"}, "template is broken"),
        ({"columns": {"messages": "text"}}, "not a list of messages"),
    ],
)
def test_columns_that_are_not_there_are_refused(
    tmp_path: Path, bert: Any, text_folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(one(tmp_path, {"text": "w1", "n": 1}, **settings), bert, text_folder)


def test_no_usable_column_is_an_error_that_lists_the_columns(
    tmp_path: Path, bert: Any, vit: Any, text_folder: Path, image_folder: Path
) -> None:
    for model, what in ((bert, "text"), (vit, "images")):
        with pytest.raises(DataError, match=rf"no column holds {what}; the columns are n, kind[^$]*--columns task="):
            load(one(tmp_path, {"n": 1, "kind": "a"}), model, text_folder, image_folder)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}], "text": "w9 w9"},
        {"instruction": "w1", "output": "w2", "input": ""},
        {"query": "w1", "response": "w2", "original": "w9 w9"},
        {"instruction": "w1", "response": "w2", "category": "w9 w9"},
        {"inputs": "w1", "targets": "w2"},
        {"prompt": "w1", "response": "w2"},
        {"question": "w1", "answer": "w2"},
        {"prompt": [{"role": "user", "content": "w1"}], "completion": [{"role": "assistant", "content": "w2"}]},
        {"prompt": [{"role": "user", "content": "w1"}], "response": "w2"},
        {"prompt": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}], "answer": "w9"},
    ],
)
def test_conversations_go_through_the_chat_template_without_further_special_tokens(
    tmp_path: Path, llama: Any, row: dict[str, Any]
) -> None:
    words = [*WORDS, "user", "assistant"]
    folder = save_tokenizer(tmp_path / "expert", chat=True, words=words)
    [batch] = load(one(tmp_path, row), llama, folder).fitted
    assert [words[number] for number in batch["input_ids"][0]] == ["user", "w1", "assistant", "w2"]
    assert "token_type_ids" not in batch


def test_a_causal_model_without_chat_template_reads_question_and_answer_as_one_text(
    tmp_path: Path, llama: Any, text_folder: Path
) -> None:
    row = {"instruction": "w1", "input": "w5", "output": "w2"}
    assert words_of(load(one(tmp_path, row), llama, text_folder).fitted[0]) == ["[CLS] w1 w5 w2 [SEP]"]


def test_a_causal_body_without_head_is_known_as_causal(tmp_path: Path, text_folder: Path) -> None:
    body = build("LlamaModel", "LlamaConfig", **TINY, num_key_value_heads=2)
    row = {"question": "w1", "answer": "w2"}
    assert words_of(load(one(tmp_path, row), body, text_folder).fitted[0]) == ["[CLS] w1 w2 [SEP]"]


TURNS = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


def test_turns_are_joined_where_there_is_no_chat_template_and_that_is_said(
    tmp_path: Path, llama: Any, bert: Any, t5: Any, text_folder: Path
) -> None:
    data = one(tmp_path, {"prompt_id": "a b", "prompt": "w1", "messages": TURNS})
    found = load(data, llama, text_folder)
    assert words_of(found.fitted[0]) == ["[CLS] w1 w2 [SEP]"]
    assert "turns joined by line breaks as the tokenizer has no chat template" in " ".join(found.notes)
    data = one(tmp_path, {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]})
    assert words_of(load(data, bert, text_folder).fitted[0]) == ["[CLS] w1 w2 [SEP]"]
    [batch] = load(data, t5, text_folder).fitted
    assert (words_of(batch), words_of(batch, "decoder_input_ids")) == (["[CLS] w1 [SEP]"], ["[PAD] [CLS] w2"])


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a b", "system_prompt": "w9 w9", "question": "w1", "response": "w2"},
        {"source": "w9 w9", "problem": "w1", "solution": "w2", "answer": "w9"},
        {"problem": "w1", "answer": "w2", "level": "w9 w9"},
        {"task_id": 2, "text": "w1", "code": "w2", "test_list": ["w9"]},
        {"prompt": "w1", "chosen": "w2", "rejected": "w9"},
        {"prompt": "w1", "prompt_id": "w9", "chosen": TURNS, "rejected": TURNS},
        {"chosen": TURNS, "rejected": TURNS[:1]},
        {"task_id": "w9 w9", "prompt": "w1", "canonical_solution": "w2", "test": "w9", "entry_point": "w9"},
        {"Question": "w1", "Complex_CoT": "w9 w9", "Response": "w2"},
        {"question": "w1", "generated_solution": "w2", "expected_answer": "w9"},
        {"question": "w1", "answer": {"value": "w2", "aliases": ["w9"]}, "question_id": "w9 w9"},
        {"title": "w9 w9", "question": "w1", "answers": {"text": ["w2", "w9"], "answer_start": [3, 4]}},
        {"query": "w1", "answers": ["w2", "w9"], "passages": {"text": ["w9 w9"]}},
        {"article": "w1", "highlights": "w2", "id": "w9 w9"},
        {"input": "w1", "output": "w2"},
        {"sql_prompt": "w1", "sql": "w2", "sql_context": "w9 w9"},
        {"conversation": [{"human": "w1", "assistant": "w2"}]},
        {"messages": {"role": ["user", "assistant"], "content": ["w1", "w2"]}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}, TURNS[1]]},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
    ],
    ids=lambda row: "-".join(row),
)
@pytest.mark.parametrize("chat", [True, False])
def test_question_and_answer_are_known_by_the_names_that_datasets_use(
    tmp_path: Path, llama: Any, row: dict[str, Any], chat: bool
) -> None:
    words = [*WORDS, "user", "assistant"]
    folder = save_tokenizer(tmp_path / "expert", chat=chat, words=words)
    [batch] = load(one(tmp_path, row), llama, folder).fitted
    expected = ["user", "w1", "assistant", "w2"] if chat else ["[CLS]", "w1", "w2", "[SEP]"]
    assert [words[number] for number in batch["input_ids"][0]] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "w1", "context": "w5", "response": "w2", "category": "w9"},
        {"context": "w5", "question": "w1", "answers": {"text": ["w2"], "answer_start": [0]}},
        {"instruction": "w1", "input": "w5", "output": "w2"},
    ],
)
def test_what_a_question_is_about_comes_behind_it(
    tmp_path: Path, llama: Any, t5: Any, text_folder: Path, row: dict[str, Any]
) -> None:
    assert words_of(load(one(tmp_path, row), llama, text_folder).fitted[0]) == ["[CLS] w1 w5 w2 [SEP]"]
    [batch] = load(one(tmp_path, row), t5, text_folder).fitted
    assert (words_of(batch), words_of(batch, "decoder_input_ids")) == (["[CLS] w1 w5 [SEP]"], ["[PAD] [CLS] w2"])


def test_words_one_by_one_are_a_text(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    row = {"id": "7", "tokens": ["w1", "w2"], "ner_tags": [0, 1]}
    assert words_of(load(one(tmp_path, row), bert, text_folder).fitted[0]) == ["[CLS] w1 w2 [SEP]"]


def test_an_answer_that_is_not_read_is_named_with_what_to_type(
    tmp_path: Path, llama: Any, bert: Any, text_folder: Path
) -> None:
    row = {"sentence": "w1 w3", "answer": "w2"}
    notes = " ".join(load(one(tmp_path, row), llama, text_folder).notes)
    assert "answer, which may be the answer, is not read" in notes
    assert "--columns task=prompt:sentence,response:answer (" in notes
    assert "is not read" not in " ".join(load(one(tmp_path, row), bert, text_folder).notes)
    assert "is not read" not in " ".join(load(one(tmp_path, row, template="{answer} w3"), llama, text_folder).notes)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "w1 w3", "explanation": "w2 w4"}, "explanation"),
        ({"foo": "w1 w3", "bar": "w2 w4"}, "bar"),
        ({"question": "w1 w3", "label": "yes", "id": "7"}, None),
        ({"text": "w1 w3", "author": "w2 w4"}, None),
        ({"chosen": "w1 w3", "rejected": "w2 w4"}, None),
        ({"premise": "w1 w3", "hypothesis": "w2 w4", "why": "w1 w5"}, None),
    ],
)
def test_further_text_beside_a_question_may_be_its_answer(
    row: dict[str, Any], named: str | None, tmp_path: Path, llama: Any, text_folder: Path
) -> None:
    notes = " ".join(load(one(tmp_path, row), llama, text_folder).notes)
    assert ("is not read" in notes) is (named is not None)
    assert named is None or f"{named}, which may be the answer, is not read" in notes
    first = next(iter(row))
    said = load(one(tmp_path, row, columns={"text": first}), llama, text_folder)
    assert "is not read" not in " ".join(said.notes)


def test_texts_inside_of_a_column_are_named_for_a_template(tmp_path: Path, t5: Any, text_folder: Path) -> None:
    with pytest.raises(DataError, match=r'template: "\{translation\[de\]\}"'):
        load(one(tmp_path, {"translation": {"de": "w1", "en": "w2"}}), t5, text_folder)


def test_an_encoder_decoder_gets_the_target_shifted_right(tmp_path: Path, t5: Any, text_folder: Path) -> None:
    rows = [{"inputs": "w1 w2", "targets": "w3"}, {"inputs": "w4", "targets": "w5 w6"}]
    found = load(Data(path=write_jsonl(tmp_path / "a.jsonl", rows)), t5, text_folder, batch_size=2)
    [batch] = found.fitted
    by_source = dict(zip(words_of(batch), words_of(batch, "decoder_input_ids"), strict=True))
    assert by_source == {
        "[CLS] w1 w2 [SEP]": "[PAD] [CLS] w3 [SEP]",
        "[CLS] w4 [SEP] [PAD]": "[PAD] [CLS] w5 w6",
    }
    assert sorted(batch["decoder_attention_mask"].sum(1).tolist()) == [3, 4]
    assert t5(**batch).logits.shape[:2] == (2, 4)


def test_the_longest_example_is_as_long_as_any_batch(tmp_path: Path, t5: Any, text_folder: Path) -> None:
    """In its text and in its target, which may be of two rows, fitted or held out."""
    rows = [{"inputs": f"w{number % 5 + 1}", "targets": f"w{number // 5 + 1}"} for number in range(20)]
    rows[3]["inputs"], rows[7]["targets"] = "w1 w2 w3 w4", "w1 w2 w3"
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", rows))
    drawn = draw_examples("task", data, t5, [text_folder], count=8, seed=0)
    found, longest = drawn.cut(3), drawn.longest()
    for name in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"):
        lengths = [batch[name].shape[1] for batch in (*found.fitted, *found.selection, *found.held_out)]
        assert len(lengths) == 7 and longest[name].shape == (1, max(lengths))


def test_an_encoder_decoder_reads_source_and_target_as_the_recipe_says(
    tmp_path: Path, t5: Any, text_folder: Path
) -> None:
    row = {"a": "w1", "b": "w2", "c": "w3", "text": "w9"}
    built = one(tmp_path, row, template="w8 {a} {b}", columns={"response": "c"})
    named = one(tmp_path, row, columns={"prompt": "b", "response": "c"})
    for data, source in ((built, "w8 w1 w2"), (named, "w2")):
        [batch] = load(data, t5, text_folder).fitted
        assert words_of(batch) == [f"[CLS] {source} [SEP]"]
        assert words_of(batch, "decoder_input_ids") == ["[PAD] [CLS] w3"]


@pytest.mark.parametrize("pair", [("document", "summary"), ("source", "target"), ("question", "answer")])
def test_an_encoder_decoder_knows_sources_and_targets_by_name(
    tmp_path: Path, t5: Any, text_folder: Path, pair: tuple[str, str]
) -> None:
    [batch] = load(one(tmp_path, dict(zip(pair, ("w1", "w2"), strict=True))), t5, text_folder).fitted
    assert (words_of(batch), words_of(batch, "decoder_input_ids")) == (["[CLS] w1 [SEP]"], ["[PAD] [CLS] w2"])


def test_an_encoder_decoder_without_targets_starts_from_its_start_token(
    tmp_path: Path, t5: Any, text_folder: Path
) -> None:
    [batch] = load(one(tmp_path, {"sentence": "w1", "label": 0}), t5, text_folder).fitted
    assert batch["decoder_input_ids"].tolist() == [[0]]
    assert t5(**batch).logits.shape[:2] == (1, 1)


def test_an_encoder_decoder_classifier_runs_on_its_batches(tmp_path: Path, text_folder: Path) -> None:
    model = build(
        "BartForSequenceClassification", "BartConfig",
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=64, eos_token_id=3, pad_token_id=0, bos_token_id=2,
        decoder_start_token_id=3, max_position_embeddings=20,
    )  # fmt: skip
    [batch] = load(one(tmp_path, {"premise": "w1", "hypothesis": "w2"}), model, text_folder).fitted
    assert words_of(batch) == ["[CLS] w1 [SEP] w2 [SEP]"]
    assert model(**batch).logits.shape[0] == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_padding_is_on_the_tokenizers_side_and_masked_even_without_a_pad_token(
    tmp_path: Path, llama: Any, side: str, pad: str | None
) -> None:
    folder = save_tokenizer(tmp_path / "expert", pad_token=pad, padding_side=side)
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": "w1 w2 w3"}]))
    [batch] = load(data, llama, folder).fitted
    mask = batch["attention_mask"][batch["attention_mask"].sum(1).argmin()].tolist()
    assert mask == ([0, 0, 1, 1, 1] if side == "left" else [1, 1, 1, 0, 0])


@pytest.mark.parametrize(("limit", "expected"), [(10**30, 16), (7, 7)])
def test_texts_are_cut_at_the_shortest_limit(tmp_path: Path, bert: Any, limit: int, expected: int) -> None:
    folder = save_tokenizer(tmp_path / "expert", model_max_length=limit)
    [batch] = load(one(tmp_path, {"text": "w1 " * 600}), bert, folder).fitted
    assert batch["input_ids"].shape == (1, expected)


def test_texts_that_the_tokenizer_does_not_know_are_refused(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    foreign = [{"text": f"d{number} e{number} w1"} for number in range(20)]
    with pytest.raises(DataError, match=r"67% of the tokens are \[UNK\][^$]*in: task: [^$]*fix: give texts"):
        load(Data(path=write_jsonl(tmp_path / "a.jsonl", foreign)), bert, text_folder)
    half_known = [{"text": f"d{number} w2 w1"} for number in range(20)]
    found = load(Data(path=write_jsonl(tmp_path / "b.jsonl", half_known)), bert, text_folder)
    assert "task: 33% of the tokens are unknown to the tokenizer ([UNK])" in found.notes


def test_an_unknown_token_that_is_also_another_says_nothing(tmp_path: Path, llama: Any) -> None:
    folder = save_tokenizer(tmp_path / "expert", eos_token="[UNK]", unk_token="[UNK]")
    assert load(one(tmp_path, {"text": "d1 d2"}), llama, folder).fitted


def test_texts_that_are_cut_or_all_alike_are_said_to_be(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    same = [{"text": "w1 " * 40 + f"w{number}"} for number in range(20)]
    notes = load(Data(path=write_jsonl(tmp_path / "a.jsonl", same)), bert, text_folder).notes
    assert "task: 8 of 8 texts fill all 16 tokens: what is beyond is cut off" in notes
    assert "task: all 8 examples become the same tokens: look whether it is the right column" in notes


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, bert: Any) -> None:
    folder = save_tokenizer(tmp_path / "expert", words=[*WORDS, *(f"x{number}" for number in range(50))])
    with pytest.raises(DataError, match="has token 104, but the model only 64"):
        load(one(tmp_path, {"text": "x49 x1"}), bert, folder)


def test_a_model_of_another_modality_is_told_to_use_tensors(tmp_path: Path) -> None:
    model = build("Wav2Vec2Model", "Wav2Vec2Config", **TINY, conv_dim=(8,), conv_stride=(2,), conv_kernel=(2,),
                  num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)  # fmt: skip
    with pytest.raises(DataError, match=r"reads input_values[^$]*safetensors"):
        load(one(tmp_path, {"text": "w1"}), model)


# --- labels ---


@pytest.mark.parametrize(("label", "number"), [("good", 1), (1, 1), ("1", 1)])
def test_labels_are_numbers_or_names_that_the_model_knows(
    tmp_path: Path, bert: Any, text_folder: Path, label: object, number: int
) -> None:
    data = one(tmp_path, {"text": "w1", "label": label})
    assert load_labelled("task", data, "train", bert, [text_folder], batch_size=2)[1].tolist() == [number]


@pytest.mark.parametrize(
    ("label", "message"), [("fine", "is no class"), (0.5, "is no class"), (-1, "hides its labels")]
)
def test_labels_that_mean_no_class_are_refused(
    tmp_path: Path, bert: Any, text_folder: Path, label: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled("task", one(tmp_path, {"text": "w1", "label": label}), "train", bert, [text_folder], batch_size=2)


def test_labelled_rows_keep_their_order_and_the_named_label_column_counts(
    tmp_path: Path, bert: Any, text_folder: Path
) -> None:
    rows = [{"text": f"w{number}", "label": 0, "answer": number % 2} for number in range(25)]
    data = Data(path=write_parquet(tmp_path / "a.parquet", rows), columns={"label": "answer"})
    batches, labels = load_labelled("task", data, "train", bert, [text_folder], batch_size=10)
    assert labels.tolist() == [number % 2 for number in range(25)]
    assert [row[1] for row in rows_of(batches, "input_ids")] == [WORDS.index(f"w{number}") for number in range(25)]


def test_accuracy_refuses_rows_that_cannot_be_read(tmp_path: Path, bert: Any, text_folder: Path) -> None:
    data = Data(path=write_jsonl(tmp_path / "a.jsonl", [*text_rows(9), {"text": "", "label": 1}]))
    with pytest.raises(DataError, match="row 10 cannot be used"):
        load_labelled("task", data, "train", bert, [text_folder], batch_size=2)
