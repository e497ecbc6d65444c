"""Write the page of `featcal inspect-drift --html`: one file that contains everything and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from featcal_cli.reporting.report import Inspection, ModelDrift, OutputDrift, PlaceDrift
from featcal_cli.reporting.verdict import join_notes, list_roles, order_blocks, write_verdict
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.sanitise import for_html, for_sharing, one_line
from featcal_cli.runtime.structured_text import dump_yaml

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 4
"""Significant digits of the figures in the page; --json has all of them."""


def write_page(inspection: Inspection) -> str:
    """Return the page as HTML text, to be saved as UTF-8. It contains its data, style and script, and its content
    security policy allows only these by their hashes. Names are data: none is read as HTML."""
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
    """Return the data for the page's script. Lists allow any name, as a task may be called `__proto__`."""
    blocks, roles = order_blocks(inspection), list_roles(inspection)
    show = partial(for_html, known=inspection.places)
    tags = {"model": "A", "other": "B"} if "other" in roles else {}  # the page's tables have room for no more
    names = {role: "base model" if role == "base" else show(inspection.short_names[role], 120) for role in roles}
    # marks around a name that keep its direction of writing from that of the sentence
    isolated = {role: _isolate(name) for role, name in names.items()}
    nothing = f"How far {isolated.get('other', isolated['model'])} is from its experts"  # where nothing is compared
    verdict = list(write_verdict(inspection, isolated, lambda task: _isolate(one_line(task))))
    (_, headline), *summary = verdict or [(False, nothing)]
    base = [["base model", show(inspection.names["base"], 120)]] if "base" in roles else []
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
        "tasks": [
            {"name": one_line(name), "models": {role: _pack(model, blocks) for role, model in task.models.items()}}
            for name, task in inspection.tasks.items()
        ],
        "headline": headline.removesuffix("."),
        "summary": [[is_warning, text] for is_warning, text in summary],
        "notes": [show(note, 1000) for note in join_notes(inspection.notes, inspection.tasks)],
        "facts": base + [[key.replace("_", " "), show(str(value), 120)] for key, value in facts],
        # a path is not broken, or would not be known
        "recipe": for_sharing(dump_yaml(inspection.recipe, width=4096), inspection.places),
    }


def _pack(model: ModelDrift, blocks: list[str]) -> dict[str, Any]:
    measured = {block.name: block for block in model.blocks}
    reached = [measured.get(name) for name in blocks]
    output = model.output or OutputDrift("", math.nan)
    drifts = [block.drift if block else None for block in reached]
    return {
        "stem": _round(model.stem.relative),
        "blocks": [[*_figures(drift), _round(drift.distance)] if drift else None for drift in drifts],
        "shares": list(map(_round, (model.outside, *(block.share if block else None for block in reached)))),
        "last": _figures(model.last),
        "kind": output.kind or None,
        "output": list(map(_round, (output.relative, output.divergence, output.agreement))),
    }


def _figures(drift: PlaceDrift) -> list[float | None]:
    return list(map(_round, (drift.relative, drift.local, drift.upstream, drift.cosine)))


def _round(value: float | None) -> float | None:
    """Round a number to DIGITS digits; return None for one that is not finite, which JSON cannot write."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _isolate(name: str) -> str:
    return f"\u2068{name}\u2069"
