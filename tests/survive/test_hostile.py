"""What strangers wrote runs nothing, leads nowhere else, and takes neither hours nor gigabytes."""

import json
import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from bad_input import Stage, files_under, good_arguments
from command_line import Capsys, Run, featcal_inside, succeed
from hub_faults import Fault
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import BertModel, ViTModel

from featcal_cli.data.examples import DrawnExamples, draw_examples
from featcal_cli.data.preprocessing import Target
from featcal_cli.lineage.claims import read_card
from featcal_cli.recipe.data_formats import open_file
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.files import check_links

arrow: Any = pyarrow  # has no types
LONG = 100_000_000


def calibrate(stage: Stage, capsys: Capsys, output: str = "out", **changed: object) -> Run:
    """The good job, with other arguments: `expert` is --expert."""
    named = {name if name == "merged" else f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return succeed(capsys, "calibrate", good_arguments(stage.folder) | {"-o": stage.folder / output} | named)


def check_same(stage: Stage, place: str) -> None:
    """The same weights as in the first output."""
    one, other = ((stage.folder / name / "model.safetensors").read_bytes() for name in ("out", place))
    assert one == other


def draw(stage: Stage, data: Data, *, images: bool = False, count: int = 4) -> DrawnExamples:
    base = stage.folder / "vit" / "base" if images else stage.folder / "base"
    model = (ViTModel if images else BertModel).from_pretrained(base)
    return draw_examples("red", data, Target(model, [base]), count=count, seed=0)


@pytest.mark.parametrize("kind", ["model tree", "file head", "file", "large file"])
def test_a_changing_model_is_read_at_one_commit(stage: Stage, capsys: Capsys, kind: str) -> None:
    name = f"changing/{kind.replace(' ', '-')}"
    stage.change("red/config.json", marked=name)  # or its files may be in the cache already
    tensors = {key: value + 1e-3 for key, value in load_file(stage.folder / "red" / "model.safetensors").items()}
    save_file(tensors, stage.folder / "red" / "model.safetensors", metadata={"format": "pt", "marked": name})
    first = stage.hub.add_repo(name, stage.folder / "red")
    calibrate(stage, capsys)
    push = partial(stage.hub.add_repo, name, stage.folder / "green")
    stage.hub.fail(kind, Fault(action=push), path=name.partition("/")[2] if kind != "large file" else "", after=1)
    calibrate(stage, capsys, "again", expert=f"red={name}")
    assert stage.hub.faults.hits and stage.hub.repos["model", name].refs["main"] != first
    sources = json.loads((stage.folder / "again" / "featcal_report.json").read_text())["sources"]
    assert first in [source["commit"] for source in sources]
    check_same(stage, "again")


def test_a_changing_dataset_is_read_at_one_commit(stage: Stage, capsys: Capsys) -> None:
    rows = "".join(json.dumps({"text": f"w{number % 50 + 2} w3 w4"}) + "\n" for number in range(60))
    stage.write("first/a.jsonl", rows)
    stage.write("second/a.jsonl", rows.replace("w3", "w9"))
    first = stage.hub.add_repo("changing/rows", stage.folder / "first", kind="dataset")
    calibrate(stage, capsys, data=f"red=changing/rows@{first}")
    push = partial(stage.hub.add_repo, "changing/rows", stage.folder / "second", kind="dataset")
    stage.hub.fail("dataset tree", Fault(action=push), path="rows")
    calibrate(stage, capsys, "again", data="red=changing/rows")
    assert stage.hub.faults.hits and stage.hub.repos["dataset", "changing/rows"].refs["main"] != first
    assert f"revision: {first}" in (stage.folder / "again" / "featcal.yaml").read_text()
    check_same(stage, "again")


def test_links_to_weights_and_of_the_hubs_cache_are_followed(stage: Stage, capsys: Capsys) -> None:
    calibrate(stage, capsys)
    (stage.folder / "merged" / "model.safetensors").rename(stage.folder / "weights.safetensors")
    (stage.folder / "merged" / "model.safetensors").symlink_to(stage.folder / "weights.safetensors")
    (stage.folder / "merged" / "NOTES.md").symlink_to("config.json")
    calibrate(stage, capsys, "linked")
    snapshot = stage.folder / "models--a--b" / "snapshots" / "0123"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    stage.write("merged/sub/words.txt", "words")
    for file in (path for path in (stage.folder / "merged").rglob("*") if path.is_file()):
        path = file.relative_to(stage.folder / "merged")
        shutil.copyfile(file, snapshot.parent.parent / "blobs" / path.name)
        (snapshot / path).symlink_to(Path(*[".."] * (len(path.parts) + 1), "blobs", path.name))
    calibrate(stage, capsys, "cached", merged=snapshot)
    for place in ("linked", "cached"):
        assert not any(path.is_symlink() for path in (stage.folder / place).rglob("*"))
        check_same(stage, place)
    assert (stage.folder / "cached" / "sub" / "words.txt").read_text() == "words"


def test_a_link_out_of_a_folder_that_looks_like_the_cache_is_refused(stage: Stage) -> None:
    blobs = stage.write("models--a--b/blobs/x", "")
    blobs.unlink()
    blobs.symlink_to(stage.write("secret.txt", "private"))
    snapshot = stage.folder / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(stage.folder / "base", snapshot)
    (snapshot / "notes.txt").symlink_to("../../blobs/x")
    with pytest.raises(CheckpointError, match=r"notes.txt is a link .* to .*secret.txt"):
        check_links(snapshot, skip=())


def test_an_expert_may_hold_links_and_nothing_is_written_outside(stage: Stage, tmp_path: Path, capsys: Capsys) -> None:
    (stage.folder / "red" / "notes.txt").symlink_to(stage.write("secret.txt", "for nobody"))
    before = files_under(tmp_path)
    calibrate(stage, capsys)
    new = files_under(tmp_path).keys() - before.keys()
    assert new and all(path.is_relative_to(stage.folder / "out") for path in new)
    assert "for nobody" not in "".join(path.read_text(errors="ignore") for path in (stage.folder / "out").iterdir())


def test_code_beside_a_model_is_not_run(stage: Stage, tmp_path: Path, capsys: Capsys) -> None:
    for model in ("merged", "base", "red"):
        for name in ("modeling_evil.py", "tokenization_evil.py", "setup.py", "__init__.py", "conftest.py"):
            stage.write(f"{model}/{name}", f"import pathlib\npathlib.Path({str(tmp_path / 'pwned')!r}).touch()\n")
        maps = {f"Auto{kind}": "modeling_evil.Evil" for kind in ("Config", "Model", "Tokenizer", "ImageProcessor")}
        stage.change(f"{model}/config.json", auto_map=maps)
    stage.change("base/tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Evil"]})
    rows = stage.write("rows.jsonl", '{"text": "w2 w3"}\n' * 20)
    calibrate(stage, capsys, data=f"red={rows}")
    assert featcal_inside(capsys, "modules", {"merged": stage.folder / "merged"}).code == 0
    assert not (tmp_path / "pwned").exists()


def test_large_images_are_decoded_one_at_a_time(stage: Stage) -> None:
    side, count = 4_000, 12
    (stage.folder / "images").mkdir()
    for number in range(count):
        Image.new("1", (side, side)).save(stage.folder / "images" / f"{number}.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    drawn = draw(stage, Data(path=str(stage.folder / "images")), images=True, count=count)
    assert sum(len(batch["pixel_values"]) for batch in drawn.cut(6).fitted) == count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 2**10  # KiB, of 12 · 47 MB


def test_a_text_of_100_mb_costs_seconds_and_is_its_beginning(stage: Stage) -> None:
    start = " ".join(f"w{number % 90 + 2}" for number in range(600))
    rows = stage.write("rows.jsonl", "")
    with rows.open("w") as stream:
        for text in (start + " w5" * (LONG // 3), start):
            stream.write(json.dumps({"text": text}) + "\n")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    drawn = draw(stage, Data(path=str(rows)))
    assert time.process_time() - started < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    one, other = (example.inputs["input_ids"][0].tolist() for example in drawn.fitted)
    assert one == other and len(one) == 64


def test_a_tokenizer_that_cuts_at_the_left_keeps_the_end(stage: Stage) -> None:
    stage.change("base/tokenizer_config.json", truncation_side="left")
    end = " ".join(f"w{number % 90 + 2}" for number in range(600))
    rows = [{"text": "w5 " * 500_000 + end}, {"text": end}]
    drawn = draw(stage, Data(path=str(stage.write("rows.jsonl", "\n".join(map(json.dumps, rows))))))
    one, other = (example.inputs["input_ids"][0].tolist() for example in drawn.fitted)
    assert one == other and len(one) == 64


def test_a_long_line_on_the_hub_is_read_in_few_requests(stage: Stage) -> None:
    rows = [{"text": "w5 " * 10_000_000}, *({"text": f"w{number + 2} w3"} for number in range(40))]
    stage.write("long/a.jsonl", "\n".join(map(json.dumps, rows)))
    stage.publish("strangers/long-line", "long", "dataset")
    started = time.process_time()
    drawn = draw(stage, Data(dataset="strangers/long-line"))
    assert len(drawn.fitted) == 4 and time.process_time() - started < 15
    assert sum("a.jsonl" in request.path or "/cdn/" in request.path for request in stage.hub.requests) < 400


@pytest.mark.parametrize("positions", [[3], [0, 1, 2], [4, 5, 50, 97], list(range(100))])
def test_a_large_row_group_is_read_in_parts_and_gives_the_same_rows(stage: Stage, positions: list[int]) -> None:
    images = [{"bytes": bytes([number] * 9), "path": None} for number in range(100)]
    rows = [{"text": f"row {number} " * 50, "image": image} for number, image in enumerate(images)]
    file = stage.folder / "rows.parquet"
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), file)
    for unfolded in (2**28, 5_000, 1):
        stage.patch.setattr("featcal_cli.recipe.data_formats.BYTES_AT_ONCE", unfolded)
        (table,) = open_file(file)
        assert list(table.read(positions)) == [rows[position] for position in positions]


def test_a_parquet_file_of_zeros_takes_no_more_memory_than_a_part_of_it(stage: Stage) -> None:
    file = stage.folder / "zeros.parquet"
    column = arrow.array([bytes(2**24)] * 24, arrow.large_binary())
    pyarrow.parquet.write_table(arrow.table({"image": column}), file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 2**20
    stage.patch.setattr("featcal_cli.recipe.data_formats.BYTES_AT_ONCE", 2**26)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (table,) = open_file(file)
    assert [len(row["image"]) for row in table.read([1, 20])] == [2**24, 2**24]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 220 * 2**10  # KiB, of 400 MB


NASTY = {
    "comments": "<!--\n", "angles": "<", "ticks": "`x", "brackets": "[", "images": "![", "bangs": "!", "quotes": "> ",
    "badges": "[![a](b)](", "headings": "# x\n", "underlined": "x\n=\n", "cells": "|a|b|\n|-|-|\n", "paths": "/home/",
    "lines": "\n", "rules": "\n---x", "blocks": "```yaml\n", "lists": "- - - - -\n",
}  # fmt: skip


@pytest.mark.parametrize("pattern", NASTY.values(), ids=NASTY)
def test_a_card_takes_seconds_at_most_whatever_it_repeats(pattern: str) -> None:
    started = time.process_time()
    read_card("---\n" + pattern * (2_000_000 // len(pattern)))
    assert time.process_time() - started < 4


def test_names_are_shown_on_the_terminal_and_not_obeyed(stage: Stage, capsys: Capsys) -> None:
    obeyed = "\x1b\x07\x9b\u202e\ud800"
    escape = "\x1b]0;pwned\x07\x9b31m\u202e"
    rows = [{"text": "w2 w3", f"{escape}\ud800[red]": 1}] * 20
    data = stage.write("rows.jsonl", "\n".join(map(json.dumps, rows)))
    stage.write(f"merged/pytorch_model{escape}.bin", "left out, and said so")
    run = calibrate(stage, capsys, data=f"red={data}")
    shown = run.stdout + run.stderr
    assert "pwned" in shown and "[red]" in shown and "left out" in shown
    assert not set(shown) & set(obeyed)
    written = [stage.folder / "out" / name for name in ("README.md", "featcal_report.json", "featcal.yaml")]
    for path in written:
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if set(line) & set(obeyed)]
        assert not found, path.name
