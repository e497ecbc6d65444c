"""Define the keys of a recipe: the values that each may have, and which combinations are valid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from featcal_cli.recipe.merge_methods import METHODS, MethodName
from featcal_cli.recipe.metrics import METRICS, MetricName
from featcal_cli.recipe.references import ModelName, Name, bare_id, existing_path, parse_source, split_revision
from featcal_cli.runtime.errors import RecipeError

SELF = "self"
"""The value of `dataset` that makes the expert write its own examples."""
Role = Literal["image", "audio", "text", "text_pair", "messages", "prompt", "response", "label"]
"""The roles that a column of a dataset can have."""


@dataclass(frozen=True)
class AsOption:
    """Marks a key that is also a command-line option; the option's help is the string under the key."""

    metavar: str = ""
    """Placeholder for the value in the help; if empty, the possible choices are shown."""
    names: tuple[str, ...] = ()
    """The option's names; if empty, derived from the key."""
    group: Literal["method", "machine", "hub"] = "method"
    """Section of the help in which the option is listed."""

    @staticmethod
    def of(field: FieldInfo) -> AsOption | None:
        """Return the mark of a key, or None if the key is no option."""
        return next((mark for mark in field.metadata if isinstance(mark, AsOption)), None)


class Section(BaseModel):
    """A group of recipe keys, each described by the string below it; unknown keys are refused, and nothing changes
    after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, use_attribute_docstrings=True)


def _describe_entries(registry: Mapping[Any, Any]) -> str:
    """Return the description of a key whose values are the entries of a registry."""
    return " ".join(f"`{name}`: {entry.about}." for name, entry in registry.items())


class Evaluate(Section):
    """How a task is measured: by `prompts`, `answers`, `lm_eval` or perplexity, otherwise with the expert's head."""

    split: Name = "test"
    """The split of the task's dataset to measure on; lm-eval brings its own data."""
    metric: MetricName = Field(default="accuracy", description=_describe_entries(METRICS))
    prompts: tuple[str, ...] = ()
    """Sentences about an image in which {} is a class's name; CLIP's text tower reads them."""
    classes: tuple[str, ...] | None = None
    """Names of the classes by number; if left out, the dataset's label names."""
    answers: tuple[str, ...] | str | None = None
    """Text that a model should write: a list by the label's number, or a format for the label, e.g. "{:.1f}"."""
    max_new_tokens: int = Field(default=10, ge=1)
    """The longest answer, in tokens."""
    lm_eval: dict[str, str] = Field(default_factory=dict)
    """lm-eval's task → its metric, METRIC or METRIC,FILTER; with several tasks, their mean is used."""
    chat: bool | None = None
    """Put lm-eval's questions into the chat template; if left out, only if the tokenizer has one."""

    @model_validator(mode="after")
    def _one_protocol(self) -> Evaluate:
        given = [key for key in ("prompts", "answers", "lm_eval") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different ways to measure: give one of them")
        if (protocol := given[0] if given else "") != "prompts" and self.classes is not None:
            raise ValueError("classes belong to prompts")
        for prompt in self.prompts:
            if prompt.count("{}") != 1:
                raise ValueError(f"a prompt has one {{}} for the class's name: {prompt!r} has {prompt.count('{}')}")
        if isinstance(self.answers, str) and not re.fullmatch(r"[^{}]*\{(:[^{}]*)?\}[^{}]*", self.answers):
            raise ValueError(f'answers is a list, or a format with one {{}} as "{{:.1f}}", not {self.answers!r}')
        if METRICS[self.metric].of_numbers and not isinstance(self.answers, str):
            raise ValueError(f'{self.metric} compares numbers: say how they are written, as answers: "{{:.1f}}"')
        if METRICS[self.metric].of_texts and protocol:
            raise ValueError(f"{self.metric} is measured on the task's own texts: leave out {protocol}")
        if self.chat is not None and protocol != "lm_eval":
            raise ValueError("chat belongs to lm_eval")
        return self

    @model_serializer(mode="wrap")
    def _as_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that were given, as most keys belong to a single way of measuring."""
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    @property
    def protocol(self) -> Literal["zero-shot", "generation", "lm-eval", "texts", "heads"]:
        """The way in which the task's figure is measured."""
        if self.prompts:
            return "zero-shot"
        if self.answers is not None:
            return "generation"
        return "texts" if METRICS[self.metric].of_texts else "lm-eval" if self.lm_eval else "heads"


class Merge(Section):
    """A merged model that featcal builds: the experts' mean, or the base plus a part of Σ (expert − base)."""

    method: MethodName = Field(description=_describe_entries(METHODS))
    scale: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    """Factor of the experts' changes, in methods that have one."""
    density: float = Field(default=0.2, gt=0, le=1, allow_inf_nan=False)
    """Share of each expert's changes that is kept, in methods that drop some."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of the random choice, in methods that make one."""

    @model_validator(mode="after")
    def _check_keys(self) -> Merge:
        if unread := self.model_fields_set - {"method", *METHODS[self.method].numbers}:
            raise ValueError(f"{self.method} has no {min(unread)}")
        return self

    @model_serializer(mode="wrap")
    def _as_read(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that the method reads."""
        return {key: value for key, value in write(self).items() if key in ("method", *METHODS[self.method].numbers)}

    def __str__(self) -> str:
        """Return the method and its numbers, as in "ties 0.3 0.2"."""
        numbers = (str(getattr(self, key)).removesuffix(".0") for key in METHODS[self.method].numbers)
        return " ".join([self.method, *numbers])

    @property
    def option(self) -> str:
        """The equivalent value of --merge, as in "ties:0.3:0.2"."""
        return str(self).replace(" ", ":")


class Data(Section):
    """The source of a task's calibration examples: a Hub dataset, a local file or folder, or the expert itself."""

    dataset: Name | None = None
    """Hub dataset id; or self: the expert, a causal language model, writes the examples."""
    path: Name | None = None
    """Local folder, file of texts or table, or .safetensors file; relative paths start at the recipe's folder."""
    revision: Name | None = None
    """Branch, tag or commit of the dataset; if left out, main."""
    config: Name | None = None
    """The dataset's config; if left out, its only one, the one with the task's name, or its default."""
    split: Name | None = None
    """The dataset's split; if left out, train if there is one."""
    columns: dict[Role, str] = Field(default_factory=dict)
    """Role (image, text, text_pair, messages, prompt, response, label) → column; detected if left out."""
    template: str | None = None
    """Text built from several columns, e.g. "{premise} {hypothesis}"."""

    @model_validator(mode="before")
    @classmethod
    def _read_page(cls, values: Any) -> Any:
        """Replace the address of a dataset's page by its name and, unless it is given beside it, its revision."""
        name = values.get("dataset") if isinstance(values, dict) else None
        if not isinstance(name, str) or (reference := bare_id(name)) == name:
            return values
        dataset, revision = split_revision(reference)
        return {"revision": revision, **values, "dataset": dataset}

    @property
    def has_source(self) -> bool:
        """Whether a dataset or path is named, and not only how to read it."""
        return not (self.dataset is None and self.path is None)

    @property
    def is_self_written(self) -> bool:
        """Whether the expert writes the examples itself."""
        return self.dataset == SELF

    @property
    def reference(self) -> str:
        """The reference `ID[@REVISION]` of a dataset on the Hub; empty for any other source."""
        named = "@".join(filter(None, (self.dataset, self.revision)))
        return "" if self.is_self_written else named

    def read_as(self, said: Data | None) -> Data:
        """Return this source with the user's columns, split and template. Raises RecipeError if they do not suit it."""
        if said is None or said.has_source:
            return self
        columns = {**self.columns, **said.columns}
        try:
            return Data.model_validate({**self.model_dump(), **said.model_dump(exclude_none=True), "columns": columns})
        except ValidationError as error:
            what, fix = error.errors()[0]["msg"].removeprefix("Value error, "), "leave that out, or give other data"
            raise RecipeError(what, where=f"data {self}", fix=fix) from None

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        how = [key for key in ("split", "columns", "template") if getattr(self, key)]
        of_hub = [key for key in ("revision", "config") if getattr(self, key)]
        if (self.dataset is None) == (self.path is None):
            # how to read what is yet to be found
            if self.has_source or not how or of_hub:
                raise ValueError("give either dataset or path")
        elif self.path and of_hub:
            what = f"{' and '.join(of_hub)} cannot be set for a path, only for a dataset on the Hub"
            raise ValueError(f"{what}; the path may be that of one folder or file of the data")
        elif self.path and self.path.endswith(".safetensors") and how:
            what = f"{' and '.join(how)} cannot be set for a .safetensors file"
            raise ValueError(f"{what}, whose tensors are the model's arguments as they are")
        elif self.is_self_written and (given := [*how, *of_hub]):
            raise ValueError(f"{' and '.join(given)} cannot be set for what an expert writes itself")
        return self

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        parts = [self.config or "", self.split] if self.split else [self.config] if self.config else []
        return ":".join([self.reference or str(self.dataset), *parts])


Source = Annotated[
    Data,
    BeforeValidator(
        lambda value: parse_source(value) if isinstance(value, str) else value, json_schema_input_type=str | Data
    ),
]


class TaskDraft(Section):
    """One task; featcal looks for what is left out."""

    expert: ModelName | None = None
    """The model that was fine-tuned on the task: Hub id[@revision] or folder; BASE+ADAPTER for a PEFT adapter."""
    data: Source | None = None
    """Examples without labels: DATASET[:CONFIG[:SPLIT]], a path, self, or a group of keys."""
    evaluate: Evaluate | None = None
    """How the task is measured; `{}` means with the expert's own head. Tasks without it are left out; if none has it,
    `featcal evaluate` measures the perplexity of models that write text."""


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
    """The method and its settings; λ, ρ, α, metric and order are the method's own where they are left out."""

    method: Annotated[Literal["featcal", "paper"], AsOption()] = "featcal"
    """`featcal`: errors measured by their effect on outputs, module by module, every update checked on held-out rows;
    `paper`: features, block by block, the paper's λ, ρ and α for the kind of model, no checks."""
    examples: Annotated[int, AsOption("N", ("--examples", "-n"))] = Field(default=256, ge=1, le=10**9)
    """Examples per task to calibrate with, at most. If texts are long, as many as fit 512 N tokens, at least 64."""
    max_length: Annotated[int | None, AsOption("N", ("--max-length",))] = Field(default=None, ge=8, le=10**6)
    """Longest text in tokens; the rest is cut off, of a chat at the end of an answer where possible. If left out, what
    the model and its tokenizer allow, at most 2048."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], AsOption(group="machine")] = "auto"
    """Precision of forward passes; `auto` is bfloat16 for models stored in it on a GPU that has units for it, else
    float32."""
    ridge: Annotated[float | None, AsOption("F")] = Field(default=None, ge=0, le=1e9, allow_inf_nan=False)
    """λ: weight of the anchor."""
    rho: Annotated[float | None, AsOption("F")] = Field(default=None, ge=0, le=1e6, allow_inf_nan=False)
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: Annotated[float | None, AsOption("F")] = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    """α: target features = α · expert + (1 − α) · calibrated."""
    metric: Literal["features", "output"] | None = None
    """How errors are measured: by `features`, as in the paper, or by `output`, their effect on the expert's outputs."""
    order: Literal["block", "module"] | None = None
    """The unit that is solved at once: a whole `block`, as in the paper, or a `module`, on inputs calibrated before."""
    norms: Literal["auto", "layernorm", "all", "none"] = "auto"
    """Which norms are calibrated: `auto` and `layernorm` those with a bias, `all` RMSNorm too."""
    routers: bool = False
    """Calibrate the Linear with which a mixture chooses its experts, too."""
    stems: bool = False
    """Calibrate what runs before the first block and holds convolutions, as patch embeddings, too."""
    bias: bool = True
    """Calibrate the biases of Linear modules."""
    head: bool | None = None
    """Calibrate a language model's head too, to the experts' predictions; if left out, with the method `featcal`."""
    token_weights: Literal["auto", "uniform", "cls"] = "auto"
    """How tokens count: `uniform` all equally; `cls` the first one most, in the last block; `auto` by how far they move
    the expert's outputs where errors are measured by these, else as one of the two."""
    refine: Annotated[bool | None, AsOption(names=("--refine/--no-refine",))] = None
    """Refine the result by a distillation to the experts' probabilities on the same examples. If left out, language
    models are refined for a short while, with the method `featcal`."""
    seed: Annotated[int, AsOption("N")] = Field(default=42, ge=-(2**63), lt=2**63)
    """Seed for sampling examples."""

    @property
    def next_seed(self) -> int:
        """The seed for another draw of examples than that of a calibration."""
        return self.seed + 1 if self.seed < 2**63 - 1 else 0

    @property
    def uses_output_metric(self) -> bool:
        """Whether errors are measured by their effect on the experts' outputs."""
        return self.metric == "output" or (self.metric is None and self.method == "featcal")

    @property
    def solving_order(self) -> str:
        """The unit that is solved at once: `block` or `module`."""
        return self.order or ("module" if self.method == "featcal" else "block")

    @property
    def calibrates_head(self) -> bool:
        """Whether a language model's head is calibrated too."""
        return self.method == "featcal" if self.head is None else self.head

    @property
    def refines_language_models(self) -> bool:
        """Whether a language model is refined for a short while, as the user does not say otherwise."""
        return self.method == "featcal" and self.refine is None

    @property
    def must_not_get_worse(self) -> bool:
        """Whether updates are checked on held-out examples, and reduced if they make results there worse."""
        return self.method == "featcal"


class Output(Section):
    """Destination of the result besides the local folder."""

    push_to: Annotated[ModelName | None, AsOption("USER/NAME", group="hub")] = None
    """Push the result to this model repo."""
    private: Annotated[bool, AsOption(names=("--private",), group="hub")] = False
    """Make that repo private, if it is new."""
    commit_message: Name | None = None
    """Message of the commit; if left out, "Calibrate MERGED with featcal"."""


class Draft(Section):
    """A job as far as the user describes it: the merged model at least."""

    merged: Annotated[
        Annotated[ModelName, Tag("repo")] | Annotated[Merge, Tag("merge")],
        Discriminator(lambda value: "repo" if isinstance(value, str) else "merge"),
    ]
    """The merged model: Hub id[@revision] or folder; or keys that say how to build it."""
    base: ModelName | None = None
    """The model that the experts were fine-tuned from; if left out, it is found in the merged repo."""
    tasks: Mapping[Name, TaskDraft] = {}
    """The tasks by name; if left out, they are found in the merged repo."""
    skip_experts: tuple[Name, ...] | None = None
    """Tasks to leave out, e.g. if an expert was deleted."""
    calibration: Calibration = Field(default_factory=Calibration)
    """The settings of the method."""
    output: Output = Field(default_factory=Output)
    """Destination of the result."""
    paper: Mapping[str, Any] = Field(default={}, exclude=True)
    """Figures of the paper by table, for `benchmarks/reproduce.py`; the commands ignore them."""

    _file: str = PrivateAttr("")
    """Name of the recipe's file, without its ending."""

    @property
    def name(self) -> str:
        """The name for the output: the merged model's id or path, else the recipe file's or the merge method's."""
        if isinstance(self.merged, Merge):
            return self._file or str(self.merged).replace(" ", "-")
        if existing_path(self.merged):
            return self.merged
        return self.merged.rpartition("+")[2].partition("@")[0]

    @property
    def local_paths(self) -> list[Path]:
        """All local files and folders that the job names, as absolute paths."""
        experts = [task.expert for task in self.tasks.values()]
        models = [self.merged if isinstance(self.merged, str) else None, self.base, *experts]
        names = [task.data.path for task in self.tasks.values() if task.data and task.data.path]
        names += [part for name in models if name for part in (name, *name.split("+"))]  # BASE+ADAPTER
        return [path for name in names if (path := existing_path(name))]


class Recipe(Draft):
    """One job, complete. Raises pydantic's ValidationError for a key that is unknown or does not fit."""

    base: ModelName
    tasks: Mapping[Name, Task] = Field(min_length=1)
