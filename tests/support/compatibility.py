"""The table of architectures in the docs: a row is what a calibration reported, and the tests compare it.

`WRITE_DOCS=1 pytest tests/integration/test_oracle.py -m "" -n 0` writes it anew (delete the file first to drop rows).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from torch import nn

from featcal_cli.workflows.verbs import Result

TABLE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
HEAD = """# Architectures

Each row is one architecture of transformers 5 that the tests calibrate, as a tiny random model with a few blocks. A
second, slow computation in float64 repeats the paper's equations on forward passes of the whole model. A row is written
only if the two agree: every tensor's update within a relative error of 1e-3, whatever the size and the padding of
batches. For models of each kind among them, the tests also check that equal models stay unchanged (within 1e-6), that
batches do not matter (1e-4), and that bfloat16 runs.

The share is that of the parameters inside blocks which are calibrated. In models as tiny as these, biases, norms and
position tables weigh more than in real ones; `featcal modules user/merged` shows it for yours. At the sizes of their
default configs, all of the architectures that can be built so have at least 99.6 %, but for Mamba with 99.3 %: its A is
no linear map, and its D scales features one by one. "Neither a Linear nor a norm" are tables of positions, decay rates
and the like, which no rows of features give equations for, and scales of features one by one, which are few.

featcal itself has no list of architectures. It finds the blocks by running the model, so other architectures built in
similar ways work too.

| architecture | class | blocks | share | calibrated | left as merged |
|---|---|---|---|---|---|
"""


NO_LIMITATION = re.compile(
    "neither a Linear nor a norm|`(norms: all|routers: true)` calibrates it|shares its weight"
    "|tokens are routed to it|examples reaches it"
)
"""Reasons for leaving something as merged that say what it is, what option calibrates it, or what the examples lack."""


def check_row(name: str, result: Result) -> None:
    """Assert that the table has this architecture's row (with WRITE_DOCS=1: put it there), and that no more than 3 %
    are left as merged for what featcal cannot do."""
    assert 1 - calibrated_share(result, unless=NO_LIMITATION) <= 0.03
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
    share = f"{int(calibrated_share(result) * 1000) / 10:.1f} %"
    return f"| {name} | {model_class} | {len(blocks)} | {share} | {calibrated} | {left} |"


def calibrated_share(result: Result, unless: re.Pattern[str] = re.compile("(?!)")) -> float:
    """Of the parameters inside blocks, the share that was calibrated: all but those of modules left as merged, unless
    that is for one of these reasons."""
    blocks = {block.name: result.merged.module.get_submodule(block.name) for block in result.report.blocks}
    whole = {id(x): x.numel() for held in blocks.values() for x in held.parameters()}
    left = {
        id(x): x.numel()
        for block in result.report.blocks
        for skipped in block.skipped
        if not unless.search(skipped["reason"])
        for x in held_by(blocks[block.name], skipped["name"])
    }
    return float(1 - sum(left.values()) / sum(whole.values()))


def held_by(block: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameter at a path inside the block, or those of the module there, without what modules inside it have."""
    for found, parameter in block.named_parameters():
        if found == path:
            return [parameter]
    return list(block.get_submodule(path).parameters(recurse=False))
