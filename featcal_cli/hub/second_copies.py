"""Decide which files of a model's folder are copied to the output. Files that repeat its tensors in another format,
precision or place are left out, as they would become outdated; headers and values tell where names and sizes do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import safe_open

from featcal_cli.hub.weight_files import SAFETENSORS, Entry, find_second_copies, read_header, weight_files
from featcal_cli.runtime.files import visible_files
from featcal_cli.runtime.structured_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64
"""Number of leading rows that are compared between two tensors."""


class Files(NamedTuple):
    """Paths of the files in a model's folder, in two lists: kept and left out; hidden files are in neither."""

    kept: list[str]
    left_out: list[str]
    shadowing: list[str]
    """Files, also in `kept`, that repeat the model's tensors but lie in a folder that modules.json lists."""


def divide_files(folder: Path) -> Files:
    """Divide the files of the model in `folder` into those that the output keeps and those that repeat its tensors; the
    headers of safetensors files decide. Raises HubError for an index that cannot be read, and ValueError or OSError for
    weights that cannot be read."""
    names = visible_files(folder)
    weights = {file.name for file in weight_files(folder)}
    left_out = set(find_second_copies(names)) - weights
    tensors = {name: (folder / file, entry) for file in weights for name, entry in read_header(folder / file).items()}
    modules, shadowing = _list_modules(folder), list[str]()
    # an index beside a single file stays if it says of every tensor that it lies there
    is_true = _read_json(folder / SAFETENSORS[1], "weight_map") == dict.fromkeys(tensors, SAFETENSORS[0])
    if SAFETENSORS[0] in weights and SAFETENSORS[1] in names and not is_true:
        left_out.add(SAFETENSORS[1])
    for name in names:
        if not name.endswith(".safetensors") or name in weights | left_out or not _repeats(folder / name, tensors):
            continue
        if any(PurePosixPath(name).is_relative_to(module) for module in modules):
            shadowing.append(name)
        else:
            left_out.add(name)
    return Files([name for name in names if name not in left_out], sorted(left_out), shadowing)


def _list_modules(folder: Path) -> list[str]:
    """List the folders of a sentence-transformers model's modules, without the model's own folder."""
    modules = _read_json(folder / "modules.json")
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [path for path in paths if isinstance(path, str) and path.strip("./")]


def _read_json(file: Path, key: str = "") -> Any:
    """Return the content of a JSON file, or of one key in it; None if it cannot be read."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return content[key] if key else content
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _repeats(file: Path, tensors: Mapping[str, tuple[Path, Entry]]) -> bool:
    """Whether a safetensors file repeats the model's tensors. Beside the model's own files, one shared tensor name is
    enough, as some programs read all files there. In a subfolder, a separate component may have the same names: there
    every tensor must match one of the model's in name (with or without its first part), shape and value."""
    try:
        header = read_header(file)
    except (OSError, ValueError):
        return False  # it is no such file, whatever it is
    if file.parent in {own.parent for own, _ in tensors.values()} and not header.keys().isdisjoint(tensors):
        return True
    known = {name.partition(".")[2]: name for name in tensors} | {name: name for name in tensors}
    for name, entry in header.items():
        own = known.get(name) or known.get(name.partition(".")[2])
        if own is None or entry.shape != tensors[own][1].shape or not _are_equal(file, name, tensors[own][0], own):
            return False
    return bool(header)


def _are_equal(file: Path, name: str, own: Path, own_name: str) -> bool:
    """Whether two tensors of equal shape begin with the same values, within the precision of the coarser dtype."""
    import torch

    one, other = _read_beginning(file, name), _read_beginning(own, own_name)
    if not (one.is_floating_point() and other.is_floating_point()):
        return torch.equal(one, other)
    limits = max((torch.finfo(part.dtype) for part in (one, other)), key=lambda limits: limits.eps)
    tolerance = 0.0 if one.dtype == other.dtype else limits.eps
    one, other = (part.to(getattr(torch, limits.dtype)).double() for part in (one, other))
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance and limits.tiny, equal_nan=True)


def _read_beginning(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        part: Tensor = opened.get_slice(name)[:ROWS] if opened.get_slice(name).get_shape() else opened.get_tensor(name)
        return part


def describe_files(files: Files) -> Iterator[str]:
    """Yield sentences about files of the output that the user should know about."""
    for name in files.left_out:
        index = name == SAFETENSORS[1]
        why = "it does not list the tensors of model.safetensors" if index else "other weights than the calibrated ones"
        yield f"left out of the output: {name} ({why})"
    for name in files.shadowing:
        what = f"{name} holds the merged model's tensors again, and is left unchanged, as modules.json lists its folder"
        yield f"{what}: sentence-transformers loads these, not the calibrated ones"
