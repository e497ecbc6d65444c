"""Models are resolved against a Hub on loopback, by the real huggingface_hub."""

import errno
import gc
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hub_faults import Fault, go_down
from hub_server import HubServer
from huggingface_hub import constants
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from outcome import check_equal, refusal_of
from published import resolve
from safetensors.torch import load_file, save_file

from featcal_cli.hub.client import TIMEOUT, describe_failure, expect_answers, make_client
from featcal_cli.hub.repo import download, open_repo, read_headers
from featcal_cli.hub.snapshot import Snapshot, resolve_config
from featcal_cli.runtime.progress import heard

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("hurried")
OTHER_FORMATS = ("pytorch_model.bin", "tf_model.h5", "model.gguf", "onnx/model.onnx", "optimizer.pt", "model.ot")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, torch.Tensor]:
    """Weights of no model in particular."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 3, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = bare(tmp_path / "model")
    save_file(tensors(), made / "model.safetensors")
    return made


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    made = bare(tmp_path / "pickled")
    torch.save(tensors(), made / "pytorch_model.bin")
    return made


def bare(made: Path) -> Path:
    """A model folder without weights."""
    (made / "extra").mkdir(parents=True)
    (made / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    (made / "tokenizer.json").write_text("{}")
    (made / "extra" / "notes.txt").write_text("kept")
    return made


def sharded(made: Path, single: str, save: Callable[[Any, Path], object]) -> Path:
    """The model folder with its weights in two shards instead of one file."""
    stem, suffix = single.split(".")
    names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    places = {"a.weight": names[1], "b.weight": names[0], "c.weight": names[1]}
    for shard in names:
        save({name: value for name, value in tensors().items() if places[name] == shard}, made / shard)
    (made / f"{single}.index.json").write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": places}))
    (made / single).unlink()
    return made


def refusal(name: str, **options: bool) -> str:
    return refusal_of(lambda: resolve(name, **options))


def loaded(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return {name: value for file in snapshot.weights() for name, value in load_file(file).items()}


def go_offline(monkeypatch: Patch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cached_file(snapshot: Snapshot, name: str) -> Path:
    """The path at which huggingface_hub keeps the content of a file of a snapshot."""
    return (snapshot.folder / name).resolve()


def test_a_folder_is_taken_as_it_is_even_when_it_looks_like_a_hub_id(folder: Path, monkeypatch: Patch) -> None:
    assert resolve(str(folder)) == Snapshot(str(folder), folder, None)
    assert [file.name for file in resolve(str(folder)).weights()] == ["model.safetensors"]
    shutil.move(folder, folder.parent / "user@x")
    monkeypatch.chdir(folder.parent)
    assert resolve("user@x").folder == folder.parent / "user@x"


def test_shards_come_in_order(folder: Path) -> None:
    snapshot = resolve(str(sharded(folder, "model.safetensors", save_file)))
    assert [file.name for file in snapshot.weights()] == list(SHARDS)
    check_equal(loaded(snapshot), tensors())


def test_a_tensor_in_two_files_is_refused_before_and_after_the_download(hub: HubServer, folder: Path) -> None:
    sharded(folder, "model.safetensors", save_file)
    shutil.copyfile(folder / SHARDS[0], folder / SHARDS[1])
    hub.add_repo("user/two", folder)
    told = "another file of the model holds the tensor 'b.weight', too"
    assert told in refusal_of(lambda: read_headers(open_repo("user/two")))
    assert told in refusal("user/two")


def test_a_weight_file_that_cannot_be_read_is_no_failed_download(folder: Path, monkeypatch: Patch) -> None:
    closed = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr("featcal_cli.hub.repo.read_header", closed)
    message = refusal_of(lambda: read_headers(open_repo(str(folder))))
    assert "model.safetensors" in message and "cannot be read: Permission denied" in message
    assert "download" not in message


@pytest.mark.parametrize("place", ["hub", "folder", "adapter", "base and adapter"])
def test_a_config_needs_no_weights(hub: HubServer, tmp_path: Path, place: str) -> None:
    model, adapter = bare(tmp_path / "model"), tmp_path / "adapter"
    hub.add_repo("user/no-weights", model)
    adapter.mkdir()
    said = {"peft_type": "LORA", "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    names = {"hub": "user/no-weights", "folder": model, "adapter": adapter, "base and adapter": f"{model}+user/none"}
    snapshot = resolve_config(str(names[place]))
    assert snapshot.name == ("user/no-weights" if place == "hub" else str(model))
    assert snapshot.config["hidden_size"] == 8


# The Hub


def test_weights_in_other_formats_are_not_downloaded(hub: HubServer, folder: Path) -> None:
    others = (*OTHER_FORMATS, "model.fp16.safetensors", "consolidated.safetensors", "consolidated.00.pth")
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 1000)
    hub.add_repo("user/formats", folder)
    found = resolve("user/formats").folder
    files = {path.relative_to(found).as_posix() for path in found.rglob("*")}
    assert not files & set(others)
    assert {"model.safetensors", "extra/notes.txt"} <= files
    asked = {request.path.partition("/resolve/")[2].partition("/")[2] for request in hub.requests}
    assert not asked & set(others)


def test_a_revision_is_a_branch_a_commit_or_a_pull_request(hub: HubServer, folder: Path) -> None:
    commits = {}
    for revision in ("main", "dev", "refs/pr/1"):
        (folder / "tokenizer.json").write_text(f'"{revision}"')
        commits[revision] = hub.add_repo("user/branches", folder, revision=revision)
    for revision, commit in commits.items():
        for spelling in (revision, commit, commit[:9]):
            snapshot = resolve(f"user/branches@{spelling}")
            assert (snapshot.name, snapshot.commit) == ("user/branches", commit)
        assert (snapshot.folder / "tokenizer.json").read_text() == f'"{revision}"'
    (folder / "config.json").write_text('{"model_type": "vit"}')
    assert resolve("user/branches").commit == commits["main"] != hub.add_repo("user/branches", folder)
    assert resolve("user/branches").commit == hub.repos["model", "user/branches"].refs["main"] != commits["main"]


def test_what_is_not_on_the_hub_is_said(hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
    hub.add_repo("user/there", folder)
    (folder / "config.json").unlink()
    hub.add_repo("user/no-config", folder)
    assert "has no config.json" in refusal("user/no-config")
    (folder / "0_Transformer").mkdir()
    (folder / "model.safetensors").rename(folder / "0_Transformer/model.safetensors")
    hub.add_repo("user/sentences", folder)
    assert "give the folder of one model: FOLDER/0_Transformer" in refusal("user/sentences")
    assert hub.file_bytes() == 0
    assert "there is no model user/absent" in refusal("user/absent")
    assert "has no revision v9" in refusal("user/there@v9")
    assert f"has no revision {'0' * 40}" in refusal(f"user/there@{'0' * 40}")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("somebody"))
    assert "there is no model user/absent" in refusal("user/absent")


def test_a_bad_token_is_named_but_never_shown(hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
    token = "hf_" + "notKnown" * 4
    hub.add_repo("user/public", folder)
    monkeypatch.setenv("HF_TOKEN", token)
    assert "does not accept the token" in refusal("user/public")
    hub.tokens[token] = "user"
    hub.add_repo("other/private", folder, private=True)
    for name in ("other/private", "user/absent", "user/public@absent"):
        assert token not in refusal(name)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh\u00fc")
    message = refusal("user/public")
    assert "the token holds signs that no token of the Hub has" in message and "HF_TOKEN" in message
    assert "hf_abcdefgh" not in message and "like a Hub" not in message


def test_the_token_goes_to_the_hub_only(hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
    hub.add_repo("user/secret", folder, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.add_token("user"))
    resolve("user/secret")
    elsewhere = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert elsewhere
    assert not any(request.authorization for request in elsewhere)
    assert all(request.authorization for request in hub.requests if request not in elsewhere)
    # nor where a library asks another host by itself, and not by a redirection
    for url, is_kept in (
        (f"{hub.url}/api", True),
        ("http://cdn.example/file", False),
        ("http://127.0.0.1.example/", False),
    ):
        with make_client() as client:
            request = client.build_request("GET", url, headers={"Authorization": "Bearer x"})
            for hook in client.event_hooks["request"]:
                hook(request)
        assert ("Authorization" in request.headers) == is_kept, url


# Without the Hub


@pytest.mark.parametrize("silence", ["offline", "down"])
def test_a_cached_snapshot_is_enough(hub: HubServer, folder: Path, monkeypatch: Patch, silence: str) -> None:
    commit = hub.add_repo(f"user/{silence}", folder)
    online = resolve(f"user/{silence}")
    go_offline(monkeypatch) if silence == "offline" else go_down(monkeypatch)
    hub.requests.clear()
    told: list[str] = []
    with heard(told.append):
        assert resolve(f"user/{silence}") == online
    assert resolve(f"user/{silence}@{commit}") == online
    assert not hub.requests
    assert bool(told) == (silence == "down"), told  # who is offline on purpose knows that


@pytest.mark.parametrize("endpoint", ["", "huggingface.co", "me:secret@hub"])
def test_an_endpoint_that_is_no_address_is_named(monkeypatch: Patch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    message = describe_failure(httpx.UnsupportedProtocol("no protocol"), by_name=True)
    shown = endpoint.removeprefix("me:secret@")
    assert message.startswith(f"HF_ENDPOINT ('{shown}', which is no web address) cannot be reached")


@pytest.mark.parametrize(("silence", "lost"), [("offline", "tokenizer.json"), ("down", SHARDS[0])])
def test_half_a_snapshot_is_refused(hub: HubServer, folder: Path, monkeypatch: Patch, silence: str, lost: str) -> None:
    name = f"user/partial-{silence}-{lost[:5]}"
    hub.add_repo(name, sharded(folder, "model.safetensors", save_file))
    cached_file(resolve(name), lost).unlink()
    with monkeypatch.context() as patch:
        go_offline(patch) if silence == "offline" else go_down(patch)
        message = refusal(name)
    assert f"no complete copy of {name}" in message
    assert ("offline mode is on" if silence == "offline" else "cannot be reached") in message
    expect_answers()
    check_equal(loaded(resolve(name)), tensors())


@pytest.mark.parametrize("lost", ["config.json", SHARDS[0], "model.safetensors.index.json", "tokenizer.json"])
def test_an_unlisted_snapshot_may_be_enough(hub: HubServer, folder: Path, monkeypatch: Patch, lost: str) -> None:
    from huggingface_hub import hf_hub_download

    name = f"user/unlisted-{lost[:9]}"
    commit = hub.add_repo(name, sharded(folder, "model.safetensors", save_file))
    for file in {"config.json", "model.safetensors.index.json", *SHARDS} - {lost}:
        hf_hub_download(name, file)
    go_offline(monkeypatch)
    if lost == "tokenizer.json":
        assert resolve(name).commit == commit
    else:
        assert (f"no {lost}" if lost == SHARDS[0] else "no complete copy") in refusal(name)


def test_a_cached_weight_file_that_was_cut_short_is_refused(hub: HubServer, folder: Path) -> None:
    hub.add_repo("user/cut", folder)
    file = cached_file(resolve("user/cut"), "model.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    assert f"delete {file}" in refusal("user/cut")
    file.unlink()
    check_equal(loaded(resolve("user/cut")), tensors())


@pytest.mark.usefixtures("hub")
def test_every_request_has_a_time_limit() -> None:
    from huggingface_hub import get_session, list_repo_tree

    seen: list[Any] = []
    refusal("user/whatever")
    hooks = get_session().event_hooks["request"]
    hooks.append(lambda request: seen.append(request.extensions["timeout"]))
    with pytest.raises(Exception, match="Not Found"):
        list(list_repo_tree("user/whatever"))
    hooks.pop()
    assert seen
    assert all(limit == TIMEOUT for limits in seen for limit in limits.values())


# What is in the cache already, and what arrives


def test_a_file_that_arrives_damaged_is_found_and_fetched_by_the_next_run(hub: HubServer, folder: Path) -> None:
    hub.add_repo("user/damaged", folder)
    size = (folder / "model.safetensors").stat().st_size
    hub.fail("large file", Fault(body=b"x" * size))
    assert "model.safetensors of user/damaged arrived damaged" in refusal("user/damaged")
    check_equal(loaded(resolve("user/damaged")), tensors())
    hub.requests.clear()
    resolve("user/damaged")
    assert not [request for request in hub.requests if "/tree/" in request.path]  # checked once


def test_a_file_that_nobody_checked_is_checked_the_next_time(hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
    hub.add_repo("user/mine", folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("featcal_cli.hub.repo._verify", Mock(side_effect=KeyboardInterrupt))
        resolve("user/mine")
    file = cached_file(resolve_config("user/mine"), "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "arrived damaged" in refusal("user/mine")
    check_equal(loaded(resolve("user/mine")), tensors())


def test_a_file_that_no_run_downloaded_is_neither_checked_nor_deleted(hub: HubServer, folder: Path) -> None:
    hub.add_repo("user/theirs", folder)
    file = cached_file(resolve_config("user/theirs"), "config.json")
    spoilt = file.read_bytes()[:-1] + b"?"
    file.write_bytes(spoilt)
    download(open_repo("user/theirs"))
    assert file.read_bytes() == spoilt


def test_nothing_is_told_of_a_download_that_is_over(hub: HubServer, folder: Path) -> None:
    hub.add_repo("user/told", folder)
    told: list[tuple[str, int, int]] = []
    download(open_repo("user/told"), watch=lambda *what: told.append(what))
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert told[-1] == ("user/told", total, total)
    count = len(told)
    gc.collect()
    assert len(told) == count


@pytest.mark.parametrize("said", ["", "../../../etc", None])
def test_a_cache_of_no_repo_is_no_snapshot(hub: HubServer, folder: Path, monkeypatch: Patch, said: str | None) -> None:
    name = f"user/ref-{'none' if said is None else len(said)}"
    commit = hub.add_repo(name, folder)
    ref = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(commit if said is None else said)
    with monkeypatch.context() as patch:
        go_offline(patch)
        message = refusal(name)
    assert ("no complete copy" in message) == (said is None)
    check_equal(loaded(resolve(name)), tensors())


HTML = Fault(body=b"<html><a href='https://elsewhere.test/?secret=1'>welcome</a></html>")
ENDLESS = Fault(headers={"Link": '<{}/api/models/user/{}/tree/main>; rel="next"'})
ODD_ANSWERS: dict[str, tuple[str, str | Fault, str]] = {
    "a file that breaks off": ("large file", "reset midway", "localhost:[0-9]+ .*no complete copy of user/{}"),
    "one that has moved on": ("large file", Fault(status=403), "localhost:.* refuses user/{}"),
    "one that fails": ("large file", "500", "localhost:.* failed .500"),
    "one of another size": ("large file", Fault(body=b"x" * 9), "user/{} .*Consistency check"),
    "one that is not there": ("file head", Fault(status=404), "refuses user/{} .HTTP status 404"),
    "no checksum": ("file head", Fault(without=("ETag", "X-Linked-Etag")), "does not answer like a Hub when asked for"),
    "no commit": ("file head", Fault(without=("X-Repo-Commit",)), "does not answer like a Hub when asked for"),
    "a page": ("model info", HTML, "does not answer like a Hub"),
    "a page for a listing": ("model tree", HTML, "does not answer like a Hub"),
    "an odd listing": ("model tree", Fault(body=b'[{"type": "file"}]'), "does not answer like a Hub"),
    "a listing of nothing": ("model tree", Fault(body=b"null"), "does not answer like a Hub"),
    "a circle": ("file head", Fault(status=302, headers={"Location": "?again"}), "reached .TooManyRedirects."),
    "pages without end": ("model tree", ENDLESS, "twice"),
    "a day of waiting": ("file head", Fault(status=429, headers={"Retry-After": "86400"}), "refuses more requests"),
    "no rights": ("model info", Fault(status=403, message="Ask\x07 http://h.test/?key=1"), "to .*: Ask. h.test.* page"),
    "no reason": ("model info", Fault(status=403, message=""), "refuses access to user/{} in: .* fix: .*set HF_TOKEN"),
    "the law": ("file head", Fault(status=451, message="x" * 999), "status 451.: x{{50,}}[.][.][.] in: .* fix: .*page"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_odd_answers_are_a_message(hub: HubServer, folder: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """What the Hub says of a refusal is passed on short and inert."""
    kind, fault, told = ODD_ANSWERS[case]
    name = case.replace(" ", "-")
    hub.add_repo(f"user/{name}", folder)
    if isinstance(fault, Fault):
        headers = {key: value.format(hub.url, name) for key, value in fault.headers.items()}
        fault = replace(fault, headers=headers, carried_out=fault.status < 400)
    hub.fail(kind, fault, times=None)
    waits: list[str] = []
    with heard(waits.append):
        message = refusal(f"user/{name}")
    waits += [record.getMessage() for record in caplog.records]
    assert re.search(told.format(name), message.replace("\n", " ")), message
    for text in (message, *waits):
        assert not re.search("http:|/cdn/|/resolve/|secret|86,?40|\x07|key=1", text) and len(text) < 900, text


@pytest.mark.parametrize(
    ("kind", "fault", "waited"),
    [
        ("model info", "503", "the Hub failed (503), next try in 1 s"),
        ("model info", "429", "the Hub refused (429), next try in 1 s"),
        ("model info", "reset", "the Hub cut the connection (ReadError), next try in 1 s"),
        ("model tree", "503", r"HTTP Error 503 thrown while requesting GET CDN; Retrying in 1s.*"),
        ("model tree", "reset", r".* thrown while requesting GET CDN; Retrying in 1s.*"),
        ("large file", "503", "CDN failed (503), next try in 1 s"),
        ("large file", "truncated", "Error while downloading from CDN .* Trying to resume download.*"),
    ],
)
def test_waiting_is_announced(hub: HubServer, folder: Path, kind: str, fault: str, waited: str) -> None:
    name = f"user/wait-{kind}-{fault}".replace(" ", "-")
    hub.add_repo(name, folder)
    hub.fail(kind, fault)
    said: list[str] = []
    with heard(said.append):
        resolve(name)
    told = re.sub("(localhost|127.0.0.1):[0-9]+", "CDN", "; ".join(said))
    assert told == waited or re.fullmatch(waited, told), told


@pytest.mark.parametrize("status", [403, 404])
def test_an_address_of_a_large_file_that_lapsed_is_asked_for_again(hub: HubServer, folder: Path, status: int) -> None:
    name = f"user/lapsed-{status}"
    hub.add_repo(name, folder)
    hub.fail("large file", Fault(status=status, carried_out=False), times=2)
    check_equal(loaded(resolve(name)), tensors())
    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.fail("large file", Fault(status=status, carried_out=False), times=None)
    message = refusal(name)
    assert re.search(rf"localhost:\d+ refuses {name} .HTTP status {status}.", message)
    assert "token" not in message


# Pickled weights


def test_pickled_weights_are_refused_without_the_flag_and_others_with_it(hub: HubServer, pickled: Path) -> None:
    hub.add_repo("user/pickled", pickled)
    for name in ("user/pickled", str(pickled)):
        assert "--allow-pickle" in refusal(name)
    assert "user/pickled@refs/pr/NUMBER" in refusal("user/pickled")
    assert hub.file_bytes() == 0
    (pickled / "pytorch_model.bin").rename(pickled / "tf_model.h5")
    hub.add_repo("user/tensorflow", pickled)
    for name in ("user/tensorflow", str(pickled)):
        assert "no pytorch_model.bin" in refusal(name, allow_pickle=True)


@pytest.mark.parametrize(("layout", "place"), [("single", "hub"), ("sharded", "hub"), ("legacy", "folder")])
def test_the_flag_converts_pickles(hub: HubServer, pickled: Path, monkeypatch: Patch, layout: str, place: str) -> None:
    if layout == "sharded":
        sharded(pickled, "pytorch_model.bin", torch.save)
    if layout == "legacy":
        torch.save(tensors(), pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    name = f"user/bin-{layout}" if place == "hub" else str(pickled)
    commit = hub.add_repo(f"user/bin-{layout}", pickled)
    snapshot = resolve(name, allow_pickle=True)
    assert (snapshot.name, snapshot.commit) == (name, commit if place == "hub" else None)
    assert "converted" in snapshot.notes[0]
    check_equal(loaded(snapshot), tensors())
    assert (snapshot.folder / "extra" / "notes.txt").read_text() == "kept"
    assert not list(snapshot.folder.glob("*.bin*"))
    go_offline(monkeypatch)
    assert resolve(name, allow_pickle=True) == snapshot


def test_a_folder_that_changed_is_converted_again_and_tied_and_overlapping_weights_survive(pickled: Path) -> None:
    table = torch.arange(24.0).view(6, 4)
    before = resolve(str(pickled), allow_pickle=True)
    for number, wanted in enumerate(
        (
            {"embed": table, "head": table, "turned": table.t(), "rows": table[1:3], "alone": torch.ones(2)},
            {"part": table[:1]},
            {"part": table[:1], "whole": table},
        )
    ):
        torch.save(wanted, pickled / "pytorch_model.bin")
        os.utime(pickled / "pytorch_model.bin", (number, number))
        check_equal(loaded(resolve(str(pickled), allow_pickle=True)), wanted)
    check_equal(loaded(before), tensors())


class Trap:
    """An object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused(pickled: Path, tmp_path: Path, legacy: bool) -> None:
    trap = tensors() | {"trap": Trap(tmp_path / "sprung")}
    torch.save(trap, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert "could run code" in refusal(str(pickled), allow_pickle=True)
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(trap))
    refusal(str(pickled), allow_pickle=True)
    assert not (tmp_path / "sprung").exists()
    assert not list((Path(os.environ["FEATCAL_CACHE"]) / "converted").glob(".*"))


def test_a_pickle_that_is_no_state_dict_or_cut_short_is_refused(pickled: Path) -> None:
    file = pickled / "pytorch_model.bin"
    for content in (file.read_bytes()[:-200], b"", b"garbage"):
        file.write_bytes(content)
        assert "pytorch_model.bin" in refusal(str(pickled), allow_pickle=True)
    for tensors in ([1, 2], {"a": 1}, {}, {"model": {"a": torch.ones(1)}}):
        torch.save(tensors, file)
        assert "not a plain mapping" in refusal(str(pickled), allow_pickle=True)


def test_transformers_never_asks_for_a_conversion() -> None:
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1"
