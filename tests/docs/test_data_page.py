"""Endings and roles in the tables of docs/data.md are those that featcal reads, and the page's program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from transformers import Wav2Vec2Config, Wav2Vec2Model

from featcal_cli.data.examples import draw_examples
from featcal_cli.data.files import AUDIO_FILES, IMAGE_FILES
from featcal_cli.recipe.data_formats import FORMATS, TABLE_FILES
from featcal_cli.recipe.schema import Data, Role

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SOUND = Wav2Vec2Model(Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_stride=(320,), conv_kernel=(400,)))


def read_endings(row: str) -> list[str]:
    """The endings in the table's row that begins so."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return list(dict.fromkeys(re.findall(r"\.[a-z]\w+", line)))


def test_endings_in_the_table_are_those_that_are_read() -> None:
    """tests/unit/data/ reads files of them."""
    read = {".csv", ".tsv", ".jsonl", ".json", ".parquet", ".arrow"}
    assert set(read_endings("folder of images")) == set(IMAGE_FILES)
    assert set(read_endings("folder of recordings")) <= set(AUDIO_FILES)
    assert set(read_endings("folder of data files")) == read <= set(TABLE_FILES)
    assert set(read_endings("one file")) == {*read, ".txt"} <= set(FORMATS)


def test_every_role_is_in_the_table() -> None:
    (table,) = re.findall(r"\| role \|.*?\n\n", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", table) == list(get_args(Role))


def test_the_program_writes_inputs_that_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/data.md", "exec"), {})
    drawn = draw_examples("tones", Data(path="tones.safetensors"), SOUND, [], count=256, seed=0)
    assert (len(drawn.fitted), len(drawn.selection), len(drawn.held_out)) == (256, 32, 32)
    batch = drawn.cut(2).fitted[0]
    assert len(SOUND(**batch).last_hidden_state) == 2
    assert batch["attention_mask"].sum(1).tolist() == [4010, 4020]
