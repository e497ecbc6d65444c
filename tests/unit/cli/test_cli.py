"""What the command line shows, and where."""

import io
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml
from command_line import LOCAL, Capsys, featcal_inside, run_line, succeed
from hub_server import HubServer
from outcome import weights
from pydantic import Field
from rich.console import Console

from featcal_cli.cli.commands import app
from featcal_cli.cli.console import ERR, show_error, show_falling_drift
from featcal_cli.cli.main import main
from featcal_cli.cli.options import list_keys, with_groups
from featcal_cli.cli.results import describe_download, list_next_steps
from featcal_cli.hub.push import Pushed
from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.recipe.reading import collect_overrides, print_shipped, read_draft
from featcal_cli.recipe.schema import AsOption, Calibration, Data
from featcal_cli.reporting.report import Report, TaskDrift
from featcal_cli.runtime.errors import EXIT_CODES, FeatCalError, SeveralErrors
from featcal_cli.workflows.session import RunOptions


def test_what_libraries_warn_their_developers_of_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal_cli.cli.main.app", lambda *_, **__: warnings.warn("another type", stacklevel=1))
    monkeypatch.setattr("sys.argv", ["featcal", "doctor"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        with pytest.raises(SystemExit):
            main()
    assert not shown


def test_every_option_that_is_a_recipe_key_is_declared_in_the_schema_alone(capsys: Capsys) -> None:
    """A key that is marked there is an option of a command, with the key's sentence as its help."""

    class Wider(Calibration):
        passes: Annotated[int, AsOption("N")] = Field(default=3, description="Passes over the examples.")

    given: list[dict[str, Any]] = []
    probe = typer.Typer()

    @probe.command()
    @with_groups(settings=list_keys(Wider))
    def run(*, settings: Mapping[str, Any]) -> None:
        given.append(dict(settings))

    typer.main.get_command(probe)(["--passes", "5", "--alpha", "0.25"], standalone_mode=False)
    assert {key: value for key, value in given[0].items() if value is not None} == {"passes": 5, "alpha": 0.25}
    with pytest.raises(SystemExit):
        typer.main.get_command(probe)(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Passes over the examples [3]." in shown and "featcal|paper" in shown


def test_every_exit_code_is_in_the_help_by_its_entry_beside_the_errors() -> None:
    kinds: list[type[FeatCalError]] = [FeatCalError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.exit_code for kind in kinds} <= EXIT_CODES.keys()
    shown = " ".join(str(app.info.epilog).split())
    assert [code for code, meaning in EXIT_CODES.items() if f"{code} {meaning}" not in shown] == []


def test_the_help_of_calibrate_fits_on_two_screens() -> None:
    parameters = typer.main.get_command(app).commands["calibrate"].params  # type: ignore[attr-defined]
    assert sum(parameter.param_type_name == "option" for parameter in parameters) <= 38


def test_results_go_to_stdout_and_the_rest_to_stderr(vit_job: Path, capsys: Capsys) -> None:
    run = featcal_inside(capsys, "calibrate", {**LOCAL, "-o": "out"})
    assert run.code == 0
    assert "red" in run.stdout and "calibrated" in run.stdout and "out" in run.stdout
    assert "settings: method featcal, ridge" in run.stderr and "README.md how to load" in run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert run.shown.splitlines()[-3:] == [  # vit's task says nothing of evaluation, and it writes no text
        "out/drift.png shows the drift by block, README.md how to load the model.",
        "Next: this command with --push-to USER/NAME.",
        "The merged model is unchanged.",
    ]
    quiet = featcal_inside(capsys, "calibrate", {**LOCAL, "-o": "out", "-q": "", "--overwrite": ""})
    assert (quiet.code, quiet.stderr, quiet.stdout.partition(" in ")[0]) == (0, "", run.stdout.partition(" in ")[0])
    ending = r"Mean distance of outputs fell by \d+ % in .* s; the calibrated model is in out\.$"
    assert re.search(ending, run.stdout.strip().replace("\n", " "))
    printed = featcal_inside(capsys, "calibrate", {**LOCAL, "-o": "out", "--json": "", "--overwrite": ""})
    assert printed.code == 0 and printed.stderr == ""
    report = json.loads(printed.stdout)
    assert (report.pop("output"), report.pop("pushed")) == ("out", None)
    assert report == json.loads((vit_job / "out" / "featcal_report.json").read_text())


def test_what_comes_next_fits_in_three_short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"merged": "user/merged", "tasks": {"red": {"evaluate": {"split": "test"}}}}
    drift = {"red": TaskDrift(0.4, 0.2, None, 0.9, 0.95, held_out=True)}
    report = Report("0.1.0", recipe, {}, {}, [], drift, {}, loading={"model_class": "LlamaForCausalLM"})
    lines = list_next_steps(report, Path("my out"), None, RunOptions())
    assert lines[1] == "Next: `featcal evaluate 'my out'`, or this command with --push-to USER/NAME."
    assert lines[2] == "vLLM serves it, llama.cpp makes a GGUF. The merged model is unchanged." and len(lines) == 3
    assert max(map(len, lines)) <= 80
    pushed = Pushed("https://huggingface.co/user/it", "0" * 40, None)
    how = RunOptions(device="cpu", trust_remote_code=True, overwrite=True)
    kept = "Next: `featcal evaluate out --device cpu --trust-remote-code`."
    assert list_next_steps(report, Path("out"), pushed, how)[1] == kept
    over = list_next_steps(report, Path("out"), pushed, replace(how, overwrite_repo=True))
    assert over[2] == "vLLM serves it, llama.cpp makes a GGUF. `git revert 0000000` undoes the push."
    assert max(map(len, over)) <= 80
    by_method = replace(report, recipe={**recipe, "merged": {"method": "average"}}, loading={})
    assert len(list_next_steps(by_method, Path("out"), None, how)) == 2, "there is no merged model to go back to"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "featcal")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list_next_steps(report, Path("out"), pushed, how)[1] == kept  # evaluate refuses --gpus
    worse = replace(report, drift={"red": replace(drift["red"], after=0.5)})
    assert "--push-to" not in "".join(list_next_steps(worse, Path("out"), None, how))


def test_recipes_are_listed_and_printed(capsys: Capsys) -> None:
    assert "clip-vit-b32-8" in featcal_inside(capsys, "recipes", {}).stdout
    assert featcal_inside(capsys, "recipes", {"": "demo"}).stdout == print_shipped("demo")
    wrong = featcal_inside(capsys, "recipes", {"": "demmo"})
    assert wrong.code == 2 and "did you mean demo?" in wrong.stderr


def test_relative_paths_work_and_run_again_from_anywhere(
    vit_job: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed(capsys, "calibrate", LOCAL)
    (vit_job / "elsewhere").mkdir()
    monkeypatch.chdir(vit_job / "elsewhere")
    succeed(capsys, "calibrate", {"-r": "../merged-featcal/featcal.yaml", "-o": "again"})
    assert weights(vit_job / "merged-featcal") == weights(vit_job / "elsewhere" / "again")
    monkeypatch.chdir(vit_job / "merged")
    beside = {"--base": "../base", "--expert": "red=../red", "--data": "red=../red.safetensors"}
    succeed(capsys, "calibrate", {**LOCAL, **beside, "merged": ".", "-o": "../out"})
    assert weights(vit_job / "out") == weights(vit_job / "merged-featcal")


def test_a_saved_dry_run_is_the_job(vit_job: Path, hub: HubServer, capsys: Capsys) -> None:
    for name in ("merged", "base", "red"):
        hub.add_repo(f"saved/{name}", vit_job / name)
    data = f"red={vit_job / 'red.safetensors'}"
    given = {"merged": "saved/merged", "--base": "saved/base", "--expert": "red=saved/red", "--data": data, "-n": 8}
    job = vit_job / "job.yaml"
    saving = {**given, "--dry-run": "", "--save": job, "--json": ""}
    run = succeed(capsys, "calibrate", saving)
    recipe, text = json.loads(run.stdout)["recipe"], job.read_text()
    saved = yaml.safe_load(text)
    assert all(saved[key] == recipe[key] for key in ("merged", "base", "calibration")) and "output" not in saved
    assert re.search(r"merged: saved/merged@[0-9a-f]{40}\n", text) and "#   base: the command line" in text
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert not any(str(vit_job) in line for line in comments)
    assert list(vit_job.glob(".job*")) == []
    again = featcal_inside(capsys, "calibrate", saving)
    assert again.code == 2 and "--overwrite" in again.stderr and again.stdout == "" and job.read_text() == text
    for options, out in ((given, "direct"), ({"-r": job}, "saved")):
        succeed(capsys, "calibrate", {**options, "-o": out, "-q": ""})
    assert weights(vit_job / "direct") == weights(vit_job / "saved")
    made = (vit_job / "saved" / "featcal.yaml").read_text()
    assert made.startswith("# Written by featcal ") and str(vit_job) not in made.partition("\nmerged:")[0]
    direct = yaml.safe_load((vit_job / "direct" / "featcal.yaml").read_text())
    for place in (direct["merged"], direct["base"], direct["tasks"]["red"]["expert"]):
        assert re.fullmatch(r"saved/\w+@[0-9a-f]{40}", place)


def test_columns_and_splits_are_set_on_the_command_line(tmp_path: Path, hub: HubServer) -> None:
    """Beside --data, over a recipe's data, and of data that is found."""
    beside = collect_overrides(merged="a/m", data=["red=x/y"], columns=["red=text:a, label:b"])
    assert read_draft(None, beside).tasks["red"].data == Data(dataset="x/y", columns={"text": "a", "label": "b"})
    file = tmp_path / "r.yaml"
    file.write_text("merged: a/m\ntasks: {red: {data: {dataset: x/y, config: z, split: train, columns: {text: a}}}}")
    over = collect_overrides(columns=["red=label:b"], split=["red=test"])
    wanted = Data(dataset="x/y", config="z", split="test", columns={"text": "a", "label": "b"})
    assert read_draft(file, over).tasks["red"].data == wanted
    cards = {"m": "base_model: [found/red, found/green]", "red": "base_model: found/base\ndatasets: [found/data]"}
    cards["green"], cards["base"] = cards["red"], "license: mit"
    for name, card in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\n{card}\n---\n")
        (tmp_path / name / "config.json").write_text("{}")
        hub.add_repo(f"found/{name}", tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    hub.add_repo("found/data", tmp_path / "data", kind="dataset")
    over = collect_overrides(merged="found/m", columns=["red=text:a"], split=["green=test"])
    found = find_lineage(read_draft(None, over)).recipe.tasks
    assert found["red"].data == Data(dataset="found/data", columns={"text": "a"})
    assert found["green"].data == Data(dataset="found/data", split="test")


@pytest.mark.parametrize(
    ("typed", "expected"),
    {
        "calibrate x --rigde 3": ("featcal calibrate", "did you mean --ridge?"),
        "inspect-drift x --pot y.png": ("featcal inspect-drift", "did you mean --plot?"),
        "inspect-drift x --picture y.png": (
            "featcal inspect-drift", "see its options and examples: featcal inspect-drift --help",
        ),
        "inspect-drift x --alpha": ("featcal inspect-drift", "only featcal calibrate has this option"),
        "calibrate x --alpha": ("featcal calibrate", "see its options and examples: featcal calibrate --help"),
        "calibrate x -n 0": ("featcal calibrate", "the default is 256"),
        "calibrate x --ridge -1": ("featcal calibrate", "give --ridge another value, or leave it out"),
        "calibrate x --device gpu": ("featcal calibrate --device", "give auto, cpu or cuda[:K]"),
        "calibrat x": ("featcal", "did you mean 'calibrate'?"),
    }.items(),
)  # fmt: skip
def test_a_wrong_option_is_told_with_verb_and_help(typed: str, expected: tuple[str, str], capsys: Capsys) -> None:
    run = run_line(capsys, typed.split())
    what, place, fix = run.stderr.strip().split("\n")
    assert run.code == 2 and (place, fix) == (f"  in: {expected[0]}", f"  fix: {expected[1]}")
    assert "possible" not in what.lower() and "did you mean" not in what.lower()


def test_numbers_are_told_as_they_were_typed(capsys: Capsys) -> None:
    told = [run_line(capsys, ["calibrate", "x", *typed]).stderr for typed in (["--ridge", "-1"], ["--alpha", "1.5"])]
    assert "--ridge must be at least 0, not -1\n" in told[0] and "--alpha must be at most 1, not 1.5\n" in told[1]


@pytest.mark.parametrize("words", [("-h",), ("help",), ("calibrate", "-h"), ("help", "calibrate")])
def test_help_is_asked_for_in_any_usual_way(words: tuple[str, ...], capsys: Capsys) -> None:
    usual = [word for word in words if word not in ("-h", "help")]
    asked, known = run_line(capsys, words), run_line(capsys, [*usual, "--help"])
    assert (asked.code, asked.stdout) == (0, known.stdout) and "Usage:" in known.stdout
    assert featcal_inside(capsys, "-V", {}).stdout == featcal_inside(capsys, "--version", {}).stdout


@pytest.mark.usefixtures("vit_job")
def test_a_command_to_type_again_keeps_gpus(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "featcal")
    monkeypatch.setenv("WORLD_SIZE", "2")
    typed = {**LOCAL, "--dry-run": "", "--save": "job.yaml", "--device": "cpu"}
    saved = featcal_inside(capsys, "calibrate", typed).stderr
    assert "`featcal --gpus 2 calibrate -r job.yaml --device cpu`" in saved
    asked = featcal_inside(capsys, "calibrate", {**LOCAL, "--expert": None, "--strict": ""}).stderr
    assert "featcal --gpus 2 calibrate merged --base base --data red=red.safetensors -n 8 --strict" in asked


def test_falling_drift_is_shown_of_many_tasks_in_few_lines() -> None:
    drifts = {f"task {number}": [(0.4, 0.2), (0.8, 0.4)] for number in range(20)}
    out = Console(file=io.StringIO(), width=80, highlight=False)
    out.print(show_falling_drift(drifts, by_outputs=True))
    assert isinstance(out.file, io.StringIO)
    lines = [line.rstrip() for line in out.file.getvalue().splitlines()]
    assert lines[0] == "drift of features, merged → calibrated; it may grow where outputs come nearer"
    assert lines[1] == "task 0      ▂▄  0.800 → 0.400  -50 %"
    assert lines[-1] == "mean of 20      0.800 → 0.400  -50 %"
    assert len(lines) == 10


def test_help_shows_examples_as_they_are_typed(capsys: Capsys) -> None:
    shown = featcal_inside(capsys, "calibrate", {"--help": ""}).stdout
    assert "--base openai/clip-vit-base-patch32 \\\n      --expert mnist=" in shown
    assert "<bool>" not in shown and "<str>" not in shown
    assert "featcal inspect-drift user/merged --max-drift 0.8\n" in featcal_inside(capsys, "--help", {}).stdout
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        examples = featcal_inside(capsys, name, {"--help": ""}).stdout.partition(" Examples\n")[2]
        assert f"featcal {name}" in examples and max(map(len, examples.splitlines())) <= 80


def test_a_message_breaks_no_command_and_lines_of_several_hang_below_their_first(capsys: Capsys) -> None:
    what = "word " * 20 + "`featcal recipes clip-vit-b32-8` shows one"
    command = "pip install --force-reinstall " + "long-name-of-a-package-" * 4
    show_error(FeatCalError(what, where="here", fix="install it again", command=command))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["  fix: install it again:", f"    {command}"]
    assert any("`featcal recipes clip-vit-b32-8`" in line for line in lines)
    assert max(map(len, lines[:-1])) <= 80
    errors = [FeatCalError("word " * 30, where=place) for place in ("here", "there")]
    show_error(SeveralErrors("2 mistakes", errors, where="this plan", fix="mend them"))
    lines = capsys.readouterr().err.splitlines()[1:-2]
    assert [line[:11] for line in lines if line.startswith("    - ")] == ["    - here:", "    - there"]
    assert len(lines) > 4 and all(line.startswith(("    - ", "      word")) for line in lines)


def test_a_narrow_terminal_cuts_no_more_off(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "word " * 12 + "end"
    monkeypatch.setattr(ERR, "width", 20)
    show_error(FeatCalError(what, where="here", fix="install it again"))
    assert what in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("missing", "here", "told"),
    [
        (0, 2**30, "nothing"),
        (700, 0, "0.7 KiB"),
        (3 * 2**30, 0, "3.0 GiB"),
        (3 * 2**30, 2**29, "3.0 GiB; 0.5 GiB are here already"),
    ],
)
def test_a_download_is_told_with_what_is_here(missing: int, here: int, told: str) -> None:
    assert describe_download(missing, here) == told
