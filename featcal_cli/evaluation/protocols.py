"""Compare the predictions of several models on the same examples: by the names of the classes or by generated text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.labelled import LabelledRows, open_labelled
from featcal_cli.data.preprocessing import (
    Target,
    TextModels,
    Vocabulary,
    load_preprocessor,
    map_ids,
    open_tokens,
    renumber,
)
from featcal_cli.data.rows import naming_task, read_classes
from featcal_cli.evaluation.results import Score, score
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.loading import Model, load_model
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.schema import Data, Evaluate
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.runtime.progress import quiet_transformers

TEXTS = 256
"""Number of texts that are encoded at once."""
IMAGE_SIDE = ("vision", "visual")
"""Beginnings of the names of the parameters that process images in a two-tower model."""
SECONDS_BETWEEN_COUNTS = 5.0

TRAINED_WITH = ("masked_spec_embed", "mask_token", "logit_scale", "logit_bias")
"""Names of parameters that only training uses, or that change no order of predictions."""
SAME_DIRECTION = 0.99
"""Cosine above which two directions of a text differ by rounding alone."""
GROUP_BYTES = 2**29
"""Bytes of batches that a model processes on the device before the next model takes its place there."""


@dataclass(frozen=True)
class Predictor:
    """One model with the function that makes its predictions."""

    module: PreTrainedModel
    """The model, in host memory."""
    predict: Callable[[Batch], list[Any]]
    """Function from a batch to one prediction per example; it is called with model and batch on the device, and with
    floating-point inputs in the model's dtype."""


@contextmanager
def on_device(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager in which the weights and buffers of a model are on the device. It must be entered outside of
    torch's inference mode."""
    tensors = [] if device.type == "cpu" else [*module.parameters(), *module.buffers()]
    homes = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, home in zip(tensors, homes, strict=True):
            tensor.data = home


@dataclass(frozen=True)
class LabelledTask:
    name: str
    data: Data
    how: Evaluate
    folders: Sequence[Path]
    """Folders that are searched for preprocessors and the tokenizer."""
    device: torch.device
    batch_size: int
    limit: int | None
    """Number of examples, chosen at random; None for all examples."""
    text_models: TextModels
    """The models that read the task's texts, by role."""
    max_length: int | None
    """Number of tokens of the longest text; None for what a model and its tokenizer allow."""
    note: Callable[[str], None]
    """Function that is told of a choice that the user did not make."""

    def open(self, model: PreTrainedModel) -> LabelledRows:
        """Open the rows, with their labels if the metric needs any, as inputs for models of this architecture. Raises
        DataError."""
        target = Target(model, self.folders, self.text_models, self.max_length)
        labelled = not METRICS[self.how.metric].of_texts
        return open_labelled(self.name, self.data, self.how.split, target, limit=self.limit, labelled=labelled)

    def open_tokens(self) -> Vocabulary:
        """Return the vocabulary whose tokenizer cuts the texts. Raises DataError if no tokenizer can be loaded."""
        with naming_task(self.name, self.data):
            return open_tokens(self.text_models, self.folders).cutting

    def find_vocabulary(self, role: str) -> Vocabulary | None:
        """Return the model's own vocabulary, or None if it is not known."""
        return self.text_models.vocabularies.find(role)


FIT: Mapping[str, tuple[str, str]] = {
    "zero-shot": (
        "has no text tower to read prompts with",
        "name a full CLIP as base, e.g. openai/clip-vit-base-patch32",
    ),
    "generation": (
        "does not read a text and write another",
        "measure language models with lm_eval: or metric: perplexity under evaluate",
    ),
    "texts": (
        "does not predict the next token of a text",
        "leave metric: perplexity out; `featcal recipes recipe.schema.json` describes the other metrics",
    ),
}
"""A phrase on what a model lacks that a protocol cannot measure, and the fix, by protocol."""


def suits(protocol: str, model_class: type[PreTrainedModel], config: Any) -> bool:
    """Return whether a protocol of FIT can measure models of a class, as far as class and config tell. Zero-shot asks
    this of base, which reads the classes' names for all models."""
    if protocol == "zero-shot":
        return hasattr(model_class, "get_text_features")
    return bool(model_class.can_generate()) and (protocol == "texts" or bool(config.is_encoder_decoder))


def refuse(protocol: str, role: str, model_class: type[PreTrainedModel], where: str) -> CheckpointError:
    """Return the error for a model that a protocol of FIT cannot measure."""
    what, fix = FIT[protocol]
    return CheckpointError(f"{role} {what} ({model_class.__name__})", where=where, fix=fix)


def refuse_rows(task: str, data: Data) -> DataError:
    """Return the error for rows that do not say what a decoder is to write."""
    fix = "name the column that holds it: columns: {response: COLUMN}; and take out the rows without it"
    return DataError("a row lacks what the model is to write", where=f"{task}: {data}", fix=fix)


def compare(
    task: LabelledTask,
    rows: LabelledRows,
    read_label: Callable[[Any], Any],
    predictors: Mapping[str, Predictor],
    tell: Callable[[int], None],
) -> dict[str, Score]:
    """Return the score of each role's predictor. read_label: function from a row's label to the correct prediction.
    tell: called every few seconds with the number of finished examples. Raises DataError for rows that cannot be
    used."""
    right: list[Any] = []
    predictions: dict[str, list[Any]] = {role: [] for role in predictors}
    last = time.monotonic()
    for group in _read_groups(task, rows):
        for _, labels in group:
            right += map(read_label, labels)
        for role, predictor in predictors.items():
            with on_device(predictor.module, task.device), torch.inference_mode():
                kind = predictor.module.dtype
                for batch, _ in group:
                    placed = {
                        name: x.to(task.device, kind if x.is_floating_point() else x.dtype) for name, x in batch.items()
                    }
                    predictions[role] += predictor.predict(placed)
        if time.monotonic() - last > SECONDS_BETWEEN_COUNTS:
            tell(len(right))
            last = time.monotonic()
    metric = METRICS[task.how.metric]
    return {role: score(metric, given, right) for role, given in predictions.items()}


def _read_groups(task: LabelledTask, rows: LabelledRows) -> Iterator[list[tuple[Batch, list[Any]]]]:
    """Yield groups of batches with their labels; a model processes a whole group each time it is on the device."""
    most = 0 if task.device.type == "cpu" else GROUP_BYTES
    group: list[tuple[Batch, list[Any]]] = []
    for batch, labels in rows.batches(task.batch_size):
        group.append((batch, labels))
        if sum(value.nbytes for given, _ in group for value in given.values()) >= most:
            yield group
            group = []
    if group:
        yield group


def in_finer_dtype(module: PreTrainedModel, source: Model) -> PreTrainedModel:
    """Convert `module`, which is to take weights over from `source`, to a dtype that holds the values of both."""
    return module.to(torch.promote_types(module.dtype, source.dtype))


def take_over(module: torch.nn.Module, source: Mapping[str, Tensor], role: str, snapshot: Snapshot) -> None:
    """Set all parameters of `module`, and its buffers that `source` has (the statistics of batch norms), to the values
    in `source`, which are those of a model called `role`. Raises CheckpointError for one that does not fit."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in source and not isinstance(tensor, torch.nn.Parameter):
            continue
        if name not in source or source[name].shape != tensor.shape:
            raise _explain(name, role, snapshot)
        tensor.data = source[name].data.to(tensor.dtype)


def check_whole(model: Model) -> None:
    """Raise CheckpointError if a model's files lack some of the parameters that it predicts with, which are random
    then."""
    for name in sorted(model.missing):
        if name.rpartition(".")[2] not in TRAINED_WITH:
            raise _explain(name, model.role, model.snapshot)


def _explain(name: str, role: str, snapshot: Snapshot) -> CheckpointError:
    what = f"{role} has no {name}, or one of another shape"
    return CheckpointError(what, where=snapshot.name, fix="evaluate whole models of one architecture")


# Zero-shot: the class whose name base's text tower puts nearest to the image


def compare_zero_shot(
    task: LabelledTask, base: Model, towers: Mapping[str, PreTrainedModel], tell: Callable[[int], None]
) -> dict[str, Score]:
    """Compare several models' image features with the texts of `base`; `towers` come from `load_tower`, by role.

    Raises CheckpointError for a base without a text tower, and DataError for classes that have no names.
    """
    vision = getattr(base.module, "vision_model", None)
    if not suits("zero-shot", type(base.module), None) or not isinstance(vision, PreTrainedModel):
        raise refuse("zero-shot", "base", type(base.module), base.snapshot.name)
    check_whole(base)
    rows = task.open(vision)
    names = read_classes(task.data, task.how.split, rows.column) or []
    classes = task.how.classes or names
    if classes[: len(names)] != names and set(names) <= set(classes):
        task.note(f"{task.name}: the data give these classes other numbers than the recipe; they are matched by name")
        classes = [*names, *(name for name in classes if name not in names)]
    if not classes:
        what = f"nothing says what the classes in column {rows.column} are called"
        raise DataError(what, where=rows.where, fix="list their names, by number, as classes: under evaluate")
    texts = _embed_classes(task, base, classes)
    read_label = partial(_read_number, {name: number for number, name in enumerate(classes)}, len(classes), rows)
    predictors = {role: _predict_by_texts(tower, texts) for role, tower in towers.items()}
    return compare(task, rows, read_label, predictors, tell)


def load_tower(role: str, snapshot: Snapshot, base: Model) -> PreTrainedModel:
    """Load a model in base's class, so that it processes images as base does. A full model is loaded as it is; a vision
    tower alone gets base's projection. Raises CheckpointError for a model that lacks base's image side."""
    model = load_fitting(role, snapshot, base)
    missing = [name for name in model.missing if model.part or name.startswith(IMAGE_SIDE)]
    if missing:
        raise _explain(missing[0], role, snapshot)
    if not model.part:
        return model.module
    combined = in_finer_dtype(load_model(role, base.snapshot, type(base.module)).module, model)
    prefix = f"{model.part}."
    tower = {name.removeprefix(prefix): value for name, value in model.parameters.items() if name.startswith(prefix)}
    take_over(combined.get_submodule(model.part), tower, role, snapshot)
    return combined


def _embed_classes(task: LabelledTask, base: Model, classes: Sequence[str]) -> Tensor:
    """Return the direction of each class [classes, width]: the normalised text features of all prompts with the class's
    name, averaged and normalised again. Raises DataError without a tokenizer."""
    with naming_task(task.name, task.data):
        tokenizer, _ = load_preprocessor("tokenizer", [base.snapshot.folder, *task.folders])
    prompts = task.how.prompts
    texts = [prompt.replace("{}", name) for name in classes for prompt in prompts]
    module: Any = base.module
    most = Target(module).most_tokens(tokenizer)

    def embed(some: Sequence[str], padding: bool | str, *, masked: bool = True) -> Tensor:
        options = {"padding": padding, "max_length": most, "truncation": True, "return_attention_mask": True}
        tokens = tokenizer(some, padding_side="right", return_tensors="pt", **options)
        names = ("input_ids", "attention_mask") if masked else ("input_ids",)
        given = {name: tokens[name].to(task.device) for name in names}
        return normalize(_pool(module.get_text_features(**given)).float(), dim=-1)

    with on_device(module, task.device), torch.inference_mode():
        # what reads the last place, padding or not, was trained on texts that are padded to its full length (SigLIP),
        # which a text shows that leaves room for padding
        short = [min(texts, key=len)]
        is_full = float((embed(short, False) * embed(short, "max_length")).sum()) < SAME_DIRECTION
        padding = "max_length" if is_full else True
        starts = range(0, len(texts), TEXTS)
        directions = [embed(texts[start : start + TEXTS], padding, masked=not is_full) for start in starts]
        return normalize(torch.cat(directions).unflatten(0, (len(classes), len(prompts))).mean(1), dim=-1)


def _predict_by_texts(tower: Any, texts: Tensor) -> Predictor:
    """Make the predictor of the class whose direction in `texts` [classes, width] is nearest to an image's features."""

    def predict(batch: Batch) -> list[int]:
        features = _pool(tower.get_image_features(pixel_values=batch["pixel_values"])).float()
        chosen: list[int] = (features @ texts.T).argmax(-1).tolist()
        return chosen

    return Predictor(tower, predict)


def _pool(features: Any) -> Tensor:
    """Return the features, which some versions of transformers 5 wrap in an output object."""
    pooled: Tensor = getattr(features, "pooler_output", features)
    return pooled


def _read_number(numbers: Mapping[str, int], count: int, rows: LabelledRows, label: Any) -> int:
    """Return a label as the number of one of `count` classes or answers. Raises DataError for one beyond them."""
    number = number_label(label, rows.column, numbers, rows.where)
    if number >= count:
        what = f"label {number} in column {rows.column} has no name and no answer: there are {count}"
        raise DataError(what, where=rows.where, fix="list all classes or answers, by number, under evaluate")
    return number


# Generation: a text is right when it is the wanted one to the letter


def compare_generation(
    task: LabelledTask, models: Mapping[str, Model], tell: Callable[[int], None]
) -> dict[str, Score]:
    """Compare several models that generate text, by role. Raises CheckpointError for models that are not
    encoder-decoders, and DataError."""
    for model in models.values():
        if not suits("generation", type(model.module), model.module.config):
            raise refuse("generation", model.role, type(model.module), model.snapshot.name)
        check_whole(model)
    rows = task.open(next(iter(models.values())).module)
    cutting, most = task.open_tokens(), task.how.max_new_tokens
    predictors = {role: _generate(model, cutting, task.find_vocabulary(role), most) for role, model in models.items()}
    return compare(task, rows, partial(_read_answer, task.how.answers or (), rows), predictors, tell)


def _generate(model: Model, cutting: Vocabulary, own: Vocabulary | None, max_new_tokens: int) -> Predictor:
    """Make the predictor that generates text with the likeliest token at each step, and leaves out special tokens.
    cutting: the vocabulary of the batches; own: the model's own, or None if it is not known."""
    module: Any = model.module
    table = None if own is None else map_ids(cutting, own)
    tokenizer = cutting.tokenizer if own is None or table is None else own.tokenizer
    limits = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens, "use_cache": True}

    def predict(batch: Batch) -> list[str]:
        given = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
        given = renumber(given, table)
        with quiet_transformers():
            written = module.generate(**given, **limits)
        texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
        return texts

    return Predictor(module, predict)


def _read_answer(answers: Sequence[str] | str, rows: LabelledRows, label: Any) -> str:
    """Return the correct text for a label, looked up by its number or made by a format string. Raises DataError if
    there is none."""
    if isinstance(answers, str):
        try:
            with suppress(ValueError):
                return answers.format(label)
            # a number, which a .csv file holds as a text
            with suppress(ValueError):
                return answers.format(int(label))
            return answers.format(float(label))
        except (ValueError, TypeError, LookupError) as error:
            what = f"label {label!r} in column {rows.column} does not fit {answers!r} ({error})"
            raise DataError(what, where=rows.where, fix="change answers: under evaluate") from None
    return answers[_read_number({}, len(answers), rows, label)]
