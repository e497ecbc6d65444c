"""Options that say too little, too much, or what cannot be."""

from __future__ import annotations

import os

from bad_input import Arguments, Case, Stage, options


def a_folder_that_is_not_ours(stage: Stage) -> Arguments:
    stage.write("thesis/config.json", "{}")
    return {"-o": stage.folder / "thesis", "--overwrite": ""}


def output_beneath_a_file(stage: Stage) -> Arguments:
    return {"-o": stage.write("note.txt", "mine") / "out"}


def output_that_is_a_file(stage: Stage) -> Arguments:
    return {"-o": stage.write("note.txt", "mine"), "--overwrite": ""}


def output_over_the_merged_model(stage: Stage) -> Arguments:
    stage.write("merged/featcal_report.json", "{}")
    return {"-o": stage.folder / "merged", "--overwrite": ""}


def output_over_the_current_folder(_: Stage) -> Arguments:
    return {"-o": ".", "--overwrite": ""}


def existing_output(stage: Stage) -> Arguments:
    return {"-o": stage.folder / "green"}


def an_expert_twice(stage: Stage) -> Arguments:
    return {"--expert": [f"red={stage.folder / 'red'}", f"red={stage.folder / 'green'}"]}


def data_of_a_task_without_expert(stage: Stage) -> Arguments:
    return {"--data": [f"{task}={stage.folder / 'red.safetensors'}" for task in ("red", "blue")]}


def a_log_over_the_recipe(stage: Stage) -> Arguments:
    recipe = stage.write("r.yaml", "calibration: {seed: 7}")
    return {"-r": recipe, "--log-file": recipe}


def a_log_over_the_data(stage: Stage) -> Arguments:
    return {"--log-file": stage.folder / "red.safetensors"}


def a_log_in_a_model(stage: Stage) -> Arguments:
    return {"--log-file": stage.folder / "merged" / "log.jsonl"}


def a_log_that_is_the_output(stage: Stage) -> Arguments:
    return {"--log-file": stage.folder / "out"}


def a_log_that_nobody_reads(stage: Stage) -> Arguments:
    os.mkfifo(stage.folder / "pipe")
    return {"--log-file": stage.folder / "pipe"}


def an_output_of_too_long_a_name(stage: Stage) -> Arguments:
    return {"-o": stage.folder / ("x" * 250)}  # with what the hidden folder's name adds, 251 and more


def an_output_beside_a_file_in_the_way(stage: Stage) -> Arguments:
    stage.write(".out.featcal", "mine")
    return {"-o": stage.folder / "out"}


def a_log_in_no_folder(stage: Stage) -> Arguments:
    return {"--log-file": stage.folder / "nowhere" / "log.jsonl"}


def a_log_that_is_a_folder(stage: Stage) -> Arguments:
    return {"--log-file": stage.folder}


def a_saved_job_over_a_file(stage: Stage) -> Arguments:
    return {"--dry-run": "", "--save": stage.write("job.yaml", "mine")}


def a_picture_over_the_data(stage: Stage) -> Arguments:
    stage.write("rows.png", "mine")
    return {"command": "inspect-drift", "-o": None, "--data": f"red={stage.folder / 'rows.png'}"} | {
        "--plot": stage.folder / "rows.png"
    }


def one_file_for_two_pictures(_: Stage) -> Arguments:
    return {"command": "inspect-drift", "-o": None, "--plot": "a.png", "--projection": "a.png"}


def inspect(**others: object) -> Case:
    """Arguments of inspect-drift, and the words that the message must have."""
    words = others.pop("words")
    assert isinstance(words, list)
    return options(command="inspect-drift", o=None, **others), words


CASES: list[Case] = [
    (a_folder_that_is_not_ours, ["featcal made"]),
    (output_beneath_a_file, ["note.txt", "--output"]),
    (output_that_is_a_file, ["featcal made"]),
    (output_over_the_merged_model, ["would replace", "--output"]),
    (output_over_the_current_folder, ["would replace", "--output"]),
    (existing_output, ["exists", "--overwrite"]),
    (an_expert_twice, ["task red has two", "--expert"]),
    (data_of_a_task_without_expert, ["blue", "--expert"]),
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
    (a_log_over_the_recipe, ["--log-file", "write over", "--recipe"]),
    (a_log_over_the_data, ["--log-file", "write over", "red.safetensors"]),
    (a_log_in_a_model, ["--log-file", "write into", "merged"]),
    (a_log_that_is_the_output, ["--log-file", "--output"]),
    (a_log_that_nobody_reads, ["--log-file", "nobody reads"]),
    (an_output_of_too_long_a_name, ["File name too long", "--output"]),
    (an_output_beside_a_file_in_the_way, [".out.featcal", "choose another --output"]),
    (a_log_in_no_folder, ["--log-file", "nowhere"]),
    (a_log_that_is_a_folder, ["--log-file", "folder"]),
    (options(save="job.yaml"), ["--save", "--dry-run"]),
    (options(dry_run="", save="job.json"), ["--save", "job.yaml"]),
    (options(dry_run="", save="nowhere/job.yaml"), ["--save", "no folder"]),
    (a_saved_job_over_a_file, ["--save", "exists", "--overwrite"]),
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
    (options(columns="read=text:a"), ["no task 'read'", "did you mean red"]),
    (options(columns="red=text:a"), ["columns cannot be set for a .safetensors file"]),
    (options(split="red=test"), ["split cannot be set for a .safetensors file"]),
    (options(split=["red=a", "red=b"]), ["two of them", "--split"]),
    (options(data="red=a/b::train", split="red=test"), ["--data red=…", "--split red=…"]),
    (a_picture_over_the_data, ["--plot", "write over"]),
    (one_file_for_two_pictures, ["--projection", "--plot"]),
    inspect(max_drift="nan", words=["--max-drift"]),
    inspect(max_drift="inf", words=["--max-drift", "finite"]),
    inspect(plot="drift.gif", words=["drift.gif", ".png or .svg"]),
    inspect(html="nowhere/drift.html", words=["no folder", "nowhere"]),
    inspect(compare="nobody/nothing", words=["nobody/nothing"]),
]
