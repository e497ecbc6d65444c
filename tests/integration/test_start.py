"""A command says what it found before it imports torch, which takes seconds; and every line of the README starts. Each
runs in a process of its own, as a user starts it, with something in torch's place that ends it there."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import featcal
from hub_server import HubServer
from import_watch import watch_imports
from pages import ROOT, find_blocks, to_run
from published import write_card
from recipe_world import build, write_table

from featcal_cli.recipe.reading import find_recipe, read_draft
from featcal_cli.recipe.schema import Draft

STARTS = {
    "a dry run": (["calibrate", "-r", "demo", "--dry-run"], "Given:\n  merged         task_arithmetic:0.2\n  base "),
    "the demo": (["demo"], "given: merged task_arithmetic:0.2; base "),
    "one argument": (["calibrate", "user/merged"], "base: openai/clip-vit-base-patch32 (from "),
    "an inspection": (["inspect-drift", "user/merged"], "data mnist: ylecun/mnist (from "),
    "an evaluation": (["evaluate", "-r", "clip-vit-b32-8"], "given: merged "),
}
"""What is typed, and what must be there when torch is asked for."""
HEAVY = {"torch", "transformers", "datasets", "pyarrow", "matplotlib", "PIL", "pandas"}
TASKS = {"mnist": "ylecun/mnist", "svhn": "ufldl-stanford/svhn"}
BASE = "openai/clip-vit-base-patch32"
STANDS_IN = "this stands in for torch"
README = list(dict.fromkeys(tuple(line) for block in find_blocks(ROOT / "README.md") for line in to_run(block)))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with configs and cards of the models that pages and recipes name, and no weights to speak of."""
    folder = tmp_path_factory.mktemp("configs")
    for kind in ("clip", "t5", "llama"):
        build(kind).config.save_pretrained(folder / kind)
        (folder / kind / "model.safetensors").write_bytes(b"none are read here")
    for task, dataset in TASKS.items():
        shutil.copytree(folder / "clip", folder / f"clip-{task}")
        write_card(folder / f"clip-{task}", base_model=BASE, datasets=[dataset])
    shutil.copytree(folder / "clip", folder / "merged")
    write_card(folder / "merged", base_model=[f"user/clip-{task}" for task in TASKS], tags=["merge"])
    return folder


def publish_rows(hub: HubServer, configs: Path, name: str, config: str | None) -> None:
    """Let the Hub have a dataset with this config."""
    folder = configs / f"rows-{config}"
    if not folder.exists():
        folder.mkdir()
        write_table(folder / "train.parquet", [{"image": "a picture", "label": 0}], {})
        card = f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files: train.parquet\n---\n"
        (folder / "README.md").write_text(card)
    hub.add_repo(name, folder, kind="dataset")


def publish_configs(hub: HubServer, configs: Path, recipe: str) -> None:
    """Let the Hub have the README's models and those of a recipe, without weights."""
    hub.add_repo(BASE, configs / "clip")
    hub.add_repo("user/merged", configs / "merged")
    hub.add_repo("user/merged-featcal", configs / "merged")
    for task, dataset in TASKS.items():
        hub.add_repo(f"user/clip-{task}", configs / f"clip-{task}")
        publish_rows(hub, configs, dataset, "cropped_digits" if task == "svhn" else None)
    draft = read_draft(find_recipe(recipe), {})
    for spec in draft.tasks.values():
        if spec.data and spec.data.dataset:
            publish_rows(hub, configs, spec.data.dataset, spec.data.config)
    for name in _list_models(draft):
        hub.add_repo(name, configs / ("clip" if "clip" in name else "t5" if "t5" in name else "llama"))


def _list_models(draft: Draft) -> Iterator[str]:
    for name in (draft.base, draft.merged, *(task.expert for task in draft.tasks.values())):
        if isinstance(name, str) and not Path(name).exists():
            yield from name.split("+")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for modules that a process is to import before others."""
    (tmp_path / "modules").mkdir()
    return tmp_path / "modules"


def check_start(place: Path, line: Sequence[str]) -> str:
    """Return what a command says until it imports torch, in whose place something else is, and nothing heavy before."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(f"raise ImportError({STANDS_IN!r})")
    imports = watch_imports(place)
    run = featcal(*line, folder=None, **imports.environment)
    told = f"{shlex.join(line)}\n{run.stdout[-2000:]}\n{run.stderr}"
    assert run.returncode == 2 and "error: torch cannot be imported: " in told and STANDS_IN in told, told
    before = [name.partition(".")[0] for name in imports.in_order()]
    assert not HEAVY.intersection(before[: before.index("peft")]), told
    assert imports.at_once() == [], told
    return told


@pytest.mark.parametrize("start", STARTS)
def test_what_was_found_is_said_before_torch_is_imported(
    start: str, hub: HubServer, configs: Path, place: Path
) -> None:
    publish_configs(hub, configs, "clip-vit-b32-8")
    line, said = STARTS[start]
    assert said in check_start(place, line)


@pytest.mark.parametrize("line", README, ids=lambda line: shlex.join(line[1:])[:60])
def test_a_line_of_the_readme_starts(
    line: tuple[str, ...], hub: HubServer, configs: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_configs(hub, configs, "clip-vit-b32-8")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("user", "write"))
    words = [word for word in line[1:] if not word.startswith("./")]
    if "--push-to" in words:
        hub.delete_repo("user/merged-featcal")
    check_start(place, words)
