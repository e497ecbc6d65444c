"""The inputs of a job: its models and data by name and commit, their sources, and recipe files that hold them. Nothing
here needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from featcal_cli import __version__
from featcal_cli.data.files import find_source
from featcal_cli.data.rows import check_split, explaining_hub, naming_task
from featcal_cli.hub.model_files import divide_files, find_second_copies, weight_files
from featcal_cli.hub.repo import Opener, Repo
from featcal_cli.hub.snapshot import Origin
from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.lineage.search import ASSUMED, FROM_USER, Finding, named_by, tell_source
from featcal_cli.recipe.schema import Data, Merge, Recipe
from featcal_cli.reporting.report import CARD, MERGED_CARD, PICTURE, RECIPE, REPORT
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, OutputError, RecipeError
from featcal_cli.runtime.files import check_links, resolve_path, write_requested
from featcal_cli.runtime.sanitise import list_some, plain, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml
from featcal_cli.workflows.session import EXPERT, Session


@dataclass(frozen=True)
class Inputs:
    """A complete job, without model weights."""

    recipe: Recipe
    findings: Sequence[Finding]
    """Names of merged, base, and each task's expert and data, with the source of each."""
    origins: Mapping[str, Origin]
    """Origins by role: merged (unless it is built in this run), base, expert TASK, and further models."""

    @property
    def merged_card(self) -> str | None:
        """The text of the merged model's card; None if it has none. Raises HubError."""
        return self.origins["merged"].repo.find_card() if "merged" in self.origins else None

    @property
    def card_in_folder(self) -> bytes:
        """The bytes of the merged model's card if it lies in a folder; else none."""
        folder = self.origins["merged"].repo.folder if self.merged_card else None
        return (folder / CARD).read_bytes() if folder else b""

    @property
    def commits(self) -> list[str | None]:
        """The commit of each finding; None if it is not a Hub repo."""
        data = {f"data {task}": spec.data.revision for task, spec in self.recipe.tasks.items()}
        known = data | {role: origin.repo.commit for role, origin in self.origins.items()}
        return [known.get(finding.role) for finding in self.findings]


def find_inputs(session: Session, others: Mapping[str, str] | None = None, *, copied: bool = False) -> Inputs:
    """Complete the recipe from what repos state, and pin every repo to a commit, on the first rank for all. others:
    further models by role; copied: merged's files will be copied. Raises OpenQuestionsError, LineageError, HubError and
    DataError."""
    session.stage("finding models")
    ranks, further = session.ranks, dict(others or {})
    recipe, findings = _complete(session) if ranks.is_first else (Recipe.model_construct(), [])
    if not ranks.is_first:
        recipe, findings, further = ranks.broadcast((recipe, findings, further))
    origins = _find_origins(session, recipe, findings)
    origins |= {role: session.find_origin(name) for role, name in further.items()}
    if copied:
        copies = ["merged"] if "merged" in origins else ["base", next(role for role in origins if role != "base")]
        for repo in (repo for role in copies for repo in origins[role].repos()):
            with session.look():
                check_copyable(repo)
    recipe = pin(recipe, origins, session)
    if ranks.is_first:
        ranks.broadcast((recipe, findings, {role: origins[role].pinned for role in further}))
    return Inputs(recipe, findings, origins)


def _find_origins(session: Session, recipe: Recipe, findings: Sequence[Finding]) -> dict[str, Origin]:
    """Find the origin of every model of a job, by role. Raises HubError, which says who named the model unless it was
    the user."""
    sources = {finding.role: finding.source for finding in findings}
    origins = {}
    for role, name in name_models(recipe).items():
        with named_by(name, sources.get(role, FROM_USER), "or name the base: --base REPO" if role == "base" else ""):
            origins[role] = session.find_origin(name)
    return origins


def _complete(session: Session) -> tuple[Recipe, Sequence[Finding]]:
    """Return the complete recipe and where its parts were found, which is noted at once, but for a dry run."""
    noted: set[Finding] = set()

    def note(findings: Sequence[Finding]) -> None:
        """Note the findings that are new, in one sentence for each source."""
        if session.options.dry_run:
            return
        named: dict[str, list[str]] = {}
        for finding in findings:
            if finding.source != FROM_USER and finding not in noted:
                noted.add(finding)
                named.setdefault(tell_source(finding), []).append(f"{finding.role} {finding.value}")
        session.note(*(f"{source}: {'; '.join(names)}" for source, names in named.items()))

    lineage = find_lineage(session.draft, session.open_repo, note)
    note(lineage.findings)
    given = [f"{finding.role} {finding.value}" for finding in lineage.findings if finding.source == FROM_USER]
    if given and not session.options.dry_run:
        session.listener.note(f"given: {list_some(given, between='; ')}")
    session.note(*lineage.notes)
    return lineage.recipe, lineage.findings


def name_models(recipe: Recipe) -> dict[str, str]:
    """Return the name of every model that a job reads, as the user would type it, by its role."""
    merged = {} if isinstance(recipe.merged, Merge) else {"merged": recipe.merged}
    return merged | {"base": recipe.base} | {f"{EXPERT}{task}": spec.expert for task, spec in recipe.tasks.items()}


def pin(recipe: Recipe, origins: Mapping[str, Origin], session: Session) -> Recipe:
    """Return the recipe with every model and dataset pinned to its current commit."""
    tasks = {}
    for task, spec in recipe.tasks.items():
        data = pin_data(task, spec.data, session.open_repo, session.note)
        tasks[task] = spec.model_copy(update={"expert": origins[f"{EXPERT}{task}"].pinned, "data": data})
    merged = recipe.merged if isinstance(recipe.merged, Merge) else origins["merged"].pinned
    return recipe.model_copy(update={"merged": merged, "base": origins["base"].pinned, "tasks": tasks})


def pin_data(task: str, data: Data, open_repo: Opener, note: Callable[[str], None]) -> Data:
    """Pin a source to the commit that is read of its Hub dataset, or of the Hub's parquet copy of it; any other source
    is returned as it is. Raises HubError and DataError."""
    if data.dataset is None or data.is_self_written:
        return data
    repo = open_repo(f"{data.dataset}@{data.revision}" if data.revision else data.dataset, "dataset")
    with naming_task(task, data), explaining_hub(data):
        return find_source(repo, data, open_repo, lambda text: note(f"{task}: {text}"), task).pin(data)


def check_evaluable(session: Session, recipe: Recipe) -> None:
    """Raise FeatCalError if no task says how to evaluate it, or if what that needs is missing, such as its split."""
    if session.ranks.size > 1:
        raise RecipeError("evaluation is made for one process", where="featcal evaluate", fix="leave --gpus out")
    known = {task: spec.evaluate for task, spec in recipe.tasks.items() if spec.evaluate is not None}
    if not known:
        fix = "add to the tasks of the recipe: evaluate: {split: test}, or of models that write text evaluate: "
        fix += "{metric: perplexity}; `featcal recipes recipe.schema.json` describes all its keys"
        raise RecipeError("no task says how it is evaluated", where="tasks", fix=fix)
    if len({how.protocol == "texts" for how in known.values()}) > 1:
        what = "perplexity and other figures have no common mean"
        raise RecipeError(what, where="tasks", fix="give metric: perplexity to all tasks or to none")
    if any(how.protocol == "lm-eval" for how in known.values()):
        from featcal_cli.evaluation.lm_eval_tasks import check_harness

        check_harness(known, allow_code=session.options.allow_code)
    for task, how in known.items():
        if how.protocol != "lm-eval":
            check_split(task, recipe.tasks[task].data, how.split, labelled=how.protocol != "texts")


def check_copyable(repo: Repo) -> None:
    """Raise CheckpointError if the files of a model cannot be copied to an output: unreadable, linked elsewhere, or a
    folder with the name of a file that featcal writes."""
    is_kept = repo.folder is not None and CARD in repo.files  # the card, under another name
    for name in (CARD, REPORT, RECIPE, PICTURE, *([MERGED_CARD] if is_kept else [])):
        if inside := next((path for path in repo.files if path.startswith(f"{name}/")), None):
            what = f"{name} is the name of a file that featcal writes, and a folder here (it holds {inside})"
            raise CheckpointError(what, where=repo.name, fix="give a copy of the model in which it has another name")
    if repo.folder is None:
        return
    copies = find_second_copies(repo.files)
    with suppress(FeatCalError, OSError, ValueError):  # weights that cannot be read are reported with their headers
        copies = [*divide_files(repo.folder).left_out, *(file.name for file in weight_files(repo.folder))]
    check_links(repo.folder, skip=copies)
    for path in sorted(repo.folder.rglob("*")):  # a folder that cannot be read seems to be empty
        name = path.relative_to(repo.folder).as_posix()
        hidden = name.startswith(".") or "/." in name
        if path.exists() and not hidden and name not in copies and not os.access(path, os.R_OK):
            what = f"{name} cannot be read by this user, and would be missing from the output"
            raise CheckpointError(what, where=str(repo.folder), fix="make it readable, or give a copy without it")


# Recipe files

MADE = f"# Written by featcal {__version__}, with every Hub repo at its commit."


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML that `as_draft` can read, without `output`, as running a job again should not publish
    it again."""
    again = "# To run the job again: featcal calibrate -r featcal.yaml -o NEW"
    return without_tokens(f"{MADE}\n{again}\n{_dump(recipe)}")


def save_recipe(file: Path, recipe: Recipe, findings: Sequence[Finding], *, overwrite: bool) -> None:
    """Write the recipe that a dry run completed to a file that `featcal calibrate -r` can read. Raises OutputError."""
    check_save(file, overwrite=overwrite)
    lines = [MADE, "# To run the job: featcal calibrate -r with this file. Where its parts were read:"]
    read = {finding: tell_source(finding) if finding.source == ASSUMED else finding.source for finding in findings}
    lines += [f"#   {plain(finding.role)}: {plain(source)}" for finding, source in read.items()]
    content = "\n".join(lines) + "\n" + _dump(recipe, output=recipe.output.push_to is not None)
    write_requested(file, without_tokens(content), where=f"--save {file}")


def check_save(file: Path, *, overwrite: bool, dry_run: bool = True) -> None:
    """Raise RecipeError or OutputError if a dry run's recipe cannot be saved to this file."""
    where = f"--save {file}"
    if not dry_run:
        fix = "add --dry-run; a run itself leaves its recipe in the output folder, as featcal.yaml"
        raise RecipeError("--save works only with --dry-run", where=where, fix=fix)
    check_file(file, (".yaml", ".yml"), where)
    if file.is_symlink() or file.exists():
        if not file.is_file():
            raise OutputError("this is there, and is no file", where=where, fix="choose another --save")
        if not overwrite:
            raise OutputError("the file exists", where=where, fix="give --overwrite, or another --save")


def check_file(file: Path, kinds: Sequence[str], where: str) -> None:
    """Raise OutputError if a file that the user names has none of these endings, or would lie in no folder."""
    if file.suffix not in kinds:
        raise OutputError(f"{file.name} is no {' or '.join(kinds)}", where=where, fix=f"name it {file.stem}{kinds[0]}")
    if not resolve_path(file, "file", where, "choose another path").parent.is_dir():
        raise OutputError(f"there is no folder {file.parent}", where=where[:80], fix="create it, or choose another")


def _dump(recipe: Recipe, *, output: bool = False) -> str:
    content = recipe.model_dump(exclude_none=True, exclude=None if output else {"output"})
    for task in content["tasks"].values():
        if not task["data"]["columns"]:
            del task["data"]["columns"]
    return dump_yaml(content, width=120)
