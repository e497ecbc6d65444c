"""The whole test suite talks to a Hub on loopback, and touches no cache of the user's."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from hub_server import HubServer

if TYPE_CHECKING:
    from bad_input import Stage
    from example_folder import Folder
    from families import Saved
    from zygote import Zygote

# huggingface_hub reads its settings once, when it is imported
assert "huggingface_hub" not in sys.modules, "something imported huggingface_hub before tests/conftest.py"

SERVER = HubServer()
PATIENCE = 0.5
"""Seconds that an impatient client waits for an answer."""
HOME = Path(tempfile.mkdtemp(prefix="featcal-tests-"))

for _name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "FEATCAL_"))]:
    del os.environ[_name]
os.environ |= {
    "OMP_NUM_THREADS": "1",  # one worker a core
    "HF_ENDPOINT": SERVER.url,
    "HF_HOME": str(HOME / "huggingface"),
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "FEATCAL_CACHE": str(HOME / "featcal"),
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


# what is started in the background ignores interrupts, and by nohup a terminal that goes; so would every process that a
# test starts and interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


FOLDERS = ("matrix", "survive", "distributed", "docs", "browser", "cuda")
"""Those whose tests carry the marker of that name, by which other folders have tests only of the first two."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders none of whose tests are asked for are not imported, which takes seconds."""
    asked, kind = config.option.markexpr, collection_path.name
    if collection_path.parent != Path(__file__).parent or collection_path.is_file():
        return None
    is_spared = kind in FOLDERS if asked.startswith("not (") else asked in FOLDERS[2:] and kind != asked
    return True if is_spared else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in tests/matrix, survive, distributed, docs, browser and cuda carry the marker of that name."""
    folder = Path(__file__).parent
    for item in items:
        kind = item.path.relative_to(folder).parts[0]
        if kind in FOLDERS:
            item.add_marker(kind)


@pytest.fixture(scope="session", autouse=True)
def hub_on_loopback() -> Iterator[HubServer]:
    """Serve for as long as the tests run."""
    SERVER.start()
    yield SERVER
    SERVER.stop()
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def as_if_first() -> None:
    """Random numbers begin anew, however far an earlier test in this process has come."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test works in a folder of its own: what a command writes where it stands is in no other test's way."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


@pytest.fixture
def hub(hub_on_loopback: HubServer) -> HubServer:
    """The Hub of the test suite, empty; name repos after the test, for the client's cache outlives it."""
    hub_on_loopback.reset()
    return hub_on_loopback


@pytest.fixture(scope="session")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a merge and of all that it was made of, for `publish`."""
    from published import write_merge

    return write_merge(tmp_path_factory.mktemp("merge"))


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """Starts `featcal` in processes of its own, quickly."""
    from zygote import Zygote

    return Zygote()


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A tiny BERT with a job of two tasks and 20 examples of each, which is only read."""
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """The same in a folder of its own, to be changed."""
    return save_bert(tmp_path)


def save_bert(folder: Path) -> Saved:
    """Such a BERT; its third expert is in the merge, and no task's."""
    from families import BY_NAME, save_family

    return save_family(folder, BY_NAME["bert"]).only(2)


@pytest.fixture(scope="session")
def bert_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with job.yaml, the recipe of a tiny BERT, and all that it names."""
    from families import BY_NAME, save_family

    folder = tmp_path_factory.mktemp("job")
    saved = save_family(folder, BY_NAME["bert"])
    (folder / "job.yaml").write_text(json.dumps(saved.recipe()))
    return folder


@pytest.fixture
def at(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder for sources of examples, with tokenizers that are made once in a process."""
    from example_folder import Folder

    return Folder(tmp_path, tmp_path_factory.getbasetemp() / "tokenizers")


@pytest.fixture
def vit_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models and the data of a tiny ViT's job, in which commands run."""
    from families import BY_NAME, save_family

    save_family(tmp_path, BY_NAME["vit"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait less between two tries."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.005)))


@pytest.fixture(autouse=True)
def expectant() -> None:
    """A Hub that an earlier test has silenced is asked again."""
    from featcal_cli.hub.client import expect_answers

    expect_answers()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait less for an answer."""
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", PATIENCE)
    monkeypatch.setattr("featcal_cli.hub.client.TIMEOUT", PATIENCE)
    monkeypatch.setattr("featcal_cli.hub.client.WRITING_TIMEOUT", PATIENCE)


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[None]:
    """Calibrations draw no picture, which takes as long as calibrating a tiny model; tests/unit/reporting/ draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featcal_cli.workflows.calibrate.plot_drift", lambda _: b"")
        yield


@pytest.fixture(scope="session")
def emulation(request: pytest.FixtureRequest) -> ModuleType:
    """A CUDA device where there is none: its counters and limits. It changes torch, so that tests which need it run in
    processes of their own, those of `pytest -m cuda`."""
    from emulated_cuda import install

    if request.config.option.markexpr != "cuda":
        pytest.skip("changes torch for the whole process: give -m cuda")
    try:
        return install()
    except (RuntimeError, OSError) as error:  # no compiler, no ninja, no headers, or a torch with CUDA
        pytest.skip(f"no emulated CUDA device: {str(error).splitlines()[0]}")


@pytest.fixture
def device(emulation: ModuleType) -> ModuleType:
    """The same, with nothing counted."""
    gc.collect()  # models of earlier tests, which keep tables on the device
    emulation.reset()
    return emulation


@pytest.fixture
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of outputs are measured on the CPU: a torch that was built without CUDA sends none back on a device."""
    import torch

    from featcal_cli.workflows.setup import Setup

    measure = Setup.measure_gradients

    def measure_on_cpu(setup: Setup, *args: Any) -> dict[str, Path]:
        return measure(replace(setup, device=torch.device("cpu")), *args)

    monkeypatch.setattr(Setup, "measure_gradients", measure_on_cpu)


@pytest.fixture(scope="session")
def saved_stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a good job, to be copied."""
    from bad_input import save_stage

    folder = tmp_path_factory.mktemp("stage")
    save_stage(folder)
    return folder


@pytest.fixture
def stage(saved_stage: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A good job that may be spoiled, and an empty folder in which to run it."""
    from bad_input import Stage

    shutil.copytree(saved_stage, tmp_path / "job")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Stage(tmp_path / "job", hub, monkeypatch)
