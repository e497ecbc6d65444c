"""Everything that decides the result of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal_cli.data.examples import TaskExamples
from featcal_cli.recipe.schema import Draft, Recipe
from featcal_cli.runtime.files import stamp_files
from featcal_cli.runtime.hardware import describe_environment, read_versions
from featcal_cli.runtime.references import existing_path


def take_fingerprint(
    recipe: Recipe, folders: Iterable[Path], device: torch.device, examples: Mapping[str, TaskExamples]
) -> dict[str, Any]:
    """Everything that decides the result of a job; where it goes does not. folders: of models on this machine; of each
    only what lies in it at once, as the output, and the journal, may lie below."""
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(examples, pool.map(_hash_examples, examples.values()), strict=True))
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"output"}),
        "files": stamp_files(folders),
        "environment": {**describe_environment(device), **read_versions()},
        "data": {task: {"examples": hashes[task], "batch size": examples[task].batch_size} for task in examples},
    }


def _hash_examples(examples: TaskExamples) -> str:
    """A hash of every tensor that a model is given."""
    digest = sha256()
    for batch in (*examples.fitted, *examples.selection, *examples.held_out):
        hash_tensors(digest, batch)
    return digest.hexdigest()


def hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors, with their names, dtypes and shapes, to a hash."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def name_local_files(draft: Draft) -> dict[Path, str]:
    """The data files on this machine that a job names itself, each with whose it is."""
    files: dict[Path, str] = {}
    for task, spec in draft.tasks.items():
        path = existing_path(spec.data.path) if spec.data and spec.data.path else None
        if path is not None:
            inside = path.iterdir() if path.is_dir() else [path]
            files |= {file: f"the data of {task}" for file in inside if file.is_file()}
    return files
