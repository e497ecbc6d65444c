"""The table of architectures in the docs: a row is what a calibration reported, and the tests compare it.

`WRITE_DOCS=1 pytest tests/integration/test_oracle.py -m "" -n 0` writes it anew (delete the file first to drop rows).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from featcal_cli.workflows.verbs import Result

TABLE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
HEAD = """# Architectures

One row an architecture of transformers 5. Each row is written by the test run, from the report of a calibration of a
tiny random family (two to four blocks), and only when that calibration equals a slow float64 computation of the paper's
equations on whole-model forward passes, within a relative error of 1e-3 of every tensor's update. The same families are
also tested for: equal models stay unchanged (1e-6), batch size and padding do not matter (1e-5), bfloat16 runs.

featcal has no list of architectures: it finds blocks by running the model. Others of these shapes work the same way.

| architecture | class | blocks | calibrated | left as merged |
|---|---|---|---|---|
"""


def check_row(name: str, result: Result) -> None:
    """Assert that the table has this architecture's row (with WRITE_DOCS=1: put it there)."""
    row = make_row(name, result)
    if os.environ.get("WRITE_DOCS"):
        rows = {line.split("|")[1].strip(): line for line in read_rows()}
        rows[name] = row
        TABLE.write_text(HEAD + "".join(f"{rows[key]}\n" for key in sorted(rows)), encoding="utf-8")
    assert row in read_rows(), "docs/architectures.md is not what the tests found; see tests/support/compatibility.py"


def read_rows() -> list[str]:
    """The rows that the table has now."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| architecture")]


def make_row(name: str, result: Result) -> str:
    """What the report says, in one line."""
    blocks = result.report.blocks
    kinds = Counter(module.kind for block in blocks for module in block.modules)
    calibrated = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    reasons = Counter(skipped["reason"] for block in blocks for skipped in block.skipped)
    left = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items())) or "–"
    model_class = type(result.merged.module).__name__
    return f"| {name} | {model_class} | {len(blocks)} | {calibrated} | {left} |"
