"""Models are pushed to a Hub on loopback by the real huggingface_hub: in one commit, once, and whole."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_faults import FAULTS, WRITES, Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import refusal_of
from published import resolve
from safetensors.torch import save_file

from featcal_cli.hub.push import Pushed, Target, check_target, describe_account, push
from featcal_cli.runtime.errors import HubError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CARD = "---\nlicense: mit\nbase_model: [user/base]\ntags: [merge]\n---\n# A model\n"
SLOW = 1.2
"""Seconds that a slow answer takes; less than half of it is waited for."""
Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("hurried", "alice")


@pytest.fixture
def alice(hub: HubServer, monkeypatch: Patch) -> str:
    """The token in use, which may write to what is alice's."""
    token = hub.add_token("alice")
    monkeypatch.setenv("HF_TOKEN", token)
    return token


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished model in two shards, and things beside it that are nobody's business."""
    made = tmp_path / "finished"
    (made / "extra").mkdir(parents=True)
    (made / ".cache").mkdir()
    for number, shard in enumerate(SHARDS):
        save_file({f"w{number}": torch.full((100 + number, 100), float(number))}, made / shard)
    places = {f"w{number}": shard for number, shard in enumerate(SHARDS)}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (made / "config.json").write_text('{"model_type": "bert"}')
    (made / "README.md").write_text(CARD)
    (made / "drift.png").write_bytes(b"\x89PNG picture")
    (made / "extra" / "notes.txt").write_text("notes")
    (made / ".env").write_text("HF_TOKEN=secret")
    (made / ".cache" / "trace.json").write_text("{}")
    return made


def aim(repo_id: str, **options: Any) -> Target:
    return check_target(repo_id, **{"private": False, "create_pr": False, "overwrite_repo": False, **options})


def send(folder: Path, repo_id: str, **options: Any) -> Pushed:
    return push(folder, aim(repo_id, **options), message="m")


def refusal(act: Callable[[], object]) -> str:
    """The message of the HubError that `act` ends in; it holds no token."""
    message = refusal_of(act)
    assert os.environ.get("HF_TOKEN", "hf_") not in message
    return message


def visible(folder: Path) -> dict[str, bytes]:
    """Path and content of every file that is not hidden."""
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    shown = {name: path for name, path in paths.items() if not any(part.startswith(".") for part in name.parts)}
    return {name.as_posix(): path.read_bytes() for name, path in shown.items()}


def stored(hub: HubServer, repo_id: str, revision: str = "main") -> dict[str, bytes]:
    """Path and content of every file of a repo, without what the Hub itself put there."""
    repo = hub.repos["model", repo_id]
    files = repo.commits[repo.refs[revision]]
    return {path: blob.path.read_bytes() for path, blob in files.items() if path != ".gitattributes"}


def model(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "old", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# What a push does


def test_one_commit_holds_everything_that_is_not_hidden(hub: HubServer, folder: Path) -> None:
    target = aim("alice/out")
    assert all(request.method == "GET" for request in hub.requests)
    assert not hub.repos
    pushed = push(folder, target, message="Calibrate it")
    assert pushed == Pushed(f"{hub.url}/alice/out", hub.repos["model", "alice/out"].refs["main"], None)
    assert [commit.title for commit in hub.repos["model", "alice/out"].log] == ["Calibrate it"]
    assert stored(hub, "alice/out") == visible(folder)
    assert resolve(f"alice/out@{pushed.commit}").commit == pushed.commit


def test_a_private_repo_is_its_owners(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    pushed = send(folder, "alice/hidden", private=True)
    assert resolve("alice/hidden").commit == pushed.commit
    hub.add_repo("alice/public", model(tmp_path / "old"))
    for options in ({"create_pr": True}, {"overwrite_repo": True}):
        assert "is public" in refusal(lambda options=options: aim("alice/public", private=True, **options))  # type: ignore[misc]
    send(folder, "alice/seen")
    assert "is public" in refusal(lambda: aim("alice/seen", private=True, overwrite_repo=True, finished=folder))
    target = aim("alice/later", private=True)
    hub.add_repo("alice/later", tmp_path)
    assert "is public" in refusal(lambda: push(folder, target, message="m"))
    monkeypatch.setenv("HF_TOKEN", hub.add_token("bob"))
    assert "or it is private" in refusal(lambda: resolve("alice/hidden"))


def test_a_repo_with_a_model_is_committed_to_on_request_only(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add_repo("alice/taken", model(tmp_path / "old"))
    refusal(lambda: aim("alice/taken"))
    hub.add_repo("alice/text", folder / "extra")
    send(folder, "alice/text")
    assert stored(hub, "alice/text") == visible(folder) | {"notes.txt": b"notes"}
    # somebody was faster
    target = aim("alice/raced")
    hub.add_repo("alice/raced", tmp_path / "old")
    assert "already holds a model" in refusal(lambda: push(folder, target, message="m"))


@pytest.mark.parametrize("owner", ["alice", "bob"])
def test_a_pull_request_leaves_main_alone(hub: HubServer, folder: Path, tmp_path: Path, owner: str) -> None:
    head = hub.add_repo(f"{owner}/model", model(tmp_path / "old", **{"mine.txt": "kept"}))
    pushed = push(folder, aim(f"{owner}/model", create_pr=True), message="Better")
    repo = hub.repos["model", f"{owner}/model"]
    assert (pushed.url, pushed.pull_request) == (f"{hub.url}/{owner}/model/discussions/1", 1)
    assert repo.refs == {"main": head, "refs/pr/1": pushed.commit}
    assert stored(hub, f"{owner}/model", "refs/pr/1") == visible(folder) | {"mine.txt": b"kept"}


def test_overwriting_deletes_stale_weights_and_nothing_else(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    stale = ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "model-00003-of-00003.safetensors")
    kept = ("mine.txt", "extra/notes.md", "vocab.json", ".gitignore")
    hub.add_repo("alice/mix", model(tmp_path / "old", **dict.fromkeys((*stale, *kept), "*.png")))
    send(folder, "alice/mix", overwrite_repo=True)
    assert stored(hub, "alice/mix") == visible(folder) | dict.fromkeys(kept, b"*.png")
    assert len(hub.repos["model", "alice/mix"].log) == 1
    shutil.copytree(folder, tmp_path / "same")  # everything else is there already
    (tmp_path / "same" / "model.safetensors").write_text("old")
    hub.add_repo("alice/same", tmp_path / "same")
    send(folder, "alice/same", overwrite_repo=True)
    assert "model.safetensors" not in stored(hub, "alice/same")
    assert stored(hub, "alice/same").items() >= visible(folder).items()


def test_a_hub_that_stores_something_else_is_found_out(hub: HubServer, folder: Path) -> None:
    hub.uploads.spoil = lambda path, content: content + b" " if path == "config.json" else content
    message = refusal(lambda: send(folder, "alice/spoilt"))
    assert "holds something else than what was pushed: config.json" in message
    assert str(folder) in message


def test_links_that_lead_out_are_not_followed(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    for target in ("secret.txt", "elsewhere", "absent"):
        (folder / "link").symlink_to(tmp_path / target)
        message = refusal(lambda: send(folder, "alice/links"))
        assert "link is a link" in message and f"the finished model is in {folder}" in message
        (folder / "link").unlink()
    assert not hub.repos
    (folder / "same.json").symlink_to("config.json")
    send(folder, "alice/links")
    assert stored(hub, "alice/links")["same.json"] == (folder / "config.json").read_bytes()
    assert "nothing to push" in refusal(lambda: send(tmp_path / "elsewhere", "alice/none"))


def test_metadata_that_the_hub_refuses_is_named(hub: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [nonsense\n---\n")
    assert "metadata of README.md" in refusal(lambda: send(folder, "alice/card"))
    assert not hub.repos["model", "alice/card"].log


# Who may push where


def test_a_token_that_only_reads_or_is_revoked_writes_nothing(hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
    """Missing and unknown ones: tests/unit/lineage/test_one_argument.py."""
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice", role="read"))
    assert "may only read" in refusal(lambda: aim("alice/out", create_pr=True))
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice", role="fineGrained"))
    send(folder, "alice/fine")
    target = aim("alice/revoked")
    hub.tokens.clear()
    assert "does not accept the token" in refusal(lambda: push(folder, target, message="m"))


def test_namespaces_are_the_users_and_their_organisations(hub: HubServer, folder: Path) -> None:
    hub.add_org("team", "alice")
    send(folder, "team/out")
    assert stored(hub, "team/out") == visible(folder)
    assert "write USER/out" in refusal(lambda: aim("out"))
    for name in ("alice/out/more", "alice/a--b", "alice/ü", "alice/"):
        assert "USER/NAME" in refusal(lambda name=name: aim(name))  # type: ignore[misc]
    assert "leave out --create-pr" in refusal(lambda: aim("alice/absent", create_pr=True))


def test_a_token_for_an_organisation_in_which_its_user_may_only_read_does_not_write_there() -> None:
    scopes = [{"entity": {"type": "org", "name": org}, "permissions": ["repo.write"]} for org in ("Team", "Readers")]
    token = {"role": "fineGrained", "fineGrained": {"scoped": scopes}}
    orgs = [{"name": "Team", "roleInOrg": "write"}, {"name": "Readers", "roleInOrg": "read"}]
    account = describe_account({"name": "Alice", "orgs": orgs, "auth": {"accessToken": token}})
    assert account.namespaces == {"alice", "team"}


# What goes wrong on the way


@pytest.mark.parametrize("place", ["new", "old", "pull request"])
def test_a_commit_that_may_have_arrived_is_found_by_the_next_push(hub: HubServer, folder: Path, place: str) -> None:
    name = f"alice/lost-{place.replace(' ', '-')}"
    if place != "new":
        hub.add_repo(name, folder / "extra")

    def break_down() -> None:
        hub.fail("GET", "500", times=None)
        hub.fail("POST", "500", times=None)

    hub.fail("commit", Fault(share=0.0, reset=True, action=break_down))
    message = refusal(lambda: send(folder, name, create_pr=place == "pull request"))
    assert "the same command again pushes it, or finds it where it has arrived all the same" in message
    assert str(folder) in message
    hub.faults.clear()
    pushed = send(folder, name, create_pr=place == "pull request", finished=folder)
    assert [commit.sha for commit in hub.repos["model", name].log] == [pushed.commit]


@pytest.mark.parametrize("status", [401, 403])
def test_an_upload_that_is_too_late_gets_another_address(hub: HubServer, folder: Path, status: int) -> None:
    hub.fail("upload", Fault(status=status, carried_out=False))
    send(folder, f"alice/late-{status}")
    assert stored(hub, f"alice/late-{status}") == visible(folder)
    hub.fail("upload", Fault(status=status, carried_out=False), times=None)
    message = refusal(lambda: send(folder, f"alice/never-{status}"))
    assert re.search(rf"localhost:\d+ does not take alice/never-{status} .HTTP status {status}.", message)
    assert "token" not in message


SAID: dict[str, tuple[str, int, str, str, str]] = {
    "storage": ("create", 403, "You reached your private storage limit.", "private storage limit", "free some storage"),
    "law": ("commit", 451, "Not here", "does not take alice/law .HTTP status 451.: Not here", "limits on size"),
    "room": ("upload", 507, "", "localhost:.* does not take alice/room .HTTP status 507.", "limits on size"),
    "rights": (
        "create", 403, "You may not \x1b[31mdo \u202e this", "let this token write .*may not .*do", "write access",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_the_hub_says_of_a_refusal_is_passed_on(hub: HubServer, folder: Path, case: str) -> None:
    kind, status, said, told, fix = SAID[case]
    header = said.encode().decode("latin-1")
    hub.fail(kind, Fault(status=status, message=header, carried_out=False), times=None)
    message = refusal(lambda: send(folder, f"alice/{case}"))
    assert re.search(told.format(case), message) and fix in message, message
    assert "\x1b" not in message and "\u202e" not in message


def test_a_repo_that_somebody_else_is_creating_is_not_waited_for_without_end(hub: HubServer, folder: Path) -> None:
    busy = Fault(status=409, body=b'{"error": "Another conflicting operation is in progress"}', carried_out=False)
    hub.fail("create", busy, times=2)
    send(folder, "alice/busy")
    assert stored(hub, "alice/busy") == visible(folder)
    hub.fail("create", busy, times=None)
    assert "was changed by somebody else" in refusal(lambda: send(folder, "alice/always-busy"))


@pytest.mark.usefixtures("hub")
def test_bytes_that_are_sent_are_told(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    push(folder, aim("alice/told"), message="m", watch=lambda *what: told.append(what))
    total = sum(map(len, visible(folder).values()))
    assert len(told) == len(visible(folder)) and told[-1] == ("alice/told", total, total)


@pytest.mark.usefixtures("hub")
def test_a_hub_that_takes_nothing_over_xet_is_told_with_what_helps(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    message = refusal(lambda: send(folder, "alice/plain"))
    assert "an upload to 127.0.0.1" in message and "HF_HUB_DISABLE_XET=1" in message


KINDS = (*WRITES, "model info", "discussions", "pull request")
"""Requests of a push; the last is a commit that opens a pull request."""
SOME = [fault for fault in FAULTS if fault not in ("503", "slow")]  # as 500; takes long
CHANGING = ("create", "upload", "commit", "pull request")
"""Requests that change something on the Hub: of others a late answer is none, as one that is reset."""
LOST = ("lost reply", "reset midway", "truncated", "lost behind a gateway")
"""Faults of a request that is carried out at once."""
USUAL = {
    ("commit", "slow"),
    ("commit", "lost reply"),
    *((kind, SOME[number % len(SOME)]) for number, kind in enumerate(KINDS)),
    *(("pull request", fault) for fault in (*LOST, "slow")),
}
CASES = [
    pytest.param(kind, fault, marks=[] if (kind, fault) in USUAL else pytest.mark.survive)
    for kind in KINDS
    for fault in (*SOME, *(["slow"] if kind in CHANGING else []))
]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_whatever_fails_the_next_push_finishes_with_one_commit(
    hub: HubServer, folder: Path, request: pytest.FixtureRequest, kind: str, fault: str
) -> None:
    if fault == "slow":
        request.getfixturevalue("impatient")
    create_pr = kind in ("discussions", "pull request")
    for times in (1, None):
        name = f"alice/{times}-{kind}-{fault}".replace(" ", "-")  # late requests of one test reach the next
        if create_pr:
            hub.add_repo(name, folder / "extra")
        target = aim(name, create_pr=create_pr)
        planned = Fault(seconds=SLOW) if fault == "slow" else fault
        hub.fail("commit" if kind == "pull request" else kind, planned, times=times)
        before = hub.faults.hits
        try:
            push(folder, target, message="m")
        except HubError as error:
            # what fails once is tried again, but for a pull request that may still come to be
            assert times is None or (kind == "pull request" and fault not in LOST)
            assert fault != "slow" or "does not answer" in error.what
            assert str(folder) in error.fix
            assert os.environ["HF_TOKEN"] not in str(error)
        assert hub.faults.hits > before
        hub.faults.clear()
        repo = hub.repos.get(("model", name))
        assert repo is None or len(repo.log) <= 1
        if kind == "pull request" and fault == "slow":
            threading.Event().wait(SLOW)
        pushed = push(folder, target, message="m")
        repo = hub.repos["model", name]
        assert [commit.sha for commit in repo.log] == [pushed.commit]
        assert push(folder, target, message="m") == pushed
        assert len(repo.pulls) == int(create_pr) and pushed.pull_request == (1 if create_pr else None)
        assert visible(folder).items() <= stored(hub, name, repo.log[0].revision).items()


@pytest.mark.parametrize("kind", ["preupload", "commit"])
def test_a_repo_that_disappears_midway_is_missed(hub: HubServer, folder: Path, kind: str) -> None:
    target = aim("alice/gone")
    hub.fail(kind, Fault(action=lambda: hub.delete_repo("alice/gone")))
    message = refusal(lambda: push(folder, target, message="m"))
    assert "alice/gone is not on" in message
    assert str(folder) in message
    push(folder, target, message="m")
    assert stored(hub, "alice/gone") == visible(folder)


def test_what_somebody_else_commits_meanwhile_is_not_overwritten(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    other = model(tmp_path / "other", **{"theirs.txt": "new"})
    hub.add_repo("alice/busy", model(tmp_path / "old"))
    hub.fail("commit", Fault(action=lambda: hub.add_repo("alice/busy", other)))
    message = refusal(lambda: send(folder, "alice/busy", overwrite_repo=True))
    assert "changed by somebody else" in message
    assert stored(hub, "alice/busy") == visible(other)
