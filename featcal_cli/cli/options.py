"""Declare every option of the command line once, and check the values that users give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from featcal_cli.recipe.merge_methods import METHODS
from featcal_cli.recipe.references import existing_path
from featcal_cli.recipe.schema import AsOption, Calibration, Draft, Section
from featcal_cli.runtime.errors import COMMAND_LINE, OutputError, RecipeError
from featcal_cli.runtime.sanitise import quoted

MODELS, METHOD, MACHINE, OUTPUT, HUB = (
    "Models and data (the rest is looked up in the merged repo)",
    "Method (the rest is chosen for you)",
    "Machine",
    "Output",
    "Hub",
)
PANELS = {"method": METHOD, "machine": MACHINE, "hub": HUB}
"""Heading in the help for each group of options that are recipe keys."""


def describe_key(section: type[Section], key: str) -> Any:
    """Return the annotation of the command-line option for a recipe's key; the option is None where it is not given."""
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
    return _given(kind, PANELS[mark.group], " ".join(mark.names), mark.metavar or choices or None, help_text)


def list_keys(section: type[Section]) -> dict[str, Any]:
    return {key: describe_key(section, key) for key, field in section.model_fields.items() if AsOption.of(field)}


def with_groups(**options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add groups of options to a command. Each keyword names a parameter of the command, which receives a dict of the
    group's values. Options that are not given are False for flags, "auto" for --device, and None for all others."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            groups = {name: {key: given.pop(key) for key in keys} for name, keys in options.items()}
            command(**given, **groups)

        parameters: list[Parameter] = []
        for parameter in signature(command, eval_str=True).parameters.values():
            listed = {parameter.name: parameter}
            for key, option in options.get(parameter.name, {}).items():
                listed.pop(parameter.name, None)
                default = {bool: False, str: "auto"}.get(get_args(option)[0])
                listed[key] = parameter.replace(name=key, annotation=option, default=default)
            parameters += listed.values()
        vars(run)["__signature__"] = Signature(parameters)
        return run

    return decorate


class _WithExamples:
    """Mixin for commands: the help ends with the examples, and shows no types of arguments and flags."""

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
    """A single command."""


class Group(_WithExamples, TyperGroup):
    """Group of commands."""


def _given(kind: Any, group: str, names: str, metavar: str | None, about: str, **settings: Any) -> Any:
    """Return the annotation of an option that is None where it is not given, and in the help under the heading
    `group`."""
    option = typer.Option(*names.split(), metavar=metavar, help=about, rich_help_panel=group, **settings)
    return Annotated[kind | None, option]


def _flag(group: str, names: str, about: str) -> Any:
    return Annotated[bool, typer.Option(*names.split(), help=about, rich_help_panel=group)]


Texts = list[str]
EXAMPLES = [method.example for method in METHODS.values()]
Merged = Annotated[str | None, typer.Argument(metavar="MERGED", help="The merged model: Hub id[@revision] or folder.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id[@revision] or folder.")]
Evaluated = Annotated[Texts | None, typer.Argument(metavar="MODEL", help="Hub ids[@revision] or folders to compare.")]
RecipeName = Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe.")]

MergeMethod = _given(
    str, MODELS, "--merge", "METHOD",
    f"Build the merged model: {', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}.",
)  # fmt: skip
Recipe = _given(str, MODELS, "--recipe -r", "FILE", "A recipe or its name; options override it.")
Compare = _given(str, MODELS, "--compare", "MODEL2", "Compare a second model with the same experts.")
Measured = _given(int, METHOD, "--examples -n", "N", "Examples measured per task [the recipe's, else 64].")
MeasuredSeed = _given(int, METHOD, "--seed", "N", "Seed for sampling examples [the recipe's + 1, else 43].")
Limit = _given(
    int, METHOD, "--limit", "N",
    "Examples per task, randomly chosen (lm-eval: the first N) [all; 256 texts, or fewer long ones].", min=1,
)  # fmt: skip
_DEVICES = "auto, cpu or cuda[:K] [auto]."
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help=_DEVICES, rich_help_panel=MACHINE, show_default=False)
]
Dtype = describe_key(Calibration, "dtype")
AllowCode = _flag(MACHINE, "--allow-code-execution", "Let lm-eval tasks run code that a model wrote.")
Save = _given(Path, OUTPUT, "--save", "FILE", "With --dry-run, write the whole job as a recipe.")
DemoFolder = _given(Path, OUTPUT, "--output -o", "DIR", "Output folder [./featcal-demo].")
Plot = _given(Path, OUTPUT, "--plot", "FILE", "Draw the drift as .png or .svg.")
Html = _given(Path, OUTPUT, "--html", "FILE", "Write everything as one HTML page, which needs no network.")
Markdown = _given(Path, OUTPUT, "--markdown", "FILE", "Write the verdict and the table as Markdown, for a pipeline.")
MaxDrift = _given(
    float, OUTPUT, "--max-drift", "F",
    "Exit with 3 if a task's drift is above F; with --compare, if MODEL2's outputs (features, where there are none) "
    "are farther from the expert's than MODEL's by more than F.",
    min=0.0,
)  # fmt: skip
Json = _flag(OUTPUT, "--json", "Print the result as JSON on stdout.")
Quiet = _flag(OUTPUT, "--quiet -q", "Show only the result.")
LogFile = _given(Path, OUTPUT, "--log-file", "FILE", "Append a log to this file, one JSON object per line.")

INPUTS = {
    "base": _given(str, MODELS, "--base", "REPO", "The model that the experts were fine-tuned from."),
    "expert": _given(Texts, MODELS, "--expert", "TASK=REPO", "An expert; repeat for each task."),
    "data": _given(
        Texts, MODELS, "--data", "TASK=SOURCE",
        "Unlabelled examples of a task: Hub dataset ID[:CONFIG[:SPLIT]], folder of images or recordings, "
        "folder or file of texts or tables, .safetensors of model-ready inputs, or self (the expert writes them).",
    ),
    "skip_expert": _given(Texts, MODELS, "--skip-expert", "TASK", "Leave this expert out, e.g. a deleted one; repeat."),
    "columns": _given(
        Texts, MODELS, "--columns", "TASK=ROLE:COLUMN,…",
        "Columns of a task's data by role: image, text, text_pair, messages, prompt, response, label.",
    ),
    "split": _given(Texts, MODELS, "--split", "TASK=NAME", "The split of a task's data."),
}  # fmt: skip
"""Options for a job's base, experts and data, which featcal looks up where they are not given."""
RUNNING = {
    "allow_pickle": _flag(MODELS, "--allow-pickle", "Read pickled .bin weights (tensors only, no code)."),
    "trust_remote_code": _flag(MODELS, "--trust-remote-code", "Run the model code of a repo. Read it first."),
    "device": Device,
    "batch_size": _given(
        int, MACHINE, "--batch-size", "N", "Examples per forward pass [chosen by their length and the memory].", min=1
    ),
}
"""Options for how models are loaded and run."""
WRITING = {
    "output": _given(Path, OUTPUT, "--output -o", "DIR", "Output folder [./NAME-featcal]."),
    "overwrite": _flag(OUTPUT, "--overwrite", "Replace the output folder, or the file of --save."),
    "restart": _flag(OUTPUT, "--restart", "Start over, even if an interrupted run finished some blocks."),
    "as_adapter": _given(
        int, OUTPUT, "--as-adapter", "RANK", "Also write the updates as a PEFT adapter (LoRA).", min=1
    ),
    "strict": _flag(OUTPUT, "--strict", "Exit with 3, and do not push, if a task got farther from its expert."),
    "evaluate": _flag(OUTPUT, "--evaluate", "Also measure accuracy or perplexity of experts, merged and result."),
    "allow_code": AllowCode,
    "dry_run": _flag(OUTPUT, "--dry-run", "Check and estimate everything; download no weights."),
}
PUSHING = {
    "create_pr": _flag(HUB, "--create-pr", "Open a pull request instead of committing."),
    "overwrite_repo": _flag(HUB, "--overwrite-repo", "Commit to a repo that already holds a model."),
    "push_anyway": _flag(HUB, "--push-anyway", "Push even if, on average, tasks got farther from their experts."),
}
"""Options for pushing a calibration; RUNNING, WRITING and PUSHING together are fields of RunOptions."""


def check_words(words: Sequence[str]) -> None:
    """Raise RecipeError for an empty option or argument, which mostly comes from a shell variable that is not set."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.strip() and not (name.startswith("--") and equals and not value.strip()):
            continue
        before = words[number - 1] if number and words[number - 1].startswith("-") else "an argument"
        option = name.strip() or before
        raise RecipeError(f"{option} is empty", where=COMMAND_LINE, fix=f"give {option} a value, or leave it out")


def check_files(written: Mapping[str, Path | None], draft: Draft | None, recipe: str | None) -> None:
    """Raise OutputError if a file to be written (by option) is a folder, or another input or output."""
    taken = {} if draft is None else {_resolve(path): str(path) for path in draft.local_paths}
    if recipe:
        taken[_resolve(Path(recipe))] = f"--recipe {recipe}"
    for option, file in written.items():
        if file is None:
            continue
        place, where = _resolve(file), f"{option} {file}"
        if option not in ("--output", "--save") and (there := existing_path(str(file))) and there.is_dir():
            raise OutputError("this is a folder", where=where, fix="give the path of a file")
        # what --output may replace is looked at elsewhere, and a recipe may be saved over itself
        if place in taken and option != "--output" and not (option == "--save" and taken[place].startswith("--recipe")):
            what = f"{option} would write over what is given as {quoted(taken[place])}"
            raise OutputError(what, where=where, fix=f"give {option} another path")
        inside = [name for other, name in taken.items() if other in place.parents]
        if inside and option != "--output":
            what = f"{option} would write into {quoted(inside[0])}"
            raise OutputError(what, where=where, fix=f"give {option} another path")
        taken.setdefault(place, where)


def _resolve(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all: whoever writes or reads it says so
        return path
