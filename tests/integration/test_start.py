"""A command says what it found before it imports torch, which takes seconds: in a process of its own, as a user starts
it, with something in torch's place that ends it there."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import featcal
from hub_server import HubServer
from published import write_card
from recipe_world import build, write_table

STARTS = {
    "one argument": (["calibrate", "user/merged"], "base: openai/clip-vit-base-patch32 (from "),
    "an inspection": (["inspect-drift", "user/merged"], "data mnist: ylecun/mnist (from "),
    "an evaluation": (["evaluate", "-r", "demo"], "given: merged "),
}
"""What is typed, and what must be there when torch is asked for."""
TASKS = {"mnist": "ylecun/mnist", "svhn": "ufldl-stanford/svhn"}
BASE = "openai/clip-vit-base-patch32"
STANDS_IN = """
import sys
heavy = {"transformers", "datasets", "pyarrow", "matplotlib", "PIL", "pandas"} & sys.modules.keys()
raise ImportError(f"heavy modules before torch: {sorted(heavy)}")
"""


@pytest.fixture
def world(hub: HubServer, tmp_path: Path) -> None:
    """Let the Hub have a merge and all it is made of: configs and cards, and no weights to speak of."""
    build("clip").config.save_pretrained(tmp_path / "clip")
    (tmp_path / "clip" / "model.safetensors").write_bytes(b"none are read here")
    (tmp_path / "rows").mkdir()
    write_table(tmp_path / "rows" / "train.parquet", [{"image": "a picture", "label": 0}], {})
    hub.add_repo(BASE, tmp_path / "clip")
    for task, dataset in TASKS.items():
        write_card(tmp_path / "clip", base_model=BASE, datasets=[dataset])
        hub.add_repo(f"user/clip-{task}", tmp_path / "clip")
        hub.add_repo(dataset, tmp_path / "rows", kind="dataset")
    write_card(tmp_path / "clip", base_model=[f"user/clip-{task}" for task in TASKS], tags=["merge"])
    hub.add_repo("user/merged", tmp_path / "clip")


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("start", STARTS)
def test_what_was_found_is_said_before_torch_or_anything_heavy_is_imported(start: str, tmp_path: Path) -> None:
    (place := tmp_path / "modules").mkdir()
    (place / "torch.py").write_text(STANDS_IN)
    line, said = STARTS[start]
    run = featcal(*line, folder=None, PYTHONPATH=str(place))
    told = f"{run.stdout[-2000:]}\n{run.stderr}"
    assert run.returncode == 2 and "torch cannot be imported: ImportError: heavy modules before torch: []" in told, told
    assert said in told, told
