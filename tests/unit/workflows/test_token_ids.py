"""An id means nothing in another model: whatever order models have their tokens in, a merge becomes the same one."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from example_folder import lines
from recipe_world import shake
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from vocabularies import WORDS, add_tokens, make_texts, make_tokenizer, reorder, shuffled, spell, write_rows

from featcal_cli.data.preprocessing import Vocabularies, Vocabulary
from featcal_cli.runtime.errors import CheckpointError, DataError
from featcal_cli.workflows.evaluate import evaluate
from featcal_cli.workflows.inputs import find_inputs
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.plan import make_plan
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.token_ids import find_places, find_token_ids
from featcal_cli.workflows.verbs import calibrate

TASKS = ("red", "green")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = ("base", "merged", *TASKS)


def build_states(size: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=size, **SIZES)).state_dict()
    experts = {task: {name: x + 0.02 * torch.randn_like(x) for name, x in base.items()} for task in TASKS}
    merged = {name: x + 0.3 * sum(expert[name] - x for expert in experts.values()) for name, x in base.items()}
    return {"base": base, "merged": merged, **experts}


def save_family(
    folder: Path,
    kind: str = "words",
    orders: Mapping[str, int] = {},
    extra: Mapping[str, Sequence[str]] = {},
    **options: Any,
) -> dict[str, Any]:
    """The job of a family in a new folder, each model with its tokens in the order of its seed (0: the common one), and
    with `extra` ones behind them."""
    old = spell(kind)
    folder.mkdir()
    for name, state in build_states(len(old)).items():
        tokens = shuffled(old, orders.get(name, 0))
        module = LlamaForCausalLM(LlamaConfig(vocab_size=len(old), **SIZES))
        module.load_state_dict(state)
        more = extra.get(name, ())
        reorder(module, old, [*tokens, *more])
        module.save_pretrained(folder / name)
        add_tokens(make_tokenizer(kind, tokens, **options), *more).save_pretrained(folder / name)
    data = {task: {"path": write_rows(folder / f"{task}.jsonl", seed)} for seed, task in enumerate(TASKS)}
    return job_of(folder, data)


def job_of(folder: Path, data: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    tasks = {task: {"expert": str(folder / task), "data": data[task]} for task in TASKS}
    calibration = {"examples": 16, "method": "paper", **settings}
    models = {name: str(folder / name) for name in ("merged", "base")}
    return {**models, "tasks": tasks, "calibration": calibration}


def find_notes(job: Mapping[str, Any]) -> str:
    """What is said before the models are downloaded."""
    session = Session(dict(job), RunOptions("cpu", dry_run=True))
    make_plan(session, find_inputs(session))
    return "\n".join(session.notes)


ORDERS = {name: seed for seed, name in enumerate(MODELS, 1)}
SOME: dict[str, Any] = {"orders": {"merged": 1, "base": 2}}
EXTRA = {"merged": ["<a>", "<b>"], "red": ["<b>", "<a>"], "green": ["<b>"], "base": []}


@pytest.mark.parametrize(
    ("family", "other", "data"),
    [
        ({"kind": "bytes"}, {"orders": ORDERS}, ""),
        ({"kind": "unigram"}, {"orders": ORDERS}, ""),
        ({}, SOME, "self"),
        ({}, {"extra": EXTRA}, ""),
        ({"begins": True}, SOME, ""),
    ],
    ids=["bytes", "unigram", "examples that experts write", "added tokens", "special tokens"],
)
def test_the_order_of_tokens_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any, other: Any, data: str
) -> None:
    """Nor do embeddings with room for more tokens, nor which special tokens merged's tokenizer puts around a text."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    jobs = [save_family(tmp_path / "plain", **family), save_family(tmp_path / "other", **family, **other)]
    if "extra" in other:
        module = LlamaForCausalLM.from_pretrained(tmp_path / "other" / "merged")
        module.resize_token_embeddings(64)
        module.save_pretrained(tmp_path / "other" / "merged")
    if "begins" in family:
        make_tokenizer("words", shuffled(spell("words"), 1)).save_pretrained(tmp_path / "other" / "merged")
    for job in jobs:
        for task in job["tasks"].values():
            task["data"] = data or task["data"]
    plain, found = (calibrate(job, output=tmp_path / f"out-{number}") for number, job in enumerate(jobs))
    folders = (tmp_path / "plain" / "merged", plain.output, found.output, tmp_path / "other" / "merged")
    before, one, two, merged = (load_file(folder / "model.safetensors") for folder in folders)
    blocks = [name for name in one if ".layers." in name]
    assert max(float((one[name] - before[name]).abs().max()) for name in blocks) > 0.001
    assert all(torch.equal(one[name], two[name]) for name in blocks)
    assert torch.equal(two["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])
    if "begins" in family:
        seen = [inspect_drift(job, compare=job["merged"]).tasks for job in jobs]
        assert seen[0] == seen[1]
    if other == {"orders": ORDERS}:
        assert found.report.drift == plain.report.drift
        assert {task: x.base for task, x in found.report.drift.items()} != dict.fromkeys(TASKS)
        told = "merged has another vocabulary: ids are mapped by token"
        assert told in (found.output / "README.md").read_text()
        assert "merged has the same vocabulary" in (plain.output / "README.md").read_text()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are refined by a third of the usual steps."""
    monkeypatch.setattr("featcal_cli.workflows.plan.STEPS_PER_TEXT", 1)


@pytest.mark.usefixtures("brief")
def test_what_means_nothing_changes_nothing_of_the_default_method(tmp_path: Path) -> None:
    found = []
    for change in ("nothing", "padding in an expert's head", "no tokenizer of an expert", "merged in float64"):
        job = save_family(folder := tmp_path / change)
        job["calibration"] |= {"method": "featcal"}
        module = LlamaForCausalLM.from_pretrained(changed := folder / ("merged" if "float64" in change else "red"))
        match change.split()[0]:
            case "padding":
                module.resize_token_embeddings(64)
            case "merged":
                module.double()
            case "no":
                (changed / "tokenizer.json").unlink()
                (changed / "tokenizer_config.json").unlink()
        module.save_pretrained(changed)
        assert calibrate(job, output=folder / "out").report.blocks[-1].modules
        found.append(load_file(folder / "out" / "model.safetensors"))
    for tensor, x in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[tensor].float(), x, rtol=0, atol=1e-6)


def test_the_default_method_does_not_depend_on_the_order_of_tokens(tmp_path: Path) -> None:
    found = []
    for name, orders in (("plain", {}), ("other", ORDERS)):
        job = save_family(tmp_path / name, orders=orders)
        job["calibration"] |= {"method": "featcal"}
        for seed, task in enumerate(TASKS):
            common = " ".join(Random(seed).choices(WORDS, k=10))  # so that what is learnt helps with other rows
            rows = (f'{{"text": "{common} {word}"}}\n' for word in WORDS)
            (tmp_path / name / f"{task}.jsonl").write_text("".join(rows))
        report = calibrate(job, output=tmp_path / name / "out").report
        assert report.refined is not None and report.refined.share > 0
        assert report.blocks[-1].is_head and report.blocks[-1].modules
        states = [load_file(tmp_path / name / folder / "model.safetensors") for folder in ("merged", "out")]
        new = shuffled(spell("words"), orders.get("merged", 0))
        for state in states:
            state["lm_head.weight"] = state["lm_head.weight"][[new.index(token) for token in spell("words")]]
        found.append({key: states[1][key] - x for key, x in states[0].items() if "embed" not in key})
    for key, update in found[0].items():
        assert torch.allclose(found[1][key], update, rtol=0, atol=1e-3 * float(update.abs().max())), key


@pytest.mark.usefixtures("brief")
def test_rows_of_padding_keep_no_head_from_being_calibrated(tmp_path: Path) -> None:
    """A merge that is cut to its tokenizer may have experts whose embeddings are padded to a multiple of 64."""
    found = {}
    for padded in ((), TASKS, ("base",), ("merged",)):
        job = save_family(folder := tmp_path / " ".join(["wide", *padded]))
        for model in padded:
            module = LlamaForCausalLM.from_pretrained(folder / model)
            module.resize_token_embeddings(64, mean_resizing=False)
            module.save_pretrained(folder / model)
        job["calibration"] |= {"method": "featcal", "metric": "features"}
        report = calibrate(job, output=folder / "out").report
        assert report.refined is not None, padded
        assert report.blocks[-1].is_head and report.blocks[-1].modules, padded
        found[padded] = load_file(folder / "out" / "model.safetensors")
    assert len(found["merged",]["lm_head.weight"]) == 64
    for padded in (TASKS, ("base",)):  # what these models have behind the tokens is no prediction
        assert all(torch.equal(x, found[padded][name]) for name, x in found[()].items()), padded


def test_texts_that_are_cut_otherwise_are_refused_with_both_names(tmp_path: Path) -> None:
    job = save_family(tmp_path / "world", "bytes", {"merged": 1})
    make_tokenizer("bytes", shuffled(spell("bytes"), 1), merges=False).save_pretrained(tmp_path / "world" / "merged")
    with pytest.raises(DataError, match="different tokens") as raised:
        find_notes(job)
    assert "expert red (red)" in raised.value.what and "merged (merged)" in raised.value.what
    assert "Ġw" in raised.value.what and raised.value.where.startswith("red: ") and raised.value.fix


def test_a_token_that_merged_lacks_is_refused_only_where_it_is_read(tmp_path: Path) -> None:
    job = save_family(tmp_path / "world", extra={"red": ["<|user|>"]})
    assert "red: column text" in find_notes(job)
    (tmp_path / "world" / "red.jsonl").write_text('{"text": "<|user|> w1 w2"}\n' * 20)
    with pytest.raises(DataError, match=r"expert red \(red\) and merged \(merged\)"):
        find_notes(job)


def test_a_base_without_the_experts_tokens_is_compared_by_its_weights(tmp_path: Path) -> None:
    chat = ["<|user|>", "<|end|>"]
    job = save_family(tmp_path / "world", extra=dict.fromkeys(("merged", *TASKS), chat))
    for task in TASKS:
        file = tmp_path / "world" / f"{task}.jsonl"
        chats = file.read_text().replace('"w', '"<|user|> w').replace('"}', ' <|end|>"}')
        file.write_text(chats)
    assert "base lacks the tokens <|user|>, <|end|>" in find_notes(job)

    done = calibrate(job, output=tmp_path / "out")
    assert [drift.base for drift in done.report.drift.values()] == [None, None]
    assert all(0 < drift.after != drift.before for drift in done.report.drift.values())
    written = json.loads((tmp_path / "out" / "featcal_report.json").read_text())
    assert written["drift"]["red"]["base"] is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| task | merged | calibrated | change |\n" in card and "its drift is left out" in card
    assert all("base" not in task.models for task in inspect_drift(job).tasks.values())


@pytest.mark.parametrize(
    ("lacks", "notes"),
    [
        ("merged", ["tokenizer from its expert, as merged has none that can be loaded"]),
        ("red", ["red: column text, at most 32 tokens, tokenizer from merged (merged), as its expert",
                 "green: column text, at most 32 tokens, tokenizer from its expert (merged has"]),
    ],
)  # fmt: skip
def test_where_a_model_has_no_tokenizer_anothers_is_read(tmp_path: Path, lacks: str, notes: list[str]) -> None:
    job = save_family(tmp_path / "world")
    for file in (tmp_path / "world" / lacks).glob("token*"):
        file.unlink()
    found = find_notes(job)
    assert all(note in found for note in notes) and "are taken to be" not in found


@pytest.mark.parametrize(
    ("broken", "note"),
    [
        ("red", "ids of expert red are taken to be merged's: no tokenizer can be"),
        ("base", "ids of base are taken to be merged's: no tokenizer can be"),
        ("merged", "ids of merged are taken to be the experts': no tokenizer ca"),
    ],
)
def test_what_a_tokenizer_that_cannot_be_loaded_leaves_open_is_reported(tmp_path: Path, broken: str, note: str) -> None:
    job = save_family(tmp_path / "world")
    (tmp_path / "world" / broken / "tokenizer.json").write_text("{")
    assert note in find_notes(job)


def test_places_follow_tokens_where_several_have_one_id() -> None:
    ids = {"a": 5, "b": 0, "c": 2, "d": 1, "z": 5}
    other = {token: (3, 0, 5, 1, 4, 2)[number] for token, number in ids.items()}
    places = [find_places(Vocabulary("", "", None, known)) for known in (ids, other)]
    for found, known in zip(places, (ids, other), strict=True):
        assert [int(found[known[token]]) for token in "abcdz"] == [0, 1, 2, 3, 0]
    assert all(sorted(found.tolist()) == list(range(len(found))) for found in places)


def test_ids_of_examples_that_a_tokenizer_lacks_are_no_padding() -> None:
    model: Any = SimpleNamespace(module=LlamaForCausalLM(LlamaConfig(vocab_size=44, **SIZES)))
    one = Vocabulary("", "", None, {"a": 0, "b": 1})
    for largest, places in ((1, {"expert red": [0, 1]}), (7, {})):
        rows: Any = SimpleNamespace(fitted=[{"input_ids": torch.tensor([[0, largest]])}], selection=(), held_out=())
        known = Vocabularies({}, {}, {"merged": one, "expert red": one})
        recipe: Any = None
        found = find_token_ids(recipe, {"merged": model, "expert red": model}, {"red": rows}, known, print)
        assert {role: table.tolist() for role, table in found.places.items()} == places


def test_ids_in_a_file_are_refused_where_they_mean_different_tokens(tmp_path: Path) -> None:
    data = {}
    for task in TASKS:
        data[task] = {"path": str(tmp_path / f"{task}.safetensors")}
        save_file({"input_ids": torch.randint(4, 44, (30, 8))}, data[task]["path"])
    save_family(tmp_path / "plain")
    save_family(tmp_path / "other", orders={"green": 3})
    find_notes(job_of(tmp_path / "plain", data))
    message = r"not the same tokens in merged \(merged\) and expert green \(green\)"
    with pytest.raises(DataError, match=message) as raised:
        find_notes(job_of(tmp_path / "other", data))
    assert "green.safetensors" in raised.value.where and "texts" in raised.value.fix


def test_experts_in_different_orders_are_not_merged_row_by_row(tmp_path: Path) -> None:
    for name, order in (("plain", 0), ("other", 1)):
        job = save_family(tmp_path / name, orders={"green": order})
        job["merged"] = {"method": "average"}
        if order:
            with pytest.raises(CheckpointError, match="embeddings cannot be merged"):
                find_notes(job)
        else:
            assert "merged has the same vocabulary" in find_notes(job)


@pytest.mark.parametrize("copies", [False, True])
def test_a_head_that_the_first_expert_has_not_is_not_lost_in_a_merge(tmp_path: Path, copies: bool) -> None:
    """`copies`: the first expert's file has its one weight under both names."""
    job = {**save_family(tmp_path / "world"), "merged": {"method": "average"}}
    tied = LlamaForCausalLM.from_pretrained(tmp_path / "world" / "red")
    tied.lm_head.weight, tied.config.tie_word_embeddings = tied.model.embed_tokens.weight, True
    tied.save_pretrained(tmp_path / "world" / "red")
    if copies:
        file = tmp_path / "world" / "red" / "model.safetensors"
        stored = load_file(file)
        save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expert green has lm_head.weight of its own") as raised:
        find_notes(job)
    assert "first" in raised.value.fix
    job["tasks"] = dict(reversed(job["tasks"].items()))
    assert "alone" not in find_notes(job)


def test_a_merge_says_that_embeddings_of_other_sizes_are_the_first_experts(tmp_path: Path) -> None:
    job = {**save_family(tmp_path / "world", extra={"green": ["<new>"]}), "merged": {"method": "average"}}
    assert "merged takes model.embed_tokens.weight and lm_head.weight from red alone, as" in find_notes(job)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_a_head_answers_the_same_on_a_body_in_another_order(tmp_path: Path, family: str) -> None:
    """Llama's finds the end of a text by the id of padding in its config."""
    old, new = spell("words"), shuffled(spell("words"), 1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    classifier = getattr(transformers, f"{family}ForSequenceClassification")
    config = getattr(transformers, f"{family}Config")
    models = [classifier(config(vocab_size=len(old), **sizes, num_labels=3, pad_token_id=0))]
    models += [classifier(copy.deepcopy(models[0].config)) for _ in range(2)]
    for name, module, tokens in zip(("expert", "plain", "other"), models, (old, old, new), strict=True):
        shake(module, seed=len(name))
        if name == "other":
            module.load_state_dict(models[1].state_dict())
            reorder(module, old, new)
        module.save_pretrained(tmp_path / name)
        make_tokenizer("words", tokens).save_pretrained(tmp_path / name)
    texts = make_texts(0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "expert")
    with torch.no_grad():
        labels = [int(models[0].eval()(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
    write_labelled(tmp_path / "data.jsonl", texts, labels)
    found = [accuracies(tmp_path, merged, {}) for merged in ("plain", "other")]
    assert found[0] == found[1]
    assert found[0]["expert"] == 1.0 and 0.0 < found[0]["merged"] < 1.0


def test_a_model_in_another_order_writes_the_same_answers(tmp_path: Path) -> None:
    old, new = spell("unigram"), shuffled(spell("unigram"), 1)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    module = T5ForConditionalGeneration(T5Config(vocab_size=len(old), **sizes, decoder_start_token_id=0))
    shake(module, seed=0)
    for name, tokens in (("expert", old), ("plain", old), ("other", new)):
        if name == "other":
            reorder(module, old, new)
            module.config.decoder_start_token_id = module.generation_config.decoder_start_token_id = new.index("<pad>")
        module.save_pretrained(tmp_path / name)
        make_tokenizer("unigram", tokens).save_pretrained(tmp_path / name)
    texts = make_texts(0)
    folder = tmp_path / "expert"
    whole, tokenizer = (kind.from_pretrained(folder) for kind in (T5ForConditionalGeneration, AutoTokenizer))
    given = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    limits = {"do_sample": False, "max_new_tokens": 3}
    written = [tokenizer.decode(whole.generate(ids, **limits)[0], skip_special_tokens=True) for ids in given]
    answers = sorted(set(written))
    write_labelled(tmp_path / "data.jsonl", texts, [answers.index(text) for text in written])
    found = accuracies(tmp_path, "other", {"answers": answers, "max_new_tokens": 3})
    assert found == {"expert": 1.0, "merged": 1.0} and len(answers) > 1
    columns = {"columns": {"text": "text", "response": "text"}}
    plain, other = (accuracies(tmp_path, name, {"metric": "perplexity"}, columns) for name in ("plain", "other"))
    assert plain == pytest.approx(other, 1e-5)


def write_labelled(file: Path, texts: Sequence[str], labels: Sequence[int]) -> None:
    file.write_text(lines({"text": text, "label": label} for text, label in zip(texts, labels, strict=True)))


def accuracies(folder: Path, merged: str, how: Mapping[str, Any], more: Mapping[str, Any] = {}) -> dict[str, float]:
    task: dict[str, Any] = {"expert": str(folder / "expert"), "data": {"path": str(folder / "data.jsonl"), **more}}
    task["evaluate"] = {"split": "train", "metric": "accuracy", **how}
    found = evaluate({"merged": str(folder / merged), "base": str(folder / "plain"), "tasks": {"it": task}})
    return {role: score.value for role, score in found.tasks["it"].scores.items()}
