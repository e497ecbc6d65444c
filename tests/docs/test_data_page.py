"""Every ending and role in the tables of docs/data.md is one that featcal reads, and the page's program runs."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import soundfile
from families import VOCABULARY, save_tokenizer
from PIL import Image
from pyarrow import Table
from pyarrow.csv import WriteOptions, write_csv
from pyarrow.feather import write_feather
from pyarrow.parquet import write_table
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


TABLE = Table.from_pylist(ROWS)
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
WRITERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": lambda file: file.write_text(JSONL),
    ".json": lambda file: file.write_text(json.dumps(ROWS)),
    ".csv": lambda file: write_csv(TABLE, file),
    ".tsv": lambda file: write_csv(TABLE, file, WriteOptions(delimiter="\t")),
    ".parquet": lambda file: write_table(TABLE, file),
    ".arrow": lambda file: write_feather(TABLE, file, compression="uncompressed"),
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


def test_images_and_recordings_of_every_ending_are_read(tmp_path: Path) -> None:
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "images")
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "recordings")
    for kind, model in {
        "images": ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4)),
        "recordings": SOUND,
    }.items():
        folder, endings = tmp_path / kind / "files", read_endings(f"folder of {kind}")
        folder.mkdir()
        for number, ending in enumerate(endings, start=1):
            if kind == "images":
                Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(folder / f"{number}{ending}")
            else:
                soundfile.write(folder / f"{number}{ending}", numpy.sin(numpy.arange(4000) * number / 50), 16000)
        drawn = draw_examples("task", Data(path=str(folder)), model, [tmp_path / kind], count=99, seed=0)
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
