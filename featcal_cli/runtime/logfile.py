"""Write the log of a run as lines of JSON, and turn an unexpected error into a message."""

from __future__ import annotations

import logging
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from featcal_cli import __version__
from featcal_cli.runtime.errors import MOST_WORDS, OURS, BugError, FeatCalError, OutputError, explain_broken_package
from featcal_cli.runtime.files import explain_full, name_reason
from featcal_cli.runtime.process import STARTED, exit_code, peak_resident_bytes
from featcal_cli.runtime.progress import Listener, Progress, heard
from featcal_cli.runtime.sanitise import redact
from featcal_cli.runtime.structured_text import write_json


class Log(Listener):
    """A listener that writes every event to the log and passes it on to another listener."""

    def __init__(self, shown: Listener, file: BinaryIO | None) -> None:
        self._shown, self._file = shown, file
        self.began: float = STARTED

    def write(self, event: str, **facts: Any) -> None:
        """Write one line: the time, the event and its facts, without secrets."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = redact(write_json({"time": at, "event": event, **facts}, ensure_ascii=False, default=str))
        if self._file is not None:
            try:
                self._file.write(f"{line}\n".encode("utf-8", "backslashreplace"))
            except OSError as error:  # a full disk, which is no reason to stop the run
                self._file = None
                self._shown.note(f"the log can no longer be written ({name_reason(error)}); the run goes on without it")

    def end(self, code: int, error: FeatCalError | None = None) -> None:
        """Write the last line, and before it the error if it is an expected one."""
        if error is not None:
            self.write("error", kind=type(error).__name__, what=error.what, where=error.where, fix=error.fix)
        seconds = round(time.monotonic() - self.began, 3)
        self.write("end", exit_code=code, seconds=seconds, peak_rss_bytes=peak_resident_bytes())

    def stage(self, text: str) -> None:
        self.write("stage", text=text)
        self._shown.stage(text)

    def note(self, text: str) -> None:
        self.write("note", text=text)
        self._shown.note(text)

    def waiting(self, text: str) -> None:
        """Write that the run waits for the Hub: the reason and the time until the next try."""
        self.write("waiting", text=text)
        self._shown.note(text)

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        if total and done >= total:
            self.write("uploaded" if sent else "downloaded", repo=name, bytes=total)
        self._shown.transfer(name, done, total, sent=sent)

    def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
        self.write("expected", seconds={name: round(seconds, 1) for name, seconds in stages.items()}, known=is_known)
        self._shown.expect(stages, is_known=is_known)

    def progress(self, progress: Progress) -> None:
        if not (progress.task or progress.module):
            what = "block" if progress.block else progress.unit
            self.write(what, finished=progress.finished, blocks=progress.blocks, name=progress.block)
        if progress.drifts:
            drifts = {
                task: dict(zip(("merged", "calibrated"), pair, strict=True)) for task, pair in progress.drifts.items()
            }
            self.write("drift", block=progress.block, tasks=drifts)
        self._shown.progress(progress)


def explain(error: Exception, log_file: Path | None = None) -> FeatCalError:
    """Return the message for an error of others: a full disk, a broken package, or else a bug."""
    if known := explain_full(error) or explain_broken_package(error):
        return known
    words = " ".join(redact(str(error)).split())[:MOST_WORDS]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(OURS)]
    where = f"{Path(frames[-1].filename).relative_to(OURS.parent)}, line {frames[-1].lineno}" if frames else ""
    with_log = "" if log_file else "run the same command again with --log-file FILE, which keeps the traceback, and "
    what = f"featcal stopped where it should not have: {type(error).__name__}: {words}".removesuffix(": ")
    fix = f"{with_log}report this as an issue, with {log_file or 'that file'}; finished work is kept"
    return BugError(what, where=where, fix=fix)


@contextmanager
def recorded(shown: Listener, file: Path | None) -> Iterator[Log]:
    """Context manager that logs the events of a command, warnings of libraries and how it ended. Raises OutputError for
    a file that cannot be written, and BugError for an unexpected error, whose traceback is then in the file."""
    with _opened(file) as stream:
        log = Log(shown, stream)
        log.write("start", featcal=__version__, python=sys.version.split()[0], command=shlex.join(sys.argv))
        handler = _Warnings(log)
        logging.getLogger().addHandler(handler)
        try:
            with heard(log.waiting):
                yield log
        except FeatCalError as error:
            log.end(error.exit_code, error)
            raise
        except KeyboardInterrupt:
            log.write("interrupted")
            log.end(exit_code())
            raise
        except BrokenPipeError:
            raise  # whoever read our output has gone
        except Exception as error:
            known = explain(error, file)
            if isinstance(known, BugError):
                log.write("bug", traceback=traceback.format_exc())
            log.end(known.exit_code, known)
            raise known from error
        else:
            log.end(0)
        finally:
            logging.getLogger().removeHandler(handler)


@contextmanager
def _opened(file: Path | None) -> Iterator[BinaryIO | None]:
    if file is None:
        yield None
        return
    try:
        stream = file.open("ab", buffering=0)
    except OSError as error:
        what = f"the log cannot be written: {name_reason(error)}"
        fix = "give the path of a file in a folder that exists"
        raise OutputError(what, where=f"--log-file {file}", fix=fix) from None
    try:
        yield stream
    finally:
        with suppress(OSError):  # a full disk: lines that could not be written are tried once more
            stream.close()


class _Warnings(logging.Handler):
    """A logging handler that writes warnings and errors of libraries to the log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write("warning", logger=record.name, text=record.getMessage())
