"""The files beside the weights of an output: the note of the job that made it, report and card, and the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from featcal_cli import __version__
from featcal_cli.calibration.journal import describe_differences
from featcal_cli.hub.repo import Repo, open_repo
from featcal_cli.lineage.questions import Finding
from featcal_cli.recipe.merge_methods import METHODS
from featcal_cli.recipe.schema import Draft, Merge, Recipe
from featcal_cli.reporting.model_card import write_card
from featcal_cli.reporting.report import CARD, RECIPE, REPORT, Report
from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.files import stamp_files, write_requested
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import list_some, plain, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml, split_front_matter
from featcal_cli.workflows.workspace import NOTE, WROTE, Workspace

ENDINGS = (".yaml", ".yml")
_DID = "the job that calibrated"


class Note(NamedTuple):
    card: dict[str, Any]
    """The content of its card."""
    push: bool
    """It is to be pushed yet."""
    files: tuple[str, ...] = ()
    """Its files, by their paths in it: what else lies there is not ours."""
    run: str = ""
    """The job by its fingerprint: its finished blocks are of no use any more."""


class FinishedOutput:
    """The output of a job, once it is there."""

    def __init__(self, draft: Draft, workspace: Workspace) -> None:
        self._draft, self._workspace, self._target = draft, workspace, workspace.target

    def read(self) -> Note | None:
        """The note of this very job; None where another one made the output or changed it, where its local files have
        changed since, and for a broken note."""
        try:
            note = json.loads((self._target / NOTE).read_text(encoding="utf-8"))
            is_ours = note["job"] == self._job and _hash(self._read_report()) in note["reports"]
            if not is_ours or not note["files"].items() <= self._files.items():
                return None
            return Note(dict(note["card"]), bool(note["push"]), tuple(map(str, note[WROTE])), str(note["run"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, cut short, of another version
            return None

    def describe_other_job(self) -> str:
        """Describe the difference between this job and the one that made the output; empty where it is not known."""
        try:
            note = json.loads((self._target / NOTE).read_text(encoding="utf-8"))
            known = {"recipe": json.loads(note["job"]), "files": dict(note["files"])}
            clauses = describe_differences(known, {"recipe": json.loads(self._job), "files": self._files})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, cut short, of another version
            return ""
        return list_some(clauses, between="; ", write=str)

    def write_note(self, reports: Sequence[str], note: Note) -> str:
        """The text of the note of this job; by its report, one of `reports`, one sees later if it is still its own."""
        about = {"job": self._job, "files": self._files, "reports": list(map(_hash, reports))}
        said = {**about, "card": note.card, "push": note.push, WROTE: note.files, "run": note.run}
        return without_tokens(json.dumps(said))

    def write_card(self, report: Report, repo_id: str | None, about: Mapping[str, Any]) -> str:
        """The text of the model card; repo_id: where the output is pushed to, if it is."""
        return write_card(report, name=self._target.name, target=repo_id, **about)

    def read_report(self) -> Report:
        return Report.from_json(self._read_report())

    def check_current(self) -> None:
        """Raise OutputError where the merged repo has another commit now than the output was made from."""
        if isinstance(self._draft.merged, Merge):
            return
        for source in self.read_report().sources:
            if source.role != "merged" or source.commit is None or f"{source.name}@" in self._draft.merged:
                continue
            if (now := open_repo(source.name).commit) != source.commit:
                raise OutputError(
                    f"this was made from {source.name} at {source.commit[:7]}, which is at {str(now)[:7]} by now",
                    where=str(self._target),
                    fix="give --overwrite to calibrate what is there now",
                )

    def update_report_and_card(self, before: Report, after: Report, repo_id: str | None) -> None:
        """Let report and card of the output say what is known now, and the card name the repo that it is pushed to.
        Raises OutputError."""
        if (note := self.read()) is None:
            return
        if after is not before:
            old, new = before.to_json(), after.to_json()
            self._workspace.rewrite(NOTE, self.write_note([old, new], note))
            self._workspace.rewrite(REPORT, new)
        text = self.write_card(after, repo_id, note.card)
        if (self._target / CARD).read_text(encoding="utf-8") != text:
            self._workspace.rewrite(CARD, text)

    def mark_pushed(self, report: Report, *, due: bool) -> None:
        """Let the note say that the output was pushed, or that it is `due` to be yet. Raises OutputError."""
        note = self.read()
        if note is not None and note.push != due:
            self._workspace.rewrite(NOTE, self.write_note([report.to_json()], note._replace(push=due)))

    def remember_files(self) -> None:
        """Look at what the job names of this machine, as it is when the run begins."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, str]:
        files: dict[str, str] = json.loads(without_tokens(json.dumps(stamp_files(self._draft.local_paths))))
        return files

    @cached_property
    def _job(self) -> str:
        """The job without its output, which may be pushed to another place than was planned."""
        return without_tokens(json.dumps(self._draft.model_dump(mode="json", exclude={"output"}), sort_keys=True))

    def _read_report(self) -> str:
        return (self._target / REPORT).read_text(encoding="utf-8")


def is_calibrated(repo: Repo) -> bool:
    """Whether featcal made the model in this repo or folder, by what lies beside its weights. Raises HubError."""
    if REPORT in repo.files:
        return True
    metadata, _, _ = split_front_matter(repo.read_card())
    tags = (metadata or {}).get("tags")
    first, _, _ = (repo.read_text(RECIPE) or "").partition("\n")
    return (isinstance(tags, list) and "featcal" in tags) or (
        first.startswith("# Written by featcal") and _DID in first
    )


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that `as_draft` reads back; without `output`: running a job again need not publish it.

    The same recipe gives the same text: no date, and in the comments no path of this machine.
    """
    made = f"# Written by featcal {__version__}: {_DID} {_name_merged(recipe)},"
    again = "# every Hub repo at its commit. Run it again: featcal calibrate -r featcal.yaml -o NEW"
    return without_tokens(f"{made}\n{again}\n{_dump(recipe)}")


def save_recipe(file: Path, recipe: Recipe, findings: Sequence[Finding], *, overwrite: bool) -> None:
    """Write what a dry run found to a file that `featcal calibrate -r` takes. Raises OutputError."""
    check_save(file, overwrite=overwrite)
    lines = [
        f"# Written by featcal {__version__}, by a dry run: the job that would calibrate {_name_merged(recipe)},",
        "# every Hub repo at its commit. Run it: featcal calibrate -r with this file. Where its parts were read:",
    ]
    lines += [f"#   {plain(finding.role)}: {plain(finding.source)}" for finding in findings]
    content = "\n".join(lines) + "\n" + _dump(recipe, output=recipe.output.push_to is not None)
    write_requested(file, without_tokens(content), where=f"--save {file}")


def check_save(file: Path, *, overwrite: bool, dry_run: bool = True) -> None:
    where = f"--save {file}"
    if not dry_run:
        fix = "add --dry-run; a run itself leaves its recipe in the output folder, as featcal.yaml"
        raise RecipeError("--save works only with --dry-run", where=where, fix=fix)
    if file.suffix not in ENDINGS:
        raise RecipeError(f"{file.name} is no .yaml file", where=where, fix=f"name it {file.stem}.yaml")
    try:
        if file.is_symlink() or file.exists():
            if not file.is_file():
                raise OutputError("this is there, and is no file", where=where, fix="choose another --save")
            if not overwrite:
                raise OutputError("the file exists", where=where, fix="give --overwrite, or another --save")
        if not file.resolve().parent.is_dir():
            raise OutputError(f"there is no folder {file.parent}", where=where, fix="create it, or choose another")
    except (OSError, ValueError) as error:
        raise OutputError(f"this cannot be a file: {error}", where=where[:80], fix="choose another --save") from None


def _dump(recipe: Recipe, *, output: bool = False) -> str:
    content = recipe.model_dump(exclude_none=True, exclude=None if output else {"output"})
    for task in content["tasks"].values():
        if not task["data"]["columns"]:
            del task["data"]["columns"]
    return dump_yaml(content, width=120)


def _name_merged(recipe: Recipe) -> str:
    """The merged model, in words where it has no name that others know."""
    if isinstance(recipe.merged, Merge):
        return f"the {METHODS[recipe.merged.method].title} of {len(recipe.tasks)} experts"
    if existing_path(recipe.merged) or "+" in recipe.merged:
        return "a merged model"
    return plain(recipe.merged.partition("@")[0])
