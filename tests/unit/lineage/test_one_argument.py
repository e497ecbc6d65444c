"""`featcal calibrate ORG/merged --push-to ORG/out` on a Hub on loopback that holds what mergekit's users leave."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Run, featcal, featcal_inside
from egress import watch_egress
from families import TASKS, VOCABULARY, save_tokenizer
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import ModelCard, constants
from published import Published, change_config, header_bytes, publish, write_card
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from featcal_cli import calibrate as calibrate_here
from featcal_cli.hub.download import download
from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.schema import Draft
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import bare_id
from featcal_cli.workflows.output import write_output
from featcal_cli.workflows.workspace import NOTE

FIRST_BYTES = 100_000
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def log_in(hub: HubServer, monkeypatch: pytest.MonkeyPatch, user: str, role: str = "write") -> str:
    token = hub.add_token(user, role)
    monkeypatch.setenv("HF_TOKEN", token)
    return token


def calibrate(capsys: pytest.CaptureFixture[str], merged: str, **options: object) -> Run:
    """The command in this process; options with _ for -."""
    named = {f"--{name.replace('_', '-')}": "" if value is True else value for name, value in options.items()}
    return run_line(capsys, [merged, "-n", "16", *(str(x) for pair in named.items() for x in pair if x != "")])


def run_line(capsys: pytest.CaptureFixture[str], line: list[str]) -> Run:
    return featcal_inside(capsys, "calibrate", {str(number): part for number, part in enumerate(line)})


def one_line(text: str) -> str:
    """A message as it is where no terminal breaks its lines."""
    return re.sub(r"\s+", " ", text)


def files_of(hub: HubServer, repo_id: str) -> dict[str, bytes]:
    """What main holds."""
    repo = hub.repos["model", repo_id]
    return {path: blob.path.read_bytes() for path, blob in repo.commits[repo.refs["main"]].items()}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_one_argument_is_enough(hub: HubServer, merge: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(hub, merge, "one")
    token = log_in(hub, monkeypatch, "one")
    with watch_egress() as egress:
        run = featcal("calibrate", "one/merged", "-n", "16", "--push-to", "one/out", folder=here, **egress.environment)
    assert run.returncode == 0, run.stderr
    assert egress.hosts == []
    for role, value, source in (
        ("base", "one/base", "mergekit_config.yml of one/merged"),
        *((f"expert {task}", f"one/bert-{task}", "mergekit_config.yml of one/merged") for task in TASKS),
        *((f"data {task}", f"one/{task}-rows", f"the card of one/bert-{task}") for task in TASKS),
    ):
        assert f"{role}: {value} (from {source}" in one_line(run.stderr)

    out = hub.repos["model", "one/out"]
    assert [commit.sha for commit in out.log] == [out.refs["main"]]
    files = {path: blob.path.read_bytes() for path, blob in out.commits[out.refs["main"]].items()}
    written = {path.name: path.read_bytes() for path in (here / "merged-featcal").iterdir()}
    note = written.pop(NOTE)
    assert token.encode() not in note and NOTE not in files
    assert {path: files[path] for path in written} == written
    assert {"README.md", "featcal.yaml", "featcal_report.json", "drift.png", "tokenizer.json"} <= files.keys()
    assert not any(token.encode() in content for content in files.values())
    assert token not in run.stdout + run.stderr

    recipe = yaml.safe_load(files["featcal.yaml"])
    assert recipe["merged"] == f"one/merged@{published.commits['one/merged']}"
    assert recipe["tasks"]["red"]["data"] == {"dataset": "one/red-rows", "revision": published.commits["one/red-rows"]}
    card = ModelCard(files["README.md"].decode())
    card.validate()
    data = card.data.to_dict()  # type: ignore[no-untyped-call]
    assert data["license"] == "mit"
    assert set(data["datasets"]) == {f"one/{task}-rows" for task in TASKS}
    assert data["base_model"][0] == "one/merged"

    loaded = AutoModel.from_pretrained("one/out")
    before = AutoModel.from_pretrained("one/merged")
    changed = [not torch.equal(a, b) for a, b in zip(loaded.parameters(), before.parameters(), strict=True)]
    assert any(changed) and not all(changed)
    assert AutoTokenizer.from_pretrained("one/out")("w3 w4")["input_ids"] == [3, 4]


def test_the_recipe_in_the_output_runs_the_same_job_after_every_repo_has_moved_on(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = publish(hub, merge, "moved")
    assert calibrate(capsys, "moved/merged", output="first").code == 0
    for name in ("base", *TASKS, "merged"):
        folder = published.folder / name
        for file in folder.glob("*.safetensors"):
            file.write_bytes((merge / "base" / file.name).read_bytes())
        change_config(folder, hidden_dropout_prob=0.25)
        hub.add_repo(f"moved/bert-{name}" if name in TASKS else f"moved/{name}", folder)
    for task in TASKS:
        hub.add_repo(f"moved/{task}-rows", merge / "data" / TASKS[0], kind="dataset")
    assert run_line(capsys, ["-r", "first/featcal.yaml", "-o", "second"]).code == 0
    first, second = weights_of(here / "first"), weights_of(here / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (here / "first" / "config.json").read_bytes() == (here / "second" / "config.json").read_bytes()


def test_a_dry_run_reads_headers_and_nothing_else_of_the_weights(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, merge, "dry")
    long = tmp_bert(here.parent / "long", layers=65)  # a header that is longer than what is read at first
    assert header_bytes(long / "model.safetensors") > FIRST_BYTES
    for name in ("merged", "base", *(f"bert-{task}" for task in TASKS)):
        hub.add_repo(f"dry/{name}", long)
    lineage = [f"--expert={task}=dry/bert-{task}" for task in TASKS] + [
        f"--data={task}=dry/{task}-rows" for task in TASKS
    ]
    hub.requests.clear()
    run = run_line(capsys, ["dry/merged", "--base=dry/base", *lineage, "--dry-run"])
    assert run.code == 0, run.stderr
    weights = [blob for repo in hub.repos.values() for files in repo.commits.values() for path, blob in files.items()
               if path.endswith(".safetensors")]  # fmt: skip
    read = sum(request.bytes_sent for request in hub.requests if any(b.sha256 in request.path for b in weights))
    assert 0 < read <= 5 * max(FIRST_BYTES, header_bytes(long / "model.safetensors"))
    assert list(here.iterdir()) == []
    assert "65 blocks" in run.stdout
    for word in ("memory", "disk", "download", "dry/red-rows"):
        assert word in run.stdout


@pytest.mark.usefixtures("here")
def test_a_dry_run_says_the_same_as_json(hub: HubServer, merge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(hub, merge, "json")
    run = calibrate(capsys, "json/merged", dry_run=True, json=True)
    found = json.loads(run.stdout)
    assert found["findings"][1] == {
        "role": "base", "value": "json/base", "source": "mergekit_config.yml of json/merged",
    }  # fmt: skip
    assert (found["blocks"], found["modules"], found["model_class"]) == (2, 16, "BertModel")
    sizes = {"merged": 0, "base": 0, **{f"expert {task}": 0 for task in TASKS}}
    assert found["transfers"].keys() == sizes.keys()
    assert all(transfer["missing"] > 80_000 for transfer in found["transfers"].values())
    assert found["estimate"]["host_bytes"] > 10**8


@pytest.mark.parametrize("part", ["expert", "base"])
def test_a_mismatch_costs_no_download(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    org = f"wide-{part}"
    publish(hub, merge, org)
    wide = tmp_bert(here.parent / "wide", layers=2, width=384)
    write_card(wide, base_model=f"{org}/base", datasets=[f"{org}/green-rows"])
    name = "bert-green" if part == "expert" else "base"
    hub.add_repo(f"{org}/{name}", wide)
    hub.requests.clear()
    run = calibrate(capsys, f"{org}/merged")
    assert run.code == 2
    for word in (f"{org}/{name}", "shape", "384"):
        assert word in run.stderr
    size = (wide / "model.safetensors").stat().st_size
    assert size > 10 * FIRST_BYTES
    assert hub.file_bytes() < size / 2
    assert list(here.iterdir()) == []


def tmp_bert(folder: Path, *, layers: int, width: int = 8) -> Path:
    """A BERT of another size."""
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_attention_heads=2,
                        num_hidden_layers=layers, max_position_embeddings=64)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


# Repos that the token cannot read, or that are not there


@pytest.mark.usefixtures("here")
def test_private_and_gated_parts_need_a_token_that_may_read_them(
    hub: HubServer, merge: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "own", private=True)
    run = calibrate(capsys, "own/merged", dry_run=True)
    assert run.code == 2 and "private" in run.stderr and "HF_TOKEN" in run.stderr
    log_in(hub, monkeypatch, "own")
    hub.repos["model", "own/bert-blue"].gated = True
    hub.repos["model", "own/bert-blue"].readers.clear()
    hub.repos["model", "own/bert-blue"].private = False
    run = calibrate(capsys, "own/merged", dry_run=True)
    assert run.code == 2 and "own/bert-blue is gated" in run.stderr and "ask for access" in run.stderr
    hub.repos["model", "own/bert-blue"].gated = False
    assert calibrate(capsys, "own/merged", dry_run=True).code == 0


def test_an_expert_that_disappears_midway_is_said_and_nothing_is_left(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = publish(hub, merge, "midway")
    weights = merge / "green" / "model.safetensors"
    place = hub.repos["model", "midway/bert-green"].commits[published.commits["midway/bert-green"]]["model.safetensors"]
    assert place.size == weights.stat().st_size
    hub.fail("file", Fault(action=lambda: hub.delete_repo("midway/bert-green")), path="bert-green/.*model.safetensors")
    run = calibrate(capsys, "midway/merged")
    assert run.code == 2
    assert "midway/bert-green" in run.stderr and "Traceback" not in run.stderr
    assert list(here.iterdir()) == []
    hub.add_repo("midway/bert-green", published.folder / "green")
    assert calibrate(capsys, "midway/merged").code == 0


def test_a_token_is_checked_before_the_work(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "tokens")
    hub.requests.clear()
    run = calibrate(capsys, "tokens/merged", push_to="tokens/out")
    assert run.code == 2 and "token" in run.stderr and "hf auth login" in run.stderr
    monkeypatch.setenv("HF_TOKEN", wrong := "hf_" + "x" * 34)
    run = calibrate(capsys, "tokens/merged", push_to="tokens/out")
    assert run.code == 2 and "does not accept the token" in run.stderr and wrong not in run.stderr
    log_in(hub, monkeypatch, "tokens", role="read")
    run = calibrate(capsys, "tokens/merged", push_to="tokens/out")
    assert run.code == 2 and "read" in run.stderr and "writ" in run.stderr
    log_in(hub, monkeypatch, "tokens")
    run = calibrate(capsys, "tokens/merged", push_to="somebody/out")
    assert run.code == 2 and "somebody" in run.stderr
    run = calibrate(capsys, "tokens/merged", push_to="tokens/merged")
    assert run.code == 2 and "--create-pr" in run.stderr and "--overwrite-repo" in run.stderr
    assert hub.file_bytes() == 0
    assert list(here.iterdir()) == []


# Pushes


@pytest.mark.usefixtures("here")
def test_a_pull_request_to_the_merged_repo_itself(
    hub: HubServer, merge: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(hub, merge, "pull")
    log_in(hub, monkeypatch, "pull")
    run = calibrate(capsys, "pull/merged", push_to="pull/merged", create_pr=True, commit_message="Mended")
    assert run.code == 0, run.stderr
    repo = hub.repos["model", "pull/merged"]
    assert repo.refs["main"] == published.commits["pull/merged"]
    assert [pull.title for pull in repo.pulls] == ["Mended"]
    assert "discussions/1" in run.stdout


def test_a_push_that_failed_is_done_by_the_same_command_without_computing_again(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "again")
    log_in(hub, monkeypatch, "again")
    monkeypatch.setattr("featcal_cli.hub.client.PAUSE", 0.01)
    hub.fail("commit", "500", times=None)
    run = calibrate(capsys, "again/merged", push_to="again/out")
    assert run.code == 2
    assert "the same command again pushes it" in one_line(run.stderr)
    hub.faults.clear()
    # a note of the push that was cut short is none
    note = here / "merged-featcal" / NOTE
    whole = note.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        note.write_bytes(whole[:length])
        run = calibrate(capsys, "again/merged", push_to="again/out")
        assert run.code == 2 and "exists" in run.stderr and "Traceback" not in run.stderr
    note.write_bytes(whole)
    written = {path.name: path.stat().st_mtime_ns for path in (here / "merged-featcal").iterdir()}
    hub.requests.clear()
    run = calibrate(capsys, "again/merged", push_to="again/out")
    assert run.code == 0, run.stderr
    assert "nothing is computed again" in one_line(run.stderr)
    assert hub.file_bytes() == 0
    now = {path.name: path.stat().st_mtime_ns for path in (here / "merged-featcal").iterdir()}
    assert now.pop(NOTE) > written.pop(NOTE) and now == written
    assert sorted(path.name for path in here.iterdir()) == ["merged-featcal"]
    run = calibrate(capsys, "again/merged", push_to="again/out")
    assert run.code == 0, run.stderr
    assert len(hub.repos["model", "again/out"].log) == 1
    assert NOTE not in files_of(hub, "again/out")
    run = calibrate(capsys, "again/merged")
    assert run.code == 2 and "exists" in run.stderr


@pytest.mark.survive
def test_a_run_that_does_not_push_leaves_the_push_to_a_later_one(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "later")
    log_in(hub, monkeypatch, "later")
    monkeypatch.setattr("featcal_cli.hub.client.PAUSE", 0.01)
    hub.fail("create", "500", times=None)
    assert calibrate(capsys, "later/merged", push_to="later/out").code == 2
    hub.faults.clear()
    work = here / ".merged-featcal.featcal"
    (work / "journal").mkdir(parents=True)
    (work / "journal" / "block-0000.safetensors").touch()
    run = calibrate(capsys, "later/merged")
    assert run.code == 0 and "nothing is computed again" in one_line(run.stderr)
    assert not work.exists()
    run = calibrate(capsys, "later/merged", push_to="later/out")
    assert run.code == 0 and "nothing is computed again" in one_line(run.stderr)
    assert len(hub.repos["model", "later/out"].log) == 1
    assert sorted(path.name for path in here.iterdir()) == ["merged-featcal"]


def test_an_output_that_is_good_enough_is_pushed_later_unless_the_merged_repo_has_moved_on(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pipeline does it: calibrate, look, and give the same command with --push-to."""
    published = publish(hub, merge, "gate")
    log_in(hub, monkeypatch, "gate")
    assert calibrate(capsys, "gate/merged").code == 0
    assert sorted(path.name for path in here.iterdir()) == ["merged-featcal"]
    assert calibrate(capsys, "gate/merged", ridge=0.3, push_to="gate/out").code == 2  # another job
    hub.requests.clear()
    run = calibrate(capsys, "gate/merged", push_to="gate/out")
    assert run.code == 0 and "nothing is computed again" in one_line(run.stderr), run.stderr
    assert hub.file_bytes() == 0
    card = (here / "merged-featcal" / "README.md").read_text()
    assert "gate/out" in card
    assert files_of(hub, "gate/out")["README.md"] == card.encode()
    (published.folder / "merged" / "notes.txt").write_text("a new version")
    hub.add_repo("gate/merged", published.folder / "merged")
    run = calibrate(capsys, "gate/merged", push_to="gate/later")
    assert run.code == 2 and "which is at" in run.stderr and "--overwrite" in run.stderr
    assert ("model", "gate/later") not in hub.repos
    assert (here / "merged-featcal" / "model.safetensors").is_file()


@pytest.mark.survive
def test_an_output_is_not_pushed_when_a_local_model_has_changed(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "local")
    log_in(hub, monkeypatch, "local")
    shutil.copytree(merge / "local" / "merged", here / "mine")
    assert calibrate(capsys, "mine").code == 0
    os.utime(here / "mine" / "model.safetensors")
    run = calibrate(capsys, "mine", push_to="local/out")
    assert run.code == 2 and "exists" in run.stderr


@pytest.mark.survive
def test_a_run_that_is_killed_once_its_output_stands_is_pushed_by_the_next(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "killed")
    log_in(hub, monkeypatch, "killed")

    def write_and_die(*args: Any) -> None:
        write_output(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("featcal_cli.workflows.calibrate.write_output", write_and_die)
        assert calibrate(capsys, "killed/merged", push_to="killed/out").code == 130
    run = calibrate(capsys, "killed/merged", push_to="killed/out")
    assert run.code == 0 and "nothing is computed again" in one_line(run.stderr)
    assert len(hub.repos["model", "killed/out"].log) == 1
    assert sorted(path.name for path in here.iterdir()) == ["merged-featcal"]


@pytest.mark.survive
@pytest.mark.usefixtures("here")
def test_an_older_output_is_not_pushed_for_one_that_was_never_written(
    hub: HubServer, merge: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "older")
    log_in(hub, monkeypatch, "older")
    assert calibrate(capsys, "older/merged", ridge=0.5).code == 0

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("featcal_cli.workflows.calibrate.write_output", die)
        assert calibrate(capsys, "older/merged", push_to="older/out", overwrite=True).code == 130
    run = calibrate(capsys, "older/merged", push_to="older/out")
    assert run.code == 2 and "exists" in run.stderr and "--overwrite" in run.stderr
    run = calibrate(capsys, "older/merged", push_to="older/out", overwrite=True)
    assert run.code == 0 and "2 of 2 blocks were taken over" in one_line(run.stderr)


@pytest.mark.parametrize("place", ["where it was to go", pytest.param("somewhere else", marks=pytest.mark.survive)])
def test_a_push_that_was_not_read_back_is_finished_by_the_next_command(
    hub: HubServer,
    merge: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    org = "unread" if place == "where it was to go" else "elsewhere"
    publish(hub, merge, org)
    log_in(hub, monkeypatch, org)
    monkeypatch.setattr("featcal_cli.hub.client.PAUSE", 0.01)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    mute = Fault(status=503, carried_out=False)
    hub.fail("commit", Fault(action=lambda: hub.fail("GET", mute, path=f"^/api/models/{org}/out", times=None)))
    assert calibrate(capsys, f"{org}/merged", push_to=f"{org}/out").code == 2
    out = hub.repos["model", f"{org}/out"]
    assert len(out.log) == 1
    hub.faults.clear()
    target = f"{org}/out" if place == "where it was to go" else f"{org}/other"
    run = calibrate(capsys, f"{org}/merged", push_to=target)
    assert run.code == 0, run.stderr
    assert "nothing is computed again" in one_line(run.stderr)
    assert len(out.log) == 1
    final = hub.repos["model", target]
    card = final.commits[final.refs["main"]]["README.md"].path.read_text()
    assert f'from_pretrained("{target}"' in card
    assert sorted(path.name for path in here.iterdir()) == ["merged-featcal"]


def test_the_address_of_a_page_is_as_good_as_an_id(hub: HubServer, merge: Path) -> None:
    published = publish(hub, merge, "pasted")
    commit = published.commits["pasted/merged"]
    for text in ("https://huggingface.co/pasted/merged", "pasted/merged/", "https://hf.co/pasted/merged/tree/main"):
        repo = open_repo(text)
        assert (repo.name, repo.commit) == ("pasted/merged", commit)
    assert open_repo("datasets/pasted/red-rows", "dataset").name == "pasted/red-rows"


PAGES = {
    "https://huggingface.co/a/b": "a/b",
    "HTTPS://huggingface.co/a/b/": "a/b",
    "huggingface.co/a/b": "a/b",
    "https://hf.co/gpt2/tree/main": "gpt2@main",
    "hf://a/b@v1": "a/b@v1",
    "hf://a/b@refs/pr/3": "a/b@refs/pr/3",
    "https://huggingface.co/a/b/tree/refs%2Fpr%2F3": "a/b@refs/pr/3",
    "https://huggingface.co/a/b/blob/v2/config.json": "a/b@v2",
    "https://huggingface.co/a/b/resolve/main/model.safetensors?download=true": "a/b@main",
    "https://huggingface.co/a/b/discussions/3#top": "a/b",
    "https://user:secret@huggingface.co/a/b": "a/b",  # pragma: allowlist secret
    "a/b/tree/v1": "a/b@v1",
}
SOURCES = {
    "https://huggingface.co/datasets/a/b": "a/b",
    "https://huggingface.co/datasets/a/b/": "a/b",
    "hf://datasets/a/b@v1/data/x.parquet": "a/b@v1",
    "huggingface.co/datasets/squad": "squad",
    "https://huggingface.co/datasets/a/b/tree/v1/data": "a/b@v1",
    "https://huggingface.co/datasets/a/b/viewer/easy/train?p=2": "a/b:easy:train",
    "https://huggingface.co/datasets/a/b:easy:train": "a/b:easy:train",
    "datasets/a/b::train": "a/b::train",
}


def test_addresses_of_pages_are_ids_of_models_and_datasets(hub: HubServer) -> None:
    for address, reference in PAGES.items():
        assert Draft(merged=address, base=address).base == reference, address
        assert Draft(merged=f"{address}+{address}").merged == f"{reference}+{reference}", address
    for address, source in SOURCES.items():
        draft = Draft.model_validate({"merged": "a/m", "tasks": {"t": {"data": address}}})
        assert str(draft.tasks["t"].data) == source, address
    for address in (f"{hub.url}/a/b", f"127.0.0.1:{hub.port}/a/b/tree/main"):
        assert bare_id(address).startswith("a/b")
    assert Draft(merged="https://huggingface.co/a/b/tree/v1").name == "a/b"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://github.com/a/b", "is not on the Hub"),
        ("https://user:secret@modelscope.cn/models/a/b?token=secret", "is not on the Hub"),  # pragma: allowlist secret
        ("s3://bucket/model", "is not on the Hub"),
        ("https://huggingface.co/spaces/a/b", "no model and no dataset"),
        ("https://huggingface.co/", "no model and no dataset"),
        ("https://huggingface.co/datasets/a/b", "is a dataset, not a model"),
    ],
)
def test_other_addresses_are_refused_with_what_would_work(
    capsys: pytest.CaptureFixture[str], address: str, words: str
) -> None:
    run = run_line(capsys, [address])
    assert run.code == 2 and words in run.stderr and "fix:" in run.stderr
    assert "secret" not in run.stderr


def test_all_experts_that_are_gone_are_named_and_the_run_goes_on_without_them(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "less")
    hub.delete_repo("less/bert-green")
    hub.repos["model", "less/bert-blue"].gated = True
    hub.repos["model", "less/bert-blue"].readers.clear()
    run = calibrate(capsys, "less/merged", output="out put")
    assert run.code == 2 and list(here.iterdir()) == []
    for words in ("there is no model less/bert-green", "less/bert-blue is gated", "ask for access"):
        assert words in run.stderr
    command = run.stderr.rstrip().rpartition("type: ")[2]
    assert command.startswith("featcal calibrate less/merged -n 16 --output 'out put'")
    assert "--skip-expert green" in command and "--skip-expert blue" in command
    monkeypatch.chdir(here)
    run = run_line(capsys, shlex.split(command)[2:])
    assert run.code == 0, run.stderr
    card = (here / "out put" / "README.md").read_text()
    report = json.loads((here / "out put" / "featcal_report.json").read_text())
    for task in ("green", "blue"):
        assert f"less/bert-{task}) is left out" in card.replace("\\", "")
        assert any(f"less/bert-{task}) is left out" in note for note in report["notes"])
    assert set(report["recipe"]["tasks"]) == set(TASKS) - {"green", "blue"}
    # and what is said of every model is looked at before anything else
    experts = [word for task in TASKS for word in ("--expert", f"{task}=less/bert-{task}")]
    said = [*experts, *(f"--data={task}=less/{task}-rows" for task in TASKS)]
    run = run_line(capsys, ["less/merged", "--base=less/base", *said])
    assert run.code == 2 and "go on without green and blue" in run.stderr
    # typed like this, the experts are all there are: those that are gone need only be typed no more
    command = run.stderr.rstrip().rpartition("type: ")[2]
    assert "green" not in command and "blue" not in command and "--expert red=less/bert-red" in command
    run = run_line(capsys, [*shlex.split(command)[2:], "--overwrite", "--output=out put"])
    assert run.code == 0, run.stderr
    assert set(json.loads((here / "out put" / "featcal_report.json").read_text())["recipe"]["tasks"]) == {"red"}


def test_an_expert_that_is_not_there_cannot_be_left_out(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, merge, "unknown")
    run = calibrate(capsys, "unknown/merged", skip_expert="grene")
    assert run.code == 2 and "there is no expert grene" in run.stderr and "green" in run.stderr
    assert list(here.iterdir()) == []


@pytest.mark.survive
def test_candidates_are_offered_by_number_on_a_terminal_and_nowhere_else(
    hub: HubServer, merge: Path, here: Path
) -> None:
    publish(hub, merge, "choice")
    for task, base in zip(TASKS, ("base", "other", "base"), strict=False):
        (merge / "card").mkdir(exist_ok=True)
        write_card(merge / "card", base_model=f"choice/{base}", datasets=[f"choice/{task}-rows"])
        hub.add_repo(f"choice/bert-{task}", merge / "card")
    (merge / "config").mkdir(exist_ok=True)
    (merge / "config" / "mergekit_config.yml").write_text(
        yaml.safe_dump({"merge_method": "linear", "models": [{"model": f"choice/bert-{task}"} for task in TASKS]})
    )
    hub.add_repo("choice/merged", merge / "config")
    line = [sys.executable, "-m", "featcal_cli", "calibrate", "choice/merged", "--dry-run"]
    shown = at_a_terminal(line, b"9\n2\n", here)
    assert "1) choice/base" in shown and "2) choice/other" in shown
    assert "featcal calibrate choice/merged --dry-run --base choice/other" in shown
    unanswered = at_a_terminal(line, b"\n", here).replace("\r", "")
    assert "which one" in unanswered
    command = unanswered.rpartition("and type:\n")[2].replace("\\\n", " ")
    assert shlex.split(command)[:6] == ["featcal", "calibrate", "choice/merged", "--dry-run", "--base", "REPO"]
    assert max(map(len, unanswered.partition("and type:")[2].splitlines())) <= 80
    for extra, environment in (["--json"], {}), (["-q"], {}), ([], {"CI": "true"}):
        assert "which one" not in at_a_terminal([*line, *extra], b"", here, **environment)
    assert "which one" not in featcal("calibrate", "choice/merged", "--dry-run", folder=here).stderr


def at_a_terminal(line: list[str], typed: bytes, folder: Path, **environment: str) -> str:
    """What a terminal of 80 columns shows of a command, with what is typed."""
    lead, follow = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name != "CI"}
    process = subprocess.Popen(
        line, cwd=folder, env={**plain, "COLUMNS": "80", **environment}, stdin=follow, stdout=follow, stderr=follow
    )
    os.close(follow)
    os.write(lead, typed)
    shown = b""
    with suppress(OSError):  # the terminal is gone with the last process
        while part := os.read(lead, 65536):
            shown += part
    process.wait(60)
    os.close(lead)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))


# Faults


def use_empty_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine that has downloaded nothing yet."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("FEATCAL_CACHE", str(folder / "featcal"))


def assert_sound(cache: Path) -> None:
    """Every finished file in a Hub cache has the name of its content."""
    for blob in cache.rglob("blobs/*"):
        if blob.suffix != ".incomplete" and len(blob.name) == 64:
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name, blob


@pytest.fixture(scope="session")
def expected(
    merge: Path, hub_on_loopback: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights that a run comes to in which nothing fails."""
    publish(hub_on_loopback, merge, "faulty")
    output = tmp_path_factory.mktemp("expected") / "out"
    calibrate_here({"merged": "faulty/merged", "calibration": {"examples": 16}}, output=output)
    return weights_of(output)


CASES = [
    ("model info", "429"),
    ("file", "reset"),
    ("large file", "truncated"),
    pytest.param("discussions", "500", marks=pytest.mark.survive),
]
"""Some of many: tests/survive/test_survive_network.py has the others."""


def leave_safetensors_to_pull_requests(hub: HubServer, published: Published, *names: str) -> None:
    """Let these repos have pickled weights on main, and safetensors in an open pull request only."""
    for name in names:
        folder, repo = published.folder / name, f"{published.org}/{name if name == 'base' else f'bert-{name}'}"
        weights = (folder / "model.safetensors").rename(published.folder / "model.safetensors")
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        hub.add_repo(repo, folder)
        (folder / "pytorch_model.bin").unlink()
        weights.rename(folder / "model.safetensors")
        hub.add_pull_request(repo, folder)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_whatever_fails_while_reading_the_run_finishes_or_goes_on_when_run_again(
    expected: dict[str, torch.Tensor],
    hub: HubServer,
    merge: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fault: str,
) -> None:
    published = publish(hub, merge, "faulty")
    if kind == "discussions":
        leave_safetensors_to_pull_requests(hub, published, "base", "red")
    use_empty_cache(monkeypatch, here.parent / "cache")
    # at first for good: from the second request of its kind on, so that some repos are read and some are not
    hub.fail(kind, fault, times=None, after=1)
    run = calibrate(capsys, "faulty/merged", output="out")
    assert hub.faults.hits > 0
    assert run.code in (0, 2) and "Traceback" not in run.stderr, run.stderr
    assert (here / "out").exists() == (run.code == 0)
    assert_sound(here.parent)
    # then, for a machine that goes on from there, once
    hub.faults.clear()
    hub.fail(kind, fault)
    again = calibrate(capsys, "faulty/merged", output="out", overwrite=True)
    assert again.code == 0, again.stderr
    assert_sound(here.parent)
    found = weights_of(here / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.survive
@pytest.mark.usefixtures("hurried", "here")
@pytest.mark.parametrize("kind", ["model tree", "large file"])
def test_a_hub_that_never_answers_is_not_waited_for(
    hub: HubServer, merge: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    org = f"mute-{kind.replace(' ', '-')}"
    publish(hub, merge, org)
    monkeypatch.setattr("featcal_cli.hub.client.TIMEOUT", 0.1)
    monkeypatch.setattr("featcal_cli.hub.client.TRIES", 2)
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT", "DEFAULT_ETAG_TIMEOUT", "DEFAULT_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, 0.1)
    hub.fail(kind, Fault(seconds=0.5), times=None)
    started = time.monotonic()
    run = calibrate(capsys, f"{org}/merged")
    assert run.code == 2 and "stopped answering" in run.stderr, run.stderr
    assert time.monotonic() - started < 30


def test_a_file_that_arrives_damaged_is_fetched_again(
    hub: HubServer, merge: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(hub, merge, "damaged")
    use_empty_cache(monkeypatch, here.parent / "cache")
    blob = hub.repos["model", "damaged/base"].commits[published.commits["damaged/base"]]["model.safetensors"]
    whole = blob.path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[-5] ^= 1
    blob.path.write_bytes(spoilt)
    hub.fail("large file", Fault(action=lambda: blob.path.write_bytes(whole)), after=1)
    repo = open_repo("damaged/base")
    assert (download(repo) / "model.safetensors").read_bytes() == whole
    blob.path.write_bytes(spoilt)
    use_empty_cache(monkeypatch, here.parent / "another")
    with pytest.raises(HubError, match=r"arrived damaged twice"):
        download(open_repo("damaged/base"))
    assert_sound(here.parent / "another")
    blob.path.write_bytes(whole)


def test_a_download_that_was_broken_off_before_its_check_is_checked_by_the_next_run(
    hub: HubServer, merge: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, merge, "broken")
    use_empty_cache(monkeypatch, here.parent / "cache")
    repo = open_repo("broken/base")

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("featcal_cli.hub.download._is_sound", die)
        download(repo)
    arrived = next((here.parent / "cache").rglob("model.safetensors"))
    content = arrived.read_bytes()
    arrived.resolve().write_bytes(content[:-1] + b"?")
    assert (download(repo) / "model.safetensors").read_bytes() == content
    hub.requests.clear()
    download(repo)
    assert hub.file_bytes() == 0


# Code in repos


def test_code_from_a_repo_runs_only_when_it_is_trusted(
    hub: HubServer, merge: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = publish(hub, merge, "coded")
    ran = here.parent / "ran"
    code = f"from pathlib import Path\nfrom transformers import BertModel\nPath({str(ran)!r}).touch()\n"
    for name in ("merged", "base", *TASKS):
        folder = published.folder / name
        (folder / "modeling_own.py").write_text(f"{code}\n\nclass OwnBert(BertModel):\n    pass\n")
        change_config(folder, architectures=["OwnBert"], auto_map={"AutoModel": "modeling_own.OwnBert"})
        hub.add_repo(f"coded/bert-{name}" if name in TASKS else f"coded/{name}", folder)
    run = calibrate(capsys, "coded/merged")
    assert run.code == 2 and "--trust-remote-code" in run.stderr
    assert not ran.exists()
    assert calibrate(capsys, "coded/merged", trust_remote_code=True).code == 0
    assert ran.exists()
