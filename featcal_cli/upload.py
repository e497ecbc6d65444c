"""Large files on their way to the Hub: how many bytes of them were sent, and by which of its two ways."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

from featcal_cli.download import Watch
from featcal_cli.repo import RepoFile
from featcal_cli.waiting import root_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


class _Meter:
    """Adds up how far the files that are being sent have come, and tells `watch`."""

    def __init__(self, repo_id: str, watch: Watch | None) -> None:
        self._repo_id, self._watch = repo_id, watch
        self._sent: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._lock = Lock()

    def start(self, file: Path) -> None:
        """A file is about to be sent."""
        self._sizes[file] = file.stat().st_size

    def reach(self, file: Path, position: int) -> None:
        """A file was read up to there; less than before where it is sent once more."""
        with self._lock:
            if self._watch and self._sent.get(file) != position:
                self._sent[file] = position
                self._watch(self._repo_id, sum(self._sent.values()), sum(self._sizes.values()))


class _Counted(io.BufferedReader):
    """A file that tells how far it was read."""

    def __init__(self, file: Path, meter: _Meter) -> None:
        super().__init__(io.FileIO(file))
        self._file, self._meter = file, meter
        meter.start(file)

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._meter.reach(self._file, self.tell())
        return content


def counted_additions(
    folder: Path, files: Mapping[str, RepoFile], repo_id: str, watch: Watch | None
) -> list[CommitOperationAdd]:
    """A folder's files as parts of a commit, which tell `watch` how many bytes of them were sent."""
    from huggingface_hub import CommitOperationAdd

    meter = _Meter(repo_id, watch)

    class Addition(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
            # the client wants a progress bar of the large files only, and only over plain HTTP
            file = Path(str(self.path_or_fileobj))
            with _Counted(file, meter) if with_tqdm else file.open("rb") as stream:
                yield stream

    additions: list[CommitOperationAdd] = [Addition(path, str(folder / path)) for path in files]
    for addition in additions:
        addition.upload_info.sha256 = bytes.fromhex(str(files[addition.path_in_repo].sha256))
    return additions


@contextmanager
def xet_told(repo_id: str, watch: Watch | None) -> Iterator[None]:
    """Inside, `watch` is told how many bytes were sent over Xet. The client asks nobody who shall be told of them, so
    its progress bars are exchanged for the time being."""
    from huggingface_hub import utils
    from huggingface_hub.utils import _xet_progress_reporting as reporting

    class Reporter:
        def update_progress(self, whole: Any, _files: object = None) -> None:
            if watch and whole.total_bytes:
                watch(repo_id, min(whole.total_bytes_completed, whole.total_bytes), whole.total_bytes)

        def close(self) -> None:
            """Nothing is held."""

    names = ((reporting, "XetUploadProgressReporter", Reporter), (utils, "are_progress_bars_disabled", lambda: False))
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, ours in names:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(names, before, strict=True):
            setattr(module, name, theirs)


def is_xet_failure(error: Exception) -> bool:
    """Whether an upload over Xet failed, by which some Hubs and proxies take none, and not the Hub itself."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils._runtime import is_xet_available

    cause = root_of(error)
    plain = isinstance(cause, (RuntimeError, ConnectionError, TimeoutError)) and not isinstance(cause, HfHubHTTPError)
    return is_xet_available() and (plain or type(cause).__module__.startswith("hf_xet"))


@contextmanager
def without_xet() -> Iterator[None]:
    """Inside, large files go over plain HTTP."""
    from huggingface_hub import constants

    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
