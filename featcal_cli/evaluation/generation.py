"""Text generation: a model's answer is right when it is the wanted text to the letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.examples import open_labelled
from featcal_cli.data.preprocessors import load_tokenizer
from featcal_cli.evaluation.protocol import Answerer, Contest
from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Data, Evaluate
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.runtime.progress import quiet_transformers


def prepare_generation(
    task: str,
    data: Data,
    spec: Evaluate,
    models: Mapping[str, Model],
    folders: Sequence[Path],
    device: torch.device,
    limit: int | None,
) -> Contest:
    """Several models that write answers, by role. Raises CheckpointError for models that are not encoder-decoders, and
    DataError."""
    for model in models.values():
        if not (model.module.config.is_encoder_decoder and model.module.can_generate()):
            raise CheckpointError(
                f"{model.role} does not read a text and write another ({type(model.module).__name__})",
                where=model.snapshot.name,
                fix="measure language models with lm_eval: under evaluate",
            )
    first = next(iter(models.values()))
    rows = open_labelled(task, data, spec.split, first.module, folders, limit=limit)
    tokenizer, _ = load_tokenizer(folders, rows.where)
    return Contest(
        rows,
        write_label(spec.answers or (), rows.column, rows.where),
        {role: answer_in_words(model, tokenizer, spec.max_new_tokens, device) for role, model in models.items()},
        read_number if spec.metric == "spearman" else None,
    )


def answer_in_words(model: Model, tokenizer: Any, max_new_tokens: int, device: torch.device) -> Answerer:
    """What the model writes, the likeliest token at each step, without special tokens."""
    module: Any = model.module.to(device)

    def answer(batch: Batch) -> list[str]:
        given = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
        with quiet_transformers():
            written = module.generate(
                **given, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, use_cache=True
            )
        answers: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
        return answers

    return answer


def write_label(answers: Sequence[str] | str, column: str, where: str) -> Callable[[Any], str]:
    """What makes the wanted text of a label: by its number, or by a format. Raises DataError where there is none."""

    def by_format(label: Any) -> str:
        try:
            return str(answers).format(label)
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"label {label!r} in column {column} does not fit {answers!r} ({error})",
                where=where,
                fix="change answers: under evaluate",
            ) from None

    def by_number(label: Any) -> str:
        number = number_label(label, column, {}, where)
        if number >= len(answers):
            raise DataError(
                f"label {number} in column {column} has no answer: there are {len(answers)}",
                where=where,
                fix="list an answer for every label, by its number, as answers: under evaluate",
            )
        return answers[number]

    return by_format if isinstance(answers, str) else by_number


def read_number(text: str) -> float:
    """The number that a text is; 0 for one that is none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0
