"""Options that say too little, too much, or what cannot be."""

from __future__ import annotations

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
    (options(merged=None, merge="slerp"), ["merged", "average"]),
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
    (options(token_weights="last"), ["token_weights", "uniform"]),
    (options(device="abacus"), ["--device", "cpu"]),
    (options(device="meta"), ["--device", "cpu"]),
    (options(merged="m" * 300), ["mmm"]),
    (options(o="o" * 300), ["--output"]),
    (options(data="red=" + "d" * 300), ["ddd"]),
    (options(data="red=rows.jsonl:a"), ["rows.jsonl"]),
    (options(push_to="name"), ["--push-to", "USER/name"]),
    (options(push_to="user/na me"), ["user/na me", "USER/NAME"]),
    inspect(plot="drift.gif", words=["drift.gif", ".png or .svg"]),
    inspect(html="nowhere/drift.html", words=["no folder", "nowhere"]),
    inspect(compare="nobody/nothing", words=["nobody/nothing"]),
]
