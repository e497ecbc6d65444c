"""featcal doctor: what it says of a machine, and what it never says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import featcal, featcal_inside
from hub_server import HubServer

from featcal_cli.workflows import doctor


def read(stdout: str, *, is_well: bool) -> dict[str, dict[str, str]]:
    """The findings of `--json`, by name."""
    result = json.loads(stdout)
    assert result["ok"] == is_well, stdout
    return {finding["name"]: finding for finding in result["findings"]}


def test_a_good_machine(hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_org("lab", "mona")
    monkeypatch.setenv("HF_TOKEN", token := hub.add_token("mona"))
    run = featcal_inside(capsys, "doctor", {"--json": ""})
    findings = read(run.stdout, is_well=run.code == 0)
    assert {finding["state"] for finding in findings.values()} == {"ok"}
    assert findings["token"]["text"] == "of mona, who may write to lab, mona"
    assert findings["endpoint"]["text"] == f"127.0.0.1:{hub.port} answers"
    assert "torch 2" in findings["packages"]["text"]
    assert token not in run.stdout


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("read", "of mona, who may read with it but not write"),
        ("fineGrained", "of mona, who may write to mona"),
        ("", "none: public models and data only, and no push"),
    ],
)
def test_tokens(
    role: str, text: str, hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if role:
        monkeypatch.setenv("HF_TOKEN", hub.add_token("mona", role))
    run = featcal_inside(capsys, "doctor", {"--json": ""})
    assert run.code == 0, run.stdout
    assert json.loads(run.stdout)["findings"][-1]["text"] == text


@pytest.mark.usefixtures("hub")
def test_a_refused_token_is_a_problem_shown_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    run = featcal_inside(capsys, "doctor", {"--json": ""})
    findings = read(run.stdout, is_well=run.code == 0)
    assert run.code == 1
    assert findings["endpoint"]["state"] == "ok"
    assert (findings["token"]["state"], findings["token"]["command"]) == ("problem", "hf auth login")
    run = featcal_inside(capsys, "doctor", {})
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "  hf auth login\n" in run.stdout
    assert run.stdout.endswith("One thing would stop a run.\n")
    assert "xxxx" not in run.stdout


def test_offline_asks_nobody(hub: HubServer) -> None:
    done = featcal("doctor", "--json", HF_HUB_OFFLINE="1", HF_TOKEN=hub.add_token("mona"))
    findings = read(done.stdout, is_well=True)
    assert done.returncode == 0
    assert "HF_HUB_OFFLINE is set" in findings["endpoint"]["text"]
    assert findings["token"]["text"] == "there is one, and it was not checked"
    assert not hub.requests


def test_a_hub_that_nobody_reaches() -> None:
    done = featcal("doctor", "--json", HF_ENDPOINT="http://127.0.0.1:9")
    findings = read(done.stdout, is_well=False)
    assert done.returncode == 1
    assert "127.0.0.1:9 cannot be reached" in findings["endpoint"]["text"]
    assert "HF_HUB_OFFLINE=1" in findings["endpoint"]["fix"]


@pytest.mark.usefixtures("hurried")
def test_a_page_in_the_hub_s_place(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fail("GET", "500", times=None)
    run = featcal_inside(capsys, "doctor", {"--json": ""})
    endpoint = next(found for found in json.loads(run.stdout)["findings"] if found["name"] == "endpoint")
    assert run.code == 1
    assert endpoint["state"] == "problem"


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
