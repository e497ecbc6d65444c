"""The page of `featcal inspect-drift --html`: one file with everything in it, that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from featcal_cli.reporting.inspection import Inspection, ModelDrift, OutputDrift, PlaceDrift
from featcal_cli.reporting.markdown import one_line, plain, without_paths, without_secrets
from featcal_cli.reporting.verdict import find_farther, list_roles, order_blocks, read_drift

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 4
"""Significant digits of the figures in the page; --json has all of them."""
MOST_NAMES = 3
"""Of the tasks that a sentence names."""

Sentence = list["str | list[str]"]
"""Its parts in order: plain words, and in a list of one a name, which the page sets apart from the words."""


def write_page(inspection: Inspection) -> str:
    """The whole page as HTML text: heat maps, curves, tables and a summary in words, for light and dark screens.

    It holds its own data, style and script, and a content security policy that allows those three alone, by their
    hashes. Names are data in it: whatever a task is called, nothing of it is read as HTML. To be saved as UTF-8.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    allowed = f"style-src '{_hash(template, 'style')}'; script-src '{_hash(template, 'script')}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    # "<" would let a name end the element, or open a comment inside it; JSON may write any character as its number.
    data = json.dumps(_describe(inspection), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return template.replace("{{policy}}", policy).replace("{{data}}", data.replace("<", "\\u003c"))


def _hash(template: str, element: str) -> str:
    """What a content security policy calls the only bare <element> of the template."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", template, flags=re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _describe(inspection: Inspection) -> dict[str, Any]:
    """All that the page's script is given; lists where the order or a name counts, for a task may be `__proto__`."""
    blocks, roles = order_blocks(inspection), list_roles(inspection)
    tags = {"model": "A", "other": "B"} if "other" in roles else {}  # the page's tables have room for no more
    means = {role: fmean(_last(inspection, role).values()) for role in roles}  # of the drift after the last block
    beside = {role: _compare(mean, means["base"], "the base") for role, mean in means.items() if "base" in means}
    beside |= {"base": "the yardstick"}
    models = [model for task in inspection.tasks.values() for model in task.models.values()]
    modules = list(dict.fromkeys(name for model in models for block in model.blocks for name in block.modules))
    return {
        "version": inspection.featcal_version,
        "schema": inspection.schema,
        "roles": [[role, tags.get(role, role), _show(inspection.names[role])] for role in roles],
        "blocks": [one_line(name) for name in blocks],
        "modules": [one_line(name) for name in modules],
        "tasks": [
            {
                "name": plain(name),
                "expert": _show(inspection.names.get(f"expert {name}", "")),
                "examples": task.examples,
                "models": {role: _pack(model, blocks, modules) for role, model in task.models.items()},
            }
            for name, task in inspection.tasks.items()
        ],
        "gains": _pack_gains(inspection),
        "tiles": [{"role": role, "value": _number(mean), "note": beside.get(role, "")} for role, mean in means.items()],
        "summary": _summarise(inspection),
        "notes": [_show(note, 1000) for note in inspection.notes],
        "facts": [[key, _show(value)] for key, value in inspection.environment.items()]
        + [[key, _round(value)] for key, value in inspection.cost.items()],
        "recipe": _clean(yaml.safe_dump(inspection.recipe, sort_keys=False, allow_unicode=True, width=100)),
    }


def _pack(model: ModelDrift, blocks: list[str], modules: list[str]) -> dict[str, Any]:
    measured = {block.name: block for block in model.blocks}
    reached = [measured.get(name) for name in blocks]
    numbers = {name: number for number, name in enumerate(modules)}
    output = model.output or OutputDrift("", math.nan)
    drifts = [block.drift if block else None for block in reached]
    return {
        "stem": _round(model.stem.relative),
        "blocks": [[*_figures(d), *map(_round, _further_figures(d))] if d else None for d in drifts],
        "shares": list(map(_round, (model.outside, *(block.share if block else None for block in reached)))),
        "cosines": list(map(_round, model.cosine_percentiles)),
        "bound": [_round(output.sensitivity_median), _round(output.sensitivity_max)],
        "modules": [[[numbers[n], *_figures(drift)] for n, drift in b.modules.items()] if b else [] for b in reached],
        "last": _figures(model.last),
        "kind": output.kind or None,
        "output": list(map(_round, (output.relative, output.divergence, output.agreement, output.certain))),
        "vector": _round(model.task_vector_cosine),
    }


def _pack_gains(inspection: Inspection) -> dict[str, Any] | None:
    """By task's number, what the other model's cosine and result are more."""
    if inspection.gains is None:
        return None
    gains = [inspection.gains.tasks.get(task) for task in inspection.tasks]
    points = [
        [_round(gain.cosine), _round(gain.result)] if gain and math.isfinite(gain.cosine + gain.result) else None
        for gain in gains
    ]
    return {"measure": inspection.gains.measure, "points": points}


def _further_figures(drift: PlaceDrift) -> tuple[float | None, ...]:
    return drift.distance, drift.amplification, drift.residual, drift.residual_cosine


def _figures(drift: PlaceDrift) -> list[float | None]:
    return list(map(_round, (drift.relative, drift.local, drift.upstream, drift.cosine)))


def _round(value: float | None) -> float | None:
    """None for what is no finite number: JSON has no word for it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _show(text: object, longest: int = 120) -> str:
    return one_line(_clean(str(text)), longest)


def _clean(text: str) -> str:
    """Without what a page that is passed on should not tell: tokens, and the folders of this machine."""
    return without_paths(without_secrets(text))


def _last(inspection: Inspection, role: str) -> dict[str, float]:
    return {name: task.models[role].last.relative for name, task in inspection.tasks.items()}


def _compare(drift: float, other: float, whose: str) -> str:
    """How much farther or nearer; empty where that is no finite number."""
    change = drift / other - 1 if other else math.nan
    if not math.isfinite(change):
        return ""
    if abs(change) < 0.0005:
        return f"as far as {whose}"
    word = "farther" if change > 0 else "nearer"
    return f"{100 * abs(change):.{1 if abs(change) < 0.1 else 0}f} % {word} than {whose}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 0.0995 else f"{value:.2f}"


def _summarise(inspection: Inspection) -> list[dict[str, Any]]:
    """What a reader needs first, in words; `warn` marks the paragraphs that say something went wrong."""
    roles = list_roles(inspection)
    paragraphs = []
    for role in (role for role in roles if role != "base"):
        if "base" in roles:
            paragraphs.append(_say_yardstick(inspection, role))
        paragraphs.append({"warn": False, "parts": _say_worst(inspection, role)})
    if "other" in roles:
        paragraphs.append(_say_change(inspection))
    return paragraphs


def _say_worst(inspection: Inspection, role: str) -> Sentence:
    drifts = _last(inspection, role)
    worst = max(drifts, key=lambda task: drifts[task])
    parts: Sentence = [[_show(inspection.names[role])], " is "]
    if len(drifts) > 1:
        parts += ["farthest from its expert on ", [plain(worst)], f": drift {_number(drifts[worst])} at the end."]
    else:
        parts += [f"{_number(drifts[worst])} away from the expert of ", [plain(worst)], " at the end."]
    reading = read_drift(inspection.tasks[worst].models[role])
    if reading.grows is not None and reading.growth is not None:
        parts += [" There it grows most in ", [one_line(reading.grows)], f", {_number(reading.growth)} times."]
    return parts


def _say_yardstick(inspection: Inspection, role: str) -> dict[str, Any]:
    name, yardstick = [_show(inspection.names[role])], [_show(inspection.names["base"])]
    farther, tasks = list(find_farther(inspection, role, than="base")), len(inspection.tasks)
    if not farther:
        where = " on every task." if tasks > 1 else "."
        return {"warn": False, "parts": [name, " is at least as near to the expert as the base ", yardstick, where]}
    parts: Sentence = ["On every task "] if tasks > 1 else []
    if len(farther) < tasks:
        parts = [f"On {len(farther)} of {tasks} tasks ("]
        for number, task in enumerate(farther[:MOST_NAMES]):
            parts += [", " if number else "", [plain(task)]]
        parts.append(f" and {len(farther) - MOST_NAMES} more) " if len(farther) > MOST_NAMES else ") ")
    parts += [name, " is farther from the expert than the base ", yardstick, " is: by this measure merging did more "]
    parts += ["harm than good there. What usually helps is a smaller merging scale."]
    return {"warn": True, "parts": parts}


def _say_change(inspection: Inspection) -> dict[str, Any]:
    first, second = _last(inspection, "model"), _last(inspection, "other")
    name, other = ([_show(inspection.names[role])] for role in ("model", "other"))
    nearer = find_farther(inspection, "model", than="other")
    farther = list(find_farther(inspection, "other", than="model"))
    parts: Sentence = [other, " is nearer to the expert than ", name, f" on {len(nearer)} of {len(first)} tasks"]
    if farther:
        change = _compare(second[farther[0]], first[farther[0]], "it")
        parts += [f", and farther on {len(farther)}: most on ", [plain(farther[0])], f" ({change})" if change else ""]
    return {"warn": bool(farther), "parts": [*parts, "."]}
