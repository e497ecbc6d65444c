"""Language models after a calibration: the head, or the norm before it, is fitted to what the experts predict,
perplexities are those of transformers' own losses, and `--refine` brings outputs nearer to the experts' probabilities.

Whole runs, since the head is fitted to the features of all calibrated blocks, and a model is measured as written."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers
from answers import perplexity_slowly
from command_line import Capsys, Run, featcal_inside
from families import BY_NAME, Family, Saved, changed_tensors, few_of, save_family, text
from family import GROUPED_SIZES, T5_SIZES, TEXT_SIZES, text_to_text
from jobs import Watcher
from rank_jobs import GENTLE
from safetensors.torch import load_file

from featcal_cli.calibration.distillation import SHARES, Lesson, Schedule
from featcal_cli.calibration.journal import Journal, describe_differences
from featcal_cli.cli.results import show_plan
from featcal_cli.data.batches import Batch
from featcal_cli.engine.job import Job
from featcal_cli.evaluation.results import TaskScores, average_tasks, show_values
from featcal_cli.reporting.verdict import write_verdict
from featcal_cli.runtime.errors import RecipeError, ShortageError
from featcal_cli.workflows import perplexity, plan, plan_checks
from featcal_cli.workflows.evaluate import evaluate
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate, dry_run

LLAMA = {**GROUPED_SIZES, "tie_word_embeddings": False}
GEMMA = {**GROUPED_SIZES, "head_dim": 8}
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "granite": ("GraniteForCausalLM", {**LLAMA, "logits_scaling": 4.0}, text, "lm_head"),
    "llama": ("LlamaForCausalLM", LLAMA, text, "lm_head"),
    "tied llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, text, "model.norm"),
    "gemma": ("GemmaForCausalLM", GEMMA, text, "model.norm"),
    "t5": ("T5ForConditionalGeneration", T5_SIZES, text_to_text, "decoder.final_layer_norm"),
}
Texts = dict[str, list[Batch]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Texts:
    """The held-out texts of each task, once a run has measured their perplexity."""
    texts: Texts = {}
    whole = perplexity.measure_perplexity

    def watch(job: Job, *args: Any) -> Any:
        texts.update({task: list(batches) for task, batches in job.drift.batches.items()})
        return whole(job, *args)

    monkeypatch.setattr(perplexity, "measure_perplexity", watch)
    return texts


def save(folder: Path, model: str, config: Any, inputs: Any = text) -> Saved:
    """Save a family with 40 examples a task, some of which are held out."""
    return save_family(folder, Family("case", model, config, inputs, ""), examples=40)


def run(saved: Saved, name: str, **calibration: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Calibrate with featcal's method, and refine only if it is asked for; return the tensors that were written, and
    the report."""
    out, of_method = saved.folder / name, {"method": "featcal", "ridge": None, "rho": None, "alpha": None}
    settings = {**of_method, "examples": 24, "refine": False, **calibration}
    calibrate(saved.recipe(**settings), output=out)
    return load_file(out / "model.safetensors"), json.loads((out / "featcal_report.json").read_text("utf-8"))


def divergence(saved: Saved, folder: Path) -> float:
    """The mean KL divergence of a model's predictions from the experts', at tokens that are not padding."""
    load = getattr(transformers, saved.family.model).from_pretrained
    model, total = load(folder), 0.0
    for task, inputs in saved.inputs.items():
        mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
        with torch.inference_mode():
            models = load(saved.folder / task), model
            expert, own = (each(**inputs).logits.double().log_softmax(-1) for each in models)
        if mask.shape != own.shape[:2]:
            mask = torch.ones(own.shape[:2], dtype=torch.bool)
        total += float((expert.exp() * (expert - own)).sum(-1)[mask].mean()) / len(saved.inputs)
    return total


def check_perplexity(saved: Saved, texts: Texts, told: Mapping[str, Mapping[str, float]], **folders: str) -> None:
    """Every role's is that of transformers' own loss of each text, which stands alone and without padding."""
    assert texts.keys() == told.keys() == saved.inputs.keys()
    for task, scores in told.items():
        assert list(scores) == ["expert", *folders]
        for role, value in scores.items():
            rows = (row for x in texts[task] for row in zip(x["input_ids"], x["attention_mask"], strict=True))
            alone = [ids[mask.bool()][None] for ids, mask in rows]
            slow = perplexity_slowly(saved.folder / folders.get(role, task), alone)
            assert value == pytest.approx(slow, rel=1e-4), role


def values_of(scored: Mapping[str, TaskScores]) -> dict[str, dict[str, float]]:
    return {task: {role: score.value for role, score in of.scores.items()} for task, of in scored.items()}


def check_report(saved: Saved, texts: Texts, report: Any, out: str) -> None:
    scores = {task: scored["scores"].items() for task, scored in report["perplexity"].items()}
    told = {task: {role: score["value"] for role, score in of_task} for task, of_task in scores.items()}
    check_perplexity(saved, texts, told, merged="merged", calibrated=out, base="base")
    assert {scored["metric"] for scored in report["perplexity"].values()} == {"perplexity"}
    nats = report["nats_per_token"]
    for role, mean in nats.items():
        assert mean == pytest.approx(fmean(math.log(of_task[role]) for of_task in told.values()), 1e-9)
    won = (nats["merged"] - nats["calibrated"]) / (nats["merged"] - nats["expert"])
    assert report["won_back"] == pytest.approx(won if nats["merged"] > nats["expert"] else 0.0)
    card = (saved.folder / out / "README.md").read_text("utf-8")
    row = " | ".join(f"{mean:.3f}" for mean in nats.values())
    assert "## Perplexity" in card and f"| nats per token | {row} |" in card


@pytest.mark.parametrize("name", few_of(CASES, ("llama", "t5")))
def test_predictions_come_closer(tmp_path: Path, measured: Texts, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One of them is interrupted, too, and takes the head over. With a λ under which updates of such small models hold
    on other examples, so that they are not undone."""
    *family, changed = CASES[name]
    saved = save(tmp_path, *family).only(1 if name == "t5" else 2)
    fitted, report = run(saved, "fitted", ridge=0.1)
    if name == "t5":
        assert not measured and report["perplexity"] == {}
    else:
        check_report(saved, measured, report, "fitted")
    plain, without = run(saved, "plain", ridge=0.1, head=False)
    last = report["blocks"][-1]
    assert last["name"] == changed and not last["skipped"]
    before, after = last["divergence"]
    assert after < before
    assert any(changed in note for note in report["notes"]) == (report["settings"]["step"] == 1)
    assert report["settings"]["head"] and not without["settings"]["head"]
    assert {path for path in plain if not torch.equal(plain[path], fitted[path])} == {f"{changed}.weight"}
    assert divergence(saved, tmp_path / "fitted") < divergence(saved, tmp_path / "plain")
    assert "blocks and the head, " in (tmp_path / "fitted" / "README.md").read_text("utf-8")
    if name == "llama":
        check_interruption(saved, fitted, monkeypatch)


def check_interruption(saved: Saved, whole: Mapping[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped behind the head goes on without computing it again."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("featcal_cli.workflows.calibrate.shrink_updates", stop)
        run(saved, "again", ridge=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("featcal_cli.calibration.algorithm.calibrate_head", stop)
        again, report = run(saved, "again", ridge=0.1)
    assert all(torch.equal(again[path], value) for path, value in whole.items())
    assert any("blocks were taken over" in note for note in report["notes"])


def test_logits_that_change_after_the_head_are_left(tmp_path: Path) -> None:
    """Where a model bends its logits, the head's own are no predictions."""
    config = {**GEMMA, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    fitted, report = run(save(tmp_path, "Gemma2ForCausalLM", config).only(1), "fitted")
    reason = "the model changes what its last norm or its head returns"
    assert report["blocks"][-1]["skipped"] == [{"name": "model.norm", "reason": reason}]
    assert "In 2 blocks, " in (tmp_path / "fitted" / "README.md").read_text("utf-8")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(fitted["model.norm.weight"], merged["model.norm.weight"])


def test_inspect_drift_tells_them(tmp_path: Path, measured: Texts) -> None:
    saved = save_family(tmp_path, BY_NAME["llama"], examples=40).only(2)
    inspection = inspect_drift(saved.recipe(examples=8))
    check_perplexity(saved, measured, values_of(inspection.perplexity), model="merged", base="base")
    sentences = [text for _, text in write_verdict(inspection, {"model": "it"}, str)]
    means = show_values(average_tasks(inspection.perplexity), "perplexity")
    roles = f"{means['model']} of it and {means['base']} of the base model; {means['expert']} of the experts"
    assert f"Mean perplexity: {roles}." in sentences


def test_evaluate_needs_no_key_for_them(tmp_path: Path, measured: Texts) -> None:
    saved = save_family(tmp_path, BY_NAME["llama"], examples=40).only(2)
    shutil.copytree(tmp_path / "merged", tmp_path / "other")
    # what is refined is asked of a calibration alone: few rows, of which none is held out, do here
    found = evaluate(saved.recipe(examples=8, method="featcal", refine=True), [str(tmp_path / "other")], limit=12)
    assert found.limit == 12 and list(found.names) == ["expert", "merged", "other", "base"]
    assert {sum(len(batch["input_ids"]) for batch in batches) for batches in measured.values()} == {12}
    check_perplexity(saved, measured, values_of(found.tasks), merged="merged", other="merged", base="base")


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LONG", Schedule(20, 8, GENTLE.peak, 5))
        patch.setattr(plan, "SHORT", GENTLE)
        patch.setattr(plan, "PEAK_FOR_TEXTS", GENTLE.peak)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("llama"), BY_NAME["llama"], examples=60, spread=0.2).only(2)


def refine(llama: Saved, output: Path, capsys: Capsys) -> Run:
    # a merge that is worse than its base, so that there is much to win
    line = {"--merge": "task_arithmetic:1.0", "-n": 40, "-o": output, "--refine": "", "--json": ""}
    return featcal_inside(capsys, "calibrate", {**llama.arguments(), **line})


def test_refining_is_done_once_and_goes_on(llama: Saved, tmp_path: Path, capsys: Capsys) -> None:
    run = refine(llama, tmp_path / "out", capsys)
    assert run.code == 0, run.stderr
    report = json.loads(run.stdout)
    refined = report["refined"]
    assert refined["steps"] == 20 and refined["share"] in SHARES and refined["seconds"] > 0
    assert sum(refined["after"].values()) < sum(refined["before"].values())
    assert all(refined["after"][task] <= max(refined["before"][task], refined["merged"][task]) for task in llama.inputs)
    assert any("refined by " in note for note in report["notes"])
    before, after = (fmean(refined[which].values()) for which in ("merged", "after"))
    assert report["headline"].startswith(f"mean KL divergence of outputs went from {before:.3f} to {after:.3f}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "refined by a short distillation" in card and "without training" not in card
    assert "\nRefined by " in card and "- refined by " not in card
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = refine(llama, tmp_path / "out", capsys)
    assert again.code == 0 and json.loads(again.stdout)["refined"] == refined

    recipe = llama.recipe(ridge=None, rho=None, alpha=None, examples=40, refine=True)
    recipe["merged"] = {"method": "task_arithmetic", "scale": 1.0}
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=tmp_path / "parts", listener=Watcher("step 11"), device="cpu")
    assert (tmp_path / ".parts.featcal" / "journal" / "refining.safetensors").is_file()
    calibrate(recipe, output=tmp_path / "parts", device="cpu")
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / ".parts.featcal").exists()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 3 * 24), ({"refine": False}, None), ({"head": False}, None), ({"method": "paper"}, None)],
    ids=["by default", "left out", "without the head", "the paper's method"],
)
def test_language_models_are_refined_for_a_while(
    tmp_path: Path, measured: Texts, settings: dict[str, Any], steps: int | None
) -> None:
    """And perplexities are those of what was refined."""
    saved = save(tmp_path, *CASES["llama"][:2])
    recipe = saved.recipe(**{"ridge": None, "rho": None, "alpha": None, "examples": 24, **settings})
    refining = dry_run(recipe, output=tmp_path / "out").refining
    assert (refining and refining.steps) == steps
    if steps:
        report = calibrate(recipe, output=tmp_path / "out").report
        assert report.refined and report.refined.steps == steps and report.refined.best
        # of the head and the blocks, as the report says
        assert divergence(saved, tmp_path / "out") < divergence(saved, tmp_path / "merged")
        check_report(saved, measured, json.loads((tmp_path / "out" / "featcal_report.json").read_text("utf-8")), "out")


def test_blocks_take_fewer_texts_than_refining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """Blocks that are refined later are calibrated on the first of the texts; all of them are learnt from."""
    monkeypatch.setattr("featcal_cli.workflows.workload.FEWEST_TEXTS", 8)
    monkeypatch.setattr("featcal_cli.workflows.workload.TOKENS_PER_WIDTH", 0)
    monkeypatch.setattr("featcal_cli.workflows.plan.LONG", Schedule(4, 6, 0.05, 1))
    learnt: dict[bool | None, set[int]] = {False: set(), None: set()}
    divergences = Lesson.divergences

    def watched(lesson: Lesson, chosen: Sequence[int]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        learnt[choice].update(chosen)
        yield from divergences(lesson, chosen)

    monkeypatch.setattr(Lesson, "divergences", watched)
    saved = save(tmp_path, *CASES["llama"][:2]).only(1)
    rows, jobs = dict[bool | None, int](), dict[bool | None, Mapping[str, Any]]()

    class Watched(Journal):
        """A journal that shows the fingerprint of its job."""

        def __init__(self, folder: Path, fingerprint: Mapping[str, Any], **kept: Any) -> None:
            super().__init__(folder, fingerprint, **kept)
            jobs[choice] = fingerprint

    monkeypatch.setattr("featcal_cli.workflows.calibrate.Journal", Watched)
    for choice in learnt:
        recipe = saved.recipe(ridge=None, rho=None, alpha=None, examples=24, refine=choice)
        report = calibrate(recipe, output=tmp_path / str(choice)).report
        rows[choice] = report.blocks[0].modules[0].rows
        told = "blocks are calibrated on 8 examples of each task at most; refining learns from all"
        assert (told in report.notes) == (choice is not False)
        assert set(report.settings["examples"].values()) == {24}
    assert 0 < rows[None] < rows[False] / 2
    assert learnt[None] == set(range(24 + 4))
    assert set(describe_differences(jobs[False], jobs[None])) == {
        f"blocks were calibrated on 24 examples of {task}, and are on 8" for task in saved.inputs
    }
    for asked in (None, True):
        show_plan(dry_run(saved.recipe(examples=24, method="featcal", refine=asked), output=tmp_path / "plan"))
        shown = " ".join(capsys.readouterr().out.split())
        assert "24 to fit and 8 to hold out per task" in shown
        assert "after blocks are calibrated on 8 examples of each task" in shown


def test_what_does_not_fit_is_not_refined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, *CASES["llama"][:2]).only(1)
    recipe = saved.recipe(ridge=None, rho=None, alpha=None, examples=24)
    needed, notes = dry_run(recipe, output=tmp_path / "out").estimate, Watcher()
    monkeypatch.setattr(plan_checks, "free_bytes", lambda _: needed.disk_bytes - 1)
    without = dry_run(recipe, output=tmp_path / "out", listener=notes)
    assert without.refining is None and without.estimate.disk_bytes < needed.disk_bytes
    assert "\nthe result is not refined: " in f"\n{notes.notes}"


def test_what_cannot_be_run_without_weights_says_why_it_is_not_refined(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["qwen2-vl"]).only(1).recipe(ridge=None)
    told, silent = Watcher(), Watcher()
    assert dry_run(recipe, output=tmp_path / "out", listener=told).refining is None
    inspect_drift(recipe, listener=silent)
    why = "the result is not refined: Qwen2VLForConditionalGeneration cannot be run without weights"
    assert why in told.notes and "refined" not in silent.notes


def test_experts_of_several_choices_are_no_teachers_and_nobody_need_know_it_beforehand(tmp_path: Path) -> None:
    saved = save(tmp_path, "BertForPreTraining", TEXT_SIZES).only(1)
    notes = run(saved, "out", refine=None)[1]["notes"]
    assert any(note.startswith("the result is not refined: refining needs experts' probabilities") for note in notes)
    with pytest.raises(RecipeError, match="gives no probabilities of one choice"):
        run(saved, "asked", refine=True)
    of_tokens = save(tmp_path / "tokens", "ElectraForPreTraining", TEXT_SIZES).only(1)
    with pytest.raises(RecipeError, match="gives no probabilities of one choice"):
        run(of_tokens, "asked", refine=True)


def test_a_result_that_cannot_be_refined_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out, for example, does not lose the closed form; where refining was asked for, the run stops."""
    saved = save(tmp_path, *CASES["llama"][:2]).only(1)
    plain, _ = run(saved, "plain")

    def fail(*_: object) -> None:
        raise RuntimeError("no derivative is implemented")

    monkeypatch.setattr("featcal_cli.workflows.refine.distil", fail)
    found, report = run(saved, "out", refine=None)
    assert all(torch.equal(found[name], value) for name, value in plain.items()) and report["refined"] is None
    assert any("the result is not refined: no derivative" in note for note in report["notes"])
    with pytest.raises(ShortageError, match="no derivative is implemented"):
        run(saved, "asked", refine=True)


def test_what_cannot_be_refined_is_refused_at_once(tmp_path: Path) -> None:
    vit = save_family(tmp_path / "vit", BY_NAME["vit"]).only(1)
    with pytest.raises(RecipeError, match="no head on merged's body"):
        dry_run(vit.recipe(ridge=None, refine=True), output=tmp_path / "out")
    file = vit.folder / "red" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "problem_type": "regression"}))
    with pytest.raises(RecipeError, match=r"red gives no probabilities of one choice \(problem_type: regression"):
        dry_run(vit.recipe(ridge=None, refine=True), output=tmp_path / "out")
    few = save_family(tmp_path / "few", BY_NAME["llama"], examples=8).only(1)
    assert dry_run(few.recipe(ridge=None), output=tmp_path / "out").refining is None
    with pytest.raises(RecipeError, match="red has no held-out rows"):
        dry_run(few.recipe(ridge=None, refine=True), output=tmp_path / "out")


def test_a_merged_model_without_its_head_gets_its_blocks_calibrated(tmp_path: Path) -> None:
    """A config that does not say that the head shares the embeddings' weight: it is random then, and in no file."""
    saved = save(tmp_path, *CASES["llama"][:2]).only(1)
    with changed_tensors(tmp_path / "merged") as tensors:
        before = {**tensors}
        del before["lm_head.weight"], tensors["lm_head.weight"]
    found, report = run(saved, "out", refine=None)
    assert found.keys() == before.keys() and any(not torch.equal(found[name], x) for name, x in before.items())
    assert report["refined"] is None
    assert any(note.startswith("merged has no head in its files: ") for note in report["notes"])
    with pytest.raises(RecipeError, match="merged has no head in its files"):
        dry_run(saved.recipe(ridge=None, refine=True), output=tmp_path / "asked")


def test_an_expert_with_a_broken_head_teaches_nothing(tmp_path: Path) -> None:
    saved = save(tmp_path, *CASES["llama"][:2]).only(2)
    task = next(iter(saved.inputs))
    with changed_tensors(tmp_path / task) as tensors:
        tensors["lm_head.weight"][5] = math.nan
    _, report = run(saved, "out", refine=None)
    why = f"the result is not refined: the probabilities of expert {task} are not finite"
    assert report["refined"] is None and why in report["notes"]
    assert report["perplexity"][task]["scores"]["expert"]["value"] is None
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "nan" not in card and f"| {task} | – | " in card
