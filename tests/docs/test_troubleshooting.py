"""Every message in the tables of docs/troubleshooting.md is one that featcal prints."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import bad_data
import bad_models
import bad_options
import pytest
import torch
from bad_input import Arguments, Arrange, Stage, good_arguments, of_images, options
from command_line import Capsys, featcal_inside
from families import save_tokenizer
from hub_faults import go_down
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

from featcal_cli import calibrate
from featcal_cli.runtime.errors import OutputError

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PART = re.compile(r"^## (?P<title>[^\n]*)|^\| `(?P<text>[^`]*)` \|", re.MULTILINE)
BLANK = re.compile("‹(.*?)›")


@dataclass(frozen=True)
class Quote:
    text: str
    code: int
    """The exit code that the page's heading tells."""


def read_quotes() -> list[Quote]:
    found, code = [], 2
    for part in PART.finditer(PAGE):
        if part["title"]:
            code = 3 if "exit code 3" in part["title"] else 2
        else:
            found.append(Quote(part["text"], code))
    return found


def fits(quoted: str, printed: str) -> bool:
    """Whether a line is what is quoted: what stands in ‹…› may be another, the same one where it comes again."""
    pattern, names = "", list[str]()
    for number, text in enumerate(BLANK.split(quoted)):
        if number % 2 == 0:
            pattern += re.escape(text)
        elif text in names:
            pattern += rf"(?P=_{names.index(text)})"
        else:
            pattern += rf"(?P<_{len(names)}>.+?)"
            names.append(text)
    return re.fullmatch(pattern, printed) is not None


ALONE: Arguments = {"--base": None, "--expert": None, "--data": None}
"""The merged model, and nothing said about what it was made from."""


def experts_of_two_bases(stage: Stage) -> Arguments:
    for name, base in (("red", "user/base"), ("green", "user/other")):
        stage.write(f"{name}/README.md", f"---\nbase_model: {base}\n---\n")
    both = [f"{name}={stage.folder / name}" for name in ("red", "green")]
    data = [f"{name}={stage.folder / name}.safetensors" for name in ("red", "green")]
    return {"--base": None, "--expert": both, "--data": data}


def hub_that_is_down(stage: Stage) -> Arguments:
    go_down(stage.patch)
    stage.patch.setattr("time.sleep", lambda _: None)
    return {"--expert": "red=user/expert"}


def full_memory(stage: Stage) -> Arguments:
    def fail(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError

    stage.patch.setattr("featcal_cli.workflows.calibrate.calibrate_blocks", fail)
    return {"--device": "cpu"}


def huge_pixels(stage: Stage) -> Arguments:
    """An example that is finite, but what comes out of it is not."""
    pixels = torch.randn(6, 3, 32, 32)
    pixels[2] = 3e38
    save_file({"pixel_values": pixels}, stage.folder / "pixels.safetensors")
    return of_images(stage, stage.folder / "pixels.safetensors")


def unfinished_run(stage: Stage) -> Arguments:
    """All blocks are done, and there was no room for the output."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OutputError("cannot write: no space left on device")

    job = {name: str(stage.folder / name) for name in ("merged", "base")}
    task = {"expert": str(stage.folder / "red"), "data": str(stage.folder / "red.safetensors")}
    recipe = {**job, "tasks": {"red": task}, "calibration": {"examples": 4, "ridge": 0.05}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OutputError):
        patch.setattr("featcal_cli.workflows.calibrate.write_output", fail)
        calibrate(recipe, output=stage.folder / "out")
    return {"--ridge": 0.1}


def evaluated(stage: Stage, task: str, folder: Path) -> Arguments:
    """A recipe for `featcal evaluate`: merged, base and one expert in a folder."""
    models = f"merged: {folder / 'merged'}\nbase: {folder / 'base'}\n"
    recipe = stage.write("evaluate.yaml", f"{models}tasks: {{red: {{expert: {folder / 'red'}, {task}}}}}\n")
    return {**ALONE, "command": "evaluate", "merged": None, "-r": recipe, "-n": None, "-o": None}


def hidden_labels(stage: Stage) -> Arguments:
    config = BertConfig(hidden_size=32, max_position_embeddings=64, **bad_models.TINY)
    for name in ("merged", "base", "red"):
        BertForSequenceClassification(config).save_pretrained(stage.folder / "heads" / name)
    save_tokenizer(stage.folder / "heads" / "red")
    rows = stage.write("rows.jsonl", '{"text": "w2 w3", "label": -1}\n' * 3)
    return evaluated(stage, f"data: {rows}, evaluate: {{split: train}}", stage.folder / "heads")


def push_of_what_is_worse(stage: Stage) -> Arguments:
    """An anchor that lies far away."""
    stage.patch.setenv("HF_TOKEN", stage.hub.add_token("user"))
    return {"--method": "paper", "--ridge": 1000, "--rho": 30, "--alpha": 0, "--push-to": "user/result"}


WAYS: dict[str, Arrange] = {
    "what the base of": options(base=None),
    "do not agree on a base": experts_of_two_bases,
    "which experts": options(base=None, expert=None, data=None),
    "passthrough": options(
        {"merged/mergekit_config.yml": "merge_method: passthrough\nslices: []\n"}, base=None, expert=None, data=None
    ),
    "names no dataset": options(data=None),
    "there is no model": options(expert="red=user/nothing"),
    "is gated": bad_options.closed("gated"),
    "only pickled weights": bad_options.pickles_on_the_hub,
    "cannot be reached": hub_that_is_down,
    "no column holds": bad_data.file("numbers.csv", "height,weight\n" + "1,2\n" * 20),
    "rows cannot be used": bad_data.file("rows.jsonl", '{"text": ""}\n' * 20),
    "no tokenizer can be loaded": bad_data.no_tokenizer,
    "of shape": bad_models.expert_of_another_width,
    "red› lacks the tensor": bad_models.expert_with_fewer_blocks,
    "of another architecture": bad_models.base_of_another_architecture,
    "is quantised": bad_models.merged_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "does not say which base": bad_models.adapter(base_model_name_or_path=None),
    "needs code from the repo": bad_models.merged_config(architectures=["NewModel"], auto_map={"AutoModel": "e.E"}),
    "has NaN or infinity": bad_models.tensors(
        lambda found: found["encoder.layer.1.output.dense.weight"].fill_(float("nan"))
    ),
    "not a whole safetensors file": bad_models.cut_short,
    "Apple's GPUs (mps)": options(device="mps"),
    "of disk are needed": lambda stage: stage.patch.setattr(
        "featcal_cli.workflows.plan_checks.free_bytes", lambda _: 1
    ),
    "does not suffice": full_memory,
    "are not finite at": huge_pixels,
    "unfinished run": unfinished_run,
    "needs a token": options(push_to="user/result"),
    "hides its labels": hidden_labels,
    "over --max-drift": options(command="inspect-drift", o=None, max_drift=0.001),
    "nothing to judge by": options(n=6, strict=""),
    "mean drift grew": push_of_what_is_worse,
    "drift grew on": options(method="paper", ridge=1000, rho=30, alpha=0, strict=""),  # an anchor that lies far away
}
"""Words of a message, and what makes featcal say it."""


@pytest.mark.parametrize("quote", read_quotes(), ids=lambda quote: quote.text[:40])
def test_messages_in_the_page_are_those_printed(stage: Stage, capsys: Capsys, quote: Quote) -> None:
    (arrange,) = [way for words, way in WAYS.items() if words in quote.text]
    chosen = {"command": "calibrate", **good_arguments(stage.folder), **(arrange(stage) or {})}
    run = featcal_inside(capsys, str(chosen.pop("command")), chosen)
    assert run.code == quote.code, run.stderr
    assert any(fits(f"error: {quote.text}", line) for line in run.stderr.splitlines()), run.stderr


def test_no_case_is_left_over() -> None:
    quotes = read_quotes()
    assert {words for words in WAYS if any(words in quote.text for quote in quotes)} == set(WAYS)
    assert len(quotes) == len(WAYS) == PAGE.count("\n| `")
