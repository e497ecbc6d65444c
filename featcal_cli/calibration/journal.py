"""Finished blocks on disk, one file each, from which an interrupted run of the same job goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from featcal_cli.calibration.results import BlockReport
from featcal_cli.recipe.schema import AsOption, Calibration, Data, Draft, Merge, Recipe
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import flush, name_reason, replace_durably, stamp_files, tell_fix
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import list_some, without_tokens

if TYPE_CHECKING:  # what only looks for finished blocks need not wait for torch
    import torch
    from torch import Tensor

    from featcal_cli.data.examples import TaskExamples
    from featcal_cli.engine.block_runner import BlockRunner

FORMAT = 3
"""The version of the files; those of another one are not taken over."""
BLOCK = re.compile(r"block-\d{4,}\.safetensors")
LONGEST = 60
"""Letters of a value in a message."""
TYPED = {key for key, field in Calibration.model_fields.items() if AsOption.of(field)}
"""Settings of the method that are options."""
COMMIT = re.compile(r"(?<=@)([0-9a-f]{7})[0-9a-f]{33}\b")


def take_fingerprint(
    recipe: Recipe, folders: Iterable[Path], device: torch.device, examples: Mapping[str, TaskExamples]
) -> dict[str, Any]:
    """Everything that decides the result of a job; where it goes does not. folders: of models on this machine; of each
    only what lies in it at once, as the output, and the journal, may lie below."""
    from featcal_cli.runtime.hardware import describe_environment, read_versions

    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(examples, pool.map(_hash_examples, examples.values()), strict=True))
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"output"}),
        "files": stamp_files(folders),
        "environment": {**describe_environment(device), **read_versions()},
        "data": {task: {"examples": hashes[task], "batch size": examples[task].batch_size} for task in examples},
    }


def name_local_files(draft: Draft) -> dict[Path, str]:
    """The data files on this machine that a job names itself, each with whose it is."""
    files: dict[Path, str] = {}
    for task, spec in draft.tasks.items():
        path = existing_path(spec.data.path) if spec.data and spec.data.path else None
        if path is not None:
            inside = path.iterdir() if path.is_dir() else [path]
            files |= {file: f"the data of {task}" for file in inside if file.is_file()}
    return files


class DamagedError(Exception):
    """A file is not what was written: torn, cut short, or changed by somebody else."""


class Journal:
    """One file for each finished block: its new parameters by module path, and as metadata its report, what decides the
    result of the job, and a checksum of all of it. After a loss of power a file is whole, not there, or known not to be
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
        other = _find_other(folder, wanted)
        if other is not None and not (restart or overwrite):
            raise _refuse(folder.parent, other, wanted)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent, folder.parent.parent):
                flush(parent)
        except OSError as error:
            raise _explain(error, folder) from None
        if restart or other is not None:
            self._drop_from(0)

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
        text, file = report.to_json(), self._file(number)
        about = {"job": self._job, "report": text, "checksum": _hash_block(self._job, number, text, parameters)}
        partial = file.with_suffix(".partial")
        try:
            save_file(parameters, partial, metadata=about)
            replace_durably(partial, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # it stays, then, and is written over
                partial.unlink(missing_ok=True)
            raise _explain(error, file) from None
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
        """Read a finished block. Raises FileNotFoundError where there is none, and DamagedError."""
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
        try:
            for file in reversed(files):
                file.unlink()
            if files:
                flush(self.folder)
        except OSError as error:
            raise _explain(error, self.folder) from None

    def _file(self, number: int) -> Path:
        return self.folder / f"block-{number:04d}.safetensors"


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


def check_unfinished(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Raise OutputError where the journal in `folder` is of another job, as far as that shows without the examples,
    which are not read yet. Nothing is written."""
    wanted = _complete({**fingerprint, "data": {}})
    if (other := _find_other(folder, wanted, "data")) is not None:
        raise _refuse(folder.parent, other, wanted)


def drop_journal(folder: Path) -> None:
    """Delete a journal, and nothing else that lies in its folder."""
    with suppress(OSError):  # what remains is of no use, and does no harm
        for file in (*list_blocks(folder), *folder.glob("*.partial")):
            file.unlink(missing_ok=True)
        folder.rmdir()


def list_blocks(folder: Path) -> list[Path]:
    """The finished blocks, the first one first."""
    return sorted(file for file in folder.glob("block-*.safetensors") if BLOCK.fullmatch(file.name))


def describe_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the differences between two fingerprints, one clause each: what the user typed, then files, packages and
    machine, then examples; these only where nothing before explains that they differ."""
    clauses = []
    differing = list(_differing_keys(known, wanted))
    is_explained = any(path[0] != "data" for path, *_ in differing)
    for path, was, now in differing:
        match path:
            case ("files", file):
                clauses.append(f"{file} {'is new' if was is None else 'is gone' if now is None else 'has changed'}")
            case ("recipe", "tasks", task):
                clauses.append(f"task {task} is {'new' if was is None else 'gone'}")
            case ("data", task, "batch size"):
                clauses.append(f"--batch-size of {task} was {was}, and is {now}")
            case ("data", task, *_):
                clauses += [] if is_explained else [f"the examples of {task} differ"]
            case (*_, key):
                of_task = f" of {path[2]}" if path[:2] == ("recipe", "tasks") else ""
                option = f"--{key.replace('_', '-')}" if key in TYPED and not of_task else key
                clauses.append(f"{option}{of_task} was {_show(key, was)}, and is {_show(key, now)}")
    return clauses


def _differing_keys(known: Any, wanted: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The keys of two fingerprints that differ, by their paths, down to what is written as one value."""
    is_value = path == ("recipe", "merged") or (len(path) == 4 and path[-1] in ("data", "evaluate"))
    if is_value or not (isinstance(known, Mapping) and isinstance(wanted, Mapping)):
        if known != wanted:
            yield path, known, wanted
        return
    for key in dict.fromkeys((*wanted, *known)):
        yield from _differing_keys(known.get(key), wanted.get(key), *path, key)


def _show(key: str, value: Any) -> str:
    """A value as it is typed, where there is a way to type it, and short."""
    if value is None:
        return "not given"
    if isinstance(value, Mapping) and key in ("merged", "data"):
        value = Merge(**value).option if key == "merged" else Data.model_construct(**value)
    text = f"{value:g}" if isinstance(value, float) else COMMIT.sub(r"\1", str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}…{text[-LONGEST * 2 // 3 :]}"


def _refuse(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> OutputError:
    """The error for finished blocks of another job: what differs, and what to do."""
    clauses = list_some(describe_differences(known, wanted), between="; ", write=str)
    return OutputError(
        f"an unfinished run of another job is here: {clauses}",
        where=str(folder),
        fix="put that back as it was to go on with it, or add --restart to drop it and begin anew",
    )


def _explain(error: Exception, target: Path) -> OutputError:
    """The error for what cannot be written."""
    fix = f"{tell_fix(error, 'choose another --output')}, and run the same command again"
    return OutputError(f"cannot write: {name_reason(error)}", where=str(target), fix=fix)


def _complete(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as it is read back from a file: without tokens, and with the version of the files."""
    known: dict[str, Any] = json.loads(without_tokens(json.dumps({"format": FORMAT, **fingerprint})))
    return known


def _write_job(fingerprint: Mapping[str, Any]) -> str:
    return json.dumps(fingerprint, sort_keys=True)


def _find_other(folder: Path, wanted: dict[str, Any], unknown: str | None = None) -> dict[str, Any] | None:
    """The fingerprint of another job than `wanted` whose blocks lie here; None where there are none. unknown: a key
    that is not compared."""
    known = [job for block in list_blocks(folder) if (job := _read_job(block))]
    known = [{**job, unknown: wanted[unknown]} if unknown else job for job in known]
    return next((job for job in known if job != wanted), None)


def _read_job(block: Path) -> dict[str, Any] | None:
    """The fingerprint in a block's file; None where it has none, or cannot be read."""
    try:
        with safe_open(block, framework="np") as stored:
            job = json.loads((stored.metadata() or {})["job"])
    except (SafetensorError, OSError, ValueError, LookupError):
        return None
    return job if isinstance(job, dict) else None


def _hash_text(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _hash_block(job: str, number: int, report: str, parameters: Mapping[str, Tensor]) -> str:
    """A checksum of everything that a finished block's file says, and of its place in the job."""
    digest = sha256(json.dumps([job, number, report]).encode())
    _hash_tensors(digest, parameters)
    return digest.hexdigest()


def _hash_examples(examples: TaskExamples) -> str:
    """A hash of every tensor that a model is given."""
    digest = sha256()
    for batch in (*examples.fitted, *examples.selection, *examples.held_out):
        _hash_tensors(digest, batch)
    return digest.hexdigest()


def _hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors, with their names, dtypes and shapes, to a hash."""
    import torch

    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
