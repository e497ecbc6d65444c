"""The Hub of the tests is as strict as the real one where tests lean on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_session
from huggingface_hub.errors import HfHubHTTPError


@pytest.mark.usefixtures("hub")
def test_metadata_is_checked() -> None:
    good = "license: apache-2.0\nbase_model: [user/base, user/expert]\nbase_model_relation: merge\ndatasets: user/data"
    session = get_session()
    for metadata, refused in (
        (good, ""),
        ("license: mine", "license"),
        ("base_model: 'user/ base'", "base_model"),
        ("base_model_relation: cousin", "base_model_relation"),
        ("tags: 3", "tags"),
        ("a: [", "YAML"),
        ("model-index: [{name: m, results: [{task: {}}]}]", ".task: 'type' is a required property"),
    ):
        content = f"---\n{metadata}\n---\n# A model\n"
        answer = session.post(f"{HfApi().endpoint}/api/validate-yaml", json={"content": content, "repoType": "model"})
        assert answer.status_code == (400 if refused else 200)
        assert refused in answer.text
    ModelCard(f"---\n{good}\n---\n").validate()
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: mine\n---\n").validate()


def test_a_large_file_is_what_was_announced_or_refused(hub: HubServer, tmp_path: Path) -> None:
    api = HfApi(token=hub.add_token("alice"))
    api.create_repo("alice/large")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)
    addition = CommitOperationAdd("model.safetensors", str(path))
    path.write_bytes(b"y" * 99)
    with pytest.raises(RuntimeError):
        api.create_commit("alice/large", [addition], commit_message="m")
    # a commit alone, without the upload
    addition = CommitOperationAdd("model.safetensors", str(path))
    addition._upload_mode, addition._is_uploaded = "lfs", True
    with pytest.raises(HfHubHTTPError, match="not uploaded"):
        api.create_commit("alice/large", [addition], commit_message="m")
    assert not hub.repos["model", "alice/large"].log
