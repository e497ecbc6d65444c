"""Repos that are not there, not for us, or not to be trusted; and machines on which a job cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from bad_input import LAUGHS, Arguments, Case, Stage, case, options
from safetensors.torch import load_file


@case
def closed(stage: Stage, kind: str) -> Arguments:
    stage.hub.add_repo(f"strangers/{kind}", stage.folder / "red", gated=kind == "gated", private=kind == "private")
    return {"--expert": f"red=strangers/{kind}"}


@case
def listing(stage: Stage, name: str, path: str, /, **said: Any) -> Arguments:
    """An expert's repo, whose listing has a file of this path, and may say what is not so of its size."""
    repo = stage.hub.repos["model", stage.publish(name, "red")]
    files = repo.commits[repo.refs["main"]]
    files[path] = replace(files["config.json"], **said)
    return {"--expert": f"red={name}"}


def save_pickled(stage: Stage) -> None:
    """The expert in the folder old, with nothing but a pickle."""
    stage.write("old/config.json", (stage.folder / "red" / "config.json").read_bytes())
    torch.save(load_file(stage.folder / "red" / "model.safetensors"), stage.folder / "old" / "pytorch_model.bin")


def pickles_on_the_hub(stage: Stage) -> Arguments:
    save_pickled(stage)
    return {"--expert": f"red={stage.publish('strangers/old', 'old')}"}


def adapter_that_names_a_folder_here(stage: Stage) -> Arguments:
    stage.write(
        "adapter/adapter_config.json",
        f'{{"peft_type": "LORA", "base_model_name_or_path": "{stage.folder / "base"}", "r": 2}}',
    )
    stage.write("adapter/adapter_model.safetensors", (stage.folder / "red" / "model.safetensors").read_bytes())
    return {"--expert": f"red={stage.publish('strangers/adapter', 'adapter')}"}


@case
def card(stage: Stage, name: str, text: str) -> Arguments:
    """The merged model on the Hub with this card, in which {} is the stage's folder."""
    stage.write("merged/README.md", text.replace("{}", str(stage.folder)))
    return {"merged": stage.publish(name, "merged"), "--base": None}


def offline(stage: Stage) -> Arguments:
    stage.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return {"--expert": "red=strangers/never-seen"}


def cache_that_cannot_be_written(stage: Stage) -> Arguments:
    stage.patch.setenv("FEATCAL_CACHE", str(stage.write("cache", "a file")))
    save_pickled(stage)
    return {"--expert": f"red={stage.folder / 'old'}", "--allow-pickle": ""}


def pickles_that_lack_a_shard(stage: Stage) -> Arguments:
    save_pickled(stage)
    (stage.folder / "old" / "pytorch_model.bin").unlink()
    stage.write("old/pytorch_model.bin.index.json", '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    return {"--expert": f"red={stage.folder / 'old'}", "--allow-pickle": ""}


CASES: list[Case] = [
    (options(merged="nobody/nothing"), ["nobody/nothing"]),
    (options(expert="red=no\x1b[31mbody/nothing"), ["control character"]),
    (options(expert="red=../../etc"), ["no folder"]),
    (options(expert="red=a/b@"), ["a/b@", "REVISION"]),
    (options(expert="red=a//b"), ["a//b"]),
    (closed("private"), ["strangers/private", "private"]),
    (
        lambda stage: {"--expert": f"red={stage.publish('strangers/rows', 'red', 'dataset')}"},
        ["there is no model strangers/rows"],
    ),
    (listing("strangers/above", "../../../escaped.json"), ["outside of itself", "../../../escaped.json"]),
    (listing("strangers/root", "/tmp/escaped.json"), ["outside of itself", "/tmp/escaped.json"]),
    (listing("strangers/dot", "./config.json"), ["outside of itself"]),
    (listing("strangers/null", "a\0b.json"), ["outside of itself", "a\\x00b.json"]),
    (listing("strangers/config", "config.json", size=2**31), ["config.json", "2,147,483,648 bytes"]),
    (listing("strangers/terabytes", "model.safetensors", size=2**60), ["model.safetensors"]),
    (adapter_that_names_a_folder_here, ["strangers/adapter", "path on its author's machine", "BASE+"]),
    (card("strangers/merged", "---\nbase_model: {}/base\n---\n"), ["base of strangers/merged", "its author's machine"]),
    (card("strangers/laughs", f"---\n{LAUGHS}\nbase_model: *a11\n---\n"), ["nothing says what the base"]),
    (card("strangers/long", "x" * 11_000_000), ["README.md has 11,000,000 bytes"]),
    (offline, ["offline mode", "never-seen"]),
    (cache_that_cannot_be_written, ["cache folder", "FEATCAL_CACHE"]),
    (pickles_that_lack_a_shard, ["00002.bin cannot be read: No such file", "download the file again"]),
    (options(device="cuda:999"), ["no device cuda:999", "cpu"]),
]
