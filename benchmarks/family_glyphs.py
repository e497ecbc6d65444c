"""Make the family *glyphs*: five questions about letters of many scripts, asked of a vision transformer.

    OMP_NUM_THREADS=1 python benchmarks/family_glyphs.py FOLDER     (about eight minutes on one core)

Needs matplotlib, for its fonts alone, and nothing from the network. The pictures are the letters of seven scripts as
drawn by 21 fonts that matplotlib ships: DejaVu Sans, Sans Mono and Serif (Bitstream Vera licence, and public domain),
STIX General (SIL Open Font License) and the Computer Modern fonts of BaKoMa (their own free licence). A letter is
rotated, resized and shifted a little, then coloured and disturbed in its task's own way.

The base learns, without any of the five labels, to see through what was done to a letter of any font: it says how the
picture was turned, finds the other picture of the same drawing among many, and draws the letter clean. Each expert is
the base fine-tuned on one question: first its head alone, then everything below it. A drawing, with all its pictures,
lies in one split only.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from judge import Family, finish, save, train
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, cross_entropy, grid_sample, mse_loss, normalize, unfold
from transformers import ViTConfig
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.modeling_vit import ViTForImageClassification as ViT

SIDE, PATCH = 24, 6  # pixels of a picture, and of a patch; a glyph is drawn twice as large first
SOURCE = "letters of seven scripts as drawn by the fonts that matplotlib ships: DejaVu, STIX, Computer Modern"
ROWS = {"train": 1500, "validation": 600, "test": 1000}
SHARES = {"train": 70, "validation": 12, "test": 18}  # per cent of the drawings
SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "GEORGIAN", "HEBREW", "ARABIC", "CANADIAN")
STYLES = ("regular", "bold", "italic", "bold italic")
MARKS = ("GRAVE", "ACUTE", "CIRCUMFLEX", "DIAERESIS", "MACRON", "DOT BELOW")
FACES = {  # font file: number of its style
    "DejaVuSans": 0, "DejaVuSans-Bold": 1,
    "DejaVuSans-Oblique": 2, "DejaVuSans-BoldOblique": 3,
    "DejaVuSansMono": 0, "DejaVuSansMono-Bold": 1,
    "DejaVuSansMono-Oblique": 2, "DejaVuSansMono-BoldOblique": 3,
    "DejaVuSerif": 0, "DejaVuSerif-Bold": 1,
    "DejaVuSerif-Italic": 2, "DejaVuSerif-BoldItalic": 3,
    "STIXGeneral": 0, "STIXGeneralBol": 1,
    "STIXGeneralItalic": 2, "STIXGeneralBolIta": 3,
    "cmr10": 0, "cmb10": 1, "cmti10": 2, "cmss10": 0, "cmtt10": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Glyph:
    """A letter as one font draws it."""

    letter: str
    face: str
    """Font file, without its ending."""
    pixels: bytes
    """Grey levels of the drawing, 2·SIDE × 2·SIDE; ink is 255."""

    @property
    def script(self) -> str:
        """First word of the letter's Unicode name."""
        return unicodedata.name(self.letter).split()[0]

    @property
    def split(self) -> str:
        """The split that this drawing belongs to, in every task, whatever letter it stands for."""
        place = int(hashlib.sha256(self.pixels).hexdigest(), 16) % 100
        return "train" if place < SHARES["train"] else "test" if place >= 100 - SHARES["test"] else "validation"


Look = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Task:
    """A question, and what its pictures have in common."""

    names: tuple[str, ...]
    """Answers, in order."""
    answer: Callable[[Glyph], str | None]
    """The answer for a glyph; None where the question is not asked."""
    look: Look
    """Grey pictures in 0..1 [n, SIDE, SIDE] to grey pictures, before colouring."""
    ground: tuple[float, float, float]
    ink: tuple[float, float, float]


def letter_of(glyph: Glyph) -> str | None:
    """A to Z."""
    return glyph.letter.upper() if glyph.letter.isascii() else None


def script_of(glyph: Glyph) -> str | None:
    """The script of the letter."""
    return glyph.script


def case_of(glyph: Glyph) -> str | None:
    """Upper or lower case, in the scripts that have both."""
    if glyph.script == "GEORGIAN":  # its capitals are of another kind
        return None
    return {"Lu": "upper", "Ll": "lower"}.get(unicodedata.category(glyph.letter))


def mark_of(glyph: Glyph) -> str | None:
    """The one accent on a letter."""
    name = unicodedata.name(glyph.letter).partition(" WITH ")[2]
    return name if name in MARKS else None


def style_of(glyph: Glyph) -> str | None:
    """Weight and slant of the font."""
    return STYLES[FACES[glyph.face]] if glyph.script in SCRIPTS[:3] else None


def with_noise(grey: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian noise."""
    return grey + 0.15 * torch.randn(grey.shape, generator=generator)


def on_stripes(grey: Tensor, generator: torch.Generator) -> Tensor:
    """Slanting stripes behind each, at a random place."""
    rows, columns = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    phase = 2 * math.pi * torch.rand(len(grey), 1, 1, generator=generator)
    return torch.maximum(grey, 0.15 + 0.15 * torch.sin((rows + columns) * 0.9 + phase))


def in_shade(grey: Tensor, generator: torch.Generator) -> Tensor:
    """A shadow that falls from one side."""
    shade = torch.linspace(0, 0.3, SIDE)[None, None] * torch.rand(len(grey), 1, 1, generator=generator)
    return grey * (1 - shade) + shade * 0.5


TASKS = {
    "letter": Task(tuple(map(chr, range(65, 91))), letter_of, lambda x, _: x, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "script": Task(SCRIPTS, script_of, lambda x, _: x.rot90(1, (1, 2)), (1.0, 0.9, 0.3), (0.0, 0.1, 0.5)),
    "case": Task(("lower", "upper"), case_of, on_stripes, (0.3, 0.0, 0.4), (0.4, 1.0, 0.4)),
    "accent": Task(MARKS, mark_of, lambda x, g: in_shade(x.rot90(2, (1, 2)), g), (0.05, 0.3, 0.05), (1.0, 0.8, 0.9)),
    "style": Task(STYLES, style_of, lambda x, g: with_noise(x.flip(2), g), (0.55, 0.9, 0.9), (0.8, 0.1, 0.1)),
}


def draw_glyphs() -> list[Glyph]:
    """Every letter of the seven scripts in every font that has it, in an order that does not change."""
    glyphs = []
    for face in FACES:
        file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")
        font = ImageFont.truetype(file, 33)
        letters = [chr(code) for code in sorted(FT2Font(str(file)).get_charmap())]
        for letter in letters:
            name = unicodedata.name(letter, "")
            if not unicodedata.category(letter).startswith("L") or name.partition(" ")[0] not in SCRIPTS:
                continue
            image = Image.new("L", (2 * SIDE, 2 * SIDE))
            ImageDraw.Draw(image).text((SIDE, 36), letter, 255, font, anchor="ms")
            glyphs.append(Glyph(letter, face, image.tobytes()))
    return glyphs


def stack(glyphs: list[Glyph]) -> Tensor:
    """Bytes [n, 2·SIDE, 2·SIDE]."""
    pixels = np.frombuffer(b"".join(glyph.pixels for glyph in glyphs), np.uint8).copy()
    return torch.from_numpy(pixels).view(len(glyphs), 2 * SIDE, 2 * SIDE)


class Pool:
    """The glyphs of one task and split, drawn from with the same chance for every answer."""

    def __init__(self, task: Task, glyphs: list[Glyph], split: str) -> None:
        answers: dict[bytes, set[str]] = {}
        for glyph in glyphs:  # a Latin A and a Cyrillic one may be the same drawing: such a question has no answer
            answers.setdefault(glyph.pixels, set()).update(filter(None, [task.answer(glyph)]))
        asked = [glyph for glyph in glyphs if len(answers[glyph.pixels]) == 1 and glyph.split == split]
        groups = [[glyph for glyph in asked if task.answer(glyph) == name] for name in task.names]
        self.task = task
        self.groups = {number: stack(group) for number, group in enumerate(groups) if group}

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures as bytes [count, 3, SIDE, SIDE], and the numbers of their answers [count]."""
        labels = torch.tensor(list(self.groups))[torch.randint(len(self.groups), (count,), generator=generator)]
        groups = [self.groups[label] for label in labels.tolist()]
        rows = (torch.rand(count, generator=generator) * torch.tensor([len(group) for group in groups])).long()
        pixels = torch.stack([group[row] for group, row in zip(groups, rows, strict=True)])
        grey = self.task.look(pose(pixels, generator), generator)
        shift = 0.06 * torch.randn(2, count, 3, generator=generator)
        return paint(grey, torch.tensor(self.task.ground) + shift[0], torch.tensor(self.task.ink) + shift[1]), labels


def pose(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Glyphs as bytes [n, 2·SIDE, 2·SIDE], each turned, resized and shifted a little: grey in 0..1 [n, SIDE, SIDE]."""
    n = len(pixels)
    random = torch.rand(4, n, generator=generator) * 2 - 1
    angle, size = random[0] * math.radians(8), 0.98 + 0.1 * random[1]
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(n, 2, 2) * size[:, None, None]
    move = torch.cat([turn, 0.08 * random[2:].T[:, :, None]], 2)
    grid = affine_grid(move, [n, 1, *pixels.shape[1:]], align_corners=False)
    drawn = grid_sample(pixels[:, None].float() / 255, grid, align_corners=False)
    return avg_pool2d(drawn, 2)[:, 0]


def paint(grey: Tensor, ground: Tensor, ink: Tensor) -> Tensor:
    """Colour grey pictures [n, SIDE, SIDE] from ground (0) to ink (1), each [n, 3]: bytes [n, 3, SIDE, SIDE]."""
    colour = ground[:, :, None, None] + grey[:, None] * (ink - ground)[:, :, None, None]
    return (colour * 255).clamp(0, 255).round().to(torch.uint8)


def as_input(images: Tensor) -> Tensor:
    """Bytes to model input: what the saved image processor does (mean and deviation one half)."""
    return (images.float() - 127.5) / 127.5


def new_model(names: tuple[str, ...]) -> ViT:
    """A ViT of six blocks, width 96, patches of 6x6 pixels, and a head for these answers."""
    config = ViTConfig(
        image_size=SIDE, patch_size=PATCH, hidden_size=96, intermediate_size=192, num_hidden_layers=6,
        num_attention_heads=4, initializer_range=0.08, id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    return ViT(config)


def pretrain(pixels: Tensor) -> ViT:
    """The base: says how a letter was turned (its head), tells it from others, and draws it (heads thrown away)."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = new_model(("upright", "quarter turn", "half turn", "three quarter turn"))
    tell_head, draw_head, whole_head = nn.Linear(96, 64), nn.Linear(96, PATCH * PATCH), nn.Linear(96, SIDE * SIDE)
    n = 32  # letters in a batch, each in two pictures

    def share() -> Tensor:
        return torch.rand(2 * n, 1, 1, generator=generator)

    def loss() -> Tensor:
        letters = pixels[torch.randint(len(pixels), (n,), generator=generator)].repeat(2, 1, 1)
        upright = pose(letters, generator)
        turn = torch.randint(4, (n,), generator=generator).repeat(2)
        clean = torch.stack([upright.rot90(k, (1, 2)) for k in range(4)])[turn, torch.arange(2 * n)]
        shown = torch.where(share() < 0.25, on_stripes(clean, generator), clean)
        shown = torch.where(share() < 0.25, in_shade(shown, generator), shown)
        shown = shown + torch.randn(clean.shape, generator=generator) * 0.2 * share() * (share() < 0.4)
        ground, ink = torch.rand(2, 2 * n, 3, generator=generator)
        too_close = (ground - ink).norm(dim=1, keepdim=True) < 0.6
        images = paint(shown, ground, torch.where(too_close, (ground < 0.5).float(), ink))
        features = model.vit(pixel_values=as_input(images)).last_hidden_state
        drawn = mse_loss(draw_head(features[:, 1:]), unfold(clean[:, None], PATCH, stride=PATCH).transpose(1, 2))
        drawn = drawn + mse_loss(whole_head(features[:, 0]), clean.flatten(1))
        one, other = normalize(tell_head(features[:, 0]), dim=1).split(n)
        told = cross_entropy(one @ other.T / 0.15, torch.arange(n))
        return cross_entropy(model.classifier(features[:, 0]), turn) + told + 20 * drawn

    heads = [tell_head, draw_head, whole_head]
    parameters = [*model.parameters(), *(weight for head in heads for weight in head.parameters())]
    print(f"base: loss {train(parameters, loss, steps=1500, lr=2e-3, decay=0.05):.3f}", flush=True)
    return model.eval()


def finetune(base: ViT, pool: Pool, seed: int) -> ViT:
    """An expert: the base with a new head, fitted first alone, then kept while everything below it is trained."""
    torch.manual_seed(10 + seed)
    generator = torch.Generator().manual_seed(100 + seed)
    model = new_model(pool.task.names)
    model.vit.load_state_dict(base.vit.state_dict())

    def loss() -> Tensor:
        images, labels = pool.draw(64, generator)
        return cross_entropy(model(pixel_values=as_input(images)).logits, labels)

    model.vit.requires_grad_(False)
    train(model.classifier.parameters(), loss, steps=100, lr=1e-2, decay=0.01)
    model.vit.requires_grad_(True)
    model.classifier.requires_grad_(False)
    print(f"expert: loss {train(model.vit.parameters(), loss, steps=600, lr=8e-4, decay=0.01):.3f}", flush=True)
    return model.requires_grad_(True).eval()


def new_processor() -> ViTImageProcessorPil:
    """The image processor that does what `as_input` does."""
    half, size = [0.5, 0.5, 0.5], {"height": SIDE, "width": SIDE}
    return ViTImageProcessorPil(size=size, image_mean=half, image_std=half, do_convert_rgb=True)


def save_rows(images: Tensor, labels: Tensor, names: tuple[str, ...], file: Path) -> None:
    """Write pictures as PNG and the numbers of their answers, in the layout of the `datasets` library."""
    rows = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": rows, "label": labels.tolist()}, schema=schema), file)


def main(out: Path) -> None:
    """Train, write, merge, and print the table."""
    torch.set_num_threads(1)  # sums in one fixed order
    started = time.monotonic()
    glyphs, processor = draw_glyphs(), new_processor()
    base = pretrain(stack([glyph for glyph in glyphs if glyph.split == "train"]))
    save(base, processor, out / "base")
    print(f"base: {time.monotonic() - started:.0f} s", flush=True)
    for seed, (name, task) in enumerate(TASKS.items()):
        pools = {split: Pool(task, glyphs, split) for split in ROWS}
        save(finetune(base, pools["train"], seed), processor, out / "experts" / name)
        for number, (split, count) in enumerate(ROWS.items()):
            images, labels = pools[split].draw(count, torch.Generator().manual_seed(1000 + 10 * seed + number))
            save_rows(images, labels, task.names, out / "data" / name / f"{split}.parquet")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    tasks = {name: {"answers": list(task.names)} for name, task in TASKS.items()}
    finish(out, Family("glyphs", "classification", SOURCE, tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
