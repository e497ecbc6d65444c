# ruff: noqa: E501 - a row for each merge
"""Merges as they look on the Hub: shapes of real configurations and cards, with names of our own, in repos of small text
files without a server.

`ORG/` stands for the owner of every repo. What is asked for is written as on the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import dedent
from typing import Any

import yaml
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

from featcal_cli.hub.repo import Kind, Opener, Repo, open_repo
from featcal_cli.recipe.references import existing_path
from featcal_cli.runtime.errors import HubError

Files = Mapping[str, str]
"""Path → text."""


def card(text: str = "", **metadata: Any) -> dict[str, str]:
    """A README.md."""
    return {"README.md": f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{dedent(text)}"}


@dataclass(frozen=True)
class TextRepo(Repo):
    """A repo of text files without a server."""

    texts: Files = field(default_factory=dict)
    is_gated: bool = False

    @cached_property
    def files(self) -> Mapping[str, int]:
        weights = "adapter_model.safetensors" if "adapter_config.json" in self.texts else "model.safetensors"
        return dict.fromkeys((*self.texts, weights), 1)

    def read_text(self, path: str, errors: str = "strict") -> str | None:  # noqa: ARG002 - as every repo has it
        assert not path.endswith(".safetensors"), "weights are not read for it"
        if self.is_gated:
            raise lost(self.name, f"{self.name} is gated")
        return self.texts.get(path)


def lost(name: str, what: str) -> HubError:
    """The error for a repo that is not there, or may not be read."""
    error = HubError(what, where=name, fix="check the name")
    request = httpx.Request("GET", "https://h")
    error.__cause__ = RepositoryNotFoundError("404", response=httpx.Response(404, request=request))
    return error


def open_texts(repos: Mapping[str, Files]) -> Opener:
    """What opens these repos, by name: `ID[@REVISION]`, `data ID` for a dataset, `gated ID` for a gated model; and
    folders of this machine."""

    def open_one(name: str, kind: Kind = "model") -> Repo:
        if existing_path(name):
            return open_repo(name, kind)
        key = ("data " if kind == "dataset" else "") + name.removesuffix("@main")
        is_gated = f"gated {key}" in repos
        if key not in repos and not is_gated:
            raise lost(name, f"there is no {kind} {name}, or it is private")
        texts = repos[f"gated {key}" if is_gated else key]
        return TextRepo(name.partition("@")[0], kind, "0" * 40, None, texts, is_gated)

    return open_one


@dataclass(frozen=True)
class Merge:
    """A merge, and what is to come of it."""

    name: str
    files: Files
    """Of ORG/merged."""
    repos: Mapping[str, Files]
    base: str = ""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Task → expert, that are found; where something is asked, those that the command fills in."""
    asks: tuple[str, ...] = ()
    """Options with a placeholder, and --skip-expert."""
    refused: str = ""
    """Words of the reason why it cannot be calibrated."""
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Role → where it is said, in part."""
    words: tuple[str, ...] = ()
    """Parts of the message that asks or refuses."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """What the user says besides."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Role → what is found, besides base and experts."""


def config(text: str) -> dict[str, str]:
    return {"mergekit_config.yml": dedent(text)}


def model(*parents: str, data: Any = None, **metadata: Any) -> dict[str, str]:
    """A model's card; without `data` it names no dataset."""
    told: dict[str, Any] = {"base_model": parents[0] if len(parents) == 1 else list(parents)} if parents else {}
    return card(**told, **({"datasets": data} if data else {}), **metadata)


def lora(base: str, data: Any = None) -> dict[str, str]:
    config = f'{{"peft_type": "LORA", "r": 16, "base_model_name_or_path": "{base}"}}'
    return {**model(base, data=data), "adapter_config.json": config}


def listed(method: str, *models: str, **keys: Any) -> dict[str, str]:
    entries = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in models]
    merge = {"models": entries, "merge_method": method, **keys, "dtype": "bfloat16"}
    return {"mergekit_config.yml": yaml.safe_dump(merge)}


CHAT, CODE = model("ORG/Base-7B", data=["ORG/rows"]), model("ORG/Base-7B", data=["ORG/rows"])
TWO = {"ORG/Base-7B-chat": CHAT, "ORG/Base-7B-code": CODE}
SILENT = {"ORG/Base-7B-chat": model(data="ORG/rows"), "ORG/Base-7B-code": model(data="ORG/rows")}
BOTH = {"chat": "ORG/Base-7B-chat", "code": "ORG/Base-7B-code"}
THREE = card(base_model=["ORG/Base-7B-chat", "ORG/Base-7B", "ORG/Base-7B-code"])
TIES = dedent("""
    models:
      - model: ORG/Base-7B
        # the base needs no parameters
      - model: ORG/Base-7B-chat
        parameters: {density: [1, 0.7, 0.1], weight: 1.0}
      - model: ORG/Base-7B-code
        parameters:
          density: 0.33
          weight:
            - filter: mlp
              value: 0.5
            - value: 0
    merge_method: ties
    base_model: ORG/Base-7B
    parameters: {normalize: true, int8_mask: true}
    dtype: float16
    """)
SLERP = """
    slices:
      - sources:
          - {model: ORG/Base-7B-chat, layer_range: [0, 32]}
          - {model: ORG/Base-7B-code, layer_range: [0, 32]}
    merge_method: slerp
    base_model: ORG/Base-7B-chat
    parameters:
      t:
        - filter: self_attn
          value: [0, 0.5, 0.3, 0.7, 1]
        - filter: mlp
          value: [1, 0.5, 0.7, 0.3, 0]
        - value: 0.5
    dtype: bfloat16
    """
POOL = """
    # Fused

    ### Model Pool Configuration

    ```yaml
    _target_: fusion_bench.modelpool.CausalLMPool
    models:
      _pretrained_: ORG/Base-7B
      chat: ORG/Base-7B-chat
      coder: {_target_: transformers.AutoModel, pretrained_model_name_or_path: ORG/Base-7B-code}
    ```
    """
EARLIER = """
    merged: other/merged@0123456789012345678901234567890123456789
    base: ORG/Base-7B@v1
    tasks:
      sums: {expert: ORG/Base-7B-chat@v1, data: {dataset: ORG/rows, revision: v1, config: hard, split: train}}
      code: {expert: ORG/Base-7B-code, data: {path: code.jsonl}}
    calibration: {examples: 7}
    """
SAID = "the command line or recipe"
CONFIG = "mergekit_config.yml of ORG/merged"

MERGES = [
    Merge("ties-with-gradients", config(TIES), SILENT, "ORG/Base-7B", BOTH),
    Merge("dare-ties-and-tokenizer-source", {**listed("dare_ties", *BOTH.values(), base_model="ORG/Base-7B", tokenizer_source="union", chat_template="auto"), **card(base_model=[*BOTH.values(), "ORG/Base-7B"], tags=["mergekit", "merge"])}, SILENT, "ORG/Base-7B", BOTH),
    Merge("della-with-a-tokenizer-section", listed("della_linear", *BOTH.values(), base_model="ORG/Base-7B", tokenizer={"source": "union", "tokens": {"<|im_start|>": {"source": "ORG/Base-7B-chat"}}}), SILENT, "ORG/Base-7B", BOTH),
    Merge("model-stock-on-an-instruct-model", listed("model_stock", *BOTH.values(), base_model="ORG/Base-7B-Instruct"), SILENT, "ORG/Base-7B-Instruct", BOTH),
    Merge("breadcrumbs-with-comments", config("merge_method: breadcrumbs_ties\nbase_model: ORG/Base-7B\nmodels:\n  - model: ORG/Base-7B-chat\n#  - model: ORG/left-out\n  - model: ORG/Base-7B-code\ntokenizer:\n  source: union\n#mergekit-yaml this.yml /data/out --cuda\n"), SILENT, "ORG/Base-7B", BOTH),
    Merge("task-arithmetic-by-slices-with-the-base-among-them", config("base_model: ORG/Base-7B\ndtype: bfloat16\nmerge_method: task_arithmetic\nparameters: {normalize: false}\nslices:\n- sources:\n  - {layer_range: [0, 32], model: ORG/Base-7B}\n  - {layer_range: [0, 32], model: ORG/Base-7B-chat, parameters: {weight: 0.5}}\n  - {layer_range: [0, 32], model: ORG/Base-7B-code, parameters: {weight: 0.5}}\n"), SILENT, "ORG/Base-7B", BOTH),
    Merge("slerp-with-t-by-filter", config(SLERP), TWO, "ORG/Base-7B", BOTH, note="with slerp, base_model "),
    Merge("slerp-of-the-base-and-its-child", listed("slerp", "ORG/Base-7B", "ORG/Base-7B-chat", base_model="ORG/Base-7B", parameters={"t": 0.5}), {**TWO, "ORG/Base-7B": card()}, "ORG/Base-7B", {"7b-chat": "ORG/Base-7B-chat"}, note="went into the merge too"),
    Merge("nuslerp-without-a-base", listed("nuslerp", *BOTH.values()), TWO, "ORG/Base-7B", BOTH),
    Merge("linear-without-a-base", {**listed("linear", *BOTH.values()), **card(base_model=[*BOTH.values()][::-1])}, {**TWO, "ORG/Base-7B-code": model("ORG/Base-7B-code", data="ORG/rows")}, "ORG/Base-7B", BOTH, sources={"base": "base_model of ORG/Base-7B-chat"}),
    Merge("linear-whose-base-model-is-averaged", listed("linear", *BOTH.values(), base_model="ORG/Base-7B-chat"), TWO, "ORG/Base-7B", BOTH, note="with linear, base_model "),
    Merge("karcher-of-children-of-children", listed("karcher", "ORG/Chat-v2", "ORG/Base-7B-code"), {**TWO, "ORG/Chat-v2": model("ORG/Base-7B-chat", data="ORG/rows")}, "ORG/Base-7B", {"chat-v2": "ORG/Chat-v2", "base-7b-code": "ORG/Base-7B-code"}, note="ORG/Chat-v2 comes from ORG/Base-7B-chat, which comes from ORG/Base-7B"),
    Merge("models-with-loras", listed("task_arithmetic", "ORG/Base-7B+ORG/chat-lora", "ORG/Base-7B+ORG/code-lora", base_model="ORG/Base-7B"), {"ORG/chat-lora": lora("ORG/Base-7B", "ORG/rows"), "ORG/code-lora": lora("ORG/Base-7B", "ORG/rows")}, "ORG/Base-7B", {"chat": "ORG/Base-7B+ORG/chat-lora", "code": "ORG/Base-7B+ORG/code-lora"}),
    Merge("models-in-their-long-form", config("merge_method: ties\nbase_model: {model: {path: ORG/Base-7B, revision: v2}}\nmodels:\n  - model: {model: {path: ORG/Base-7B-chat, revision: v1}, lora: null}\n  - model: {model: ORG/Base-7B@v2, lora: {path: ORG/code-lora, revision: v3}}\n"), {"ORG/Base-7B-chat@v1": model(data="ORG/rows"), "ORG/code-lora@v3": lora("ORG/Base-7B", "ORG/rows")}, "ORG/Base-7B@v2", {"base-7b-chat": "ORG/Base-7B-chat@v1", "code-lora": "ORG/Base-7B@v2+ORG/code-lora@v3"}),
    Merge("pinned-revisions", listed("ties", "ORG/Base-7B-chat@v1", "ORG/Base-7B@v2+ORG/code-lora@v3", base_model="ORG/Base-7B@v2"), {"ORG/Base-7B-chat@v1": model(data="ORG/rows"), "ORG/code-lora@v3": lora("ORG/Base-7B", "ORG/rows")}, "ORG/Base-7B@v2", {"base-7b-chat": "ORG/Base-7B-chat@v1", "code-lora": "ORG/Base-7B@v2+ORG/code-lora@v3"}),
    Merge("adapters-that-are-named-alone", {**card("merged by hand", base_model=["ORG/chat-lora", "ORG/code-lora"])}, {"ORG/chat-lora": lora("ORG/Base-7B", "ORG/rows"), "ORG/code-lora": lora("ORG/Base-7B", "ORG/rows")}, "ORG/Base-7B", {"chat": "ORG/chat-lora", "code": "ORG/code-lora"}),
    Merge("formulas-of-two-generations", card(f"The last formula:\n```yaml\n{TIES}```\nThis one:\n```yaml\n{TIES.replace('ties', 'della')}```\n".replace("\n", "\n    "), base_model=[*BOTH.values(), "ORG/Base-7B"]), {**TWO, "ORG/Base-7B": card()}, "ORG/Base-7B", BOTH),
    Merge("lazy-notebook-card", card(f"# Merged\n\nmade of [chat](https://huggingface.co/ORG/Base-7B-chat)\n\n## Configuration\n\n```yaml\n{TIES}```\n\n## Usage\n\n```python\n!pip install -qU transformers\n```\n", base_model=[*BOTH.values()], tags=["merge", "mergekit", "lazymergekit"]), SILENT, "ORG/Base-7B", BOTH),
    Merge("details-and-a-fence-without-a-language", card("<details><summary>recipe</summary>\n\n  ~~~\n  merge_method: linear\n  models:\n    - model: ORG/Base-7B-chat\n    - model: ORG/Base-7B-code\n  ~~~\n\n</details>\n"), TWO, "ORG/Base-7B", BOTH),
    Merge("list-with-the-base-and-a-relation", card(base_model=["ORG/Base-7B", *BOTH.values()], base_model_relation="merge"), {**TWO, "ORG/Base-7B": card(base_model="ORG/older"), "ORG/Base-7B-code": model(data="ORG/rows")}, "ORG/Base-7B", BOTH, sources={"base": "base_model of ORG/Base-7B-chat"}),
    Merge("list-of-the-base-and-an-adapter", card(base_model=["ORG/Base-7B", "ORG/chat-lora"]), {"ORG/Base-7B": card(), "ORG/chat-lora": lora("ORG/Base-7B", "ORG/rows")}, "ORG/Base-7B", {"chat-lora": "ORG/chat-lora"}, sources={"base": "base_model of ORG/chat-lora"}),
    Merge("list-without-the-base", card(base_model=[*BOTH.values()], base_model_relation="merge"), TWO, "ORG/Base-7B", BOTH),
    Merge("list-of-addresses", card(base_model=["https://huggingface.co/ORG/Base-7B-chat", "https://huggingface.co/ORG/Base-7B-code"]), {"ORG/Base-7B-chat": model("https://huggingface.co/ORG/Base-7B", data=["https://huggingface.co/datasets/ORG/rows"]), "ORG/Base-7B-code": CODE}, "ORG/Base-7B", BOTH),
    Merge("mirror-of-the-base", listed("linear", *BOTH.values()), {"ORG/Base-7B-chat": model("ORG/copies-of-Base-7B", data="ORG/rows"), "ORG/Base-7B-code": CODE, "ORG/copies-of-Base-7B": model("ORG/Base-7B"), "ORG/Base-7B": card()}, "ORG/Base-7B", BOTH),
    Merge("an-expert-and-its-child", listed("linear", "ORG/Base-7B-Instruct", "ORG/Base-7B-Instruct-code"), {"ORG/Base-7B-Instruct": model("ORG/Base-7B", data="ORG/rows"), "ORG/Base-7B-Instruct-code": model("ORG/Base-7B-Instruct", data="ORG/rows")}, "ORG/Base-7B", {"instruct": "ORG/Base-7B-Instruct", "instruct-code": "ORG/Base-7B-Instruct-code"}),
    Merge("an-expert-that-is-a-merge", listed("slerp", "ORG/mix", "ORG/Base-7B-code", base_model="ORG/mix"), {**TWO, "ORG/mix": model("ORG/Base-7B-chat", "ORG/Base-7B", data="ORG/rows", base_model_relation="merge")}, "ORG/Base-7B", {"mix": "ORG/mix", "base-7b-code": "ORG/Base-7B-code"}),
    Merge("modules", config("{merge_method: ties, base_model: ORG/Base-7B, modules: {vision: {models: [{model: ORG/Base-7B-chat}]}, text: {models: [{model: ORG/Base-7B-code}]}}}"), SILENT, "ORG/Base-7B", BOTH),
    Merge("karcher-whose-base-model-is-averaged", listed("karcher", "ORG/Base-7B-code", base_model="ORG/Base-7B-chat"), TWO, "ORG/Base-7B", BOTH, note="with karcher, base_model "),
    Merge("a-model-has-no-weight", config("{merge_method: ties, base_model: ORG/Base-7B, models: [{model: ORG/Base-7B-chat, parameters: {weight: 1}}, {model: ORG/Base-7B-code, parameters: {weight: [0, 1]}}, {model: ORG/Base-7B-toxic, parameters: {weight: 0.0}}]}"), SILENT, "ORG/Base-7B", BOTH, note="with a positive weight: ORG/Base-7B-toxic"),
    Merge("model-stock-reads-no-weights", config("{merge_method: model_stock, base_model: ORG/Base-7B, models: [{model: ORG/Base-7B-chat, parameters: {weight: 0}}, {model: ORG/Base-7B-code}]}"), SILENT, "ORG/Base-7B", BOTH),
    Merge("a-model-is-subtracted", config("{merge_method: task_arithmetic, base_model: ORG/Base-7B, models: [{model: ORG/Base-7B-chat, parameters: {weight: 1}}, {model: ORG/Base-7B-code, parameters: {weight: [{filter: mlp, value: 1}, {value: -0.1}]}}, {model: ORG/Base-7B-toxic, parameters: {weight: [-1, -0.5]}}]}"), SILENT, "ORG/Base-7B", BOTH, note="with a positive weight: ORG/Base-7B-toxic"),
    Merge("nuslerp-with-a-base", {"mergekit_config.yaml": listed("nuslerp", *BOTH.values(), base_model="ORG/Base-7B")["mergekit_config.yml"]}, SILENT, "ORG/Base-7B", BOTH, sources={"base": "mergekit_config.yaml of ORG/merged"}),
    Merge("linear-whose-card-lists-one-model-more", {**listed("linear", *BOTH.values()), **THREE}, SILENT, "", BOTH, ("--base REPO",), words=("nothing says what the base",)),
    Merge("a-gated-base-is-not-needed", THREE, {**TWO, "gated ORG/Base-7B": card()}, "ORG/Base-7B", BOTH, note="ORG/Base-7B was not asked"),
    Merge("an-expert-that-names-the-merged-repo", listed("linear", *BOTH.values()), {**TWO, "ORG/Base-7B-chat": model("ORG/merged", data="ORG/rows")}, "ORG/Base-7B", BOTH, sources={"base": "base_model of ORG/Base-7B-code"}),
    Merge("a-card-that-lists-its-own-repo", card(base_model=["ORG/merged", "ORG/Base-7B", *BOTH.values()]), TWO, "ORG/Base-7B", BOTH, note="names the repo itself"),
    Merge("an-older-revision-of-itself-as-the-base", listed("ties", *BOTH.values(), base_model="ORG/merged@v1"), SILENT, "ORG/merged@v1", BOTH),
    Merge("fusion-bench-pool", card(POOL), SILENT, "ORG/Base-7B", {"chat": "ORG/Base-7B-chat", "coder": "ORG/Base-7B-code"}),
    Merge("fusion-bench-pool-with-a-reference", card("```yaml\ntype: huggingface_clip_vision_pool\nbase_model: ORG/Base-7B\nmodels:\n  _pretrained_: {path: '${...base_model}'}\n  chat: {path: ORG/Base-7B-chat}\n  code: {path: ORG/Base-7B-code}\n```\n"), SILENT, "ORG/Base-7B", BOTH),
    Merge("one-path-of-the-authors-machine", {**listed("dare_ties", "D:/Uni/Code/finetuned/remerge_2", "ORG/Base-7B-chat", base_model="ORG/Base-7B")}, SILENT, "ORG/Base-7B", {"base-7b-chat": "ORG/Base-7B-chat"}, ("--expert remerge_2=REPO", "--data remerge_2=SOURCE"), words=("'D:/Uni/Code/finetuned/remerge_2'", "its author's machine", "mergekit_config.yml of ORG/merged")),
    Merge("nothing-but-paths", {**listed("ties", "/root/top1", "/root/top2", base_model="/root/top"), **card(base_model=[])}, {}, "", {}, ("--base REPO", "--expert top1=REPO", "--data top1=SOURCE", "--expert top2=REPO", "--data top2=SOURCE")),
    Merge("base-on-the-authors-machine", listed("ties", *BOTH.values(), base_model="/workspace/models/base"), TWO, "", BOTH, ("--base REPO",)),
    Merge("silent-experts", listed("linear", *BOTH.values()), {name: card() for name in BOTH.values()}, "", BOTH, ("--base REPO", "--data chat=SOURCE", "--data code=SOURCE"), words=("nothing says what the base of ORG/merged is", "the cards of ORG/Base-7B-chat")),
    Merge("silent-list", card(base_model=["ORG/Base-7B", *BOTH.values()]), {name: card(datasets=["ORG/rows"]) for name in ("ORG/Base-7B", *BOTH.values())}, "", {}, ("--base REPO",), words=("which of ORG/Base-7B, ORG/Base-7B-chat and ORG/Base-7B-code is the base",)),
    Merge("two-bases-that-nothing-joins", listed("linear", *BOTH.values()), {**TWO, "ORG/Base-7B-code": model("ORG/Other-7B", data="ORG/rows")}, "", BOTH, ("--base REPO",), words=("ORG/Base-7B-chat comes from ORG/Base-7B", "ORG/Base-7B-code comes from ORG/Other-7B")),
    Merge("an-expert-that-is-gone", config(TIES), {"ORG/Base-7B-chat": CHAT}, "ORG/Base-7B", {"chat": "ORG/Base-7B-chat"}, ("--skip-expert code",)),
    Merge("gone-gated-and-without-data", listed("linear", *BOTH.values(), "ORG/Base-7B-law", "ORG/Base-7B-math"), {"ORG/Base-7B-chat": model("ORG/Base-7B"), "gated ORG/Base-7B-law": CHAT, "ORG/Base-7B-math": CODE}, "ORG/Base-7B", {"chat": "ORG/Base-7B-chat", "math": "ORG/Base-7B-math"}, ("--data chat=SOURCE", "--skip-expert code", "--skip-expert law")),
    Merge("a-dataset-that-is-gone", config(TIES), {**TWO, "ORG/Base-7B-code": model("ORG/Base-7B", data="ORG/was-deleted")}, "ORG/Base-7B", BOTH, ("--data code=SOURCE",), words=("no dataset ORG/was-deleted", "named by the card of ORG/Base-7B-code (datasets)", "fill in SOURCE")),
    Merge("datasets-to-choose-from", config(TIES), {"ORG/Base-7B-chat": model(data="ORG/parts"), "ORG/Base-7B-code": model(data=["ORG/a", "ORG/b"])}, "ORG/Base-7B", BOTH, ("--data code=SOURCE",), words=("several datasets for code: ORG/a, ORG/b", "fill in SOURCE")),
    Merge("a-card-that-names-its-own-repo-as-its-base", card(base_model="https://huggingface.co/ORG/merged"), {}, "", {}, ("--base REPO", "--expert TASK=REPO", "--data TASK=SOURCE"), words=("names the repo itself",)),
    Merge("a-config-that-names-its-own-repo-as-its-base", listed("ties", *BOTH.values(), base_model="ORG/merged@main"), SILENT, "", BOTH, ("--base REPO",), words=("nothing says what the base",)),
    Merge("all-experts-are-gone", config(TIES), {}, "ORG/Base-7B", {}, ("--expert chat=REPO", "--expert code=REPO", "--data chat=SOURCE", "--data code=SOURCE"), words=("the expert of chat cannot be read: there is no model ORG/Base-7B-chat",)),
    Merge("experts-without-data", config(TIES), {"ORG/Base-7B-chat": {}, "ORG/Base-7B-code": card(datasets=["/etc", "web text"])}, "ORG/Base-7B", BOTH, ("--data chat=SOURCE", "--data code=SOURCE"), words=("ORG/Base-7B-chat names no dataset", "'/etc' is no dataset")),
    Merge("experts-whose-cards-name-no-data", config(TIES), dict.fromkeys(BOTH.values(), card(license="mit")), "ORG/Base-7B", BOTH, ("--data chat=SOURCE", "--data code=SOURCE"), words=("nothing says where the examples of chat and code come from: ORG/Base-7B-chat and ORG/Base-7B-code name no dataset", "data of chat and code")),
    Merge("one-base-model-only", card(base_model="ORG/Base-7B", base_model_relation="merge"), {}, "ORG/Base-7B", {}, ("--expert TASK=REPO", "--data TASK=SOURCE")),
    Merge("nothing-at-all", {"config.json": "{}"}, {}, "", {}, ("--base REPO", "--expert TASK=REPO", "--data TASK=SOURCE"), words=("which experts ORG/merged was merged from", "mergekit_config.yml (not there)", "README.md (not there)")),
    Merge("shifted-layers", config("{merge_method: linear, slices: [{sources: [{model: ORG/Base-7B-chat, layer_range: [0, 2]}, {model: ORG/Base-7B-code, layer_range: [1, 3]}]}]}"), {}, refused="shifted: .* 0–1 with 1–2"),
    Merge("restacked-layers", config("{merge_method: linear, slices: [{sources: [{model: ORG/Base-7B-chat, layer_range: [0, 4]}]}, {sources: [{model: ORG/Base-7B-code, layer_range: [2, 6]}]}]}"), {}, refused="restacked: layers 2–5 of a model became 4 and up"),
    Merge("stages-that-do-not-name-each-other", config("name: first\nmerge_method: ties\nbase_model: ORG/Base-7B\nmodels: [{model: ORG/Base-7B-chat}]\n---\nmerge_method: linear\nmodels: [{model: ORG/Base-7B-code}]\n"), {}, refused="it holds 2 merges"),
    Merge("models-is-a-number", config("merge_method: ties\nmodels: 7\n"), {}, refused="models is not a list[^$]*--base REPO --expert TASK=REPO --data TASK=SOURCE"),
    Merge("frankenmerge", config("slices:\n- sources: [{model: ORG/Base-7B-chat, layer_range: [0, 24]}]\n- sources: [{model: ORG/Base-7B-code, layer_range: [8, 32]}]\nmerge_method: passthrough\ndtype: bfloat16\n"), {}, refused="passthrough"),
    Merge("mixture-of-experts", {"mergekit_moe_config.yml": "base_model: ORG/Base-7B\ngate_mode: hidden\nexperts:\n  - source_model: ORG/Base-7B-chat\n    positive_prompts: [chat]\n"}, {}, refused="mixture of experts"),
    Merge("mixture-in-the-card", card("```yaml\nbase_model: ORG/Base-7B\nexperts:\n  - source_model: ORG/Base-7B-chat\n    positive_prompts: [chat]\n```\n"), {}, refused="mixture of experts"),
    Merge("an-adapter", lora("ORG/Base-7B"), {}, "ORG/Base-7B", {}, ("--expert TASK=REPO", "--data TASK=SOURCE"), words=("ORG/merged is an adapter, and nothing says which experts it was merged from",)),
    Merge("adapters-merged-by-peft", lora("ORG/Base-7B"), TWO, "ORG/Base-7B", {"one": BOTH["chat"], "two": BOTH["code"]}, draft={"tasks": {"one": {"expert": BOTH["chat"]}, "two": {"expert": BOTH["code"]}}}, sources={"base": "adapter_config.json of ORG/merged"}),
    # what the user, or an earlier run, says too
    Merge("featcal-yaml", {"featcal.yaml": dedent(EARLIER)}, {"ORG/Base-7B-chat@v1": {}, "ORG/Base-7B-code": CODE}, "ORG/Base-7B@v1", {"sums": "ORG/Base-7B-chat@v1", "code": "ORG/Base-7B-code"}, note="a path on its author's machine", sources={"data sums": "featcal.yaml of ORG/merged", "data code": "the card of ORG/Base-7B-code"}, values={"merged": "ORG/merged", "data sums": "ORG/rows@v1:hard:train", "data code": "ORG/rows"}),
    Merge("output-of-featcal-before-the-mergekit-file-it-copied", {**listed("linear", *BOTH.values()), "featcal.yaml": dedent(EARLIER)}, {"ORG/Base-7B-chat@v1": {}, "ORG/Base-7B-code": CODE}, "ORG/Base-7B@v1", {"sums": "ORG/Base-7B-chat@v1", "code": "ORG/Base-7B-code"}, sources={"base": "featcal.yaml", "expert sums": "featcal.yaml"}),
    Merge("output-of-featcal-made-from-folders-elsewhere", {**listed("linear", *BOTH.values()), "featcal.yaml": dedent(EARLIER).replace("ORG/Base-7B-chat@v1", "/home/me/chat")}, SILENT, "ORG/Base-7B@v1", BOTH, sources={"expert chat": CONFIG}),
    Merge("mergekit-before-featcal-yaml", {**listed("linear", *BOTH.values()), "featcal.yaml": "{merged: ORG/merged, base: ORG/Base-7B, tasks: {sums: {expert: ORG/Base-7B-chat, data: 'ORG/rows:hard'}}}"}, SILENT, "ORG/Base-7B", BOTH, sources={"base": "featcal.yaml", "expert chat": CONFIG, "data chat": "featcal.yaml", "data code": "card of"}, values={"data chat": "ORG/rows:hard"}),
    Merge("unordered-list-with-the-base-said", THREE, SILENT, "ORG/Base-7B", BOTH, draft={"base": "ORG/Base-7B"}, sources={"base": SAID}),
    Merge("built-from-experts", {}, TWO, "ORG/Base-7B", {"one": BOTH["chat"], "two": BOTH["code"]}, draft={"merged": {"method": "task_arithmetic", "scale": 0.3}, "tasks": {"one": {"expert": BOTH["chat"]}, "two": {"expert": BOTH["code"]}}}, sources={"expert one": SAID, "base": "base_model of"}, values={"merged": "task_arithmetic:0.3", "data one": "ORG/rows"}),
    Merge("data-said-for-a-found-expert", {**config(TIES), **card(f"```yaml\n{TIES}```\n")}, SILENT, "ORG/Base-7B", {"Chat": BOTH["chat"], "code": BOTH["code"]}, draft={"tasks": {"Chat": {"data": "mine/rows:small"}}}, sources={"data Chat": SAID, "expert Chat": CONFIG}, values={"data Chat": "mine/rows:small", "data code": "ORG/rows"}),
    Merge("experts-said-are-all-there-are", config(TIES), {**SILENT, "mine/math": card(datasets="ORG/rows")}, "ORG/Base-7B", {"sums": "mine/math", "code": BOTH["code"]}, draft={"tasks": {"sums": {"expert": "mine/math"}, "code": {"data": "mine/rows"}}}, sources={"expert sums": SAID, "expert code": CONFIG, "data sums": "the card of mine/math"}, values={"data code": "mine/rows"}, note="further experts, which are left out: ORG/Base-7B-chat"),
    Merge("dataset-of-the-task", listed("ties", "ORG/t5_glue-cola_lora", "ORG/t5_glue-sst2_lora", base_model="ORG/t5"), {"ORG/t5_glue-cola_lora": card(datasets=["ORG/web", "ORG/cola-rows"]), "ORG/t5_glue-sst2_lora": card(datasets=["ORG/glue"]), "data ORG/cola-rows": card(configs=[{"config_name": "only", "data_files": "*"}]), "data ORG/glue": card(dataset_info=[{"config_name": name} for name in ("cola", "SST2", "ax")])}, "ORG/t5", {"cola": "ORG/t5_glue-cola_lora", "sst2": "ORG/t5_glue-sst2_lora"}, values={"data cola": "ORG/cola-rows", "data sst2": "ORG/glue"}),
    Merge("an-expert-given-as-the-base", config(TIES), TWO, BOTH["code"], {"chat": BOTH["chat"]}, draft={"base": BOTH["code"]}, sources={"base": SAID}, note="names as an expert, is taken as the base alone"),
    Merge("a-base-that-a-linear-merge-lists", listed("linear", *BOTH.values(), "ORG/Base-7B"), TWO, "ORG/Base-7B", {"7b-chat": BOTH["chat"], "7b-code": BOTH["code"]}, draft={"base": "ORG/Base-7B"}, sources={"base": SAID}, values={"data 7b-code": "ORG/rows"}),
    Merge("an-expert-not-said-is-not-the-base", card(base_model=[*BOTH.values(), "ORG/Base-7B-law"]), SILENT, draft={"tasks": {"m": {"expert": BOTH["chat"]}, "c": {"expert": BOTH["code"]}}}, refused="nothing says what the base", words=("featcal calibrate ORG/merged --base REPO",)),
    Merge("data-for-no-expert", config(TIES), TWO, draft={"tasks": {"sums": {"data": "mine/rows"}}}, refused="the task sums", words=("chat and code", "--expert sums=REPO")),
    Merge("nobody-to-leave-out", {}, {}, draft={"skip_experts": ["lost"]}, refused="there is no expert lost that could be left out: the experts are not known"),
    Merge("nobody-of-this-name-to-leave-out", config(TIES), TWO, draft={"skip_experts": ["cht"]}, refused="there is no expert cht", words=("chat",)),
    Merge("built-from-nothing", {}, {}, draft={"merged": {"method": "average"}}, refused="which experts the merged model was merged", words=("--merge average --base REPO --expert TASK=REPO",)),
    Merge("the-only-expert-given-as-the-base", listed("ties", BOTH["chat"], base_model="ORG/Base-7B"), TWO, draft={"base": BOTH["chat"]}, refused="which experts ORG/merged was merged from", words=("--expert TASK=REPO",)),
    Merge("data-for-an-expert-that-is-given-as-the-base", config(TIES), TWO, draft={"base": BOTH["code"], "tasks": {"code": {"data": "mine/rows"}}}, refused="for the task code", words=("experts without a task are chat", "fill in REPO and type: featcal")),
]  # fmt: skip
