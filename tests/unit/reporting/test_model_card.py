"""The model card: what it says is in the report, and nothing that others wrote can change what it is."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import HubServer
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from markdown_it.token import Token

from featcal_cli.calibration.results import BlockReport, ModuleReport
from featcal_cli.cli.results import show_calibration, show_evaluation
from featcal_cli.evaluation.results import Evaluation, Score, TaskScores
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.reporting.model_card import MARK, copy_merged_card, read_license, write_card
from featcal_cli.reporting.report import (
    MERGED_CARD,
    ModelDrift,
    OutputDrift,
    PlaceDrift,
    Report,
    Source,
    TaskDrift,
    TaskInspection,
)
from featcal_cli.runtime.sanitise import one_line
from featcal_cli.runtime.structured_text import split_front_matter

COMMIT = "01234567" * 5
HOSTILE = {
    "a bar": "a|b",
    "a script": "<script>alert(1)</script>",
    "a heading": "x\n## y",
    "backticks": "`x` ``y ```z",
    "a rule": "x\n---\ny",
    "yaml": "x\nlicense: mit\n---\n",
    "an image": "![x](https://tracker.example/x.png)",
    "a link": "[x](javascript:alert(1))",
    "an address": "<https://evil.example> https://evil.example",
    "a list": "- x",
    "a number": "1. x",
    "emphasis": "**x** _y_ ~~z~~ \\*",
    "an entity": "&lt;b&gt; &#124;",
    "right to left": "x\u202ey\u200b",
    "a comment": "<!-- x",
    "a section": "\n\n## Use\n\n",
}
README = """\
---
license: apache-2.0
language: [en, "x\\n---\\ninjected: true"]
tags: [mergekit, merge, "x\\ninjected: true"]
pipeline_tag: image-feature-extraction
---
<!-- made by
a tool -->
# Merged model

<div align="center"><img src="https://tracker.example/a.png"></div>

[![badge](https://tracker.example/b.svg)](https://example.com) ![far](https://tracker.example/c.png) ![near](img/a.png)

Title underlined
================

Wrap it in `<s>`, as /home/somebody/merges/config does. [here](javascript:alert(1))

```yaml
# no heading
models: ["<b>"]
```

## Drift from the experts

It fell by 100 %, says hf_abcdefghijklmnopqrstuvwxyz.
"""


def metadata(card: str) -> dict[str, Any]:
    """What huggingface_hub reads in the header."""
    return dict(ModelCard(card).data.to_dict())  # type: ignore[no-untyped-call]


class Reader(MarkdownIt):
    """Obeys everything: raw HTML, and links to anywhere."""

    def __init__(self) -> None:
        super().__init__("commonmark", {"html": True})
        self.enable(["table", "strikethrough"])

    def validateLink(self, url: str) -> bool:  # noqa: ARG002, N802
        return True


def test_a_report_is_json_whatever_was_measured_and_is_read_back() -> None:
    report = make_report()
    broken = replace(report.drift["digit"], before=nan, after=inf, base=-inf)
    block = report.blocks[0]
    modules = [replace(block.modules[0], relative_change=nan)]
    blocks = [replace(block, modules=modules), *report.blocks[1:]]
    report = replace(report, drift=report.drift | {"digit": broken}, blocks=blocks)
    text = report.to_json()
    values = json.loads(text, parse_constant=pytest.fail)
    assert [values["drift"]["digit"][key] for key in ("before", "after", "base")] == [None, None, None]
    assert values["drift"]["letter"]["before"] == report.drift["letter"].before
    again = Report.from_json(text)
    assert isnan(again.drift["digit"].before) and isnan(again.blocks[0].modules[0].relative_change)
    assert again.drift["letter"] == report.drift["letter"] and again.has_grown


def make_report(task: str = "digit", **changes: Any) -> Report:
    """A run with two tasks, one of them named `task`."""
    tasks = (task, "letter")
    module = ModuleReport("q_proj", "linear", 100, 0.25)
    report = Report(
        featcal_version="0.1.0",
        recipe={"merged": {"method": "task_arithmetic", "scale": 0.3}},
        environment={"device": "cpu", "torch": "2.13.0", "transformers": "5.23.0", "platform": "Linux x86_64"},
        settings={
            "ridge": 0.05, "rho": 2.0, "alpha": 0.3, "method": "paper",
            "chosen_by": "the paper's for encoder models", "norms": "auto", "bias": True, "token_weights": "cls",
            "examples": dict.fromkeys(tasks, 8),
        },
        blocks=[
            BlockReport(f"layers.{n}", 1.0, [module], [{"name": "norm", "reason": "a norm without bias"}])
            for n in range(3)
        ],
        drift={name: TaskDrift(0.8, 0.6, 1.2, 0.5, 0.7, True) for name in tasks},
        cost={"seconds": 125, "peak_rss_bytes": 2**30, "peak_device_bytes": 0, "expert_bytes_read": 2**20},
        notes=["org/a is an adapter; folded copy kept in /root/.cache/featcal/a-1"],
        sources=[
            Source("merged", "org/merged", COMMIT, "the command line", "apache-2.0"),
            Source("base", "org/base", COMMIT, "mergekit_config.yml", "apache-2.0"),
            Source(f"expert {task}", "org/expert-a", COMMIT, "mergekit_config.yml", "apache-2.0"),
            Source("expert letter", "org/expert-b", COMMIT, "mergekit_config.yml", "apache-2.0"),
            Source(f"data {task}", "org/data-a", COMMIT, "the card of org/expert-a", "mit"),
            Source("data letter", "/home/me/my data/letters", None, "the command line", None),
        ],
    )  # fmt: skip
    return replace(report, **changes)


def walk(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from walk(token.children or [])


def parse(markdown: str) -> list[Token]:
    """What a reader makes of a document; the header of a card is none of it."""
    return list(walk(Reader().parse(MARK + markdown.partition(MARK)[2] if MARK in markdown else markdown)))


def outline(tokens: list[Token]) -> list[tuple[str, str]]:
    return [(t.tag, tokens[at + 1].content) for at, t in enumerate(tokens) if t.type == "heading_open"]


def shape(tokens: list[Token]) -> list[tuple[str, str]]:
    """The blocks of a document, without their text."""
    return [(token.type, token.tag) for token in tokens if token.nesting or token.type in ("fence", "html_block")]


def test_metadata_names_all_that_the_weights_were_computed_from_but_not_the_model_itself(hub: HubServer) -> None:
    card = write_card(make_report(), name="mended", target="me/mended", merged_readme=README)
    assert metadata(card) == {
        "base_model": ["org/merged", "org/base", "org/expert-a", "org/expert-b"],
        "base_model_relation": "merge",
        "datasets": ["org/data-a"],
        "language": ["en"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["featcal", "merge", "mergekit"],
    }
    pooled = ["modules.json", "1_Pooling/config.json"]
    for name, library in (("setfit", "setfit"), ("peft", "sentence-transformers")):
        readme = README.replace("tags:", f"library_name: {name}\ntags:")
        report = replace(make_report(), files=pooled)
        of_library = write_card(report, name="mended", merged_readme=readme, runs_code=True)
        assert metadata(of_library)["library_name"] == library
        loading = 'SentenceTransformer("mended", trust_remote_code=True)'
        assert (loading in of_library) is (library == "sentence-transformers")
    own = write_card(make_report(), name="merged", target="org/merged")
    assert metadata(own)["base_model"] == ["org/base", "org/expert-a", "org/expert-b"]
    for accepted in (card, own):
        assert hub.url
        ModelCard(accepted).validate()


MIT = "---\nlicense: mit\n---\n"


@pytest.mark.parametrize(
    ("merged", "base", "expert", "carried"),
    [
        (MIT, MIT, "---\nlicense: [mit]\n---\n", {"license": "mit"}),
        (MIT, MIT, "---\nlicense: apache-2.0\n---\n", {}),
        (MIT, "# no header", MIT, {}),
        (MIT, None, MIT, {}),
        (MIT, "---\nlicense: [mit, gpl]\n---\n", MIT, {}),
        ("---\nlicense: 'm|<b>'\n---\n",) * 3 + ({},),
        ("---\nlicense: unknown\n---\n",) * 3 + ({},),
        ("---\n: [\n---\n",) * 3 + ({},),
        ("---\nlicense: other\nlicense_name: x-1\n---\n",) * 3 + ({},),
    ],
)
def test_a_licence_on_which_all_agree_stays(
    merged: str, base: str | None, expert: str, carried: dict[str, str]
) -> None:
    cards = {"merged": merged, "base": base, "expert digit": expert, "expert letter": expert, "data digit": None}
    sources = [Source(role, "org/x", COMMIT, "the command line", read_license(text)) for role, text in cards.items()]
    card = write_card(make_report(sources=sources), name="mended", merged_readme=merged)
    assert {key: value for key, value in metadata(card).items() if key.startswith("license")} == carried
    assert ("No licence is carried over" in card) is (not carried)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_of_others_shows_as_what_it_is(text: str) -> None:
    def card(text: str) -> str:
        sources = make_report(text).sources
        models = [replace(source, license=text, found_in=text) for source in sources]
        report = make_report(
            text, sources=[*models, Source(text, text, text, text, text)], notes=[text],
            blocks=[BlockReport(text, 1.0, [], [{"name": text, "reason": text}])],
            environment=dict.fromkeys(("device", "torch", "transformers", "platform"), text),
        )  # fmt: skip
        header = yaml.safe_dump(dict.fromkeys(("license", "license_name", "language", "pipeline_tag"), text))
        return write_card(report, name=text, merged_readme=f"---\n{header}---\n")

    hostile, plain = parse(card(text)), parse(card("plain text"))
    assert shape(hostile) == shape(plain)
    assert outline(hostile)[1:] == outline(plain)[1:]
    assert [t.content for t in hostile if t.type == "html_inline"] == []
    cells = [hostile[at + 1] for at, token in enumerate(hostile) if token.type == "td_open"]
    assert "".join(child.content for child in cells[0].children or []) == one_line(text)
    assert metadata(card(text)) == metadata(card("plain text"))


def test_the_merged_models_own_card_is_linked_or_kept_in_a_file() -> None:
    report = make_report()
    at_hub = write_card(report, name="mended", merged_readme=README)
    url = f"https://huggingface.co/org/merged/blob/{COMMIT}/README.md"
    links = [token.attrs["href"] for token in parse(at_hub) if token.type == "link_open"]
    assert url in links and copy_merged_card(report, README.encode()) == {}
    local = [replace(s, name="/home/me/merged", commit=None) if s.role == "merged" else s for s in report.sources]
    report = replace(report, sources=local)
    in_folder = write_card(report, name="mended", merged_readme=README)
    assert MERGED_CARD in [token.attrs["href"] for token in parse(in_folder) if token.type == "link_open"]
    hidden = README.replace("hf_abcdefghijklmnopqrstuvwxyz", "hf_…")
    for encoding in ("utf-8", "utf-16-le"):
        (kept,) = copy_merged_card(report, README.encode(encoding)).values()
        assert kept.decode() == hidden
    for own in (hidden.replace("\n", "\r\n").encode("utf-8-sig"), hidden.encode("utf-16"), b"caf\xe9\r\n"):
        assert copy_merged_card(report, own) == {MERGED_CARD: own}
    assert MERGED_CARD not in write_card(report, name="mended") and copy_merged_card(report, b"") == {}


def test_no_path_and_no_token_gets_into_the_card() -> None:
    token = "hf_" + "a1" * 15
    report = make_report(token, notes=[f"read /srv/x/{token}/y and /home/me/my data/letters"])
    card = write_card(report, name=token, target=f"me/{token}", merged_readme=f"{README}{token}")
    assert token not in card
    assert not re.search(r"/home|/srv|/root|my data", card)
    assert "read y and letters" in card


def test_growing_drift_is_said_at_the_top() -> None:
    report = make_report()
    grown = replace(report, drift=report.drift | {"letter": TaskDrift(0.5, 0.7, 1.2, 0.5, 0.4, False)})
    card = write_card(grown, name="mended")
    assert "drift grew on letter" in card[: card.index("## ")]
    assert "| letter | 0.500 | 0.700 | +40 % | 1.200 |" in card
    assert "on held-out rows, but on calibration examples for letter" in card
    assert "grew" not in write_card(report, name="mended")


def test_the_median_of_two_changes_is_between_them() -> None:
    modules = [ModuleReport(name, "linear", 100, change) for name, change in (("q_proj", 0.09), ("k_proj", 0.01))]
    card = write_card(make_report(blocks=[BlockReport("layers.0", 1.0, modules, [])]), name="mended")
    assert "Their weights moved by 5 % (median) and by 9 % at most." in card


KINDS = [
    ({"q_proj": "linear"}, False, "linear projections of transformer blocks were calibrated."),
    ({"q_proj": "linear", "ln": "layernorm", "dwconv": "convolution"}, False,
     "linear projections, convolutions and norms of transformer blocks were calibrated."),
    ({"mlp.experts.down_proj[0]": "linear", "ln": "rmsnorm"}, False,
     "linear projections and norms of transformer blocks (experts of mixtures included) were calibrated."),
    ({"c_attn": "conv1d", "projection": "convolution"}, True,
     "linear projections and convolutions of transformer blocks and of the stem (patch embeddings) before"),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "stems", "sentence"), KINDS)
def test_the_limits_name_the_kinds_of_calibrated_modules(kinds: dict[str, str], stems: bool, sentence: str) -> None:
    """And weights that stayed as merged are not said to have changed."""
    modules = [ModuleReport(name, kind, 100, 10.0, 0.25) for name, kind in kinds.items()]
    report = make_report(blocks=[BlockReport("layers.0", 1.0, modules, [])])
    report = replace(report, settings={**report.settings, "stems": stems})
    card = write_card(report, name="mended")
    assert f"Only {sentence}" in card.partition("## Limits")[2].replace("\\", "")
    assert "its weights were changed in closed form" in card
    undone = write_card(replace(report, settings={**report.settings, "step": 0.0}), name="mended")
    assert "were calibrated." not in undone.partition("## Limits")[2]
    assert "so all weights are the merged model's" in undone and "were changed" not in undone


def test_what_the_result_is_judged_by_comes_first() -> None:
    def drift(distance: float) -> ModelDrift:
        return ModelDrift(PlaceDrift(1.0, 1.0, 0.5), [], OutputDrift("logits", distance, 0.1, 0.5))

    models = {"merged": drift(0.4), "calibrated": drift(0.3), "base": drift(0.9)}
    report = replace(make_report(), measures={task: TaskInspection(8, models) for task in ("digit", "letter")})
    card = write_card(replace(report, settings={**report.settings, "metric": "output"}), name="x")
    assert "Mean distance of outputs from the experts', on held-out rows: **0.400 → 0.300** (−25 %)" in card
    outputs, _, features = card.partition("## Distance of outputs")[2].partition("## Drift from the experts")
    assert "| **mean** | 0.400 | 0.300 | −25 % | 0.900 |" in outputs
    assert "| **mean** | 0.800 | 0.600 | −25 % | 1.200 |" in features
    assert "Distance of outputs" not in write_card(report, name="x")


def make_scores(metric: str, error: float, split: str = "test", **values: float) -> TaskScores:
    scores = {role: Score(x, x - 2 * error, x + 2 * error, error, 100) for role, x in values.items()}
    return TaskScores("as it is measured", metric, "data", split, scores)


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        (make_scores("accuracy", 0.05, expert=0.9, merged=0.5, calibrated=0.75),
         ["## Accuracy", "| digit | 90.0 ±10.0 | 50.0 ±10.0 | 75.0 ±10.0 |",
          "Mean accuracy: **50.0 ±9.8 → 75.0 ±9.8** % (experts: 90.0 ±9.8 %)"]),
        (make_scores("perplexity", 0.25, expert=6.0, merged=9.0, calibrated=7.0),
         ["## Perplexity", "lower is better", "| digit | 6.00 ±0.50 | 9.00 ±0.50 | 7.00 ±0.50 |",
          "Mean perplexity: **9.00 ±0.49 → 7.00 ±0.49** (experts: 6.00 ±0.49): 62 % of the nats that merging lost"]),
    ],
    ids=["accuracy", "perplexity"],
)  # fmt: skip
def test_scores_have_a_table_with_intervals_and_a_place_in_the_index(scores: TaskScores, shown: list[str]) -> None:
    report = make_report(accuracy={"digit": scores})
    card = write_card(report, name="mended", merged_readme="---\npipeline_tag: image-classification\n---\n")
    for words in (*shown, "| **mean** | 0.800 | 0.600 | −25 % | 1.200 |"):
        assert words in card
    other = "Accuracy" if scores.metric == "perplexity" else "Perplexity"
    assert f"## {other}" not in card and f"Mean {other.lower()}" not in card
    (result,) = ModelCard(card).data.eval_results  # type: ignore[attr-defined]
    assert (result.metric_type, result.metric_value) == (scores.metric, scores.scores["calibrated"].value)
    assert result.task_type == "image-classification"
    assert Report.from_json(report.to_json()) == report
    assert shown[0] not in write_card(make_report(), name="mended")


def test_perplexity_on_held_out_rows_is_in_the_card_and_not_in_the_index() -> None:
    scores = make_scores("perplexity", 0.25, "held-out rows", expert=6.0, merged=9.0, calibrated=7.0, base=8.0)
    report = make_report(perplexity={"law": scores})
    card = write_card(report, name="x")
    table = "| task | expert | merged | calibrated | base |\n| --- | ---: | ---: | ---: | ---: |\n| law | 6.00 ±0.50 |"
    assert table in card and f"{report.measured_on[0].upper()}{report.measured_on[1:]}; lower is better" in card
    assert not ModelCard(card).data.eval_results  # type: ignore[attr-defined]
    assert Report.from_json(report.to_json()) == report


def test_accuracy_and_perplexity_are_both_shown_but_no_perplexity_twice(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = {"law": make_scores("accuracy", 0.05, expert=0.9, merged=0.5, calibrated=0.75)}
    held_out = {"law": make_scores("perplexity", 0.25, "held-out rows", expert=6.0, merged=9.0, calibrated=7.0)}
    report = make_report(accuracy=accuracy, perplexity=held_out)
    card = write_card(report, name="x")
    assert card.index("| law | 90.0 ±10.0 |") < card.index("## Perplexity") < card.index("| law | 6.00 ±0.50 |")
    assert "Mean accuracy: **50.0" in card and "Mean perplexity: **9.00" in card
    assert report.won_back == pytest.approx((0.75 - 0.5) / (0.9 - 0.5))
    show_calibration(report, Path("x"), None, 10.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "labelled examples per task:" in shown and "held-out texts per task; lower is better:" in shown
    told = "Accuracy rose by 25.0 points (62 % of what merging lost), perplexity fell from 9.00 to 7.00 "
    assert f"{told}(62 % of the nats that merging lost) and mean drift fell" in shown
    of_split = {"law": make_scores("perplexity", 0.25, "test", expert=6.5, merged=9.0, calibrated=7.0)}
    card = write_card(make_report(accuracy=of_split, perplexity=held_out), name="x")
    assert "| law | 6.50 ±0.50 |" in card and "| law | 6.00 ±0.50 |" not in card


def test_code_commands_and_notes_are_those_of_the_place() -> None:
    classes: dict[str, Any] = {"model_class": "LlamaForCausalLM", "processor_class": "AutoTokenizer"}
    column = "column text, tokenizer from its expert"
    notes = [f"digit: {column}", f"letter: {column}", "all"]  # those that say the same are one
    pushed = write_card(make_report(notes=notes), name="mended", target="me/mended", **classes)
    assert 'model = LlamaForCausalLM.from_pretrained("me/mended", dtype="auto")' in pushed
    assert 'tokenizer = AutoTokenizer.from_pretrained("me/mended")' in pushed
    assert "hf download me/mended featcal.yaml --local-dir ." in pushed
    assert f"- digit and letter: {column}\n- all\n" in pushed
    local = write_card(make_report(sources=[]), name="my model; rm x", **classes)
    assert 'model = LlamaForCausalLM.from_pretrained("my model; rm x", dtype="auto")' in local
    assert "hf download" not in local
    assert "featcal calibrate -r featcal.yaml -o 'my model; rm x-again'" in local
    assert "a merge of its experts (task\\_arithmetic, scale 0.3)" in local


def test_metadata_are_kept_as_the_hub_reads_them() -> None:
    readme = "---\nlanguage: [no, en]\ntags: [on, 1e-3, '2024-01-02']\n---\n"
    card = write_card(make_report(), name="calibrated", merged_readme=readme)
    read, _, _ = split_front_matter(card)
    assert read is not None and read["language"] == ["no", "en"]
    assert read["tags"] == ["featcal", "merge", "on", "2024-01-02"]  # a number is no tag
    # also for huggingface_hub, which reads YAML 1.1
    assert metadata(card)["language"] == ["no", "en"]


def test_a_note_is_not_repeated_that_another_section_holds() -> None:
    report = make_report()
    source = report.sources[0]
    told = [f"from {source.found_in}: {source.role} {source.name}", "settings: method featcal, ridge 0.0001"]
    assert write_card(replace(report, notes=told), name="x") == write_card(replace(report, notes=[]), name="x")
    assert "- batches were halved" in write_card(replace(report, notes=[*told, "batches were halved"]), name="x")


def test_a_new_metric_needs_nothing_but_its_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = replace(
        METRICS["spearman"], title="Absolute error", hub_name="mae", lower_is_better=True, scale=1.0, digits=2
    )
    monkeypatch.setitem(METRICS, "mae", error)
    scores = make_scores("mae", 0.1, expert=0.5, merged=1.5, calibrated=1.0)
    report = make_report(accuracy={"digit": scores})
    card = write_card(report, name="mended")
    assert "Mean absolute error: **1.50 ±0.20 → 1.00 ±0.20** (experts: 0.50 ±0.20): 50 % of what merging lost" in card
    assert "## Absolute error\n\nOn labelled data; lower is better; ± is half" in card
    assert "## Accuracy" not in card and "In percent" not in card
    assert report.won_back == 0.5
    show_evaluation(Evaluation("0", {}, {"digit": scores}, [], {}, {}, None, 1.0), 1.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Absolute error, ± 95 % interval, on 100 labelled examples per task; lower is better:" in shown
    assert " change " in shown and " gain " not in shown and "-0.50" in shown
