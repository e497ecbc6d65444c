"""`featcal calibrate ORG/merged --push-to ORG/out` on a Hub on loopback that holds what mergekit's users leave."""

import json
import re
import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from command_line import Capsys, Run, featcal, run_line
from egress import watch_egress
from families import TASKS, VOCABULARY, save_tokenizer
from hub_server import HubServer
from huggingface_hub import ModelCard
from outcome import refusal_of
from published import Published, change_config, publish, write_card
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.reading import collect_overrides, read_draft
from featcal_cli.recipe.references import bare_id
from featcal_cli.recipe.schema import Draft

FIRST_BYTES = 100_000
pytestmark = pytest.mark.usefixtures("undrawn")


@dataclass
class User:
    """Somebody in an empty folder, who has files of a merge to put on the Hub."""

    hub: HubServer
    merge: Path
    here: Path
    capsys: Capsys
    patch: pytest.MonkeyPatch

    def publish(self, org: str) -> Published:
        return publish(self.hub, self.merge, org)

    def log_in(self, user: str) -> str:
        token = self.hub.add_token(user)
        self.patch.setenv("HF_TOKEN", token)
        return token

    def calibrate(self, merged: str, **options: object) -> Run:
        """The command in this process; options with _ for -."""
        named = {f"--{name.replace('_', '-')}": "" if value is True else value for name, value in options.items()}
        return self.run([merged, "-n", "16", *(str(x) for pair in named.items() for x in pair if x != "")])

    def run(self, line: list[str]) -> Run:
        return run_line(self.capsys, ["calibrate", *line])


@pytest.fixture
def user(hub: HubServer, merge: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> User:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return User(hub, merge, tmp_path / "here", capsys, monkeypatch)


def one_line(text: str) -> str:
    """A message as it is where no terminal breaks its lines."""
    return re.sub(r"\s+", " ", text)


def test_one_argument_is_enough(user: User) -> None:
    published = user.publish("one")
    token = user.log_in("one")
    with watch_egress() as egress:
        command = ("calibrate", "one/merged", "-n", "24", "--push-to", "one/out")
        run = featcal(*command, folder=user.here, **egress.environment)
    assert run.returncode == 0, run.stderr
    assert egress.hosts == []
    models = ["base one/base", *(f"expert {task} one/bert-{task}" for task in TASKS)]
    assert f"from mergekit_config.yml of one/merged: {'; '.join(models)}" in one_line(run.stderr)
    for task in TASKS:
        assert f"from the card of one/bert-{task} (datasets): data {task} one/{task}-rows" in one_line(run.stderr)

    out = user.hub.repos["model", "one/out"]
    assert [commit.sha for commit in out.log] == [out.refs["main"]]
    files = {path: blob.path.read_bytes() for path, blob in out.commits[out.refs["main"]].items()}
    written = {path.name: path.read_bytes() for path in (user.here / "merged-featcal").iterdir()}
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


def test_the_recipe_in_the_output_runs_the_same_job_after_every_repo_has_moved_on(user: User) -> None:
    published = user.publish("moved")
    assert user.calibrate("moved/merged", output="first").code == 0
    for name in ("base", *TASKS, "merged"):
        folder = published.folder / name
        for file in folder.glob("*.safetensors"):
            file.write_bytes((user.merge / "base" / file.name).read_bytes())
        change_config(folder, hidden_dropout_prob=0.25)
        user.hub.add_repo(f"moved/bert-{name}" if name in TASKS else f"moved/{name}", folder)
    for task in TASKS:
        user.hub.add_repo(f"moved/{task}-rows", user.merge / "data" / TASKS[0], kind="dataset")
    assert user.run(["-r", "first/featcal.yaml", "-o", "second"]).code == 0
    for name in ("model.safetensors", "config.json"):
        assert (user.here / "first" / name).read_bytes() == (user.here / "second" / name).read_bytes()


def test_a_dry_run_reads_headers_and_nothing_else_of_the_weights(user: User) -> None:
    user.publish("dry")
    wide = tmp_bert(user.here.parent / "wide", width=128)
    for name in ("merged", "base", *(f"bert-{task}" for task in TASKS)):
        user.hub.add_repo(f"dry/{name}", wide)
    parts = [(f"--expert={task}=dry/bert-{task}", f"--data={task}=dry/{task}-rows") for task in TASKS]
    command = ["dry/merged", "--base=dry/base", *chain(*parts), "--dry-run"]
    user.hub.requests.clear()
    run = user.run(command)
    assert run.code == 0, run.stderr
    commits = [files for repo in user.hub.repos.values() for files in repo.commits.values()]
    weights = {blob.sha256 for files in commits for path, blob in files.items() if path.endswith(".safetensors")}
    read = sum(user.hub.sent(sha256) for sha256 in weights)
    assert 0 < read <= 5 * (FIRST_BYTES + 1) < 5 * (wide / "model.safetensors").stat().st_size
    assert list(user.here.iterdir()) == []
    for word in ("2 blocks", "memory", "disk", "download", "dry/red-rows"):
        assert word in run.stdout
    found = json.loads(user.run([*command, "--json"]).stdout)
    assert found["findings"][1] == {"role": "base", "value": "dry/base", "source": "the command line or recipe"}
    assert (found["blocks"], found["modules"], found["model_class"]) == (2, 16, "BertModel")
    assert found["transfers"].keys() == {"merged", "base", *(f"expert {task}" for task in TASKS)}
    assert all(transfer["missing"] > 80_000 for transfer in found["transfers"].values())
    assert found["estimate"]["host_bytes"] > 10**8


def test_a_mismatch_costs_no_download(user: User) -> None:
    user.publish("wide")
    wide = tmp_bert(user.here.parent / "wide", width=384)
    write_card(wide, base_model="wide/base", datasets=["wide/green-rows"])
    user.hub.add_repo("wide/bert-green", wide)
    user.hub.requests.clear()
    run = user.calibrate("wide/merged")
    assert run.code == 2
    for word in ("wide/bert-green", "shape", "384"):
        assert word in run.stderr
    size = (wide / "model.safetensors").stat().st_size
    assert size > 10 * FIRST_BYTES
    assert user.hub.file_bytes() < size / 2
    assert list(user.here.iterdir()) == []


def tmp_bert(folder: Path, *, width: int) -> Path:
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_attention_heads=2,
                        num_hidden_layers=2, max_position_embeddings=64)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_a_token_is_checked_before_the_work(user: User) -> None:
    user.publish("tokens")
    user.hub.requests.clear()
    may_read, may_write = (user.hub.add_token("tokens", role) for role in ("read", "write"))
    for token, target, words in (
        ("", "tokens/out", ("token", "hf auth login")),
        ("hf_" + "x" * 34, "tokens/out", ("does not accept the token",)),
        (may_read, "tokens/out", ("read", "writ")),
        (may_write, "somebody/out", ("somebody",)),
        (may_write, "tokens/merged", ("--create-pr", "--overwrite-repo")),
    ):
        user.patch.setenv("HF_TOKEN", token)
        run = user.calibrate("tokens/merged", push_to=target)
        assert run.code == 2 and all(word in run.stderr for word in words), run.stderr
        assert not token or token not in run.stderr
    assert user.hub.file_bytes() == 0
    assert list(user.here.iterdir()) == []


@pytest.mark.usefixtures("hurried")
def test_an_output_is_pushed_later_without_computing_again_unless_the_merged_repo_has_moved_on(user: User) -> None:
    """As a pipeline does it: calibrate, look, and give the same command with --push-to; or where a push failed."""
    user.log_in("gate")
    published = user.publish("gate")
    assert user.calibrate("gate/merged").code == 0
    assert user.calibrate("gate/merged", ridge=0.3, push_to="gate/out").code == 2  # another job
    user.hub.fail("commit", "500", times=None)
    run = user.calibrate("gate/merged", push_to="gate/out")
    assert run.code == 2
    assert "the same command again pushes it" in one_line(run.stderr)
    user.hub.faults.clear()
    # a report that was cut short is none
    report = user.here / "merged-featcal" / "featcal_report.json"
    whole = report.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 3):
        report.write_bytes(whole[:length])
        run = user.calibrate("gate/merged", push_to="gate/out")
        assert run.code == 2 and "exists" in run.stderr and "Traceback" not in run.stderr
    report.write_bytes(whole)
    written = {path.name: path.stat().st_mtime_ns for path in (user.here / "merged-featcal").iterdir()}
    user.hub.requests.clear()
    run = user.calibrate("gate/merged", push_to="gate/out")
    assert run.code == 0 and "nothing is computed again" in one_line(run.stderr), run.stderr
    assert len(user.hub.repos["model", "gate/out"].log) == 1
    assert sorted(path.name for path in user.here.iterdir()) == ["merged-featcal"]
    assert user.hub.file_bytes() == 0
    now = {path.name: path.stat().st_mtime_ns for path in (user.here / "merged-featcal").iterdir()}
    assert now == written
    card = (user.here / "merged-featcal" / "README.md").read_text()
    assert "gate/out" in card
    repo = user.hub.repos["model", "gate/out"]
    assert repo.commits[repo.refs["main"]]["README.md"].path.read_text() == card
    run = user.calibrate("gate/merged", push_to="gate/out")
    assert run.code == 0, run.stderr
    assert len(user.hub.repos["model", "gate/out"].log) == 1
    # the time of this command is not that of the calibration
    assert re.search(r"(?<! s); the calibrated model is in merged-featcal and at ", one_line(run.stdout)), run.stdout
    run = user.calibrate("gate/merged")
    assert run.code == 0 and "already done" in run.stderr
    (published.folder / "merged" / "notes.txt").write_text("a new version")
    user.hub.add_repo("gate/merged", published.folder / "merged")
    run = user.calibrate("gate/merged", push_to="gate/later")
    assert run.code == 2 and "merged was gate/merged@" in run.stderr and "--overwrite" in run.stderr
    assert ("model", "gate/later") not in user.hub.repos
    assert (user.here / "merged-featcal" / "model.safetensors").is_file()


PAGES = {
    "https://huggingface.co/a/b": "a/b",
    "HTTPS://huggingface.co/a/b/": "a/b",
    "huggingface.co/a/b": "a/b",
    "https://hf.co/a/b/tree/main": "a/b@main",
    "hf://a/b@v1": "a/b@v1",
    "hf://a/b@refs/pr/3": "a/b@refs/pr/3",
    "https://huggingface.co/a/b/tree/refs%2Fpr%2F3": "a/b@refs/pr/3",
    "https://huggingface.co/a/b/blob/v2/config.json": "a/b@v2",
    "https://huggingface.co/a/b/resolve/main/model.safetensors?download=true": "a/b@main",
    "https://user:secret@huggingface.co/a/b": "a/b",  # pragma: allowlist secret
}
SOURCES = {
    "https://huggingface.co/datasets/a/b": "a/b",
    "https://huggingface.co/datasets/a/b/": "a/b",
    "hf://datasets/a/b@v1/data/x.parquet": "a/b@v1",
    "https://huggingface.co/datasets/a/b/tree/v1/data": "a/b@v1",
}


def test_addresses_of_pages_are_ids_of_models_and_datasets(user: User) -> None:
    commit = user.publish("pasted").commits["pasted/merged"]
    for text in ("https://huggingface.co/pasted/merged", "https://hf.co/pasted/merged/tree/main"):
        repo = open_repo(text)
        assert (repo.name, repo.commit) == ("pasted/merged", commit)
    assert open_repo("hf://datasets/pasted/red-rows", "dataset").name == "pasted/red-rows"
    for address, reference in PAGES.items():
        assert Draft(merged=address, base=address).base == reference, address
        assert Draft(merged=f"{address}+{address}").merged == f"{reference}+{reference}", address
    for address, source in SOURCES.items():
        draft = Draft.model_validate({"merged": "a/m", "tasks": {"t": {"data": address}}})
        assert str(draft.tasks["t"].data) == source, address
    assert bare_id(f"{user.hub.url}/a/b") == "a/b"
    assert Draft(merged="https://huggingface.co/a/b/tree/v1").name == "a/b"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://github.com/a/b", "https://github.com/a/b is not the page of"),
        ("https://user:secret@modelscope.cn/models/a/b?token=secret", "is not the page of"),  # pragma: allowlist secret
        ("https://user:sec/secret@modelscope.cn/models/a/b", "is not the page of"),  # pragma: allowlist secret
        ("s3://bucket/model", "s3://bucket/model is not the page of"),
        ("https://huggingface.co/spaces/a/b", "is not the page of"),
        ("https://huggingface.co/", "is not the page of"),
        ("https://huggingface.co/datasets/a/b", "is a dataset, not a model"),
    ],
)
def test_other_addresses_are_refused_with_what_would_work(address: str, words: str) -> None:
    message = refusal_of(lambda: read_draft(None, collect_overrides(merged=address)))
    assert words in message and "secret" not in message


def test_all_experts_that_are_gone_are_named_and_the_run_goes_on_without_them(user: User) -> None:
    user.publish("less")
    user.hub.delete_repo("less/bert-green")
    user.hub.repos["model", "less/bert-blue"].gated = True
    user.hub.repos["model", "less/bert-blue"].readers.clear()
    run = user.calibrate("less/merged", output="out put")
    assert run.code == 2 and list(user.here.iterdir()) == []
    for words in ("there is no model less/bert-green", "less/bert-blue is gated", "ask for access"):
        assert words in run.stderr
    command = run.stderr.rstrip().rpartition("type: ")[2]
    assert command.startswith("featcal calibrate less/merged -n 16 --output 'out put'")
    assert "--skip-expert green" in command and "--skip-expert blue" in command
    user.patch.chdir(user.here)
    run = user.run(shlex.split(command)[2:])
    assert run.code == 0, run.stderr
    card = (user.here / "out put" / "README.md").read_text()
    report = json.loads((user.here / "out put" / "featcal_report.json").read_text())
    for task in ("green", "blue"):
        assert f"less/bert-{task}) is left out" in card.replace("\\", "")
        assert any(f"less/bert-{task}) is left out" in note for note in report["notes"])
    assert set(report["recipe"]["tasks"]) == set(TASKS) - {"green", "blue"}


def test_code_from_a_repo_runs_only_when_it_is_trusted(user: User) -> None:
    published = user.publish("coded")
    ran = user.here.parent / "ran"
    code = f"from pathlib import Path\nfrom transformers import BertModel\nPath({str(ran)!r}).touch()\n"
    for name in ("merged", "base", *TASKS):
        folder = published.folder / name
        (folder / "modeling_own.py").write_text(f"{code}\n\nclass OwnBert(BertModel):\n    pass\n")
        change_config(folder, architectures=["OwnBert"], auto_map={"AutoModel": "modeling_own.OwnBert"})
        user.hub.add_repo(f"coded/bert-{name}" if name in TASKS else f"coded/{name}", folder)
    run = user.calibrate("coded/merged")
    assert run.code == 2 and "--trust-remote-code" in run.stderr
    assert not ran.exists()
    assert user.calibrate("coded/merged", trust_remote_code=True).code == 0
    assert ran.exists()
    card = (user.here / "merged-featcal" / "README.md").read_text()
    assert 'model = AutoModel.from_pretrained("merged-featcal", dtype="auto", trust_remote_code=True)' in card
