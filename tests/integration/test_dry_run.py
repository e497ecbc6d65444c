"""A dry run shows the whole plan, and ends with all that would stop a run; what it lets pass, a run does."""

import json
import sys
from pathlib import Path

import pytest
from command_line import LOCAL, Capsys, featcal_inside

DRY = {**LOCAL, "--dry-run": "", "-o": "out"}


@pytest.mark.usefixtures("hub")
def test_all_stops_are_said(vit_job: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (vit_job / "out").mkdir()
    (vit_job / "out" / "mine.txt").write_text("mine")
    wrong = {"--push-to": "me/calibrated", "--as-adapter": 999, "--evaluate": ""}
    run = featcal_inside(capsys, "calibrate", {**DRY, **wrong, "--save": "my job.yaml"})
    assert run.code == 2 and run.stderr.count("error:") == 1
    assert "blocks" in run.stdout and "memory" in run.stdout and "push        to me/calibrated" in run.stdout
    # notes stand between these two parts on a terminal, with an empty line above and below
    assert run.stdout.count("\n\n") == 1 and "\n\nmodel  " in run.stdout
    assert "at most 8 to fit and 8 to hold out per task" in run.stdout
    for what in (
        "error: 4 things would stop a run",
        "out: the output folder exists",
        "--push-to me/calibrated: pushing needs a token",
        "--as-adapter 999: the rank of an adapter is at most",
        "no task says how it is evaluated",
    ):
        assert what in run.stderr, run.stderr
    assert "Leave out --dry-run to start" not in run.stderr
    assert "my job.yaml has the whole job; to run it: `featcal calibrate -r 'my job.yaml' --output out" in run.stderr
    as_json = featcal_inside(capsys, "calibrate", {**DRY, **wrong, "--json": ""})
    plan = json.loads(as_json.stdout)
    assert as_json.code == 2 and plan["blocks"] == 2
    assert plan["examples"] == {"red": {"fit": 8, "hold_out": 8}}
    assert [stop["where"] for stop in plan["stops"]][:2] == ["out", "--push-to me/calibrated"]
    assert len(plan["stops"]) == 4 and all(stop["what"] and stop["fix"] for stop in plan["stops"])


@pytest.mark.usefixtures("hub")
def test_a_base_that_is_gone_is_told_with_who_names_it(vit_job: Path, capsys: Capsys) -> None:
    """As of an adapter that was trained on a folder which has the name of no repo."""
    (vit_job / "red" / "README.md").write_text("---\nbase_model: nobody/base\n---\n")
    run = featcal_inside(capsys, "calibrate", {**DRY, "--base": None})
    assert run.code == 2 and "there is no model nobody/base on" in run.stderr
    assert f"in: nobody/base, named by the base_model of {vit_job / 'red'}" in run.stderr
    assert "or name the base: --base REPO" in run.stderr


@pytest.mark.usefixtures("vit_job")
def test_strict_is_looked_at_with_all_rows(capsys: Capsys) -> None:
    """20 rows: of so few that are read at once some are always left over."""
    strict = {**LOCAL, "-n": 20, "--strict": "", "-o": "out", "--method": "paper"}
    for dry in ({}, {"--dry-run": ""}):
        run = featcal_inside(capsys, "calibrate", {**strict, **dry})
        assert run.code == 2 and "--strict has nothing to judge by: all 20 rows of red are fitted" in run.stderr
    assert "blocks" in run.stdout and "20 to fit and 0 to hold out per task" in run.stdout
    enough = featcal_inside(capsys, "calibrate", {**strict, "-n": 8, "--dry-run": ""})
    assert enough.code == 0 and "Leave out --dry-run to start" in enough.stderr


def test_lm_eval_is_missed(vit_job: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("featcal_cli.evaluation.lm_eval_tasks.find_spec", lambda _: None)
    recipe = vit_job / "job.yaml"
    recipe.write_text("merged: merged\ntasks: {red: {evaluate: {lm_eval: {boolq: acc}}}}\n")
    run = featcal_inside(capsys, "calibrate", {**DRY, "merged": None, "-r": recipe, "--evaluate": ""})
    assert run.code == 2 and "lm-eval, which measures language models, is not installed" in run.stderr
    assert "blocks" in run.stdout


def test_blocks_of_another_job_are_seen_unless_dropped(
    vit_job: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run of a merge without numbers, beside one with some."""
    import featcal_cli.workflows.calibrate as module

    average = {**LOCAL, "merged": None, "--merge": "average", "-o": "out"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "shrink_updates", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert featcal_inside(capsys, "calibrate", average).code == 130
    assert list((vit_job / ".out.featcal" / "journal").glob("block-*"))
    other = {**average, "--merge": "ties:0.5:0.4"}
    for dry in ({}, {"--dry-run": ""}):
        run = featcal_inside(capsys, "calibrate", {**other, **dry})
        assert run.code == 2 and "another job is here: merged was average, and is ties:0.5:0.4" in run.stderr
        assert "put that back as it was to go on with it, or add --restart" in run.stderr
    assert "blocks" in run.stdout
    for fits in ({**average, "--dry-run": ""}, {**other, "--dry-run": "", "--restart": ""}):
        assert featcal_inside(capsys, "calibrate", fits).code == 0
    assert featcal_inside(capsys, "calibrate", average).code == 0
