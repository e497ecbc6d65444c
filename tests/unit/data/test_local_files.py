"""Files and folders of this machine as people have them are read whole, or refused with the place that is wrong."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from example_folder import Folder, lines
from PIL import Image

from featcal_cli.data.columns import find_media
from featcal_cli.data.rows import draw_rows, read_classes, read_rows
from featcal_cli.recipe.data_formats import open_file
from featcal_cli.recipe.references import parse_source
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

arrow: Any = pyarrow  # has no types
ROWS = [{"text": f"w{number} w2, w3", "label": str(number % 2)} for number in range(12)]
LINES = "".join(f'"{row["text"]}",{row["label"]}\n' for row in ROWS)
TABLE = "text,label\n" + LINES
OBJECTS = lines(ROWS)


def zipped(content: str | bytes) -> bytes:
    return gzip.compress(content.encode() if isinstance(content, str) else content, mtime=0)


def texts_of(data: Data) -> list[str]:
    return [row["text"] for row in read_rows(data, None)]


# --- which files ---


@pytest.mark.parametrize(
    ("names", "split", "expected", "note"),
    [
        (["train.jsonl", "test.jsonl"], None, [0], ""),
        (["train.jsonl", "test.jsonl"], "test", [1], ""),
        (["data/valid-00000-of-00001.jsonl", "test.jsonl"], "val", [0], ""),
        (["data/extra-00000-of-00001.jsonl", "train.jsonl"], "extra", [0], ""),
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
         None, [0, 1], ""),
        (["dev/a.jsonl", "train/a.jsonl"], "validation", [0], ""),
        (["dev.jsonl", "train_1.jsonl"], "val", [0], ""),
        (["english/train/0000.jsonl", "train.csv", "b.jsonl"], "train", [0], ""),
        (["cola/train/0.jsonl", "cola/test/0.jsonl", "sst2/train/0.jsonl"], None, [0, 2],
         "{}: files of 2 folders are read (cola/train, sst2/train); if these are different configs, give "),
        (["a.jsonl", "b.jsonl", ".hidden/c.jsonl", "__pycache__/d.jsonl"], None, [0, 1], ""),
        (["a.jsonl", "LICENSE", "notes.md", "config.json"], None, [0], ""),
        (["data/train_sft-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"], None, [0],
         "split train_sft of {}, as none is called train (of "),
        (["test.jsonl", "validation.jsonl"], None, [1], "split validation of {}, as none is called train (of "),
        (["test.jsonl"], None, [0], "split test of {}, as none is called train"),
        (["data/default-00000-of-00001.jsonl"], None, [0], "split default of {}, as none is called train"),
        (["data/train-00000-of-00001.jsonl", "data/train_extra-00000-of-00001.jsonl"], None, [0], ""),
    ],
)  # fmt: skip
def test_files_of_a_split_are_known_by_names(
    at: Folder, names: Sequence[str], split: str | None, expected: list[int], note: str
) -> None:
    """Or those of the nearest one, of which a note tells, as of several folders, which a dataset's configs may be."""
    for number, name in enumerate(names):
        at.file(f"rows/{name}", [{"text": str(number)}])
    data = Data(path=str(at.path / "rows"), split=split)
    notes: list[str] = []
    assert sorted(row["text"] for row in draw_rows(data, 9, 0, notes.append)) == list(map(str, expected))
    assert len(notes) == bool(note) and note.format(data) in "".join(notes)


@pytest.mark.parametrize(
    ("names", "split", "what", "fix"),
    [
        (["train", "test"], "validation", "there is no split validation", "the splits are test, train"),
        (["train_gen", "train_sft", "test_sft"], None, "several splits, and none is called train",
         "--split TASK=train_gen "),
        (["de", "en"], None, "several splits, and none is called train", "--split TASK=de "),
    ],
)  # fmt: skip
def test_an_unknown_split_is_asked_for(at: Folder, names: list[str], split: str | None, what: str, fix: str) -> None:
    for name in names:
        at.file(f"rows/data/{name}-00000-of-00001.jsonl", ROWS)
    with pytest.raises(DataError, match=what) as caught:
        list(draw_rows(Data(path=str(at.path / "rows"), split=split), 1, 0))
    assert fix in caught.value.fix and all(name in caught.value.fix for name in names)


def test_a_folder_of_images_has_splits_and_classes_that_are_called_like_folders(at: Folder) -> None:
    image = Image.new("L", (1, 1))
    names = (f"{split}/{name}/1.png" for split in ("train", "test") for name in ("cat", "bus"))
    data = at.images(dict.fromkeys(names, image))
    rows = [(Path(row["image"]).parts[-3:-1], row["label"]) for row in read_rows(data, "test")]
    assert rows == [(("test", "bus"), 0), (("test", "cat"), 1)]
    one_class = at.images(dict.fromkeys(("bus/1.png", "train/1.png"), image), "classes")
    assert len(list(read_rows(one_class, None))) == 2
    beside = at.images(dict.fromkeys(("cat/1.png", "cover.png", "dog/1.png"), image), "beside")
    assert [row.get("label") for row in read_rows(beside, None)] == [0, None, 1]
    endings = ("png", "jpg", "bmp", "webp", "gif", "tiff", "JPEG")
    deep = at.images({f"deep/class{number % 2}/{number}.{end}": image for number, end in enumerate(endings)}, "deep")
    assert len(list(read_rows(deep, None))) == 7 and read_classes(deep, None, "label") == ["class0", "class1"]


@pytest.mark.parametrize(("place", "count"), [("", 2), ("train/", 1)])
def test_a_table_of_the_images_beside_it_is_what_a_folder_holds(at: Folder, place: str, count: int) -> None:
    """As the `datasets` library reads it; each split may have its own."""
    data = at.images({f"{place}{name}/1.png": Image.new("L", (1, 1)) for name in ("cat", "bus")})
    at.file(f"images/{place}metadata.jsonl", [{"file_name": "bus/1.png", "text": "w1"}] * count)
    at.file("images/test/metadata.jsonl" if place else "images/other.txt", [{"file_name": "1.png"}])
    rows = list(read_rows(data, None))
    assert [(Path(row["file_name"]).is_file(), row["text"]) for row in rows] == [(True, "w1")] * count
    assert find_media("image", {"file_name": [rows[0]["file_name"]]})
    (at.path / "images" / "test" / "metadata.jsonl").unlink(missing_ok=True)
    at.file(f"images/{place}metadata.jsonl", [{"licence": "w1"}])
    for name in ("cat", "bus"):  # as archives of webdataset have it
        at.file(f"images/{place}{name}/1.json", '{"id": 1}')
    notes: list[str] = []
    assert all("image" in row for row in draw_rows(data, 9, 0, notes.append))
    assert notes == [
        f"{data}: tables beside the images are not read ({place}metadata.jsonl); to read one, give its own path"
    ]


def test_links_to_files_and_folders_are_followed_under_their_own_names(at: Folder) -> None:
    picture = Image.new("RGB", (4, 4))
    at.images({f"{name}/{number}.png": picture for name in ("cat", "dog") for number in range(2)}, "shelf")
    linked = at.path / "linked"
    linked_data = Data(path=str(linked))
    linked.mkdir()
    for name in ("cat", "dog"):
        (linked / name).symlink_to(f"../shelf/{name}")
    (linked / "all").symlink_to(".")  # leads back to where it is
    rows = [(Path(row["image"]).relative_to(linked).as_posix(), row["label"]) for row in read_rows(linked_data, None)]
    assert rows == [("cat/0.png", 0), ("cat/1.png", 0), ("dog/0.png", 1), ("dog/1.png", 1)]
    assert read_classes(linked_data, None, "label") == ["cat", "dog"]
    # as in the Hub's cache, whose blobs have no ending
    blob = at.file("blobs/0123", '{"text": "w1"}\n').path
    (at.path / "snapshot").mkdir()
    (at.path / "snapshot" / "train.jsonl").symlink_to("../blobs/0123")
    for source in (at.path / "snapshot" / "train.jsonl", at.path / "snapshot" / ".." / "snapshot" / "train.jsonl"):
        found = Data.model_validate(parse_source(str(source)))
        assert found.path and (Path(found.path).name, Path(found.path).samefile(str(blob))) == ("train.jsonl", True)
        assert texts_of(found) == ["w1"]


def test_what_datasets_saves_to_a_disk_is_read(at: Folder) -> None:
    import datasets

    library: Any = datasets
    parts = {name: library.Dataset.from_list(ROWS[:count]) for name, count in (("train", 4), ("test", 7))}
    library.DatasetDict(parts).save_to_disk(at.path / "saved")
    parts["train"].save_to_disk(at.path / "alone")
    for name, split, count in (("saved", None, 4), ("saved", "test", 7), ("alone", None, 4)):
        assert len(list(read_rows(Data(path=str(at.path / name)), split))) == count


# --- what is in them ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TABLE.encode("utf-8-sig")),
        ("a.csv", TABLE.encode("utf-16")),
        ("a.csv", TABLE.replace("\n", "\r\n").encode()),
        ("a.csv", TABLE.replace("\n", "\r").encode()),
        ("a.csv.gz", zipped(TABLE)),
        ("a.tsv", TABLE.replace(",", "\t").replace("\t w3", ", w3").encode()),
        ("a.jsonl", OBJECTS.encode("utf-16")),
        ("a.jsonl", OBJECTS.encode("utf-8-sig")),
        ("a.jsonl", OBJECTS.replace("\n", "\r\n").encode()),
        ("a.jsonl.gz", zipped(OBJECTS.replace("\n", "\r\n\r\n").rstrip().encode("utf-8-sig"))),
        ("a.json", json.dumps(ROWS).encode("utf-8-sig")),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", OBJECTS.replace("\n", "\n\n").encode("utf-8-sig")),
        ("a.json.gz", zipped(json.dumps(ROWS))),
        ("a.txt", "".join(f"{row['text']}\r\n" for row in ROWS).encode()),
        ("a.parquet", ROWS),
    ],
)
def test_files_are_read_as_people_have_them(at: Folder, name: str, content: Any) -> None:
    assert texts_of(at.file(name, content)) == [row["text"] for row in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "wide.jsonl", "a.csv", "a.csv.gz", "a.txt"])
def test_only_a_line_feed_ends_a_row(at: Folder, name: str) -> None:
    texts = [f"w{number}\u2028w1\u2029w2\x85w3\x0bw4\x0cw5\x1cw6" for number in range(4)]
    body = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    if ".json" not in name:
        body = "\n".join(texts if name == "a.txt" else ["text", *texts])
    content = body.encode("utf-16" if name == "wide.jsonl" else "utf-8")
    assert texts_of(at.file(name, zipped(content) if name.endswith(".gz") else content)) == texts


def test_lines_in_quotes_belong_to_one_row_and_a_quote_within_a_value_is_one(at: Folder) -> None:
    long = "w1 w2\n" * 30
    source = at.file("a.csv", f'text,label\n"{long}",0\n5" w5,1\n"w6 ""w7""",0\n')
    rows = [{"text": long, "label": "0"}, {"text": '5" w5', "label": "1"}, {"text": 'w6 "w7"', "label": "0"}]
    assert list(read_rows(source, None)) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", TABLE.replace('"w3 w2, w3"', '"w3 w2, w3', 1), r"begins here is not CSV: [^$]*a.csv, line 5\n"),
        ("a.csv", "text\nw1\n" + '"w1 w2', r"not CSV: unexpected end of data\nin: [^\n]*a.csv, line 3\n"),
        ("a.csv", 'text\n"w1 w2" w3\n', r"not CSV: [^$]*in: [^\n]*a.csv, line 2\n"),
        ("a.csv", "text,label\n\nw1, w2, w3,1\n", r"for each column \(4 for 2\)\nin: [^\n]*a.csv, line 3\n"),
        ("a.csv", "text,label\nw1\n", r"for each column \(1 for 2\)\nin: [^\n]*a.csv, line 2\n"),
        ("a.csv", TABLE.encode().replace(b"w5", b"\xe9"), r"is not UTF-8 text \(byte 0xe9\)\nin: [^\n]*, line 7\n"),
        ("a.csv", "text,text\nw1,w2\n", "several columns are called 'text'"),
        ("a.csv", zipped(TABLE), r"is not UTF-8[^\n]*\nin: [^\n]*a.csv, line 1\n"),
        ("a.csv.gz", zipped(TABLE * 99)[:-40], "cannot be read"),
        ("a.csv.gz", zipped(TABLE)[:-12] + bytes(12), "cannot be read"),
        ("a.jsonl", OBJECTS.encode().replace(b"w5", b"caf\xe9"), r"is not UTF-8[^$]*a.jsonl, line 6\n[^$]*iconv"),
        ("a.jsonl", '{"text": "w1 w2"}\n\n{"text": \n', r"not JSON: Expecting value at column 9\nin: [^\n]*, line 3\n"),
        ("a.jsonl", json.dumps(ROWS), r"not a JSON object\n[^$]*line 1\n[^$]*\.json file"),
        ("a.jsonl", f'{{"text": "w1", "n": {"9" * 6000}}}\n', r"Exceeds the limit[^$]*, line 1\n"),
        ("a.jsonl", '{"text": "w1\0"}\n', r"not JSON: Invalid control character"),
        ("a.jsonl", f'{OBJECTS}{{"text": "w1", "text": "w2"}}\n', r"called 'text'\nin: [^\n]*, line \d+\n"),
        ("a.json", '[{"text": "w1"}, {"text": "w1", "text": "w2"}]', r"called 'text'\nin: [^\n]*, object 2\n"),
        ("a.xlsx", b"PK\x03\x04" + bytes(99), "a.xlsx is not a kind"),
        ("a.parquet", TABLE, r"cannot be read[^$]*a.parquet\n"),
        ("a.arrow", b"ARROW1" + bytes(99), r"cannot be read[^$]*a.arrow\n"),
        ("a.json", "{", r"is not JSON[^$]*a.json, line 1\n"),
        ("a.json", "[1, 2]", "not a list of JSON objects"),
        ("a.json", json.dumps({"data": ROWS}), "not a list of JSON objects"),
        ("a.json", '{"data": [{"text": "w1"}]}\n', r"a.json is not a list of JSON objects"),
        ("a.json", '{\n"data": [{"text": "w1"}]}\n', r"a.json is not a list of JSON objects"),
        ("a.json", "", "not JSON"),
        ("a.csv", "a;b\nw1, w2;0\n", r"called 'a;b', which looks like several[^$]*a.csv, line 2"),
        ("a.json", '[{"text": "w1"},\n{"text": "w2"},\n]', r"is not JSON: [^$]*a.json, line 3|line 2"),
    ],
)
def test_files_that_would_be_misread_are_refused(at: Folder, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(at.file(name, content), None))


def test_a_json_file_that_is_too_long_to_be_read_whole_is_refused(at: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps(ROWS)
    for name, written in (("a.json", content), ("a.json.gz", zipped(content))):
        monkeypatch.setattr("featcal_cli.recipe.data_formats.LONGEST_JSON", len(content))
        assert list(read_rows(at.file(name, written), None)) == ROWS
        monkeypatch.setattr("featcal_cli.recipe.data_formats.LONGEST_JSON", len(content) - 1)
        message = rf"{name} has more than {len(content) - 1:,} characters, and[^$]*each line of a .jsonl file"
        with pytest.raises(DataError, match=message):
            list(read_rows(at.file(name, written), None))


def test_tables_that_no_row_can_hold_are_refused(at: Folder) -> None:
    """They have two columns of one name. Of values that Python has no type for only their rows' others are read."""
    twice = arrow.table([arrow.array(["w1"]), arrow.array(["w2"])], names=["text", "text"])
    arrow.parquet.write_table(twice, at.path / "twice.parquet")
    with arrow.ipc.new_file(at.path / "twice.arrow", twice.schema) as writer:
        writer.write_table(twice)
    late, somewhere = (arrow.array([2**40], arrow.timestamp("s", zone)) for zone in (None, "Mars/Base"))
    long = {"text": ["w1"], "spent": arrow.array([2**62], arrow.duration("s")), "late": late, "somewhere": somewhere}
    arrow.parquet.write_table(arrow.table(long), at.path / "long.parquet")
    held = {"text": "w1", "spent": None, "late": None, "somewhere": None}
    assert list(read_rows(Data(path=str(at.path / "long.parquet")), None)) == [held]
    for name in ("twice.parquet", "twice.arrow"):
        with pytest.raises(DataError, match="several columns are called 'text'"):
            list(read_rows(Data(path=str(at.path / name)), None))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.safetensors", "pictures"])
def test_what_is_no_file_is_refused(at: Folder, name: str) -> None:
    data = Data(path=str(at.path / name))
    with pytest.raises(DataError, match="there is no file or folder"):
        list(read_rows(data, None))
    os.mkfifo(at.path / name)
    with pytest.raises(DataError, match="there is no file or folder"):
        list(read_rows(data, None))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_file_that_grows_is_read_as_it_was_and_one_that_is_cut_is_changed(tmp_path: Path, name: str) -> None:
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
