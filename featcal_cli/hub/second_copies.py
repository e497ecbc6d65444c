"""Decide which files of a model's folder are copied to the output. Files that repeat its tensors in another format or
precision are left out, as they would become outdated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from featcal_cli.hub.weight_files import SAFETENSORS, find_second_copies, read_header, weight_files
from featcal_cli.runtime.files import visible_files


class Files(NamedTuple):
    """Paths of the files in a model's folder, in two lists; hidden files are in neither."""

    kept: list[str]
    left_out: list[str]


def divide_files(folder: Path) -> Files:
    """Divide the files of the model in `folder` into those that the output keeps and those that repeat its tensors.
    Files in subfolders, which belong to other modules, are judged by their paths alone. Raises HubError for an index
    that cannot be read, and ValueError or OSError for weights that cannot be read."""
    names = visible_files(folder)
    weights = {file.name for file in weight_files(folder)}
    left_out = set(find_second_copies(names)) - weights
    if SAFETENSORS[0] in weights:
        left_out |= {SAFETENSORS[1]} & set(names)  # some programs believe an index, whatever lies beside it
    tensors = {name for file in weights for name in read_header(folder / file)}
    for name in set(names) - weights:
        if "/" not in name and name.endswith(".safetensors") and _shares_tensors(folder / name, tensors):
            left_out.add(name)
    return Files([name for name in names if name not in left_out], sorted(left_out))


def _shares_tensors(file: Path, tensors: set[str]) -> bool:
    """Whether a safetensors file beside the model's own has a tensor of one of its names; some programs read every
    file there."""
    try:
        return not tensors.isdisjoint(read_header(file))
    except (OSError, ValueError):
        return False  # it is no such file, whatever it is


def describe_files(files: Files) -> Iterator[str]:
    """Yield sentences about files of the output that the user should know about."""
    for name in files.left_out:
        yield f"left out of the output: {name} (it would not belong to the calibrated weights)"
