"""Repos that are not there, not for us, or not to be trusted; and machines on which a job cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from bad_input import LAUGHS, Arguments, Arrange, Case, Stage, options
from hub_store import Repo
from safetensors.torch import load_file


def closed(stage: Stage, kind: str) -> Arguments:
    stage.hub.add_repo(f"strangers/{kind}", stage.folder / "red", gated=kind == "gated", private=kind == "private")
    return {"--expert": f"red=strangers/{kind}"}


def dataset_in_place_of_a_model(stage: Stage) -> Arguments:
    return {"--expert": f"red={stage.publish('strangers/rows', 'red', 'dataset')}"}


def missing_revision(stage: Stage) -> Arguments:
    return {"--expert": f"red={stage.publish('strangers/red', 'red')}@v7"}


def listing(name: str, change: Callable[[Repo], object]) -> Arrange:
    """An expert's repo, whose listing is another than any real one's."""

    def arrange(stage: Stage) -> Arguments:
        stage.publish(name, "red")
        change(stage.hub.repos["model", name])
        return {"--expert": f"red={name}"}

    return arrange


def lists(path: str) -> Callable[[Repo], object]:
    """A further file of this path."""

    def change(repo: Repo) -> None:
        files = repo.commits[repo.refs["main"]]
        files[path] = files["config.json"]

    return change


def is_huge(path: str, size: int) -> Callable[[Repo], object]:
    """A file that is said to have so many bytes."""

    def change(repo: Repo) -> None:
        files = repo.commits[repo.refs["main"]]
        files[path] = replace(files["config.json"], size=size)

    return change


def pickles_on_the_hub(stage: Stage) -> Arguments:
    stage.write("old/config.json", (stage.folder / "red" / "config.json").read_bytes())
    torch.save(load_file(stage.folder / "red" / "model.safetensors"), stage.folder / "old" / "pytorch_model.bin")
    return {"--expert": f"red={stage.publish('strangers/old', 'old')}"}


def adapter_that_names_a_folder_here(stage: Stage) -> Arguments:
    stage.write(
        "adapter/adapter_config.json",
        f'{{"peft_type": "LORA", "base_model_name_or_path": "{stage.folder / "base"}", "r": 2}}',
    )
    stage.write("adapter/adapter_model.safetensors", (stage.folder / "red" / "model.safetensors").read_bytes())
    return {"--expert": f"red={stage.publish('strangers/adapter', 'adapter')}"}


def card_that_names_a_folder_here(stage: Stage) -> Arguments:
    stage.write("merged/README.md", f"---\nbase_model: {stage.folder / 'base'}\n---\n")
    return {"merged": stage.publish("strangers/merged", "merged"), "--base": None}


def card_that_unfolds(stage: Stage) -> Arguments:
    stage.write("merged/README.md", f"---\n{LAUGHS}\nbase_model: *a11\n---\n")
    return {"merged": stage.publish("strangers/laughs", "merged"), "--base": None}


def huge_card(stage: Stage) -> Arguments:
    stage.write("merged/README.md", "x" * 11_000_000)
    return {"merged": stage.publish("strangers/long", "merged"), "--base": None}


def offline(stage: Stage) -> Arguments:
    stage.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return {"--expert": "red=strangers/never-seen"}


def push(target: str, user: str, role: str = "write") -> Arrange:
    """A push with that user's token, or one that was never handed out."""

    def arrange(stage: Stage) -> Arguments:
        stage.patch.setenv("HF_TOKEN", stage.hub.add_token(user, role) if user else "hf_" + "x" * 34)
        return {"--push-to": target}

    return arrange


def push_over_a_model(stage: Stage) -> Arguments:
    return push(stage.publish("carol/model", "green"), "carol")(stage)


def cache_that_cannot_be_written(stage: Stage) -> Arguments:
    stage.patch.setenv("FEATCAL_CACHE", str(stage.write("cache", "a file")))
    stage.write("old/config.json", (stage.folder / "red" / "config.json").read_bytes())
    torch.save(load_file(stage.folder / "red" / "model.safetensors"), stage.folder / "old" / "pytorch_model.bin")
    return {"--expert": f"red={stage.folder / 'old'}", "--allow-pickle": ""}


CASES: list[Case] = [
    (options(merged="nobody/nothing"), ["nobody/nothing"]),
    (options(expert="red=nobody/nothing"), ["nobody/nothing"]),
    (options(expert="red=no\x1b[31mbody/nothing"), ["control character"]),
    (options(expert="red=../../etc"), ["no folder"]),
    (options(expert="red=a/b@"), ["a/b@", "REVISION"]),
    (options(expert="red=a//b"), ["a//b"]),
    (partial(closed, kind="gated"), ["strangers/gated is gated", "HF_TOKEN"]),
    (partial(closed, kind="private"), ["strangers/private", "private"]),
    (dataset_in_place_of_a_model, ["is a dataset", "--data"]),
    (missing_revision, ["no revision v7"]),
    (listing("strangers/above", lists("../../../escaped.json")), ["outside of itself", "../../../escaped.json"]),
    (listing("strangers/root", lists("/tmp/escaped.json")), ["outside of itself", "/tmp/escaped.json"]),
    (listing("strangers/inside", lists("a/../../../escaped.json")), ["outside of itself"]),
    (listing("strangers/dot", lists("./config.json")), ["outside of itself"]),
    (listing("strangers/null", lists("a\0b.json")), ["outside of itself", "a\\x00b.json"]),
    (listing("strangers/config", is_huge("config.json", 2**31)), ["config.json", "2,147,483,648 bytes"]),
    (listing("strangers/words", is_huge("tokenizer.json", 2**31)), ["tokenizer.json", "2,147,483,648 bytes"]),
    (listing("strangers/terabytes", is_huge("model.safetensors", 2**60)), ["model.safetensors"]),
    (listing("strangers/no-config", lambda repo: repo.commits[repo.refs["main"]].pop("config.json")), ["config.json"]),
    (pickles_on_the_hub, ["no safetensors", "--allow-pickle"]),
    (adapter_that_names_a_folder_here, ["strangers/adapter", "path on its author's machine", "BASE+"]),
    (card_that_names_a_folder_here, ["the base of strangers/merged", "path on its author's machine"]),
    (card_that_unfolds, ["nothing says what the base"]),
    (huge_card, ["README.md has 11,000,000 bytes"]),
    (offline, ["offline mode", "never-seen"]),
    (options(push_to="user/result"), ["needs a token", "HF_TOKEN"]),
    (push("user/result", ""), ["does not accept the token"]),
    (push("reader/result", "reader", "read"), ["may only read"]),
    (push("bob/result", "alice"), ["bob", "alice"]),
    (push_over_a_model, ["already holds a model", "--create-pr"]),
    (cache_that_cannot_be_written, ["cache folder", "FEATCAL_CACHE"]),
    (options(device="cuda:99"), ["cuda:99", "cpu"]),
]
