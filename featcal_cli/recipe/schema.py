"""The recipe: a YAML file and command-line options become one validated object."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from featcal_cli.recipe.keys import Evaluate, Name, Section
from featcal_cli.recipe.overrides import check_tasks, name_option
from featcal_cli.recipe.shipped import find_recipe
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.references import bare_model, existing_path, parse_source, path_exists, read_page
from featcal_cli.runtime.untrusted_text import bare, load_documents

ModelName = Annotated[Name, AfterValidator(bare_model)]
"""A model's Hub id or path, or the address of its page, which becomes an id."""

OWN = "featcal.yaml"
"""What the recipe in an output folder is called: no output is named after it."""


class Merge(Section):
    """A merged model that is built instead of named: θ_base + scale · Σ (θ_i − θ_base), or the experts' mean."""

    method: Literal["average", "task_arithmetic"]
    """`average`: the experts' mean. `task_arithmetic`: base + scale · Σ (expert − base)."""
    scale: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    """Of task_arithmetic."""


class Data(Section):
    """Where a task's calibration examples come from: a Hub dataset or a local file or folder."""

    dataset: Name | None = None
    """Hub dataset id."""
    path: Name | None = None
    """Local folder, .jsonl, .csv, .parquet or .safetensors file; relative paths start at the recipe's folder."""
    revision: Name | None = None
    """Branch, tag or commit of the dataset; left out, main."""
    config: Name | None = None
    """The dataset's config; left out, the one that it has, or its default."""
    split: Name | None = None
    """Left out, train where there is one."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Role (image, text, text_pair, messages, prompt, response, label) → column; found by itself when left out."""
    template: str | None = None
    """Text built from several columns, e.g. "{premise} {hypothesis}"."""

    @model_validator(mode="before")
    @classmethod
    def _read_page(cls, values: Any) -> Any:
        """The address of a dataset's page in its parts; what stands beside it goes first."""
        name = values.get("dataset") if isinstance(values, dict) else None
        page = read_page(name) if isinstance(name, str) else None
        if page is None:
            return values
        parts = {"dataset": page.name, "revision": page.revision, "config": page.config, "split": page.split}
        return {**{key: part for key, part in parts.items() if part}, **values, "dataset": page.name}

    @property
    def has_source(self) -> bool:
        """It says what is read, and not only how."""
        return not (self.dataset is None and self.path is None)

    def read_as(self, said: Data | None) -> Data:
        """This source, read as the user has said. Raises RecipeError where that does not go."""
        if said is None or said.has_source:
            return self
        columns = {**self.columns, **said.columns}
        try:
            return Data.model_validate({**self.model_dump(), **said.model_dump(exclude_none=True), "columns": columns})
        except ValidationError as error:
            raise RecipeError(_word(error), where=f"data {self}", fix="leave that out, or give other data") from None

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        how = [key for key in ("split", "columns", "template") if getattr(self, key)]
        if (self.dataset is None) == (self.path is None):
            # how to read what is yet to be found
            if self.has_source or not how or self.config or self.revision:
                raise ValueError("give either dataset or path")
        elif self.path and self.path.endswith(".safetensors") and how:
            what = f"{' and '.join(how)} cannot be set for a .safetensors file"
            raise ValueError(f"{what}, whose tensors are the model's arguments as they are")
        return self

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        revision = f"@{self.revision}" if self.revision else ""
        parts = [self.config or "", self.split] if self.split else [self.config] if self.config else []
        return ":".join([f"{self.dataset}{revision}", *parts])


Source = Annotated[
    Data,
    BeforeValidator(
        lambda value: parse_source(value) if isinstance(value, str) else value, json_schema_input_type=str | Data
    ),
]


class TaskDraft(Section):
    """What the user says of one task; the rest is looked for."""

    expert: ModelName | None = None
    """The model that was fine-tuned on the task: Hub id[@revision] or folder; BASE+ADAPTER for a PEFT adapter."""
    data: Source | None = None
    """Examples without labels: DATASET[:CONFIG[:SPLIT]], a path, or a group of keys."""
    evaluate: Evaluate | None = None
    """How the task's figure is measured by `featcal evaluate`; left out, with the expert's own head."""


class Task(TaskDraft):
    """One expert and the examples it is calibrated with."""

    expert: ModelName
    data: Source

    @model_validator(mode="after")
    def _source(self) -> Task:
        if not self.data.has_source:
            raise ValueError("give either dataset or path for the data")
        return self


class Calibration(Section):
    """The settings of the method; a setting left out is chosen by `select`."""

    examples: int = Field(default=256, ge=1, le=10**9)
    """Fitted examples per task."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward passes; `auto` is the merged model's own, float16 as float32."""
    ridge: float | None = Field(default=None, ge=0, le=1e9, allow_inf_nan=False)
    """λ: weight of the anchor."""
    rho: float | None = Field(default=None, ge=0, le=1e6, allow_inf_nan=False)
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    """α: target features = α · expert + (1 − α) · calibrated."""
    select: Literal["auto", "preset", "search"] = "auto"
    """How settings that are left out are chosen; `preset` is the paper's method to the letter, without the guard."""
    chosen: bool = False
    """The settings given here were chosen by featcal (its `featcal.yaml` says so), not by the user: as where they are
    left out, rows are held out of few ones, and a result whose mean drift grew on them is pulled back."""
    norms: Literal["auto", "layernorm", "all", "none"] = "auto"
    """Which norms are calibrated: `auto` and `layernorm` those with a bias, `all` RMSNorm too."""
    bias: bool = True
    """Calibrate the biases of Linear modules."""
    token_weights: Literal["auto", "uniform", "cls"] = "auto"
    """How tokens count: `uniform` all alike; `cls` the first one most, in the last block; `auto` chooses."""
    seed: int = Field(default=42, ge=-(2**63), lt=2**63)
    """Of the choice of examples."""

    @property
    def is_open(self) -> bool:
        """Settings are left to a search."""
        return self.select != "preset" and None in (self.ridge, self.rho, self.alpha)

    @property
    def is_answered_for(self) -> bool:
        """featcal chooses settings, not the user, and so sees to it that the result is no worse than merged."""
        return self.is_open or (self.select != "preset" and self.chosen)


class Output(Section):
    """Where the result goes besides the local folder."""

    push_to: ModelName | None = None
    """USER/NAME of a model repo."""
    private: bool = False
    """Make that repo private, if it is new."""


class Draft(Section):
    """What the user says of a job: the merged model at least."""

    merged: Annotated[
        Annotated[ModelName, Tag("repo")] | Annotated[Merge, Tag("merge")],
        Discriminator(lambda value: "repo" if isinstance(value, str) else "merge"),
    ]
    """The merged model: Hub id[@revision] or folder; or how it is built of the experts."""
    base: ModelName | None = None
    """The model that the experts were fine-tuned from; left out, it is found in the merged repo."""
    tasks: Mapping[Name, TaskDraft] = {}
    """By name; left out, they are found in the merged repo."""
    skip_experts: tuple[Name, ...] | None = None
    """Tasks to go on without, where an expert is gone."""
    calibration: Calibration = Calibration()
    """The settings of the method."""
    output: Output = Output()
    """Where the result goes."""

    _file: str = PrivateAttr("")
    """Name of the recipe's file, without its ending."""

    @property
    def name(self) -> str:
        """What the output is named after: the merged model's id or path; or the recipe that has it built, or where
        there is none, the method."""
        if isinstance(self.merged, Merge):
            if self._file:
                return self._file
            method, scale = self.merged.method, self.merged.scale
            return method if method == "average" else f"{method}-{scale:g}"
        if existing_path(self.merged):
            return self.merged
        return self.merged.rpartition("+")[2].partition("@")[0]

    @property
    def local_paths(self) -> list[Path]:
        """Everything that it names and that lies on this machine, as absolute paths."""
        models = [self.merged if isinstance(self.merged, str) else None, self.base]
        models += [task.expert for task in self.tasks.values()]
        names = [task.data.path for task in self.tasks.values() if task.data and task.data.path]
        names += [part for name in models if name for part in (name, *name.split("+"))]  # BASE+ADAPTER
        return [path for name in names if (path := existing_path(name))]


class Recipe(Draft):
    """One job: the merged model, its base, the tasks, the settings."""

    base: ModelName
    tasks: Mapping[Name, Task] = Field(min_length=1)


def build_recipe(file: Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe in `file` (if any) with the command line's `overrides` laid over it, validated and complete.

    Raises RecipeError like `read_draft` and `complete_draft`.
    """
    return complete_draft(read_draft(file, overrides))


def read_draft(file: Path | None, overrides: Mapping[str, Any]) -> Draft:
    """What `file` (if any) and, laid over it, the command line's `overrides` say, validated; parts may be missing.

    `overrides` has the same nesting as the YAML; a value of None means "not given".
    Raises RecipeError with the key, the reason and, for an unknown key, the nearest known one.
    """
    raw: dict[str, Any] = {}
    if file is not None:
        raw = _read_yaml(file)
        _anchor_paths(raw, file.resolve().parent)
    return _build_draft(raw, overrides, file)


def _build_draft(raw: Mapping[str, Any], overrides: Mapping[str, Any], file: Path | None) -> Draft:
    merged = deepcopy(_overlay(raw, overrides))
    _anchor_paths(merged, Path.cwd())
    where = str(file) if file else "the recipe" if raw else "the command line"
    check_tasks(overrides.get("tasks") or {}, merged.get("tasks") or {})
    if not merged.get("merged"):
        fix = "give MERGED or --merge, or the key merged: in a recipe"
        raise RecipeError("nothing says what merged is", where=where, fix=fix)
    try:
        draft = Draft.model_validate({key: value for key, value in merged.items() if value is not None})
        if file is not None and file.name != OWN:
            draft._file = file.stem
        return draft
    except ValidationError as error:
        raise _explain(error, where, overrides) from None


def names_merged(file: Path) -> bool:
    """Whether a recipe says itself what merged is. Raises RecipeError for a file that is no recipe."""
    return bool(_read_yaml(file).get("merged"))


def as_draft(recipe: Draft | Mapping[str, Any] | str | Path) -> Draft:
    """A draft as it is; or from its keys, from a YAML file, or from the name of a shipped recipe."""
    if isinstance(recipe, Draft):
        return recipe
    if isinstance(recipe, Mapping):
        return _build_draft(recipe, {}, None)
    return read_draft(find_recipe(str(recipe)), {})


def complete_draft(draft: Draft) -> Recipe:
    """The draft as a recipe. Raises RecipeError for what it leaves open."""
    if not draft.base:
        raise RecipeError("nothing says what base is", fix="give --base REPO, or the key base: in a recipe")
    if not draft.tasks:
        fix = "give --expert TASK=REPO, or the key tasks: in a recipe"
        raise RecipeError("nothing says what the experts are", fix=fix)
    for name, task in draft.tasks.items():
        for key, option, found in (
            ("expert", "--expert", task.expert),
            ("data", "--data", task.data and task.data.has_source),
        ):
            if not found:
                raise RecipeError(f"task {name} has no {key}", where=f"tasks.{name}", fix=f"add {option} {name}=…")
    return Recipe.model_validate(draft.model_dump(exclude_none=True))


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        documents = load_documents(file.read_text(encoding="utf-8-sig"), unique=True)
    except UnicodeDecodeError:
        raise RecipeError("the recipe is not YAML: it is no UTF-8 text", where=str(file), fix="mend the file") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"the recipe cannot be read: {error}", where=str(file), fix="mend the file") from None
    if len(documents) > 1:
        fix = "give one of them, in a file of its own"
        raise RecipeError(f"the file holds {len(documents)} documents", where=str(file), fix=fix)
    raw = documents[0] if documents else None
    if isinstance(raw, dict):
        _check_keys(raw, str(file))
    else:
        raise RecipeError("the recipe is not a mapping of keys to values", where=str(file), fix="see `featcal recipes`")
    return raw


def _check_keys(section: Mapping[Any, Any], where: str) -> None:
    """Raise RecipeError for a key that YAML takes for something else than text, as it does `no`, `on` and `1`."""
    for key, value in section.items():
        if not isinstance(key, str):
            kind = "yes or no" if isinstance(key, bool) else "a number" if isinstance(key, (int, float)) else "a value"
            what = f"a key is no text: YAML reads it as {kind} ({bare(str(key))})"
            raise RecipeError(what, where=where, fix="put this key in quotation marks")
        if isinstance(value, dict):
            _check_keys(value, f"{where}, {bare(key)}")


def _anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make relative paths that exist from the recipe's folder absolute, in place."""

    def anchored(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value
        if path_exists(folder / value):
            return str((folder / value).resolve())
        return "+".join(anchored(part) for part in value.split("+")) if "+" in value else value  # BASE+ADAPTER

    for key in ("merged", "base"):
        if key in raw:
            raw[key] = anchored(raw[key])
    tasks = raw.get("tasks")
    for task in tasks.values() if isinstance(tasks, dict) else ():
        if not isinstance(task, dict):
            continue
        if "expert" in task:
            task["expert"] = anchored(task["expert"])
        data = task.get("data")
        if isinstance(data, str):
            task["data"] = parse_source(data, folder)
        elif isinstance(data, dict) and "path" in data:
            data["path"] = anchored(data["path"])


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        whole = key == "merged" or (key == "data" and not value.keys().isdisjoint(("dataset", "path")))
        if isinstance(value, Mapping) and under is not None and not whole:
            # what is no section is left for validation to find
            merged[key] = _overlay(under, value) if isinstance(under, Mapping) else under
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: ValidationError, where: str, overrides: Mapping[str, Any]) -> RecipeError:
    """The first of pydantic's complaints as one message."""
    problem = error.errors()[0]
    parts = [part for part in problem["loc"] if part not in ("repo", "merge") and "[" not in str(part)]
    place = ".".join(bare(str(part)) for part in parts)
    if problem["type"] == "extra_forbidden":
        unknown = str(problem["loc"][-1])
        near = difflib.get_close_matches(unknown[:80], set(_known_keys(Recipe)), n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else "take the key out"
        return RecipeError(f"unknown key {bare(unknown)}", where=f"{where}, {place}", fix=fix)
    if option := name_option([str(part) for part in parts], overrides):
        place, where = bare(option), "the command line"
    return RecipeError(f"{place}: {_word(error)}", where=where, fix=f"change {place}")


def _word(error: ValidationError) -> str:
    """The first of pydantic's complaints, for the middle of a sentence."""
    message = error.errors()[0]["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def _known_keys(section: type[BaseModel]) -> Iterator[str]:
    """Every key that a recipe may hold, from all its sections."""
    for name, field in section.model_fields.items():
        yield name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _known_keys(part)
