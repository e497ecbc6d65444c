"""What docs/data.md says of formats, roles and functions is so in the code, and its program runs."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from transformers import Wav2Vec2Config, Wav2Vec2Model

from featcal_cli.data.examples import draw_examples
from featcal_cli.data.file_formats import AUDIO_FILES, FORMATS, IMAGE_FILES, TABLE_FILES
from featcal_cli.recipe.schema import ROLES, Data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def read_endings(row: str) -> set[str]:
    """The endings in the table's rows that begin so."""
    return {found for line in PAGE.splitlines() if line.startswith(f"| {row}") for found in re.findall(r"\.\w+", line)}


def test_every_ending_that_is_read_is_in_the_tables() -> None:
    assert read_endings("folder of images") == set(IMAGE_FILES)
    assert read_endings("folder of recordings") == set(AUDIO_FILES)
    assert read_endings("folder of data files") == read_endings("one file") - {".txt"} == set(TABLE_FILES)
    assert read_endings(".") == set(FORMATS) - {*IMAGE_FILES, *AUDIO_FILES}


def test_every_role_is_in_the_table() -> None:
    (table,) = re.findall(r"\| role \|.*?\n\n", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", table) == list(ROLES)


def test_functions_are_where_the_page_looks_for_them() -> None:
    places = re.findall(r"`(\w+)`(?: and `(\w+)`)? of\s+`data/(\w+)\.py`", PAGE)
    named = [(name, module) for *names, module in places for name in names if name]
    assert len(named) >= 8
    for name, module in named:
        found = import_module(f"featcal_cli.data.{module}")
        methods = [name in vars(each) for each in vars(found).values() if isinstance(each, type)]
        assert hasattr(found, name) or any(methods), f"{module}.{name}"
    for file in re.findall(r"`(test_\w+\.py|bad_\w+\.py)`", PAGE):
        assert list(Path(__file__).parents[1].rglob(file))


def test_the_program_writes_inputs_that_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/data.md", "exec"), {})
    model = Wav2Vec2Model(Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_stride=(320,), conv_kernel=(400,)))
    drawn = draw_examples("tones", Data(path="tones.safetensors"), model, [], count=256, seed=0)
    assert (len(drawn.fitted), len(drawn.selection), len(drawn.held_out)) == (256, 32, 32)
    batch = drawn.cut(2).fitted[0]
    assert len(model(**batch).last_hidden_state) == 2
    assert batch["attention_mask"].sum(1).tolist() == [4010, 4020]
