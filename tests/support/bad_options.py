"""Options that say too little, too much, or what cannot be; recipes that are none, that ask for what there is not, or
that unfold to more than any memory holds; repos that are not there, not for us, or not to be trusted; and machines on
which a job cannot run."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bad_input import LAUGHS, MERGES, Arguments, Arrange, Case, Stage, case, options
from safetensors.torch import load_file

inspect = partial(options, command="inspect-drift", o=None)


def recipe(content: str | bytes, **others: object) -> Arrange:
    return options({"r.yaml": content}, r="{}/r.yaml", **others)


def data(**keys: str) -> Arrange:
    """Text for the task red, with these keys in the recipe."""
    listed = ", ".join(f"{key}: {value}" for key, value in keys.items())
    content = f"tasks: {{red: {{data: {{path: rows.jsonl, {listed}}}}}}}"
    rows = '{"text": "w2 w3", "other": "w4 w5"}\n' * 20
    return options({"r.yaml": content, "rows.jsonl": rows}, r="{}/r.yaml", data=None)


CASES: list[Case] = [
    (options({"thesis/config.json": "{}"}, o="{}/thesis", overwrite=""), ["featcal made"]),
    (options({"note.txt": "mine"}, o="{}/note.txt/out"), ["note.txt", "--output"]),
    (options({"note.txt": "mine"}, o="{}/note.txt", overwrite=""), ["featcal made"]),
    (options({"merged/featcal_report.json": "{}"}, o="{}/merged", overwrite=""), ["would replace", "--output"]),
    (options(o=".", overwrite=""), ["would replace", "--output"]),
    (options(o="{}/green"), ["exists", "--overwrite"]),
    (options(expert=["red={}/red", "red={}/green"]), ["task red is given twice", "--expert"]),
    (options(data=["red={}/red.safetensors", "blue={}/red.safetensors"]), ["blue", "--expert"]),
    (options(expert="red"), ["--expert", "TASK="]),
    (options(expert="=x/y"), ["--expert", "TASK="]),
    (options(base=None), ["base", "--base"]),
    (options(data=None), ["data", "--data red="]),
    (options(merged=None), ["merged", "--merge"]),
    (options(merge="average"), ["both", "--merge"]),
    (options(merged=None, merge="slerp"), ["--merge", "average"]),
    (options(merged=None, merge="task_arithmetic:x"), ["scale", "must be a valid number"]),
    (options(merged=None, merge="task_arithmetic:nan"), ["scale"]),
    (options(merged=None, merge="ties:0.3:2"), ["density", "1"]),
    (options(merged=None, merge="ties:0.3:0.2:1"), ["--merge", "ties has no seed"]),
    (options(merged=None, merge="average:0.7"), ["--merge", "average has no scale", "such as task_arithmetic:0.3"]),
    (options(merged=None, merge="dare_ties:0.3:0.2:x"), ["seed", "valid integer"]),
    (options(merged=None, merge="dare_ties:0.3:0.2:1:1"), ["METHOD[:SCALE"]),
    (options(alpha=1.5), ["alpha", "1"]),
    (options(alpha="nan"), ["alpha", "finite"]),
    (options(ridge=-1), ["ridge", "0"]),
    (options(rho="inf"), ["rho", "finite"]),
    (options(seed=10**30), ["seed"]),
    (options(refine=""), ["expert red has no head on merged's body", "leave out --refine"]),
    (options(method="best"), ["--method", "featcal or paper"]),
    (options(select="preset"), ["no such option: --select", "--method featcal and --method paper"]),
    (options(norms="all"), ["no such option: --norms", "write norms: in the section calibration: of a recipe"]),
    (options(commit_message="x"), ["no such option: --commit-message", "commit_message: in the section output:"]),
    (options(dtype="float64"), ["dtype", "float32"]),
    (options(device="meta"), ["--device", "cpu"]),
    (options(merged="m" * 300), ["mmm"]),
    (options(o="o" * 300), ["--output"]),
    (options(data="red=rows.jsonl:a"), ["rows.jsonl"]),
    (options(data="red={}/red.safetensors:test"), ["red.safetensors, and --split TASK=test"]),
    (options(push_to="name"), ["--push-to", "USER/name"]),
    (options(push_to="user/na me"), ["user/na me", "USER/NAME"]),
    (options({"r.yaml": "calibration: {seed: 7}"}, r="{}/r.yaml", log_file="{}/r.yaml"), ["--log-file", "write over",
     "--recipe"]),
    (options(log_file="{}/red.safetensors"), ["--log-file", "write over", "red.safetensors"]),
    (options(log_file="{}/merged/log.jsonl"), ["--log-file", "write into", "merged"]),
    (options(log_file="{}/out"), ["--log-file", "--output"]),
    # too long with what the hidden folder's name adds, 251 and more
    (options(o="{}/" + "x" * 250), ["File name too long", "--output"]),
    (options({".out.featcal": "mine"}, o="{}/out"), [".out.featcal", "choose another --output"]),
    (options(log_file="{}/nowhere/log.jsonl"), ["--log-file", "nowhere"]),
    (options(log_file="{}"), ["--log-file", "folder"]),
    (options(save="job.yaml"), ["--save", "--dry-run"]),
    (options(dry_run="", save="job.json"), ["--save", "job.yaml"]),
    (options(dry_run="", save="nowhere/job.yaml"), ["--save", "no folder"]),
    (options({"job.yaml": "mine"}, dry_run="", save="{}/job.yaml"), ["--save", "exists", "--overwrite"]),
    (options(seed="1e3"), ["--seed", "integer"]),
    (options(ridge="much"), ["--ridge", "number"]),
    (options(batch_size=0), ["--batch-size", "1"]),
    (options(device="c\u00fcda"), ["--device", "cpu"]),
    (options(log_file=" "), ["--log-file is empty"]),
    (options(merged=" "), ["is empty"]),
    (options(columns="red"), ["--columns", "ROLE:COLUMN"]),
    (options(columns="red=text"), ["--columns red=…", "ROLE:COLUMN"]),
    (options(columns="red=txt:a"), ["--columns red=…", "'txt'", "text_pair"]),
    (options(columns=["red=text:a", "red=text:b"]), ["two columns for the role text"]),
    (options(columns="read=text:a"), ["the task read", "did you mean red?"]),
    (options(columns="red=text:a"), ["columns cannot be set for a .safetensors file"]),
    (options(split="red=test"), ["split cannot be set for a .safetensors file"]),
    (options(split=["red=a", "red=b"]), ["given twice", "--split"]),
    (options(data="red=a/b::train", split="red=test"), ["--data red=…", "--split red=…"]),
    (inspect({"rows.png": "mine"}, data="red={}/rows.png", plot="{}/rows.png"), ["--plot", "write over"]),
    (inspect(plot="a.png", html="a.png"), ["--html", "--plot"]),
    (inspect(max_drift="nan"), ["--max-drift"]),
    (inspect(max_drift="inf"), ["--max-drift", "finite"]),
    # before anything else is looked at
    (inspect(merged="{}/no-model", plot="drift.gif"), ["drift.gif", ".png or .svg"]),
    (inspect(plot="drift"), ["drift.png"]),
    (inspect(html="drift.svg"), ["drift.html"]),
    (inspect(markdown="drift.txt"), ["drift.md"]),
    (inspect(plot="nowhere/drift.png"), ["there is no folder nowhere"]),
    (inspect(html="nowhere/drift.html"), ["there is no folder nowhere"]),
    (inspect(compare="nobody/nothing"), ["nobody/nothing"]),
    (options(r="demmo"), ["demmo", "did you mean demo"]),
    (options(r="{}/merged"), ["no recipe", "merged"]),
    (recipe("a: [1"), ["r.yaml", "YAML", "line 1"]),
    (recipe("merged: \xe4".encode("latin-1")), ["r.yaml", "UTF-8"]),
    (recipe("- merged"), ["r.yaml", "not a mapping"]),
    (recipe(""), ["r.yaml", "not a mapping"]),
    (recipe("merged: a\n---\nmerged: b"), ["r.yaml", "2 documents"]),
    (recipe("base: a/b\nbase: c/d"), ["r.yaml", "the key base is in line 1 and again in line 2"]),
    (recipe(LAUGHS), ["r.yaml", "unfolds"]),
    (recipe(MERGES), ["r.yaml", "unfolds"]),
    (recipe("tasks: &a [*a]"), ["r.yaml", "contains itself"]),
    (recipe(f"tasks: {'[' * 70}{']' * 70}"), ["r.yaml", "inside each other"]),
    (recipe(f"tasks: {'[' * 5000}"), ["r.yaml", "YAML"]),
    (recipe(f"merged: {'x' * 1_000_001}"), ["r.yaml", "longer"]),
    (recipe("merged: !!python/object/apply:os.system [exit]"), ["r.yaml", "YAML", "python/"]),
    (recipe("? [a, b]\n: c"), ["r.yaml"]),
    (recipe("7: seven"), ["r.yaml, line 1", "unknown key 7"]),
    (recipe(f"{'k' * 900}: v"), ["unknown key kkk", "..."]),
    (recipe("calibration: {examples: 10000000000000}", n=None), ["examples", "1000000000"]),
    (recipe("calibration: {ridge: .nan}"), ["ridge", "finite"]),
    (recipe("calibration: [1, 2]"), ["calibration"]),
    (recipe("tasks: {red: {evaluate: {metric: luck}}}"), ["metric", "accuracy"]),
    (recipe('base: "user/\\e[31mred"', base=None), ["base", "control character", "\\x1b"]),
    (recipe('merged: "user/a\\0b"', merged=None), ["merged", "control character"]),
    (recipe("merged: {method: slerp}", merged=None), ["merged", "average"]),
    (recipe("merged: {method: task_arithmetic, scale: .inf}", merged=None), ["scale", "finite"]),
    (recipe("tasks: {red: {data: {}}}", data=None), ["either dataset or path"]),
    (recipe("tasks: {red: {data: {dataset: a/b, path: c}}}", data=None), ["either dataset or path"]),
    (recipe("tasks: {red: {data: {path: ., config: en}}}", data=None), ["config cannot be set for a path"]),
    (recipe("tasks: {red: {data: x/y:a:b:c}}", data=None), ["ID[@REVISION]"]),
    (data(template='"{text:>99999999999}"'), ["{text:>99999999999}", "text, other"]),
    (data(columns="{texts: text}"), ["columns.texts", "text_pair"]),
    (recipe("tasks: [1]", expert=None, data=None), ["tasks", "a section of keys"]),
]  # fmt: skip


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


def pickles_that_lack_a_shard(stage: Stage) -> Arguments:
    save_pickled(stage)
    (stage.folder / "old" / "pytorch_model.bin").unlink()
    stage.write("old/pytorch_model.bin.index.json", '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    return {"--expert": f"red={stage.folder / 'old'}", "--allow-pickle": ""}


def adapter_that_names_a_folder_here(stage: Stage) -> Arguments:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(stage.folder / "base"), "r": 2}
    stage.write("adapter/adapter_config.json", json.dumps(config))
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


CASES += [
    (options(merged="nobody/nothing"), ["nobody/nothing"]),
    (options(expert="red=no\x1b[31mbody/nothing"), ["control character"]),
    (options(expert="red=../../etc"), ["no folder"]),
    (options(expert="red=a/b@"), ["a/b@", "REVISION"]),
    (options(expert="red=a//b"), ["a//b"]),
    (closed("private"), ["strangers/private", "private"]),
    (
        lambda stage: {"--expert": f"red={stage.publish('strangers/rows', 'red', 'dataset')}"},
        ["no model strangers/rows"],
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
