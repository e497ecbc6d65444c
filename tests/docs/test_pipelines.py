"""The CI recipes: workflows are valid; what they run calibrates, checks and proposes a merge, or refuses a bad one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import HubServer
from published import publish

ROOT = Path(__file__).parents[2]
CI, GITHUB = ROOT / "recipes" / "ci", ROOT / ".github"
WORKFLOW, CALLER, SCRIPT = CI / "featcal.yml", CI / "on-new-merge.yml", CI / "calibrate.sh"
FAR = "-n 16 --method paper --ridge 1000 --rho 30 --alpha 0"
"""Settings of the user's that make a model worse; those that featcal chooses do not."""


def publish_merge(hub: HubServer, merge: Path, org: str, *, good: bool) -> str:
    """A merge on the Hub and a token; a bad one is the first expert itself, which every calibration leads away from."""
    published = publish(hub, merge, org)
    if not good:
        first = sorted(path.name for path in (merge / "data").iterdir())[0]
        shutil.copyfile(merge / first / "model.safetensors", published.folder / "merged" / "model.safetensors")
        hub.add_repo(f"{org}/merged", published.folder / "merged")
    return hub.add_token(org, "write")


def run_script(folder: Path, token: str, command: str = f"bash {SCRIPT}", **values: str) -> tuple[int, str]:
    """What GitHub's runner or another machine does, in a shell that ends at the first command that fails.

    Returns the exit code, and what was said in one line.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where featcal is installed
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "HF_TOKEN": token, **values}
    line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def read(file: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 takes its key `on` for a truth value."""
    found = yaml.safe_load(file.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def test_the_workflow_refuses_a_bad_merge(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    """Its inputs go through the environment: what somebody typed is never read as shell."""
    job = read(WORKFLOW)["jobs"]["calibrate"]
    assert job["env"] == {
        "MERGED": "${{ inputs.merged }}", "PUSH_TO": "${{ inputs.push-to || inputs.merged }}",
        "PUSH_OPTIONS": "${{ inputs.push-options }}", "MAX_DRIFT": "${{ inputs.max-drift }}",
        "ARGUMENTS": "${{ inputs.arguments }}",
    }  # fmt: skip
    assert not any("${{" in step.get("run", "") for step in job["steps"])
    (command,) = [step["run"] for step in job["steps"] if "calibrate.sh" in step.get("run", "")]
    token = publish_merge(hub, merge, "bad", good=False)
    code, said = run_script(tmp_path, token, command, MERGED="bad/merged", ARGUMENTS=FAR)
    assert code == 3 and "over --max-drift 0" in said, said
    assert not hub.repos["model", "bad/merged"].pulls
    summary = (tmp_path / "drift.md").read_text()
    assert "❌ **" in summary and "over --max-drift 0" in summary.replace("\\", "")
    assert (tmp_path / "drift.html").stat().st_size > 10_000


def test_the_script_proposes_a_good_merge_and_does_so_once(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    token = publish_merge(hub, merge, "shell", good=True)
    values = {"MERGED": "shell/merged", "ARGUMENTS": "-n 16"}
    code, said = run_script(tmp_path, token, **values)
    assert code == 0 and "nothing is computed again" in said and token not in said, said
    repo = hub.repos["model", "shell/merged"]
    (pull,) = repo.pulls
    proposed = repo.commits[repo.refs[f"refs/pr/{pull.number}"]]
    assert {"README.md", "featcal_report.json", "featcal.yaml", "drift.png", "model.safetensors"} <= proposed.keys()
    assert not any(name.startswith(".featcal") for name in proposed)
    assert (tmp_path / "drift.html").stat().st_size > 10_000
    summary = (tmp_path / "drift.md").read_text()
    assert summary.startswith("## Feature drift of calibrated") and "| **mean** |" in summary
    code, said = run_script(tmp_path, token, **values)
    assert code == 0, said
    assert len(repo.pulls) == 1


def test_the_script_says_what_it_was_not_told(tmp_path: Path) -> None:
    code, said = run_script(tmp_path, "")
    assert code == 1 and "MERGED is not set" in said


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("github-workflows", [WORKFLOW, CALLER, GITHUB / "workflows" / "ci.yml"]),
        ("github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "idea")]),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_that_the_repositorys_host_reads_are_valid(kind: str, files: list[Path]) -> None:
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", *map(str, files)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_citation_names_the_authors_that_the_readme_names() -> None:
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    named = re.search(r"author {8}= \{(.*?)\}", (ROOT / "README.md").read_text(), re.DOTALL)
    assert named and paper["identifiers"][0]["value"] == "arXiv:2605.13030"
    authors = [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    assert " and ".join(authors) == " ".join(named[1].split())


def test_the_caller_gives_what_the_workflow_asks_for() -> None:
    asked, job = read(WORKFLOW)["on"]["workflow_call"], read(CALLER)["jobs"]["featcal"]
    assert job["uses"] == f"./.github/workflows/{WORKFLOW.name}"
    assert set(job["with"]) <= set(asked["inputs"])
    assert {name for name, about in asked["inputs"].items() if about.get("required")} <= set(job["with"])
    assert set(job["secrets"]) == set(asked["secrets"])
    for line in CALLER.read_text().splitlines():  # keys that are shown as comments
        if found := re.fullmatch(r" +# ([a-z-]+): .+", line):
            assert found[1] in asked["inputs"], line
