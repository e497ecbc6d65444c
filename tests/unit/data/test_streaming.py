"""Rows of Hub datasets: from all over them, for few of their bytes, at the commit that was named, or an error."""

import gzip
import io
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from egress import watch_egress
from hub_faults import Fault
from hub_server import HubServer

from featcal_cli.data import rows as data_rows
from featcal_cli.data.files import find_split
from featcal_cli.data.rows import draw_rows, naming_task, read_rows
from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, HubError
from featcal_cli.workflows.inputs import pin_data

arrow: Any = pyarrow  # has no types
parquet: Any = pyarrow.parquet
Files = Mapping[str, bytes | str]
Publish = Callable[..., Data]


@pytest.fixture
def publish(hub: HubServer, tmp_path: Path, request: pytest.FixtureRequest) -> Publish:
    """Publish files, besides what is in the folder already, as a dataset that is called after the test."""

    def publish(files: Files | None = None, folder: str | Path = "", **settings: Any) -> Data:
        place = tmp_path / "repos" / folder
        for path, content in (files or {}).items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content.encode() if isinstance(content, str) else content)
        called = settings.pop("called", f"d{zlib.crc32(f'{request.node.nodeid} {folder}'.encode())}")
        hub.add_repo(f"streaming/{called}", place, kind="dataset", **settings)
        return Data(dataset=f"streaming/{called}")

    return publish


def commit_of(hub: HubServer, data: Data, branch: str = "main") -> str:
    return hub.repos["dataset", str(data.dataset)].refs[branch]


def parquet_file(rows: int, *, size: int, group: int, classes: int = 100) -> bytes:
    """A parquet file of random bytes, sorted by label."""
    ends = numpy.arange(rows + 1, dtype=numpy.int32) * size
    content = numpy.random.default_rng(rows + size).bytes(rows * size)
    payload = arrow.Array.from_buffers(arrow.binary(), rows, [None, *map(arrow.py_buffer, (ends, content))])
    label = numpy.arange(rows) * classes // rows
    table = arrow.table({"image": payload, "number": numpy.arange(rows), "label": label})
    parquet.write_table(table, file := io.BytesIO(), row_group_size=group, use_dictionary=False, compression=None)
    return file.getvalue()


def texts(*values: str) -> str:
    return "".join(json.dumps({"text": value}) + "\n" for value in values)


def text_table(*values: str) -> bytes:
    """A parquet file of texts."""
    parquet.write_table(arrow.table({"text": values}), file := io.BytesIO())
    return file.getvalue()


def take(data: Data, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The rows that a task with `count` fitted and held-out examples gets when all are good."""
    return list(islice(draw_rows(data, count, seed), count))


def drawn_texts(data: Data, count: int = 9) -> list[str]:
    return sorted(row["text"] for row in draw_rows(data, count, 0))


# --- which rows, for how many bytes ---


@pytest.fixture(scope="module")
def sorted_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What image datasets on the Hub have: sorted by label, row groups of 100."""
    folder = tmp_path_factory.mktemp("sorted")
    (folder / "train-00000-of-00001.parquet").write_bytes(parquet_file(50_000, size=1024, group=100))
    return folder


def test_a_sorted_dataset_gives_most_classes_for_few_bytes(hub: HubServer, publish: Publish, sorted_file: Path) -> None:
    data = publish(folder=sorted_file)
    rows = take(data, 256 + 64)
    fitted, held_out = ({row["label"] for row in part} for part in (rows[:256], rows[256:]))
    assert len({row["number"] for row in rows}) == 320
    assert (len(fitted) >= 50, len(held_out) >= 25) == (True, True)
    assert hub.file_bytes() <= 0.3 * sum(file.stat().st_size for file in sorted_file.iterdir())
    assert len(hub.requests) <= 2 * 160  # a redirect each

    numbers = data.model_copy(update={"columns": {"image": "number"}})
    first, second, other = ([row["number"] for row in take(numbers, 64, seed)] for seed in (1, 1, 2))
    assert first == second != other


def test_of_tiny_row_groups_no_more_are_read_than_it_takes(publish: Publish) -> None:
    split = find_split(publish({"train.parquet": parquet_file(400, size=10, group=1)}), None)
    assert [len(data_rows.open_row_groups(split, count, 0)) for count in (20, 150)] == [100, 150]


def test_of_one_large_row_group_only_the_beginning_is_read(hub: HubServer, publish: Publish) -> None:
    rows = take(publish({"train.parquet": parquet_file(30_000, size=1024, group=30_000)}), 320)
    assert len({row["number"] for row in rows}) == 320
    assert len({row["label"] for row in rows}) >= 20
    assert hub.file_bytes() <= 10_000_000


def test_twice_the_rows_can_be_had_and_none_comes_twice(publish: Publish) -> None:
    data = publish({f"train-{shard}.parquet": parquet_file(50, size=10 + shard, group=7) for shard in range(3)})
    for count, expected in ((40, 80), (500, 150)):
        rows = [row["image"] for row in draw_rows(data, count, 0)]
        assert len(rows) == len(set(rows)) == expected


def test_of_many_files_some_are_opened_but_always_enough(hub: HubServer, publish: Publish) -> None:
    data = publish({f"{shard}.parquet": parquet_file(4, size=10 + shard, group=4) for shard in range(50)})
    assert len(take(data, 20)) == 20
    assert len({request.path for request in hub.requests if "/resolve/" in request.path}) == 32
    assert len({row["image"] for row in take(data, 200)}) == 200


def test_a_cell_that_leads_out_of_the_dataset_is_left_alone(hub: HubServer, publish: Publish, tmp_path: Path) -> None:
    publish({"a.png": "secret"}, "secret", private=True, called="secret")
    (tmp_path / "own.png").write_text("secret")
    paths = ["hf://datasets/streaming/secret@main/a.png", f"{hub.url}/?hf://", str(tmp_path / "own.png"),
             f"zip://a::{hub.url}/a.zip::hf://datasets/streaming/pointers@main/a.json"]  # fmt: skip
    files = {"a.json": json.dumps([{"image": {"path": path}} for path in paths])}
    rows = list(read_rows(publish(files, "pointers", called="pointers"), None))
    assert [row["image"] for row in rows] == [{"path": path} for path in paths]
    assert all("pointers" in request.path for request in hub.requests)


def test_rows_of_other_formats_are_mixed_over_files(publish: Publish) -> None:
    content = {f"train-{shard}.csv": "text\n" + "".join(f"{shard} {row}\n" for row in range(50)) for shard in range(4)}
    found = [row["text"] for row in take(publish(content), 60)]
    assert len(set(found)) == 60
    assert min(Counter(text[0] for text in found).values()) >= 5
    assert len({text[0] for text in found[:10]}) >= 3


def test_of_a_large_csv_only_the_beginning_is_read(hub: HubServer, publish: Publish) -> None:
    data = publish({"train.csv": "text\n" + "".join(f"x{row:098}\n" for row in range(400_000))})
    numbers = [int(row["text"][1:]) for row in take(data, 100)]
    assert len(set(numbers)) == 100 and 1_000 < max(numbers) < data_rows.BUFFER_ROWS + 200
    assert hub.file_bytes() < 16_000_000


# --- every format ---


def in_arrow(table: Any) -> bytes:
    with arrow.ipc.new_stream(file := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


ABC = texts(*"abc")
FORMATS: dict[str, bytes | str] = {
    "a.parquet": text_table(*"abc"),
    "a.arrow": in_arrow(arrow.table({"text": list("abc")})),
    "a.jsonl": ABC,
    "a.jsonl.gz": gzip.compress(ABC.encode()),
    "a.json": json.dumps([{"text": text} for text in "abc"]),
    "a.csv": "text,more\r\na,1\r\nb,1\r\nc,1\r\n",
    "a.tsv": "text\tmore\na\t1\nb\t1\nc\t1\n",
    "as.tsv/a.csv": "text,more\na,1\nb,1\nc,1\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_whole_in_order_and_drawn_from(publish: Publish, name: str) -> None:
    data = publish({name: FORMATS[name]})
    assert [row["text"] for row in read_rows(data, "train")] == ["a", "b", "c"]
    assert drawn_texts(data, 5) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text\ncaf\xe9\n".encode("latin-1"), "cannot be read"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "cannot be read"),
        ("a.parquet", b"no parquet" * 9, "cannot be read"),
        ("a.zip", b"PK\x05\x06" + bytes(18), r"it has .zip\)[^$]*hf download streaming/\w+ --repo-type dataset"),
        ("a.tar", b"", r"it has .tar\)[^$]*unpack its archives"),
        ("a.txt", b"a", r"it has .txt\)[^$]*give the folder, or a .txt file in it"),
        ("a.wav", b"RIFF", r"it has .wav\)[^$]*give the folder"),
    ],
)
def test_damaged_and_other_files_are_data_errors(publish: Publish, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        take(publish({name: content}), 5)


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
- config_name: five
  data_files: metadata.jsonl
---
"""
PARTS = {
    "README.md": CARD,
    "one/a.jsonl": texts("1a"), "one/b.jsonl": texts("1b"),
    "two/a.jsonl": texts("2a"), "two/b1.jsonl": texts("2b"), "two/test.jsonl": texts("2t"),
    "metadata.jsonl": texts("5"), "three/train.jsonl": texts("3"), "three/test.jsonl": texts("3t"),
}  # fmt: skip


def test_the_card_says_which_files_are_which_config_and_split(publish: Publish) -> None:
    data = publish(PARTS)
    for config, split, expected in (
        ("one", None, ["1a", "1b"]), ("two", None, ["2a", "2b"]), (None, None, ["2a", "2b"]), (None, "test", ["2t"]),
        ("three", None, ["3"]), ("three", "test", ["3t"]), ("four", None, ["3t"]),
        ("five", None, ["5"]),
    ):  # fmt: skip
        assert drawn_texts(data.model_copy(update={"config": config, "split": split})) == expected, (config, split)
    notes: list[str] = []
    assert [pin_data(task, data, open_repo, notes.append).config for task in ("Three", "red")] == ["three", "two"]
    assert [note.partition("; ")[2] for note in notes] == ["three has the name of the task Three", "two is its default"]


def test_of_a_loading_script_the_hubs_parquet_copy_is_read_and_that_is_said(hub: HubServer, publish: Publish) -> None:
    data = publish({"script.py": "import datasets", "README.md": "---\nlicense: mit\n---\n"}, called="script")
    with pytest.raises(DataError, match=r"no files of a kind that can be read \(it has .py\)"):
        take(data, 1)
    rows = {"en/train/0000": 13, "en/test/0000": 12, "de/partial-train/0000": 21}
    files = {f"{path}.parquet": parquet_file(count, size=1, group=9) for path, count in rows.items()}
    publish(files, "copy", called="script", revision="refs/convert/parquet")
    commit = commit_of(hub, data, "refs/convert/parquet")
    with pytest.raises(DataError, match="several configs: de, en"):
        take(data, 1)
    notes: list[str] = []
    german, english = (data.model_copy(update={"config": config, "split": split})
                       for config, split in (("de", None), ("en", "test")))  # fmt: skip
    assert len(list(draw_rows(german, 99, 0, notes.append))) == 21
    assert f"parquet copy is read (refs/convert/parquet at {commit[:7]}), which holds only the first" in notes[0]
    assert len(take(english, 99)) == 12
    pinning: list[str] = []
    pinned = pin_data("red", german, open_repo, pinning.append)
    assert (pinned.revision, pinned.config, pinning) == (commit, "de", [f"red: {notes[0]}"])
    assert len(take(pinned, 99)) == 21


def test_of_other_formats_the_hubs_parquet_copy_is_read_where_main_is_meant(hub: HubServer, publish: Publish) -> None:
    """Label-sorted lines then give most classes for few of the bytes, in the config that the card calls default."""
    configs = "[{config_name: a, data_files: no*.jsonl}, {config_name: b, data_files: b.jsonl, default: true}]"
    files = {"README.md": f"---\nconfigs: {configs}\n---\n", "b.jsonl": texts("lines"), "no.jsonl": texts("a")}
    data = publish(files, called="sorted-lines")
    assert drawn_texts(data) == ["lines"]
    copies = {f"b/train/000{shard}.parquet": parquet_file(9000, size=1024 + shard, group=100) for shard in range(2)}
    copies |= {"a/train/0000.parquet": parquet_file(9, size=9, group=9), ".gitattributes": b"*"}
    publish(copies, "copy", called="sorted-lines", revision="refs/convert/parquet")
    commit = commit_of(hub, data, "refs/convert/parquet")
    for named in (data, data.model_copy(update={"revision": "main"})):
        notes: list[str] = []
        pinned = pin_data("red", named, open_repo, notes.append)
        assert (pinned.revision, pinned.config) == (commit, "b")
        assert notes[0].endswith("has 2 configs; b is its default")
        assert "has no parquet files of its own: the Hub's parquet copy is read" in notes[1]
        before = hub.file_bytes()
        rows = list(islice(draw_rows(pinned, 320, 0, notes.append), 320))
        assert len({row["label"] for row in rows[:256]}) >= 50 and len(notes) == 2
        assert hub.file_bytes() - before < 0.6 * 18_000 * 1024
    older = data.model_copy(update={"revision": commit_of(hub, data)})
    notes = []
    pinned = pin_data("red", older, open_repo, list[str]().append)
    assert pinned == older.model_copy(update={"config": "b"})
    assert [row["text"] for row in draw_rows(pinned, 9, 0, notes.append)] == ["lines"]
    assert ["streamed from shuffled shards through a buffer" in note for note in notes] == [True]


@pytest.mark.usefixtures("hurried")
def test_a_hub_that_does_not_answer_for_the_copy_is_no_missing_copy(hub: HubServer, publish: Publish) -> None:
    data = publish({"train.jsonl": texts("a")}, called="unanswered")
    hub.fail("dataset info", "503", path="convert", times=None)
    for ask in (lambda: pin_data("red", data, open_repo, print), lambda: take(data, 1)):
        with pytest.raises(HubError):
            ask()


# --- errors ---


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"README.md": CARD.replace("  default: true\n", "")}, {},
         r"several configs: one, two, three, four, five\n[^$]*name one, e.g. --data red=streaming/[^:]+:one"),
        ({}, {"config": "six"}, r"no config six\n[^$]*one of its own \(one, two, three, four, five\)"),
        ({}, {"split": "extra"}, r"no split extra\n[^$]*--split red=train [^$]*; the splits are train, test"),
        ({"README.md": "---\nconfigs:\n- {config_name: a, data_files: a/*}\n---\n"}, {},
         r"no file[^$]*card names[^$]*a/\*"),
        ({"README.md": "---\nconfigs:\n- {config_name: a, data_files: 'https://a.org/a.csv'}\n---\n"}, {},
         r"no file[^$]*card names[^$]*https://a.org/a.csv"),
    ],
)  # fmt: skip
def test_what_is_not_told_is_asked_for(publish: Publish, files: Files, settings: dict[str, Any], message: str) -> None:
    data = publish({**PARTS, **files}).model_copy(update=settings)
    with pytest.raises(DataError, match=message) as caught, naming_task("red", data):
        list(draw_rows(data, 1, 0))
    assert caught.value.where == f"red: {data}"


def test_a_dataset_that_is_closed_or_not_there_is_named(
    hub: HubServer, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.csv": "text\nw1\n"}
    gated = publish(files, "gated", gated=True, granted=["reader"])
    private = publish(files, "private", private=True)
    older = publish(files, "open").model_copy(update={"revision": "v9"})
    monkeypatch.setenv("HF_TOKEN", hub.add_token("stranger"))
    for data, message in (
        (gated, r"is gated[^$]*user who has access"),
        (private, r"no dataset streaming/[^$]*or it is private"),
        (older, "has no revision v9"),
    ):
        with pytest.raises(HubError, match=message) as caught:
            take(data, 1)
        assert "hf_" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", hub.add_token("reader"))
    assert take(gated, 1) == [{"text": "w1"}]
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"offline mode is on[^$]*unset HF_HUB_OFFLINE"):
        take(Data(dataset="streaming/offline"), 1)
    assert hub.requests == []


# --- the network ---


@pytest.fixture
def three_formats(publish: Publish) -> list[Data]:
    """Datasets of one file with 60 rows and a card: parquet, .csv, and .json, which `datasets` reads."""
    words = [f"w{number}" for number in range(60)]
    tables = {"csv": "\n".join(["text", *words]), "json": json.dumps([{"text": word} for word in words])}
    files = {"parquet": parquet_file(60, size=100, group=10), **tables}
    card = {"README.md": "---\nlicense: mit\n---\n"}
    return [publish({**card, f"train.{kind}": content}, kind) for kind, content in files.items()]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("fault", ["500", "reset midway", "truncated"])
def test_a_lost_connection_is_never_the_end_of_the_rows(hub: HubServer, three_formats: list[Data], fault: str) -> None:
    # of parquet the footer still comes, of the others the first half
    places = (("large file", 1), ("file", 0), ("file", 0))
    for data, (kind, after) in zip(three_formats, places, strict=True):
        whole = take(data, 20)
        hub.fail(kind, fault, after=after, times=2)
        assert take(data, 20) == whole
        hub.faults.clear()
        hub.fail(kind, fault, after=after, times=None)
        with pytest.raises(HubError, match=r"cut the connection|failed \(500\)"):
            take(data, 20)
        hub.faults.clear()


def test_a_dataset_that_disappears_midway_is_said_to_be_gone(hub: HubServer, three_formats: list[Data]) -> None:
    repos = dict(hub.repos)
    for data in three_formats:
        hub.fail("file", Fault(action=hub.repos.clear), path="/train")
        with pytest.raises(HubError, match=f"no dataset {data}"):
            take(data, 20)
        hub.repos.update(repos)


@pytest.mark.survive
def test_nothing_but_the_hub_is_asked_and_nobody_else_sees_the_token(hub: HubServer, three_formats: list[Data]) -> None:
    script = (
        "import datasets, sys\n"  # imported first, it has read its settings before featcal could change them
        "from featcal_cli.recipe.schema import Data\n"
        "from featcal_cli.data.rows import draw_rows, read_rows\n"
        "for name in sys.argv[1:]:\n"
        "    data = Data(dataset=name)\n"
        "    assert len(list(draw_rows(data, 9, 0))) + len(list(read_rows(data, 'train'))) == 18 + 60\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "HF_UPDATE_DOWNLOAD_COUNTS"}
    command = [sys.executable, "-c", script, *map(str, three_formats)]
    with watch_egress() as egress:
        environment = kept | egress.environment | {"HF_TOKEN": hub.add_token("reader")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert egress.hosts == []
    assert any(request.authorization for request in hub.requests)
    assert not any(request.authorization for request in hub.requests if request.path.startswith("/cdn/"))
