"""`inspect-drift`: walk experts, model and base together, load nothing, and measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from featcal_cli.recipe.reading import as_draft
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.reporting.html_page import write_page
from featcal_cli.reporting.inspection import Inspection
from featcal_cli.reporting.markdown import write_summary
from featcal_cli.reporting.verdict import find_excess
from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.files import name_reason, write_file
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.session import RecipeSource, RunOptions, Session

PICTURES, PAGES, TEXTS = (".png", ".svg"), (".html",), (".md",)
EXAMPLES = 64
"""Per task, where nobody says how many."""
SEED = 43
"""Another one than calibration's: its examples are not the ones to judge it by."""


def inspect_drift(
    recipe: RecipeSource,
    *,
    compare: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    plot: str | Path | None = None,
    projection: str | Path | None = None,
    html: str | Path | None = None,
    markdown: str | Path | None = None,
    max_drift: float | None = None,
    listener: Listener | None = None,
) -> Inspection:
    """Measure how far a model's features are from its experts', and where that comes from.

    recipe: as for `calibrate`; its merged model is the one that is inspected, and so is `compare` if it is given.
    plot, projection (.png or .svg), html and markdown (.md): files to write, and all that is written.
    max_drift: the limit of a gate, for what markdown says; `gate.check_gate` stops a program that is over it.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong.
    """
    wanted = ((plot, PICTURES), (projection, PICTURES), (html, PAGES), (markdown, TEXTS))
    files = {Path(file): kind for file, kind in wanted if file}
    for file, kinds in files.items():
        _check_file(file, kinds)
    options = RunOptions(device, batch_size, allow_pickle, trust_remote_code)
    session = Session(_with_defaults(as_draft(recipe)), options, listener)
    if isinstance(session.draft.merged, Merge):
        raise RecipeError("there is no model to inspect yet", where="merged", fix="name one, or calibrate first")
    session.find_models()
    from featcal_cli.workflows.measure_drift import draw_pictures, measure

    inspection, job = measure(session, compare, keep_finals=projection is not None)
    if session.ranks.is_first:
        for file, content in draw_pictures(inspection, job, plot, projection):
            _write(file, content)
        if html:
            _write(Path(html), write_page(inspection).encode())
        if markdown:
            exceeded = None if max_drift is None else find_excess(inspection, max_drift)
            _write(Path(markdown), write_summary(inspection, exceeded).encode())
    return inspection


def _write(file: Path, content: bytes) -> None:
    """Write a file, whole or not at all. Raises OutputError."""
    try:
        if file.exists() and not file.is_file():  # a device
            file.write_bytes(content)
        else:
            write_file(file.resolve(), content)
    except OSError as error:
        fix = "free disk space, or give the path of a file that can be written"
        raise OutputError(f"cannot write: {name_reason(error)}", where=str(file), fix=fix) from None


def _with_defaults(draft: Draft) -> Draft:
    """The draft with fewer examples than calibration fits, and others, where it does not say how many and which."""
    said = draft.calibration.model_fields_set
    values = {name: value for name, value in (("examples", EXAMPLES), ("seed", SEED)) if name not in said}
    return draft.model_copy(update={"calibration": draft.calibration.model_copy(update=values)})


def _check_file(file: Path, kinds: Sequence[str]) -> None:
    """Raise OutputError unless such a file can be written."""
    if file.suffix not in kinds:
        raise OutputError(
            f"{file.name} is no {' or '.join(kinds)}", where=str(file), fix=f"name it {file.stem}{kinds[0]}"
        )
    if not file.resolve().parent.is_dir():
        raise OutputError(f"there is no folder {file.parent}", where=str(file), fix="make it, or choose another")
