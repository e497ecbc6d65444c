"""What models answer in plain passes; and how far that is from an expert's, with the covariance of its smoothed choice
written out as a matrix."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from family import Family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def choice_covariance(z: Tensor) -> Tensor:
    """diag(q) − qqᵀ [rows, c, c] of logits [rows, c], q half their probabilities and half the same for all."""
    q = (z.softmax(-1) + 1 / z.shape[-1]) / 2
    return torch.diag_embed(q) - q[:, :, None] * q[:, None]


def answer_distance(z: Tensor, z_exp: Tensor, *, are_logits: bool) -> float:
    """mean ‖z − z_exp‖ / mean ‖z_exp‖ over rows, the square of ‖ ‖ by the covariance for logits."""
    z, z_exp = z.double(), z_exp.double()
    if not are_logits:
        return float((z - z_exp).norm(dim=-1).mean() / z_exp.norm(dim=-1).mean())
    covariance = choice_covariance(z_exp)
    lengths = (torch.einsum("rc,rcd,rd->r", x, covariance, x).clamp_min(0).sqrt() for x in (z - z_exp, z_exp))
    distance, size = (float(length.mean()) for length in lengths)
    return distance / size


def rows_of(hidden: Tensor, family: Family, block: str, batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens that count [T, d]: all but padding, or the first one where it alone is read."""
    if family.cls and hidden.ndim == 3:
        return hidden[:, 0]
    mask = family.mask(f"{block}.anything", 0, dict(batch))
    if mask is not None and mask.shape == hidden.shape[:2]:
        return hidden[mask.bool()]
    return hidden.reshape(-1, hidden.shape[-1])


@torch.no_grad()
def run_plainly(
    model: nn.Module, block: str, batch: Mapping[str, Tensor], given: Tensor | None = None
) -> tuple[Tensor, Any]:
    """What a block returns in a plain pass, and the model, which goes on with what is `given`, if anything."""
    kept: list[Tensor] = []

    def hook(_: object, __: object, y: Any) -> Any:
        kept.append(y if isinstance(y, Tensor) else y[0])
        return None if given is None else given if isinstance(y, Tensor) else (given, *y[1:])

    handle = model.get_submodule(block).register_forward_hook(hook)
    output = model(**batch)
    handle.remove()
    return kept[-1], output


def answer_rows(outputs: Sequence[Any], family: Family, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], bool]:
    """What models answer, by rows that count, and whether these are logits."""
    names = ("logits", "pooler_output", "last_hidden_state")
    name = next(name for name in names if getattr(outputs[0], name, None) is not None)
    rows = [rows_of(getattr(output, name), family, family.block_names[-1], batch) for output in outputs]
    return rows, name == "logits"


@torch.no_grad()
def perplexity_slowly(folder: Path, texts: Iterable[Tensor]) -> float:
    """Perplexity by transformers' own loss of each text [1, length] alone, in float64."""
    model, nats, tokens = AutoModelForCausalLM.from_pretrained(folder).double(), 0.0, 0
    for text in texts:
        nats += float(model(input_ids=text, labels=text).loss) * (text.shape[1] - 1)
        tokens += text.shape[1] - 1
    return math.exp(nats / tokens)
