"""Re-make the checkpoints and the data of `featcal demo`.

Run it from anywhere: `python recipes/demo/make.py [FOLDER]` (default: the folder of this file; about three minutes on
one core; needs torch, transformers, scikit-learn, pyarrow and Pillow). It writes `base/`, `experts/<task>/` and
`data/<task>/{train,validation,test}.parquet`. The same versions on the same kind of machine give the same bytes.

The images are the 1,797 handwritten digits that scikit-learn ships, 8x8 pixels in 17 grey levels:
E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49 (CC BY 4.0).

The base learns, without digit labels, to undo what was done to an image (turned, mirrored, coloured, noise, a second
digit behind it). Each expert is the base fine-tuned on one task: first its head alone, then everything below the head.
Training sees the training images only; test images are touched by the table that is printed at the end, nothing else.
"""

from __future__ import annotations

import io
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, ViTConfig
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.modeling_vit import ViTForImageClassification as ViT

SPLITS = {"train": 997, "validation": 300, "test": 500}  # distinct images, no image in two of them
STORED = {"train": 320, "validation": 300, "test": 500}  # rows written; calibration may use the 320
SCALES = [step / 10 for step in range(1, 11)]


@dataclass(frozen=True)
class Task:
    """One labelling of the digits and one look: what the images of this task have in common."""

    names: list[str]
    """Label names, in order."""
    labels: Sequence[int]
    """The label of each digit 0..9."""
    look: Callable[[Tensor, torch.Generator], Tensor]
    """Grey images in 0..1 [n, 8, 8] to grey images, before colouring."""
    ground: tuple[float, float, float]
    ink: tuple[float, float, float]


def with_another_behind(grey: Tensor, generator: torch.Generator) -> Tensor:
    """A faint second digit, upside down, behind each."""
    other = grey[torch.randperm(len(grey), generator=generator)]
    return torch.maximum(grey, 0.35 * other.rot90(2, (1, 2)))


def mirrored_with_noise(grey: Tensor, generator: torch.Generator) -> Tensor:
    """The images mirrored, with Gaussian noise."""
    return grey.flip(2) + 0.12 * torch.randn(grey.shape, generator=generator)


DIGITS = [str(digit) for digit in range(10)]
LOOPS = [1, 0, 0, 0, 1, 0, 1, 0, 2, 1]  # closed loops in the shape of 0..9
TASKS = {
    "digit": Task(DIGITS, range(10), lambda x, _: x, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "turned": Task(DIGITS, range(10), lambda x, _: x.rot90(1, (1, 2)), (1.0, 0.9, 0.3), (0.0, 0.1, 0.5)),
    "parity": Task(["even", "odd"], [0, 1] * 5, with_another_behind, (0.3, 0.0, 0.4), (0.4, 1.0, 0.4)),
    "loops": Task(["none", "one", "two"], LOOPS, mirrored_with_noise, (0.55, 0.9, 0.9), (0.8, 0.1, 0.1)),
    "high": Task(
        ["below 5", "5 or more"], [0] * 5 + [1] * 5, lambda x, _: x.rot90(2, (1, 2)), (0.1, 0.45, 0.1), (1.0, 0.7, 0.8)
    ),
}


def paint(grey: Tensor, ground: Tensor, ink: Tensor) -> Tensor:
    """Colour grey images [n, 8, 8] from ground (0) to ink (1), each [n or 1, 3]; returns bytes [n, 3, 8, 8]."""
    colour = ground[:, :, None, None] + grey[:, None] * (ink - ground)[:, :, None, None]
    return (colour * 255).clamp(0, 255).round().to(torch.uint8)


def task_images(task: Task, grey: Tensor, generator: torch.Generator) -> Tensor:
    """The images of a task as bytes [n, 3, 8, 8]."""
    return paint(task.look(grey, generator), torch.tensor([task.ground]), torch.tensor([task.ink]))


def as_input(images: Tensor) -> Tensor:
    """Bytes to model input: what the saved image processor does (mean and deviation one half)."""
    return (images.float() - 127.5) / 127.5


def load_split() -> dict[str, tuple[Tensor, Tensor]]:
    """Grey images in 0..1 and digits of train, validation and test, split by a fixed seed."""
    digits = load_digits()
    grey = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    parts = order.split(list(SPLITS.values()))
    return {name: (grey[part], labels[part]) for name, part in zip(SPLITS, parts, strict=True)}


def new_model(names: list[str]) -> ViT:
    """A ViT of three blocks, width 64, patches of 2x2 pixels, and a head for these labels."""
    config = ViTConfig(
        image_size=8, patch_size=2, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        initializer_range=0.1, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    return ViT(config)


def train(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float, decay: float) -> None:
    """AdamW with a short warm-up and a cosine to zero; `loss` draws its own batch."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def pretrain(grey: Tensor) -> ViT:
    """The base: says how an image was turned (its head) and mirrored, and draws it as it was (heads thrown away)."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = new_model(["upright", "quarter turn", "half turn", "three quarter turn"])
    mirror_head, draw_head = nn.Linear(64, 2), nn.Linear(64, 64)

    n = 128  # images in a batch

    def share() -> Tensor:
        return torch.rand(n, 1, 1, generator=generator)

    def loss() -> Tensor:
        clean = grey[torch.randint(len(grey), (n,), generator=generator)]
        turn, mirror = torch.randint(4, (n,), generator=generator), torch.randint(2, (n,), generator=generator)
        view = torch.where(mirror[:, None, None] == 1, clean.flip(2), clean)
        view = torch.stack([view.rot90(k, (1, 2)) for k in range(4)])[turn, torch.arange(n)]
        other = view[torch.randperm(n, generator=generator)]
        view = torch.maximum(view, other * 0.4 * share() * (share() < 0.3))
        view = view + torch.randn(view.shape, generator=generator) * 0.15 * share() * (share() < 0.5)
        ground, ink = torch.rand(n, 3, generator=generator), torch.rand(n, 3, generator=generator)
        too_close = (ground - ink).norm(dim=1, keepdim=True) < 0.6
        images = paint(view, ground, torch.where(too_close, (ground < 0.5).float(), ink))
        features = model.vit(pixel_values=as_input(images)).last_hidden_state[:, 0]
        drawn = F.mse_loss(draw_head(features), clean.flatten(1))
        turned = F.cross_entropy(model.classifier(features), turn)
        return turned + F.cross_entropy(mirror_head(features), mirror) + 10 * drawn

    train([*model.parameters(), *mirror_head.parameters(), *draw_head.parameters()], loss, 2000, 2e-3, 0.05)
    return model.eval()


def finetune(base: ViT, task: Task, grey: Tensor, digits: Tensor, seed: int) -> ViT:
    """An expert: the base with a new head, fitted first alone, then kept while everything below it is trained."""
    torch.manual_seed(10 + seed)
    generator = torch.Generator().manual_seed(100 + seed)
    model = new_model(task.names)
    model.vit.load_state_dict(base.vit.state_dict())

    def loss() -> Tensor:
        rows = torch.randint(len(grey), (64,), generator=generator)
        logits = model(pixel_values=as_input(task_images(task, grey[rows], generator))).logits
        return F.cross_entropy(logits, torch.tensor(task.labels)[digits[rows]])

    model.vit.requires_grad_(False)
    train(model.classifier.parameters(), loss, 200, 1e-2, 0.01)
    model.vit.requires_grad_(True)
    model.classifier.requires_grad_(False)
    train(model.vit.parameters(), loss, 500, 1e-3, 0.01)
    return model.requires_grad_(True).eval()


def save(model: ViT, folder: Path) -> None:
    """Write weights, config and image processor."""
    half, size = [0.5, 0.5, 0.5], {"height": 8, "width": 8}
    model.save_pretrained(folder)
    processor = ViTImageProcessorPil(size=size, image_mean=half, image_std=half, do_convert_rgb=True)
    processor.save_pretrained(folder)


def save_rows(images: Tensor, labels: Tensor, names: list[str], file: Path) -> None:
    """Write images as PNG and labels, in the layout of the `datasets` library."""
    rows = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=True)
        rows.append({"bytes": buffer.getvalue(), "path": None})
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": rows, "label": labels.tolist()}, schema=schema)
    pq.write_table(table, file, compression="zstd", compression_level=19, use_dictionary=False, write_statistics=False)


def load_rows(file: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """Read a data file as a user would: model inputs by the folder's own image processor, and labels."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    table = pq.read_table(file).to_pydict()
    images = [Image.open(io.BytesIO(row["bytes"])) for row in table["image"]]
    return processor(images=images, return_tensors="pt")["pixel_values"], torch.tensor(table["label"])


@torch.no_grad()
def accuracy(body: ViT, expert: ViT, inputs: Tensor, labels: Tensor) -> float:
    """Per cent right with the backbone of `body` under the head of `expert`."""
    logits = expert.classifier(body.vit(pixel_values=inputs).last_hidden_state[:, 0])
    return 100 * float((logits.argmax(-1) == labels).float().mean())


def merge(base: ViT, experts: list[ViT], scale: float) -> ViT:
    """Task arithmetic: base + scale * sum(expert - base), over everything below the head."""
    start, others = base.vit.state_dict(), [expert.vit.state_dict() for expert in experts]
    merged = new_model(["unused"]).eval()
    merged.vit.load_state_dict({k: v + scale * sum(other[k] - v for other in others) for k, v in start.items()})
    return merged


def main(out: Path) -> None:
    """Train, write, read back what was written, and print the table."""
    torch.set_num_threads(1)  # sums in one fixed order
    split = load_split()
    base = pretrain(split["train"][0])
    save(base, out / "base")
    for seed, (name, task) in enumerate(TASKS.items()):
        save(finetune(base, task, *split["train"], seed), out / "experts" / name)
        for part, count in STORED.items():
            grey, digits = split[part][0][:count], split[part][1][:count]
            images = task_images(task, grey, torch.Generator().manual_seed(zlib.crc32(f"{name}/{part}".encode())))
            save_rows(images, torch.tensor(task.labels)[digits], task.names, out / "data" / name / f"{part}.parquet")

    base = ViT.from_pretrained(out / "base")
    experts = {name: ViT.from_pretrained(out / "experts" / name) for name in TASKS}
    rows = {
        (name, part): load_rows(out / "data" / name / f"{part}.parquet", out / "experts" / name)
        for name in TASKS
        for part in ("validation", "test")
    }

    def mean_accuracy(scale: float) -> float:
        merged = merge(base, list(experts.values()), scale)
        return sum(accuracy(merged, experts[name], *rows[name, "validation"]) for name in TASKS) / len(TASKS)

    by_scale = {scale: mean_accuracy(scale) for scale in SCALES}
    best = max(by_scale, key=by_scale.__getitem__)
    print("merged on validation:", "  ".join(f"{scale}: {value:.1f}" for scale, value in by_scale.items()))
    bodies = {"base": base, f"merged {best}": merge(base, list(experts.values()), best)}
    print(f"{'test accuracy, %':18}" + "".join(f"{column:>12}" for column in [*bodies, "expert"]))
    for name, expert in experts.items():
        values = [accuracy(body, expert, *rows[name, "test"]) for body in [*bodies.values(), expert]]
        print(f"{name:18}" + "".join(f"{value:12.1f}" for value in values))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
