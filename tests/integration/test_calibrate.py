"""Properties of a whole calibration: its result does not depend on the order of tasks and examples, on how models are
stored, on how many examples share a batch, or on the side on which they are padded."""

import json
import shutil
import threading
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
import transformers
from families import BY_NAME, TASKS, Saved, changed_tensors, save_family, save_tokenizer
from hub_server import HubServer
from jobs import Watcher
from outcome import distance
from peft import LoraConfig, get_peft_model
from published import change_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.runtime.errors import FeatCalError, OutputError, RecipeError
from featcal_cli.workflows import verbs
from featcal_cli.workflows.verbs import calibrate, calibrate_modules, dry_run

WEIGHTS = "model.safetensors"


def turn_tasks(_: Path, recipe: dict[str, Any]) -> None:
    recipe["tasks"] = dict(reversed(recipe["tasks"].items()))


def add_prefix(folder: Path, _: dict[str, Any]) -> None:
    """As a model with a head has it on the disk."""
    with changed_tensors(folder / "merged") as tensors:
        tensors.update({f"bert.{name}": tensors.pop(name) for name in list(tensors)})


def name_a_head(folder: Path, _: dict[str, Any]) -> None:
    """In the config alone."""
    change_config(folder / "merged", architectures=["BertForTokenClassification"])


def round_experts(folder: Path, recipe: dict[str, Any]) -> None:
    for task in recipe["tasks"]:
        with changed_tensors(folder / task) as tensors:
            tensors.update({name: value.bfloat16() for name, value in tensors.items()})
        change_config(folder / task, dtype="bfloat16")


@pytest.fixture(scope="module")
def plain(bert: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the family becomes as it is."""
    return load_file(calibrate(bert.recipe(), output=tmp_path_factory.mktemp("plain") / "out").output / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "apart", "prefix"),
    # a longer header shifts where weights lie in memory, by which sums are rounded on some processors
    [(turn_tasks, 1e-5, ""), (add_prefix, 1e-5, "bert."), (name_a_head, 1e-5, ""), (round_experts, 0.02, "")],
)
def test_the_order_of_tasks_and_how_models_are_stored_change_nothing(
    saved: Saved, plain: dict[str, Tensor], tmp_path: Path, change: Any, apart: float, prefix: str
) -> None:
    """Names of tensors stay as merged has them; experts in another precision are those that they are rounded to."""
    recipe: dict[str, Any] = saved.recipe()
    change(tmp_path, recipe)
    found = load_file(calibrate(recipe, output=tmp_path / "out").output / WEIGHTS)
    assert found.keys() == {prefix + name for name in plain}
    distances = [float((found[prefix + name] - x).norm() / x.norm().clamp_min(1e-12)) for name, x in plain.items()]
    assert max(distances) <= apart and (change is not round_experts or max(distances) > 0)


def test_modules_are_calibrated_as_their_files_are(
    bert: Saved, plain: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: dict[str, Any] = bert.recipe()

    def load(place: str) -> Any:
        return getattr(transformers, bert.family.model).from_pretrained(place)

    experts = {task: load(spec["expert"]) for task, spec in recipe["tasks"].items()}
    inputs = {task: load_file(spec["data"]) for task, spec in recipe["tasks"].items()}
    merged, base = load(recipe["merged"]), load(recipe["base"])
    # a class of the caller's own, which is not in transformers
    merged.__class__ = type("Extended", (type(merged),), {})
    merged.requires_grad_(False)
    before, config = {name: x.clone() for name, x in merged.state_dict().items()}, merged.config.to_dict()
    options: dict[str, Any] = {"calibration": recipe["calibration"], "device": "cpu"}
    # save_pretrained writes the adapter of the first one alone, and the parts of the weights of the second
    adapted, inner = load(recipe["base"]), load(recipe["base"])
    adapted.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    get_peft_model(inner, LoraConfig(r=2, target_modules=["query"]))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"inputs": {}}, "there are experts of red"),
        ({"inputs": [inputs]}, "experts and inputs must both be dicts by task"),
        *(
            ({"inputs": inputs | {"red": x}}, "the inputs of red are not")
            for x in ([], [None], {"input_ids": None}, {0: inputs["red"]["input_ids"]})
        ),
        *(
            ({"experts": experts | {"red": x}}, "expert red cannot be written: an adapter is in it")
            for x in (adapted, inner)
        ),
        *(
            ({"inputs": inputs | {"red": {"input_ids": x}}}, "the inputs of red are not tensors by name")
            for x in (torch.tensor(1), torch.zeros(0, 5))
        ),
        ({"base": recipe["base"]}, "base must be a PreTrainedModel of transformers, not str"),
        ({"folder": "nowhere"}, "temporary copies of models and examples cannot be written: No such file or directory"),
        ({"batch_size": numpy.int64(-3)}, "batch_size must be a whole number of at least 1, not -3"),
        ({"calibration": []}, "calibration must be a dict"),
        ({"calibration": "paper"}, "calibration must be a dict with the keys of a recipe's calibration, not 'paper'"),
        ({"as_adapter": "16"}, "as_adapter must be a whole number of at least 1, not '16'"),
    ]
    for change, message in wrong:
        given = {"merged": merged, "base": base, "experts": experts, "inputs": inputs, **options, **change}
        with pytest.raises(FeatCalError, match=message):
            calibrate_modules(**given)
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    for place in ("safetensors.torch.save_file", "transformers.PreTrainedModel.save_pretrained"):
        with pytest.raises(OutputError, match="fix: free disk space"), monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=full))
            calibrate_modules(merged, base, experts, inputs, **options)
    with pytest.raises(RecipeError, match="batch_size"), monkeypatch.context() as patch:
        patch.setattr(verbs, "_save", None)  # known before models are written
        calibrate_modules(merged, base, experts, inputs, batch_size=0)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        made, report = calibrate_modules(merged, base, experts, inputs, **options)
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
        products = torch.get_float32_matmul_precision()
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert (*modes, products) == (True, True, torch.float64, "medium")
    found, left = made.state_dict(), merged.state_dict()
    assert all(found[name].equal(x) for name, x in plain.items()) and found.keys() >= plain.keys()
    assert all(left[name].equal(x) for name, x in before.items()) and not all(found[n].equal(left[n]) for n in plain)
    assert report.drift.keys() == experts.keys()
    assert merged.config.to_dict() == config and type(made).__name__ == "Extended"
    assert not any(x.requires_grad for x in made.parameters())


def test_modules_that_are_partly_on_the_disk_are_calibrated_in_memory(
    bert: Saved, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    recipe: dict[str, Any] = bert.recipe()
    load = getattr(transformers, bert.family.model).from_pretrained
    places = {"embeddings": "disk", "encoder": "disk", "pooler": "cpu"}
    merged = load(recipe["merged"], device_map=places, offload_folder=tmp_path / "offloaded")
    experts = {task: load(spec["expert"]) for task, spec in recipe["tasks"].items()}
    inputs = {task: load_file(spec["data"]) for task, spec in recipe["tasks"].items()}
    with pytest.warns(UserWarning, match="offloaded modules"):  # transformers' own
        made, _ = calibrate_modules(merged, load(recipe["base"]), experts, inputs, calibration=recipe["calibration"])
    assert merged.device.type == "meta"
    assert all(made.state_dict()[name].equal(x) for name, x in plain.items())


def test_calls_in_several_threads_wait_for_each_other(bert: Saved, tmp_path: Path) -> None:
    """What they set for a while, such as filters of warnings, is the whole process's."""
    waited, refused = list[bool](), list[str]()

    def be_refused() -> None:
        with pytest.raises(RecipeError) as error:
            dry_run({"unknown": 1})
        refused.append(error.value.what)

    other = threading.Thread(target=be_refused)

    def start() -> None:
        other.start()
        other.join(0.2)
        waited.append(other.is_alive())

    calibrate(bert.recipe(), output=tmp_path / "out", listener=Watcher("calibrating", start))
    other.join()
    assert waited == [True] and len(refused) == 1


def test_an_interrupted_run_may_change_where_its_result_goes_and_nothing_else(
    saved: Saved, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks of another job, which tests/unit/calibration/test_journal.py has refused, are dropped where the
    user says so."""
    recipe, output = saved.recipe(), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=output, listener=Watcher(1))
    shutil.copytree(tmp_path / ".out.featcal", tmp_path / "interrupted")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    pushed = {**recipe, "output": {"push_to": "alice/moved", "private": True}}
    result = calibrate(pushed, output=output, push_anyway=True, overwrite=True)
    assert any("1 of 2 blocks were taken over" in note for note in result.report.notes)
    assert not (tmp_path / ".out.featcal").exists()
    assert len(hub.repos["model", "alice/moved"].log) == 1
    shutil.rmtree(output)
    shutil.copytree(tmp_path / "interrupted", tmp_path / ".out.featcal")
    result = calibrate(saved.recipe(ridge=0.5), output=output, overwrite=True)
    assert not any("taken over" in note for note in result.report.notes)


SETTINGS: dict[str, Any] = {"ridge": 0.1, "rho": None, "alpha": None}
"""With a ridge under which rounding stays as small as it is: 1e-4 makes it a thousand times as large."""
PRECISE = 3e-5
"""Of the update: how far results may lie apart, as gradients and module-by-module steps in float32 carry the rounding
of one sum on into the next (1.5e-5 was not reached)."""


def write_texts(file: Path, seed: int, rows: int, least: int, most: int) -> list[str]:
    """Rows of so many words, all of another length; returns the lines."""
    random = Random(seed)
    texts = (" ".join(f"w{random.randint(3, 94)}" for _ in range(random.randint(least, most))) for _ in range(rows))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    file.write_text("".join(lines))
    return lines


def test_texts_do_not_depend_on_batches_padding_and_order(tmp_path: Path) -> None:
    """As a tokenizer pads them; tests/matrix/test_batches.py has all families, from their tensors on."""
    saved = save_family(tmp_path, BY_NAME["gpt2"]).only(1)
    recipe: dict[str, Any] = saved.recipe(**SETTINGS, examples=8)
    results = []
    for side, batch_size in (("right", 1), ("left", 3)):
        for seed, task in enumerate(saved.inputs):
            file = tmp_path / f"{task}.jsonl"
            lines = write_texts(file, seed, 8, 3, 9)  # all are fitted: no step is reduced
            file.write_text("".join(lines if side == "right" else reversed(lines)))
            recipe["tasks"][task]["data"] = str(file)
        for model in ("merged", "base", *TASKS):
            save_tokenizer(tmp_path / model)
            config = tmp_path / model / "tokenizer_config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "padding_side": side}))
        calibrate(recipe, output=tmp_path / side, batch_size=batch_size)
        results.append(load_file(tmp_path / side / WEIGHTS))
    first, second = results
    merged = load_file(tmp_path / "merged" / WEIGHTS)
    assert distance(first, merged) > 0 and distance(first, second) <= PRECISE * distance(second, merged)


def test_texts_beyond_those_whose_gradients_are_measured_are_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the longest text comes late and nothing is padded."""
    monkeypatch.setattr("featcal_cli.engine.output_gradients.MOST_TOKENS", 60)
    recipe: dict[str, Any] = save_family(tmp_path, BY_NAME["gpt2"]).recipe(**SETTINGS, examples=16)
    save_tokenizer(tmp_path / "red")
    write_texts(tmp_path / "red.jsonl", 2, 20, 4, 40)
    recipe["tasks"] = {"red": {"expert": str(tmp_path / "red"), "data": str(tmp_path / "red.jsonl")}}
    first, *_ = calibrate(recipe, output=tmp_path / "out", batch_size=1).report.blocks
    linear = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert linear <= {module.name for module in first.modules}, first.skipped
