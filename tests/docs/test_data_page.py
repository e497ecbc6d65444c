"""Every ending and role in the tables of docs/data.md is one that featcal reads, and the page's program runs."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
from families import VOCABULARY, save_tokenizer
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
)  # fmt: skip

from featcal_cli.data.examples import draw_examples
from featcal_cli.recipe.schema import ROLES, Data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SOUND = Wav2Vec2Model(Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_stride=(320,), conv_kernel=(400,)))
ROWS = [{"text": f"w{number} w{number + 1}", "kind": number % 2} for number in range(2, 42)]


def read_endings(row: str) -> list[str]:
    """The endings in the table's row that begins so."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return list(dict.fromkeys(re.findall(r"\.[a-z]\w+", line)))


def write_table(file: Path, delimiter: str) -> None:
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, list(ROWS[0]), delimiter=delimiter)
        table.writeheader()
        table.writerows(ROWS)


def write_arrow(file: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
WRITERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": lambda file: file.write_text(JSONL),
    ".json": lambda file: file.write_text(json.dumps(ROWS)),
    ".csv": lambda file: write_table(file, ","),
    ".tsv": lambda file: write_table(file, "\t"),
    ".parquet": lambda file: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file),
    ".arrow": write_arrow,
    ".txt": lambda file: file.write_text("".join(f"{row['text']}\n" for row in ROWS)),
    ".jsonl.gz": lambda file: file.write_bytes(gzip.compress(JSONL.encode())),
}


def test_every_ending_of_a_file_has_a_case() -> None:
    assert {*read_endings("one file"), ".jsonl.gz"} == set(WRITERS)


@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_of_file_is_read(ending: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "expert")
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    file = tmp_path / "rows" / "deep" / f"train{ending}"
    WRITERS[ending](file)
    model = BertModel(BertConfig(**SIZES, vocab_size=VOCABULARY))
    for source in (file, tmp_path / "rows") if ending in read_endings("folder of data files") else (file,):
        drawn = draw_examples("task", Data(path=str(source)), model, [tmp_path / "expert"], count=8, seed=0)
        assert len(drawn.fitted) == 8


def test_images_of_every_ending_are_read(tmp_path: Path) -> None:
    endings = read_endings("folder of images")
    (tmp_path / "images").mkdir()
    for number, ending in enumerate(endings):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / "images" / f"{number}{ending}")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "expert")
    model = ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4))
    drawn = draw_examples("task", Data(path=str(tmp_path / "images")), model, [tmp_path / "expert"], count=99, seed=0)
    assert len(drawn.fitted) == len(endings)


def test_recordings_of_every_ending_are_read(tmp_path: Path) -> None:
    endings = read_endings("folder of recordings")
    (tmp_path / "sounds").mkdir()
    for number, ending in enumerate(endings):
        wave = numpy.sin(numpy.arange(4000) * (number + 1) / 50)
        soundfile.write(tmp_path / "sounds" / f"{number}{ending}", wave, 16000)
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "expert")
    drawn = draw_examples("task", Data(path=str(tmp_path / "sounds")), SOUND, [tmp_path / "expert"], count=99, seed=0)
    assert len(drawn.fitted) == len(endings)


def test_every_role_is_in_the_table() -> None:
    (table,) = re.findall(r"\| role \|.*?\n\n", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", table) == list(ROLES)


def test_the_program_writes_inputs_that_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/data.md", "exec"), {})
    drawn = draw_examples("tones", Data(path="tones.safetensors"), SOUND, [], count=256, seed=0)
    assert (len(drawn.fitted), len(drawn.selection), len(drawn.held_out)) == (256, 32, 32)
    batch = drawn.cut(2).fitted[0]
    assert len(SOUND(**batch).last_hidden_state) == 2
    assert batch["attention_mask"].sum(1).tolist() == [4010, 4020]
