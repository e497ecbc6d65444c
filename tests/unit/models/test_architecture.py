"""Blocks are found by running the model, norms by what they compute; and what `featcal modules` lists would be
calibrated, from the config alone."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from command_line import Capsys, featcal_inside, succeed
from families import BY_NAME, build_lively, few_of, images, save_family, text
from families_text import MIXTURES
from family import GROUPED_SIZES
from hub_server import HubServer
from jobs import prepare
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mobilebert.modeling_mobilebert import NoNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from featcal_cli.hub.model_files import read_entries
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import Block, find_architecture
from featcal_cli.models.inventory import run_without_values
from featcal_cli.models.loading import find_class, load_model, load_outline, make_readable
from featcal_cli.models.module_kinds import kind_of
from featcal_cli.models.probing import PROBE_TOKENS
from featcal_cli.models.tracing import ForwardError, MatmulDepth, run_forward
from featcal_cli.runtime.errors import ArchitectureError


@pytest.mark.parametrize("name", few_of([family.name for family in MIXTURES], {"mixtral", "zaya"}))
def test_experts_are_found_whichever_tokens_a_probe_has(name: str) -> None:
    """Tokens that are all alike would choose the same experts, which would then be given all tokens, as other modules
    are."""
    family = BY_NAME[name]
    model, batch = build_lively(family), family.inputs(4)
    make_readable(model)
    alike = {**batch, "input_ids": torch.full_like(batch["input_ids"], 7)}
    found, other = (find_architecture(model, {"task": given}, "layernorm") for given in (batch, alike))
    assert any(block.is_mixture for block in found.blocks)
    assert found == other


class Standardised(nn.Conv2d):
    """A convolution that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight - self.weight.mean(), self.bias)


KINDS = {
    "linear": [nn.Linear(8, 4)], "conv1d": [Conv1D(4, 8)], "scale": [NoNorm(8)], "convolution": [nn.Conv1d(8, 4, 1)],
    "layernorm": [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), CohereLayerNorm(8)],
    "rmsnorm": [LlamaRMSNorm(8), T5LayerNorm(8), GemmaRMSNorm(8), nn.RMSNorm(8)],
    None: [nn.Embedding(8, 4), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.PReLU(8), Standardised(3, 3, 1),
        nn.ConvTranspose1d(3, 3, 1), nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 1))],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "modules"), KINDS.items(), ids=str)
def test_kinds_of_modules_are_told_by_what_they_compute(kind: str | None, modules: list[nn.Module]) -> None:
    assert {kind_of(module.eval()) for module in modules} == {kind}


@pytest.mark.parametrize(("name", "has_them"), [("electra-tokens", True), ("xlm-roberta", False), ("bert", False)])
def test_logits_of_tokens_are_told_from_those_of_classes(name: str, has_them: bool) -> None:
    """Though a text may have as many tokens as there are classes."""
    batch = {name: of[:, :2] for name, of in text(4).items()}
    model = build_lively(BY_NAME[name])
    assert model.config.num_labels == batch["input_ids"].shape[1]
    assert find_architecture(model, {"task": batch}, "layernorm").token_logits == ({""} if has_them else set())


def test_a_classifier_without_a_padding_token_is_run_with_its_head() -> None:
    config = tf.LlamaConfig(**GROUPED_SIZES | {"pad_token_id": None})
    make_readable(model := tf.LlamaForSequenceClassification(config))
    found = find_architecture(model, {"task": text(4)}, "layernorm")
    assert found.entries == {"task": ""} and found.needs_full_batches


def test_a_module_whose_input_is_overwritten_is_marked() -> None:
    family = BY_NAME["vit"]
    model = family.build().eval()
    block = model.get_submodule("layers.1")
    plain = block.forward

    def forward(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = plain(hidden_states, *args, **kwargs)
        hidden_states.add_(1.0)
        return result

    block.forward = forward
    blocks = find_architecture(model, {"task": images(1)}, "layernorm").blocks
    assert [block.overwritten for block in blocks] == [False, True]
    assert [m.name for m in blocks[1].modules if m.overwritten] == ["layernorm_before"]


def test_a_model_without_blocks_is_refused_in_words() -> None:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    with pytest.raises(ArchitectureError, match="no list of transformer blocks"):
        find_architecture(tf.ResNetModel(config).eval(), {"task": images(1)}, "layernorm")


def test_the_depth_of_a_tensor_does_not_depend_on_whose_memory_it_has_now() -> None:
    with MatmulDepth() as depths:
        for _ in range(300):
            deep = torch.zeros(1000)
            depths.add_one(deep)
            del deep
            assert depths.of(torch.tensor([1.0] * 1000)) == 0


def test_what_padding_does_is_seen_wherever_there_is_some(tmp_path: Path) -> None:
    """PaliGemma reads texts otherwise beside padding; of red none has it, of green only those that are held out."""
    saved, found = save_family(tmp_path, BY_NAME["paligemma"]), []
    for task, count in (("red", 20), ("green", 12)):
        saved.inputs[task]["attention_mask"][:count] = 1
        save_file(saved.inputs[task], tmp_path / f"{task}.safetensors")
    for count in (2, 1):
        found.append(prepare(saved.only(count), batch_size=12).architecture.needs_full_batches)
    assert found == [True, False]


def test_long_texts_with_padding_are_not_run_in_full_to_see_what_it_does() -> None:
    model, lengths = build_lively(BY_NAME["llama"]), list[int]()
    model.register_forward_pre_hook(lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True)
    find_architecture(model, {"red": text(4, 64)}, "auto")
    assert len(lengths) == 4 and max(lengths) == 2 * PROBE_TOKENS


NEEDS_VALUES = {
    "xmod", "longformer", "longformer-padded", "dbrx", "switch-transformers", "nllb-moe", "led", "siglip2",
    "smolvlm", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "mllama", "mllama-tiles", "udop", "qwen2-audio",
}  # fmt: skip
"""Families whose forward cannot run on shapes alone."""


@pytest.mark.parametrize("name", few_of(BY_NAME, {"mixtral", "gpt-oss", "bart", "llava"}))
def test_a_plan_finds_the_modules_that_a_run_finds(tmp_path: Path, name: str) -> None:
    save_family(tmp_path, BY_NAME[name])
    snapshot, inputs = Snapshot(name, tmp_path / "merged", None), {"red": BY_NAME[name].inputs(4)}
    model_class = find_class(snapshot)
    outline = load_outline("merged", snapshot, model_class, read_entries(snapshot.folder)).module
    planned = run_without_values(outline, "auto", inputs)
    assert (planned is None) == (name in NEEDS_VALUES)
    if planned is not None:
        run = find_architecture(load_model("merged", snapshot, model_class).module, inputs, "auto")
        assert planned.head == run.head and planned.reached == run.reached
        assert [list_modules(block) for block in planned.blocks] == [list_modules(block) for block in run.blocks]


def test_headers_are_not_needed_to_find_experts(tmp_path: Path) -> None:
    save_family(tmp_path, BY_NAME["mixtral"])
    snapshot = Snapshot("mixtral", tmp_path / "merged", None)
    outline = load_outline("merged", snapshot, find_class(snapshot), None).module
    planned = run_without_values(outline, "auto", {"red": BY_NAME["mixtral"].inputs(4)})
    assert planned is not None and all(block.is_mixture for block in planned.blocks)


def test_a_loop_that_waits_for_a_value_ends() -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            while x.any():
                x = x - 1
            return x

    with pytest.raises(ForwardError, match="again and again"):
        run_forward(Waiting(), {"x": torch.ones(1, device="meta")})


def list_modules(block: Block) -> tuple[object, ...]:
    """A block's modules, without what their rows mean, for which masks are looked at."""
    modules = [(module.name, module.kind, module.depth, module.routed) for module in block.modules]
    return block.name, block.calls, block.gating_modules, block.skipped, modules


def test_no_weights_are_downloaded(tmp_path: Path, hub: HubServer, capsys: Capsys) -> None:
    save_family(tmp_path, BY_NAME["bert"])
    hub.add_repo("inventory/bert", tmp_path / "merged")
    run = succeed(capsys, "modules", {"model": "inventory/bert", "--json": ""})
    assert [block["name"] for block in json.loads(run.stdout)["blocks"]] == ["encoder.layer.0", "encoder.layer.1"]
    assert not any(request.path.endswith(".safetensors") for request in hub.requests)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ({}, 0, "encoder.layer.0 … 1 (2 blocks, each: 8 modules"),
        ({"--norms": "all"}, 2, "of a recipe"),
        ({"model": "nowhere/at-all"}, 2, "nowhere"),
    ],
)
def test_the_table_fits_the_terminal_and_bad_input_is_one_message(
    tmp_path: Path, capsys: Capsys, arguments: dict[str, object], code: int, word: str
) -> None:
    config = BY_NAME["bert"].build().config
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path)
    run = featcal_inside(capsys, "modules", {"model": tmp_path, **arguments})
    assert run.code == code and word in (run.stderr if code else run.stdout) and not (code and run.stdout)
