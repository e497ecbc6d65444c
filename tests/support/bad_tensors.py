"""Safetensors files that are cut short, or whose headers lie."""

from __future__ import annotations

import json
from typing import Any

from bad_input import Arguments, Arrange, Case, Stage, case, options


def written(header: object, data: bytes = bytes(16)) -> bytes:
    """A file with this header (text or bytes as they are, else as JSON), and these bytes after it."""
    given = header if isinstance(header, bytes | str) else json.dumps(header)
    text = given.encode() if isinstance(given, str) else given
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: object = (4,), start: object = 0, stop: object = 16, dtype: object = "F32") -> dict[str, Any]:
    """The entry of one tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = written({"a": entry()})
"""A good file, if not one of a model."""
WHOLE = "not a whole safetensors file"
LIES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", WHOLE),
    "a few bytes": (b"abc", WHOLE),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "a header that is longer than the file": ((2**40).to_bytes(8, "little") + b"{}", WHOLE),
    "no JSON": (written("{"), WHOLE),
    "nested": (written("[" * 100_000), WHOLE),
    "a list": (written([entry()]), WHOLE),
    "half a character": (written('{"\\ud800": 1}'), WHOLE),
    "a tensor that is a number": (written({"a": 7}), WHOLE),
    "an absurd shape": (written({"a": entry(shape=[2**40, 2**40])}), WHOLE),
    "the same bytes twice": (written({"a": entry(), "b": entry()}), WHOLE),
    "bytes of no tensor": (written({"a": entry()}, bytes(17)), WHOLE),
    "bytes that are not there": (written({"a": entry()}, bytes(15)), WHOLE),
}
"""A file, and what is said of it."""


def weights(content: bytes) -> Arrange:
    """The expert's file."""
    return options({"red/model.safetensors": content})


@case
def on_the_hub(stage: Stage, content: bytes) -> Arguments:
    """The expert's file, on the Hub."""
    stage.write("red/model.safetensors", content)
    return {"--expert": f"red={stage.publish('lies/red', 'red')}"}


def cut_short(stage: Stage) -> None:
    file = stage.folder / "red" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


CASES: list[Case] = [
    (cut_short, ["red", "model.safetensors", WHOLE]),
    *((weights(content), ["model.safetensors", reason]) for content, reason in LIES.values()),
    (weights(GOOD), ["expert red lacks the tensor"]),
    (weights(written({"a\x1b[31m": entry(stop=8)})), ["model.safetensors"]),
    *((options({"red.safetensors": content}), ["red.safetensors"]) for content, _ in list(LIES.values())[::4]),
    *((on_the_hub(LIES[name][0]), ["lies/red", WHOLE]) for name in ("nested", "a few bytes")),
]
