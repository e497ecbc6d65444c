"""How far answers are from an expert's, with the covariance of its smoothed choice written out as a matrix."""

from __future__ import annotations

import torch
from torch import Tensor


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
