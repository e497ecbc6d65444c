"""Numbers that go wrong are mended and reported, or named: which model, which module or tensor, which example. Memory
that runs out costs speed and not the run."""

import json
from io import StringIO
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Saved, changed_tensors, save_family
from jobs import CPU, Watcher
from rich.console import Console
from safetensors.torch import load_file, save_file

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON, SMALL_SYSTEM, factorise, solve_rows
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.results import BlockReport, ModuleReport, describe_ridges
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.cli.drift import show_inspection
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.drift_metrics import Drift, DriftMeter
from featcal_cli.hub.model_files import read_entries
from featcal_cli.models.module_kinds import Affine
from featcal_cli.recipe.schema import Calibration
from featcal_cli.reporting.verdict import find_excess, write_verdict
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import DataError, NumericsError, OutputError, ShortageError
from featcal_cli.runtime.hardware import is_out_of_memory
from featcal_cli.workflows.calibrate import halve_batches
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.output import check_built
from featcal_cli.workflows.verbs import calibrate
from featcal_cli.workflows.workload import choose_dtype


@pytest.fixture
def vit(tmp_path: Path) -> Saved:
    return save_family(tmp_path, BY_NAME["vit"]).only(2)


@pytest.mark.parametrize(
    ("number", "value", "method", "what", "where"),
    [
        # of 20: 12 are fitted, 4 and 4 held out; what is finite may be too large for what the model makes of it
        (14, float("nan"), "paper", "pixel_values holds NaN or infinity", "green: example 15"),
        (7, 3e38, "paper", r"features of .* are not finite at .*layer", "green: example 8"),
        (13, 3e38, "featcal", r"features of .* are not finite at .*layer", "green: held-out example 2"),
    ],
)
def test_an_example_that_breaks_features_is_named(
    vit: Saved, tmp_path: Path, number: int, value: float, method: str, what: str, where: str
) -> None:
    """By model, module and example; one that is held out matters to the guard alone."""
    pixels = vit.inputs["green"]["pixel_values"].clone()
    pixels[number] = value
    save_file({"pixel_values": pixels}, tmp_path / "green.safetensors")
    with pytest.raises((DataError, NumericsError), match=what) as raised:
        calibrate(vit.recipe(method=method), output=tmp_path / "out", batch_size=5)
    assert raised.value.where == where and not (tmp_path / "out").exists()
    if method == "featcal":
        calibrate(vit.recipe(), output=tmp_path / "out")


def test_a_system_without_a_stable_solution_gets_more_ridge_and_the_solution_says_how_much() -> None:
    """Sums that are not positive: no examples give such, but rounding may."""
    torch.manual_seed(0)
    x = torch.randn(40, 6, dtype=torch.float64)
    moments = LinearMoments(6, CPU, 0.5)
    moments.add(x, x, torch.cat([torch.full((39,), 1.0), torch.tensor([-30.0])]).double())
    own = Affine(torch.randn(3, 6, dtype=torch.float64), None)
    system = LinearEquations({"fc": own}, Hyperparameters(1e-6, 1.0, 0.5))
    system.add_task(moments, {"fc": own})
    found = system.solve({"fc": own})["fc"]
    assert found.ridge is not None and found.ridge > 1e-6 and torch.isfinite(found.parameters.weight).all()


def test_more_ridge_is_ten_times_as_much_each_time_until_it_suffices() -> None:
    gram = torch.diag(torch.tensor([1.0, -0.005], dtype=torch.float64))
    factor, ridge = factorise(gram.clone(), 1e-4)
    assert ridge == pytest.approx(1e-2)
    expected = torch.diag(torch.tensor([1.0 + ridge + EPSILON, -0.005 + ridge + EPSILON], dtype=torch.float64)).sqrt()
    torch.testing.assert_close(factor, expected)


@pytest.mark.parametrize("width", [7, SMALL_SYSTEM + 200])
def test_a_factor_is_that_of_the_system_and_a_system_that_is_not_positive_has_none(width: int) -> None:
    x = torch.randn(2 * width, width, dtype=torch.float64)
    gram = x.T @ x / width
    factor, ridge = factorise(gram, 1e-4)  # which becomes the system
    assert ridge == 1e-4
    rows = torch.randn(3, width, dtype=torch.float64)
    assert torch.dist(solve_rows(rows @ gram, factor), rows) < 1e-9 * rows.norm()
    gram[-1, -1] = -1.0
    assert factorise(gram, 1e-4)[1] > 1.0, "only a λ that outweighs the negative entry makes it positive"


def test_what_took_more_ridge_is_told() -> None:
    modules = [ModuleReport("fc1", "linear", 3, 0.1), ModuleReport("fc2", "linear", 3, 0.1, ridge=0.01)]
    assert "layers.0.fc2 (0.01)" in describe_ridges([BlockReport("layers.0", 0.0, modules, [])])
    assert describe_ridges([BlockReport("layers.0", 0.0, modules[:1], [])]) == ""


@pytest.mark.parametrize(
    ("method", "dtype", "what"),
    [
        ("paper", "bfloat16", r"features of .* are not finite at .*layers\.0\.mlp\.down_proj"),
        ("featcal", "bfloat16", "features of held-out examples are not finite in mlp.gate_proj"),
        ("paper", "float32", r"features of .* are not finite at .*layers\.0\.mlp\.down_proj"),
    ],
)
def test_where_bfloat16_overflows_float32_is_recommended(tmp_path: Path, method: str, dtype: str, what: str) -> None:
    """No weight is too large itself; the product of a feed-forward's two is."""
    saved = save_family(tmp_path, BY_NAME["llama"], dtype=torch.bfloat16).only(2)
    file = tmp_path / "green" / "model.safetensors"
    tensors = load_file(file)
    for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"):
        tensors[f"model.layers.0.{name}.weight"] *= 1e10
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=what) as raised:
        calibrate(saved.recipe(method=method, dtype=dtype), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert ("--dtype float32" in raised.value.fix) is (dtype == "bfloat16")


@pytest.mark.parametrize("name", ["llama", "deberta-v2", "layoutlm"])
def test_bfloat16_is_computed_where_units_for_it_are(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU takes up to 80 times as long for it as for float32, and GPUs before Ampere take long too. DeBERTa reads an
    embedding that nobody calls, and LayoutLM its own dtype before it calls any."""
    saved = save_family(tmp_path, BY_NAME[name], dtype=torch.bfloat16).only(2)
    by_dtype = {}
    for dtype in ("auto", "float32", "bfloat16"):
        calibrate(saved.recipe(method="paper", dtype=dtype), output=tmp_path / dtype)
        by_dtype[dtype] = (tmp_path / dtype / "model.safetensors").read_bytes()
    assert by_dtype["auto"] == by_dtype["float32"] != by_dtype["bfloat16"]
    for capability, of_bfloat16 in (((7, 5), torch.float32), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        for stored in (torch.bfloat16, torch.float16, torch.float32):
            chosen = choose_dtype(Calibration(), stored, torch.device("cuda"))
            assert chosen == (of_bfloat16 if stored == torch.bfloat16 else torch.float32)


QUERY = "encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    ("first", "merge", "what", "fix"),
    [
        # a large ridge leads to the anchor, 2 · merged − base = 120000
        ({"merged": 4e4, "base": -4e4}, None, "1.2e+05", "bfloat16"),
        # base + 2 · (expert − base) = 180000, and three experts that are alike
        ({"base": -4e4, "red": 0.0, "green": 0.0, "blue": 6e4}, 2.0, "3.2e+05", "scale"),
    ],
    ids=["a result", "a merge"],
)
def test_what_is_too_large_for_float16_is_told_with_the_module_and_the_number(
    tmp_path: Path, first: dict[str, float], merge: float | None, what: str, fix: str
) -> None:
    """The first number of a weight is given by model."""
    recipe = save_family(tmp_path, BY_NAME["bert"], dtype=torch.float16).recipe(ridge=1e6, rho=2.0, alpha=0.3)
    for name, number in first.items():
        with changed_tensors(tmp_path / name) as tensors:
            tensors[QUERY][0, 0] = number
    if merge is not None:
        recipe["merged"] = {"method": "task_arithmetic", "scale": merge}
    with pytest.raises(NumericsError) as raised:
        calibrate(recipe, output=tmp_path / "out")
    assert QUERY in raised.value.what and what in raised.value.what
    assert ("the merge does not fit" if merge else "float16") in raised.value.what
    assert fix in raised.value.fix and "broken" not in raised.value.fix


def test_a_disk_that_changes_what_is_written(vit: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of the first block, and of one that is only copied."""
    place = [""]

    def flip(folder: Path, *rest: Any) -> None:
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[next(entry.start for name, entry in read_entries(folder).items() if place[0] in name)] ^= 1
        file.write_bytes(content)
        check_built(folder, *rest)

    monkeypatch.setattr("featcal_cli.workflows.output.check_built", flip)
    for place[0], how in ((".0.", "calibrated"), ("embeddings", "written")):
        with pytest.raises(OutputError, match=f"is not what was {how}"):
            calibrate(vit.recipe(), output=tmp_path / "out")
        assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    result = calibrate(vit.recipe(), output=tmp_path / "out")
    assert any("taken over" in note for note in result.report.notes)
    assert json.loads((tmp_path / "out" / "featcal_report.json").read_text())["blocks"]


def test_drift_from_an_expert_whose_features_vanish_is_infinite_and_said(vit: Saved, tmp_path: Path) -> None:
    """Not 0, which would be the expert itself; and JSON has null for it."""
    with changed_tensors(tmp_path / "red") as tensors:
        tensors.update({name: torch.zeros_like(value) for name, value in tensors.items()})
    found = inspect_drift(vit.recipe())
    last = found.tasks["red"].models["model"].last
    assert last.relative == inf and isfinite(last.distance) and last.distance > 0
    assert isfinite(found.tasks["green"].models["model"].last.relative)
    told = json.loads(found.to_json(), parse_constant=pytest.fail)["tasks"]["red"]["models"]["model"]["blocks"][-1]
    assert told["drift"]["relative"] is None and told["drift"]["distance"] > 0
    verdict = [text for is_warning, text in write_verdict(found, found.names, str) if is_warning]
    assert any("features of the expert of red are all zero" in text for text in verdict)
    assert "expert of red are all zero" in str(find_excess(found, 5.0))
    out = Console(width=100, file=StringIO())
    show_inspection(found, out)
    assert "inf" in out.file.getvalue() and "nan" not in out.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_is_as_far_from_nothing_as_it_can_be_near() -> None:
    drift = Drift(distance=0.0, size=0.0, tokens=3)
    assert drift.relative == 0.0
    assert Drift(distance=1e-40, size=1e-40, tokens=3).relative == 0.0
    assert Drift(distance=3.0, size=1e-40, tokens=3, is_split=True, local_sum=2.0).local == inf


def test_features_whose_number_depends_on_weights_cannot_be_paired() -> None:
    """As where a model of speech foresees how long each sound lasts."""
    with pytest.raises(NumericsError, match="merged and of its expert have 3 and 5 tokens after decoder") as raised:
        DriftMeter().add("decoder", "red", "merged", torch.ones(3, 4), torch.ones(5, 4))
    assert raised.value.where == "expert red" and "lengths depend on their inputs alone" in raised.value.fix


def test_a_broken_head_of_an_expert_is_said_and_measures_nothing(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"]).only(1)
    with changed_tensors(tmp_path / "red") as tensors:
        tensors["pooler.dense.weight"][0, 0] = float("nan")
    report = calibrate(saved.recipe(), output=tmp_path / "out").report
    assert any("expert red has NaN or infinity in pooler.dense.weight" in note for note in report.notes)
    assert report.measures["red"].models["merged"].output is None
    json.loads((tmp_path / "out" / "featcal_report.json").read_text(), parse_constant=pytest.fail)


def examples(*sizes: int) -> TaskExamples:
    batches = [{"x": torch.arange(size), "y": torch.arange(2 * size)} for size in sizes]
    return TaskExamples(max(sizes), batches, [], [], [], sum(sizes), 0, 0, (sum(sizes), 0))


def test_halved_batches_hold_the_same_examples_in_the_same_order() -> None:
    halved = halve_batches({"red": examples(5, 4, 1)}, CPU, Ranks())["red"]
    assert [len(batch["x"]) for batch in halved.fitted] == [3, 2, 2, 2, 1]
    assert torch.cat([batch["x"] for batch in halved.fitted]).tolist() == [*range(5), *range(4), 0]
    assert [len(batch["y"]) for batch in halved.fitted] == [6, 4, 4, 4, 2]
    assert halved.batch_size == 2


@pytest.mark.parametrize(
    ("sizes", "ranks", "what"),
    [((1, 1), Ranks(), "one example at a time\n.*--device cpu"), ((4, 4), Ranks(2), "--batch-size 2")],
)
def test_where_batches_cannot_be_halved_something_else_helps(sizes: tuple[int, ...], ranks: Ranks, what: str) -> None:
    """One of several processes cannot, for the others know nothing of it."""
    with pytest.raises(ShortageError, match=what):
        halve_batches({"red": examples(*sizes)}, torch.device("cuda"), ranks)


def test_only_errors_about_memory_count() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_blocks_of_this_run_are_no_earlier_runs(bert: Saved, tmp_path: Path) -> None:
    """After memory ran out, blocks that this run has finished are read again, and not told as those of another."""
    errors = [torch.OutOfMemoryError()]

    def run_out_once() -> None:
        if errors:
            raise errors.pop()

    watcher = Watcher(1, run_out_once)
    calibrate(bert.recipe(), output=tmp_path / "alone", listener=watcher)
    assert "memory ran out" in watcher.notes and "earlier run" not in watcher.notes
