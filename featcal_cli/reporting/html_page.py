"""Write the page of `featcal inspect-drift --html`: one file that contains everything and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from featcal_cli.reporting.markdown import join_notes
from featcal_cli.reporting.report import VISIBLE, Inspection, ModelDrift, OutputDrift, PlaceDrift
from featcal_cli.reporting.verdict import (
    compare_drift,
    find_farther,
    find_growth,
    list_roles,
    order_blocks,
    write_verdict,
)
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.sanitise import for_html, for_sharing, one_line
from featcal_cli.runtime.structured_text import dump_yaml

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 4
"""Significant digits of the figures in the page; --json has all of them."""
MARK = "\x1f"
"""Character before and after every name in a sentence."""
HEADLINE = re.compile(r"(.*) \((?:mean )?(?:drift|distance) [^()]*\)(.*)\.")
"""Pattern of a sentence that compares two models; the headline leaves out its figures, which the tiles show."""

Sentence = list["str | list[str]"]
"""The parts of a sentence in order: plain text as strings; names, which the page sets apart, as lists of one string."""


def write_page(inspection: Inspection) -> str:
    """Return the whole page as HTML text: heat maps, curves, tables and a summary in words, for light and dark screens.

    The page contains its data, style and script; its content security policy allows only this style and script, by
    their hashes. Names are data: no task's name is read as HTML. The text must be saved as UTF-8.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    allowed = f"style-src '{_hash(template, 'style')}'; script-src '{_hash(template, 'script')}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    # "<" would let a name end the element, or open a comment inside it; JSON may write any character as its number.
    data = json.dumps(_describe(inspection), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return template.replace("{{policy}}", policy).replace("{{data}}", data.replace("<", "\\u003c"))


def _hash(template: str, element: str) -> str:
    """Return the hash with which a content security policy allows the template's only <element> without attributes."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", template, flags=re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _describe(inspection: Inspection) -> dict[str, Any]:
    """Return the data for the page's script. Lists keep the order and allow any name, as a task may be called
    `__proto__`."""
    blocks, roles = order_blocks(inspection), list_roles(inspection)
    tags = {"model": "A", "other": "B"} if "other" in roles else {}  # the page's tables have room for no more
    names = {role: "base model" if role == "base" else _show(inspection.short_names[role]) for role in roles}
    models = [model for task in inspection.tasks.values() for model in task.models.values()]
    modules = list(dict.fromkeys(name for model in models for block in model.blocks for name in block.modules))
    headline, *summary = _summarise(inspection, names)
    base = [["base model", _show(inspection.names["base"])]] if "base" in roles else []
    facts: list[tuple[str, object]] = list(inspection.environment.items())
    for key, value in inspection.cost.items():
        size = key.endswith("_bytes")
        facts.append((key.removesuffix("_bytes"), tell_bytes(value) if size else _round(value)))
    for name, task in inspection.tasks.items():
        expert = inspection.names.get(f"expert {name}")
        facts.append((one_line(name), f"{task.examples} examples" + (f", expert {expert}" if expert else "")))
    return {
        "version": inspection.featcal_version,
        "schema": inspection.schema,
        "roles": [[role, tags.get(role, role), names[role]] for role in roles],
        "blocks": [one_line(name) for name in blocks],
        "modules": [one_line(name) for name in modules],
        "tasks": [
            {
                "name": one_line(name),
                "models": {role: _pack(model, blocks, modules) for role, model in task.models.items()},
            }
            for name, task in inspection.tasks.items()
        ],
        "headline": headline["parts"],
        "tiles": _make_tiles(inspection, names, tags),
        "summary": summary,
        "notes": [_show(note, 1000) for note in join_notes(inspection.notes, inspection.tasks)],
        "facts": base + [[key.replace("_", " "), _show(value)] for key, value in facts],
        "recipe": for_sharing(dump_yaml(inspection.recipe, width=100)),
    }


def _pack(model: ModelDrift, blocks: list[str], modules: list[str]) -> dict[str, Any]:
    measured = {block.name: block for block in model.blocks}
    reached = [measured.get(name) for name in blocks]
    numbers = {name: number for number, name in enumerate(modules)}
    output = model.output or OutputDrift("", math.nan)
    drifts = [block.drift if block else None for block in reached]
    return {
        "stem": _round(model.stem.relative),
        "blocks": [[*_figures(d), _round(d.distance), _round(d.amplification)] if d else None for d in drifts],
        "shares": list(map(_round, (model.outside, *(block.share if block else None for block in reached)))),
        "modules": [[[numbers[n], *_figures(drift)] for n, drift in b.modules.items()] if b else [] for b in reached],
        "last": _figures(model.last),
        "kind": output.kind or None,
        "output": list(map(_round, (output.relative, output.divergence, output.agreement, output.certain))),
    }


def _figures(drift: PlaceDrift) -> list[float | None]:
    return list(map(_round, (drift.relative, drift.local, drift.upstream, drift.cosine)))


def _round(value: float | None) -> float | None:
    """Round a number to DIGITS digits; return None for one that is not finite, which JSON cannot write."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _show(text: object, longest: int = 120) -> str:
    return for_html(str(text), longest)


def _make_tiles(inspection: Inspection, names: Mapping[str, str], tags: Mapping[str, str]) -> list[list[str]]:
    """Make tiles (tag, name, value, note): the mean drift of every model and, before them if two models are compared,
    the change from the first to the second."""
    means = {role: fmean(_last(inspection, role).values()) for role in names}
    experts, tiles = "the experts" if len(inspection.tasks) > 1 else "the expert", []
    for role, mean in means.items():
        note = compare_drift(mean, means["base"], "the base model", experts) if "base" in means else ""
        note = "the yardstick" if role == "base" else note
        tiles.append([tags.get(role, role), names[role], _number(mean), note])
    if "other" in names:
        value = _write_change(means["other"], means["model"])
        nearer, count = len(find_farther(inspection, "model", than="other")), len(inspection.tasks)
        tiles.insert(0, ["B to A", "change of mean drift", value, f"B is nearer on {nearer} of {count} tasks"])
        farther = [task.outputs_farther for task in inspection.tasks.values()]
        if None not in farther:
            before, after = (fmean(_outputs(inspection, role)) for role in ("model", "other"))
            nearer = sum(more <= -VISIBLE for more in farther if more is not None)
            note = f"B's outputs are nearer on {nearer} of {count} tasks"
            tiles.insert(0, ["B to A", "change of outputs' distance", _write_change(after, before), note])
    return tiles


def _write_change(now: float, before: float) -> str:
    change = now / before - 1 if before else math.nan
    return f"{100 * change:+.0f} %".replace("-", "−") if math.isfinite(change) else "–"


def _outputs(inspection: Inspection, role: str) -> list[float]:
    outputs = (task.models[role].output for task in inspection.tasks.values())
    return [output.relative for output in outputs if output is not None]


def _last(inspection: Inspection, role: str) -> dict[str, float]:
    return {name: task.models[role].last.relative for name, task in inspection.tasks.items()}


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 0.0995 else f"{value:.2f}"


def _summarise(inspection: Inspection, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sentences of the summary, the headline first; `warn` marks warnings."""
    marked = {role: _mark(name) for role, name in names.items()}
    sentences = list(write_verdict(inspection, marked, lambda task: _mark(one_line(task))))
    headline = f"How far {marked.get('other', marked['model'])} is from its experts"
    if found := next((match for _, text in sentences if (match := HEADLINE.fullmatch(text))), None):
        sentences.remove((False, found[0]))
        headline = found[1] + found[2]
    judged = [(False, _say_worst(inspection, role, marked[role])) for role in names if role != "base"]
    return [
        {"warn": is_warning, "parts": _split_names(text)}
        for is_warning, text in [(False, headline), *sorted(sentences, key=lambda one: not one[0]), *judged]
    ]


def _say_worst(inspection: Inspection, role: str, name: str) -> str:
    drifts = _last(inspection, role)
    worst = max(drifts, key=lambda task: drifts[task])
    growth = find_growth(inspection.tasks[worst].models[role])
    grows = f"grows most in {_mark(one_line(growth[0]))}, {_number(growth[1])} times" if growth else ""
    if len(drifts) == 1:
        return f"The drift of {name} {grows or 'grows in no block'}."
    text = f"{name} is farthest from its expert on {_mark(one_line(worst))} (drift {_number(drifts[worst])})"
    return f"{text}; there it {grows}." if grows else f"{text}."


def _mark(name: str) -> str:
    """Enclose a name in MARK, an unprintable character that no name contains, so that it can be found in a sentence."""
    return f"{MARK}{name}{MARK}"


def _split_names(text: str) -> Sentence:
    return [[part] if number % 2 else part for number, part in enumerate(text.split(MARK)) if part]
