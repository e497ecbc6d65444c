"""Token ids: find the id that each model of a job has for every token of the examples, if it differs from merged's
id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal_cli.data.batches import count_vocabulary
from featcal_cli.data.examples import TaskExamples
from featcal_cli.data.preprocessing import Vocabularies, Vocabulary, map_ids
from featcal_cli.data.tensors import is_tensor_file
from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Recipe
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.runtime.sanitise import list_some, plain
from featcal_cli.workflows.session import EXPERT

MERGED, BASE = "merged", "base"


@dataclass(frozen=True)
class TokenIds:
    """How each model of a job reads batches that hold ids of merged's vocabulary."""

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Tables from merged's ids to the model's own ids, by role; models with the same ids have none, nor do models
    without a tokenizer, whose ids are taken to be merged's."""
    classes: Mapping[str, Tensor] = field(default_factory=dict)
    """Tables from the classes of merged's head, which are token ids, to those of the model's own head, by role; −1 or a
    number beyond its rows for tokens that the model lacks. If merged has a head, models with a table of ids have one,
    and so do models whose head has another number of rows."""
    places: Mapping[str, Tensor] = field(default_factory=dict)
    """The place of each of an expert's own ids in the alphabetical order of its tokens, by role. Random numbers follow
    this order, as ids may be in any."""
    left_out: frozenset[str] = frozenset()
    """Roles of the models that do not run because they lack tokens of the examples."""


def find_token_ids(
    recipe: Recipe,
    outlines: Mapping[str, Model],
    examples: Mapping[str, TaskExamples],
    vocabularies: Vocabularies,
    note: Callable[..., None],
) -> TokenIds:
    """Compare every model's vocabulary with merged's on the tokens of the examples. If base lacks some, it is left out.
    Raises CheckpointError if any other model lacks some, and DataError if ids in a data file mean other tokens in the
    expert than in merged."""
    tables, classes, places, left_out = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor](), set()
    merged = vocabularies.find(MERGED)
    used = {task: _collect_ids(rows) for task, rows in examples.items()}
    if (fault := vocabularies.faults.get(MERGED)) and any(len(ids) for ids, _ in used.values()):
        note(f"ids of merged are taken to be the experts': {fault}")
    for role, outline in outlines.items():
        tasks = [task for task in examples if role in (f"{EXPERT}{task}", BASE) or not role.startswith(EXPERT)]
        ids, padded = (torch.cat([used[task][number] for task in tasks]).unique() for number in (0, 1))
        if role == MERGED or not len(ids):
            continue
        own, table = vocabularies.find(role), None
        if merged is not None and own is not None:
            table = map_ids(merged, own)
        # ids of a model without a tokenizer are taken to be merged's
        if role != BASE and (known := own or merged) is not None:
            found = find_places(known)
            # ids behind all tokens are no padding where examples hold some: a tokenizer that lacks them is not whole
            if table is not None or int(ids.max()) < len(found):
                places[role] = found
        if own is None and (fault := vocabularies.faults.get(role)):
            note(f"ids of {role} are taken to be merged's: {fault}")
        what = ""
        if table is not None and merged is not None and own is not None:
            for task in (task for task in tasks if is_tensor_file(recipe.tasks[task].data)):
                if merged.spell(used[task][0].tolist()) != own.spell(used[task][0].tolist()):
                    what = f"the ids are not the same tokens in {merged} and {own}"
                    fix = "give texts instead of ids: each model then gets its own ids of the same tokens"
                    raise DataError(what, where=f"{task}: {recipe.tasks[task].data}", fix=fix)
            tables[role] = table
            if (count := _count_classes(outlines[MERGED])) is not None:
                classes[role] = match_classes(merged, own, count)
            if lacking := [token for token in merged.spell(ids.tolist()) if token not in own.ids]:
                what = f"{role} lacks the tokens {list_some(lacking)}, which examples hold"
            padded = table[padded[padded < len(table)]]
        elif (count := _count_classes(outlines[MERGED])) not in (None, _count_classes(outline)):
            classes[role] = torch.arange(count)  # the same tokens, with more or fewer rows of padding behind them
        limit = count_vocabulary(outline.module)
        if not what and limit is not None and len(padded) and (largest := int(padded.max())) >= limit:
            what = f"{role} knows the tokens 0 to {limit - 1}, and examples hold {largest}"
        if not what:
            continue
        if role != BASE:
            fix = "use models with merged's vocabulary, or examples without the tokens that one of them lacks"
            raise CheckpointError(what, where=outline.snapshot.name, fix=fix)
        left_out.add(BASE)
        note(f"{what}: base is compared by its weights, and its drift is left out")
    return TokenIds(tables, classes, places, frozenset(left_out))


def match_classes(source: Vocabulary, target: Vocabulary, count: int) -> Tensor:
    """Return, for each of `count` token ids of `source`, the id of the same token in `target`; −1 if it has none. Ids
    that are no token in either are taken to be the same."""
    tokens, taken = {number: token for token, number in source.ids.items()}, set(target.ids.values())

    def match(number: int) -> int:
        if number in tokens:
            return target.ids.get(tokens[number], -1)
        return -1 if number in taken else number

    return torch.tensor([match(number) for number in range(count)])


def find_places(vocabulary: Vocabulary) -> Tensor:
    """Return the place of each token id in the alphabetical order of the tokens, of several tokens of one id the first.
    Ids without a token come last."""
    size = max(vocabulary.ids.values(), default=-1) + 1
    order = list(dict.fromkeys(number for _, number in sorted(vocabulary.ids.items())))
    order += sorted(set(range(size)).difference(order))
    return torch.tensor(order).argsort()


def check_mergeable(outlines: Mapping[str, Model], vocabularies: Vocabularies, note: Callable[..., None]) -> None:
    """Raise CheckpointError if featcal is to merge models that have a token under different ids, or different tokens
    under one id, because embeddings are merged row by row, or if an expert has a weight of its own that the first
    expert ties to another. `note` is told of parameters that are not merged."""
    roles = [role for role in outlines if role != MERGED]
    first, *further = (outlines[role] for role in roles if role.startswith(EXPERT))
    places = first.module.state_dict().keys() - first.parameters.keys()
    for expert in further:
        if own := sorted((places & expert.parameters.keys()) - expert.missing):
            what = f"{expert.role} has {own[0]} of its own, which {first.role} ties to another weight"
            fix = "name this expert first: the merged model has the tensors of the first one"
            raise CheckpointError(what, where="--merge", fix=fix)
    models, body = [outlines[role] for role in roles], f"{first.module.base_model_prefix}."
    # a tied weight has all of its names in the state
    states = [(model, model.module.state_dict()) for model in models]

    def has(model: Model, state: Mapping[str, Tensor], name: str, value: Tensor) -> bool:
        own = model.own_path(name)
        return own is not None and own in state and own not in model.missing and state[own].shape == value.shape

    # a head that each expert has of its own is used with that expert alone
    shares_all = first.module.base_model is first.module or first.module.get_output_embeddings() is not None
    inside = {name: x for name, x in first.parameters.items() if shares_all or name.startswith(body)}
    if kept := [name for name, x in inside.items() if not all(has(*each, name, x) for each in states)]:
        task, names = first.role.removeprefix(EXPERT), list_some(kept, last=" and ")
        note(f"merged takes {names} from {task} alone, as not all models have them in the same shape")
    if len({count_vocabulary(model.module) for model in models}) > 1:
        return  # then embeddings are not merged: they stay the first expert's
    known = [found for role in roles if (found := vocabularies.find(role)) is not None]
    tokens = {number: token for token, number in known[0].ids.items()} if known else {}
    for other in known[1:]:
        for token, number in other.ids.items():
            if known[0].ids.get(token, number) != number or tokens.get(number, token) != token:
                what = f"{known[0]} and {other} have different ids for {plain(token)}, so embeddings cannot be merged"
                fix = "merge them with mergekit, with tokenizer_source: union, and name the result as the merged model"
                raise CheckpointError(what, where="--merge", fix=fix)


def _count_classes(outline: Model) -> int | None:
    """Return the number of rows of a language model's head; None if it has none."""
    weight = getattr(outline.module.get_output_embeddings(), "weight", None)
    return None if weight is None else len(weight)


def _collect_ids(examples: TaskExamples) -> tuple[Tensor, Tensor]:
    """Return the distinct ids of the tokens in a task's examples [ids], first without padding, then with it."""
    read, held = set[int](), set[int]()
    for batch in (*examples.fitted, *examples.selection, *examples.held_out):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is not None:
            held.update(ids.flatten().tolist())
            read.update((ids[mask.bool()] if mask is not None and mask.shape == ids.shape else ids.flatten()).tolist())
    return torch.tensor(sorted(read), dtype=torch.int64), torch.tensor(sorted(held), dtype=torch.int64)
