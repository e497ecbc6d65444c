"""The recipe: a YAML file and command-line options become one validated object."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from featcal_cli.errors import RecipeError


class Section(BaseModel):
    """A group of recipe keys; unknown keys are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Merge(Section):
    """A merged model that is built instead of named: θ_base + scale · Σ (θ_i − θ_base), or the experts' mean."""

    method: Literal["average", "task_arithmetic"]
    scale: float = Field(default=0.3, gt=0, allow_inf_nan=False)


class Data(Section):
    """Where a task's calibration examples come from: a Hub dataset or a local file or folder."""

    dataset: str | None = None
    """Hub dataset id."""
    path: str | None = None
    """Local folder, .jsonl, .csv, .parquet or .safetensors file; relative paths start at the recipe's folder."""
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)
    """Role (image, text, text_pair, messages, prompt, response, label) → column; found by itself when left out."""
    template: str | None = None
    """Text built from several columns, e.g. "{premise} {hypothesis}"."""

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if (self.dataset is None) == (self.path is None):
            raise ValueError("give either dataset or path")
        return self

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.dataset}{revision}" + "".join(f":{part}" for part in (self.config, self.split) if part)


class Evaluate(Section):
    """How a task's accuracy is measured."""

    split: str = "test"
    metric: Literal["accuracy"] = "accuracy"


class Task(Section):
    """One expert and the examples it is calibrated with."""

    expert: str
    data: Annotated[Data, BeforeValidator(lambda value: parse_source(value) if isinstance(value, str) else value)]
    evaluate: Evaluate | None = None


class Calibration(Section):
    """The settings of the method; a setting left out is chosen by `select`."""

    examples: int = Field(default=256, ge=1)
    """Fitted examples per task."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    ridge: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """λ: weight of the anchor."""
    rho: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """α: target features = α · expert + (1 − α) · calibrated."""
    select: Literal["preset"] = "preset"
    norms: Literal["auto", "layernorm", "all", "none"] = "auto"
    bias: bool = True
    token_weights: Literal["auto", "uniform", "cls"] = "auto"
    seed: int = 42


class Output(Section):
    """Where the result goes besides the local folder."""

    push_to: str | None = None
    private: bool = False


class Recipe(Section):
    """One job: the merged model, its base, the tasks, the settings."""

    merged: Annotated[
        Annotated[str, Tag("repo")] | Annotated[Merge, Tag("merge")],
        Discriminator(lambda value: "repo" if isinstance(value, str) else "merge"),
    ]
    base: str
    tasks: dict[str, Task] = Field(min_length=1)
    calibration: Calibration = Calibration()
    output: Output = Output()


def parse_source(text: str, folder: Path = Path()) -> dict[str, str]:
    """An existing path (from `folder`), else `ID[@REVISION][:CONFIG[:SPLIT]]`, as keys of `Data`."""
    if path_exists(folder / text):
        return {"path": str((folder / text).resolve())}
    if looks_like_path(text):
        raise RecipeError(f"there is no file or folder {text}", where=f"data {text}", fix="check the path")
    name, *rest = text.split(":")
    repo, _, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if len(rest) > 2 or not repo:
        raise RecipeError(f"cannot read the source {text!r}", where="data", fix="write ID[@REVISION][:CONFIG[:SPLIT]]")
    config, split = [*rest, "", ""][:2]
    found = {"dataset": repo, "revision": revision, "config": config, "split": split}
    return {key: value for key, value in found.items() if value}


def parse_merge(text: str) -> dict[str, Any]:
    """`average` or `task_arithmetic:SCALE`, as keys of `Merge`."""
    method, _, scale = text.partition(":")
    if not scale:
        return {"method": method}
    try:
        return {"method": method, "scale": float(scale)}
    except ValueError:
        raise RecipeError(
            f"the scale {scale!r} is not a number", where="--merge", fix="write e.g. task_arithmetic:0.3"
        ) from None


def path_exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for what cannot be a path at all (too long, a null byte)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def looks_like_path(text: str) -> bool:
    """True for text that can only be meant as a path, never as a Hub id."""
    name = re.split("[@:]", text, maxsplit=1)[0]
    return (
        text.startswith((".", "/", "~"))
        or text.endswith((".jsonl", ".csv", ".parquet", ".safetensors"))
        or name.count("/") > 1
    )


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or as the name of a shipped one."""
    if path_exists(path := Path(name)) and path.is_file():
        return path
    shipped = {file.stem: file for file in shipped_recipes()}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"there is no recipe {name}", where="--recipe", fix=f"{hint}give a YAML file or one of: {', '.join(shipped)}"
    )


def shipped_recipes() -> list[Path]:
    """The recipe files that come with the package, in a wheel and in an editable install."""
    here = Path(__file__).resolve().parent
    folder = here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"
    return sorted(folder.glob("*.yaml"))


def build_recipe(file: Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe in `file` (if any) with the command line's `overrides` laid over it, validated.

    `overrides` has the same nesting as the YAML; a value of None means "not given".
    Raises RecipeError with the key, the reason and, for an unknown key, the nearest known one.
    """
    raw: dict[str, Any] = {}
    if file is not None:
        raw = _read_yaml(file)
        _anchor_paths(raw, file.resolve().parent)
    merged = deepcopy(_overlay(raw, overrides))
    _anchor_paths(merged, Path.cwd())
    where = str(file) if file else "the command line"
    for key, option in (("merged", "MERGED or --merge"), ("base", "--base"), ("tasks", "--expert TASK=REPO")):
        if not merged.get(key):
            raise RecipeError(
                f"nothing says what {key} is", where=where, fix=f"give {option}, or the key {key}: in a recipe"
            )
    for name, task in merged["tasks"].items() if isinstance(merged["tasks"], dict) else ():
        for key, option in (("expert", "--expert"), ("data", "--data")):
            if isinstance(task, dict) and not task.get(key):
                raise RecipeError(f"task {name} has no {key}", where=where, fix=f"add {option} {name}=…")
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise _explain(error, where) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that `build_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=120)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"the recipe is not readable YAML: {error}", where=str(file), fix="mend the file") from None
    if not isinstance(raw, dict):
        raise RecipeError("the recipe is not a mapping of keys to values", where=str(file), fix="see `featcal recipes`")
    return raw


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
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and key not in ("merged", "data"):
            merged[key] = _overlay(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: ValidationError, where: str) -> RecipeError:
    """The first of pydantic's complaints as one message."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"] if part not in ("repo", "merge"))
    if problem["type"] == "extra_forbidden":
        unknown = str(problem["loc"][-1])
        near = difflib.get_close_matches(unknown, set(_known_keys(Recipe)), n=1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else "take the key out"
        return RecipeError(f"unknown key {unknown}", where=f"{where}, {place}", fix=fix)
    message = problem["msg"].removeprefix("Value error, ")
    return RecipeError(f"{place}: {message[:1].lower()}{message[1:]}", where=where, fix=f"change {place}")


def _known_keys(section: type[BaseModel]) -> Iterator[str]:
    """Every key that a recipe may hold, from all its sections."""
    for name, field in section.model_fields.items():
        yield name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _known_keys(part)
