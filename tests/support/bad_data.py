"""Examples that cannot be read, do not fit, or would fill all memory."""

import os
import struct
import zlib
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from bad_input import LAUGHS, Arguments, Arrange, Case, Stage, case, of_images, options
from safetensors.torch import save_file

arrow: Any = pyarrow  # has no types
ESCAPE = "\x1b[31m"


@case
def tensors(stage: Stage, /, **inputs: torch.Tensor) -> Arguments:
    save_file({name: value.clone() for name, value in inputs.items()}, stage.folder / "inputs.safetensors")
    return {"--data": f"red={stage.folder / 'inputs.safetensors'}"}


def file(name: str, content: str | bytes) -> Arrange:
    return lambda stage: {"--data": f"red={stage.write(name, content)}"}


def empty_folder(stage: Stage) -> Arguments:
    (stage.folder / "empty").mkdir()
    return {"--data": f"red={stage.folder / 'empty'}"}


@case
def hub_dataset(stage: Stage, /, name: str, **files: str | bytes) -> Arguments:
    """A dataset on the Hub; in the names of files, __ is a dot."""
    for path, content in files.items():
        stage.write(f"data/{path.replace('__', '.')}", content)
    return {"--data": f"red={stage.publish(name, 'data', 'dataset')}"}


def no_tokenizer(stage: Stage) -> Arguments | None:
    for path in (stage.folder / "base").glob("tokenizer*"):
        path.unlink()
    return file("rows.jsonl", '{"text": "w2 w3"}\n' * 20)(stage)


@case
def images(stage: Stage, content: bytes, name: str = "0.png") -> Arguments:
    return of_images(stage, stage.write(f"images/{name}", content).parent)


def png(width: int, height: int) -> bytes:
    """An image whose header promises so many pixels, and whose data hold a few of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(pwned) (w) file closefile\nshowpage\n"


def postscript(stage: Stage) -> Arguments:
    """An image that Ghostscript would run, where there is one that tells of it."""
    ghostscript = stage.write("bin/gs", f"#!/bin/sh\ntouch {stage.folder}/pwned\n")
    ghostscript.chmod(0o755)
    stage.patch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    return of_images(stage, stage.write("images/0.png", POSTSCRIPT).parent)


def bombs_in_a_table(stage: Stage) -> Arguments:
    rows = [{"image": {"bytes": png(20_000, 20_000), "path": None}}] * 20
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), stage.folder / "rows.parquet")
    return of_images(stage, stage.folder / "rows.parquet")


def a_pipe_among_images(stage: Stage) -> Arguments:
    rows = stage.write("images/rows.jsonl", '{"image": "pipe.png"}\n' * 20)
    os.mkfifo(rows.parent / "pipe.png")
    return of_images(stage, rows)


CASES: list[Case] = [
    (options(data="red={}/nowhere.jsonl"), ["nowhere.jsonl"]),
    (empty_folder, ["no images, no recordings and no data files"]),
    (file("empty.jsonl", ""), ["no rows"]),
    (file("rows.jsonl", f'{{"text": {"[" * 100_000}\n' * 3), ["nested too deep"]),
    (file("rows.csv", f"{ESCAPE}a,b\n" + "1,2\n" * 20), ["no column holds text"]),
    (tensors(attention_mask=torch.ones(4, 9, dtype=torch.long)), ["cannot run", "input_ids"]),
    (options({"base/tokenizer.json": "[" * 100_000, "rows.txt": "w2 w3\n" * 20}, data="red={}/rows.txt"),
     ["no tokenizer can be loaded"]),
    (images(b"no image"), ["rows cannot be used", "0.png", "example 1"]),
    (images(png(20_000, 20_000)), ["'0.png'", "red", "400000000 pixels", "example 1"]),
    (images(png(2**31 - 1, 2**31 - 1)), ["'0.png'", "red", "pixels"]),
    (images(png(8_000, 8_000)), ["'0.png'", "cannot be decoded"]),
    (postscript, ["'0.png'", "cannot be decoded"]),
    (images(png(9_500, 9_500), f"{ESCAPE}.png"), ["\\x1b[31m.png", "90250000 pixels"]),
    (bombs_in_a_table, ["rows.parquet", "400000000 pixels", "20 of 20 rows", "example 1"]),
    (a_pipe_among_images, ["pipe.png", "no plain file"]),
    (lambda stage: of_images(stage, stage.write("images/rows.jsonl", '{"image": "/etc/nothing.png"}\n' * 20)),
     ["nothing.png"]),
    (lambda stage: {"--data": f"red={stage.publish('data/model', 'red')}"}, ["data/model"]),
    (hub_dataset("data/nothing", README__md="# nothing"), ["no files of a kind"]),
    (hub_dataset("data/laughs", README__md=f"---\n{LAUGHS}\n---\n", a__txt="w2"), ["README.md", "unfolds"]),
    (hub_dataset("data/above", README__md="---\nconfigs: [{config_name: a, data_files: '../../**'}]\n---\n",
     a__jsonl="{}"), ["no file of the dataset", "../../**"]),
]  # fmt: skip
