"""The command line that an error asks for: what was said already, and what is still to be said."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from featcal_cli.recipe import Draft, Merge


def write_command(
    draft: Draft,
    *,
    base: str | None = None,
    experts: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
) -> str:
    """`featcal calibrate …` with the models and data of `draft`, and those given (REPO, TASK, SOURCE where unknown)."""
    said = {task: spec.expert for task, spec in draft.tasks.items() if spec.expert}
    sources = {task: str(spec.data) for task, spec in draft.tasks.items() if spec.data}
    words = ["featcal", "calibrate"]
    words += ["--merge"] if isinstance(draft.merged, Merge) else []
    words += [show_merged(draft.merged)]
    if known := draft.base or base:
        words += ["--base", known]
    for option, values in (("--expert", {**said, **(experts or {})}), ("--data", {**sources, **(data or {})})):
        for task, value in values.items():
            words += [option, f"{task}={value}"]
    return shlex.join(words)


def show_merged(merged: str | Merge) -> str:
    """The merged model as a user would type it."""
    if isinstance(merged, str):
        return merged
    return merged.method if merged.method == "average" else f"{merged.method}:{merged.scale:g}"


def enumerate_names(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
