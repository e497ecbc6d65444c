"""Compare the classes that an expert's own head ranks first, on several models' bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.labelled import LabelledRows
from featcal_cli.data.preprocessing import map_ids
from featcal_cli.data.rows import read_classes
from featcal_cli.evaluation.protocols import LabelledTask, Predictor, check_whole, compare, in_finer_dtype, take_over
from featcal_cli.evaluation.results import EXPERT, Score
from featcal_cli.models.loading import Model, load_model
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.runtime.sanitise import list_some


def compare_heads(
    task: LabelledTask, expert: Model, bodies: Mapping[str, Model | None], tell: Callable[[int], None]
) -> dict[str, Score]:
    """Compare the expert's head on several bodies, by role; None stands for the expert's own body. Raises
    CheckpointError and DataError."""
    rows = task.open(expert.module)
    own = task.find_vocabulary(EXPERT)
    predictors = {}
    for role, body in bodies.items():
        other = task.find_vocabulary(role)
        table = None if own is None or other is None or body is None else map_ids(own, other)
        predictors[role] = _predict_with_head(expert, body, table)
    return compare(task, rows, _read_classes_of_head(task, rows, expert), predictors, tell)


def _read_classes_of_head(task: LabelledTask, rows: LabelledRows, expert: Model) -> Callable[[Any], int]:
    """Return the function from a label to the class of the expert's head. A name is a class by the head's config. So is
    a number if the data name their classes, because the head may have them in another order: the order of folders'
    names, for example, is nobody's choice. The function raises DataError for a label that is no class of the head."""
    config, count = expert.module.config, int(expert.module.config.num_labels or 0)
    known = {str(name): int(number) for number, name in (config.id2label or {}).items()}
    known |= {str(name): int(number) for name, number in (config.label2id or {}).items()}
    spelled = {name.strip().casefold(): number for name, number in known.items()}

    def find(name: str) -> int | None:
        return known.get(name, spelled.get(name.strip().casefold()))

    names = read_classes(task.data, task.how.split, rows.column) or []
    places = [find(name) for name in names]
    if None in places:
        if not all(re.fullmatch(r"label_\d+", name) for name in spelled):
            ours, theirs = list_some(names), list_some(known)
            what = f"the data call their classes {ours}, and the expert's head calls its own {theirs}"
            task.note(f"{task.name}: {what}; they are matched by number")
        places = list(range(len(names)))

    def read(label: Any) -> int:
        number = find(label) if isinstance(label, str) else None
        if number is None:
            number = number_label(label, rows.column, {}, rows.where)
            number = places[number] if number < len(places) else number
        if number is None or number >= count:
            what = f"label {number} in column {rows.column} is no class of the expert's head: it has {count}, from 0"
            raise DataError(what, where=rows.where, fix="number the classes as the head does, or give their names")
        return number

    return read


def _predict_with_head(expert: Model, body: Model | None, table: Tensor | None) -> Predictor:
    """Make the predictor of the class that the expert's head ranks first, on its own body or on another model's
    (everything inside `_find_body`). `table` has the body's id of each of the expert's tokens if these differ.

    Raises CheckpointError for an expert without a head, or if body and head do not fit.
    """
    what = f"{expert.role} has no head that tells classes apart ({type(expert.module).__name__})"
    fix = "say under evaluate how it is measured instead: prompts, answers or lm_eval"
    if not (expert.module.can_generate() or hasattr(expert.module, "get_image_features")):
        fix = "compare outputs without labels instead: featcal inspect-drift"
    headless = CheckpointError(what, where=expert.snapshot.name, fix=fix)
    if _find_body(expert.module) is None or expert.module.config.num_labels == 1:  # a score
        raise headless
    check_whole(expert)
    module = expert.module
    if body is not None:
        module = in_finer_dtype(load_model(expert.role, expert.snapshot, type(module)).module, body)
        inner: Any = _find_body(module)
        source: Any = next(
            (part for part in body.module.modules() if type(part) is type(inner)), body.module.base_model
        )
        random = [x for name, x in body.module.named_parameters() if name in body.missing]
        named: dict[str, Tensor] = {
            name: x for name, x in source.state_dict(keep_vars=True).items() if not any(x is y for y in random)
        }
        if table is not None and isinstance(inner.get_input_embeddings(), torch.nn.Embedding):
            # the expert's ids stay, because its config names some of them (padding, end)
            own, other = (part.get_input_embeddings().weight for part in (inner, source))
            rows, count = own.data.clone(), min(len(table), len(own))
            rows[:count] = other.data[table[:count].clamp(max=len(other) - 1)].to(rows.dtype)
            named |= {name: rows for name, value in named.items() if value is other}
        take_over(inner, named, body.role, body.snapshot)

    def predict(batch: Batch) -> list[int]:
        logits = getattr(module(**batch), "logits", None)
        # others are of every token, or of the ends of an answer
        if logits is None or logits.shape[1:] != (module.config.num_labels,):
            raise headless
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    return Predictor(module, predict)


def _find_body(module: PreTrainedModel) -> PreTrainedModel | None:
    """Return what lies below a model's head: its base model or, as in CLIP's and Whisper's classifiers, the one model
    in it; None if there is no such part."""
    if module.base_model is not module:
        return cast(PreTrainedModel, module.base_model)
    parts = [part for part in module.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else None
