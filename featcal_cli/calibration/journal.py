"""Journal: finished blocks on disk, one file for each, from which an interrupted run of the same job continues."""

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
from featcal_cli.recipe.schema import AsOption, Calibration, Data, Merge, Recipe
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import flush, name_reason, replace_durably, stamp_files, tell_fix
from featcal_cli.runtime.sanitise import list_some, without_tokens

if TYPE_CHECKING:  # what only looks for finished blocks need not wait for torch
    import torch
    from torch import Tensor

    from featcal_cli.data.examples import TaskExamples
    from featcal_cli.engine.block_runner import BlockRunner

FORMAT = 4
"""Version of the file format; blocks written in another version are not reused."""
BLOCK = re.compile(r"(block-\d{4,}|refining)\.safetensors")
"""Names of a journal's files. The state of refining comes after all blocks, and is dropped with any of them."""
STATE = -1
"""Number that stands for the state of refining in place of a block's."""
LONGEST = 60
"""Characters of a value that a message shows at most."""
TYPED = {key for key, field in Calibration.model_fields.items() if AsOption.of(field)}
"""Calibration settings that are also command-line options."""
COMMIT = re.compile(r"(?<=@)([0-9a-f]{7})[0-9a-f]{33}\b")


def take_fingerprint(
    recipe: Recipe, folders: Iterable[Path], device: torch.device, examples: Mapping[str, TaskExamples]
) -> dict[str, Any]:
    """Return everything that decides the result of a job, except its rounding, which batch sizes, threads and ranks
    decide; where the output goes does not. folders: folders of models on this machine. Only the files directly in each
    folder count, because the output and the journal may lie in subfolders."""
    from featcal_cli.runtime.hardware import describe_environment, read_versions

    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(examples, pool.map(_describe_examples, examples.values()), strict=True))
    environment = {**describe_environment(device), **read_versions()}
    return {
        # blocks are the same with and without what comes after them
        "recipe": recipe.model_dump(
            mode="json",
            exclude={"output": True, "calibration": {"head", "refine"}, "tasks": {"__all__": {"evaluate"}}},
        ),
        "files": stamp_files(folders),
        "environment": {name: value for name, value in environment.items() if name not in ("threads", "ranks")},
        "data": hashes,
    }


class DamagedError(Exception):
    """A file does not hold what was written: it is incomplete, or somebody else changed it."""


class Journal:
    """A journal with one file for each finished block. The file holds the block's new parameters by module path and, as
    metadata, its report, the fingerprint of the job and a checksum of all of it. After a power failure a file is either
    complete, missing, or recognised as damaged."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        *,
        made_with: Mapping[str, Any] | None = None,
        restart: bool = False,
        overwrite: bool = False,
        note: Callable[[str], None] = lambda _: None,
        check_inputs: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the journal in `folder`. made_with: what decides rounding alone, which each block's file tells. restart:
        delete all blocks in it. overwrite: delete blocks of another job. note: called with a message about damaged
        blocks. check_inputs: raises if the inputs no longer match the fingerprint; the block is then not written.
        Raises OutputError, which says what differs, if the journal holds blocks of a job with another fingerprint."""
        self.folder = folder
        self._own: set[int] = set()
        """Blocks that this run has finished itself. It may read them again after running out of memory; they do not
        count as restored."""
        self._restored: set[int] = set()
        self._note, self._check_inputs, self._made_with = note, check_inputs, json.dumps(made_with or {})
        wanted = _complete(fingerprint)
        self._job = json.dumps(wanted, sort_keys=True)
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
        """Number of blocks that were restored from an earlier run."""
        return len(self._restored)

    def write(self, number: int, report: BlockReport, student: BlockRunner) -> None:
        """Write the current parameters of a finished block to the journal."""
        self._check_inputs()
        parameters = {
            name: value.cpu().contiguous()
            for module in report.modules
            for name, value in student.parameters_at_home(report.path_of(module)).items()
        }
        self._file(STATE).unlink(missing_ok=True)  # it was refined from other weights
        self._store(number, report.to_json(), parameters)
        self._own.add(number)

    def write_state(self, text: str, tensors: dict[str, Tensor]) -> None:
        """Write the state of refining, which replaces the one before."""
        self._check_inputs()
        self._store(STATE, text, tensors)

    def read_state(self) -> tuple[str, dict[str, Tensor]] | None:
        """Return what `write_state` wrote last; None if there is nothing, or if it is damaged."""
        try:
            return self._load(STATE)
        except FileNotFoundError:
            return None
        except DamagedError:
            self._note("the state of refining was damaged on the disk: the result is refined from the start")
            return None

    def _store(self, number: int, text: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        file = self._file(number)
        checksum = _hash_block(self._job, number, text, tensors)
        about = {"job": self._job, "made with": self._made_with, "report": text, "checksum": checksum}
        partial = file.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata=about)
            replace_durably(partial, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # it stays, then, and is written over
                partial.unlink(missing_ok=True)
            raise _explain(error, file) from None

    def restore(self, number: int, student: BlockRunner) -> BlockReport | None:
        """Load a block that was finished before into the student and return its report. Returns None if the block is
        missing or damaged; it and all later blocks, which were computed from it, are then deleted and must be computed
        again."""
        try:
            text, parameters = self._load(number)
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
        return BlockReport.from_json(text)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the parameters of a finished block by module path. Raises OutputError if its file is missing or
        damaged."""
        try:
            return self._load(number)[1]
        except (DamagedError, FileNotFoundError):
            self._drop_from(number)
            raise OutputError(
                f"block {number + 1} was damaged on the disk after it was finished",
                where=str(self._file(number)),
                fix="check the disk and run the same command again: it goes on before that block",
            ) from None

    def _load(self, number: int) -> tuple[str, dict[str, Tensor]]:
        """Read the text and the tensors of a file. Raises FileNotFoundError if there is no file, and DamagedError if it
        is damaged."""
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
        return text, parameters

    def _drop_from(self, number: int) -> None:
        """Delete a block and all later ones, starting with the last."""
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
        name = "refining" if number == STATE else f"block-{number:04d}"
        return self.folder / f"{name}.safetensors"


def restore_block(journal: Journal | None, number: int, student: BlockRunner, ranks: Ranks) -> BlockReport | None:
    """Load a block that was finished before from the first rank's journal into the students of all ranks, and return
    its report; None if there is no such block. Only the first rank has a journal."""
    import torch

    report = ranks.broadcast(journal.restore(number, student) if journal else None)
    if report is None or ranks.size == 1:
        return report
    for module in report.modules:
        for name, value in student.parameters_at_home(report.path_of(module)).items():
            restored = value.clone(memory_format=torch.contiguous_format)
            ranks.copy(restored)
            student.replace(student.parameter(name), restored)
    return report


def check_unfinished(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Raise OutputError if the journal in `folder` belongs to another job. The examples, which are not read yet, are
    not compared. Nothing is written."""
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
    """List the files of a journal: of the finished blocks in order, and of refining."""
    return sorted(file for file in folder.glob("*.safetensors") if BLOCK.fullmatch(file.name))


def describe_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the differences between two fingerprints, one clause each: first those in the user's settings, then in
    files, packages and machine, then in examples. Differing examples are listed only if nothing else explains them."""
    clauses = []
    differing = list(_differing_keys(known, wanted))
    is_explained = any(path[0] != "data" for path, *_ in differing)
    for path, was, now in differing:
        match path:
            case ("files", file):
                clauses.append(f"{file} {'is new' if was is None else 'is gone' if now is None else 'has changed'}")
            case ("recipe", "tasks", task):
                clauses.append(f"task {task} is {'new' if was is None else 'gone'}")
            case ("data", task, "for blocks") if not is_explained:
                clauses.append(f"blocks were calibrated on {was} examples of {task}, and are on {now}")
            case ("data", task, *_):
                clauses += [] if is_explained else [f"the examples of {task} differ"]
            case (*_, key):
                of_task = f" of {path[2]}" if path[:2] == ("recipe", "tasks") else ""
                option = f"--{key.replace('_', '-')}" if key in TYPED and not of_task else key
                texts = _show(key, was), _show(key, now)
                if texts[0] == texts[1] and isinstance(was, Mapping) and isinstance(now, Mapping):
                    for inside, old, new in _differing_keys(was, now):
                        part = f"{'.'.join(inside)} of the {option}{of_task}"
                        clauses.append(f"{part} was {_show('', old)}, and is {_show('', new)}")
                else:
                    clauses.append(f"{option}{of_task} was {texts[0]}, and is {texts[1]}")
    return clauses


def _differing_keys(known: Any, wanted: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the path of each key that differs between two fingerprints, with both values. A mapping that users type as
    one value is compared as a whole."""
    is_value = path == ("recipe", "merged") or (len(path) == 4 and path[-1] == "data")
    if is_value or not (isinstance(known, Mapping) and isinstance(wanted, Mapping)):
        if known != wanted:
            yield path, known, wanted
        return
    for key in dict.fromkeys((*wanted, *known)):
        yield from _differing_keys(known.get(key), wanted.get(key), *path, key)


def _show(key: str, value: Any) -> str:
    """Write a value for a message as the user would type it, if it can be typed, and shortened."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping) and key in ("merged", "data"):
        value = Merge(**value).option if key == "merged" else Data.model_construct(**value)
    text = f"{value:g}" if isinstance(value, float) else COMMIT.sub(r"\1", str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}…{text[-LONGEST * 2 // 3 :]}"


def _refuse(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> OutputError:
    """Return the error for a journal with finished blocks of another job, which says what differs and what to do."""
    clauses = list_some(describe_differences(known, wanted), between="; ", write=str)
    return OutputError(
        f"an unfinished run of another job is here: {clauses}",
        where=str(folder),
        fix="put that back as it was to go on with it, or add --restart to drop it and begin anew",
    )


def _explain(error: Exception, target: Path) -> OutputError:
    """Return the error for a file or folder that cannot be written."""
    fix = f"{tell_fix(error, 'choose another --output')}, and run the same command again"
    return OutputError(f"cannot write: {name_reason(error)}", where=str(target), fix=fix)


def _complete(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint as it would be read back from a file: without access tokens, and with the file format's
    version."""
    known: dict[str, Any] = json.loads(without_tokens(json.dumps({"format": FORMAT, **fingerprint})))
    return known


def _find_other(folder: Path, wanted: dict[str, Any], unknown: str | None = None) -> dict[str, Any] | None:
    """Return the fingerprint of a job other than `wanted` whose blocks lie in `folder`; None if there is none. unknown:
    a key that is not compared."""
    known = [job for block in list_blocks(folder) if (job := _read_job(block))]
    known = [{**job, unknown: wanted[unknown]} if unknown else job for job in known]
    return next((job for job in known if job != wanted), None)


def _read_job(block: Path) -> dict[str, Any] | None:
    """Read the fingerprint from a block's file; None if it has none or cannot be read."""
    try:
        with safe_open(block, framework="np") as stored:
            job = json.loads((stored.metadata() or {})["job"])
    except (SafetensorError, OSError, ValueError, LookupError):
        return None
    return job if isinstance(job, dict) else None


def _hash_block(job: str, number: int, report: str, parameters: Mapping[str, Tensor]) -> str:
    """Compute a checksum of everything in a finished block's file and of the block's position in the job."""
    digest = sha256(json.dumps([job, number, report]).encode())
    _hash_tensors(digest, parameters)
    return digest.hexdigest()


def _describe_examples(examples: TaskExamples) -> dict[str, Any]:
    """Hash a task's examples one by one, without padding, so that their batches do not matter; and count those on which
    blocks are calibrated."""
    from featcal_cli.data.batches import count_examples, cut_padding, is_mask, take_examples

    digest = sha256()
    for batches in ([*examples.fitted, *examples.aside], examples.selection, examples.held_out):
        digest.update(str(sum(map(count_examples, batches))).encode())
        for batch in batches:
            for number in range(count_examples(batch)):
                tensors = cut_padding(take_examples(batch, [number])).items()
                # an example without padding may have a mask that says so, or none
                _hash_tensors(digest, {name: x for name, x in tensors if not (is_mask(name, x) and x.all())})
    return {"rows": digest.hexdigest(), "for blocks": sum(map(count_examples, examples.fitted))}


def _hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors with their names, dtypes and shapes to a hash."""
    import torch

    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
