"""What runs come to: what two of one job must have in common, and what a refusal says."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from featcal_cli.runtime.errors import FeatCalError

TIMES = ("seconds", "peak_rss_bytes", "expert_bytes_read")
"""What a report says of the run and not of the result."""
TIME = re.compile(r"(\d+ (h|min) ?)*(\d[\d.,]* (s|seconds|minutes|MB|GB|MiB|GiB)\b)?")
"""What a card says of it."""
OF_THE_RUN = re.compile("taken over|earlier run|computed again")
"""Notes that tell of an interruption."""


def result(folder: Path) -> dict[str, object]:
    """Every file of an output; of the report and the card, what the result is."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    files: dict[str, object] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    report = json.loads((folder / "featcal_report.json").read_text())
    report["notes"] = [note for note in report["notes"] if not OF_THE_RUN.search(note)]
    report["cost"] = {key: value for key, value in report["cost"].items() if key not in TIMES}
    report["blocks"] = [{**block, "seconds": 0} for block in report["blocks"]]
    files["featcal_report.json"] = report
    card = (folder / "README.md").read_text().splitlines()
    files["README.md"] = [TIME.sub("", line) for line in card if not OF_THE_RUN.search(line)]
    return files


def weights(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


def check_equal(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """The same tensors, by default to the bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """‖one − other‖, of all tensors together."""
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in one) ** 0.5)


def numbers_in(value: Any, at: str = "") -> dict[str, float]:
    """All numbers in a structure of JSON, by their places."""
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: number for key, part in parts for place, number in numbers_in(part, f"{at}/{key}").items()}
    return {at: value} if isinstance(value, int | float) else {}


def refusal_of(act: Callable[[], object]) -> str:
    """The message of the error that `act` ends in, which says what is wrong, where, and how to fix it."""
    with pytest.raises(FeatCalError) as caught:
        act()
    assert caught.value.what and caught.value.where and caught.value.fix
    return str(caught.value)
