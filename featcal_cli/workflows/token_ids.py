"""Token ids: find the id that each model of a job has for every token of the examples, if it differs from merged's
id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from featcal_cli.data.batches import count_vocabulary, find_embeddings
from featcal_cli.data.examples import TaskExamples
from featcal_cli.data.tensors import is_tensor_file
from featcal_cli.data.vocabulary import Vocabularies, Vocabulary, map_ids
from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Recipe
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.runtime.sanitise import list_some, plain
from featcal_cli.workflows.session import EXPERT

MERGED, BASE = "merged", "base"
COMPARED = 512
"""Largest number of tokens whose embeddings are compared."""
MOST = 0.5
"""Share of these tokens that must be each other's nearest neighbours for two models to have the same token order."""
CLOSE = 0.6
"""Mean cosine between embeddings and their nearest neighbours at or above which two models are taken to share tokens.
For unrelated models it is about √(2 ln n / d), with n tokens: 0.13 for 768 dimensions."""


@dataclass(frozen=True)
class TokenIds:
    """How each model of a job reads batches that hold ids of merged's vocabulary."""

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Tables from merged's ids to the model's own ids, by role; models with the same ids have none."""
    left_out: frozenset[str] = frozenset()
    """Roles of the models that do not run because they lack tokens of the examples."""
    assumed: Mapping[str, Tensor] = field(default_factory=dict)
    """Token ids of the examples, by role, that a model is assumed to share with merged because one of the two has no
    tokenizer; only their weights can confirm it."""

    def verify(self, models: Iterable[Model], merged: Model, note: Callable[..., None]) -> TokenIds:
        """Compare merged's embeddings with those of models whose ids are only assumed. If base has its tokens in
        another order, it is left out. Raises CheckpointError if any other model has them in another order."""
        left_out = set(self.left_out)
        for model in models:
            ids = self.assumed.get(model.role)
            if ids is None or model.role in left_out or _have_one_order(merged.module, model.module, ids):
                continue
            what = f"the tokens of {model.role} are in another order than merged's, as their embeddings show"
            if model.role != BASE:
                fix = "put the tokenizer that belongs to each model into its folder: ids are then mapped by token"
                raise CheckpointError(what, where=model.snapshot.name, fix=fix)
            left_out.add(BASE)
            note(f"{what}: base is compared by its weights, and its drift is left out")
        return replace(self, left_out=frozenset(left_out))


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
    tables, assumed, left_out = {}, {}, set()
    merged = vocabularies.find(MERGED)
    used = {task: _collect_ids(rows, with_padding=False) for task, rows in examples.items()}
    padded = {task: _collect_ids(rows, with_padding=True) for task, rows in examples.items()}
    for role, outline in outlines.items():
        tasks = [task for task in examples if role in (f"{EXPERT}{task}", BASE) or not role.startswith(EXPERT)]
        ids = torch.cat([used[task] for task in tasks]).unique()
        if role == MERGED or not len(ids):
            continue
        own, limit = vocabularies.find(role), count_vocabulary(outline.module)
        table = None if merged is None or own is None else map_ids(merged, own)
        if merged is not None and own is not None and table is not None:
            for task in (task for task in tasks if is_tensor_file(recipe.tasks[task].data)):
                _check_given_ids(task, str(recipe.tasks[task].data), used[task], (merged, own))
            tables[role] = table
            lacking = [token for token in merged.spell(ids.tolist()) if token not in own.ids]
        else:
            lacking = []
            if any(not is_tensor_file(recipe.tasks[task].data) for task in tasks) and (merged is None or own is None):
                assumed[role] = ids
        beyond = {}
        for task in tasks:
            numbers = padded[task] if table is None else _look_up(table, padded[task])
            if limit is not None and len(numbers) and (largest := int(numbers.max())) >= limit:
                beyond[task] = largest
        if not lacking and not beyond:
            continue
        if lacking:
            what = f"{role} lacks the tokens {list_some(lacking)}, which examples hold"
        else:
            task, largest = next(iter(beyond.items()))
            what = f"{role} knows the tokens 0 to {(limit or 0) - 1}, and the examples of {task} hold {largest}"
        if role != BASE:
            fix = "use models with merged's vocabulary, or examples without the tokens that one of them lacks"
            raise CheckpointError(what, where=outline.snapshot.name, fix=fix)
        left_out.add(BASE)
        note(f"{what}: base is compared by its weights, and its drift is left out")
    return TokenIds(tables, frozenset(left_out), assumed)


def check_mergeable(outlines: Mapping[str, Model], vocabularies: Vocabularies) -> None:
    """Raise CheckpointError if featcal is to merge models that have different tokens under one id, because embeddings
    are merged row by row."""
    roles = [role for role in outlines if role != MERGED]
    if len({count_vocabulary(outlines[role].module) for role in roles}) > 1:
        return  # then embeddings are not merged: they stay the first expert's
    known = [found for role in roles if (found := vocabularies.find(role)) is not None]
    for other in known[1:]:
        first, tokens = known[0], {number: token for token, number in known[0].ids.items()}
        for token, number in other.ids.items():
            held = tokens.get(number, token)
            if held != token or first.ids.get(token, number) != number:
                what = (
                    f"{first} and {other} have different tokens under one id ({number}: {plain(held)}, {plain(token)})"
                )
                fix = "merge them with mergekit, with tokenizer_source: union, and name the result as the merged model"
                raise CheckpointError(f"{what}, so their embeddings cannot be merged", where="--merge", fix=fix)


def _collect_ids(examples: TaskExamples, *, with_padding: bool) -> Tensor:
    """Return the distinct ids of all tokens in a task's examples [ids]."""
    found = set[int]()
    for batch in (*examples.fitted, *examples.selection, *examples.held_out):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is not None and mask is not None and mask.shape == ids.shape and not with_padding:
            ids = ids[mask.bool()]
        found.update([] if ids is None else ids.flatten().tolist())
    return torch.tensor(sorted(found), dtype=torch.int64)


def _look_up(table: Tensor, ids: Tensor) -> Tensor:
    found: Tensor = table[ids[ids < len(table)]]
    return found


def _check_given_ids(task: str, source: str, ids: Tensor, pair: tuple[Vocabulary, Vocabulary]) -> None:
    """Raise DataError if ids in a data file stand for other tokens in merged than in the expert, because the file does
    not say which model they were made for."""
    (number, one, other) = next(
        ((i, x, y) for i, x, y in zip(ids.tolist(), *(v.spell(ids.tolist()) for v in pair), strict=True) if x != y),
        (0, "", ""),
    )
    if one != other:
        what = f"the ids are not the same tokens in {pair[0]} and {pair[1]} ({number}: {plain(one)}, {plain(other)})"
        fix = "give texts instead of ids: each model then gets its own ids of the same tokens"
        raise DataError(what, where=f"{task}: {source}", fix=fix)


def _have_one_order(one: PreTrainedModel, other: PreTrainedModel, ids: Tensor) -> bool:
    """Return False if the embeddings show that `other` has these tokens in another order: most tokens of `one` have a
    close embedding in `other`, but under another id. If embeddings are not similar at all, they show nothing, and the
    result is True."""
    ours, theirs = find_embeddings(one), find_embeddings(other)
    if ours is None or theirs is None or ours.shape[1] != theirs.shape[1]:
        return True
    chosen = ids[:: -(-len(ids) // COMPARED)]
    near, far = (normalize(x - x.mean(0), dim=-1) for x in (ours[chosen].float(), theirs[chosen].float()))
    closeness, nearest = (near @ far.T).max(1)
    has_own = (nearest == torch.arange(len(chosen))).float().mean()
    return float(has_own) >= MOST or float(closeness.mean()) < CLOSE
