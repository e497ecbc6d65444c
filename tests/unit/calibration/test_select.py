"""Who chooses λ, ρ and α; and what is done where the result is worse than the merged model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
import yaml
from command_line import Run, featcal_inside
from families import FAMILIES, TASKS, Saved, save_family, save_tokenizer
from hub_server import HubServer
from safetensors.torch import save_file

from featcal_cli.calibration.hyperparameters import (
    CAUTIOUS,
    FEATCAL,
    METRICS,
    PAPER,
    Hyperparameters,
    SearchPlan,
    Trial,
    choose_hyperparameters,
    kind_of,
    list_candidates,
    pick_trial,
    take_best,
)
from featcal_cli.recipe.schema import Calibration
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

BY_NAME = {family.name: family for family in FAMILIES}
OPEN: dict[str, Any] = {"ridge": None, "rho": None, "alpha": None}
"""Nothing is given."""
SETTINGS = tuple(OPEN)


def chosen(settings: Mapping[str, Any]) -> dict[str, float]:
    """λ, ρ and α of a report's settings, of one of its candidates, or of a recipe."""
    return {name: settings[name] for name in SETTINGS}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """12 examples of each task to fit, and 8 to hold out."""
    return save_family(tmp_path_factory.mktemp("bert"), BY_NAME["bert"])


@pytest.fixture(scope="module")
def searched(bert: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that searched for all settings."""
    output = tmp_path_factory.mktemp("searched") / "out"
    calibrate(bert.recipe(**OPEN, select="search"), output=output)
    return output


def read_report(output: Path) -> Report:
    return Report.from_json((output / "featcal_report.json").read_text())


def weights(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


def without_further_rows(saved: Saved, folder: Path, count: int = 9) -> dict[str, dict[str, str]]:
    """The tasks of the family, with no more examples than are to be fitted; 9 are too few to hold some of them out."""
    tasks: dict[str, Any] = saved.recipe()["tasks"]  # type: ignore[assignment]
    for task, inputs in saved.inputs.items():
        save_file({name: value[:count].clone() for name, value in inputs.items()}, folder / f"{task}.safetensors")
        tasks[task] = {**tasks[task], "data": str(folder / f"{task}.safetensors")}
    return tasks


class Stages(Listener):
    """What a run was doing, part by part; it may be interrupted when the first block of a part is done."""

    def __init__(self, interrupt: str = "nothing") -> None:
        self.seen: list[str] = []
        self.notes: list[str] = []
        self._interrupt = interrupt

    def stage(self, text: str) -> None:
        self.seen.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: Progress) -> None:
        if progress.finished == 1 and self.seen[-1].startswith(self._interrupt):
            raise KeyboardInterrupt

    @property
    def searched(self) -> bool:
        return any(stage.startswith("searching settings") for stage in self.seen)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "causal"])
def test_what_the_user_gives_is_kept_by_every_candidate(kind: str) -> None:
    given = {"ridge": 0.123, "rho": 1.5, "alpha": 0.7}
    for names in ((), ("ridge",), ("rho",), ("alpha",), ("ridge", "alpha"), ("rho", "alpha")):
        fixed = {name: given[name] for name in names}
        settings = [
            vars(candidate.hyperparameters)
            for candidate in list_candidates(kind, Calibration.model_validate(fixed), METRICS).values()
        ]
        assert all(each[name] == fixed[name] for each in settings for name in names)
        assert all(len({each[name] for each in settings}) > 1 for name in given.keys() - fixed.keys())
        assert len({tuple(each.values()) for each in settings}) == len(settings)


def test_a_search_fills_in_what_the_user_leaves_open(bert: Saved, tmp_path: Path) -> None:
    recipe = bert.recipe(**{**OPEN, "alpha": 0.45}, select="search")
    settings = calibrate(recipe, output=tmp_path / "out").report.settings
    assert settings["alpha"] == 0.45 and {each["alpha"] for each in settings["candidates"]} == {0.45}
    assert len({(each["ridge"], each["rho"]) for each in settings["candidates"]}) > 1
    assert settings["chosen_by"].startswith("the user (alpha), else a search over")


@pytest.mark.parametrize(
    ("calibration", "few", "chosen_by"),
    [
        ({"select": "auto"}, False, "the user"),
        ({"select": "search"}, False, "the user"),
        ({**OPEN, "select": "preset"}, False, "the paper's preset for encoder models"),
        (OPEN, True, "featcal's preset"),
    ],
)
def test_nothing_is_searched_where_nothing_is_to_be_chosen_or_nothing_is_there_to_choose_on(
    bert: Saved, tmp_path: Path, calibration: dict[str, Any], few: bool, chosen_by: str
) -> None:
    recipe, stages = bert.recipe(**calibration), Stages()
    if few:
        recipe["tasks"] = without_further_rows(bert, tmp_path)
    settings = calibrate(recipe, output=tmp_path / "out", listener=stages).report.settings
    assert chosen(settings) == chosen(asdict(PAPER["CLIP"])) or few
    assert settings["metric"] == ("output" if few else "features")
    assert not stages.searched and settings["candidates"] == []
    assert settings["chosen_by"].partition(" (its rows")[0] == chosen_by
    assert any(settings["chosen_by"] in note for note in stages.notes) or not few
    assert few or settings["guard"] == (calibration["select"] != "preset")


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
HEADLESS: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaModel": (SMALL, "causal"),
    "Qwen2Model": (SMALL, "causal"),
    "GPT2Model": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, "causal"),
    "BloomModel": ({"hidden_size": 32, "n_layer": 1, "n_head": 4}, "causal"),
    "Qwen2ForSequenceClassification": (SMALL, "causal"),
    "T5EncoderModel": ({"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4}, "encoder-decoder"),
    "BartModel": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
    "BertModel": (SMALL, "encoder"),
    "RobertaModel": (SMALL, "encoder"),
    "BertGenerationEncoder": (SMALL, "encoder"),
    "CLIPTextModel": (SMALL, "encoder"),
    "ViTModel": (SMALL, "encoder"),
}
"""Classes without a head that generates: what they are made of, and whose preset they have."""


@pytest.mark.parametrize("name", HEADLESS)
def test_a_model_without_its_head_has_the_preset_of_its_blocks(name: str) -> None:
    sizes, kind = HEADLESS[name]
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        assert kind_of(model_class(model_class.config_class(**sizes))) == kind


def test_a_headless_language_model_is_calibrated_with_a_language_models_preset(tmp_path: Path) -> None:
    family = replace(next(family for family in FAMILIES if family.name == "llama"), model="LlamaModel")
    saved = save_family(tmp_path, family)
    settings = calibrate(saved.recipe(**OPEN, select="preset"), output=tmp_path / "out").report.settings
    assert (settings["ridge"], settings["rho"], settings["alpha"]) == (1e-5, 0.5, 0.15)


def test_what_is_left_open_is_featcals_own_choice(bert: Saved, tmp_path: Path) -> None:
    """Without a search, in the metric of outputs; and the recipe that comes out says so."""
    stages = Stages()
    report = calibrate(bert.recipe(**OPEN), output=tmp_path / "out", listener=stages).report
    assert chosen(report.settings) == chosen(asdict(FEATCAL["module"])) and report.settings["metric"] == "output"
    assert not stages.searched and report.settings["chosen_by"] == "featcal's preset" and report.settings["guard"]
    written = yaml.safe_load((tmp_path / "out" / "featcal.yaml").read_text())["calibration"]
    assert {**chosen(written), "metric": written["metric"]} == {**chosen(asdict(FEATCAL["module"])), "metric": "output"}


def run_job(
    capsys: pytest.CaptureFixture[str], saved: Saved, recipe: Mapping[str, Any], output: Path, **options: object
) -> tuple[Run, str]:
    """`featcal calibrate` with a recipe; and what it said in one line."""
    (saved.folder / "job.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    run = featcal_inside(capsys, "calibrate", {"-r": saved.folder / "job.yaml", "-o": output, **options})
    return run, re.sub(r"\s+", " ", run.stderr)


def test_a_search_without_further_rows_is_one_error(
    bert: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {**bert.recipe(**OPEN, select="search"), "tasks": without_further_rows(bert, tmp_path)}
    run, said = run_job(capsys, bert, recipe, tmp_path / "out")
    assert (run.code, run.stdout) == (2, "")
    assert said.count("red has no further examples") == 1 and "--select search" in said
    assert "--select preset" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.featcal").exists()


def test_the_report_lists_every_candidate_and_why_it_was_dropped(searched: Path) -> None:
    settings = read_report(searched).settings
    candidates = settings["candidates"]
    assert len(candidates) > 1 and f"{len(candidates)} candidates" in settings["chosen_by"]
    assert chosen(candidates[0]) == chosen(settings)
    assert len({tuple(chosen(each).values()) for each in candidates}) == len(candidates)
    assert all(each["score"] > 0 and each["drift"] > 0 and each["origin"] for each in candidates)
    through = [each for each in candidates if not each["dropped"]]
    assert through and through[0] == candidates[0]
    assert min(each["score"] for each in through) == candidates[0]["score"]
    assert all(each["blocks"] == 2 for each in through)
    assert all(each["blocks"] < 2 for each in candidates if each["dropped"])


def test_the_recipe_in_the_output_holds_what_was_chosen_and_runs_again_without_a_search(
    searched: Path, tmp_path: Path
) -> None:
    settings = read_report(searched).settings
    written = yaml.safe_load((searched / "featcal.yaml").read_text())["calibration"]
    assert chosen(written) == chosen(settings)
    stages = Stages()
    again = calibrate(searched / "featcal.yaml", output=tmp_path / "again", listener=stages)
    assert not stages.searched and again.report.settings["candidates"] == []
    assert weights(tmp_path / "again") == weights(searched)
    assert [block.modules for block in again.report.blocks] == [block.modules for block in read_report(searched).blocks]


def test_an_interrupted_run_takes_over_what_its_search_has_found(bert: Saved, searched: Path, tmp_path: Path) -> None:
    recipe, output = bert.recipe(**OPEN, select="search"), tmp_path / "out"
    runs = [Stages("searching"), Stages("calibrating"), Stages()]
    for stages in runs[:2]:
        with pytest.raises(KeyboardInterrupt):
            calibrate(recipe, output=output, listener=stages)
    report = calibrate(recipe, output=output, listener=runs[2]).report
    assert [stages.searched for stages in runs] == [True, True, False]
    assert report.settings == read_report(searched).settings
    assert [block.modules for block in report.blocks] == [block.modules for block in read_report(searched).blocks]
    assert any("1 of 2 blocks were taken over" in note for note in report.notes)
    assert weights(output) == weights(searched)


@pytest.mark.matrix
def test_what_a_search_of_another_job_has_found_is_not_taken_over(bert: Saved, tmp_path: Path) -> None:
    for seed, interrupt in ((7, "calibrating"), (42, "searching")):
        stages, recipe = Stages(interrupt), bert.recipe(**OPEN, select="search", seed=seed)
        with pytest.raises(KeyboardInterrupt):
            calibrate(recipe, output=tmp_path / "out", overwrite=True, listener=stages)
        assert stages.searched


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-20], pytest.param(lambda text: text.replace("0.05", "0.06"), marks=pytest.mark.survive)],
    ids=["cut", "other"],
)
def test_a_damaged_record_of_a_search_takes_the_blocks_with_it(
    bert: Saved, searched: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    """It may name another winner."""
    recipe, output = bert.recipe(**OPEN, select="search"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=output, listener=Stages("calibrating"))
    (kept,) = (tmp_path / ".out.featcal" / "journal").glob("*.kept.json")
    kept.write_text(damage(kept.read_text()))
    stages = Stages()
    calibrate(recipe, output=output, listener=stages)
    assert stages.searched and weights(output) == weights(searched)
    assert any("the record of the search of an earlier run was damaged" in note for note in stages.notes)
    assert not any("blocks were taken over" in note for note in stages.notes)


def write_rows(folder: Path, *, labels: Callable[[int], int], test: bytes) -> None:
    """The words of each task as a dataset of two splits, of which one is of no use to a calibration."""
    generator = torch.Generator().manual_seed(0)
    for task in TASKS:
        (folder / task).mkdir(parents=True)
        ids = torch.randint(2, 98, (24, 8), generator=generator).tolist()
        rows = {"text": [" ".join(f"w{word}" for word in row) for row in ids], "label": [labels(n) for n in range(24)]}
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / task / "train.parquet")
        (folder / task / "test.parquet").write_bytes(test)


def test_labels_and_test_data_are_never_read_and_a_seed_gives_the_same_bytes(bert: Saved, tmp_path: Path) -> None:
    """Two runs whose data differ in nothing else."""
    save_tokenizer(bert.folder / "base")
    write_rows(tmp_path / "one", labels=lambda number: number % 2, test=b"not a parquet file")
    write_rows(tmp_path / "two", labels=lambda number: 7 - number, test=b"")
    reports = []
    for name in ("one", "two"):
        recipe: dict[str, Any] = bert.recipe(**OPEN, select="search")
        for task in TASKS:
            recipe["tasks"][task]["data"] = {"path": str(tmp_path / name / task), "split": "train"}
        reports.append(calibrate(recipe, output=tmp_path / f"{name}-out").report)
    assert reports[0].settings == reports[1].settings and reports[0].settings["candidates"]
    assert weights(tmp_path / "one-out") == weights(tmp_path / "two-out")


@pytest.mark.parametrize("name", ["t5", "albert", "llama"])
@pytest.mark.matrix
def test_settings_are_searched_for_models_of_all_kinds(tmp_path: Path, name: str) -> None:
    """Blocks that run several times, encoder and decoder, causal models."""
    saved = save_family(tmp_path, BY_NAME[name])
    report = calibrate(saved.recipe(**OPEN, select="search"), output=tmp_path / "out").report
    candidates = report.settings["candidates"]
    ended = [each for each in candidates if not each["dropped"]]
    if min(each["score"] for each in ended) < 1:
        assert chosen(report.settings) in [chosen(each) for each in ended]
    else:  # random weights: an expert's features need not help
        assert chosen(report.settings) == chosen(asdict(CAUTIOUS))
    assert len(candidates) > 1


GROWING = {"ridge": 1e-5, "rho": 1.0, "alpha": 1.0, "select": "preset"}
"""Fits few rows to the letter, and with them nothing else."""


def test_drift_that_grew_stops_a_strict_run_before_it_pushes(
    bert: Saved, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there. Without --strict the mean, which grew too, stops the push, but not with --push-anyway."""
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    output, push = tmp_path / "out", {"--push-to": "alice/strict"}
    for _ in range(2):
        run, said = run_job(capsys, bert, bert.recipe(**GROWING), output, **{**push, "--strict": ""})
        report = read_report(output)
        task = max(report.worse, key=lambda task: report.drift[task].after - report.drift[task].before)
        drift = report.drift[task]
        assert run.code == 3 and "Traceback" not in said
        assert said.count(f"drift grew on {task}, from {drift.before:.3f} to {drift.after:.3f}") == 1
        assert not hub.repos["model", "alice/strict"].log if ("model", "alice/strict") in hub.repos else True
    assert "nothing is computed again" in said
    written = weights(output)
    run, said = run_job(capsys, bert, bert.recipe(**GROWING), output, **push)
    assert run.code == 3 and "nothing is computed again" in said and "--push-anyway" in said
    assert ("model", "alice/strict") not in hub.repos or not hub.repos["model", "alice/strict"].log
    run, said = run_job(capsys, bert, bert.recipe(**GROWING), output, **{**push, "--push-anyway": ""})
    assert run.code == 0 and "nothing is computed again" in said
    assert len(hub.repos["model", "alice/strict"].log) == 1 and weights(output) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_strict_run_in_which_drift_did_not_grow_ends_well(bert: Saved, tmp_path: Path) -> None:
    report = calibrate(bert.recipe(ridge=1e9, rho=1.0), output=tmp_path / "out", strict=True).report
    assert not report.worse and all(drift.after <= drift.before for drift in report.drift.values())


def trial(score: float | None, place: int, error: float | None = 0.0, worse: int = 0, dropped: str = "") -> Trial:
    return Trial(Hyperparameters(1e-5, 1.0, 0.15), "drawn", place, 4, score, score, error, worse, dropped)


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([trial(0.6, 4), trial(0.8, 1, error=0.1)], 0),
        ([trial(0.60, 4), trial(0.65, 3, error=0.1), trial(0.66, 2, error=0.1), trial(0.9, 1, error=0.1)], 2),
        ([trial(0.9, 3), trial(None, 1, error=None), trial(0.1, 2, error=None, dropped="place 5 of 8")], 0),
        ([trial(0.5, 3, worse=1), trial(0.7, 2)], 1),
        ([trial(1.02, 2), trial(1.03, 1, error=0.001)], 0),
    ],
)
def test_the_first_of_those_that_are_not_surely_worse_than_the_best_is_taken(trials: list[Trial], best: int) -> None:
    """Not one without a score, or that dropped out, or that makes a task worse where another makes none; where nothing
    beats merged, the least bad."""
    assert pick_trial(trials) is trials[best]


@pytest.mark.parametrize("ridge", [None, 1e-5])
def test_where_no_candidate_beats_merged_it_hardly_changes_but_for_what_the_user_gives(ridge: float | None) -> None:
    held = [trial(1.02, 1), trial(1.03, 2)]
    choice = take_best(Calibration(select="search", ridge=ridge), held)
    assert choice.hyperparameters == (CAUTIOUS if ridge is None else Hyperparameters(1e-5, 1.0, 0.15))
    assert "none is better than merged" in choice.chosen_by


@pytest.mark.parametrize(("fitted", "few"), [(15, 15), (64, 64), (200, 64), (512, 128)])
def test_a_search_is_the_same_on_every_machine(fitted: int, few: int) -> None:
    examples: Any = {"red": SimpleNamespace(fitted_count=fitted, selection_count=8)}
    plan = choose_hyperparameters(Calibration(select="search"), "encoder", examples, METRICS, blocks=12)
    assert isinstance(plan, SearchPlan)
    assert (len(plan.candidates), plan.cuts, plan.fitted) == (8, {6: 4}, few)
    points = [candidate.hyperparameters for candidate in plan.candidates.values()]
    assert points[:2] == [FEATCAL["module"], PAPER["CLIP"]]
    tenths = {round(log10(point.ridge)) for point in points[2:]}
    assert len(tenths) >= 4 and {(point.metric, point.order) for point in points[2:]} == {("output", "module")}
