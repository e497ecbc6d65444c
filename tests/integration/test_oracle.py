"""What is calibrated equals the official implementation, through the command line, and the slow oracle: by default
families that are as different as can be, the others with -m matrix. By the output metric, answers come nearer to the
experts' than by the paper's."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from command_line import Capsys, complete_draft, succeed
from families import BY_NAME, FAMILIES, Family, changed_tensors, few_of, save_family
from family_checks import check_family, check_nothing_to_learn, check_oracle, read_rows
from jobs import prepare
from oracle import record
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import RowProduct
from featcal_cli.calibration.normal_equations import collect_equations
from featcal_cli.calibration.output_metric import MetricEquations
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.recipe.reading import as_draft
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

DEFAULT = {"bert", "gpt2", "vit", "mixtral", "xlm"}
"""With a cache that blocks write to."""
FAR_APART = [pytest.param(family, marks=[] if family.name in DEFAULT else pytest.mark.matrix) for family in FAMILIES]


@pytest.mark.parametrize("family", FAR_APART, ids=lambda family: family.name)
def test_a_family_is_calibrated_as_the_oracle_does_it(tmp_path: Path, family: Family) -> None:
    check_family(tmp_path, family)


TURNS = {
    "bert": (
        "query|key|value", r"attention\.output\.dense", r"attention\.output\.LayerNorm|intermediate", r"^\.output",
    ),
    "t5": (
        r"SelfAttention\.[qkv]|EncDecAttention\.[kv]", r"SelfAttention\.o", r"EncDecAttention\.q",
        r"EncDecAttention\.o", "wi", "wo",
    ),
    "llama": ("[qkv]_proj|input_layernorm", "o_proj", "gate|up|post_attention", "down"),
    "mixtral": ("[qkv]_proj", "o_proj"),  # and then its experts, whose router stays
    "clip-vision": ("[qkv]_proj|layer_norm1", "out_proj", "fc1|layer_norm2", "fc2"),
}  # fmt: skip
"""What is solved at once where it is solved module by module, by the paths inside a block."""


@pytest.mark.parametrize("name", few_of(TURNS, {"bert"}))
def test_modules_are_solved_on_what_those_before_them_give(tmp_path: Path, name: str) -> None:
    # each of a mixture's experts needs the tokens of three tasks
    saved = save_family(tmp_path, BY_NAME[name]).only(3 if name == "mixtral" else 2)
    result = calibrate(saved.recipe(order="module"), output=tmp_path / "out", batch_size=5)
    check_oracle(saved, result, turns=TURNS[name])
    assert result.report.settings["order"] == "module"


@pytest.mark.parametrize("name", few_of(["bert", "mixtral", "t5", "swin", "wav2vec2", "xlnet"], {"bert"}))
def test_where_nothing_is_to_be_learnt_nothing_changes(tmp_path: Path, name: str) -> None:
    check_nothing_to_learn(tmp_path, BY_NAME[name])


def test_the_table_in_the_docs_has_a_row_for_every_family() -> None:
    assert [row.split("|")[1].strip() for row in read_rows()] == sorted({family.name for family in FAMILIES})
    assert len(FAMILIES) == len({family.name for family in FAMILIES}) >= 45


DATA = Path(__file__).parents[1] / "data" / "clip-tiny"


@pytest.mark.parametrize(
    ("result", "tolerance"), [("official-a", 1e-4), pytest.param("official-b", 5e-3, marks=pytest.mark.matrix)]
)
def test_official_tensors(tmp_path: Path, capsys: Capsys, result: str, tolerance: float) -> None:
    official = load_file(DATA / f"{result}.safetensors")
    with safe_open(DATA / f"{result}.safetensors", framework="pt") as file:
        told = file.metadata()
    experts, data = [], []
    for task in range(3):
        save_file({"pixel_values": official[f"pixel_values.t{task}"]}, tmp_path / f"t{task}.safetensors")
        experts.append(f"t{task}={DATA / f'expert{task}'}")
        data.append(f"t{task}={tmp_path / f't{task}'}.safetensors")
    settings = {"--ridge": told["lambda"], "--rho": told["rho"], "--alpha": told["alpha"]}
    models = {"merged": DATA / "merged", "--base": DATA / "base", "--expert": experts, "--data": data}
    succeed(capsys, "calibrate", {**models, "--method": "paper", **settings, "-o": tmp_path / "out"})
    ours = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name.removeprefix("calibrated."): t for name, t in official.items() if name.startswith("calibrated.")}
    assert len(expected) == 48
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= tolerance * tensor.norm(), name
    merged = load_file(DATA / "merged" / "model.safetensors")
    assert {name for name in merged if not merged[name].equal(ours[name])} == set(expected)


GIVEN = {"method": "paper", "examples": 64, "ridge": 1e-3, "rho": 1.0, "alpha": 0.3}


def mean_divergence(tasks: Mapping[str, Any], role: str) -> float:
    """Of the experts' answers from those under a model's last features, nats, mean over tasks."""
    return fmean(measures.models[role].output.divergence for measures in tasks.values())


@pytest.mark.matrix
def test_answers_come_nearer_to_the_experts_than_by_features(tmp_path: Path) -> None:
    recipe = complete_draft(as_draft("demo")).model_dump(exclude_none=True)
    reports = {}
    for metric in ("features", "output"):
        recipe["calibration"] = {**GIVEN, "metric": metric}
        reports[metric] = calibrate(recipe, output=tmp_path / metric).report
        assert reports[metric].settings["metric"] == metric
    recipe["merged"] = str(tmp_path / "features")
    found = inspect_drift(recipe, compare=str(tmp_path / "output")).tasks
    by_features, by_outputs = (mean_divergence(found, role) for role in ("model", "other"))
    assert by_outputs < 0.8 * min(by_features, mean_divergence(reports["output"].measures, "merged"))
    card = (tmp_path / "output" / "README.md").read_text()
    assert "their effect on each expert's outputs" in card and "features, as in the paper" not in card


@pytest.mark.parametrize("name", few_of(["bert", "gpt2"], ("bert",)))
def test_tokens_count_by_how_far_they_move_answers(name: str, tmp_path: Path) -> None:
    """E[x xᵀ] of modules with one input is that of the model's own features, weighted by the mean of their sizes over
    the examples to fit, and evenly over those that updates are checked on, whatever the size of batches."""
    prepared = prepare(save_family(tmp_path, BY_NAME[name]).only(2), batch_size=3, examples=8, method="featcal")
    job = prepared.to_calibrate(tmp_path)
    visits = forward_order(job)  # which ends when nothing refers to it
    visit = next(visits)
    equations = collect_equations(visit, Hyperparameters(1e-4, 1.0, 0.5, "output", "block"))
    assert equations.held_out is not None
    halves = ((job.fitted, equations), (job.checked, equations.held_out))
    for (parts, system), (number, task) in product(halves, enumerate(job.experts)):
        batches = [part.batch for part in parts[task]]
        sizes = job.read_gradients(task, visit.part, "sizes")
        if system is not equations:
            sizes = {name: torch.ones_like(of) for name, of in sizes.items()}
        inputs = [record(prepared.models.merged.module, visit.block.name, batch) for batch in batches]
        for names, linear in system.linear.items():
            gram, start = torch.zeros(()), 0
            for batch, x in zip(batches, [given[f"{visit.block.name}.{names[0]}"][0] for given in inputs], strict=True):
                here = [sizes[module][start : start + len(x), : x.shape[1]].double() for module in names]
                weights = (0.5 + 0.5 * torch.stack(here).mean(0)) * batch.get("attention_mask", torch.ones(()))
                gram, start = gram + torch.einsum("bt,btd,bte->de", weights, x, x), start + len(x)
            assert isinstance(linear, MetricEquations)
            held = linear._tasks[number].gram
            ours = held.rows.T @ held.rows if isinstance(held, RowProduct) else held.full()
            assert (ours / ours.norm() - gram / gram.norm()).norm() <= 1e-5


@pytest.mark.matrix
def test_who_says_how_tokens_count_is_obeyed(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    given: dict[str, Any] = {"examples": 8, "ridge": 0.05, "rho": 1.0, "alpha": 0.3, "metric": "output"}
    for how, found in {"auto": "gradients", "uniform": "uniform"}.items():
        report = calibrate(saved.recipe(**given, token_weights=how), output=tmp_path / how).report
        assert report.settings["token_weights"] == found
    one, other = (load_file(tmp_path / how / "model.safetensors") for how in ("auto", "uniform"))
    assert any(not value.equal(other[name]) for name, value in one.items())


def test_where_answers_say_nothing_features_count_and_it_is_said(tmp_path: Path) -> None:
    """An expert's files hold no pooler, which is random then; asked for by name, the metric is an error."""
    saved = save_family(tmp_path, BY_NAME["bert"]).only(2)
    with changed_tensors(saved.folder / "red") as tensors:
        for name in [name for name in tensors if name.startswith("pooler")]:
            del tensors[name]
    settings: dict[str, Any] = {"method": "featcal", "examples": 8, "ridge": None, "rho": None, "alpha": None}
    report = calibrate(saved.recipe(**settings), output=tmp_path / "auto").report
    assert report.settings["metric"] == "features" and not report.output_distances
    said = [note for note in report.notes if note.startswith("errors are measured by features: ")]
    assert len(said) == 1 and "the head of the expert of red is in no file, and random" in said[0]
    with pytest.raises(NumericsError, match="is in no file, and random") as error:
        calibrate(saved.recipe(**settings, metric="output"), output=tmp_path / "asked")
    assert "metric: output" in error.value.fix
    assert not (tmp_path / "asked").exists()
