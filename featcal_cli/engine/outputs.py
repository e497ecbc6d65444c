"""Compare the outputs that an expert's head computes from a model's last features with the expert's own outputs, and
measure how well language models predict texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from featcal_cli.data.batches import DECODER_AXIS, LABELS, Batch, count_examples, token_masks
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import Meter, add_up, relate
from featcal_cli.engine.paused_forward import PausedForward, start_forward
from featcal_cli.engine.weight_uploads import drop_weights
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.tracing import tensors_in

NO_PROBABILITIES = ("regression", "multi_label_classification")
"""Values of a config's `problem_type` whose logits are not one choice among several classes."""
ROWS_AT_ONCE = 256
"""Number of predictions whose probabilities are computed at once, as vocabularies are large."""
EVEN_SHARE = 0.5
"""Share of the weight that is spread evenly over logits. Without it, only one logit of a confident prediction would
count."""


def weigh_logits(z: Tensor) -> Tensor:
    """Return the weights q of the logits [rows, c] of predictions, with Σ q = 1: half by probability, half evenly."""
    return (1 - EVEN_SHARE) * z.float().softmax(-1) + EVEN_SHARE / z.shape[-1]


def logit_norm(z: Tensor, q: Tensor) -> Tensor:
    """Compute the norm in which logits [rows, c] are compared: each row's weighted standard deviation √(Σ q z² − (Σ q
    z)²).

    Adding one number to all logits does not change it, as it does not change probabilities, and unlikely logits count
    little. If q are the probabilities, the KL divergence is half the squared norm of a small change of logits.
    """
    mean = (q * z).sum(-1, keepdim=True)
    return (q * (z - mean).square()).sum(-1).sqrt()


def draw_noise(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw whole numbers [rows, columns] from −128 to 127, one in a byte. For large vocabularies normal numbers would
    take longer to draw than all else."""
    words = torch.empty(-(-rows * columns // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.int8)[: rows * columns].view(rows, columns)


def project_randomly(z: Tensor, drawn: Tensor, *, are_logits: bool) -> Tensor:
    """Turn the numbers of `draw_noise` [rows, c] into random directions u on the device of the outputs z [rows, c], so
    that ‖Δz‖² in the norm of outputs is the mean of (uᵀΔz)². The mean of uuᵀ is diag(q) − qqᵀ for logits
    (`logit_norm`), else the identity."""
    # mean 0 and variance 1
    noise = drawn.to(z.device).to(z.dtype).add_(0.5).mul_((12 / (256**2 - 1)) ** 0.5)
    if not are_logits:
        return noise
    for some, noise_of_some in zip(z.detach().split(ROWS_AT_ONCE), noise.split(ROWS_AT_ONCE), strict=True):
        q = weigh_logits(some)
        weighted = q.sqrt() * noise_of_some
        noise_of_some.copy_(weighted - q * weighted.sum(-1, keepdim=True))
    return noise


def gives_logits(module: nn.Module, output: Any) -> bool:
    """Tell whether a model returned logits of one choice among several, with one prediction in each row."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim > 3 or logits.shape[-1] == 1:
        return False
    return getattr(getattr(module, "config", None), "problem_type", None) not in NO_PROBABILITIES


@dataclass
class OutputShift:
    """The distance of one model's outputs from the expert's, summed over all predictions added."""

    has_logits: bool = False
    distance: float = 0.0
    """Sum of output distances, Σ ‖z − z_exp‖. The norm is `logit_norm` for logits, else ‖ ‖₂."""
    size: float = 0.0
    """Sum of the norms of the expert's outputs, Σ ‖z_exp‖, in the same norm."""
    divergence_sum: float = 0.0
    """Sum of the divergences KL(expert ‖ model) of the predicted distributions, in nats."""
    agreed: int = 0
    """Number of predictions whose most likely class is the expert's."""
    rows: int = 0

    @property
    def relative(self) -> float:
        """Relative output distance, mean ‖z − z_exp‖ / mean ‖z_exp‖."""
        return relate(self.distance, self.size, self.rows)


class OutputMeter(Meter[OutputShift]):
    """Sums up the distances of models' outputs from the experts' outputs, by task and role."""

    def add(self, task: str, role: str, output: Any, expert: Any, batch: Batch, *, are_logits: bool) -> None:
        """Add one batch. `output` is what the expert's head returned for the model's last features, `expert` what it
        returned for its own."""
        rows, rows_exp = (choose_rows(read_output(of), batch) for of in (output, expert))
        if rows.shape != rows_exp.shape:  # how long a voice speaks depends on the weights
            return
        # a broken head of the expert says nothing of the features that it is given
        is_whole = torch.isfinite(rows_exp).all()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            z, z_exp = (x[start : start + ROWS_AT_ONCE].float() for x in (rows, rows_exp))
            distances, *compared = _compare_rows(z, z_exp, are_logits=are_logits)
            numbers = [torch.where(is_whole, x, 0) for x in (add_up(distances), *compared)]
            self._add((task, role), [is_whole * len(z), *numbers], are_logits)

    def _read(self, _: tuple[str, ...], numbers: list[float]) -> OutputShift:
        rows, distance, size, *of_logits, has_logits = numbers
        divergence_sum, agreed = of_logits or (0.0, 0.0)
        return OutputShift(bool(has_logits), distance, size, divergence_sum, int(agreed), int(rows))


def _compare_rows(z: Tensor, z_exp: Tensor, *, are_logits: bool) -> Iterator[Tensor]:
    """Yield the distances of rows of outputs [rows], then the amounts to add to the sums of an OutputShift, in the
    order of its fields from `size` to `agreed`."""
    if not are_logits:
        yield (z - z_exp).norm(dim=-1)
        yield add_up(z_exp.norm(dim=-1))
        return
    q = weigh_logits(z_exp)
    yield logit_norm(z - z_exp, q)
    yield add_up(logit_norm(z_exp, q))
    del q
    log_p, log_p_exp = z.log_softmax(-1), z_exp.log_softmax(-1)
    # 0 · log 0 = 0: what the expert rules out adds nothing to the divergence
    yield add_up(torch.where(log_p_exp.exp() > 0, log_p_exp.exp() * (log_p_exp - log_p), 0.0))
    yield (z.argmax(-1) == z_exp.argmax(-1)).sum()


def read_output(output: Any) -> Tensor:
    """Return the logits of a model's output; if it has none, its pooled features, else its hidden states [.., d]. Where
    an answer begins and ends is said for each token, [B, length, 2]: padding must be no further choice."""
    ends = (getattr(output, name, None) for name in ("start_logits", "end_logits"))
    if len(spans := [logits for logits in ends if isinstance(logits, Tensor)]) == 2:
        return torch.stack(spans, -1)
    for name in ("logits", "pooler_output", "image_embeds", "text_embeds", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    tensors = tensors_in(output.to_tuple() if hasattr(output, "to_tuple") else output)
    return next(tensor for tensor in tensors if tensor.ndim > 1)  # a loss is not an output


def take_classes(z: Tensor, classes: Tensor) -> Tensor:
    """Return the logits [.., c] of a model in the order of another model's classes, which are at `classes` here; −∞ for
    what the model lacks."""
    places = classes.to(z.device)
    lacking = (places < 0) | (places >= z.shape[-1])
    return z[..., places.masked_fill(lacking, 0)].masked_fill(lacking, -torch.inf)


def find_owners(z: Tensor, batch: Batch) -> Tensor:
    """Return the number of the example that each prediction chosen by `choose_rows` belongs to: [rows]."""
    count = count_examples(batch)
    owners = (torch.arange(len(z), device=z.device) // max(1, len(z) // count)).clamp_max(count - 1)
    return choose_rows(owners.view(-1, *[1] * (z.ndim - 1)).expand(*z.shape[:-1], 1), batch)[:, 0]


def choose_rows(z: Tensor, batch: Batch) -> Tensor:
    """The predictions [rows, d] that count: one for each example, or one for each unpadded token."""
    targets = batch.get("decoder_input_ids")
    if z.ndim == 3 and targets is not None and targets.shape == z.shape[:2]:
        mask = token_masks(batch).get(DECODER_AXIS)  # not the source's, which may be as long
        return z.reshape(-1, z.shape[-1]) if mask is None else z[mask.bool().to(z.device)]
    if z.ndim == 3:
        masks = [mask for mask in token_masks(batch).values() if mask.shape == z.shape[:2]]
        if masks:
            return z[masks[-1].bool().to(z.device)]
    return z.reshape(-1, z.shape[-1])


SAMPLE: Batch = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]]),
    "attention_mask": torch.ones(2, 4, dtype=torch.int64),
}
"""Two texts that differ in the last token."""
Loss = tuple[float, int]
"""Negative log-likelihood of one text in nats, and the number of its tokens that count: those with others before them,
or all tokens of what a decoder is to write."""


def measure_losses(
    runner: BlockRunner,
    architecture: Architecture,
    batches: Mapping[str, Sequence[Batch]],
    load: Callable[[int], None] = lambda _: None,
) -> dict[str, list[Loss]]:
    """Return each text's loss, by task, under a model that predicts the next token with its own head. `load` is called
    with the number of each block before that runs, and first of all with the number after the last one's, for the
    head."""
    losses: dict[str, list[Loss]] = {task: [] for task in batches}
    for task, paused in _run_through(runner, architecture, batches, load):
        losses[task] += _read_losses(paused)
    return losses


def looks_ahead(runner: BlockRunner, architecture: Architecture) -> bool:
    """Tell whether a model's logits at a token depend on the tokens after it."""
    passes = _run_through(runner, architecture, {"": [SAMPLE]}, lambda _: None)
    pairs = [read_output(paused.output)[:, :-1].float().unbind() for _, paused in passes]
    runner.give_back()
    return not all(torch.allclose(first, second, rtol=1e-2, atol=1e-2) for first, second in pairs)


def _run_through(
    runner: BlockRunner, architecture: Architecture, batches: Mapping[str, Sequence[Batch]], load: Callable[[int], None]
) -> Iterator[tuple[str, PausedForward]]:
    """Run a model's passes over all batches, block by block, and yield each when it has ended, with its task."""
    load(len(architecture.blocks))
    try:
        with runner.on_device():
            passes = [(task, start_forward(runner, x, "")) for task, of_task in batches.items() for x in of_task]
            for number, block in enumerate(architecture.blocks):
                load(number)
                for task, paused in passes:
                    paused.run_through(architecture.blocks[: number + 1])
                    if paused.call is None and paused.output is not None:
                        yield task, paused
                        # logits are large
                        paused.output = None
                runner.release(block.name)
    finally:
        drop_weights(runner.device)


@torch.inference_mode()
def _read_losses(paused: PausedForward) -> list[Loss]:
    """Return the losses of the texts of a pass that has ended."""
    logits = read_output(paused.output)
    # in the model's own numbers, as its logits are
    batch = renumber(paused.batch, paused.runner.token_ids)
    if LABELS in batch:
        wanted = batch[LABELS]
        counted = batch.get("decoder_attention_mask", torch.ones_like(wanted)) > 0
    else:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) > 0
        wanted, counted = batch["input_ids"][:, 1:], mask[:, 1:] & mask[:, :-1]
    nats = logits.new_zeros(counted.shape, dtype=torch.float32)
    for rows in counted.nonzero().split(ROWS_AT_ONCE):
        example, place = rows.T
        nats[example, place] = cross_entropy(logits[example, place].float(), wanted[example, place], reduction="none")
    return list(zip(nats.double().sum(1).tolist(), counted.sum(1).tolist(), strict=True))
