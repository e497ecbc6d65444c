"""featcal doctor: what it says of a machine, and what it never says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Capsys, Run, featcal_inside
from hub_server import HubServer

from featcal_cli.workflows import doctor

pytestmark = pytest.mark.usefixtures("hurried")
Findings = dict[str, dict[str, str]]
Examine = Callable[[str], tuple[Run, Findings]]


@pytest.fixture
def examine(hub: HubServer, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """The command and its findings by name, with a token that is mona's if it has a role, and else as it is given."""

    def run(token: str) -> tuple[Run, Findings]:
        if token:
            monkeypatch.setenv("HF_TOKEN", token if token.startswith("hf_") else hub.add_token("mona", token))
        done = featcal_inside(capsys, "doctor", {"--json": ""})
        result = json.loads(done.stdout)
        assert result["ok"] == (done.code == 0), done.stdout
        return done, {finding["name"]: finding for finding in result["findings"]}

    return run


def test_a_good_machine(hub: HubServer, examine: Examine) -> None:
    hub.add_org("lab", "mona")
    run, findings = examine("write")
    assert {finding["state"] for finding in findings.values()} == {"ok"}
    assert findings["token"]["text"] == "of mona, who may write to lab, mona"
    assert findings["endpoint"]["text"] == f"127.0.0.1:{hub.port} answers"
    assert "torch 2" in findings["packages"]["text"]
    assert hub.add_token("mona") not in run.stdout


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("read", "of mona, who may read with it but not write"),
        ("fineGrained", "of mona, who may write to mona"),
        ("", "none: public models and data only, and no push"),
    ],
)
def test_tokens(examine: Examine, role: str, text: str) -> None:
    run, findings = examine(role)
    assert run.code == 0 and findings["token"]["text"] == text


def test_a_refused_token_is_a_problem_shown_in_80_columns(examine: Examine, capsys: Capsys) -> None:
    run, findings = examine("hf_" + "x" * 34)
    assert run.code == 1
    assert findings["endpoint"]["state"] == "ok"
    assert (findings["token"]["state"], findings["token"]["command"]) == ("problem", "hf auth login")
    run = featcal_inside(capsys, "doctor", {})
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "  hf auth login\n" in run.stdout
    assert run.stdout.endswith("One thing would stop a run.\n")
    assert "xxxx" not in run.stdout


def test_offline_asks_nobody(hub: HubServer, examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run, findings = examine("write")
    assert run.code == 0
    assert "HF_HUB_OFFLINE is set" in findings["endpoint"]["text"]
    assert findings["token"]["text"] == "there is one, and it was not checked"
    assert not hub.requests


def test_a_hub_that_nobody_reaches(hub: HubServer, examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fail("GET", "500", times=None)
    run, findings = examine("")
    assert (run.code, findings["endpoint"]["state"]) == (1, "problem")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    run, findings = examine("")
    assert run.code == 1
    assert "127.0.0.1:9 cannot be reached" in findings["endpoint"]["text"]
    assert "HF_HUB_OFFLINE=1" in findings["endpoint"]["fix"]


def test_packages_against_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["numpy>=1", "torch>=99", "no-such-package>=1", "mypy>=1; extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda _: asked)
    wrong, missing, right = doctor._examine_packages()
    assert (wrong.name, wrong.state, wrong.command) == ("torch", "problem", "pip install 'torch>=99'")
    assert (missing.text, missing.state) == ("not installed; featcal needs >=1", "problem")
    assert right.text.startswith("numpy ")
    assert "torch" not in right.text


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor._examine_cache("hub cache", tmp_path, "HF_HOME", "hf cache prune")
    assert finding.state == "ok"
    assert finding.text.endswith("GiB free")
    monkeypatch.setattr(doctor, "SMALLEST_DISK", 1e18)
    (finding,) = doctor._examine_cache("hub cache", tmp_path, "HF_HOME", "hf cache prune")
    assert (finding.state, finding.command) == ("problem", "hf cache prune")
    (tmp_path / "file").touch()
    (finding,) = doctor._examine_cache("hub cache", tmp_path / "file" / "hub", "HF_HOME", "")
    assert finding.text == f"{tmp_path / 'file' / 'hub'} cannot be written"
