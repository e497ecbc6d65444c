"""Rows of Hub datasets: from all over them, for few of their bytes, at the commit that was named, or an error."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from egress import watch_egress
from hub_faults import FAULTS, Fault
from hub_server import HubServer

from featcal_cli.data import hub_rows
from featcal_cli.data.rows import draw_rows, name_task, read_rows
from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, HubError
from featcal_cli.workflows.preflight import pin_data

arrow: Any = pyarrow  # has no types
parquet: Any = pyarrow.parquet
Files = Mapping[str, bytes | str]


def add(hub: HubServer, name: str, folder: Path, files: Files | None = None, **settings: Any) -> str:
    """A dataset repo with these files besides what is in `folder` already; the commit."""
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return hub.add_repo(f"streaming/{name}", folder, kind="dataset", **settings)


def write_rows(file: Path, rows: int, *, size: int, group: int, classes: int = 100) -> None:
    """A parquet file of random bytes, sorted by label."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ends = numpy.arange(rows + 1, dtype=numpy.int32) * size
    content = numpy.random.default_rng(zlib.crc32(file.name.encode())).bytes(rows * size)
    payload = arrow.Array.from_buffers(arrow.binary(), rows, [None, *map(arrow.py_buffer, (ends, content))])
    label = numpy.arange(rows) * classes // rows
    table = arrow.table({"image": payload, "number": numpy.arange(rows), "label": label})
    parquet.write_table(table, file, row_group_size=group, use_dictionary=False, compression=None)


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(*values: str) -> str:
    return lines([{"text": value} for value in values])


def take(data: Data, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The rows that a task with `count` fitted and held-out examples gets when all are good."""
    return list(islice(draw_rows(data, count, seed), count))


# --- which rows, for how many bytes ---


@pytest.fixture(scope="module")
def sorted_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What image datasets on the Hub have: sorted by label, row groups of 100."""
    folder = tmp_path_factory.mktemp("sorted")
    write_rows(folder / "data" / "train-00000-of-00001.parquet", 50_000, size=1024, group=100)
    return folder


def test_a_label_sorted_dataset_gives_most_classes_for_few_of_its_bytes(hub: HubServer, sorted_file: Path) -> None:
    add(hub, "sorted", sorted_file)
    size = sum(file.stat().st_size for file in sorted_file.rglob("*.parquet"))
    rows = take(Data(dataset="streaming/sorted"), 256 + 64)
    fitted, held_out = ({row["label"] for row in part} for part in (rows[:256], rows[256:]))
    assert len({row["number"] for row in rows}) == 320
    assert (len(fitted) >= 50, len(held_out) >= 25) == (True, True)
    assert hub.file_bytes() <= 0.3 * size
    assert len(hub.requests) <= 2 * 160  # a redirect each


def test_one_seed_gives_the_same_rows_and_another_gives_others(hub: HubServer, sorted_file: Path) -> None:
    add(hub, "sorted", sorted_file)
    data = Data(dataset="streaming/sorted", columns={"image": "number"})
    first, second, other = ([row["number"] for row in take(data, 64, seed)] for seed in (1, 1, 2))
    assert first == second != other


def test_only_the_columns_that_the_recipe_names_are_read(hub: HubServer, sorted_file: Path) -> None:
    add(hub, "sorted", sorted_file)
    rows = take(Data(dataset="streaming/sorted", columns={"text": "number"}), 64)
    assert set(rows[0]) == {"number"}
    assert hub.file_bytes() < 3_000_000
    assert "number" in take(Data(dataset="streaming/sorted", columns={"text": "nmber"}), 1)[0]


def test_of_one_large_row_group_only_the_beginning_is_read(hub: HubServer, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", 30_000, size=1024, group=30_000)
    add(hub, "one-group", tmp_path)
    rows = take(Data(dataset="streaming/one-group"), 320)
    assert len({row["number"] for row in rows}) == 320
    assert len({row["label"] for row in rows}) >= 20
    assert hub.file_bytes() <= 10_000_000


def test_twice_the_rows_can_be_had_and_none_comes_twice(hub: HubServer, tmp_path: Path) -> None:
    for shard in range(3):
        write_rows(tmp_path / f"train-{shard}.parquet", 50, size=10 + shard, group=7)
    add(hub, "shards", tmp_path)
    some, whole = ([*draw_rows(Data(dataset="streaming/shards"), count, 0)] for count in (40, 500))
    assert (len(some), len(whole)) == (80, 150)
    assert len({row["image"] for row in some}) == 80 and len({row["image"] for row in whole}) == 150


def test_of_many_files_some_are_opened_but_always_enough(hub: HubServer, tmp_path: Path) -> None:
    for shard in range(50):
        write_rows(tmp_path / f"{shard}.parquet", 4, size=10, group=4)
    add(hub, "many", tmp_path)
    data = Data(dataset="streaming/many")
    assert len(take(data, 20)) == 20
    opened = {request.path for request in hub.requests if "/resolve/" in request.path}
    assert len(opened) == 32
    assert len({row["image"] for row in take(data, 200)}) == 200


def test_lines_come_from_all_over_a_file_for_some_of_its_bytes(hub: HubServer, tmp_path: Path) -> None:
    filler = "x" * 1000
    content = "".join(f'{{"text": "{filler}", "label": {number // 400}}}\n' for number in range(40_000))
    add(hub, "lines", tmp_path, {"train.jsonl": content})
    labels = [row["label"] for row in take(Data(dataset="streaming/lines"), 320)]
    assert len(set(labels[:256])) >= 50
    assert hub.file_bytes() <= 0.5 * len(content)


@pytest.mark.parametrize("end", ["\n", ""])
def test_no_line_is_lost_or_read_twice_wherever_blocks_begin(
    hub: HubServer, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = numpy.random.default_rng(0)
    values = [f"{number} " + "y" * int(size) for number, size in enumerate(random.integers(0, 200, 60))]
    add(hub, f"blocks{len(end)}", tmp_path, {"train.jsonl": texts(*values).replace("\n", "\n\n", 9)[:-1] + end})
    monkeypatch.setattr(hub_rows, "BLOCK", 64)
    monkeypatch.setattr(hub_rows, "MARGIN", 16)
    found = [row["text"] for row in draw_rows(Data(dataset=f"streaming/blocks{len(end)}"), 60, 0)]
    assert Counter(found) == Counter(values)


def test_images_that_lie_as_files_are_fetched_one_by_one(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "images", tmp_path, {f"train/{number % 7}/{number}.png": f"image {number}" for number in range(300)})
    rows = take(Data(dataset="streaming/images"), 20)
    assert len({row["image"]["bytes"] for row in rows}) == 20
    assert len({row["image"]["path"].split("/")[1] for row in rows}) >= 5
    assert len({request.path for request in hub.requests if "/resolve/" in request.path}) <= 24


def test_folders_of_images_are_classes_and_one_that_a_split_lacks_shifts_none(hub: HubServer, tmp_path: Path) -> None:
    paths = ["train/bus/1.png", "train/cat/2.png", "train/dog/3.png", "test/cat/4.png", "test/dog/5.png"]
    add(hub, "classes", tmp_path, dict.fromkeys(paths, "image"))
    for split, expected in (("train", [0, 1, 2]), ("test", [1, 2])):
        assert [row["label"] for row in read_rows(Data(dataset="streaming/classes"), split)] == expected


def test_what_a_metadata_file_says_about_images_comes_with_them(hub: HubServer, tmp_path: Path) -> None:
    captions = "file_name,text\n" + "".join(f"{number}.png,caption {number}\n" for number in range(9))
    images = {f"train/{number}.png": f"image {number}" for number in range(9)}
    add(hub, "captions", tmp_path, {"train/metadata.csv": captions, **images})
    rows = take(Data(dataset="streaming/captions"), 5)
    assert len(rows) == 5
    assert all(row["image"]["bytes"].decode() == row["text"].replace("caption", "image") for row in rows)


def test_a_cell_that_points_outside_of_the_dataset_is_left_alone(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "secret", tmp_path / "secret", {"a.png": "secret"}, private=True)
    (tmp_path / "own.png").write_text("secret")
    paths = ["hf://datasets/streaming/secret@main/a.png", f"{hub.url}/?hf://", str(tmp_path / "own.png"),
             f"zip://a::{hub.url}/a.zip::hf://datasets/streaming/pointers@main/a.json"]  # fmt: skip
    add(hub, "pointers", tmp_path / "pointers", {"a.json": json.dumps([{"image": {"path": path}} for path in paths])})
    rows = list(read_rows(Data(dataset="streaming/pointers"), None))
    assert [row["image"] for row in rows] == [{"path": path} for path in paths]
    assert all("pointers" in request.path for request in hub.requests)


def test_rows_of_other_formats_are_mixed_over_files(hub: HubServer, tmp_path: Path) -> None:
    content = {f"train-{shard}.csv": "text\n" + "".join(f"{shard} {row}\n" for row in range(50)) for shard in range(4)}
    add(hub, "csv-shards", tmp_path, content)
    found = [row["text"] for row in take(Data(dataset="streaming/csv-shards"), 60)]
    assert len(set(found)) == 60
    assert min(Counter(text[0] for text in found).values()) >= 5
    assert len({text[0] for text in found[:10]}) >= 3


# --- every format ---


def write_formats(folder: Path) -> dict[str, str]:
    """Repo name → file, each with the rows a, b, c of a column text."""
    rows = [{"text": text} for text in "abc"]
    folder.mkdir(exist_ok=True)
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "a.parquet")
    with arrow.OSFile(str(folder / "a.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "a.jsonl").write_text(lines(rows))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(rows).encode()))
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.txt").write_text("a\nb\nc\n")
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="") as stream:
            csv.writer(stream, delimiter=separator).writerows([["text", "more"], *([text, 1] for text in "abc")])
    return {file.name.replace(".", "-"): file.name for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz", "a.json", "a.txt", "a.csv", "a.tsv"])
def test_every_format_is_read_whole_in_order_and_drawn_from(hub: HubServer, tmp_path: Path, name: str) -> None:
    write_formats(tmp_path / "all")
    (tmp_path / "repo").mkdir()
    shutil.copy(tmp_path / "all" / name, tmp_path / "repo")
    repo = "format-" + name.replace(".", "-")
    add(hub, repo, tmp_path / "repo")
    data = Data(dataset=f"streaming/{repo}")
    assert [row["text"] for row in read_rows(data, "train")] == ["a", "b", "c"]
    assert sorted(row["text"] for row in draw_rows(data, 5, 0)) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_are_read_without_their_being_unpacked(hub: HubServer, tmp_path: Path, kind: str) -> None:
    (tmp_path / "images").mkdir()
    for number in range(5):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"\x89PNG" + bytes([number]))
    (tmp_path / "repo").mkdir()
    if kind == "zip":
        shutil.make_archive(str(tmp_path / "repo" / "train"), "zip", tmp_path / "images")
    else:
        with tarfile.open(tmp_path / "repo" / "train.tar", "w") as archive:
            archive.add(tmp_path / "images", arcname=".")
    add(hub, f"archive-{kind}", tmp_path / "repo")
    found = [value["bytes"] for row in draw_rows(Data(dataset=f"streaming/archive-{kind}"), 5, 0)
             for value in row.values() if isinstance(value, dict)]  # fmt: skip
    assert sorted(content[4] for content in found) == [0, 1, 2, 3, 4]


def test_cells_of_csv_stay_the_text_that_they_are(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "cells", tmp_path, {"train.csv": 'text,label\n007,1\nNA,0\n"a, b\nc",1\n'})
    rows = list(read_rows(Data(dataset="streaming/cells"), None))
    assert [row["text"] for row in rows] == ["007", "NA", "a, b\nc"]


@pytest.mark.parametrize(
    "content",
    [
        "text,label\na,1\nb,2\n".encode("utf-16"),
        b"text;label\na;1\nb;2\n",
        b"\xef\xbb\xbftext\tlabel\r\na\t1\r\nb\t2\r\n",
    ],
    ids=["utf-16", "semicolons", "tabs"],
)
def test_csv_on_the_hub_is_read_as_people_have_it(hub: HubServer, tmp_path: Path, content: bytes) -> None:
    name = f"csv-kind-{len(content)}"
    add(hub, name, tmp_path, {"train.csv": content})
    rows = list(read_rows(Data(dataset=f"streaming/{name}"), None))
    assert rows == [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text,label\n"a,1\n' + b"b,2\n" * 61, "line 2 is not closed"),
        ("b.csv", "text\ncaf\xe9\n".encode("latin-1"), "may be WINDOWS-1252"),
        ("c.csv", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("d.jsonl", '{"text": "a"}\n'.encode("utf-16"), "may be UTF-16"),
    ],
)
def test_text_on_the_hub_that_would_be_misread_is_refused(
    hub: HubServer, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    add(hub, f"misread-{name[0]}", tmp_path, {name: content})
    with pytest.raises(DataError, match=message):
        take(Data(dataset=f"streaming/misread-{name[0]}"), 5)


def test_of_a_large_csv_only_the_beginning_is_read(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(hub, "large-csv", tmp_path, {"train.csv": "text\n" + "".join(f"{row:099}\n" for row in range(50_000))})
    monkeypatch.setattr(hub_rows, "MOST_BYTES", 2**20)
    numbers = [int(row["text"]) for row in take(Data(dataset="streaming/large-csv"), 100)]
    assert len(set(numbers)) == 100 and 5_000 < max(numbers) < 12_000
    assert hub.file_bytes() < 4_000_000


# --- which files ---

CARD = """---
configs:
- config_name: one
  data_files: one/*.jsonl
- config_name: two
  default: true
  data_files:
  - split: train
    path: [two/a.jsonl, "two/b*"]
  - split: test
    path: two/test.jsonl
- config_name: three
  data_dir: three
- config_name: four
  data_dir: three
  data_files: test.jsonl
---
"""
PARTS = {
    "README.md": CARD,
    "one/a.jsonl": texts("1a"), "one/b.jsonl": texts("1b"),
    "two/a.jsonl": texts("2a"), "two/b1.jsonl": texts("2b"), "two/test.jsonl": texts("2t"),
    "three/train.jsonl": texts("3"), "three/test.jsonl": texts("3t"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        ("one", None, ["1a", "1b"]),
        ("two", None, ["2a", "2b"]),
        (None, None, ["2a", "2b"]),
        (None, "test", ["2t"]),
        ("three", None, ["3"]),
        ("three", "test", ["3t"]),
        ("four", None, ["3t"]),
    ],
)
def test_the_card_says_which_files_are_which_config_and_split(
    hub: HubServer, tmp_path: Path, config: str | None, split: str | None, expected: list[str]
) -> None:
    add(hub, "card", tmp_path, PARTS)
    data = Data(dataset="streaming/card", config=config, split=split)
    assert sorted(row["text"] for row in draw_rows(data, 9, 0)) == expected


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
         None, [0, 1]),
        (["data/extra-00000-of-00001.jsonl", "data/train-00000-of-00001.jsonl"], "extra", [0]),
        (["train/a.jsonl", "test/a.jsonl"], None, [0]),
        (["dev.jsonl", "train_1.jsonl"], "validation", [0]),
        (["dev.jsonl", "train_1.jsonl"], "val", [0]),
        (["a.jsonl", "b.jsonl", ".hidden/c.jsonl", "__pycache__/d.jsonl"], None, [0, 1]),
        (["a.jsonl", "LICENSE", "notes.md", "config.json"], None, [0]),
        (["english/train/0000.jsonl", "train.csv", "b.jsonl"], "train", [0]),
    ],
)  # fmt: skip
def test_without_a_card_names_say_which_files_are_which_split(
    hub: HubServer, tmp_path: Path, files: Sequence[str], split: str | None, expected: Sequence[int]
) -> None:
    name = re.sub(r"\W+", "-", "-".join(files))[:80].strip("-")
    add(hub, name, tmp_path, {path: texts(str(number)) for number, path in enumerate(files)})
    data = Data(dataset=f"streaming/{name}", split=split)
    assert sorted(int(row["text"]) for row in draw_rows(data, 9, 0)) == expected


def test_of_a_loading_script_the_hubs_own_parquet_copy_is_read_and_that_is_said(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "script", tmp_path / "main", {"script.py": "import datasets", "README.md": "---\nlicense: mit\n---\n"})
    copy = Data(dataset="streaming/script")
    with pytest.raises(DataError, match=r"loading script \(script.py\)[^$]*no parquet copy[^$]*--data TASK=FOLDER"):
        take(copy, 1)
    for path in ("en/train/0000", "en/test/0000", "de/partial-train/0000"):
        write_rows(tmp_path / "copy" / f"{path}.parquet", len(path), size=1, group=9)
    commit = add(hub, "script", tmp_path / "copy", revision="refs/convert/parquet")
    with pytest.raises(DataError, match="several configs: de, en"):
        take(copy, 1)
    notes: list[str] = []
    german = copy.model_copy(update={"config": "de"})
    assert len(list(draw_rows(german, 99, 0, notes.append))) == len("de/partial-train/0000")
    assert f"the Hub's own parquet copy (refs/convert/parquet at {commit[:7]}), which holds only the first" in notes[0]
    assert len(take(copy.model_copy(update={"config": "en", "split": "test"}), 99)) == len("en/test/0000")
    told: list[str] = []
    pinned = pin_data("red", german, open_repo, told.append)
    assert (pinned.revision, told) == (commit, [f"red: {notes[0]}"])
    assert len(take(pinned, 99)) == len("de/partial-train/0000")


@pytest.mark.usefixtures("hurried")
def test_a_hub_that_does_not_answer_for_the_copy_is_no_missing_copy(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "scripted", tmp_path, {"scripted.py": "import datasets"})
    repo = open_repo("streaming/scripted", "dataset")
    hub.fail("dataset info", "503", times=None)
    with pytest.raises(HubError):
        pin_data("red", Data(dataset="streaming/scripted", revision=repo.commit), open_repo, print)


SPLITS = [
    (["train_sft", "test_sft"], "train_sft", "the only one that begins with train (of"),
    (["train_sft", "validation"], "train_sft", "the only one that begins with train (of"),
    (["test", "validation"], "validation", "as there is none called train (of"),
    (["test"], "test", "as there is none called train"),
    (["default"], "default", "the only one"),
    (["train", "train_extra"], "train", None),
]


def shards(names: Sequence[str]) -> Files:
    return {f"data/{name}-00000-of-00001.jsonl": texts(name) for name in names}


@pytest.mark.parametrize(("names", "expected", "said"), SPLITS)
def test_the_split_is_train_or_what_comes_nearest_and_then_it_is_said(
    hub: HubServer, tmp_path: Path, names: list[str], expected: str, said: str | None
) -> None:
    repo = "split-" + "-".join(names).replace("_", ".")
    add(hub, repo, tmp_path, shards(names))
    notes: list[str] = []
    data = Data(dataset=f"streaming/{repo}")
    assert [row["text"] for row in draw_rows(data, 9, 0, notes.append)] == [expected]
    assert len(notes) == bool(said)
    assert not said or f"split {expected} of streaming/{repo}, {said}" in notes[0]


@pytest.mark.parametrize(
    ("names", "what", "first"),
    [
        (["train_gen", "train_sft", "test_sft"], "several splits that begin with train", "train_gen"),
        (["de", "en"], "several splits, none of them train", "de"),
    ],
)
def test_of_several_splits_the_message_shows_what_to_type(
    hub: HubServer, tmp_path: Path, names: list[str], what: str, first: str
) -> None:
    repo = "splits-" + first.replace("_", ".")
    commit = add(hub, repo, tmp_path, shards(names))
    for data in (Data(dataset=f"streaming/{repo}"), Data(dataset=f"streaming/{repo}", revision=commit)):
        with pytest.raises(DataError) as caught:
            list(name_task("red", draw_rows(data, 1, 0)))
        assert what in caught.value.what and caught.value.where == f"red: {data}"
        assert caught.value.fix.startswith(f"name one: --data red=streaming/{repo}::{first}, or --split red={first}; ")
        assert all(name in caught.value.fix for name in names)


def test_a_commit_is_read_even_when_the_branch_has_moved_on(hub: HubServer, tmp_path: Path) -> None:
    before = add(hub, "moving", tmp_path, {"train.jsonl": texts("before")})
    add(hub, "moving", tmp_path, {"train.jsonl": texts("after, and longer")})
    pinned, moved = (Data(dataset="streaming/moving", revision=revision) for revision in (before, "main"))
    assert take(pinned, 1) == [{"text": "before"}]
    assert take(moved, 1) == take(Data(dataset="streaming/moving"), 1) == [{"text": "after, and longer"}]


# --- errors ---


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"README.md": CARD.replace("  default: true\n", "")}, {},
         r"several configs: one, two, three, four\n[^$]*name one, e.g. --data TASK=streaming/[^:]+:one"),
        ({}, {"config": "five"}, r"no config five\n[^$]*one of its own \(one, two, three, four\)"),
        ({}, {"split": "extra"}, r"no split extra\n[^$]*::train, or --split TASK=train; the splits are train, test"),
        ({"README.md": "---\nconfigs:\n- {config_name: a, data_files: a/*}\n---\n"}, {},
         r"no file[^$]*card names: a/\*"),
        ({"README.md": "---\nconfigs:\n- {config_name: a, data_files: 'https://a.org/a.csv'}\n---\n"}, {},
         r"lie elsewhere \(https://a.org/a.csv\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_an_error_that_says_what_to_type(
    hub: HubServer, tmp_path: Path, files: Files, settings: dict[str, Any], message: str
) -> None:
    name = f"unclear-{zlib.crc32(message.encode())}"
    add(hub, name, tmp_path, {**PARTS, **files})
    with pytest.raises(DataError, match=message):
        take(Data(dataset=f"streaming/{name}", **settings), 1)


def test_files_that_cannot_be_read_are_named_by_their_kind(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "sounds", tmp_path, {"train/a.wav": "a", "train/b.wav": "b"})
    with pytest.raises(DataError, match=r"no files of a kind that can be read \(it has .wav\)[^$]*safetensors"):
        take(Data(dataset="streaming/sounds"), 1)
    with pytest.raises(DataError, match="for a file or folder write path: "):
        take(Data(dataset=str(tmp_path)), 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", "no parquet" * 9),
        ("a.jsonl", '{"text": \n'),
        ("a.json", "{"),
        ("b.txt", b"\xff\xfe"),
        ("a.arrow", "a"),
    ],
)
def test_damaged_files_are_data_errors(hub: HubServer, tmp_path: Path, name: str, content: bytes | str) -> None:
    repo = "damaged-" + name.replace(".", "-")
    add(hub, repo, tmp_path, {name: content})
    with pytest.raises(DataError):
        take(Data(dataset=f"streaming/{repo}"), 1)


@pytest.mark.parametrize(
    ("settings", "token", "revision", "message"),
    [
        ({"gated": True}, None, None, r"is gated\n[^$]*/datasets/streaming/locked"),
        ({"gated": True}, "stranger", None, r"is gated[^$]*user who has access"),
        ({"private": True}, None, None, r"no dataset streaming/locked[^$]*or it is private"),
        ({"private": True}, "stranger", None, r"no dataset streaming/locked[^$]*or it is private"),
        ({}, "hf_wrong", None, "does not accept the token"),
        ({}, None, "v9", "has no revision v9"),
        ({}, None, "0" * 40, "has no revision 0000"),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_message(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any], token: str | None, revision: str | None, message: str,
) -> None:  # fmt: skip
    write_rows(tmp_path / "train.parquet", 10, size=10, group=5)
    add(hub, "locked", tmp_path, **settings)
    if token:
        monkeypatch.setenv("HF_TOKEN", token if token.startswith("hf_") else hub.add_token(token))
    with pytest.raises(HubError, match=message) as caught:
        take(Data(dataset="streaming/locked", revision=revision), 1)
    assert "hf_" not in str(caught.value)


def test_a_dataset_that_is_not_there_and_one_for_readers_only(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match="no dataset streaming/nowhere"):
        take(Data(dataset="streaming/nowhere"), 1)
    for name, settings in (("mine", {"private": True}), ("ours", {"gated": True, "granted": ["reader"]})):
        add(hub, name, tmp_path / name, {"train.csv": "text\nw1\n"}, **settings)
    monkeypatch.setenv("HF_TOKEN", hub.add_token("streaming"))
    assert take(Data(dataset="streaming/mine"), 1) == [{"text": "w1"}]
    monkeypatch.setenv("HF_TOKEN", hub.add_token("reader"))
    assert take(Data(dataset="streaming/ours"), 1) == [{"text": "w1"}]


# --- the network ---

FORMATS = ("parquet", "csv", "json")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits before another try waits shortly."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def add_formats(hub: HubServer, folder: Path, name: str) -> list[Data]:
    """Datasets of one file with 60 rows and a card: parquet, .csv, and .json, which `datasets` reads."""
    rows = [{"text": f"w{number}"} for number in range(60)]
    write_rows(folder / "parquet" / "train.parquet", 60, size=100, group=10)
    files = {"csv": "text\n" + "".join(f"{row['text']}\n" for row in rows), "json": json.dumps(rows)}
    for kind in FORMATS:
        content = {f"train.{kind}": files[kind]} if kind in files else {}
        add(hub, f"{name}-{kind}", folder / kind, {"README.md": "---\nlicense: mit\n---\n"} | content)
    return [Data(dataset=f"streaming/{name}-{kind}") for kind in FORMATS]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "slow"])
def test_one_failure_of_every_request_changes_no_row(hub: HubServer, tmp_path: Path, fault: str) -> None:
    for data in add_formats(hub, tmp_path, f"once-{fault.replace(' ', '-')}"):
        for kind in ("dataset info", "dataset tree", "file head", "file", "large file"):
            hub.fail(kind, fault)
        found = take(data, 20)  # first of all, when neither card nor files are in the cache
        hub.faults.clear()
        assert found == take(data, 20) and len(found) == 20


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [("dataset info", "503"), ("dataset tree", "429"), ("dataset tree", "reset midway"), ("file head", "503"),
     ("file", "429"), ("file", "reset midway")],
)  # fmt: skip
def test_what_keeps_failing_is_one_message_and_goes_on_when_run_again(
    hub: HubServer, tmp_path: Path, kind: str, fault: str
) -> None:
    for data in add_formats(hub, tmp_path, f"{kind}-{fault}".replace(" ", "-")):
        hub.fail(kind, fault, times=None)
        with pytest.raises(HubError):
            take(data, 20)
        hub.faults.clear()
        assert len(take(data, 20)) == 20


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("fault", ["500", "reset midway", "truncated"])
def test_a_connection_that_is_lost_midway_is_never_the_end_of_the_rows(
    hub: HubServer, tmp_path: Path, fault: str
) -> None:
    # of parquet the footer still comes, of the others the first half
    places = (("large file", 1), ("file", 0), ("file", 0))
    for data, (kind, after) in zip(add_formats(hub, tmp_path, f"midway-{fault[:5]}"), places, strict=True):
        whole = take(data, 20)
        hub.fail(kind, fault, after=after, times=2)
        assert take(data, 20) == whole
        hub.faults.clear()
        hub.fail(kind, fault, after=after, times=None)
        with pytest.raises(HubError, match=r"cut the connection|failed \(500\)"):
            take(data, 20)
        hub.faults.clear()


PAGE = Fault(body=b"<html>log in</html>", carried_out=False)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", ["parquet", "png"])
@pytest.mark.parametrize("fault", [401, 403, 404, 410, PAGE], ids=lambda fault: str(fault)[:3])
def test_addresses_of_files_that_hold_no_more_are_asked_for_again(
    hub: HubServer, tmp_path: Path, kind: str, fault: int | Fault
) -> None:
    name = f"lapsed-{kind}"
    if kind == "parquet":
        write_rows(tmp_path / "train.parquet", 60, size=100, group=10)
    add(hub, name, tmp_path, {} if kind == "parquet" else {f"train/{number}.png": f"{number}" for number in range(9)})
    data = Data(dataset=f"streaming/{name}")
    refusal = Fault(status=fault, carried_out=False) if isinstance(fault, int) else fault
    rows = take(data, 4)
    hub.fail("large file", refusal, times=3)
    assert take(data, 4) == rows
    hub.fail("large file", refusal, times=None)
    with pytest.raises(HubError, match=r"^localhost:[0-9]+ (refuses train.* of|sends a page)") as caught:
        take(data, 4)
    assert "token" not in str(caught.value)
    hub.faults.clear()


def test_a_dataset_that_disappears_midway_is_said_to_be_gone(hub: HubServer, tmp_path: Path) -> None:
    for data in add_formats(hub, tmp_path, "vanishing"):
        hub.fail("file", Fault(action=hub.repos.clear), path="/train")
        with pytest.raises(HubError, match="no dataset streaming/vanishing"):
            take(data, 20)
        add_formats(hub, tmp_path, "vanishing")


def test_offline_mode_is_an_error_that_says_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"offline mode is on[^$]*unset HF_HUB_OFFLINE"):
        take(Data(dataset="streaming/offline"), 1)
    assert hub.requests == []


def test_nothing_but_the_hub_is_asked_and_nobody_else_sees_the_token(hub: HubServer, tmp_path: Path) -> None:
    names = [data.dataset for data in add_formats(hub, tmp_path, "quiet")]
    script = (
        "import datasets, sys\n"  # imported first, it has read its settings before featcal could change them
        "from featcal_cli.recipe.schema import Data\n"
        "from featcal_cli.data.rows import draw_rows, read_rows\n"
        "for name in sys.argv[1:]:\n"
        "    data = Data(dataset=name)\n"
        "    assert len(list(draw_rows(data, 9, 0))) + len(list(read_rows(data, 'train'))) == 18 + 60\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "HF_UPDATE_DOWNLOAD_COUNTS"}
    with watch_egress() as egress:
        environment = kept | egress.environment | {"HF_TOKEN": hub.add_token("reader")}
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, names)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert egress.hosts == []
    assert any(request.authorization for request in hub.requests)
    assert not any(request.authorization for request in hub.requests if request.path.startswith("/cdn/"))
