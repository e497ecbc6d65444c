"""The official repository's calibration, in its own environment.

    ENVIRONMENT/bin/python benchmarks/official.py CLONE FAMILY EXAMPLES DEVICE RESULT

Calls the code in CLONE (github.com/egangu/featcal) with a generated family's models and pixel values. Its loader is
given them in place of a dataset of the Hub, and a processor that has nothing to do.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PAPER = {"lambda_ratio": 0.05, "anchor_blend_rho": 2.0, "teacher_interp_alpha": 0.3}


class Picture:
    """Pixel values in place of an image."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def convert(self, _: str) -> Picture:
        """Asked for before it is processed."""
        return self


class Pictures:
    """A task's examples in place of a dataset."""

    def __init__(self, file: Path) -> None:
        self._pixels = load_file(file)["pixel_values"]

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Picture(self._pixels[index]), "label": 0}


def process(images: list[Picture], **_: Any) -> dict[str, list[Tensor]]:
    """The processor."""
    return {"pixel_values": [image.pixels for image in images]}


def main() -> None:
    """Load, calibrate, write the blocks."""
    clone, folder, examples = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    device, result = torch.device(sys.argv[4]), Path(sys.argv[5])
    sys.path.insert(0, str(clone / "src"))
    featcal: Any = importlib.import_module("featcal.featcal")
    tasks = sorted(expert.name for expert in (folder / "experts").iterdir())
    data = {task: Pictures(folder / "data" / f"{task}-{examples}.safetensors") for task in tasks}
    featcal.load_task_dataset = lambda task, *_, **__: data[task]
    merged, base = (featcal.load_vision_model(folder / role) for role in ("merged", "base"))
    experts = featcal.load_expert_models({task: str(folder / "experts" / task) for task in tasks})
    config = featcal.FeatCalConfig(num_calibration_examples=examples, **PAPER)
    calibrator = featcal.CLIPFeatCalibrator(config, processor=process, device=device)
    models = {"merged_model": merged, "base_model": base, "expert_models": experts}
    calibrated = calibrator.calibrate(**models, tasks=tasks)
    print("null")
    state = calibrated.state_dict()
    result.mkdir(exist_ok=True)
    blocks = {name: x.cpu().contiguous() for name, x in state.items() if ".layers." in name}
    save_file(blocks, result / "blocks.safetensors")


if __name__ == "__main__":
    main()
