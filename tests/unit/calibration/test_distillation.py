"""The loss is the divergence from the expert's probabilities; held-out examples decide what is kept; runs go on."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from featcal_cli.calibration import distillation
from featcal_cli.calibration.distillation import (
    KEPT,
    Lesson,
    Schedule,
    add_updates,
    distil,
    divergence,
    is_clearly_larger,
    join_others,
    order_examples,
)
from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.results import Refinement
from featcal_cli.data.batches import Batch, Example
from featcal_cli.runtime.progress import Progress

CLASSES = 6
SCHEDULE = Schedule(steps=40, texts=8, peak=0.05, checks=10)


@pytest.mark.parametrize("count", [3, KEPT, KEPT + 1, 1000])
def test_the_loss_is_the_divergence_with_all_small_classes_as_one(count: int) -> None:
    torch.manual_seed(0)
    z, z_exp = 3 * torch.randn(5, count), 3 * torch.randn(5, count)
    z_exp[0, 0] = -torch.inf  # what the expert rules out
    p, log_q = z_exp.double().softmax(-1), z.double().log_softmax(-1)
    order = p.argsort(-1, descending=True)
    p, q = p.gather(-1, order), log_q.exp().gather(-1, order)
    p, q = (torch.cat([x[:, :KEPT], x[:, KEPT:].sum(-1, keepdim=True)], -1) for x in (p, q))
    expected = torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)
    z.requires_grad_()
    places = z_exp.topk(min(KEPT, count)).indices
    found = divergence(z, places, join_others(z_exp, places))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert z.grad is not None and z.grad.isfinite().all()


def test_each_example_is_used_once_before_any_is_used_again() -> None:
    numbers = [number for step in order_examples(60, SCHEDULE, seed=3) for number in step]
    assert sorted(numbers[:60]) == sorted(numbers[60:120]) == list(range(60))
    assert order_examples(60, SCHEDULE, seed=3) != order_examples(60, SCHEDULE, seed=4)


@pytest.mark.parametrize("distance", [1.0, 1e-2])
def test_a_parameter_learns_at_a_rate_in_proportion_to_its_distance(tmp_path: Path, distance: float) -> None:
    """The first step of AdamW is as large as the rate, whatever the gradients are."""
    expert, once = make_expert(0.3, seed=1), Schedule(steps=1, texts=64, peak=0.01, checks=1)
    _, parts = learn(tmp_path / "room", {"red": (expert, expert)}, distance=distance, schedule=once)
    assert float(parts["0.weight/whole"].abs().median()) == pytest.approx(0.01 * distance, rel=1e-2)


def test_gradients_that_are_only_rounding_move_nothing(tmp_path: Path) -> None:
    expert, once = make_expert(0.3, seed=1), Schedule(steps=1, texts=64, peak=0.01, checks=1)
    _, parts = learn(tmp_path / "room", {"red": (expert, expert)}, schedule=once, sizes=[1e-7, *[1.0] * 7])
    moved = parts["0.weight/whole"].abs().median(0).values
    assert 0 < moved[0] < 1e-3 * moved[1:].min()


def test_a_parameter_without_gradients_stays(tmp_path: Path) -> None:
    student, expert = make_student(), make_expert(0.3, seed=1)
    lesson = make_lesson(student, expert, expert, tmp_path / "red.safetensors", [0.0] * 8)
    learned, before = add_updates(student, {"0.weight": 1.0}, seed=0), lesson.measure()
    distil({"red": lesson}, learned, SCHEDULE, {"red": before}, Journal(tmp_path / "journal", {}), 5, lambda _: None)
    assert torch.equal(lesson.measure(), before) and not learned.parts["0.weight/whole"].any()


def test_one_task_counts_as_worse_by_two_standard_errors() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 3.0])
    # the sum grows by 1, with a standard error of 1
    assert not is_clearly_larger(one, other) and not is_clearly_larger(other, one)
    assert is_clearly_larger(other + 0.1, other) and not is_clearly_larger(other - 0.1, other)
    assert is_clearly_larger(one[:1] + 1, other[:1]) and not is_clearly_larger(other, other)


def make_student() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).requires_grad_(False)


def make_lesson(
    student: nn.Module, expert: nn.Module, checked_by: nn.Module, file: Path, sizes: Sequence[float]
) -> Lesson:
    """A lesson whose held-out answers may be those of another expert. sizes: of the features in its examples."""
    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(2)) * torch.tensor([*sizes])
    examples = [Example({"x": row[None]}) for row in rows]
    numbers = iter(range(0, 96, 8))

    def run(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), torch.arange(len(batch["x"]))

    lesson = Lesson(partial(run, student), examples, 64, file, 8, 0)
    lesson.record(lambda batch: run(expert if next(numbers) < 64 else checked_by, batch))
    return lesson


def make_expert(size: float, seed: int) -> nn.Sequential:
    """An expert: the student with other weights in its first layer."""
    expert, noise = make_student(), torch.Generator().manual_seed(seed)
    expert.get_parameter("0.weight").data += size * torch.randn(8, 8, generator=noise)
    return expert


def learn(
    folder: Path,
    experts: dict[str, tuple[nn.Module, nn.Module]],
    watch: Callable[[Progress], None] = lambda _: None,
    *,
    distance: float = 1.0,
    merged: float = 1.0,
    schedule: Schedule = SCHEDULE,
    sizes: Sequence[float] = (1.0,) * 8,
) -> tuple[Refinement, dict[str, Tensor]]:
    """Distil experts, with those that held-out examples are answered by, into a new student."""
    student = make_student()
    folder.mkdir(exist_ok=True)
    files = {task: folder / f"{task}.safetensors" for task in experts}
    lessons = {task: make_lesson(student, *both, files[task], sizes) for task, both in experts.items()}
    of_merged = {task: merged * lesson.measure() for task, lesson in lessons.items()}
    journal = Journal(folder / "work" / "journal", {})
    learned = add_updates(student, {"0.weight": distance}, seed=0)
    return distil(lessons, learned, schedule, of_merged, journal, 5, watch)


@pytest.mark.parametrize(
    ("large", "saved_every", "begins"),
    [
        (distillation.LARGE, distillation.SAVED_EVERY, 24),
        (0, distillation.SAVED_EVERY, 24),
        (distillation.LARGE, 0.0, 27),
    ],
    ids=["measured", "large tensors", "long steps"],
)
def test_a_run_that_goes_on_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int, saved_every: float, begins: int
) -> None:
    """From the latest measurement or, where steps are long, from the latest step."""
    monkeypatch.setattr(distillation, "LARGE", large)
    monkeypatch.setattr(distillation, "SAVED_EVERY", saved_every)
    expert = make_expert(0.3, seed=1)
    record, whole = learn(tmp_path / "whole", {"red": (expert, expert)})
    assert record.share == 1 and record.after["red"] < 0.2 * record.before["red"]

    def stop(progress: Progress) -> None:
        if progress.finished == 27:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "parts", {"red": (expert, expert)}, stop)
    steps: list[int] = []
    again, parts = learn(tmp_path / "parts", {"red": (expert, expert)}, lambda told: steps.append(told.finished))
    assert steps == list(range(begins, 40))
    assert again.after == record.after and again.before == record.before
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize(("answered_by", "merged", "best"), [(0.0, 1.0, 0), (0.3, 0.0, 40)])
def test_updates_that_do_not_help_are_dropped(tmp_path: Path, answered_by: float, merged: float, best: int) -> None:
    """And those that stay farther away than merged is."""
    answering = make_expert(0.3, seed=1), make_expert(answered_by, seed=1)
    record, updates = learn(tmp_path / "room", {"red": answering}, merged=merged)
    assert not updates and (record.share, record.best, record.steps) == (0, best, 40)
    assert record.after == record.before
    assert best or "did not help" in str(record)


def test_the_best_updates_are_kept_and_no_task_gets_worse(tmp_path: Path) -> None:
    near, far = make_expert(0.1, seed=1), make_expert(0.4, seed=2)
    # what is learned goes past the expert that is asked on held-out examples
    record, best = learn(tmp_path / "past", {"red": (far, make_expert(0.15, seed=2))})
    assert 0 < record.best < 40 and best and record.after["red"] < record.before["red"]
    # green is nearly learned already, and pays for what red gains
    record, _ = learn(tmp_path / "two", {"red": (far, far), "green": (near, make_student())})
    assert all(record.after[task] <= max(record.before[task], record.merged[task]) for task in ("red", "green"))
    assert record.share < 1
