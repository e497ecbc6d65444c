"""What drift does to the expert's own head: the expert's forward with a model's last features in place of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featcal_cli.batches import Batch, count_examples, take_examples
from featcal_cli.drift import relate
from featcal_cli.tokens import token_masks
from featcal_cli.trace import first_tensor

if TYPE_CHECKING:
    from featcal_cli.walker import Walker

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


def limit_batches(batches: Mapping[str, Sequence[Batch]], walkers: Iterable[Walker]) -> dict[str, list[Batch]]:
    """The batches of each task, cut so that any of the models' logits on one of them take no more than LOGIT_BYTES."""
    heads = [walker.model.module.get_output_embeddings() for walker in walkers]
    choices = max((len(head.weight) for head in heads if hasattr(head, "weight")), default=0)
    return {task: [part for batch in found for part in _cut(batch, choices)] for task, found in batches.items()}


def _cut(batch: Batch, choices: int) -> Iterator[Batch]:
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    each = 4 * choices * (ids.shape[1] if ids is not None and ids.ndim == 2 else 1)
    count = count_examples(batch)
    size = max(1, min(count, LOGIT_BYTES // each if each else count))
    if size == count:
        yield batch
        return
    for start in range(0, count, size):
        yield take_examples(batch, range(start, min(count, start + size)))


class OutputMeter:
    """Adds up what models' last features make of the experts' outputs, by task and role."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, str, str], OutputShift] = {}
        self.elsewhere: dict[tuple[str, str, str], OutputShift] = {}
        """What other ranks have measured, as far as it is known here."""

    def add(self, task: str, role: str, output: Any, expert: Any, batch: Batch, place: str = "") -> None:
        """Add one batch: what the expert returned for the model's features after the block `place` ("": the last one),
        and for its own."""
        reading = self.readings.setdefault((task, role, place), OutputShift())
        z, z_exp = (_read_output(found) for found in (output, expert))
        reading.has_logits = isinstance(getattr(expert, "logits", None), Tensor)
        rows, rows_exp = (_choose_rows(found, batch) for found in (z, z_exp))
        if not torch.isfinite(rows_exp).all():
            return  # a broken head of the expert says nothing of the features that it is given
        for start in range(0, len(rows), ROWS_AT_ONCE):
            _add_rows(reading, rows[start : start + ROWS_AT_ONCE], rows_exp[start : start + ROWS_AT_ONCE])

    def read(self, task: str, role: str, place: str = "") -> OutputShift | None:
        """What was measured so far; None for nothing."""
        key = (task, role, place)
        return self.readings.get(key) or self.elsewhere.get(key)


def _add_rows(reading: OutputShift, z: Tensor, z_exp: Tensor) -> None:
    z, z_exp = z.float(), z_exp.float()
    reading.rows += len(z)
    reading.distance += float((z - z_exp).norm(dim=-1).sum(dtype=torch.float64))
    reading.size += float(z_exp.norm(dim=-1).sum(dtype=torch.float64))
    if not reading.has_logits:
        return
    log_p, log_p_exp = z.log_softmax(-1), z_exp.log_softmax(-1)
    each = torch.where(log_p_exp.exp() > 0, log_p_exp.exp() * (log_p_exp - log_p), 0.0)
    reading.divergence_sum += float(each.sum(dtype=torch.float64))
    reading.variation_sum += float((log_p_exp.exp() - log_p.exp()).abs().sum(dtype=torch.float64)) / 2
    reading.agreed += int((z.argmax(-1) == z_exp.argmax(-1)).sum())
    if z.shape[-1] > 1:
        best = z_exp.topk(2, dim=-1).values
        reading.certain += int((best[:, 0] - best[:, 1] > 2 * (z - z_exp).abs().amax(-1)).sum())


def _read_output(output: Any) -> Tensor:
    """Logits, else pooled features, else hidden states [.., d]."""
    for name in ("logits", "pooler_output", "image_embeds", "text_embeds", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    found = first_tensor(output if not hasattr(output, "to_tuple") else output.to_tuple())
    assert found is not None
    return found


def _choose_rows(z: Tensor, batch: Batch) -> Tensor:
    """The predictions [rows, d] that count: one an example, or one a token that is no padding."""
    if z.ndim == 3:
        masks = [mask for mask in token_masks(batch).values() if mask is not None and mask.shape == z.shape[:2]]
        if masks:
            return z[masks[-1].bool().to(z.device)]
    return z.reshape(-1, z.shape[-1])
