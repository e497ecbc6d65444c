"""The CI recipes: workflows are valid; their steps calibrate, check and propose a merge, or refuse a bad one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hub_server import HubServer
from published import publish
from zygote import Zygote

CI = Path(__file__).parents[2] / "recipes" / "ci"
WORKFLOW, CALLER, SCRIPT = CI / "featcal.yml", CI / "on-new-merge.yml", CI / "calibrate.sh"
EXPRESSION = re.compile(r"\$\{\{ (.+?) \}\}")
FAR = "-n 16 --method paper --ridge 1000 --rho 30 --alpha 0"
"""Settings of the user's that make a model worse; those that featcal chooses do not."""


class Outcome(NamedTuple):
    """How a pipeline ended."""

    code: int
    folder: Path
    summary: str
    ran: list[str]
    """Names of the steps."""
    said: str


def publish_merge(hub: HubServer, merge: Path, org: str, *, good: bool) -> str:
    """A merge on the Hub and a token; a bad one is the first expert itself, which every calibration leads away from."""
    published = publish(hub, merge, org)
    if not good:
        first = sorted(path.name for path in (merge / "data").iterdir())[0]
        shutil.copyfile(merge / first / "model.safetensors", published.folder / "merged" / "model.safetensors")
        hub.add_repo(f"{org}/merged", published.folder / "merged")
    return hub.add_token(org, "write")


@pytest.fixture(autouse=True)
def featcal(zygote: Zygote, tmp_path: Path) -> None:
    """A command of this name, which starts quickly."""
    zygote.write_command(tmp_path / "bin")


def environment_of(folder: Path, **values: str) -> dict[str, str]:
    """That of a shell in which featcal is installed, and nobody is logged in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_TOKEN", "GITHUB_"))}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", **values}


def run_workflow(folder: Path, inputs: Mapping[str, str], token: str) -> Outcome:
    """The steps of the reusable workflow one after the other as GitHub's runner does it, but for other people's."""
    workflow = read(WORKFLOW)
    declared = workflow["on"]["workflow_call"]["inputs"]
    assert set(inputs) <= set(declared)
    values = {name: str(about.get("default", "")) for name, about in declared.items()} | dict(inputs)
    known = {f"inputs.{name}": value for name, value in values.items()} | {"secrets.HF_TOKEN": token}
    job = workflow["jobs"]["calibrate"]
    summary, code, ran, said = folder / "summary.md", 0, [], ""
    for step in job["steps"]:
        if "run" not in step or not holds(step.get("if", ""), known, failed=code != 0):
            continue
        variables = {**job["env"], **step.get("env", {})}
        variables = {name: fill(text, known) for name, text in variables.items()}
        environment = environment_of(folder, GITHUB_STEP_SUMMARY=str(summary), **variables)
        assert not EXPRESSION.search(step["run"])  # what somebody typed is never read as shell
        line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
        said += done.stdout + done.stderr
        ran.append(step["name"])
        code = code or done.returncode
    return Outcome(code, folder, summary.read_text() if summary.exists() else "", ran, said)


def read(file: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 takes its key `on` for a truth value."""
    found = yaml.safe_load(file.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def fill(text: object, known: Mapping[str, str]) -> str:
    """A text with its expressions replaced: names, and the first of several that is not empty."""
    return EXPRESSION.sub(
        lambda match: next(filter(None, (known[name] for name in match[1].split(" || "))), ""), str(text)
    )


def holds(condition: str, known: Mapping[str, str], *, failed: bool) -> bool:
    if not (expression := EXPRESSION.fullmatch(condition)):
        assert not condition
        return not failed
    if expression[1] == "always()":
        return True
    name, literal = expression[1].split(" != ")
    return not failed and known[name] != literal.strip("'")


def run_script(folder: Path, token: str, **values: str) -> Outcome:
    environment = environment_of(folder, HF_TOKEN=token, **values)
    done = subprocess.run(["bash", str(SCRIPT)], cwd=folder, env=environment, capture_output=True, text=True)
    summary = (folder / "drift.md").read_text() if (folder / "drift.md").exists() else ""
    return Outcome(done.returncode, folder, summary, [], done.stdout + done.stderr)


def check_proposed(hub: HubServer, outcome: Outcome, org: str) -> None:
    assert outcome.code == 0, outcome.said
    repo = hub.repos["model", f"{org}/merged"]
    (pull,) = repo.pulls
    proposed = repo.commits[repo.refs[f"refs/pr/{pull.number}"]]
    assert {"README.md", "featcal_report.json", "featcal.yaml", "drift.png", "model.safetensors"} <= proposed.keys()
    assert not any(name.startswith(".featcal") for name in proposed)
    assert (outcome.folder / "drift.html").stat().st_size > 10_000
    assert outcome.summary.startswith("## Feature drift of calibrated") and "| **mean** |" in outcome.summary


def check_refused(hub: HubServer, outcome: Outcome, org: str) -> None:
    assert outcome.code == 3, outcome.said
    assert not hub.repos["model", f"{org}/merged"].pulls
    assert "over --max-drift 0" in " ".join(outcome.said.split())
    assert "❌ **" in outcome.summary and "over --max-drift 0" in outcome.summary.replace("\\", "")
    assert (outcome.folder / "drift.html").stat().st_size > 10_000


def test_the_workflow_proposes_a_good_merge(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    token = publish_merge(hub, merge, "flow", good=True)
    inputs = {"merged": "flow/merged", "arguments": "-n 16", "package": "featcal-cli"}
    outcome = run_workflow(tmp_path, inputs, token)
    check_proposed(hub, outcome, "flow")
    assert outcome.summary.rstrip().endswith(f"Pushed: {hub.url}/flow/merged/discussions/1")
    assert token not in outcome.said


@pytest.mark.parametrize("way", ["workflow", "script"])
def test_a_bad_merge_is_refused(hub: HubServer, merge: Path, tmp_path: Path, way: str) -> None:
    token = publish_merge(hub, merge, f"bad-{way}", good=False)
    name = f"bad-{way}/merged"
    if way == "script":
        outcome = run_script(tmp_path, token, MERGED=name, ARGUMENTS=FAR)
    else:
        outcome = run_workflow(tmp_path, {"merged": name, "arguments": FAR, "package": "featcal-cli"}, token)
        assert outcome.ran[-2:] == ["Check the drift", "Write the summary"]
    check_refused(hub, outcome, f"bad-{way}")


def test_the_script_proposes_a_good_merge_and_does_so_once(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    token = publish_merge(hub, merge, "shell", good=True)
    values = {"MERGED": "shell/merged", "ARGUMENTS": "-n 16"}
    outcome = run_script(tmp_path, token, **values)
    check_proposed(hub, outcome, "shell")
    assert "nothing is computed again" in " ".join(outcome.said.split())
    again = run_script(tmp_path, token, **values)
    assert again.code == 0, again.said
    assert len(hub.repos["model", "shell/merged"].pulls) == 1


def test_the_script_says_what_it_was_not_told(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, "")
    assert outcome.code == 1 and "MERGED is not set" in outcome.said


@pytest.mark.parametrize("file", [WORKFLOW, CALLER], ids=lambda file: file.name)
def test_workflows_are_valid(file: Path) -> None:
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_caller_gives_what_the_workflow_asks_for() -> None:
    asked, job = read(WORKFLOW)["on"]["workflow_call"], read(CALLER)["jobs"]["featcal"]
    assert job["uses"] == f"./.github/workflows/{WORKFLOW.name}"
    assert set(job["with"]) <= set(asked["inputs"])
    assert {name for name, about in asked["inputs"].items() if about.get("required")} <= set(job["with"])
    assert set(job["secrets"]) == set(asked["secrets"])
    for line in CALLER.read_text().splitlines():  # keys that are shown as comments
        if found := re.fullmatch(r" +# ([a-z-]+): .+", line):
            assert found[1] in asked["inputs"], line
