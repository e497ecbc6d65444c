"""Drift of features from the experts', what it does to the experts' own heads, and task vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from featcal_cli.data.batches import Batch, count_examples, take_examples
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.models.token_layout import token_masks
from featcal_cli.models.tracing import first_tensor
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError

T = TypeVar("T")
TINY = 1e-30
"""Keeps the cosine of a zero vector finite."""
STEM = "stem"
"""The name under which drift before the first block is kept."""


@dataclass
class Drift:
    """Drift e = h − h_exp of one model from one expert at one place, summed over all tokens added.

    Its exact split e = m + p (paper, Proposition 1): the local mismatch m is what the model's block does differently on
    the expert's own input, the upstream propagation p what it makes of the drift that reaches it.
    """

    distance: float = 0.0
    """Σ ‖e‖₂."""
    size: float = 0.0
    """Σ ‖h_exp‖₂."""
    cosine_sum: float = 0.0
    tokens: int = 0
    local_sum: float = 0.0
    """Σ ‖m‖₂."""
    upstream_sum: float = 0.0
    """Σ ‖p‖₂."""
    is_split: bool = False
    """m and p were measured."""

    @property
    def relative(self) -> float:
        """mean ‖e‖₂ / mean ‖h_exp‖₂; infinite where the expert's features vanish and the model's do not."""
        return relate(self.distance, self.size, self.tokens)

    @property
    def mean(self) -> float:
        """mean ‖e‖₂."""
        return self.distance / self.tokens if self.tokens else 0.0

    @property
    def local(self) -> float | None:
        """mean ‖m‖₂ / mean ‖h_exp‖₂; None where it was not measured."""
        return relate(self.local_sum, self.size, self.tokens) if self.is_split else None

    @property
    def upstream(self) -> float | None:
        """mean ‖p‖₂ / mean ‖h_exp‖₂; None where it was not measured."""
        return relate(self.upstream_sum, self.size, self.tokens) if self.is_split else None

    @property
    def cosine(self) -> float:
        """Mean cosine of h and h_exp."""
        return self.cosine_sum / self.tokens if self.tokens else 1.0


def relate(distance: float, size: float, tokens: int) -> float:
    """distance / size, two sums over tokens; where the size vanishes infinity, unless the distance does too."""
    if size > TINY * tokens:
        return distance / size
    return inf if distance > TINY * tokens else 0.0


class Meter(ABC, Generic[T]):
    """Adds up readings by what they are of. The sums stay on the device until somebody looks: then it is waited for
    once."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, ...], T] = {}
        """As they were when `settle` was last called."""
        self.elsewhere: dict[tuple[str, ...], T] = {}
        """What all ranks have measured, as far as it is known here."""
        self._sums: dict[tuple[str, ...], Tensor] = {}
        """What was added for each reading [numbers], in float64."""
        self._counts: dict[tuple[str, ...], list[int]] = {}
        """The same of what is known without the device."""
        self._unread: set[tuple[str, ...]] = set()

    def settle(self) -> None:
        """Make readings of all that was added."""
        unread = sorted(self._unread)
        self._unread.clear()
        for device in {self._sums[key].device for key in unread}:
            keys = [key for key in unread if self._sums[key].device == device]
            numbers = iter(torch.cat([self._sums[key] for key in keys]).tolist())
            for key in keys:
                self.readings[key] = self._read(
                    key, self._counts[key], [next(numbers) for _ in range(len(self._sums[key]))]
                )

    def share(self, ranks: Ranks) -> None:
        """Let every rank know what the others have measured by now."""
        self.settle()
        self.elsewhere = ranks.unite(self.readings)

    def find(self, *key: str) -> T | None:
        """What was measured so far; None for nothing."""
        self.settle()
        return self.readings.get(key) or self.elsewhere.get(key)

    def _add(self, key: tuple[str, ...], counts: Sequence[int], numbers: Sequence[Tensor]) -> None:
        """Add these to the sums of a reading."""
        added = torch.stack([x.double() for x in numbers])
        self._sums[key] = self._sums[key] + added if key in self._sums else added
        known = self._counts.get(key, [0] * len(counts))
        self._counts[key] = [one + other for one, other in zip(known, counts, strict=True)]
        self._unread.add(key)

    @abstractmethod
    def _read(self, key: tuple[str, ...], counts: list[int], numbers: list[float]) -> T:
        """A reading, of all that was added."""


class DriftMeter(Meter[Drift]):
    """Adds up drift by place (a block, a module in it, or STEM), task and role of the model."""

    def __init__(self, *, modules: bool = False, refuse_vanishing: bool = False) -> None:
        """`modules`: measure at the outputs of the modules inside blocks too. `refuse_vanishing`: an expert whose
        features are all zero is an error."""
        super().__init__()
        self.modules = modules
        self._refuse_vanishing = refuse_vanishing

    def add(
        self, place: str, task: str, role: str, hidden: Tensor, expert: Tensor, on_expert: Tensor | None = None
    ) -> None:
        """Add the same tokens of the model and of the task's expert [T, d] each.

        `on_expert`: what the model's block makes of the expert's input, for the split.
        """
        hidden, expert = hidden.float(), expert.float()
        size, own = _norms(expert), _norms(hidden)
        cosine = torch.einsum("td,td->t", hidden, expert) / (size * own).clamp_min(TINY)
        sums = [_sum(_norms(hidden - expert)), _sum(size), _sum(cosine), (size <= TINY).all()]
        if on_expert is not None:
            on_expert = on_expert.float()
            sums += [_sum(_norms(on_expert - expert)), _sum(_norms(hidden - on_expert))]
        self._add((place, task, role), [len(hidden)], sums)

    def _read(self, key: tuple[str, ...], counts: list[int], numbers: list[float]) -> Drift:
        """Raises NumericsError where the expert's features vanished in a batch, and that is refused."""
        distance, size, cosine_sum, vanished, *split = numbers
        local_sum, upstream_sum = split or (0.0, 0.0)
        if self._refuse_vanishing and vanished and counts[0]:
            place, task, _ = key
            where = "before the first block" if place == STEM else f"after {place}"
            what = f"the features of the expert of {task} are all zero {where}: there is nothing to calibrate to"
            raise NumericsError(what, where=f"expert {task}", fix="use another checkpoint; this one is broken")
        return Drift(distance, size, cosine_sum, counts[0], local_sum, upstream_sum, is_split=bool(split))

    def read(self, place: str, task: str, role: str) -> Drift:
        """The drift measured so far."""
        return self.find(place, task, role) or Drift()


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


LOGIT_BYTES = 2**28
"""Of one batch that outputs are compared on."""
ROWS_AT_ONCE = 1024
"""Predictions whose probabilities are computed together: a vocabulary is long."""


@dataclass
class OutputShift:
    """How far one model's outputs are from the expert's, summed over all predictions added."""

    has_logits: bool = False
    distance: float = 0.0
    """Σ ‖z − z_exp‖₂."""
    size: float = 0.0
    """Σ ‖z_exp‖₂."""
    divergence_sum: float = 0.0
    """Σ KL(expert ‖ model), nats."""
    variation_sum: float = 0.0
    """Σ total variation distance of the two distributions, 0 … 1."""
    agreed: int = 0
    """Predictions whose first choice is the expert's."""
    certain: int = 0
    """Predictions whose margin exceeds 2 ‖z − z_exp‖∞ (paper, equation 44): no such shift can change them."""
    rows: int = 0

    @property
    def relative(self) -> float:
        """mean ‖z − z_exp‖₂ / mean ‖z_exp‖₂."""
        return relate(self.distance, self.size, self.rows)

    @property
    def variation(self) -> float:
        """Mean total variation distance of the predicted distributions, 0 … 1."""
        return self.variation_sum / self.rows if self.rows else 0.0


def limit_batches(batches: Mapping[str, Sequence[Batch]], runners: Iterable[BlockRunner]) -> dict[str, list[Batch]]:
    """The batches of each task, cut so that any of the models' logits on one of them take no more than LOGIT_BYTES."""
    heads = [runner.model.module.get_output_embeddings() for runner in runners]
    choices = max((len(head.weight) for head in heads if hasattr(head, "weight")), default=0)
    return {task: [part for batch in of_task for part in _cut(batch, choices)] for task, of_task in batches.items()}


def _cut(batch: Batch, choices: int) -> Iterator[Batch]:
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    example_bytes = 4 * choices * (ids.shape[1] if ids is not None and ids.ndim == 2 else 1)
    count = count_examples(batch)
    size = max(1, min(count, LOGIT_BYTES // example_bytes if example_bytes else count))
    for start in range(0, count, size):
        yield batch if size == count else take_examples(batch, range(start, min(count, start + size)))


class OutputMeter(Meter[OutputShift]):
    """Adds up what models' last features make of the experts' outputs, by task, role and place."""

    def add(self, task: str, role: str, output: Any, expert: Any, batch: Batch, place: str = "") -> None:
        """Add one batch: what the expert returned for the model's features after the block `place` ("": the last one),
        and for its own."""
        has_logits = isinstance(getattr(expert, "logits", None), Tensor)
        rows, rows_exp = (_choose_rows(_read_output(of), batch) for of in (output, expert))
        # a broken head of the expert says nothing of the features that it is given
        is_whole = torch.isfinite(rows_exp).all()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            z, z_exp = (x[start : start + ROWS_AT_ONCE].float() for x in (rows, rows_exp))
            numbers = [torch.where(is_whole, x, 0) for x in _compare_rows(z, z_exp, has_logits=has_logits)]
            self._add((task, role, place), [has_logits], [is_whole * len(z), *numbers])

    def _read(self, _: tuple[str, ...], counts: list[int], numbers: list[float]) -> OutputShift:
        rows, distance, size, *of_logits = numbers
        divergence_sum, variation_sum, agreed, certain = of_logits or (0.0, 0.0, 0.0, 0.0)
        sums = distance, size, divergence_sum, variation_sum
        return OutputShift(bool(counts[0]), *sums, agreed=int(agreed), certain=int(certain), rows=int(rows))

    def read(self, task: str, role: str, place: str = "") -> OutputShift | None:
        """What was measured so far; None for nothing."""
        return self.find(task, role, place)


def _compare_rows(z: Tensor, z_exp: Tensor, *, has_logits: bool) -> Iterator[Tensor]:
    """What some rows add to the sums of an OutputShift, from `distance` to `certain`."""
    yield _sum((z - z_exp).norm(dim=-1))
    yield _sum(z_exp.norm(dim=-1))
    if not has_logits:
        return
    log_p, log_p_exp = z.log_softmax(-1), z_exp.log_softmax(-1)
    yield _sum(torch.where(log_p_exp.exp() > 0, log_p_exp.exp() * (log_p_exp - log_p), 0.0))
    yield _sum((log_p_exp.exp() - log_p.exp()).abs()) / 2
    yield (z.argmax(-1) == z_exp.argmax(-1)).sum()
    if z.shape[-1] > 1:
        best = z_exp.topk(2, dim=-1).values
        yield (best[:, 0] - best[:, 1] > 2 * (z - z_exp).abs().amax(-1)).sum()
    else:
        yield z.new_zeros(())


def _read_output(output: Any) -> Tensor:
    """Logits, else pooled features, else hidden states [.., d]."""
    for name in ("logits", "pooler_output", "image_embeds", "text_embeds", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    tensor = first_tensor(output.to_tuple() if hasattr(output, "to_tuple") else output)
    assert tensor is not None
    return tensor


def _choose_rows(z: Tensor, batch: Batch) -> Tensor:
    """The predictions [rows, d] that count: one an example, or one a token that is no padding."""
    if z.ndim == 3:
        masks = [mask for mask in token_masks(batch).values() if mask is not None and mask.shape == z.shape[:2]]
        if masks:
            return z[masks[-1].bool().to(z.device)]
    return z.reshape(-1, z.shape[-1])


@dataclass
class TaskVector:
    """Sums over parameters for the cosine of (expert − base) and (model − base)."""

    product: float = 0.0
    expert_square: float = 0.0
    model_square: float = 0.0

    @property
    def cosine(self) -> float:
        """0 where one of the two has not moved from the base."""
        size = (self.expert_square * self.model_square) ** 0.5
        return self.product / size if size else 0.0


class VectorMeter(Meter[TaskVector]):
    """Adds up task vectors by task and role, a block at a time: no two models' weights are ever needed whole."""

    def add(
        self, task: str, block: str, models: Mapping[str, BlockRunner], expert: BlockRunner, base: BlockRunner
    ) -> None:
        """Add the parameters of one block of every model, by role, as far as all have them in one shape."""
        for ours, theirs, start in _shared(block, models, expert, base):
            wanted = (theirs.float() - start.float()).flatten()
            for role, parameter in ours.items():
                moved = (parameter.float() - start.float()).flatten()
                products = torch.dot(moved, wanted), torch.dot(wanted, wanted), torch.dot(moved, moved)
                self._add((task, role), [], products)

    def _read(self, _: tuple[str, ...], __: list[int], numbers: list[float]) -> TaskVector:
        return TaskVector(*numbers)

    def read(self, task: str, role: str) -> float | None:
        """The cosine so far; None for nothing."""
        vector = self.find(task, role)
        return None if vector is None else vector.cosine


def _shared(
    block: str, models: Mapping[str, BlockRunner], expert: BlockRunner, base: BlockRunner
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Every parameter of the block that all have: of the models by role, of the expert, of the base."""
    ours = {role: dict(runner.module(block).named_parameters()) for role, runner in models.items()}
    theirs, start = (dict(runner.module(block).named_parameters()) for runner in (expert, base))
    for name, first in start.items():
        of_models = {role: parameters[name].detach() for role, parameters in ours.items() if name in parameters}
        shapes = {x.shape for x in (*of_models.values(), first, theirs.get(name, first))}
        if len(of_models) == len(ours) and name in theirs and len(shapes) == 1 and first.is_floating_point():
            yield of_models, theirs[name].detach(), first.detach()
