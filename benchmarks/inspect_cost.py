"""What `inspect-drift` costs over the forward passes that its measures need, on three kinds of model.

    python benchmarks/inspect_cost.py [REPEATS]

Makes random models in a temporary folder (2 GB) and times, turn about in one process, the walk that measures a task and
the same task's bare passes: whole forwards of model, expert and base, and the model's blocks on the inputs of the
expert's, on the same weights and batches, with no hooks. Prints the best time of each, and their ratio.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

from featcal_cli.engine.answers import OutputMeter
from featcal_cli.engine.drift_metrics import DriftMeter, ShareMeter
from featcal_cli.engine.job import Job
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.weight_checks import TaskVectorMeter
from featcal_cli.hub.snapshot import resolve
from featcal_cli.models.loading import find_class
from featcal_cli.workflows.inspect_drift import BASE, MODEL
from featcal_cli.workflows.preflight import prepare
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.setup import fetch_models, load_models, set_up

EXAMPLES, BATCH = 64, 16
ROLES = ("merged", "expert", "base")
WIDE: dict[str, Any] = {"num_hidden_layers": 4}
LLAMA = tf.LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12, vocab_size=8_000,
    use_cache=False,
)  # fmt: skip


def images() -> dict[str, Tensor]:
    """Of the usual size: 197 tokens each."""
    return {"pixel_values": torch.randn(EXAMPLES, 3, 224, 224)}


def tokens(length: int = 128, vocabulary: int = 8_000) -> dict[str, Tensor]:
    """Without padding."""
    ids = torch.randint(3, vocabulary, (EXAMPLES, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, tuple[type, Any, Callable[[], dict[str, Tensor]]]] = {
    "BERT-base, 4 layers": (tf.BertForSequenceClassification, tf.BertConfig(**WIDE), tokens),
    "ViT-base, 4 layers": (tf.ViTForImageClassification, tf.ViTConfig(**WIDE), images),
    "Llama of width 768, 4 layers": (tf.LlamaForCausalLM, LLAMA, tokens),
}


def make(folder: Path, model_class: type, config: Any, inputs: dict[str, Tensor]) -> None:
    """Merged, expert and base that have nothing in common but their shapes, and inputs."""
    for number, name in enumerate(ROLES):
        torch.manual_seed(number)
        model_class(config).save_pretrained(folder / name)
    save_file(inputs, folder / "inputs.safetensors")


def load_job(folder: Path) -> Job:
    """What `inspect-drift` has before it walks."""
    task = {"expert": str(folder / "expert"), "data": str(folder / "inputs.safetensors")}
    recipe = {
        "merged": str(folder / "merged"), "base": str(folder / "base"), "tasks": {"task": task},
        "calibration": {"examples": EXAMPLES},
    }  # fmt: skip
    session = Session(recipe, RunOptions("cpu", BATCH))
    plan = prepare(session)
    models = load_models(fetch_models(session, plan), None, Path(), "")
    watchers = {MODEL: models.merged, BASE: models.base}
    return set_up(session, plan, models).make_job({}, watchers)


def walk(job: Job, *, shares: bool) -> None:
    """All that inspect-drift measures, with or without each block's share of the last drift."""
    drift = replace(
        job.drift,
        meter=DriftMeter(modules=True),
        vectors=TaskVectorMeter(),
        outputs=OutputMeter(),
        shares=ShareMeter(),
        switched=job.drift.switched if shares else {},
    )
    for _ in forward_order(replace(job, drift=drift)):  # nothing is added to what an earlier walk has measured
        pass


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def load(folder: Path) -> dict[str, Any]:
    """The models by role, as transformers loads them."""
    model_class = find_class(resolve(str(folder / "merged")))
    return {role: model_class.from_pretrained(folder / role).eval() for role in ROLES}


def record(expert: Any, blocks: Sequence[str], batch: Mapping[str, Tensor]) -> list[Call]:
    """How the expert's forward calls its blocks."""
    calls: list[Call] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.append((name, args, kwargs))

    hooks = [expert.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in blocks]
    expert(**batch)
    for hook in hooks:
        hook.remove()
    return calls


def run_bare(
    models: Mapping[str, Any], batches: Sequence[Mapping[str, Tensor]], calls: Sequence[Sequence[Call]]
) -> None:
    """The passes that the measures need, and nothing else."""
    for batch, called in zip(batches, calls, strict=True):
        for role in ROLES:
            models[role](**batch)
        for name, args, kwargs in called:
            models["merged"].get_submodule(name)(*args, **kwargs)


def clock(work: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(folder: Path, repeats: int) -> list[float]:
    """Seconds of the bare passes, of the walk without shares, and of the whole; the best of each. The first round warms
    all and is not counted."""
    job, models = load_job(folder), load(folder)
    batches = job.drift.batches["task"]
    calls = [record(models["expert"], [block.name for block in job.architecture.blocks], batch) for batch in batches]
    ways = (
        lambda: run_bare(models, batches, calls),
        lambda: walk(job, shares=False),
        lambda: walk(job, shares=True),
    )
    rounds = [[clock(way) for way in ways] for _ in range(repeats + 1)]
    return [min(times) for times in zip(*rounds[1:], strict=True)]


@torch.no_grad()
def main() -> None:
    """Make, time, compare."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{'model':<30}{'bare passes':>14}{'no shares':>12}{'ratio':>7}{'all':>10}{'ratio':>7}")
    for name, (model_class, config, inputs) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), model_class, config, inputs())
            bare, few, walked = measure(Path(folder), repeats)
        print(
            f"{name:<30}{bare:>12.2f} s{few:>10.2f} s{few / bare:>7.2f}{walked:>8.2f} s{walked / few:>7.2f}", flush=True
        )


if __name__ == "__main__":
    main()
