"""`evaluate` finds what a slow computation, one example at a time, finds."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
import transformers
import yaml
from answers import perplexity_slowly
from command_line import Capsys, featcal_inside
from example_folder import lines
from families import BY_NAME
from hub_server import HubServer
from PIL import Image
from recipe_world import TINY, VOCABULARY, build, draw, save_tokenizer, shake, write_table, write_text
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from featcal_cli.cli.results import _describe_scores
from featcal_cli.data.batches import Batch
from featcal_cli.data.labelled import LabelledRows
from featcal_cli.engine.job import Job
from featcal_cli.evaluation import lm_eval_tasks
from featcal_cli.evaluation.lm_eval_tasks import _read_score
from featcal_cli.evaluation.protocols import Predictor, check_whole, compare
from featcal_cli.evaluation.results import (
    Evaluation,
    Score,
    TaskScores,
    combine,
    score,
    show_change,
    show_scores,
    show_values,
)
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.reading import read_draft
from featcal_cli.recipe.schema import Calibration, Draft, Evaluate
from featcal_cli.runtime.errors import CheckpointError, DataError, RecipeError
from featcal_cli.workflows import perplexity
from featcal_cli.workflows.evaluate import evaluate, name_roles
from featcal_cli.workflows.verbs import calibrate, dry_run

parquet: Any = pyarrow.parquet  # has no types
library: Any = transformers
ROWS = 40
PROMPTS = ["a photo of a {}.", 'the "{}"!', "{} {x}"]
CLASSES = ["cat", "dog_house", "a"]


def save(model: Any, folder: Path, seed: int = 0) -> Any:
    shake(model, seed)
    model.save_pretrained(folder)
    return model.eval()


def save_roles(folder: Path, make: Callable[[], Any], roles: Sequence[str] = ("base", "expert", "merged")) -> Any:
    """Models by role that differ in their weights, saved, each with a tokenizer."""
    models = {}
    for number, role in enumerate(roles):
        torch.manual_seed(0)
        models[role] = save(make(), folder / role, 3 * number)
        save_tokenizer(folder / role, chat=False)
    return models


def values(found: Evaluation) -> dict[str, float]:
    return {role: score.value for role, score in found.tasks["it"].scores.items()}


def draft_of(folder: Path, how: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> Draft:
    """A job with one task, whose models are in the folder, and by default the rows to be evaluated on."""
    data = dict(data or {"path": str(folder / "data"), "split": "test"})
    task = {"expert": str(folder / "expert"), "data": data, "evaluate": dict(how)}
    return read_draft(None, {"merged": str(folder / "merged"), "base": str(folder / "base"), "tasks": {"it": task}})


# --- zero-shot ---


def write_images(folder: Path) -> list[tuple[Any, int]]:
    """A dataset of images with labels by chance, which are returned too."""
    random = Random(0)
    rows = [{"image": {"bytes": draw(random), "path": None}, "label": random.randrange(3)} for _ in range(ROWS)]
    folder.mkdir()
    write_table(folder / "test.parquet", rows, {"label": {"names": CLASSES, "_type": "ClassLabel"}})
    return [(Image.open(BytesIO(row["image"]["bytes"])).convert("RGB"), row["label"]) for row in rows]  # type: ignore[index, misc]


def accuracy(classes: Tensor, features: Callable[[Any], Tensor], rows: Sequence[tuple[Any, int]]) -> float:
    """The share of images whose features are nearest to the direction of their class."""
    return sum(int((classes @ features(image)).argmax()) == label for image, label in rows) / len(rows)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full CLIP as base, vision towers as expert and merged, a full CLIP of its own, and images."""
    folder = tmp_path_factory.mktemp("clip")
    base = build("clip")
    base.save_pretrained(folder / "base")
    save_tokenizer(folder / "base", chat=False)
    library.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder / "base")
    for number, name in enumerate(("expert", "merged")):
        save(build("clip").vision_model, folder / name, number + 1)
    save(build("clip"), folder / "full", 5)
    write_images(folder / "data")
    return folder


@torch.no_grad()
def test_zero_shot_is_what_the_formulas_say(clip: Path, tmp_path: Path) -> None:
    """An image and a prompt at a time."""
    base, full = (library.CLIPModel.from_pretrained(clip / name) for name in ("base", "full"))
    tokenizer = library.AutoTokenizer.from_pretrained(clip / "base")
    processor = library.CLIPImageProcessorPil.from_pretrained(clip / "base")
    classes, slow, rows = [], {}, write_images(tmp_path / "data")

    def see(image: Any, own: Any, tower: Any) -> Tensor:
        pixels = processor(images=image, return_tensors="pt").pixel_values
        return own.visual_projection(tower(pixels).pooler_output)[0]  # type: ignore[no-any-return]

    for known in CLASSES:
        texts = [tokenizer(prompt.replace("{}", known, 1), return_tensors="pt").input_ids for prompt in PROMPTS]
        each = [base.text_projection(base.text_model(ids).pooler_output)[0] for ids in texts]
        classes.append(normalize(normalize(torch.stack(each), dim=-1).mean(0), dim=0))
    for name in ("expert", "merged", "full"):
        own = full if name == "full" else base
        tower = full.vision_model if name == "full" else library.CLIPVisionModel.from_pretrained(clip / name)
        slow[name] = accuracy(torch.stack(classes), partial(see, own=own, tower=tower), rows)
    draft = draft_of(clip, {"split": "test", "prompts": PROMPTS})
    assert values(evaluate(draft, [str(clip / "full")], batch_size=7)) == pytest.approx(slow)
    assert len(set(slow.values())) > 1


@torch.no_grad()
def test_a_tower_that_reads_the_last_place_gets_texts_of_its_full_length(tmp_path: Path) -> None:
    """As SigLIP was trained: padded, and without a mask."""
    text = {**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 24, "pad_token_id": 0}
    config = library.SiglipConfig(text_config=text, vision_config={**TINY, "image_size": 16, "patch_size": 8})
    models, rows = save_roles(tmp_path, lambda: library.SiglipModel(config)), write_images(tmp_path / "data")
    processor = library.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    processor.save_pretrained(tmp_path / "base")
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "base")
    full = {"padding": "max_length", "max_length": 24, "return_tensors": "pt"}
    long = "a text without room for padding: {}"
    prompts = [[prompt.replace("{}", known) for prompt in (long, "w1 {}")] for known in CLASSES]
    texts = [tokenizer(some, **full, truncation=True).input_ids for some in prompts]
    each = [normalize(models["base"].get_text_features(ids).pooler_output, dim=-1) for ids in texts]
    classes = normalize(torch.stack([some.mean(0) for some in each]), dim=-1)

    def see(image: Any, model: Any) -> Tensor:
        return model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]  # type: ignore[no-any-return]

    slow = {name: accuracy(classes, partial(see, model=models[name]), rows) for name in ("expert", "merged")}
    assert values(evaluate(draft_of(tmp_path, {"prompts": [long, "w1 {}"]}))) == pytest.approx(slow)


def test_classes_of_the_recipe_replace_those_of_the_dataset(clip: Path) -> None:
    plain = values(evaluate(draft_of(clip, {"prompts": PROMPTS})))
    same = values(evaluate(draft_of(clip, {"prompts": PROMPTS, "classes": CLASSES})))
    turned = values(evaluate(draft_of(clip, {"prompts": PROMPTS, "classes": ["w1", *CLASSES[::-1]]})))
    other = values(evaluate(draft_of(clip, {"prompts": PROMPTS, "classes": ["w1", "w2", "w3"]})))
    assert plain == same != other
    # names of the dataset are its classes, wherever they stand in the list
    assert turned == values(evaluate(draft_of(clip, {"prompts": PROMPTS, "classes": [*CLASSES, "w1"]})))
    with pytest.raises(DataError, match=r"label 2 .* has no name and no answer: there are 2"):
        evaluate(draft_of(clip, {"prompts": PROMPTS, "classes": CLASSES[:2]}))


# --- heads ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert with a head, and bodies for it."""
    folder = tmp_path_factory.mktemp("bert")
    config: Any = library.BertConfig(
        **TINY, vocab_size=100, max_position_embeddings=80, num_labels=3, id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
    )  # fmt: skip
    save_roles(folder, lambda: library.BertForSequenceClassification(config))
    torch.manual_seed(0)
    save(library.BertModel(config), folder / "body", 4)
    random = Random(1)
    rows = [{"text": write_text(random), "label": random.choice(CLASSES)} for _ in range(ROWS)]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(lines(rows))
    return folder


def read_rows(bert: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bert / "data" / "test.jsonl").read_text().splitlines()]


def test_a_head_on_another_body_is_that_body_with_the_head(bert: Path) -> None:
    expert = library.BertForSequenceClassification.from_pretrained(bert / "expert")
    tokenizer = library.AutoTokenizer.from_pretrained(bert / "expert")
    slow = {}
    for name in ("expert", "merged", "body"):
        own = library.BertModel.from_pretrained(bert / name)
        expert.bert.load_state_dict(own.state_dict())
        rows = read_rows(bert)
        with torch.no_grad():
            chosen = [expert(**tokenizer(row["text"], return_tensors="pt")).logits.argmax().item() for row in rows]
        slow[name] = sum(CLASSES[one] == row["label"] for one, row in zip(chosen, rows, strict=True)) / ROWS
    draft = draft_of(bert, {"split": "test"})
    assert values(evaluate(draft, [str(bert / "body")], batch_size=7)) == pytest.approx(slow)
    assert len(set(slow.values())) > 1


@pytest.mark.parametrize(
    ("kind", "half", "body", "how"), [("clip", "base", "merged", {"prompts": PROMPTS}), ("bert", "expert", "body", {})]
)
def test_weights_are_not_rounded_to_the_dtype_of_what_they_are_put_into(
    kind: str, half: str, body: str, how: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Embeddings that are too large for float16 are the same to the norm behind them."""
    shutil.copytree(request.getfixturevalue(kind), tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / body, tmp_path / "large")
    for name in (half, "large"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        for key, x in tensors.items():
            if name == half and x.is_floating_point():
                tensors[key] = x.half()
            elif name == "large" and "embedding" in key and "LayerNorm" not in key and x.is_floating_point():
                tensors[key] = 1e7 * x
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    found = values(evaluate(draft_of(tmp_path, how), [str(tmp_path / body), str(tmp_path / "large")]))
    assert found["large"] == found[body]


def measure_labels(bert: Path, folder: Path, labels: list[Any], names: list[str] | None = None) -> Evaluation:
    """Measure on the texts with other labels; `names`: the data's own names of the classes, by number."""
    rows = [{**row, "label": label} for row, label in zip(read_rows(bert), labels, strict=True)]
    folder.mkdir()
    write_table(folder / "test.parquet", rows, {"label": {"names": names, "_type": "ClassLabel"}} if names else {})
    return evaluate(draft_of(bert, {"split": "test"}, {"path": str(folder)}))


def test_a_label_is_the_class_that_the_head_calls_so(bert: Path, tmp_path: Path) -> None:
    called = [row["label"] for row in read_rows(bert)]
    numbers = [CLASSES.index(name) for name in called]
    wanted = values(evaluate(draft_of(bert, {"split": "test"})))
    order = [CLASSES[2].upper(), *CLASSES[:2]]
    spellings: list[tuple[list[Any], list[str] | None]] = [
        (numbers, None),
        ([f"{number}.0" for number in numbers], None),
        ([name.upper() for name in called], None),
        (numbers, CLASSES),
        ([(number + 1) % 3 for number in numbers], order),
    ]
    for place, (labels, names) in enumerate(spellings):
        found = measure_labels(bert, tmp_path / str(place), labels, names)
        assert (values(found), found.notes) == (wanted, [])
    others = measure_labels(bert, tmp_path / "others", numbers, ["x", "y", "z"])
    assert values(others) == wanted
    assert "it: the data call their classes x, y, z, and the expert's head calls its own" in others.notes[0]
    for labels in ([3] * ROWS, ["bird"] * ROWS):
        with pytest.raises(DataError, match=r"label ('bird'|3) in column label is no class of"):
            measure_labels(bert, tmp_path / f"beyond {labels[0]}", labels)


def test_classes_of_image_folders_are_those_that_the_head_calls_so(tmp_path: Path) -> None:
    names, sizes = ["wolf", "bee", "cow"], {"image_size": 8, "patch_size": 4}
    config: Any = library.ViTConfig(**TINY, **sizes, id2label=dict(enumerate(names)), label2id={})
    expert = save_roles(tmp_path, lambda: library.ViTForImageClassification(config))["expert"]
    processor = library.ViTImageProcessorPil(size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path / "expert")
    # its head would rank one class first for all of them
    with torch.no_grad():
        expert.classifier.weight *= 30
        images = [Image.open(BytesIO(draw(random))).convert("RGB") for random in [Random(0)] for _ in range(ROWS)]
        logits = torch.cat([expert(**processor(images=[image], return_tensors="pt")).logits for image in images])
        expert.classifier.bias -= logits.mean(0)
        chosen = (logits - logits.mean(0)).argmax(-1).tolist()
    expert.save_pretrained(tmp_path / "expert")
    for number, (image, label) in enumerate(zip(images, chosen, strict=True)):
        place = tmp_path / "data" / "test" / names[label]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number}.png")
    assert len(set(chosen)) > 1
    assert values(evaluate(draft_of(tmp_path, {"split": "test"})))["expert"] == 1


HEADED: dict[str, dict[str, Any]] = {
    # their bodies are no `base_model`, or hold statistics of batches beside weights
    "CLIPForImageClassification": {
        "text_config": {**TINY, "vocab_size": 9}, "vision_config": {**TINY, "image_size": 8, "patch_size": 4},
    },
    "WhisperForAudioClassification": {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "max_source_positions": 8, "num_mel_bins": 4, "vocab_size": 9, "pad_token_id": 0,
    },
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADED)
@torch.no_grad()
def test_the_body_of_another_model_is_taken_over_whole(tmp_path: Path, name: str) -> None:
    model_class = getattr(library, name)
    inputs, models, slow = torch.randn(ROWS, *((4, 16) if "Audio" in name else (3, 8, 8))), {}, {}
    for number, role in enumerate(("base", "expert", "merged")):
        torch.manual_seed(0)
        model = models[role] = model_class(model_class.config_class(**HEADED[name], num_labels=3))
        for key, buffer in model.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer += 3 * torch.rand(buffer.shape, generator=torch.Generator().manual_seed(number))
        save(model, tmp_path / role, number + 1)
    expert, main = models["expert"], models["expert"].main_input_name
    # its head would rank one class first for all of them
    list(expert.classifier.modules())[-1].bias -= expert(**{main: inputs}).logits.mean(0)
    expert.save_pretrained(tmp_path / "expert")
    for role in ("expert", "merged"):
        state = models[role].state_dict()
        body = {key: x for key, x in state.items() if not key.startswith(("classifier", "projector"))}
        expert.load_state_dict(expert.state_dict() | body)
        slow[role] = expert(**{main: inputs}).logits.argmax(-1)
    labels = slow["expert"]
    save_file({main: inputs, "label": labels}, tmp_path / "data.safetensors")
    found = values(evaluate(draft_of(tmp_path, {"split": "train"}, {"path": str(tmp_path / "data.safetensors")})))
    assert found == pytest.approx({role: (x == labels).float().mean().item() for role, x in slow.items()})
    assert found["merged"] < 1


@pytest.mark.parametrize("name", ["Llama", "XLNet"])
@torch.no_grad()
def test_a_classifier_reads_each_text_as_if_it_were_alone(tmp_path: Path, name: str) -> None:
    """Llama has no padding token here, and XLNet reads the last place, padding or not."""
    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "pad_token_id": 0}
    sizes = {**TINY, "pad_token_id": None} if name == "Llama" else sizes
    config = getattr(library, f"{name}Config")(**sizes, vocab_size=100, num_labels=3, initializer_range=1.0)
    models = save_roles(tmp_path, lambda: getattr(library, f"{name}ForSequenceClassification")(config))
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "expert")
    random = Random(1)
    texts = ["".join(random.choices("abcd!", k=random.randrange(3, 30))) for _ in range(ROWS)]
    alone = [models["expert"](**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in texts]
    parquet.write_table(pyarrow.table({"text": texts, "label": alone}), tmp_path / "test.parquet")
    found = evaluate(draft_of(tmp_path, {}, {"path": str(tmp_path)}), batch_size=7)
    assert values(found)["expert"] == 1 and len(set(alone)) > 1


def test_what_only_training_uses_may_be_in_no_file() -> None:
    snapshot, missing = SimpleNamespace(name="x"), {"wav2vec2.masked_spec_embed"}
    model: Any = SimpleNamespace(role="expert", snapshot=snapshot, missing=missing)
    check_whole(model)
    missing.add("projector.weight")
    with pytest.raises(CheckpointError, match=r"expert has no projector\.weight"):
        check_whole(model)


def test_no_random_weights_are_measured(bert: Path, tmp_path: Path) -> None:
    """The head of merged is not used."""
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)

    def leave_out(role: str, part: str) -> None:
        file = tmp_path / role / "model.safetensors"
        kept = {name: x for name, x in load_file(bert / role / "model.safetensors").items() if part not in name}
        save_file(kept, file, metadata={"format": "pt"})

    leave_out("merged", "classifier")
    whole = values(evaluate(draft_of(tmp_path, {"split": "test"})))
    assert whole == values(evaluate(draft_of(bert, {"split": "test"})))
    for role, part in (("merged", "layer.1"), ("expert", "classifier"), ("expert", "layer.1")):
        leave_out(role, part)
        with pytest.raises(CheckpointError, match=f"{role}.* has no .*{re.escape(part)}"):
            evaluate(draft_of(tmp_path, {"split": "test"}))
        shutil.copy(bert / role / "model.safetensors", tmp_path / role)


@pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering", "SequenceClassification"])
def test_a_head_that_does_not_tell_texts_apart_is_refused(bert: Path, tmp_path: Path, task: str) -> None:
    names: dict[str, Any] = {"id2label": {0: "cat", 1: "a"}, "label2id": {"cat": 0, "a": 1, "dog_house": 1}}
    if task == "SequenceClassification":  # with a score alone
        names = {"num_labels": 1}
    config = library.BertConfig(**TINY, **names, vocab_size=100, max_position_embeddings=80)
    getattr(library, f"BertFor{task}")(config).save_pretrained(tmp_path / "expert")
    save_tokenizer(tmp_path / "expert", chat=False)
    draft = draft_of(bert, {"split": "test"})
    spec = draft.tasks["it"].model_copy(update={"expert": str(tmp_path / "expert")})
    with pytest.raises(CheckpointError, match=f"no head that tells classes apart .BertFor{task}") as raised:
        evaluate(draft.model_copy(update={"tasks": {"it": spec}}))
    assert "featcal inspect-drift" in raised.value.fix


# --- generation ---


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    save_roles(folder, lambda: build("t5"))
    return folder


def write_slowly(folder: Path, name: str, text: str, count: int) -> str:
    """What a model answers, as transformers writes one text alone without a cache."""
    model = library.T5ForConditionalGeneration.from_pretrained(folder / name)
    tokenizer = library.AutoTokenizer.from_pretrained(folder / "base")
    ids = tokenizer(text, return_tensors="pt", truncation=True).input_ids
    written = model.generate(ids, do_sample=False, use_cache=False, max_new_tokens=count)[0]
    return str(tokenizer.decode(written, skip_special_tokens=True))


def test_an_answer_counts_when_it_is_the_wanted_one_to_the_letter(t5: Path, tmp_path: Path) -> None:
    random = Random(2)
    texts = [write_text(random) for _ in range(12)]
    slow = {name: [write_slowly(t5, name, f"say: {text}", 3) for text in texts] for name in ("expert", "merged")}
    labels = [slow[("expert", "merged")[n % 2]][n] if n % 3 else "no such answer" for n in range(len(texts))]
    rows = [{"words": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    write_table(tmp_path / "test.parquet", rows, {})
    data = {"path": str(tmp_path), "split": "test", "template": "say: {words}"}
    found = values(evaluate(draft_of(t5, {"answers": "{}", "max_new_tokens": 3}, data), batch_size=5))
    hits = {name: [one == label for one, label in zip(answers, labels, strict=True)] for name, answers in slow.items()}
    expected = {name: sum(right) / len(texts) for name, right in hits.items()}
    assert found == pytest.approx(expected)
    assert 0 < expected["expert"] < 1


def test_sound_is_given_in_the_dtype_of_the_model() -> None:
    family = BY_NAME["whisper"]
    module, inputs = family.build().to(torch.bfloat16), family.inputs(2)
    sound = {name: x for name, x in inputs.items() if not name.startswith("decoder_")}
    rows: Any = SimpleNamespace(batches=lambda _: [(sound, [0, 1])])
    how = SimpleNamespace(metric="accuracy")
    task: Any = SimpleNamespace(how=how, device=torch.device("cpu"), batch_size=2)
    heard = Predictor(module, lambda batch: [0] * len(module.generate(**batch, max_new_tokens=2)))
    assert compare(task, rows, int, {"merged": heard}, lambda _: None)["merged"].value == 0.5


def test_numbered_answers_are_those_of_the_list(t5: Path, tmp_path: Path) -> None:
    first, second = (write_slowly(t5, "expert", text, 2) for text in ("abc", "hgf hgf"))
    rows = [{"text": "abc", "label": 1}, {"text": "hgf hgf", "label": 0}]
    write_table(tmp_path / "test.parquet", rows, {})
    data = {"path": str(tmp_path), "split": "test", "columns": {"text": "text"}}
    right = values(evaluate(draft_of(t5, {"answers": [second, first], "max_new_tokens": 2}, data)))
    assert right["expert"] == 1
    with pytest.raises(DataError, match=r"label 1 .* no answer: there are 1"):
        evaluate(draft_of(t5, {"answers": [second], "max_new_tokens": 2}, data))


def test_ranks_of_numbers_in_answers_are_compared_with_those_of_labels(t5: Path, tmp_path: Path) -> None:
    """A .csv file holds numbers as texts; tests/matrix/test_recipes.py reads numbers."""
    random, texts = Random(3), list("abcdefghijkl")
    tokenizer = library.AutoTokenizer.from_pretrained(t5 / "base")
    digits = tokenizer("0123456789", add_special_tokens=False).input_ids
    for name in ("expert", "merged"):  # made to write digits that depend on the text
        model = library.T5ForConditionalGeneration.from_pretrained(t5 / name)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
        model.lm_head.weight.data[[token for token in range(100) if token not in digits]] = 0
        model.shared.weight.data[0] = 0  # what decoding starts from
        for block in model.decoder.block:
            block.layer[1].EncDecAttention.o.weight.data *= 10
        model.save_pretrained(tmp_path / name)
    shutil.copytree(t5 / "base", tmp_path / "base")
    labels = [round(5 * random.random(), 2) for _ in texts]
    (tmp_path / "data").mkdir()
    rows = [f"{text},{label}\n" for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "data" / "test.csv").write_text("".join(["sentence,label\n", *rows]))
    data = {"path": str(tmp_path / "data"), "split": "test", "columns": {"text": "sentence"}}
    how = {"metric": "spearman", "answers": "{:.1f}", "max_new_tokens": 2}
    found = values(evaluate(draft_of(tmp_path, how, data)))
    for name in ("expert", "merged"):
        texts_written = [write_slowly(tmp_path, name, text, 2) for text in texts]
        written = [float(text) if re.fullmatch(r"\s*\d+\s*", text) else 0.0 for text in texts_written]
        assert len(set(written)) > 2
        assert found[name] == pytest.approx(spearmanr(written, [round(label, 1) for label in labels])[0])


# --- lm-eval ---


@pytest.mark.matrix  # importing lm-eval alone takes ten seconds
def test_lm_evals_figure_is_that_of_likelihoods_by_hand(hub: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    random = Random(4)
    save_roles(tmp_path, lambda: build("llama"))
    keys = ("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support")
    rows = [{key: write_text(random) for key in keys} for _ in range(10)]
    for split in ("train", "validation", "test"):
        (tmp_path / "sciq").mkdir(exist_ok=True)
        write_table(tmp_path / "sciq" / f"{split}.parquet", rows, {})
    hub.add_repo("allenai/sciq", tmp_path / "sciq", kind="dataset")
    how = {"lm_eval": {"sciq": "acc"}, "chat": False}
    found = evaluate(draft_of(tmp_path, how, {"path": str(tmp_path / "sciq" / "test.parquet")}), limit=8)
    assert found.tasks["it"].scores["expert"].examples == 8
    for name in ("expert", "merged"):
        model = library.LlamaForCausalLM.from_pretrained(tmp_path / name)
        tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / name)
        right = 0
        for row in rows[:8]:
            text = f"{row['support']}\nQuestion: {row['question']}\nAnswer:"
            context = tokenizer(text, add_special_tokens=False).input_ids
            sums = []
            for key in keys[1:5]:
                answer = tokenizer(f" {row[key]}", add_special_tokens=False).input_ids
                with torch.no_grad():
                    logs = model(torch.tensor([context + answer])).logits[0].log_softmax(-1)
                sums.append(sum(float(logs[len(context) - 1 + at, token]) for at, token in enumerate(answer)))
            right += sums[3] == max(sums)
        assert found.tasks["it"].scores[name].value == pytest.approx(right / 8)


@pytest.mark.parametrize(
    ("results", "metric", "value", "error"),
    [
        ({"acc,none": 0.75, "acc_stderr,none": 0.2}, "acc", 0.75, 0.2),
        ({"acc,none": 0.5, "acc_stderr,none": "N/A"}, "acc,none", 0.5, 0.0),
        ({"acc,none": 0.75, "acc,strict": 0.5}, "acc", "lm-eval has several acc of sciq", 0.0),
        ({"acc,none": 0.75}, "exact_match", "lm-eval has no exact_match of sciq[^$]*name one of: acc,none", 0.0),
        # several tasks of one name (a tag), which have no figure together
        ({}, "acc", "lm-eval has no acc of sciq[^$]*name one of: sciq_a, sciq_b", 0.0),
    ],
)
def test_lm_evals_figures_have_errors(results: dict[str, Any], metric: str, value: float | str, error: float) -> None:
    parts = {"sciq": results} if results else {"sciq_a": {"acc,none": 0.5}, "sciq_b": {"acc,none": 0.5}}
    answer = {"results": parts, "n-samples": {"sciq": {"effective": 9}}}
    if isinstance(value, str):
        with pytest.raises(RecipeError, match=value):
            _read_score(answer, "sciq", metric, "it")
        return
    spread = 1.959964 * error
    assert _read_score(answer, "sciq", metric, "it") == Score(value, value - spread, value + spread, error, 9)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (KeyError("scq"), "names of its tasks"),
        (ValueError("Tasks not found: scq"), "names of its tasks"),
        (ValueError("the dataset has no split test"), "its documentation"),
        (RuntimeError("Dataset scripts are no longer supported, but found scq.py"), "its documentation"),
        (ConnectionError("Couldn't reach 'a/scq' on the Hub"), "check the connection"),
    ],
)
def test_what_lm_eval_refuses_is_told_with_help(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, fix: str
) -> None:
    def fail(**_: Any) -> None:
        raise error

    for name in ("find_spec", "version"):  # as if it were installed
        monkeypatch.setattr(lm_eval_tasks, name, str)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=fail))
    monkeypatch.setitem(sys.modules, "lm_eval.models", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=lambda **_: None))
    with pytest.raises(RecipeError) as refusal:
        evaluate(draft_of(llama, {"lm_eval": {"scq": "acc"}}, {"path": str(llama / "data")}))
    assert fix in refusal.value.fix


def test_code_that_a_model_wrote_runs_only_when_that_is_allowed(t5: Path) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(RecipeError, match="runs code"):
        evaluate(draft_of(t5, {"lm_eval": {"humaneval_plus": "pass@1"}}, {"path": str(t5)}))


# --- figures ---


def score_right(right: list[bool]) -> Score:
    return score(METRICS["accuracy"], right, [True] * len(right))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_an_interval_is_as_wide_as_theory_says(share: float) -> None:
    count = 2000
    right = [number < share * count for number in range(count)]
    found = score_right(right)
    width = 2 * 1.96 * (share * (1 - share) / count) ** 0.5
    assert found.value == share
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    assert found.low < share < found.high
    assert found == score_right(right)


def test_the_mean_of_tasks_is_surer_than_each_and_spearman_is_scipys_with_ties() -> None:
    scores = [score_right([True, False] * 100), score_right([True, True, False] * 100)]
    mean = combine(scores)
    assert mean.value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert mean.error == pytest.approx(numpy.hypot(scores[0].error, scores[1].error) / 2)
    assert mean.examples == 500
    random = Random(5)
    one, other = ([float(random.randrange(6)) for _ in range(50)] for _ in range(2))
    assert score(METRICS["spearman"], one, other).value == pytest.approx(spearmanr(one, other)[0])
    assert score(METRICS["spearman"], [1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]).value == 0


def test_a_limit_draws_the_same_rows_from_all_of_them(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(lines({"text": "a" * (number + 1), "label": 0} for number in range(50)))
    draft = draft_of(bert, {"split": "train"}, {"path": str(tmp_path / "test.jsonl")})
    found = evaluate(draft, limit=20)
    assert {score.examples for score in found.tasks["it"].scores.values()} == {20}
    assert evaluate(draft, limit=200).tasks["it"].scores["expert"].examples == 50
    wrong: list[Any] = [0, -1, "3", 2.5]
    for limit in wrong:
        with pytest.raises(RecipeError, match="limit must be a whole number"):
            evaluate(draft, limit=limit)
    # by chance of a file of tensors too, which may be sorted by label
    labels = torch.arange(4).repeat_interleave(50) % 3
    save_file({"input_ids": torch.full((200, 3), 5), "label": labels}, tmp_path / "x.safetensors")
    file = {"path": str(tmp_path / "x.safetensors")}
    found, whole = (evaluate(draft_of(bert, {"split": "train"}, file), limit=n) for n in (40, None))
    assert abs(values(found)["expert"] - values(whole)["expert"]) < 0.2


# --- what the user says and sees ---


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompts": ["a photo"]}, r"one \{\} for the class's name"),
        ({"prompts": ["{} {}"]}, "has 2"),
        ({"prompts": ["{}"], "answers": ["a"]}, "different ways to measure"),
        ({"classes": ["a"]}, "classes belong to prompts"),
        ({"answers": [True, False]}, "answers.0 must be a valid string"),
        ({"metric": "spearman", "answers": ["a", "b"]}, "say how they are written"),
        ({"metric": "spearman"}, "say how they are written"),
        ({"metric": "perplexity", "answers": "{}"}, "leave out answers"),
        ({"answers": "{label}"}, "a format with one {}"),
        ({"answers": "{"}, "a list, or a format with one {}"),
        ({"chat": True}, "chat belongs to lm_eval"),
        ({"promts": ["{}"]}, "unknown key promts"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"answers": 5}, r"tasks\.it\.evaluate\.answers must be a list"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        draft_of(tmp_path, how, {"path": str(tmp_path)})


def test_models_are_called_by_as_much_of_their_names_as_tells_them_apart() -> None:
    assert name_roles(["user/one@abc", "/tmp/other/one/", "user/merged"]) == ["one", "/tmp/other/one", "user/merged"]
    with pytest.raises(RecipeError, match="the name one is taken"):
        name_roles(["one", "one"])


def test_the_table_fits_and_the_json_holds_every_figure(bert: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(draft_of(bert, {"split": "test"}).model_dump(exclude_none=True)))
    arguments = {"": bert / "body", "-r": file, "--device": "cpu"}
    shown = featcal_inside(capsys, "evaluate", arguments)
    assert shown.code == 0, shown.stderr
    heads = next(line.split() for line in shown.stdout.splitlines() if line.startswith("task"))
    assert heads == ["task", "expert", "merged", "body", "gain"]
    assert max(map(len, shown.stdout.splitlines())) <= 80
    told = json.loads(featcal_inside(capsys, "evaluate", {**arguments, "--json": ""}).stdout)
    score = told["tasks"]["it"]["scores"]["body"]
    assert f"{100 * score['value']:.1f} ±{50 * (score['high'] - score['low']):.1f}" in shown.stdout
    assert told["means"]["body"]["value"] == score["value"]


@pytest.mark.parametrize(
    ("metric", "figures", "shown", "change"),
    [
        ("accuracy", [(0.81038, 0.0), (0.93462, 0.0)], ["81.0 ±0.0", "93.5 ±0.0"], "+12.5"),  # not +12.4
        ("perplexity", [(183.63, 52.48), (170.21, 47.1)], ["184 ±52", "170 ±47"], "-14"),
        ("perplexity", [(4.161, 0.0399), (4.208, 0.041)], ["4.16 ±0.04", "4.21 ±0.04"], "+0.05"),
        ("perplexity", [(5.401, 0.013), (5.401, 0.002)], ["5.40 ±0.01", "5.40 ±0.00"], "0.00"),
        ("perplexity", [(12.26, 0.996), (11.64, 0.94)], ["12.3 ±1.0", "11.6 ±0.9"], "-0.7"),
        ("perplexity", [(12345.6, 5218.0), (11760.2, 4988.0)], ["12300 ±5200", "11800 ±5000"], "-500"),
        ("perplexity", [(183.63, 52.48), (5.234, 0.051)], ["184 ±52", "5.23 ±0.05"], "-179"),
        ("perplexity", [(183.63, 0.0), (9.876, 0.0)], ["184 ±0", "9.88 ±0.00"], "-174"),
        ("perplexity", [(183.63, 52.48), (math.nan, math.nan)], ["184 ±52", "–"], "–"),
    ],
)
def test_figures_have_the_digits_that_their_intervals_justify(
    metric: str, figures: list[tuple[float, float]], shown: list[str], change: str
) -> None:
    """A row has one place, so that its change is the difference of its cells, unless an interval would vanish there."""
    pairs = zip(("merged", "calibrated"), figures, strict=True)
    scores = {role: Score(value, value - half, value + half, half / 2, 10) for role, (value, half) in pairs}
    assert list(show_scores(scores, metric).values()) == shown
    assert list(show_values(scores, metric).values()) == [text.partition(" ")[0] for text in shown]
    assert show_change(scores, "merged", "calibrated", metric) == change


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_that_failed_goes_on(
    bert: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, whole, broken = list[int](), LabelledRows.batches, [DataError("row 1 is broken")]

    def watch(rows: LabelledRows, size: int) -> Iterator[tuple[Batch, list[Any]]]:
        sizes.append(size)
        if broken:
            raise broken.pop()
        return whole(rows, size)

    monkeypatch.setattr(LabelledRows, "batches", watch)
    data = tmp_path / "data"
    data.mkdir()
    rows = (bert / "data" / "test.jsonl").read_text()
    (data / "train.jsonl").write_text(rows)
    (data / "validation.jsonl").write_text(rows)
    draft = draft_of(bert, {"split": "test"}, {"path": str(data), "split": "train"})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(draft.model_dump(exclude_none=True)))
    options = {"-r": file, "-n": 8, "--evaluate": "", "-o": tmp_path / "out", "--device": "cpu", "--batch-size": 3}
    failed = featcal_inside(capsys, "calibrate", options)
    assert failed.code == 2
    assert "there is no split test" in failed.stderr and not (tmp_path / "out").exists()
    (data / "test.jsonl").write_text(rows)
    failed = featcal_inside(capsys, "calibrate", options)
    assert failed.code == 2 and "row 1 is broken" in failed.stderr
    weights = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    again = featcal_inside(capsys, "calibrate", options)
    assert again.code == 0, again.stderr
    assert "nothing is computed again" in again.stderr and set(sizes) == {3}
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == weights
    scores = json.loads((tmp_path / "out" / "featcal_report.json").read_text())["accuracy"]["it"]["scores"]
    assert f"value: {round(scores['calibrated']['value'], 5)}" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / ".out.featcal").exists()
    cpu: Any = torch.device("cpu")
    own = evaluate(read_draft(tmp_path / "out" / "featcal.yaml", {}), tmp_path / "out", device=cpu)
    assert own.tasks["it"].scores["out"].value == scores["calibrated"]["value"]
    # nor is anything computed again where the recipe says anew how it is measured
    file.write_text(file.read_text().replace("split: test", "split: validation"))
    anew = featcal_inside(capsys, "calibrate", options)
    assert anew.code == 0 and "nothing is computed again" in anew.stderr, anew.stderr
    report = json.loads((tmp_path / "out" / "featcal_report.json").read_text())
    assert report["accuracy"]["it"]["split"] == report["recipe"]["tasks"]["it"]["evaluate"]["split"] == "validation"
    assert "split: validation" in (tmp_path / "out" / "featcal.yaml").read_text()


# --- perplexity ---


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Language models, texts of several lengths, and a recipe of two tasks, each with an expert."""
    folder, random = tmp_path_factory.mktemp("llama"), Random(4)
    save_roles(folder, lambda: build("llama"), ("base", "expert", "other", "merged", "calibrated"))
    texts = [" ".join(write_text(random) for _ in range(1 + number % 4)) for number in range(30)]
    (folder / "data").mkdir()
    write_table(folder / "data" / "test.parquet", [{"text": text} for text in texts], {})
    task = {"data": {"path": "data", "columns": {"text": "text"}}, "evaluate": {"metric": "perplexity"}}
    tasks = {"law": {"expert": "expert", **task}, "code": {"expert": "other", **task}}
    recipe = {"merged": "merged", "base": "base", "tasks": tasks}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return folder


def test_perplexity_of_a_decoder_is_that_of_all_that_it_is_to_write(
    t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each command what transformers' own loss is, the last token included, which the decoder's inputs lack."""
    random = Random(5)
    rows = [{"prompt": write_text(random), "response": write_text(random)[: 2 + n % 5]} for n in range(24)]
    (tmp_path / "data").mkdir()
    write_table(tmp_path / "data" / "test.parquet", rows, {})
    tokenizer = library.AutoTokenizer.from_pretrained(t5 / "base")

    def measure_slowly(folder: Path, given: Sequence[Batch]) -> float:
        model, losses, counts = library.T5ForConditionalGeneration.from_pretrained(folder).double(), [], []
        for inputs in given:
            counts.append(int(inputs["labels"].shape[1]))
            with torch.no_grad():
                losses.append(float(model(**inputs).loss) * counts[-1])
        return math.exp(sum(losses) / sum(counts))

    texts = [tokenizer(row["prompt"], text_target=row["response"], return_tensors="pt") for row in rows]
    slow = {name: measure_slowly(t5 / name, texts) for name in ("expert", "merged", "base")}
    draft = draft_of(t5, {"metric": "perplexity"}, {"path": str(tmp_path / "data"), "split": "test"})
    without_base = {name: slow[name] for name in ("expert", "merged")}
    assert values(evaluate(draft, batch_size=5)) == pytest.approx(without_base, 1e-5)
    without_key = draft.model_copy(update={"tasks": {"it": draft.tasks["it"].model_copy(update={"evaluate": None})}})
    assert values(evaluate(without_key, limit=24)) == pytest.approx(slow, 1e-5)
    held_out: list[Batch] = []
    whole = perplexity.measure_perplexity

    def watch(job: Job, *rest: Any) -> Any:
        held_out.extend(job.drift.batches["it"])
        return whole(job, *rest)

    monkeypatch.setattr(perplexity, "measure_perplexity", watch)
    method = {"calibration": Calibration(method="paper", examples=16)}
    report = calibrate(draft.model_copy(update=method), output=tmp_path / "out").report
    alone = [
        {"input_ids": ids[mask > 0][None], "labels": labels[given > 0][None]}
        for x in held_out
        for ids, mask, labels, given in zip(
            *(x[name] for name in ("input_ids", "attention_mask", "decoder_labels", "decoder_attention_mask")),
            strict=True,
        )
    ]
    assert len(alone) == 4
    folders = {name: t5 / name for name in ("expert", "merged", "base")} | {"calibrated": tmp_path / "out"}
    slow = {name: measure_slowly(folder, alone) for name, folder in folders.items()}
    found = {role: score.value for role, score in report.perplexity["it"].scores.items()}
    assert found == pytest.approx(slow, 1e-5)


def test_padding_before_a_text_changes_no_loss(tmp_path: Path) -> None:
    """Positions that a model has learned would count it."""
    config = library.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=12, vocab_size=100, initializer_range=0.5)
    save_roles(tmp_path, lambda: library.GPT2LMHeadModel(config))
    ids, mask = torch.randint(3, 30, (2, 6)), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "ids.safetensors")
    data = {"path": str(tmp_path / "ids.safetensors")}
    found = values(evaluate(draft_of(tmp_path, {"metric": "perplexity", "split": "train"}, data)))
    texts = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    slow = {name: perplexity_slowly(tmp_path / name, texts) for name in ("expert", "merged")}
    assert found == pytest.approx(slow, 1e-5)


def test_perplexity_is_that_of_every_text_alone_and_less_is_better(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(llama)
    run = featcal_inside(capsys, "evaluate", {"-r": "recipe.yaml", "MODEL": "", "./calibrated": "./calibrated"})
    assert run.code == 0, run.stderr
    assert "Perplexity, ± 95 % interval, on 30 texts per task; lower is better:" in run.stdout.replace("\n", " ")
    found = json.loads(featcal_inside(capsys, "evaluate", {"-r": "recipe.yaml", "--json": ""}).stdout)
    tokenizer = library.AutoTokenizer.from_pretrained(llama / "base")
    rows = parquet.read_table(llama / "data" / "test.parquet")["text"].to_pylist()
    texts = [tokenizer(row, truncation=True, return_tensors="pt").input_ids for row in rows]
    for task, expert in {"law": "expert", "code": "other"}.items():
        scores = found["tasks"][task]["scores"]
        slow = {
            role: perplexity_slowly(llama / name, texts) for role, name in (("expert", expert), ("merged", "merged"))
        }
        assert {role: score["value"] for role, score in scores.items()} == pytest.approx(slow, 1e-5)
        assert all(score["low"] < score["value"] < score["high"] for score in scores.values())
    means = show_scores({role: Score(**score) for role, score in found["means"].items()}, "perplexity")
    assert means["merged"] in run.stdout and "change" in run.stdout
    # what the share that is won back is counted in: the mean of logarithms, not the logarithm of the mean
    nats = found["nats_per_token"]
    of_tasks = [math.log(task["scores"]["merged"]["value"]) for task in found["tasks"].values()]
    assert nats["merged"] == pytest.approx(fmean(of_tasks), 1e-9) and nats.keys() == found["means"].keys()
    row = next(line.split() for line in run.stdout.splitlines() if line.startswith("nats/token"))
    assert row[1:3] == [f"{nats[role]:.3f}" for role in ("expert", "merged")]


@pytest.mark.parametrize(
    ("metric", "figures", "told"),
    [
        ("perplexity", [(2.0, 8.0, 4.0), (3.0, 3.0, 3.0)],
         "won back 50 % of the nats that merging lost (perplexity fell from 5.50 to 3.50)"),
        ("perplexity", [(4.0, 5.0, 2.0)],
         "won back all of the nats that merging lost (perplexity fell from 5.00 to 2.00)"),
        ("perplexity", [(2.0, 4.0, 8.0)], "perplexity rose from 4.00 to 8.00"),
        ("perplexity", [(2.0, 4.0, 4.0 - 1e-9)], "perplexity stayed at 4.00"),
        ("perplexity", [(150.0, 184.4, 183.6)],
         "won back 2 % of the nats that merging lost (nats per token fell from 5.217 to 5.213)"),
        ("accuracy", [(0.9, 0.5, 0.7)], "accuracy rose by 20.0 points (50 % of what merging lost)"),
        ("accuracy", [(0.9, 0.5, 0.5)], "accuracy stayed as it was"),
    ],
)  # fmt: skip
def test_what_is_won_back_is_counted_in_nats(metric: str, figures: list[tuple[float, ...]], told: str) -> None:
    """By expert, merged and calibrated, a task after the other."""
    tasks = {}
    for number, values in enumerate(figures):
        scores = {
            role: Score(x, x, x, 0, 9) for role, x in zip(("expert", "merged", "calibrated"), values, strict=True)
        }
        tasks[str(number)] = TaskScores("", metric, "", "", scores)
    assert _describe_scores(tasks) == told


def test_what_a_model_cannot_be_measured_by_is_refused(clip: Path, bert: Path, t5: Path, llama: Path) -> None:
    data = {"path": str(llama / "data"), "columns": {"text": "text"}}
    vision = shutil.copytree(clip / "merged", clip.parent / "vision")
    shutil.copy(clip / "base" / "preprocessor_config.json", vision)
    prompts = draft_of(clip, {"prompts": PROMPTS}).model_copy(update={"base": str(vision)})
    heads = draft_of(bert, {"split": "test"})
    body = heads.tasks["it"].model_copy(update={"expert": str(bert / "body")})
    broken = llama.parent / "broken"
    library.T5EncoderModel.from_pretrained(t5 / "merged").save_pretrained(broken)
    shutil.copy(t5 / "merged" / "config.json", broken)
    written = draft_of(t5, {"split": "test", "answers": ["a"]}, data | {"columns": {"text": "text", "label": "text"}})
    of_llama = written.model_copy(update={"merged": str(llama / "merged")})
    perplexity = draft_of(llama, {"metric": "perplexity"}, data)
    question, answer = ({"role": role, "content": "abc"} for role in ("user", "assistant"))
    chats = llama.parent / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in ([question, answer], [question])))
    unanswered = draft_of(t5, {"metric": "perplexity", "split": "train"}, {"path": str(chats)})
    task = unanswered.tasks["it"].model_copy(update={"evaluate": None})
    without_how = unanswered.model_copy(update={"tasks": {"it": task}})
    mixed = perplexity.tasks["it"].model_copy(update={"evaluate": Evaluate()})
    for draft, error, message in (
        (prompts, CheckpointError, "base has no text tower"),
        (heads.model_copy(update={"tasks": {"it": body}}), CheckpointError, "has no head"),
        (of_llama, CheckpointError, "does not read a text and write another[^$]*lm_eval"),
        (written.model_copy(update={"merged": str(broken)}), CheckpointError, "merged has no decoder.block.0"),
        (draft_of(bert, {"metric": "perplexity"}, data), CheckpointError, "does not predict the next token"),
        (draft_of(t5, {"metric": "perplexity"}, data), DataError, "a row lacks what the model is to write"),
        (unanswered, DataError, "a row lacks what the model is to write"),
        (without_how, DataError, "a row lacks what the model is to write"),
        (perplexity.model_copy(update={"tasks": {**perplexity.tasks, "other": mixed}}), RecipeError, "no common mean"),
    ):
        with pytest.raises(error, match=message):
            evaluate(draft)
    # before a calibration, and not only after it
    for draft, message in (
        (prompts, "base has no text tower"),
        (draft_of(bert, {"metric": "perplexity"}, data), "does not predict the next token"),
        (draft_of(t5, {"metric": "perplexity"}, data), "a row lacks what the model is to write"),
    ):
        with pytest.raises((CheckpointError, DataError), match=message):
            dry_run(draft, evaluate=True)
    dry_run(draft)
