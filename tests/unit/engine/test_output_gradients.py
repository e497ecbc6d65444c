"""Outputs are compared as choices where they are some; gradients of experts' outputs, sent back block by block, are
those that a whole backward pass gives."""

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from answers import choice_covariance
from families import BY_NAME, SPREAD, few_of, save_family
from jobs import prepare
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, MarianConfig, MarianMTModel

from featcal_cli.data.batches import Batch, count_examples, forward_names, seed_examples
from featcal_cli.engine import gradient_sums, output_gradients
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.gradient_sums import GradientSums
from featcal_cli.engine.output_gradients import choose_places, measure_output_gradients
from featcal_cli.engine.outputs import choose_rows, draw_noise, find_owners, gives_logits, read_output
from featcal_cli.models.architecture import module_at
from featcal_cli.models.loading import share_model
from featcal_cli.models.module_kinds import CONVOLUTIONS, LINEAR_KINDS
from featcal_cli.runtime.distributed import Ranks

EXAMPLES, SEED = 4, 7
PROJECTIONS = output_gradients.MOST_PROJECTIONS
"""So few examples get the most."""
DIRECTIONS = 128
"""More than outputs of the tiny models have."""


class Case:
    """The first expert of a family's job, and its examples."""

    def __init__(self, folder: Path, name: str, batch_size: int = 2, examples: int = EXAMPLES) -> None:
        self.prepared = prepare(save_family(folder, BY_NAME[name]).only(1), batch_size=batch_size, examples=examples)
        self.architecture = self.prepared.architecture
        task = next(iter(self.prepared.examples))
        self.expert, self.entry = self.prepared.models.experts[task], self.architecture.entries[task]
        self.batches = self.prepared.examples[task].fitted

    def runner(self, dtype: torch.dtype = torch.float32) -> BlockRunner:
        return BlockRunner(share_model(self.expert), self.architecture, self.prepared.device, dtype)

    def measure(self, runner: BlockRunner | None = None) -> Any:
        runner, given = runner or self.runner(), (self.architecture, self.entry, self.batches)
        found = measure_output_gradients(runner, *given, DIRECTIONS, SEED, Ranks())
        runner.retire()
        return found


def measure_plainly(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The same by hooks on the whole model and one backward pass a projection, in float64 sums; and, by batch, ‖g‖² at
    the rows of every module [..]."""
    expert = share_model(case.expert)
    sums: dict[str, Tensor] = {}
    sizes: list[dict[str, Tensor]] = []

    def add(path: str, gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1]).double()
        sums[path] = sums[path] + rows.T @ rows if path in sums else rows.T @ rows
        sizes[-1][path] = sizes[-1].get(path, 0) + gradient.double().square().sum(-1)

    def watch(path: str, module: object, __: object, y: Tensor) -> None:
        if y.requires_grad:
            axis = 1 if isinstance(module, CONVOLUTIONS) else -1
            y.register_hook(lambda gradient: add(path, gradient.movedim(axis, -1)))

    linear, convolve, multiply_batch = nn.functional.linear, nn.functional.conv1d, torch.baddbmm
    functional: dict[int, str] = {}

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, weight, bias)
        if path := functional.get(weight.data_ptr()):
            watch(path, None, None, y)
        return y

    def convolve_watched(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = convolve(x, weight, *args, **kwargs)
        if path := functional.get(weight.data_ptr()):
            y.register_hook(lambda gradient: add(path, gradient[:, :, : x.shape[2]].movedim(1, -1)))
        return y

    def multiply_watched(bias: Tensor | float, x: Tensor, weights: Tensor) -> Tensor:
        """Of tokens that are not zero: a mixture gives its experts those alone."""
        y = multiply_batch(torch.as_tensor(bias, dtype=x.dtype), x, weights)
        for number, weight in enumerate(weights):
            if path := functional.get(weight.data_ptr()):
                given = x[number].any(-1)
                y.register_hook(lambda gradient, n=number, path=path, given=given: add(path, gradient[n, given]))
        return y

    handles = []
    for block in case.architecture.blocks:
        for module in (x for x in block.modules if x.kind in LINEAR_KINDS):
            path = f"{block.name}.{module.name}"
            if module.functional is not None:
                held = expert.module.get_submodule(expert.own_path(block.name) or "")
                functional[module_at(held, module).get_parameter("weight").data_ptr()] = path
                continue
            child = expert.module.get_submodule(expert.own_path(path) or "")
            handles.append(child.register_forward_hook(partial(watch, path)))
    own = expert.own_path(case.entry) if case.entry else ""
    model = expert.module.get_submodule(own or "")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for batch in case.batches:
        sizes.append({})
        given = {name: x for name, x in batch.items() if name in forward_names(model)}
        with (
            mock.patch.object(nn.functional, "linear", multiply),
            mock.patch.object(nn.functional, "conv1d", convolve_watched),
            mock.patch.object(torch, "baddbmm", multiply_watched),
            mock.patch.object(torch, "bmm", lambda x, weights: multiply_watched(0.0, x, weights)),
        ):
            output = model(**given)
            rows = choose_rows(read_output(output), given)
            counts = find_owners(read_output(output), given).bincount(minlength=count_examples(batch)).tolist()
        assert max(counts) <= output_gradients.PREDICTIONS
        draws = [(n, torch.Generator().manual_seed(x)) for n, x in zip(counts, seed_examples(batch, SEED), strict=True)]
        for projection in range(PROJECTIONS):
            drawn = torch.cat([draw_noise(n, rows.shape[1], generator) for n, generator in draws])
            noise = (drawn + 0.5) / (65535 / 12) ** 0.5
            direction = draw_direction(rows.detach(), noise, are_logits="logits" in output)
            (rows * direction).sum().backward(retain_graph=projection + 1 < PROJECTIONS)
    for handle in handles:
        handle.remove()
    model.requires_grad_(False)
    return sums, sizes


def draw_direction(z: Tensor, noise: Tensor, *, are_logits: bool) -> Tensor:
    """By a factor of the covariance that is written out."""
    if not are_logits:
        return noise
    q = (z.softmax(-1) + 1 / z.shape[-1]) / 2
    factor = torch.diag_embed(q.sqrt()) - q[:, :, None] * q.sqrt()[:, None]
    assert torch.allclose(factor @ factor.mT, choice_covariance(z), atol=1e-6)
    return (factor @ noise[:, :, None])[..., 0]


def lay_out(sizes: Tensor, batch: Batch) -> Tensor:
    """Rows of a module in whichever order as tokens [B, length]."""
    count = count_examples(batch)
    return sizes if sizes.shape[0] == count else sizes.T if sizes.ndim == 2 else sizes.reshape(count, -1)


WIDE = sorted({*SPREAD, "lfm2", "llama4", "recurrent-gemma", "wavlm"})


FEW = ("bert", "lfm2")
SIZED = {"bert", "vit", "t5", "llama", "gpt2", "lfm2", "wav2vec2"}
"""Families whose sizes of gradients are compared too, at every token."""


@pytest.mark.parametrize("name", few_of(WIDE, FEW))
def test_they_are_those_of_a_whole_backward_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies between blocks, however often they run; also where batches go in several groups, and where the
    graphs of all blocks are kept, of none, or (for some families) of the first one alone."""
    case = Case(tmp_path, name)
    expected, sizes = measure_plainly(case)
    rooms = [(output_gradients.KEPT_BYTES, output_gradients.GRAPH_BYTES), (1, 0), *([(1, 1)] if name in FEW else [])]
    for kept_bytes, graph_bytes in rooms:
        monkeypatch.setattr(output_gradients, "KEPT_BYTES", kept_bytes)
        monkeypatch.setattr(output_gradients, "GRAPH_BYTES", graph_bytes)
        measured = case.measure()
        assert measured.factors.keys() == expected.keys()
        for path, factor in measured.factors.items():
            sums = expected[path] / expected[path].diagonal().mean()
            assert (factor.T @ factor - sums).norm() <= 1e-4 * sums.norm(), path
        if name in SIZED:
            assert measured.sizes.keys() == measured.factors.keys()
            check_sizes(case, name, measured.sizes, sizes)


def check_sizes(case: Case, name: str, found: dict[str, Tensor], expected: list[dict[str, Tensor]]) -> None:
    """They are known at every token, over their mean at the tokens that count, whatever the batches."""
    for path, relative in found.items():
        sizes = [lay_out(of[path], batch) for of, batch in zip(expected, case.batches, strict=True)]
        masks = [BY_NAME[name].mask(path, 0, dict(batch)) for batch in case.batches]
        counted = [torch.ones_like(of) if mask is None else mask for of, mask in zip(sizes, masks, strict=True)]
        sizes = [of * mask for of, mask in zip(sizes, counted, strict=True)]
        mean = sum(of.sum() for of in sizes) / sum(mask.sum() for mask in counted)
        for ours, of, mask in zip(relative.split([len(of) for of in sizes]), sizes, counted, strict=True):
            assert torch.allclose(ours[:, : of.shape[1]].double() * mask, of / mean, rtol=1e-3, atol=1e-5), path


def test_weights_of_one_block_are_converted_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device in which there is no room for the whole expert."""
    monkeypatch.setattr(output_gradients, "GRAPH_BYTES", 0)
    case = Case(tmp_path, "llama")
    runner, blocks = case.runner(torch.bfloat16), case.architecture.blocks
    converted, bring = Counter[int](), runner.bring

    def count_at_bring(path: str) -> None:
        bring(path)
        dtypes = [{x.dtype for x in runner.module(block.name).parameters()} for block in blocks]
        converted[sum(torch.bfloat16 in found for found in dtypes)] += 1

    monkeypatch.setattr(runner, "bring", count_at_bring)
    assert case.measure(runner).factors
    # no block's weights are there while inputs are prepared
    assert len(blocks) > 1 and converted.keys() <= {0, 1} and converted[1] > 0


def test_examples_that_are_not_looked_at_count_as_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_gradients, "MOST_TOKENS", 1)
    for sizes in Case(tmp_path, "bert").measure().sizes.values():
        assert len(sizes) == EXAMPLES
        assert sizes[:2].std() > 0 and sizes[2:].eq(1).all()


@pytest.mark.parametrize("d", [96, 400, gradient_sums.WIDEST_SQUARE + 1])
def test_the_directions_that_move_answers_most_are_kept(d: int) -> None:
    """All that there are of narrow outputs; of wider ones, and of sketches, nearly as much as the best so many hold."""
    rows = torch.randn(600, d, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 1 + d) ** -0.8
    sums = GradientSums(0, DIRECTIONS)
    sums.add("m", rows)
    factor = sums.factors(Ranks())["m"]
    exact = rows.T @ rows / rows.square().sum() * d
    values, vectors = torch.linalg.eigh(exact.double())
    kept = vectors[:, -len(factor) :] * values[-len(factor) :].sqrt()
    is_sketch = d > gradient_sums.WIDEST_SQUARE
    assert len(factor) == min(d, DIRECTIONS)
    assert (factor.T @ factor - kept @ kept.T).norm() <= (5e-3 if is_sketch else 2e-3) * exact.norm()
    assert factor.square().sum() >= (0.99 if is_sketch else 0.999) * kept.square().sum()


def test_factors_are_as_precise_as_sums() -> None:
    """Whose rounding would else decide in which of the directions that hardly move the outputs updates go."""
    d = DIRECTIONS
    rows = 1 + torch.randn(600, d, generator=torch.Generator().manual_seed(0))
    sums = GradientSums(0, DIRECTIONS)
    sums.add("m", rows)
    total, factor = sums.sums["m"].double(), sums.factors(Ranks())["m"].double()
    exact = total.tril() + total.tril(-1).T
    exact *= d / exact.trace()
    assert (factor.T @ factor - exact).norm() <= 3e-7 * exact.norm()


def test_gradients_that_are_not_finite_stay_so() -> None:
    sums = GradientSums(0, DIRECTIONS)
    sums.add("m", torch.full((2, 8), torch.nan))
    sums.add("none", torch.zeros(2, 8))
    assert sums.factors(Ranks())["m"].isnan().all() and not sums.factors(Ranks())["none"].any()


@pytest.mark.parametrize("of_experts", [False, True])
@pytest.mark.parametrize("rows", [40, 600])
def test_a_sketch_of_wide_outputs_does_not_depend_on_how_gradients_are_grouped(rows: int, of_experts: bool) -> None:
    """In whichever batches and order they come; of fewer gradients than it has rows it holds all."""
    wide = 1 + (gradient_sums.WIDEST_SQUARE_OF_EXPERTS if of_experts else gradient_sums.WIDEST_SQUARE)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(rows, wide, generator=generator) * torch.arange(1, 1 + wide) ** -0.8
    whole, parts = GradientSums(7, DIRECTIONS), GradientSums(7, DIRECTIONS)
    whole.add("m", gradients, of_experts=of_experts)
    for part in gradients[torch.randperm(rows, generator=generator)].split(7):
        parts.add("m", part, of_experts=of_experts)
    sketch, factor, other = whole.sums["m"], whole.factors(Ranks())["m"], parts.factors(Ranks())["m"]
    assert len(sketch) == gradient_sums.count_sum_rows(wide, DIRECTIONS, of_experts=of_experts) < wide
    assert (factor.T @ factor - other.T @ other).norm() <= 1e-5 * (factor.T @ factor).norm()
    if rows < len(sketch):
        exact = gradients.T @ gradients / gradients.square().sum() * wide
        assert (factor.T @ factor - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("size", [1e-21, 1e-30])
def test_gradients_too_small_to_be_divided_by_are_finite(size: float) -> None:
    """The sum of their squares is no normal number of float32, or zero."""
    sums = GradientSums(SEED, DIRECTIONS)
    sums.add("module", torch.full((2, 8), size))
    assert sums.factors(Ranks())["module"].isfinite().all()
    traced: Any = SimpleNamespace(sizes={"module": torch.tensor([[size**2, 0.0]])}, counts={"module": torch.tensor(2)})
    batch = {"input_ids": torch.zeros(1, 2)}
    sizes = output_gradients._relative_sizes([(range(1), traced)], [batch], Ranks())["module"]
    assert sizes.isfinite().all()


@pytest.mark.parametrize(
    ("output", "problem", "expected"),
    [
        ({"logits": torch.zeros(2, 3)}, None, True),
        ({"logits": torch.zeros(2, 5, 3)}, "single_label_classification", True),
        ({"logits": torch.zeros(2, 3)}, "regression", False),
        ({"logits": torch.zeros(2, 3)}, "multi_label_classification", False),
        ({"logits": torch.zeros(2, 1)}, None, False),
        ({"logits": torch.zeros(2, 3, 8, 8)}, None, False),
        ({"pooler_output": torch.zeros(2, 3)}, None, False),
    ],
)
def test_what_is_no_choice_is_compared_as_it_is(output: dict[str, Tensor], problem: str | None, expected: bool) -> None:
    module: Any = nn.Module()
    module.config = SimpleNamespace(problem_type=problem)
    assert gives_logits(module, SimpleNamespace(**output)) is expected


def test_logits_of_another_vocabulary_than_the_tokenizers_are_no_padding() -> None:
    places, sizes = torch.arange(44), {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    with torch.device("meta"):
        one = MarianMTModel(MarianConfig(**sizes, pad_token_id=0))
        two = MarianMTModel(MarianConfig(**sizes, pad_token_id=0, decoder_vocab_size=90, tie_word_embeddings=False))
        no_tokens = BertForTokenClassification(BertConfig(vocab_size=50, num_labels=50, num_hidden_layers=1))
    assert choose_places(places, one, 50) is places
    assert choose_places(places, two, 90) is None and choose_places(places, no_tokens, 50) is None
    assert choose_places(torch.arange(51), one, 50) is None and choose_places(None, one, 50) is None
