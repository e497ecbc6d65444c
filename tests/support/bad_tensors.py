"""Safetensors files that are cut short, or whose headers lie."""

from __future__ import annotations

import json
from typing import Any

from bad_input import Arguments, Arrange, Case, Stage, case, options


def written(header: object, data: bytes = bytes(16)) -> bytes:
    """A file with this header (text or bytes as they are, else as JSON), and these bytes after it."""
    text = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else dumped(header)
    return len(text).to_bytes(8, "little") + text + data


def dumped(header: object) -> bytes:
    return json.dumps(header).encode()


def entry(shape: object = (4,), start: object = 0, stop: object = 16, dtype: object = "F32") -> dict[str, Any]:
    """The entry of one tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = written({"a": entry()})
"""A good file, if not one of a model."""
LIES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "cut short"),
    "a few bytes": (b"abc", "cut short"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "a header that is longer than the file": ((2**40).to_bytes(8, "little") + b"{}", "longer than the file"),
    "a header without end": (b"\xff" * 100, "longer than the file"),
    "no JSON": (written("{"), "its header is invalid"),
    "no UTF-8": (written(b'{"\xff": 1}'), "its header is invalid"),
    "a list": (written([entry()]), "its header is invalid"),
    "nested": (written("[" * 100_000), "its header is invalid"),
    "nested mappings": (written('{"a":' * 20_000), "its header is invalid"),
    "metadata that are no texts": (written({"__metadata__": {"a": 1}, "a": entry()}), "its header is invalid"),
    "half a character": (written('{"\\ud800": 1}'), "its header is invalid"),
    "a tensor that is a number": (written({"a": 7}), "an invalid shape or position"),
    "a tensor without a place": (written({"a": {"dtype": "F32", "shape": [4]}}), "an invalid shape or position"),
    "a negative offset": (written({"a": entry(start=-16, stop=0)}), "an invalid shape or position"),
    "an end before the start": (written({"a": entry(start=16, stop=0)}), "shape and dtype"),
    "offsets with a point": (written({"a": entry(start=0.0)}), "an invalid shape or position"),
    "no number": (written('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}'), "invalid"),
    "infinity": (
        written('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1e999]}}'),
        "an invalid shape or position",
    ),
    "a negative shape": (written({"a": entry(shape=[-2, -2])}), "an invalid shape or position"),
    "true as a length": (written({"a": entry(shape=[True, 4])}), "an invalid shape or position"),
    "more lengths than anything has": (written({"a": entry(shape=[4] + [1] * 1000)}), "an invalid shape or position"),
    "lengths beyond all numbers": (written({"a": entry(shape=[10**4000] * 9)}), "an invalid shape or position"),
    "an absurd shape": (written({"a": entry(shape=[2**40, 2**40])}), "shape and dtype"),
    "a shape of fewer bytes": (written({"a": entry(shape=[2])}), "shape and dtype"),
    "an unknown dtype": (written({"a": entry(dtype="F33")}), "unknown dtype"),
    "a dtype that is none": (written({"a": entry(dtype=["F32"])}), "an invalid shape or position"),
    "tensors over each other": (written({"a": entry(), "b": entry(start=8, stop=24)}, bytes(24)), "lies over"),
    "the same bytes twice": (written({"a": entry(), "b": entry()}), "lies over"),
    "a gap": (written({"a": entry(), "b": entry(start=20, stop=36)}, bytes(36)), "does not follow"),
    "bytes of no tensor": (written({"a": entry()}, bytes(17)), "more than its tensors"),
    "bytes that are not there": (written({"a": entry()}, bytes(15)), "cut short"),
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
    (cut_short, ["red", "model.safetensors", "cut short"]),
    *((weights(content), ["model.safetensors", reason]) for content, reason in LIES.values()),
    (weights(GOOD), ["expert red", "calls itself", "lacks the tensor"]),
    (weights(written({"a\x1b[31m": entry(stop=8)})), ["model.safetensors", "a\\x1b[31m"]),
    *((options({"red.safetensors": content}), ["red.safetensors"]) for content, _ in list(LIES.values())[::4]),
    *((on_the_hub(content), ["lies/red", reason]) for content, reason in list(LIES.values())[2::6]),
]
