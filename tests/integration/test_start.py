"""Every verb, every recipe and every line of the README starts, each in a process of its own, as a user starts it. In
none of them do two threads import at the same time."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import featcal
from hub_server import HubServer
from import_watch import Imports, watch_imports
from pages import ROOT, find_blocks, to_run
from published import write_card
from recipe_world import build, write_table

from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes

VERBS = {
    "calibrate": ["calibrate", "user/merged", "--device", "cuda:99"],
    "inspect-drift": ["inspect-drift", "user/merged", "--device", "cuda:99"],
    "evaluate": ["evaluate", "-r", "clip-vit-b32-8", "--device", "cuda:99"],
    "demo": ["demo", "--device", "cuda:99"],
    "modules": ["modules", "user/merged"],
    "doctor": ["doctor"],
}
"""Those that import torch: on a device that is not there they end as soon as they have."""
TASKS = {"mnist": "ylecun/mnist", "svhn": "ufldl-stanford/svhn"}
BASE = "openai/clip-vit-base-patch32"
STAND_IN = "raise ImportError('this stands in for torch')"
README = list(dict.fromkeys(tuple(line) for block in find_blocks(ROOT / "README.md") for line in to_run(block)))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with configs and cards of the models that pages and recipes name."""
    folder = tmp_path_factory.mktemp("configs")
    for kind in ("clip", "t5", "llama"):
        build(kind).config.save_pretrained(folder / kind)
    for task, dataset in TASKS.items():
        shutil.copytree(folder / "clip", folder / f"clip-{task}")
        write_card(folder / f"clip-{task}", base_model=BASE, datasets=[dataset])
    shutil.copytree(folder / "clip", folder / "merged")
    write_card(folder / "merged", base_model=[f"user/clip-{task}" for task in TASKS], tags=["merge"])
    (folder / "rows").mkdir()
    write_table(folder / "rows" / "train.parquet", [{"image": "a picture", "label": 0}], {})
    return folder


def publish_configs(hub: HubServer, configs: Path, recipe: str) -> None:
    """Let the Hub have the README's models and those of a recipe, without weights."""
    hub.add_repo(BASE, configs / "clip")
    hub.add_repo("user/merged", configs / "merged")
    hub.add_repo("user/merged-featcal", configs / "merged")
    for task, dataset in TASKS.items():
        hub.add_repo(f"user/clip-{task}", configs / f"clip-{task}")
        hub.add_repo(dataset, configs / "rows", kind="dataset")
    for name in _list_models(recipe):
        hub.add_repo(name, configs / ("clip" if "clip" in name else "t5" if "t5" in name else "llama"))


def _list_models(recipe: str) -> Iterator[str]:
    draft = read_draft(find_recipe(recipe), {})
    for name in (draft.base, draft.merged, *(task.expert for task in draft.tasks.values())):
        if isinstance(name, str) and not Path(name).exists():
            yield from name.split("+")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for modules that a process is to import before others."""
    (tmp_path / "modules").mkdir()
    return tmp_path / "modules"


def start(imports: Imports, *line: str) -> tuple[int, str]:
    """Exit code and what was said, of a command in which no two threads imported at once."""
    run = featcal(*line, folder=None, **imports.environment)
    told = f"{shlex.join(line)}\n{run.stdout[-1000:]}\n{run.stderr}"
    assert imports.at_once() == [], told
    return run.returncode, told


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_starts(verb: str, hub: HubServer, configs: Path, place: Path) -> None:
    publish_configs(hub, configs, "clip-vit-b32-8")
    imports = watch_imports(place)
    code, told = start(imports, *VERBS[verb])
    assert "torch.nn" in imports.all(), told
    if "cuda:99" in VERBS[verb]:
        ends = ("there is no device cuda:99", "openai/clip-vit-base-patch32 has no model.safetensors")
        assert code == 2 and any(end in told for end in ends), told
    else:
        assert code == 0 or (verb == "doctor" and code == 1), told


@pytest.mark.parametrize("name", [file.stem for file in shipped_recipes()])
def test_a_recipe_starts(name: str, hub: HubServer, configs: Path, place: Path) -> None:
    """As far as the import of torch, which takes most of the time, and is the same for all."""
    publish_configs(hub, configs, name)
    check_reaches_torch(place, ["calibrate", "-r", name, "--dry-run"])


@pytest.mark.parametrize("line", README, ids=lambda line: shlex.join(line[1:])[:60])
def test_a_line_of_the_readme_starts(
    line: tuple[str, ...], hub: HubServer, configs: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_configs(hub, configs, "clip-vit-b32-8")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("user", "write"))
    words = [word for word in line[1:] if not word.startswith("./")]
    if "--push-to" in words:
        hub.delete_repo("user/merged-featcal")
    check_reaches_torch(place, words)


def check_reaches_torch(place: Path, line: list[str]) -> None:
    """A command ends where it imports torch, in whose place something else is."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(STAND_IN)
    code, told = start(watch_imports(place), *line)
    assert code == 2 and "error: torch cannot be imported: this stands in for torch" in told, told
