"""Finished blocks on disk: one file each, which says of which job it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from featcal_cli.calibration.results import BlockReport
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import flush, name_reason, replace_durably, tell_fix
from featcal_cli.runtime.sanitise import list_some, without_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from featcal_cli.engine.block_runner import BlockRunner

FORMAT = 3
"""The version of the files; those of another one are not taken over."""
BLOCK = re.compile(r"block-\d{4,}\.safetensors")


class DamagedError(Exception):
    """A file is not what was written: torn, cut short, or changed by somebody else."""


class Journal:
    """One file for each finished block: its new parameters by module path, and as metadata its report, what decides the
    result of the job, and a checksum of all of it: after a loss of power it is whole, not there, or known not to be
    whole."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        *,
        restart: bool = False,
        overwrite: bool = False,
        note: Callable[[str], None] = lambda _: None,
        check_inputs: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the journal in `folder`; what is in it is dropped with `restart`, and what another job left with
        `overwrite`. note: is told what was damaged. check_inputs: raises where what blocks are computed from is no
        longer what the fingerprint says; no block is kept then. Raises OutputError where it holds blocks of a job with
        another fingerprint, and says what differs."""
        self.folder = folder
        self._own: set[int] = set()
        """Blocks that this run has finished; after running out of memory it reads them again."""
        self._restored: set[int] = set()
        self._note, self._check_inputs = note, check_inputs
        wanted = _complete(fingerprint)
        self._job = _write_job(wanted)
        self.job = _hash_text(self._job)
        with self._explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent, folder.parent.parent):
                flush(parent)
            other = _find_other(folder, wanted)
            if restart or (overwrite and other is not None):
                for file in list_blocks(folder):
                    file.unlink()
                flush(folder)
            elif other is not None:
                raise _refuse(folder.parent, other, wanted)

    @property
    def restored(self) -> int:
        """How many blocks were taken over from an earlier run."""
        return len(self._restored)

    def write(self, number: int, report: BlockReport, student: BlockRunner) -> None:
        """Keep the parameters that a finished block has now."""
        from safetensors.torch import save_file

        self._check_inputs()
        parameters = {
            name: value.cpu().contiguous()
            for module in report.modules
            for name, value in student.parameters_at_home(f"{report.name}.{module.name}").items()
        }
        text = report.to_json()
        about = {"job": self._job, "report": text, "checksum": _hash_block(self._job, number, text, parameters)}
        with self._writing(self._file(number)) as partial:
            save_file(parameters, partial, metadata=about)
        self._own.add(number)

    def restore(self, number: int, student: BlockRunner) -> BlockReport | None:
        """Load a block that was finished before into the student and return its report; None when it was not, or is
        damaged: then it and all after it, which were computed from it, are computed again."""
        try:
            report, parameters = self._read(number)
        except (FileNotFoundError, DamagedError) as error:
            self._drop_from(number)
            if isinstance(error, DamagedError):
                what = f"block {number + 1} of an earlier run was damaged on the disk"
                self._note(f"{what}: computed again from there on")
            return None
        for name, value in parameters.items():
            student.replace(student.parameter(name), value)
        if number not in self._own:
            self._restored.add(number)
        return report

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The parameters of a finished block by module path. Raises OutputError where the disk has lost them."""
        try:
            return self._read(number)[1]
        except (DamagedError, FileNotFoundError):
            self._drop_from(number)
            raise OutputError(
                f"block {number + 1} was damaged on the disk after it was finished",
                where=str(self._file(number)),
                fix="check the disk and run the same command again: it goes on before that block",
            ) from None

    def _read(self, number: int) -> tuple[BlockReport, dict[str, Tensor]]:
        """Raises FileNotFoundError where there is none, and DamagedError."""
        file = self._file(number)
        if not file.is_file():
            raise FileNotFoundError(file)
        try:
            with safe_open(file, framework="pt") as stored:
                about = stored.metadata() or {}
                parameters = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise DamagedError from error
        text = about.get("report", "")
        if about.get("checksum") != _hash_block(self._job, number, text, parameters):
            raise DamagedError
        return BlockReport.from_json(text), parameters

    def _drop_from(self, number: int) -> None:
        """Delete a block and all after it, the last one first."""
        self._own = {kept for kept in self._own if kept < number}
        self._restored = {kept for kept in self._restored if kept < number}
        files = [file for file in list_blocks(self.folder) if file.name >= self._file(number).name]
        with self._explained(self.folder):
            for file in reversed(files):
                file.unlink()
            if files:
                flush(self.folder)

    @contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        """Yield a temporary path that becomes `target` once it is whole and on the disk. Raises OutputError."""
        partial = target.with_suffix(".partial")
        with self._explained(target):
            try:
                yield partial
                replace_durably(partial, target)
            except BaseException:
                with suppress(OSError):  # it stays, then, and is written over
                    partial.unlink(missing_ok=True)
                raise

    @contextmanager
    def _explained(self, target: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"cannot write: {name_reason(error)}",
                where=str(target),
                fix=f"{tell_fix(error, 'choose another --output')}, and run the same command again",
            ) from None

    def _file(self, number: int) -> Path:
        return self.folder / f"block-{number:04d}.safetensors"


def check_unfinished(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Raise OutputError where the journal in `folder` is of another job, as far as that shows without the examples,
    which are not read yet. Nothing is written."""
    wanted = _complete({**fingerprint, "data": {}})
    if (other := _find_other(folder, wanted, "data")) is not None:
        raise _refuse(folder.parent, other, wanted)


def restore_block(journal: Journal | None, number: int, student: BlockRunner, ranks: Ranks) -> BlockReport | None:
    """A block that was finished before, from the journal of the first rank, which alone has one, loaded into the
    students of all ranks; None where there is no such block."""
    import torch

    report = ranks.broadcast(journal.restore(number, student) if journal else None)
    if report is None or ranks.size == 1:
        return report
    for module in report.modules:
        for name, value in student.parameters_at_home(f"{report.name}.{module.name}").items():
            restored = value.clone(memory_format=torch.contiguous_format)
            ranks.copy(restored)
            student.replace(student.parameter(name), restored)
    return report


def _refuse(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> OutputError:
    """The error for finished blocks of another job: what differs, and what to type."""
    from featcal_cli.calibration.job_differences import describe_differences, describe_way_back

    drop = "add --restart to drop it and begin anew"
    if known.get("format") != wanted["format"]:
        what = "an unfinished run of another version of featcal is here, and cannot be gone on with"
        return OutputError(what, where=str(folder), fix=drop)
    clauses = list_some(describe_differences(known, wanted), between="; ", write=str)
    what = f"an unfinished run of another job is here: {clauses}"
    options = describe_way_back(known, wanted)
    again = f"give {options} to go on with it" if options else "put that back as it was to go on with it"
    return OutputError(what, where=str(folder), fix=f"{again}, or {drop}")


def _complete(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as it is read back from a file: without tokens, and with the version of the files."""
    known: dict[str, Any] = json.loads(without_tokens(json.dumps({"format": FORMAT, **fingerprint})))
    return known


def _write_job(fingerprint: Mapping[str, Any]) -> str:
    return json.dumps(fingerprint, sort_keys=True)


def _hash_text(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _find_other(folder: Path, wanted: dict[str, Any], unknown: str | None = None) -> dict[str, Any] | None:
    """The fingerprint of another job than `wanted` whose blocks lie here, empty where they are of another version; None
    where there are none. unknown: a key that is not compared."""
    found = [job for block in list_blocks(folder) if (job := _read_job(block)) is not None]
    known = [{**job, unknown: wanted[unknown]} if unknown else job for job in found if job]
    if found and not known:
        return {}
    return next((job for job in known if job != wanted), None)


def _read_job(block: Path) -> dict[str, Any] | None:
    """The fingerprint in a block's file, empty where it has none of this kind; None for a file that cannot be read."""
    try:
        with safe_open(block, framework="np") as stored:
            job = json.loads((stored.metadata() or {}).get("job", "{}"))
    except (SafetensorError, OSError):
        return None
    except ValueError:
        return {}
    return job if isinstance(job, dict) else {}


def _hash_block(job: str, number: int, report: str, parameters: Mapping[str, Tensor]) -> str:
    """A checksum of everything that a finished block's file says, and of its place in the job."""
    from featcal_cli.calibration.fingerprint import hash_tensors

    digest = sha256(json.dumps([job, number, report]).encode())
    hash_tensors(digest, parameters)
    return digest.hexdigest()


def drop_journal(folder: Path, job: str | None = None) -> None:
    """Delete a journal, and nothing else that lies in its folder; where the hash of a `job` is given, only if it is of
    that job."""
    known = [found for block in list_blocks(folder) if (found := _read_job(block))] if job is not None else []
    if any(_hash_text(_write_job(found)) != job for found in known):
        return
    with suppress(OSError):  # what remains is of no use, and does no harm
        for file in (*list_blocks(folder), *folder.glob("*.partial")):
            file.unlink(missing_ok=True)
        folder.rmdir()


def list_blocks(folder: Path) -> list[Path]:
    """The finished blocks, the first one first."""
    return sorted(file for file in folder.glob("block-*.safetensors") if BLOCK.fullmatch(file.name))
