"""An output that is in its place, and the note in it that says which job made it: the same job may push it, or
evaluate it, then or later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from featcal_cli.belongings import NOTE, WROTE
from featcal_cli.card import write_card
from featcal_cli.disk import replace_durably
from featcal_cli.errors import OutputError
from featcal_cli.recipe import Draft, Merge
from featcal_cli.repo import open_repo
from featcal_cli.report import CARD, REPORT, Report
from featcal_cli.stamps import stamp_files
from featcal_cli.workplace import Workplace


class Note(NamedTuple):
    """What an output says of how it was made."""

    card: dict[str, Any]
    """What its card is made of."""
    push: bool
    """It is to be pushed yet."""
    files: tuple[str, ...] = ()
    """Its files, by their paths in it: what else lies there is not ours."""
    run: str = ""
    """The job by its fingerprint: its finished blocks are of no use any more."""


class Finished:
    """The output of a job, once it is there."""

    def __init__(self, draft: Draft, place: Workplace) -> None:
        self._draft, self._place = draft, place
        self._target = place.target

    def read(self) -> Note | None:
        """The note of this very job; None where another one made the output or changed it, where its local files have
        changed since, and for a broken note."""
        try:
            note = json.loads((self._target / NOTE).read_text(encoding="utf-8"))
            written = sha256((self._target / REPORT).read_bytes()).hexdigest()
            same = (
                note["job"] == self._key and written in note["reports"] and note["files"].items() <= self._files.items()
            )
            about = (tuple(map(str, note[WROTE])), str(note["run"]))
            return Note(dict(note["card"]), bool(note["push"]), *about) if same else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, cut short, of another version
            return None

    def write_note(self, reports: Sequence[str], note: Note) -> str:
        """The text of the note of this job; by its report, one of `reports`, one sees later if it is still its own."""
        known = [sha256(report.encode()).hexdigest() for report in reports]
        about = {"job": self._key, "files": self._files, "reports": known, "card": note.card, "push": note.push}
        return json.dumps({**about, WROTE: note.files, "run": note.run})

    def write_card(self, report: Report, repo_id: str | None, about: Mapping[str, Any]) -> str:
        """The text of the model card; repo_id: where the output is pushed to, if it is."""
        return write_card(report, name=self._target.name, target=repo_id, **about)

    def check_current(self) -> None:
        """Raise OutputError where the merged repo has another commit now than the output was made from."""
        if isinstance(self._draft.merged, Merge):
            return
        for source in Report.from_json((self._target / REPORT).read_text(encoding="utf-8")).sources:
            if source.role != "merged" or source.commit is None or f"{source.name}@" in self._draft.merged:
                continue
            if (now := open_repo(source.name).commit) != source.commit:
                raise OutputError(
                    f"this was made from {source.name} at {source.commit[:7]}, which is at {str(now)[:7]} by now",
                    where=str(self._target),
                    fix="give --overwrite to calibrate what is there now",
                )

    def tell(self, was: Report, now: Report, repo_id: str | None) -> None:
        """Let report and card of the output say what is known now, and the card name the repo that it is pushed to.
        Raises OutputError."""
        note = self.read()
        if note is None:
            return
        before, after = was.to_json(), now.to_json()
        if before != after:
            self._rewrite(NOTE, self.write_note([before, after], note))
            self._rewrite(REPORT, after)
        text = self.write_card(now, repo_id, note.card)
        if (self._target / CARD).read_text(encoding="utf-8") != text:
            self._rewrite(CARD, text)

    def settle(self, report: Report, *, push: bool) -> None:
        """Let the note say whether a push is to follow yet. Raises OutputError."""
        note = self.read()
        if note is not None and note.push != push:
            self._rewrite(NOTE, self.write_note([report.to_json()], note._replace(push=push)))

    def _rewrite(self, name: str, text: str) -> None:
        """Let a file of the output say something else, whole at any time."""
        draft = self._place.folder / name
        with self._place.writing():
            draft.write_text(text, encoding="utf-8")
            replace_durably(draft, self._target / name)

    @cached_property
    def _key(self) -> str:
        """The job without its output, which may be pushed to another place than was planned."""
        return json.dumps(self._draft.model_dump(mode="json", exclude={"output"}), sort_keys=True)

    def remember_files(self) -> None:
        """Look at what the job names of this machine, as it is when the run begins."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, str]:
        return stamp_files(self._draft.local_paths)
