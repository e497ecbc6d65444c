"""What groups of recipe keys have in common, and how a task's figure is measured (`evaluate`)."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal
from unicodedata import category

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from featcal_cli.runtime.untrusted_text import show


def _check_name(text: str) -> str:
    if any(category(character) == "Cc" for character in text):
        raise ValueError(f"{show(text)} has a control character")
    return text


Name = Annotated[str, AfterValidator(_check_name)]
"""What names something; it may be shown on a terminal, and be a part of a path."""

ROLES = ("image", "text", "text_pair", "messages", "prompt", "response", "label")
"""What a column of a dataset can be."""


class Section(BaseModel):
    """A group of recipe keys; unknown keys are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Protocol = Literal["zero-shot", "generation", "lm-eval", "heads"]


class Evaluate(Section):
    """How a task's figure is measured: zero-shot with `prompts`, by generated `answers`, with `lm_eval`, or, where none
    of them is given, with the expert's own head."""

    split: Name = "test"
    """Of the task's dataset; lm-eval has data of its own."""
    metric: Literal["accuracy", "spearman"] = "accuracy"
    """The share of right answers; or, of answers that are numbers, Spearman's rank correlation with the labels."""
    prompts: tuple[str, ...] = ()
    """Sentences about an image in which {} is a class's name; CLIP's text tower reads them."""
    classes: tuple[str, ...] | None = None
    """Names of the classes by number; left out, those that the dataset gives its labels."""
    answers: tuple[str, ...] | str | None = None
    """What a model should write: by the label's number, or a format that makes it of the label, as "{:.1f}"."""
    max_new_tokens: int = Field(default=10, ge=1)
    """Of an answer."""
    lm_eval: dict[str, str] = Field(default_factory=dict)
    """lm-eval's task → its metric, METRIC or METRIC,FILTER; of several tasks, the mean counts."""
    chat: bool | None = None
    """Give lm-eval's questions the form of the chat template; left out, where the tokenizer has one."""

    @field_validator("answers", "classes", "prompts", mode="before")
    @classmethod
    def _quoted(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(each, (bool, int, float)) for each in value):
            raise ValueError("YAML reads yes, no and numbers as something else than text: put them in quotes")
        return value

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
        if isinstance(self.answers, str):
            _check_format(self.answers)
        if self.metric == "spearman" and not isinstance(self.answers, str):
            raise ValueError('spearman compares numbers: say how they are written, as answers: "{:.1f}"')
        if self.chat is not None and protocol != "lm_eval":
            raise ValueError("chat belongs to lm_eval")
        return self

    @model_serializer(mode="wrap")
    def _as_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys that were given: most belong to one way of measuring alone."""
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    @property
    def protocol(self) -> Protocol:
        """The way in which the figure is measured."""
        if self.prompts:
            return "zero-shot"
        if self.answers is not None:
            return "generation"
        return "lm-eval" if self.lm_eval else "heads"


def _check_format(text: str) -> None:
    """Raise ValueError for an answer that is not made of the label alone."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"answers is no list and no format: {error}") from None
    if fields != [""]:
        raise ValueError(f'answers is a list of texts, or a format with one {{}} as "{{:.1f}}", not {text!r}')
