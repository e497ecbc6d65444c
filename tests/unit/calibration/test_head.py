"""The head's equations against autograd in float64, and its solution against a minimum that is found without them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from featcal_cli.calibration import head
from featcal_cli.calibration.head import SHARES, Divergence, Scale, Weight, choose_share, minimise
from featcal_cli.engine.job import HeadInputs
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks

CLASSES, WIDTH, ROWS = 11, 6, (40, 25)


def problem(*, bias: bool = False) -> tuple[Divergence, Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
    """Two tasks: the divergence, merged's weight, and each task's features and experts' probabilities in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    merged, offset = draw(CLASSES, WIDTH), draw(CLASSES) if bias else None
    divergence, rows = Divergence(offset, torch.device("cpu"), Ranks()), []
    for count in ROWS:
        expert = Affine(merged + 0.3 * draw(CLASSES, WIDTH), None if offset is None else draw(CLASSES))
        x = draw(count, WIDTH)
        x_exp = x + 0.3 * draw(count, WIDTH)
        columns = (of.split(17) for of in (x, x_exp, torch.arange(count)))
        parts = [HeadInputs(*part) for part in zip(*columns, strict=True)]
        divergence.add_task(parts, expert, len(ROWS))
        z = x_exp.double() @ expert.weight.double().T
        rows.append((x.double(), (z if expert.bias is None else z + expert.bias.double()).softmax(-1)))
    divergence.finish()
    return divergence, merged, rows, offset


def reference(weight: Tensor, rows: list[tuple[Tensor, Tensor]], bias: Tensor | None) -> Tensor:
    total = weight.new_zeros(())
    for x, q in rows:
        z = x @ weight.T if bias is None else x @ weight.T + bias.double()
        total = total + (q * (q.log() - z.log_softmax(-1))).sum(-1).mean() / len(rows)
    return total


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logit_bytes", [1, 1 << 28])
def test_derivatives_are_those_of_autograd(
    bias: bool, logit_bytes: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curvature may be that of every second row, of 65; the value and the gradient are of all rows."""
    monkeypatch.setattr(head, "LOGIT_BYTES", logit_bytes)
    monkeypatch.setattr(head, "CURVATURE_ROWS", sum(ROWS) if every == 1 else 40)
    divergence, merged, rows, offset = problem(bias=bias)
    at, direction = merged.double(), torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    gradient = torch.func.grad(reference)(at, rows, offset)
    sampled = [(x[::every], q[::every]) for x, q in rows]
    curved = torch.func.jvp(lambda w: torch.func.grad(reference)(w, sampled, offset), (at,), (direction.double(),))[1]
    slope = divergence.slope(merged)
    torch.testing.assert_close(slope.gradient.double(), gradient, rtol=1e-4, atol=1e-6)
    for size, (value, rise) in zip((0.0, 0.5), divergence.along(merged, direction, (0.0, 0.5)), strict=True):
        along = torch.func.jvp(lambda w: reference(w, rows, offset), (at + size * direction,), (direction.double(),))
        assert (value, rise) == pytest.approx([float(x) for x in along], rel=1e-5)
    torch.testing.assert_close(divergence.curvature(merged, direction).double(), curved, rtol=1e-4, atol=1e-6)
    assert divergence.rows == sum(ROWS)


@pytest.mark.parametrize(("newton_steps", "share"), [(head.NEWTON_STEPS, 0.95), (30, 0.9999)])
@pytest.mark.parametrize("kind", [Weight, Scale])
def test_steps_converge(kind: type[Weight], newton_steps: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "NEWTON_STEPS", newton_steps)
    divergence, merged, rows, _ = problem()
    unknown = kind(merged)
    ridge = unknown.ridge(divergence.slope(merged).gram)
    start, wide = unknown.start.double(), kind(merged.double())
    at = start.clone().requires_grad_()

    def loss(found: Tensor) -> Tensor:
        return reference(wide.weight(found), rows, None) + ridge / 2 * (found - start).square().sum()

    optimizer = torch.optim.LBFGS([at], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(at)
        value.backward()
        return value

    optimizer.step(closure)
    before, least = float(loss(start)), float(loss(at.detach()))
    update = minimise(divergence, unknown)
    assert update is not None
    found = float(loss(start + update.double()))
    assert before - least > 0.01
    assert share * (before - least) < before - found < before - least + 1e-6


def test_the_minimum_does_not_depend_on_batches() -> None:
    """Where features do not span all directions, as a norm has taken their mean away, and rows are few: rounding alone
    is there, and must not grow."""
    width, classes, count, found = 48, 99, 80, []
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn(classes, width, generator=generator) / 4
    expert = Affine(merged + 0.1 * torch.randn(classes, width, generator=generator), None)
    x, drift = (nn.functional.layer_norm(torch.randn(count, width, generator=generator), (width,)) for _ in range(2))
    for size in (1, 80):
        divergence = Divergence(None, torch.device("cpu"), Ranks())
        parts = zip(*(of.split(size) for of in (x, x + 0.3 * drift, torch.arange(count))), strict=True)
        divergence.add_task([HeadInputs(*part) for part in parts], expert, 1)
        divergence.finish()
        update = minimise(divergence, Weight(merged))
        assert update is not None
        found.append(update)
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def test_no_share_is_decided_by_rounding() -> None:
    """Updates along which a convex function is least a little later keep a little more of themselves."""
    shares = [choose_share([share - least / 1000 for share in SHARES]) for least in range(-10, 1100)]
    assert shares[0] == 0.0 and shares[-1] == 1.0 and shares[510] == pytest.approx(0.5)
    assert all(0 <= after - before < 0.0011 for before, after in pairwise(shares))


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_norms_are_scaled_by_factors(make: type[nn.Module]) -> None:
    norm = make(WIDTH)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(2)))
    x, factors = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3)), torch.linspace(0.5, 2, WIDTH)
    expected = norm(x) * factors
    new = {name: head._scale(norm, name, old.detach(), factors) for name, old in norm.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(norm, new, (x,)), expected)
