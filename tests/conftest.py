"""The whole test suite talks to a Hub on loopback, and touches no cache of the user's."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hub_server import HubServer

# huggingface_hub reads its settings once, when it is imported
assert "huggingface_hub" not in sys.modules, "something imported huggingface_hub before tests/conftest.py"

SERVER = HubServer()
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


@pytest.fixture(scope="session", autouse=True)
def hub_on_loopback() -> Iterator[HubServer]:
    """Serve for as long as the tests run."""
    SERVER.start()
    yield SERVER
    SERVER.stop()
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture
def hub(hub_on_loopback: HubServer) -> HubServer:
    """The Hub of the test suite, empty; name repos after the test, for the client's cache outlives it."""
    hub_on_loopback.reset()
    return hub_on_loopback


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no picture, which takes as long as calibrating a tiny model; what is tested is elsewhere in the output."""
    monkeypatch.setattr("featcal_cli.workflow.plot_drift", lambda _: b"")
