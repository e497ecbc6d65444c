"""Any text may be a recipe, and any header a safetensors file's: both are read, or refused with a reason."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from bad_input import LAUGHS, Stage
from bad_models import written
from command_line import complete_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from published import resolve

from featcal_cli.lineage.claims import read_card
from featcal_cli.models.loading import find_class, load_model
from featcal_cli.recipe.reading import as_draft, read_draft, shipped_recipes
from featcal_cli.recipe.schema import Recipe
from featcal_cli.runtime.errors import FeatCalError
from featcal_cli.runtime.structured_text import load_documents
from featcal_cli.workflows.inputs import dump_recipe

NO_CHECKS = list(HealthCheck)
FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200, suppress_health_check=NO_CHECKS)
"""The same inputs in every run."""

texts = some.text(some.characters(codec=None), max_size=30)
scalars = some.one_of(
    some.none(), some.booleans(), some.integers(), some.integers(-(10**40), 10**40), some.floats(), texts,
    some.sampled_from(["a/b", "a/b@v1", "./nowhere", "~nobody/x", "a+b", "x.jsonl", "a:b:c:d", "\0", "a" * 5000, ""]),
)  # fmt: skip
values = some.recursive(
    scalars, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(texts, inner, max_size=3), max_leaves=8
)
"""What YAML and JSON can hold."""
snippets = some.sampled_from(
    [
        "merged: a/b\n", "base: a/b\n", "tasks:\n", "  red:\n", "    expert: a/b\n", "    data: ", "[", "]", "{", "}",
        ": ", "- ", "? ", "!!int ", "!!timestamp ", "!!binary ", "!!set ", "&a ", "*a", "<<: *a", "|\n", "'", '"', "\t",
        "%", "@", "---\n", "...\n", "~", "1e400", "0x", "1:60:60", "2024-99-99", "0001-01-01T00:00:00+23:00", "#",
        "\ufeff", "\x85",
    ]
)  # fmt: skip
"""What YAML is made of."""


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside of another."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(value[key], (*above, key))


@some.composite
def spoiled(draw: some.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A good value with up to three of its parts replaced, taken out, or named otherwise."""
    found: dict[str, Any] = json.loads(json.dumps(good))
    for _ in range(draw(some.integers(1, 3))):
        if not (listed := list(places(found))):
            break
        *above, key = draw(some.sampled_from(listed))
        inside: Any = found
        for step in above:
            inside = inside[step]
        kind = draw(some.sampled_from(["replace", "replace", "remove", "rename"]))
        old = inside.pop(key) if kind != "replace" else inside[key]
        if kind == "replace":
            inside[key] = draw(values)
        elif kind == "rename" and isinstance(inside, dict):
            inside[draw(texts)] = old
    return found


def good_recipe() -> dict[str, Any]:
    """With every key there is."""
    file = next(file for file in shipped_recipes() if file.stem == "demo")
    found: dict[str, Any] = json.loads(complete_draft(read_draft(file, {})).model_dump_json(exclude_none=True))
    for task in found["tasks"].values():
        task["data"] = {"dataset": "a/b", "revision": "v", "config": "c", "split": "s", "columns": {"text": "t"}}
        task["data"]["template"] = "{t}"
        task["evaluate"] = {"split": "test", "metric": "accuracy"}
    found["tasks"] = dict(list(found["tasks"].items())[:2])
    found["calibration"] |= {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
    return found | {"output": {"push_to": "a/b", "private": True}}


GOOD_RECIPE = good_recipe()


def read(file: Path | None, keys: dict[str, Any]) -> Recipe | None:
    """The recipe, None where it is refused; nothing else may happen."""
    try:
        return complete_draft(read_draft(file, keys) if file else as_draft(keys))
    except FeatCalError as error:
        assert error.what and len(error.what) < 2000
        return None


@FUZZ
@given(some.one_of(texts, some.lists(snippets | texts, max_size=25).map("".join)), some.binary(max_size=60))
def test_any_text_and_any_bytes_are_a_recipe_or_refused(text: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.yaml"
        file.write_bytes(content)
        read(file, {})
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        read(file, {})
        read(file, {"merged": "a/b", "base": "a/b", "calibration": {"examples": 3}})
    read_card(f"---\n{text}\n---\n{text}")
    try:
        json.dumps(load_documents(text), default=str, skipkeys=True)
    except ValueError as error:
        assert len(str(error)) < 300


@FUZZ
@given(spoiled(GOOD_RECIPE))
def test_a_spoiled_recipe_is_read_or_refused(keys: dict[str, Any]) -> None:
    found = read(None, keys)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.yaml"
        file.write_text(yaml.safe_dump(keys, allow_unicode=False))
        again = read(file, {})
        if found is not None and again is not None:
            file.write_text(dump_recipe(again), encoding="utf-8")
            assert read(file, {}) == again.model_copy(update={"output": type(again.output)()})


def test_the_good_recipe_is_good() -> None:
    assert read(None, GOOD_RECIPE) is not None
    assert LAUGHS.count("*") > 90


def test_a_model_with_a_lying_header_is_refused_on_the_whole_way(stage: Stage) -> None:
    file = stage.folder / "red" / "model.safetensors"
    good = file.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    @settings(FUZZ, max_examples=100)
    @given(spoiled(header))
    def load(changed: dict[str, Any]) -> None:
        file.write_bytes(written(changed, good[8 + length :]))
        try:
            snapshot = resolve(str(stage.folder / "red"))
            load_model("expert red", snapshot, find_class(snapshot))
        except FeatCalError as error:
            assert error.what and error.fix

    load()
