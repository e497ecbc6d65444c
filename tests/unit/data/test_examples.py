"""Rows become batches: the right columns, the right rows, the right shapes, and errors that say what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from families import BY_NAME
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

from featcal_cli.data.batches import Batch, count_examples, count_positions
from featcal_cli.data.columns import number_label
from featcal_cli.data.examples import TaskExamples, draw_examples, open_labelled
from featcal_cli.data.local_files import open_file
from featcal_cli.data.rows import read_rows
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

arrow: Any = pyarrow  # has no types
parquet: Any = pyarrow.parquet
FastTokenizer: Any = PreTrainedTokenizerFast
Row = Mapping[str, Any]
TINY: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 64,
}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>"] + [f"w{number}" for number in range(50)]
WORDS += ["user", "assistant", "system", "tool"]
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
            tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
            tokenizer.pre_tokenizer = Whitespace()
            tokenizer.post_processor = TemplateProcessing(
                single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
            )
            fast: Any = FastTokenizer(tokenizer_object=tokenizer, **settings)
            if chat:
                fast.chat_template = CHAT_TEMPLATE
            fast.save_pretrained(saved)
        shutil.copytree(saved, self.expert, dirs_exist_ok=True)

    def file(self, name: str, content: str | bytes | Sequence[Row], **settings: Any) -> Data:
        """A source of one file: as it is, or of rows (.parquet: row groups of 10)."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet") and not isinstance(content, str | bytes):
            parquet.write_table(arrow.Table.from_pylist(list(content)), file, row_group_size=10)
        else:
            content = content if isinstance(content, str | bytes) else lines(content)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return Data(path=str(file), **settings)

    def rows(self, *rows: Row, **settings: Any) -> Data:
        return self.file("rows.jsonl", rows, **settings)

    def tensors(self, **tensors: Tensor) -> Data:
        save_file(tensors, self.path / "a.safetensors")
        return Data(path=str(self.path / "a.safetensors"))

    def images(self, images: Mapping[str, Image.Image | bytes], place: str = "images", **options: Any) -> Data:
        """A source of a folder of images."""
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
        """The examples of the source, by the expert's preprocessor."""
        self.prepare(model)
        return draw_examples("task", data, model, [self.expert], count=count, seed=seed, **options).cut(batch_size)

    def labelled(
        self, model: PreTrainedModel, data: Data, split: str = "train", batch_size: int = 2
    ) -> tuple[list[Batch], list[int]]:
        self.prepare(model)
        rows = open_labelled("task", data, split, model, [self.expert])
        batches, labels = zip(*rows.batches(batch_size), strict=True)
        names = model.config.label2id
        return list(batches), [number_label(label, rows.column, names, rows.where) for part in labels for label in part]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def at(tmp_path: Path, shelf: Path) -> Folder:
    return Folder(tmp_path, shelf)


def lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def encode_image(value: int) -> bytes:
    """A PNG of one colour."""
    stream = io.BytesIO()
    Image.new("L", (6, 6), value).save(stream, "PNG")
    return stream.getvalue()


def image_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose image has the row's number as its colour."""
    return [{"image": {"bytes": encode_image(number), "path": None}, "label": number} for number in range(count)]


def text_rows(count: int) -> list[dict[str, Any]]:
    return [{"idx": number, "text": f"w{number % 50} w1", "label": number % 2} for number in range(count)]


def different_rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"w{number % 20} w{number // 20}"} for number in range(count)]


def rows_of(batches: Sequence[Batch], name: str = "input_ids") -> list[list[Any]]:
    """Every row of one argument, as lists, over all batches."""
    return [row.flatten().tolist() for batch in batches for row in batch[name]]


def words_of(batches: Sequence[Batch], name: str = "input_ids") -> list[str]:
    return [" ".join(WORDS[number] for number in row) for row in rows_of(batches, name)]


def colours(batches: Sequence[Batch]) -> list[int]:
    """The colours that the images had before they were normalised to −1 … 1."""
    return [round((float(row.mean()) + 1) * 127.5) for batch in batches for row in batch["pixel_values"]]


def sides_of(found: TaskExamples, name: str) -> list[set[tuple[Any, ...]]]:
    """The different examples that are fitted, held out for choices, and held out for figures: none in two of them."""
    sides = [{tuple(row) for row in rows_of(part, name)} for part in (found.fitted, found.selection, found.held_out)]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    return sides


def refused(at: Folder, model: PreTrainedModel, data: Data, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        at.load(model, data, **options)


# --- which rows ---


def test_exactly_n_are_fitted_and_the_held_out_rows_are_others(at: Folder, vit: Any) -> None:
    data = at.file("a.parquet", image_rows(200))
    found = at.load(vit, data, count=40)
    assert [len(side) for side in sides_of(found, "pixel_values")] == [40, 5, 5]
    assert (found.fitted_count, found.held_out_count) == (40, 5)
    assert len({colour // 20 for colour in colours(found.fitted)}) >= 8  # of rows that are sorted by label
    first, second, other = (colours(at.load(vit, data, seed=seed).fitted) for seed in (1, 1, 2))
    assert first == second != other


def test_a_source_with_fewer_rows_is_fitted_whole_and_the_notes_say_so(at: Folder, bert: Any) -> None:
    found = at.load(bert, at.rows(*text_rows(5)))
    assert (found.fitted_count, found.held_out_count, found.selection) == (5, 0, [])
    assert any("(8 requested): nothing is held out" in note for note in found.notes)
    assert any("drift is measured on the calibration examples" in note for note in found.notes)


@pytest.mark.parametrize(("rows", "halves"), [(9, (0, 0)), (10, (1, 1)), (11, (1, 2)), (16, (4, 4)), (99, (4, 4))])
def test_held_out_rows_are_what_is_left_in_two_halves(
    at: Folder, bert: Any, rows: int, halves: tuple[int, int]
) -> None:
    found = at.load(bert, at.rows(*text_rows(rows)))
    assert (len(rows_of(found.selection)), found.held_out_count, found.fitted_count) == (*halves, 8)


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
    at: Folder, bert: Any, rows: int, count: int, parts: tuple[int, int, int]
) -> None:
    """If it is asked for, and of ten rows or more; what is held out is not fitted, and nothing is lost."""
    data = at.rows(*different_rows(rows))
    found = at.load(bert, data, count=count, seed=3, hold_out=True)
    assert (found.fitted_count, found.selection_count, found.held_out_count) == parts
    assert sum(map(len, sides_of(found, "input_ids"))) == min(rows, sum(parts))
    if parts[1] > 0 and parts[0] < count:
        assert any(f"{parts[0]} are fitted ({count} requested)" in note for note in found.notes)
    assert at.load(bert, data, count=count, seed=3).fitted_count == min(rows, count)


@pytest.mark.parametrize("hold_out", [True, False])
@pytest.mark.parametrize(("different", "copies"), [(1, 40), (5, 8), (10, 4), (20, 2), (200, 2)])
def test_equal_rows_are_never_on_both_sides(at: Folder, bert: Any, different: int, copies: int, hold_out: bool) -> None:
    """Whether they are the same row or only become the same tokens."""
    rows = [{"text": row["text"] + " " * copy} for copy in range(copies) for row in different_rows(different)]
    found = at.load(bert, at.rows(*rows), count=30, batch_size=8, hold_out=hold_out)
    sides = sides_of(found, "input_ids")
    assert (found.selection_count, found.held_out_count) == (len(sides[1]), len(sides[2]))
    if hold_out or different == 200:
        assert bool(sides[2]) == (different >= 10)
    if different < 10:
        assert any("drift is measured on the calibration examples" in note for note in found.notes)


def test_equal_tensors_and_images_are_never_on_both_sides(at: Folder, vit: Any) -> None:
    """Also where the same picture is stored in another format."""
    pixels = torch.randn(12, 3, 8, 8)
    pictures = {f"{number}.{ending}": Image.new("RGB", (8, 8), (20 * number, 0, 0))
                for number in range(12) for ending in ("png", "bmp")}  # fmt: skip
    for data in (at.tensors(pixel_values=torch.cat([pixels, pixels, pixels])), at.images(pictures)):
        found = at.load(vit, data, count=24, hold_out=True)
        assert [len(side) for side in sides_of(found, "pixel_values")] == [8, 2, 2]


def test_bad_rows_are_replaced_by_good_ones_and_counted(at: Folder, vit: Any) -> None:
    rows = image_rows(60)
    for number in range(0, 60, 4):
        rows[number]["image"] = {"bytes": b"no image", "path": None} if number % 8 else None
    found = at.load(vit, at.file("a.parquet", rows), count=30)
    assert found.fitted_count == 30
    assert all(colour % 4 for colour in colours(found.fitted + found.held_out))
    assert any(re.match(r"task: [1-9]\d* rows cannot be used and were left out", note) for note in found.notes)


def test_mostly_bad_rows_are_an_error_that_gives_the_first_reason(at: Folder, bert: Any) -> None:
    rows = [{"text": "w1 w2" if number % 3 == 0 else ""} for number in range(30)]
    refused(at, bert, at.rows(*rows), "rows cannot be used; the first: column text has no text", count=20)


# --- which source ---


def test_a_folder_of_images_of_any_depth_is_read(at: Folder, vit: Any) -> None:
    endings = ("png", "jpg", "bmp", "webp", "gif", "tiff", "JPEG")
    data = at.images({f"deep/class{number % 2}/{number}.{ending}": Image.new("RGB", (5, 9), (number, 0, 0))
                      for number, ending in enumerate(endings)})  # fmt: skip
    found = at.load(vit, data, count=7)
    assert found.fitted_count == 7
    assert "task: column image (of image, label), image processor from expert" in found.notes


def test_image_folders_called_like_splits_are_splits(at: Folder, vit: Any) -> None:
    data = at.images({f"{split}/{name}/1.png": encode_image(colour + (name == "cat"))
                      for split, colour in (("train", 10), ("test", 200)) for name in ("bus", "cat")})  # fmt: skip
    assert sorted(colours(at.load(vit, data).fitted)) == [10, 11]
    batches, labels = at.labelled(vit, data, "test", 1)
    assert (colours(batches), labels) == ([200, 201], [0, 1])
    one_class = at.images({"bus/1.png": encode_image(0), "train/1.png": encode_image(1)}, "classes")
    assert at.load(vit, one_class).fitted_count == 2


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
    at: Folder, bert: Any, names: Sequence[str], split: str | None, expected: str
) -> None:
    for number, name in enumerate(names):
        at.file(f"data/{name}", [{"text": f"w{number} w{number}"}])
    found = at.load(bert, Data(path=str(at.path / "data"), split=split))
    word = f"w{names.index(expected)}"
    assert words_of(found.fitted) == [f"[CLS] {word} {word} [SEP]"]


def test_a_split_that_is_not_there_is_an_error(at: Folder, bert: Any) -> None:
    data = at.rows(*text_rows(3))
    with pytest.raises(DataError, match="it has no split test"):
        at.labelled(bert, data, "test")
    assert len(at.labelled(bert, data)[1]) == 3
    for name in ("train", "test"):
        at.file(f"data/{name}.jsonl", text_rows(3))
    refused(at, bert, Data(path=str(at.path / "data"), split="validation"), r"no split validation[^$]*test, train")


def test_a_hub_dataset_is_read_with_its_splits_and_encoded_images(at: Folder, vit: Any, hub: HubServer) -> None:
    import datasets

    library: Any = datasets
    features = library.Features({"image": library.Image(), "label": library.Value("int64")})
    (at.path / "repo" / "data").mkdir(parents=True)
    for split, start in (("train", 0), ("test", 100)):
        rows = library.Dataset.from_list(image_rows(140)[start : start + 40], features=features)
        rows.to_parquet(at.path / "repo" / "data" / f"{split}-00000-of-00001.parquet")
    hub.add_repo("user/encoded", at.path / "repo", kind="dataset")
    data = Data(dataset="user/encoded")
    found = at.load(vit, data, count=16)
    seen = colours(found.fitted + found.selection + found.held_out)
    assert len(set(seen)) == 24 and max(seen) < 40
    batches, labels = at.labelled(vit, data, "test", 16)
    assert colours(batches) == labels == list(range(100, 140))


def test_images_of_other_sizes_are_in_other_batches_and_none_is_padded(at: Folder, vit: Any) -> None:
    DetrImageProcessorPil(do_resize=False, do_normalize=False).save_pretrained(at.expert)
    data = at.images({f"{number}.png": Image.new("L", (8 + 4 * (number == 19), 6), 255) for number in range(20)})
    images = [batch["pixel_values"] for batch in at.load(vit, data, count=20, batch_size=20).fitted]
    assert [tuple(batch.shape) for batch in images] == [(4, 3, 6, 8), (15, 3, 6, 8), (1, 3, 6, 12)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.safetensors", "pictures"])
def test_what_is_no_file_is_refused(at: Folder, bert: Any, name: str) -> None:
    refused(at, bert, Data(path=str(at.path / name)), "there is no file")
    os.mkfifo(at.path / name)
    refused(at, bert, Data(path=str(at.path / name)), "there is no file or folder")
    (at.path / name).unlink()
    if "." in name:
        refused(at, bert, at.file(name, b"\xff\xfe\x00broken" * 9), "cannot|is not")


# --- files as people have them ---

ROWS = [{"text": f"w{number} w2, w3", "label": str(number % 2)} for number in range(12)]
LINES = "".join(f'"{row["text"]}",{row["label"]}\n' for row in ROWS)
TABLE = "text,label\n" + LINES
OBJECTS = lines(ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TABLE.encode("utf-8-sig")),
        ("a.csv", TABLE.encode("utf-16")),
        ("a.csv", TABLE.replace("\n", "\r\n").encode()),
        ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0)),
        ("a.tsv", TABLE.replace(",", "\t").replace("\t w3", ", w3").encode()),
        ("a.jsonl", OBJECTS.encode("utf-16")),
        ("a.jsonl", OBJECTS.encode("utf-8-sig")),
        ("a.jsonl", OBJECTS.replace("\n", "\r\n").encode()),
        ("a.jsonl.gz", gzip.compress(OBJECTS.replace("\n", "\r\n\r\n").rstrip().encode("utf-8-sig"), mtime=0)),
        ("a.json", json.dumps(ROWS).encode("utf-8-sig")),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.txt", "".join(f"{row['text']}\r\n" for row in ROWS).encode()),
        ("a.parquet", ROWS),
    ],
)
def test_files_are_read_as_people_have_them(at: Folder, bert: Any, name: str, content: Any) -> None:
    found = at.load(bert, at.file(name, content, columns={"text": "text"}), count=12)
    assert sorted(words_of(found.fitted)) == sorted(f"[CLS] w{number} w2 [UNK] w3 [SEP]" for number in range(12))


def test_of_many_columns_a_note_names_five(at: Folder, bert: Any) -> None:
    row = {"text": "w1", **dict.fromkeys((f"c{number}" for number in range(3000)), "x")}
    for source in (at.rows(row), at.rows({**row, "text": 1})):
        try:
            text = " ".join(at.load(bert, source).notes)
        except DataError as error:
            text = error.what
        assert "text, c0, c1, c2, c3 and 2,996 more" in text and len(text) < 1000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "wide.jsonl", "a.csv", "a.csv.gz", "a.txt"])
def test_only_a_line_feed_ends_a_row(at: Folder, name: str) -> None:
    texts = [f"w{number}\u2028w1\u2029w2\x85w3\x0bw4\x0cw5\x1cw6" for number in range(4)]
    body = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    if ".json" not in name:
        body = "\n".join(texts if name == "a.txt" else ["text", *texts])
    content = body.encode("utf-16" if name == "wide.jsonl" else "utf-8")
    source = at.file(name, gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    assert [row["text"] for row in read_rows(source, None)] == texts


def test_a_table_with_two_columns_of_one_name_is_refused_in_every_format(at: Folder, bert: Any) -> None:
    at.prepare(bert)
    table = arrow.table([arrow.array(["w1"]), arrow.array(["w2"])], names=["text", "text"])
    parquet.write_table(table, at.path / "a.parquet")
    with arrow.ipc.new_file(at.path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    at.file("a.csv", "text,text\nw1,w2\n")
    for name in ("a.parquet", "a.arrow", "a.csv"):
        refused(at, bert, Data(path=str(at.path / name)), "several columns are called 'text'")


def test_a_value_beyond_what_python_can_hold_is_a_damaged_file(at: Folder, bert: Any) -> None:
    at.prepare(bert)
    parquet.write_table(arrow.table({"text": ["w1"], "spent": arrow.array([2**62], arrow.duration("s"))}),
                        at.path / "a.parquet")  # fmt: skip
    refused(at, bert, Data(path=str(at.path / "a.parquet")), r"the data cannot be read[^$]*a.parquet")


def test_what_datasets_saves_to_a_disk_is_read(at: Folder, bert: Any) -> None:
    import datasets

    library: Any = datasets
    parts = {name: library.Dataset.from_list(ROWS[:count]) for name, count in (("train", 4), ("test", 7))}
    library.DatasetDict(parts).save_to_disk(at.path / "saved")
    parts["train"].save_to_disk(at.path / "alone")
    for name, split, count in (("saved", None, 4), ("saved", "test", 7), ("alone", None, 4)):
        assert at.load(bert, Data(path=str(at.path / name), split=split)).fitted_count == count


UNCLOSED = TABLE.replace('"w3 w2, w3"', '"w3 w2, w3', 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", UNCLOSED, r"row that begins here is not CSV: [^$]*in: [^\n]*a.csv, line 5\n"),
        ("a.csv", "text\nw1\n" + '"w1 w2', r"not CSV: unexpected end of data\nin: [^\n]*a.csv, line 3\n"),
        ("a.csv", 'text\n"w1 w2" w3\n', r"not CSV: [^$]*in: [^\n]*a.csv, line 2\n"),
        ("a.csv", "text,label\n\nw1, w2, w3,1\n", r"for each column \(4 for 2\)\nin: [^\n]*a.csv, line 3\n"),
        ("a.csv", "text,label\nw1\n", r"for each column \(1 for 2\)\nin: [^\n]*a.csv, line 2\n"),
        ("a.csv", TABLE.encode().replace(b"w5", b"\xe9"), r"is not UTF-8 text \(byte 0xe9\)\nin: [^\n]*, line 7\n"),
        ("a.csv", "", "no rows"),
        ("a.csv", gzip.compress(TABLE.encode(), mtime=0), r"is not UTF-8[^\n]*\nin: [^\n]*a.csv, line 1\n"),
        ("a.csv.gz", gzip.compress(TABLE.encode() * 99, mtime=0)[:-40], "cannot be read"),
        ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0)[:-12] + bytes(12), "cannot be read"),
        ("a.jsonl", OBJECTS.encode().replace(b"w5", b"caf\xe9"), r"is not UTF-8[^$]*a.jsonl, line 6\n[^$]*iconv"),
        ("a.jsonl", '{"text": "w1 w2"}\n\n{"text": \n', r"not JSON: Expecting value at column 9\nin: [^\n]*, line 3\n"),
        ("a.jsonl", json.dumps(ROWS), r"not a JSON object\n[^$]*line 1\n[^$]*\.json file"),
        ("a.jsonl", "", "no rows"),
        ("a.xlsx", b"PK\x03\x04" + bytes(99), "a.xlsx is not a kind"),
        ("a.parquet", TABLE, r"cannot be read[^$]*a.parquet\n"),
        ("a.arrow", b"ARROW1" + bytes(99), r"cannot be read[^$]*a.arrow\n"),
        ("a.json", "{", r"is not JSON[^$]*a.json, line 1\n"),
        ("a.json", "[1, 2]", "not a list of JSON objects"),
        ("a.json", json.dumps({"data": ROWS}), "not a list of JSON objects"),
        ("a.json", OBJECTS, r"not JSON: Extra data[^$]*a.json, line 2\n[^$]*\.jsonl file"),
        ("a.json", "", "not JSON"),
        ("a.json", '[{"text": "w1"},\n{"text": "w2"},\n]', r"is not JSON: [^$]*a.json, line 3|line 2"),
        ("a.jsonl", f'{{"text": "w1", "n": {"9" * 6000}}}\n', r"Exceeds the limit[^$]*, line 1\n"),
        ("a.jsonl", '{"text": "w1\0"}\n', r"not JSON: Invalid control character"),
    ],
)
def test_files_that_would_be_misread_are_refused_with_the_place(
    at: Folder, bert: Any, name: str, content: str | bytes, message: str
) -> None:
    refused(at, bert, at.file(name, content), message)


def test_lines_in_quotes_belong_to_one_row_and_a_quote_within_a_value_is_one(at: Folder) -> None:
    long = "w1 w2\n" * 30
    source = at.file("a.csv", f'text,label\n"{long}",0\n5" w5,1\n"w6 ""w7""",0\n')
    rows = [{"text": long, "label": "0"}, {"text": '5" w5', "label": "1"}, {"text": 'w6 "w7"', "label": "0"}]
    assert list(read_rows(source, None)) == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_file_that_grows_is_read_as_it_was_and_one_that_is_cut_is_said_to_be_changed(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    content = OBJECTS if name == "a.jsonl" else TABLE
    file.write_text(content)
    [table] = open_file(file)
    before = list(table.read(range(table.length)))
    file.write_text(content + (OBJECTS if name == "a.jsonl" else LINES))
    assert list(table.read(range(table.length))) == before
    file.write_text(content[: len(content) // 2].rpartition("\n")[0])
    for positions in (range(table.length), [table.length - 1]):
        with pytest.raises(DataError, match="changed while it was read"):
            list(table.read(positions))


# --- tensors ---

IDS = torch.ones(4, 6).long()
HALF_MASK = torch.ones(4, 6).long().index_fill(0, torch.tensor([2]), 0)


def test_tensors_are_taken_in_file_order_and_need_no_preprocessor(at: Folder, vit: Any, bert: Any) -> None:
    values = torch.arange(20.0).reshape(20, 1, 1, 1).expand(20, 3, 8, 8).contiguous()
    drawn = draw_examples("task", at.tensors(pixel_values=values.half()), vit, [], count=6, seed=0)
    found = drawn.cut(4)
    batches = [*found.fitted, *found.selection, *found.held_out]
    assert [row[0] for row in rows_of(batches, "pixel_values")] == list(range(14))
    assert [len(batch["pixel_values"]) for batch in found.fitted] == [4, 2]
    assert found.fitted[0]["pixel_values"].dtype == torch.float32
    labelled = at.tensors(input_ids=torch.ones(3, 5).long(), labels=torch.tensor([0, 2, 1]))
    assert set(at.load(bert, labelled).fitted[0]) == {"input_ids"}
    batches, labels = at.labelled(bert, labelled)
    assert labels == [0, 2, 1] and len(batches) == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pixels": torch.ones(2, 3)}, "no input called pixels"),
        ({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(3, 3).long()}, "do not agree"),
        ({"input_ids": torch.ones(0, 3).long()}, "do not agree"),
        ({"input_ids": torch.tensor(1)}, "do not agree"),
        ({"labels": torch.tensor([1, 2])}, "nothing but labels"),
        ({"input_ids": torch.ones(4, 17).long()}, "17 tokens per example, but the model has only 16 positions"),
        ({"input_ids": IDS[:, :0]}, r"do not agree [^\n]*input_ids \[4, 0\]"),
        (
            {"input_ids": IDS.index_fill(0, torch.tensor([1]), 64)},
            "of example 2 holds 64, and ids are 0 to 63",
        ),
        ({"input_ids": -IDS}, "of example 1 holds -1"),
        ({"input_ids": IDS.float()}, r"input_ids \[4, 6\] is torch.float32"),
        ({"input_ids": IDS[:, 0].contiguous()}, r"input_ids \[4\] is torch.int64"),
        ({"input_ids": IDS, "token_type_ids": 2 * IDS}, "token_type_ids of example 1 holds 2"),
        ({"input_ids": IDS, "attention_mask": HALF_MASK}, "of example 3 holds other values than 0 and 1, or no 1"),
        ({"input_ids": IDS, "attention_mask": IDS[:, :5].contiguous()}, "differ"),
        (
            {"input_ids": IDS, "attention_mask": 10_000.0 * (HALF_MASK - 1)},
            "of example 3 holds other values than 0 and 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_the_model_cannot_take_are_refused_with_numbers(
    at: Folder, bert: Any, tensors: dict[str, Tensor], message: str
) -> None:
    refused(at, bert, at.tensors(**tensors), message)


def test_ids_that_a_decoder_does_not_know_are_refused(at: Folder, t5: Any) -> None:
    refused(at, t5, at.tensors(input_ids=IDS, decoder_input_ids=64 * IDS), "decoder_input_ids of example 1 holds 64")


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_fewer_bits_are_ids(at: Folder, bert: Any, kind: torch.dtype) -> None:
    [batch] = at.load(bert, at.tensors(input_ids=IDS.to(kind), attention_mask=torch.ones(4, 6).bool())).fitted
    assert batch["input_ids"].dtype == torch.int64
    assert bert(**batch).logits.shape == (4, 2)


def test_positions_of_roberta_begin_behind_the_paddings(at: Folder) -> None:
    roberta = build("RobertaModel", "RobertaConfig", **TINY, max_position_embeddings=16, pad_token_id=1)
    assert count_positions(roberta) == (14, True)
    roberta(input_ids=torch.full((1, 14), 5))
    too_long = at.tensors(input_ids=torch.full((4, 15), 5))
    refused(at, roberta, too_long, "15 tokens per example, but the model has only 14 positions")
    [batch] = at.load(roberta, at.rows({"text": "w1 " * 600})).fitted
    assert batch["input_ids"].shape == (1, 14)


def test_more_tokens_than_a_model_with_turning_positions_was_made_for_are_its_users_affair(
    at: Folder, llama: Any
) -> None:
    assert count_positions(llama) == (2048, False)
    assert at.load(llama, at.tensors(input_ids=torch.ones(4, 2050).long())).fitted


# --- images ---


def test_images_of_every_form_become_float32_pixel_values_that_the_model_takes(at: Folder, vit: Any) -> None:
    at.images({"a.png": encode_image(7)}, "pictures")
    for data in (at.rows({"picture": "pictures/a.png"}), at.file("a.parquet", [{"x": encode_image(7)}])):
        found = at.load(vit, data)
        assert found.fitted[0]["pixel_values"].dtype == torch.float32
        assert colours(found.fitted) == [7]
        assert vit(**found.fitted[0]).logits.shape[0] == 1


def test_of_images_that_are_too_large_the_limit_is_said(at: Folder, vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal_cli.data.tables.LARGEST_FILE", 20)
    refused(at, vit, at.file("a.parquet", image_rows(3)), r"cannot be decoded \(it has more than 20 bytes\)")
    refused(at, vit, at.images({"a.png": encode_image(1)}), r"bytes \(at most 20 are read\)")


def test_a_photograph_is_turned_as_its_exif_says(at: Folder, vit: Any) -> None:
    pixels = numpy.zeros((8, 8, 3), dtype=numpy.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3
    [batch] = at.load(vit, at.images({"a.png": Image.fromarray(pixels)}, exif=exif)).fitted
    assert batch["pixel_values"][0, 0, 0, 0] < 0 < batch["pixel_values"][0, 0, 7, 0]


def test_pixels_of_more_than_8_bits_are_bad_rows_and_first_frames_are_read(at: Folder, vit: Any) -> None:
    deep = Image.fromarray(numpy.full((8, 8), 40_000, dtype=numpy.uint16))
    refused(at, vit, at.images({"0.png": deep}), "not 8-bit colours, but of mode I;16")
    first, second = (Image.new("RGB", (8, 8), (value,) * 3) for value in (7, 200))
    found = at.load(vit, at.images({"a.gif": first}, "frames", save_all=True, append_images=[second]))
    assert colours(found.fitted) == [7]


def test_a_list_of_one_image_is_an_image_and_other_lists_are_none(at: Folder, vit: Any) -> None:
    image = {"bytes": encode_image(7), "path": None}
    assert colours(at.load(vit, at.file("a.parquet", [{"images": [image], "label": 1}])).fitted) == [7]
    refused(at, vit, at.file("a.parquet", [{"image": [image] * 2}]), "has 2 images")
    refused(at, vit, at.file("a.parquet", [{"image": list(range(784))}]), "no column holds images")


def test_the_first_folder_with_a_processor_gives_it(at: Folder, vit: Any, bert: Any) -> None:
    snapshot = at.path / "models--openai--clip" / "snapshots" / "abc"
    for side, folder in ((4, snapshot), (8, at.expert)):
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    images = at.file("a.parquet", image_rows(3))
    (at.path / "bare").mkdir()
    drawn = draw_examples("task", images, vit, [at.path / "bare", snapshot, at.expert], count=3, seed=0)
    assert drawn.cut(3).fitted[0]["pixel_values"].shape[-1] == 4
    assert any("image processor from openai/clip" in note for note in drawn.notes)
    for model, data, file in ((vit, images, "preprocessor"), (bert, at.rows(*text_rows(3)), "tokenizer")):
        with pytest.raises(DataError, match=f"copy {file}_config.json"):
            draw_examples("task", data, model, [at.path / "bare"], count=3, seed=0)


def test_code_that_comes_with_a_processor_is_never_run(at: Folder, vit: Any) -> None:
    config = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    at.file("expert/preprocessor_config.json", json.dumps(config))
    at.file("expert/evil.py", f"open({str(at.path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    refused(at, vit, at.file("a.parquet", image_rows(3)), "no image processor can be loaded")
    assert not (at.path / "ran").exists()


# --- text ---

TURNS = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"id": "a b", "text": "w1"}, {}, "w1"),
        ({"sentence": "w1", "label": 1}, {}, "w1"),
        ({"premise": "w1", "hypothesis": "w2"}, {}, "w1 [SEP] w2"),
        ({"question": "w1", "sentence": "w2"}, {}, "w1 [SEP] w2"),
        ({"instruction": "w1", "output": "w2"}, {}, "w1"),
        ({"code": "x1", "blurb": "w1 w2"}, {}, "w1 w2"),
        ({"id": "7", "tokens": ["w1", "w2"], "ner_tags": [0, 1]}, {}, "w1 w2"),
        ({"text": "w1", "a": "w2", "b": "w3"}, {"columns": {"text": "b", "text_pair": "a"}}, "w3 [SEP] w2"),
        ({"text": "w1", "a": "w2", "b": "w3"}, {"template": "w9 {b} w8 {a}"}, "w9 w3 w8 w2"),
        ({"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}, {}, "w1 w2"),
    ],
)
def test_an_encoder_reads_the_columns_that_hold_text_or_that_the_recipe_names(
    at: Folder, bert: Any, row: Row, settings: dict[str, Any], expected: str
) -> None:
    [batch] = at.load(bert, at.rows(row, **settings)).fitted
    assert words_of([batch]) == [f"[CLS] {expected} [SEP]"]
    assert bert(**batch).logits.shape == (1, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"text": "txt"}}, "no column txt[^$]*text, n"),
        ({"template": "{texts}"}, "names a column that does not exist: {texts}"),
        ({"template": "{text"}, "template is broken"),
        ({"template": "{text.__class__}"}, "names a column that does not exist: {text.__class__}"),
        ({"columns": {"messages": "text"}}, "not a list of messages"),
    ],
)
def test_columns_that_are_not_there_are_refused(at: Folder, bert: Any, settings: dict[str, Any], message: str) -> None:
    refused(at, bert, at.rows({"text": "w1", "n": 1}, **settings), message)


def test_no_usable_column_is_an_error_that_lists_the_columns(at: Folder, bert: Any, vit: Any, t5: Any) -> None:
    for model, what in ((bert, "text"), (vit, "images")):
        data = at.rows({"n": 1, "kind": "a"})
        refused(at, model, data, rf"no column holds {what}; the columns are n, kind[^$]*--columns task=")
    pair = {"translation": {"de": "w1", "en": "w2"}}
    found = at.load(t5, at.rows(pair, template="{translation[de]}"))
    assert words_of(found.fitted) == ["[CLS] w1 [SEP]"]
    refused(at, t5, at.rows(pair, template="{translation[fr]}"), r"\{translation\[fr\]\} of the template is empty")
    listed = {"question": "w1", "choices": ["w2", "w3"]}
    found = at.load(t5, at.rows(listed, template="{{{question}}} w4 w5 {choices[1]}"))
    assert words_of(found.fitted) == ["[CLS] [UNK] w1 [UNK] w4 w5 w3 [SEP]"]
    refused(at, t5, at.rows(listed, template="{choices[2]}"), r"\{choices\[2\]\} of the template is empty")
    series = build("PatchTSTModel", "PatchTSTConfig", num_input_channels=1, context_length=8, patch_length=2,
                   patch_stride=2, d_model=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8)  # fmt: skip
    refused(at, series, at.rows({"text": "w1"}), r"reads past_values[^$]*safetensors")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}], "text": "w9 w9"},
        {"instruction": "w1", "output": "w2", "input": ""},
        {"query": "w1", "response": "w2", "original": "w9 w9"},
        {"instruction": "w1", "response": "w2", "category": "w9 w9"},
        {"inputs": "w1", "targets": "w2"},
        {"prompt": "w1", "response": "w2"},
        {"question": "w1", "answer": "w2"},
        {"prompt": [{"role": "user", "content": "w1"}], "completion": [{"role": "assistant", "content": "w2"}]},
        {"prompt": [{"role": "user", "content": "w1"}], "response": "w2"},
        {"prompt": TURNS, "answer": "w9"},
    ],
    ids=lambda row: "-".join(row),
)
def test_conversations_go_through_the_chat_template_without_further_special_tokens(
    at: Folder, llama: Any, row: Row
) -> None:
    at.tokenizer(chat=True)
    [batch] = at.load(llama, at.rows(row)).fitted
    assert words_of([batch]) == ["user w1 assistant w2"]
    assert "token_type_ids" not in batch


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
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}, TURNS[1]]},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
    ],
    ids=lambda row: "-".join(row),
)
def test_question_and_answer_are_known_by_the_names_that_datasets_use(at: Folder, llama: Any, row: Row) -> None:
    at.tokenizer(chat=True)
    assert words_of(at.load(llama, at.rows(row)).fitted) == ["user w1 assistant w2"]


CALL = {"function": {"name": "w8", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "text", "joined"),
    [
        ([{"role": "system", "content": ""}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        ([{"role": "system", "content": None}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        ([{"role": "system", "content": []}, *TURNS], "system user w1 assistant w2", "w1 w2"),
        (
            [{"from": "system", "value": ""}, {"from": "human", "value": "w1"}, {"from": "gpt", "value": ""}],
            "system user w1 assistant",
            "w1",
        ),
        ([{"role": None, "from": "human", "content": None, "value": "w1"}, TURNS[1]], "user w1 assistant w2", "w1 w2"),
        ([TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "user w1 assistant", "w1"),
        ([TURNS[0], {"role": "assistant", "tool_calls": [CALL]}], "user w1 assistant", "w1"),
        ([TURNS[0], {"role": "tool", "name": "w8", "content": "w3"}], "user w1 tool w3", "w1 w3"),
    ],
)  # fmt: skip
def test_empty_messages_and_calls_without_words_are_part_of_a_conversation(
    at: Folder, llama: Any, messages: Any, text: str, joined: str
) -> None:
    row = {"messages": messages}
    at.tokenizer(chat=True)
    assert words_of(at.load(llama, at.rows(row)).fitted) == [text]
    (at.expert / "chat_template.jinja").unlink()
    assert words_of(at.load(llama, at.rows(row)).fitted) == [f"[CLS] {joined} [SEP]"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "w1"}, {"role": "assistant"}],
    ],
)
def test_conversations_without_words_or_without_contents_are_bad_rows(at: Folder, llama: Any, messages: Any) -> None:
    at.tokenizer(chat=True)
    refused(at, llama, at.rows({"messages": messages}), r"rows cannot be used[^$]*name the right columns")


def test_a_template_that_refuses_says_so_in_its_own_words(at: Folder, llama: Any) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    at.tokenizer(chat=True)
    (at.expert / "chat_template.jinja").write_text(refusing + CHAT_TEMPLATE)
    row = {"messages": [{"role": "system", "content": "w3"}, *TURNS]}
    with pytest.raises(DataError) as raised:
        at.load(llama, at.rows(row))
    assert "the chat template refuses the messages: System role not supported" in raised.value.what


def test_a_causal_body_without_head_is_known_as_causal(at: Folder) -> None:
    body = build("LlamaModel", "LlamaConfig", **TINY, num_key_value_heads=2)
    assert words_of(at.load(body, at.rows({"question": "w1", "answer": "w2"})).fitted) == ["[CLS] w1 w2 [SEP]"]


def test_turns_are_joined_where_there_is_no_chat_template(at: Folder, llama: Any) -> None:
    found = at.load(llama, at.rows({"prompt_id": "a b", "prompt": "w1", "messages": TURNS}))
    assert words_of(found.fitted) == ["[CLS] w1 w2 [SEP]"]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "w1", "context": "w5", "response": "w2", "category": "w9"},
        {"context": "w5", "question": "w1", "answers": {"text": ["w2"], "answer_start": [0]}},
        {"instruction": "w1", "input": "w5", "output": "w2"},
    ],
)
def test_what_a_question_is_about_comes_behind_it(at: Folder, llama: Any, t5: Any, row: Row) -> None:
    assert words_of(at.load(llama, at.rows(row)).fitted) == ["[CLS] w1 w5 w2 [SEP]"]
    batches = at.load(t5, at.rows(row)).fitted
    assert (words_of(batches), words_of(batches, "decoder_input_ids")) == (["[CLS] w1 w5 [SEP]"], ["[PAD] [CLS] w2"])


@pytest.mark.parametrize(
    ("row", "settings", "source", "target"),
    [
        ({"document": "w1", "summary": "w2"}, {}, "w1", "w2"),
        ({"source": "w1", "target": "w2"}, {}, "w1", "w2"),
        ({"question": "w1", "answer": "w2"}, {}, "w1", "w2"),
        ({"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}, {}, "w1", "w2"),
        ({"a": "w1", "b": "w2", "c": "w3", "text": "w9"}, {"columns": {"prompt": "b", "response": "c"}}, "w2", "w3"),
        ({"a": "w1", "b": "w2", "c": "w3", "text": "w9"}, {"template": "w8 {a} {b}", "columns": {"response": "c"}},
         "w8 w1 w2", "w3"),
    ],
)  # fmt: skip
def test_an_encoder_decoder_reads_source_and_target(
    at: Folder, t5: Any, row: Row, settings: dict[str, Any], source: str, target: str
) -> None:
    batches = at.load(t5, at.rows(row, **settings)).fitted
    assert words_of(batches) == [f"[CLS] {source} [SEP]"]
    assert words_of(batches, "decoder_input_ids") == [f"[PAD] [CLS] {target}"]


def test_an_encoder_decoder_gets_the_target_shifted_right_or_its_start_token(at: Folder, t5: Any) -> None:
    found = at.load(t5, at.rows({"inputs": "w1 w2", "targets": "w3"}, {"inputs": "w4", "targets": "w5 w6"}))
    by_source = dict(zip(words_of(found.fitted), words_of(found.fitted, "decoder_input_ids"), strict=True))
    assert by_source == {
        "[CLS] w1 w2 [SEP]": "[PAD] [CLS] w3 [PAD]",
        "[CLS] w4 [SEP] [PAD]": "[PAD] [CLS] w5 w6",
    }
    [batch] = found.fitted
    assert sorted(batch["decoder_attention_mask"].sum(1).tolist()) == [3, 4]
    assert t5(**batch).logits.shape[:2] == (2, 4)
    [batch] = at.load(t5, at.rows({"sentence": "w1", "label": 0})).fitted
    assert batch["decoder_input_ids"].tolist() == [[0]]
    assert t5(**batch).logits.shape[:2] == (1, 1)


def test_the_longest_example_is_as_long_as_any_batch(at: Folder, t5: Any) -> None:
    """In its text and in its target, which may be of two rows, fitted or held out."""
    rows = [{"inputs": f"w{number % 5 + 1}", "targets": f"w{number // 5 + 1}"} for number in range(20)]
    rows[3]["inputs"], rows[7]["targets"] = "w1 w2 w3 w4", "w1 w2 w3"
    at.tokenizer()
    drawn = draw_examples("task", at.rows(*rows), t5, [at.expert], count=8, seed=0)
    found, longest = drawn.cut(3), drawn.longest()
    for name in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"):
        lengths = [batch[name].shape[1] for batch in (*found.fitted, *found.selection, *found.held_out)]
        assert len(lengths) == 7 and longest[name].shape == (1, max(lengths))


def test_an_encoder_decoder_classifier_runs_on_its_batches(at: Folder) -> None:
    model = build(
        "BartForSequenceClassification", "BartConfig",
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=64, eos_token_id=3, pad_token_id=0, bos_token_id=2,
        decoder_start_token_id=3, max_position_embeddings=20,
    )  # fmt: skip
    [batch] = at.load(model, at.rows({"premise": "w1", "hypothesis": "w2"})).fitted
    assert words_of([batch]) == ["[CLS] w1 [SEP] w2 [SEP]"]
    assert model(**batch).logits.shape[0] == 1


def test_the_first_token_attends_globally_where_a_model_leaves_that_to_its_user(at: Folder) -> None:
    longformer = build("LongformerModel", "LongformerConfig", **TINY, max_position_embeddings=16, attention_window=4)
    [batch] = at.load(longformer, at.rows({"text": "w1 w2 w3"}, {"text": "w4"})).fitted
    assert batch["global_attention_mask"].tolist() == [[1, 0, 0, 0, 0]] * 2
    [pairs] = at.load(longformer, at.rows({"question": "w1", "context": "w2 w3"})).fitted
    assert "global_attention_mask" not in pairs
    led = build(
        "LEDForConditionalGeneration", "LEDConfig", vocab_size=64, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, attention_window=4,
    )  # fmt: skip
    roles = {"text": "a", "text_pair": "b"}
    [pairs] = at.load(led, at.rows({"a": "w1", "b": "w2"}, columns=roles)).fitted
    assert pairs["global_attention_mask"].tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_padding_is_on_the_right_whatever_the_tokenizer_does_and_masked_even_without_a_pad_token(
    at: Folder, llama: Any, side: str, pad: str | None
) -> None:
    at.tokenizer(pad_token=pad, padding_side=side)
    [batch] = at.load(llama, at.rows({"text": "w1"}, {"text": "w1 w2 w3"})).fitted
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


def test_padding_of_model_ready_inputs_moves_behind_the_text_with_all_that_is_per_token(at: Folder, llama: Any) -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    data = at.tensors(input_ids=ids, attention_mask=mask, position_ids=ids + 1)
    [batch] = at.load(llama, data).fitted
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0], [7, 8, 9, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[6, 7, 0, 0], [8, 9, 10, 5]]


@pytest.mark.parametrize(("limit", "expected"), [(10**30, 16), (7, 7)])
def test_texts_are_cut_at_the_shortest_limit(at: Folder, bert: Any, limit: int, expected: int) -> None:
    at.tokenizer(model_max_length=limit)
    [batch] = at.load(bert, at.rows({"text": "w1 " * 600})).fitted
    assert batch["input_ids"].shape == (1, expected)


@pytest.mark.parametrize("row", [{"text": "w1 x9"}, {"inputs": "w1", "targets": "w1 x9"}])
def test_tokens_that_the_model_has_no_embeddings_for_are_refused(at: Folder, t5: Any, row: Row) -> None:
    at.tokenizer(words=[*WORDS, *(f"x{number}" for number in range(10))])
    refused(at, t5, at.rows(row), r"the tokenizer has token 68, but the model only 64 tokens[^$]*own tokenizer")
    with pytest.raises(DataError, match="token 68"):
        at.labelled(t5, at.rows({**row, "label": 0}))


# --- labels ---


@pytest.mark.parametrize(("label", "number"), [("good", 1), (1, 1), ("1", 1)])
def test_labels_are_numbers_or_names_that_the_model_knows(at: Folder, bert: Any, label: object, number: int) -> None:
    assert at.labelled(bert, at.rows({"text": "w1", "label": label}))[1] == [number]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "w1", "label": "fine"}], "is no class"),
        ([{"text": "w1", "label": 0.5}], "is no class"),
        ([{"text": "w1", "label": -1}], "hides its labels"),
        ([*text_rows(9), {"text": "", "label": 1}], "row 10 cannot be used"),
    ],
)
def test_labels_that_mean_no_class_and_rows_that_cannot_be_read_are_refused(
    at: Folder, bert: Any, rows: list[Row], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        at.labelled(bert, at.rows(*rows))


def test_labelled_rows_keep_their_order_and_the_named_label_column_counts(at: Folder, bert: Any) -> None:
    rows = [{"text": f"w{number}", "label": 0, "answer": number % 2} for number in range(25)]
    batches, labels = at.labelled(bert, at.file("a.parquet", rows, columns={"label": "answer"}), batch_size=10)
    assert labels == [number % 2 for number in range(25)]
    assert words_of(batches) == [f"[CLS] w{number} [SEP]" for number in range(25)]
