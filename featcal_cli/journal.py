"""Finished blocks on disk, beside the output: nothing computed is lost, and the same command goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from featcal_cli.errors import OutputError
from featcal_cli.hub import Snapshot
from featcal_cli.machine import describe_environment
from featcal_cli.ranks import Ranks
from featcal_cli.recipe import Recipe
from featcal_cli.report import BlockReport
from featcal_cli.walker import Walker


class Journal:
    """One file a finished block (its new parameters by module path, its report), under a fingerprint of the job."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        """Open the journal in `folder`; blocks of a job with another fingerprint are dropped."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            wanted = json.dumps(fingerprint, sort_keys=True, indent=1)
            stamp = folder / "job.json"
            if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
                for old in (*folder.glob("block-*.safetensors"), *folder.glob("*.kept.json")):
                    old.unlink()
                stamp.write_text(wanted, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write here: {error.strerror}", where=str(folder.parent), fix="choose another --output"
            ) from None
        self.restored = 0
        """Blocks that were taken over from an earlier run."""

    def keep(self, name: str, value: Any) -> None:
        """Keep what was found before the first block, as JSON."""
        with self._writing(self.folder / f"{name}.kept.json") as partial:
            partial.write_text(json.dumps(value), encoding="utf-8")

    def recall(self, name: str) -> Any:
        """What was kept under the name, by this run or an earlier one of the same job; None for nothing."""
        try:
            return json.loads((self.folder / f"{name}.kept.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # there is none, or something else than us cut it short: it is found again
            return None

    def write(self, number: int, report: BlockReport, student: Walker) -> None:
        """Keep the parameters that a finished block has now."""
        places = [f"{report.name}.{module.name}" for module in report.modules]
        parameters = {
            f"{place}.{name}": value.cpu().contiguous()
            for place in places
            for name, value in student.parameters_at_home(place).items()
        }
        with self._writing(self._file(number)) as partial:
            save_file(parameters, partial, metadata={"report": report.to_json()})

    def restore(self, number: int, student: Walker) -> BlockReport | None:
        """Load a block that was finished before into the student and return its report; None when it was not."""
        file = self._file(number)
        if not file.is_file():
            return None
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError:  # cut short by something else than us: the block is computed again
            return None
        with opened as stored:
            report = BlockReport.from_json(stored.metadata()["report"])
            for name in stored.keys():  # noqa: SIM118
                path, _, key = name.rpartition(".")
                student.replace(getattr(student.module(path), key), stored.get_tensor(name))
        self.restored += 1
        return report

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The parameters of a finished block by module path."""
        with safe_open(self._file(number), framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118

    @contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        """Where to write what becomes `target` when it is whole. Raises OutputError."""
        partial = target.with_suffix(".partial")
        try:
            yield partial
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"cannot write: {error}", where=str(target), fix="free disk space and run the same command again"
            ) from None

    def _file(self, number: int) -> Path:
        return self.folder / f"block-{number:04d}.safetensors"


def restore_block(journal: Journal | None, number: int, student: Walker, ranks: Ranks) -> BlockReport | None:
    """A block that was finished before, from the journal of the first rank, which alone has one, loaded into the
    students of all ranks; None where there is no such block."""
    report = ranks.broadcast(journal.restore(number, student) if journal else None)
    if report is None or ranks.size == 1:
        return report
    for module in report.modules:
        place = f"{report.name}.{module.name}"
        for name, value in student.parameters_at_home(place).items():
            restored = value.clone(memory_format=torch.contiguous_format)
            ranks.copy(restored)
            student.replace(student.module(place).get_parameter(name), restored)
    return report


def take_fingerprint(
    recipe: Recipe, snapshots: Mapping[str, Snapshot], device: torch.device, batch_sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Everything that decides the result of a job; where it goes does not.

    `batch_sizes`: examples in a batch, by task.
    """
    data = [Path(task.data.path) for task in recipe.tasks.values() if task.data.path]
    # of a model's folder only what lies in it at once: the output, and this journal, may lie below
    files = {file for found in snapshots.values() if found.commit is None for file in found.folder.iterdir()}
    files |= {file for path in data for file in (path.rglob("*") if path.is_dir() else [path])}
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"output"}),
        "files": {str(file): _stamp(file) for file in sorted(files) if file.is_file()},
        "environment": describe_environment(device),
        "batch_sizes": dict(batch_sizes),
    }


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
