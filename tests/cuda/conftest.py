"""What the emulated device cannot do is done on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from featcal_cli.workflows import setup


@pytest.fixture
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built without CUDA sends no gradients back on its tensors."""
    measure = setup.Setup.measure_gradients

    def measure_on_cpu(ready: setup.Setup, *args: Any) -> dict[str, Path]:
        return measure(replace(ready, device=torch.device("cpu")), *args)

    monkeypatch.setattr(setup.Setup, "measure_gradients", measure_on_cpu)
