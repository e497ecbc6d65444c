"""An adapter beside the output: real peft loads it, and what it holds of the updates is what the report says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, few_of, save_family
from hub_server import HubServer
from peft import PeftModel
from torch import Tensor

from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows.verbs import Result, calibrate, dry_run

FULL = ("bert", "gpt2", "whisper", "convnext", "wavlm", "mamba")
"""Linears with biases, Conv1D, some without biases, convolutions, projections and convolutions that functions read, and
a Linear that peft loads no LoRA for."""
REPLACED_BIASES = {"whisper"}
"""Some of their Linears have no bias: peft replaces biases, and adds nothing to them."""


@pytest.mark.parametrize("name", few_of(FULL, ("bert",)))
def test_peft_loads_the_adapter(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also from the Hub, where the adapter goes with the output."""
    saved, repo = save_family(tmp_path, BY_NAME[name]).only(1), f"alice/{name}"
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    recipe = {**saved.recipe(norms="all"), "output": {"push_to": repo}}
    result = calibrate(recipe, output=tmp_path / "out", push_anyway=True, as_adapter=32)  # which holds every update
    assert result.report.adapter is not None
    assert result.report.adapter.share > 0.9999
    assert not result.report.adapter.left_out
    merged, calibrated = load(result, tmp_path / "merged"), load(result, tmp_path / "out")
    inputs = next(iter(saved.inputs.values()))
    before, after = answer(merged, inputs), answer(calibrated, inputs)
    adapted = PeftModel.from_pretrained(merged, repo, subfolder="adapter")
    assert 'subfolder="adapter"' in (tmp_path / "out" / "README.md").read_text()
    assert (before - after).norm() > 5e-3 * after.norm()
    torch.testing.assert_close(answer(adapted, inputs), after, rtol=1e-3, atol=1e-4)
    if name not in REPLACED_BIASES:
        with adapted.disable_adapter():
            torch.testing.assert_close(answer(adapted, inputs), before)
    folded = dict(adapted.merge_and_unload().named_parameters())
    for key, value in calibrated.named_parameters():
        torch.testing.assert_close(folded[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_the_share_that_a_small_rank_holds_is_reported(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["bert"]).only(1).recipe()
    plain, foreseen = (dry_run(recipe, output=tmp_path / "out", as_adapter=rank).estimate for rank in (None, 4))
    result = calibrate(recipe, output=tmp_path / "out", as_adapter=4)
    written = (tmp_path / "out" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert foreseen.disk_bytes - plain.disk_bytes == pytest.approx(written, rel=0.3)
    merged, calibrated = load(result, tmp_path / "merged"), load(result, tmp_path / "out")
    kept = total = 0.0
    for key, value in calibrated.named_parameters():
        update = value.detach().double() - merged.get_parameter(key).detach().double()
        is_cut = update.ndim > 1
        kept += float((torch.linalg.svdvals(update)[:4] if is_cut else update).square().sum())
        total += float(update.square().sum())
    assert result.report.adapter is not None
    assert result.report.adapter.share == pytest.approx(kept / total, abs=1e-4)
    assert 0.1 < result.report.adapter.share < 0.99
    assert any("the adapter of rank 4 holds" in note for note in result.report.notes)
    adapted = PeftModel.from_pretrained(merged, str(tmp_path / "out" / "adapter")).merge_and_unload()
    pairs = ((value, adapted.get_parameter(key)) for key, value in calibrated.named_parameters())
    missed = sum(float((value - ours).detach().square().sum()) for value, ours in pairs)
    assert missed == pytest.approx(total - kept, rel=1e-3)


@pytest.mark.matrix
def test_what_no_adapter_can_hold_is_named(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["xlnet"])
    result = calibrate(saved.recipe(), output=tmp_path / "out", as_adapter=4)
    assert result.report.adapter is not None
    assert {name.rpartition(".")[2] for name in result.report.adapter.left_out} == {"q", "k", "v", "o", "r"}
    assert "the changed parameters" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.matrix
def test_a_model_in_half_precision_has_an_adapter_in_half_precision(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["llama"], dtype=torch.bfloat16)
    result = calibrate(saved.recipe(), output=tmp_path / "out", as_adapter=32)
    inputs = next(iter(saved.inputs.values()))
    adapted = PeftModel.from_pretrained(load(result, tmp_path / "merged"), str(tmp_path / "out" / "adapter"))
    before, after = (answer(load(result, tmp_path / name), inputs) for name in ("merged", "out"))
    assert (answer(adapted, inputs) - after).norm() < 0.2 * (before - after).norm()
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("name", "rank", "change", "what"),
    [
        ("bert", 10**4, {}, "the rank of an adapter is at most"),
        ("bert", 4, {"merged": {"method": "average"}}, "goes on a full merged model"),
        ("mixtral", 4, {}, "cannot hold the experts of a mixture"),
    ],
)
def test_impossible_ranks_are_refused(tmp_path: Path, name: str, rank: int, change: dict[str, Any], what: str) -> None:
    recipe = {**save_family(tmp_path, BY_NAME[name]).only(1).recipe(), **change}
    before = set(tmp_path.rglob("*"))
    verb: Any = dry_run if rank < 10 else calibrate  # one plan is made for both
    with pytest.raises(RecipeError, match=what) as raised:
        verb(recipe, output=tmp_path / "out", as_adapter=rank)
    assert raised.value.where == f"--as-adapter {rank}"
    assert set(tmp_path.rglob("*")) == before


def load(result: Result, folder: Path | str) -> Any:
    model: Any = type(result.merged.module).from_pretrained(folder, dtype="auto")
    return model.eval()


def answer(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0].float()  # type: ignore[no-any-return]
