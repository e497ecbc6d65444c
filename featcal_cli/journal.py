"""Finished blocks on disk, beside the output: nothing computed is lost, and the same command goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from featcal_cli.disk import name_reason
from featcal_cli.errors import OutputError
from featcal_cli.examples import TaskExamples
from featcal_cli.machine import describe_environment, read_versions
from featcal_cli.ranks import Ranks
from featcal_cli.recipe import Recipe
from featcal_cli.report import BlockReport
from featcal_cli.walker import Walker

SHOWN, LONGEST = 3, 60
"""Differences between two jobs that a message names, and letters of a value in it."""


class Journal:
    """One file a finished block (its new parameters by module path, its report), under a fingerprint of the job."""

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], *, restart: bool = False, overwrite: bool = False
    ) -> None:
        """Open the journal in `folder`; what is in it is dropped with `restart`, and what another job left
        with `overwrite`.

        Raises OutputError where it holds finished blocks of a job with another fingerprint, and says what differs.
        """
        self.folder = folder
        self.restored = 0
        """Blocks that were taken over from an earlier run."""
        stamp = folder / "job.json"
        wanted = json.loads(json.dumps(fingerprint))
        with self._writing(stamp) as partial:
            folder.mkdir(parents=True, exist_ok=True)
            known = _read_json(stamp)
            old = [*folder.glob("block-*.safetensors"), *folder.glob("*.kept.json")]
            if old and known is not None and known != wanted and not (restart or overwrite):
                differences = list(_find_differences(known, wanted))
                told = "; ".join(differences[:SHOWN]) + (
                    f"; and {more} more" if (more := len(differences) - SHOWN) > 0 else ""
                )
                raise OutputError(
                    f"an unfinished run of another job is here: {told}",
                    where=str(folder.parent),
                    fix="give the same arguments again to go on with it, or --overwrite to drop it and begin anew",
                )
            if restart or known != wanted:
                for file in old:
                    file.unlink()
            partial.write_text(json.dumps(wanted, sort_keys=True, indent=1), encoding="utf-8")

    def keep(self, name: str, value: Any) -> None:
        """Keep what was found before the first block, as JSON."""
        with self._writing(self.folder / f"{name}.kept.json") as partial:
            partial.write_text(json.dumps(value), encoding="utf-8")

    def recall(self, name: str) -> Any:
        """What was kept under the name, by this run or an earlier one of the same job; None for nothing."""
        return _read_json(self.folder / f"{name}.kept.json")

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
            with suppress(OSError):  # it stays, then, and is written over
                partial.unlink()
            raise OutputError(
                f"cannot write: {name_reason(error)}",
                where=str(target),
                fix="free disk space and run the same command again",
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
    recipe: Recipe, folders: Iterable[Path], device: torch.device, examples: Mapping[str, TaskExamples]
) -> dict[str, Any]:
    """Everything that decides the result of a job; where it goes does not.

    folders: of models on this machine, which no commit pins; of each only what lies in it at once, as the output, and
    this journal, may lie below.
    """
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(_hash_examples, examples.values())
        data = {
            task: {"examples": digest, "batch size": found.batch_size}
            for (task, found), digest in zip(examples.items(), hashes, strict=True)
        }
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"output"}),
        "files": stamp_files(folders),
        "environment": {**describe_environment(device), **read_versions()},
        "data": data,
    }


def stamp_files(paths: Iterable[Path]) -> dict[str, str]:
    """Size and time of every file, and of what lies in a folder at once."""
    files = {file for path in paths for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()}
    return {str(file): _stamp(file) for file in sorted(files)}


def _hash_examples(found: TaskExamples) -> str:
    """Of every tensor that a model is given."""
    digest = sha256()
    for batches in (found.fitted, found.selection, found.held_out):
        for batch in batches:
            for name, tensor in sorted(batch.items()):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _find_differences(known: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """What is not the same in two nested dicts, one sentence each."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*known, *wanted)):
            inside = f"{place}.{key}" if place else str(key)
            yield from _find_differences(known.get(key), wanted.get(key), inside)
    elif known != wanted:
        was, now = ("not there" if each is None else _shorten(each) for each in (known, wanted))
        yield f"{place} was {was}, and is {now}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _read_json(file: Path) -> Any:
    """None where there is no such file, or something else than us cut it short."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
