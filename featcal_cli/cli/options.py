"""Every option of the command line, declared once, and what options cannot mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from featcal_cli.recipe.schema import AsOption, Calibration, Draft, Section
from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.sanitise import quoted

MODELS, METHOD, MACHINE, OUTPUT, HUB = (
    "Models and data (the rest is looked up in the merged repo)",
    "Method (the rest is chosen for you)",
    "Machine",
    "Output",
    "Hub",
)
PANELS = {"method": METHOD, "machine": MACHINE, "hub": HUB}
"""The group of the help for an option that is a recipe's key."""


def _option(
    group: str,
    *names: str,
    help: str,  # noqa: A002 - typer's word
    **settings: Any,
) -> Any:
    """An option in its group of the help."""
    return typer.Option(*names, help=help, rich_help_panel=group, **settings)


def describe_key(section: type[Section], key: str) -> Any:
    """The option that a recipe's key is, for a command that takes it; None where it is not given."""
    field = section.model_fields[key]
    mark = AsOption.of(field) or AsOption()
    kind: Any = field.annotation
    choices = ""
    if type(None) in get_args(kind):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        kind, choices = str, "|".join(get_args(kind))
    help_text = " ".join((field.description or "").split())
    if field.default is not None and kind is not bool:
        help_text = f"{help_text.rstrip('.')} [{field.default}]."
    metavar = mark.metavar or choices or None
    return Annotated[kind | None, _option(PANELS[mark.group], *mark.names, metavar=metavar, help=help_text)]


def with_keys(**sections: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that sections of a recipe have. A parameter of the command that is named here gets a
    dict of its section's: None for those that are not given."""
    options = {
        name: {key: describe_key(section, key) for key, field in section.model_fields.items() if AsOption.of(field)}
        for name, section in sections.items()
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            of_sections = {name: {key: given.pop(key) for key in keys} for name, keys in options.items()}
            command(**given, **of_sections)

        parameters: list[Parameter] = []
        for parameter in signature(command, eval_str=True).parameters.values():
            listed = {parameter.name: parameter}
            for key, option in options.get(parameter.name, {}).items():
                listed.pop(parameter.name, None)
                listed[key] = parameter.replace(name=key, annotation=option, default=None)
            parameters += listed.values()
        vars(run)["__signature__"] = Signature(parameters)
        return run

    return decorate


class _WithExamples:
    """A command whose help ends with its examples as they are typed (Markdown would join their lines), and shows no
    types where there is nothing to type."""

    help: str | None
    params: list[Any]

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument" or (getattr(param, "is_flag", False) and param.metavar is None):
                param.display_type_rich = lambda **_: ""
        return params

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None and any(getattr(param, "rich_help_panel", None) == OUTPUT for param in self.params):
            option.rich_help_panel = OUTPUT  # not alone in a panel, before all others
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        described = copy(self)
        described.help, _, examples = (self.help or "").partition("**Examples**")
        super(_WithExamples, described).format_help(ctx, formatter)  # type: ignore[misc]
        typer.echo(f" Examples\n\n{examples.strip(chr(10))}\n")


class Command(_WithExamples, TyperCommand):
    """One verb."""


class Group(_WithExamples, TyperGroup):
    """All verbs."""


Merged = Annotated[str | None, typer.Argument(metavar="MERGED", help="The merged model: Hub id[@revision] or folder.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id[@revision] or folder.")]
Base = Annotated[str | None, _option(MODELS, metavar="REPO", help="The model that the experts were fine-tuned from.")]
Experts = Annotated[
    list[str] | None, _option(MODELS, "--expert", metavar="TASK=REPO", help="An expert; repeat for each task.")
]
Sources = Annotated[
    list[str] | None,
    _option(
        MODELS, "--data", metavar="TASK=SOURCE",
        help="Unlabelled examples of a task: Hub dataset ID[:CONFIG[:SPLIT]], folder of images, .jsonl, .csv or "
        ".parquet file, .safetensors of model-ready inputs, or self (the expert writes them).",
    ),
]  # fmt: skip
SkipExperts = Annotated[
    list[str] | None,
    _option(MODELS, "--skip-expert", metavar="TASK", help="Leave this expert out, e.g. a deleted one; repeat."),
]
Columns = Annotated[
    list[str] | None,
    _option(
        MODELS, "--columns", metavar="TASK=ROLE:COLUMN,…",
        help="Columns of a task's data by role: image, text, text_pair, messages, prompt, response, label.",
    ),
]  # fmt: skip
Splits = Annotated[
    list[str] | None,
    _option(MODELS, "--split", metavar="TASK=NAME", help="The split of a task's data."),
]
MergeMethod = Annotated[
    str | None,
    _option(
        MODELS,
        "--merge",
        metavar="METHOD",
        help="Build the merged model: average, task_arithmetic:0.3, ties:0.3:0.2 (scale, density) or "
        "dare_ties:0.3:0.2:42 (seed).",
    ),
]
Recipe = Annotated[
    str | None, _option(MODELS, "--recipe", "-r", metavar="FILE", help="A recipe or its name; options override it.")
]
AllowPickle = Annotated[
    bool, _option(MODELS, "--allow-pickle", help="Read pickled .bin weights (tensors only, no code).")
]
TrustRemoteCode = Annotated[
    bool, _option(MODELS, "--trust-remote-code", help="Run the model code of a repo. Read it first.")
]
Measured = Annotated[
    int | None, _option(METHOD, "--examples", "-n", metavar="N", help="Examples measured per task [64].")
]
MeasuredSeed = Annotated[
    int | None, _option(METHOD, "--seed", metavar="N", help="Seed for sampling examples [43; calibrate uses 42].")
]
Device = Annotated[
    str,
    _option(MACHINE, metavar="NAME", help="auto, cpu or cuda[:K] [auto].", show_default=False),
]
Dtype = describe_key(Calibration, "dtype")
BatchSize = Annotated[
    int | None,
    _option(MACHINE, metavar="N", min=1, help="Examples per forward pass [chosen by their length and the memory]."),
]
Compare = Annotated[str | None, _option(MODELS, metavar="MODEL2", help="Show a second model against the same experts.")]
Evaluated = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Hub ids[@revision] or folders to compare."),
]
Limit = Annotated[
    int | None,
    _option(METHOD, metavar="N", min=1, help="Examples per task, randomly chosen (lm-eval: the first N) [all]."),
]
AllowCode = Annotated[
    bool, _option(MACHINE, "--allow-code-execution", help="Let lm-eval tasks run code that a model wrote.")
]
EvaluateToo = Annotated[
    bool, _option(OUTPUT, "--evaluate", help="Also measure the accuracy of experts, merged and calibrated model.")
]
RecipeName = Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe.")]
Plot = Annotated[Path | None, _option(OUTPUT, metavar="FILE", help="Draw the drift as .png or .svg.")]
Html = Annotated[Path | None, _option(OUTPUT, metavar="FILE", help="Write a page that needs no network.")]
Markdown = Annotated[
    Path | None, _option(OUTPUT, metavar="FILE", help="Write verdict and table as Markdown, for a pipeline.")
]
MaxDrift = Annotated[
    float | None,
    _option(
        OUTPUT, metavar="F", min=0.0,
        help="Exit with 3 if a task's drift is above F; with --compare, if MODEL2's answers (features, where there are "
        "none) are farther from the expert's than MODEL's by more.",
    ),
]  # fmt: skip
Folder = Annotated[
    Path | None, _option(OUTPUT, "--output", "-o", metavar="DIR", help="Output folder [./NAME-featcal].")
]
DemoFolder = Annotated[
    Path | None, _option(OUTPUT, "--output", "-o", metavar="DIR", help="Output folder [./featcal-demo].")
]
Strict = Annotated[
    bool, _option(OUTPUT, "--strict", help="Exit with 3, and do not push, if a task got farther from its expert.")
]
AsAdapter = Annotated[
    int | None,
    _option(OUTPUT, "--as-adapter", metavar="RANK", min=1, help="Also write the updates as a PEFT adapter (LoRA)."),
]
Overwrite = Annotated[bool, _option(OUTPUT, "--overwrite", help="Replace the output folder, or the file of --save.")]
Restart = Annotated[
    bool, _option(OUTPUT, "--restart", help="Start over, even if an interrupted run finished some blocks.")
]
LogFile = Annotated[
    Path | None,
    _option(OUTPUT, "--log-file", metavar="FILE", help="Append a log to this file, one JSON object per line."),
]
DryRun = Annotated[bool, _option(OUTPUT, "--dry-run", help="Check and estimate everything; download no weights.")]
Save = Annotated[
    Path | None,
    _option(OUTPUT, "--save", metavar="FILE", help="With --dry-run, write the whole job as a recipe."),
]
Json = Annotated[bool, _option(OUTPUT, "--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, _option(OUTPUT, "--quiet", "-q", help="Show only the result.")]
CreatePr = Annotated[bool, _option(HUB, "--create-pr", help="Open a pull request instead of committing.")]
OverwriteRepo = Annotated[bool, _option(HUB, "--overwrite-repo", help="Commit to a repo that already holds a model.")]
PushAnyway = Annotated[
    bool, _option(HUB, "--push-anyway", help="Push even if, on average, tasks got farther from their experts.")
]


def check_words(words: Sequence[str]) -> None:
    """Raise RecipeError for an option or an argument that is empty: a variable of a shell that was not set, mostly."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.strip() and not (name.startswith("--") and equals and not value.strip()):
            continue
        before = words[number - 1] if number and words[number - 1].startswith("-") else "an argument"
        option = name.strip() or before
        raise RecipeError(f"{option} is empty", where="the command line", fix=f"give {option} a value, or leave it out")


def check_finite(option: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise RecipeError(f"{value} is no finite number", where=option, fix=f"give {option} a number such as 0.8")


def check_files(written: Mapping[str, Path | None], draft: Draft | None, recipe: str | None) -> None:
    """Raise OutputError where a file that would be written, by its option, is read too, or written for another one."""
    taken = {} if draft is None else {_resolve(path): str(path) for path in draft.local_paths}
    if recipe:
        taken[_resolve(Path(recipe))] = f"--recipe {recipe}"
    for option, file in written.items():
        if file is None or _is_device(place := _resolve(file)):
            continue
        fix = f"give {option} another path"
        if option not in ("--output", "--save") and place.is_dir():
            raise OutputError("this is a folder", where=f"{option} {file}", fix="give the path of a file")
        if option == "--output":  # what it may replace is looked at elsewhere
            taken.setdefault(place, f"{option} {file}")
            continue
        if place in taken and not (option == "--save" and taken[place].startswith("--recipe")):
            what = f"{option} would write over what is given as {quoted(taken[place])}"
            raise OutputError(what, where=f"{option} {file}", fix=fix)
        inside = [name for other, name in taken.items() if other in place.parents]
        if inside:
            raise OutputError(f"{option} would write into {quoted(inside[0])}", where=f"{option} {file}", fix=fix)
        taken[place] = f"{option} {file}"


def _is_device(path: Path) -> bool:
    """/dev/stderr, say: what is written there takes the place of nothing."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:
        return False


def _resolve(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all: whoever writes or reads it says so
        return path
