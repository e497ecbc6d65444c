"""Recipes that are none, that ask for what there is not, or that unfold to more than any memory holds."""

from __future__ import annotations

from bad_input import LAUGHS, MERGES, Arrange, Case, options


def recipe(content: str | bytes, **others: object) -> Arrange:
    """A file given with -r, and other arguments."""
    return options({"r.yaml": content}, r="{}/r.yaml", **others)


def data(**keys: str) -> Arrange:
    """Text for the task red, with these keys in the recipe."""
    listed = ", ".join(f"{key}: {value}" for key, value in keys.items())
    content = f"tasks: {{red: {{data: {{path: rows.jsonl, {listed}}}}}}}"
    rows = '{"text": "w2 w3", "other": "w4 w5"}\n' * 20
    return options({"r.yaml": content, "rows.jsonl": rows}, r="{}/r.yaml", data=None)


CASES: list[Case] = [
    (options(r="demmo"), ["demmo", "did you mean demo"]),
    (options(r="{}/merged"), ["no recipe", "merged"]),
    (recipe("a: [1"), ["r.yaml", "YAML", "line 1"]),
    (recipe("merged: \xe4".encode("latin-1")), ["r.yaml", "UTF-8"]),
    (recipe("- merged"), ["r.yaml", "not a mapping"]),
    (recipe(""), ["r.yaml", "not a mapping"]),
    (recipe("merged: a\n---\nmerged: b"), ["r.yaml", "2 documents"]),
    (recipe("base: a/b\nbase: c/d"), ["r.yaml", "the key base is in line 1 and again in line 2"]),
    (recipe(LAUGHS), ["r.yaml", "unfolds"]),
    (recipe(MERGES), ["r.yaml", "unfolds"]),
    (recipe("tasks: &a [*a]"), ["r.yaml", "contains itself"]),
    (recipe(f"tasks: {'[' * 70}{']' * 70}"), ["r.yaml", "inside each other"]),
    (recipe(f"tasks: {'[' * 5000}"), ["r.yaml", "YAML"]),
    (recipe(f"merged: {'x' * 1_000_001}"), ["r.yaml", "longer"]),
    (recipe("merged: !!python/object/apply:os.system [exit]"), ["r.yaml", "YAML", "python/"]),
    (recipe("? [a, b]\n: c"), ["r.yaml"]),
    (recipe("7: seven"), ["r.yaml, line 1", "unknown key 7"]),
    (recipe(f"{'k' * 900}: v"), ["unknown key kkk", "..."]),
    (recipe("calibration: {examples: 10000000000000}", n=None), ["examples", "1000000000"]),
    (recipe("calibration: {ridge: .nan}"), ["ridge", "finite"]),
    (recipe("calibration: [1, 2]"), ["calibration"]),
    (recipe("tasks: {red: {evaluate: {metric: luck}}}"), ["metric", "accuracy"]),
    (recipe('base: "user/\\e[31mred"', base=None), ["base", "control character", "\\x1b"]),
    (recipe('merged: "user/a\\0b"', merged=None), ["merged", "control character"]),
    (recipe("merged: {method: slerp}", merged=None), ["merged", "average"]),
    (recipe("merged: {method: task_arithmetic, scale: .inf}", merged=None), ["scale", "finite"]),
    (recipe("tasks: {red: {data: {}}}", data=None), ["either dataset or path"]),
    (recipe("tasks: {red: {data: {dataset: a/b, path: c}}}", data=None), ["either dataset or path"]),
    (recipe("tasks: {red: {data: x/y:a:b:c}}", data=None), ["ID[@REVISION]"]),
    (data(template='"{text:>99999999999}"'), ["{text:>99999999999}", "text, other"]),
    (data(columns="{texts: text}"), ["columns.texts", "text_pair"]),
    (recipe("tasks: [1]", expert=None, data=None), ["tasks", "a section of keys"]),
]  # fmt: skip
