"""Options that say too little, too much, or what cannot be."""

from __future__ import annotations

import os
from functools import partial

from bad_input import Arguments, Case, Stage, options


def a_log_that_nobody_reads(stage: Stage) -> Arguments:
    os.mkfifo(stage.folder / "pipe")
    return {"--log-file": stage.folder / "pipe"}


inspect = partial(options, command="inspect-drift", o=None)
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
    (options(merged=None, merge="task_arithmetic:x"), ["scale", "task_arithmetic:0.3"]),
    (options(merged=None, merge="task_arithmetic:-1"), ["scale", "0"]),
    (options(merged=None, merge="task_arithmetic:nan"), ["scale"]),
    (options(merged=None, merge="ties:0.3:2"), ["density", "1"]),
    (options(merged=None, merge="ties:0.3:0.2:1"), ["--merge", "ties has no seed"]),
    (options(merged=None, merge="dare_ties:0.3:0.2:x"), ["seed", "whole number"]),
    (options(merged=None, merge="dare_ties:0.3:0.2:1:1"), ["METHOD[:SCALE"]),
    (options(alpha=1.5), ["alpha", "1"]),
    (options(alpha="nan"), ["alpha", "finite"]),
    (options(ridge=-1), ["ridge", "0"]),
    (options(rho="inf"), ["rho", "finite"]),
    (options(n=0), ["examples", "1"]),
    (options(seed=10**30), ["seed"]),
    (options(norms="some"), ["norms", "layernorm"]),
    (options(select="best"), ["select", "preset"]),
    (options(dtype="float64"), ["dtype", "float32"]),
    (options(token_weights="last"), ["--token-weights", "uniform"]),
    (options(device="abacus"), ["--device", "cpu"]),
    (options(device="meta"), ["--device", "cpu"]),
    (options(merged="m" * 300), ["mmm"]),
    (options(o="o" * 300), ["--output"]),
    (options(data="red=" + "d" * 300), ["ddd"]),
    (options(data="red=rows.jsonl:a"), ["rows.jsonl"]),
    (options(push_to="name"), ["--push-to", "USER/name"]),
    (options(push_to="user/na me"), ["user/na me", "USER/NAME"]),
    (
        options({"r.yaml": "calibration: {seed: 7}"}, r="{}/r.yaml", log_file="{}/r.yaml"),
        ["--log-file", "write over", "--recipe"],
    ),
    (options(log_file="{}/red.safetensors"), ["--log-file", "write over", "red.safetensors"]),
    (options(log_file="{}/merged/log.jsonl"), ["--log-file", "write into", "merged"]),
    (options(log_file="{}/out"), ["--log-file", "--output"]),
    (a_log_that_nobody_reads, ["--log-file", "nobody reads"]),
    # too long with what the hidden folder's name adds, 251 and more
    (options(o="{}/" + "x" * 250), ["File name too long", "--output"]),
    (options({".out.featcal": "mine"}, o="{}/out"), [".out.featcal", "choose another --output"]),
    (options(log_file="{}/nowhere/log.jsonl"), ["--log-file", "nowhere"]),
    (options(log_file="{}"), ["--log-file", "folder"]),
    (options(save="job.yaml"), ["--save", "--dry-run"]),
    (options(dry_run="", save="job.json"), ["--save", "job.yaml"]),
    (options(dry_run="", save="nowhere/job.yaml"), ["--save", "no folder"]),
    (options({"job.yaml": "mine"}, dry_run="", save="{}/job.yaml"), ["--save", "exists", "--overwrite"]),
    (options(alhpa=0.3), ["--alhpa", "--alpha"]),
    (options(seed="1e3"), ["--seed", "integer"]),
    (options(ridge="much"), ["--ridge", "number"]),
    (options(ridge="nan"), ["--ridge", "finite"]),
    (options(batch_size=0), ["--batch-size", "1"]),
    (options(batch_size=-4), ["--batch-size", "1"]),
    (options(n=-1), ["--examples (-n)", "1"]),
    (options(device="mps"), ["--device", "cpu"]),
    (options(device="cuda:99999"), ["--device", "cpu"]),
    (options(device="c\u00fcda"), ["--device", "cpu"]),
    (options(commit_message=" "), ["--commit-message is empty"]),
    (options(base=" "), ["--base is empty"]),
    (options(merged=" "), ["is empty"]),
    (options(columns="red"), ["--columns", "ROLE:COLUMN"]),
    (options(columns="red=text"), ["--columns red=…", "ROLE:COLUMN"]),
    (options(columns="red=txt:a"), ["'txt'", "did you mean text"]),
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
    (inspect(plot="drift.gif"), ["drift.gif", ".png or .svg"]),
    (inspect(html="nowhere/drift.html"), ["no folder", "nowhere"]),
    (inspect(compare="nobody/nothing"), ["nobody/nothing"]),
]
