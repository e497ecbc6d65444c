"""Reports on calibrated blocks and modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.progress import tell_apart
from featcal_cli.runtime.sanitise import list_some


@dataclass(frozen=True)
class ModuleReport:
    """The report on one calibrated module."""

    name: str
    """Path of the module inside its block."""
    kind: str
    rows: int
    """Number of rows (tokens) of the calibration examples of all tasks."""
    relative_change: float
    """Relative size of the update before refining, ‖W* − W_merged‖ / ‖W_merged‖."""
    step: float | None = None
    """The step t: the share of the update that was kept after the check on held-out rows; None if it was not
    checked."""
    ridge: float | None = None
    """The λ that was needed for a stable solution, if it is larger than the requested one."""


@dataclass(frozen=True)
class BlockReport:
    """The report on one calibrated block."""

    name: str
    seconds: float
    modules: list[ModuleReport]
    skipped: list[dict[str, str]]
    """Name and reason for each module that was left unchanged."""
    is_head: bool = False
    """Whether this is the head of a language model, or the norm before it, and no transformer layer."""
    divergence: tuple[float, float] | None = None
    """If this is the head: the mean divergence from the experts' predictions on held-out examples, in nats, with the
    merged model's head and with the new one."""

    def path_of(self, module: ModuleReport) -> str:
        """Return the path of one of the modules in the model. The head is its own only module."""
        return f"{self.name}.{module.name}" if module.name else self.name

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BlockReport:
        values = json.loads(text)
        return cls(**{**values, "modules": [ModuleReport(**module) for module in values["modules"]]})


KINDS = {
    "linear projections": ("linear", "conv1d"),
    "convolutions": ("convolution",),
    "norms": ("layernorm", "rmsnorm"),
    "scales": ("scale",),
}
"""Kinds of modules by the name that sentences use for them."""


def describe_kinds(blocks: Sequence[BlockReport], *, stems: bool) -> str:
    """Return a sentence on which kinds of modules were calibrated and where they are; empty if there are none. stems:
    whether modules before the transformer blocks were calibrated too."""
    modules = [module for block in blocks if not block.is_head for module in block.modules]
    names = [name for name, kinds in KINDS.items() if any(module.kind in kinds for module in modules)]
    if not names:
        return ""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    experts = " (experts of mixtures included)" if any("expert" in module.name for module in modules) else ""
    stem = " and of the stem (patch embeddings) before them" if stems else ""
    head = "".join(f", and {block.name}," for block in blocks if block.is_head and block.modules)
    return f"Only {listed} of transformer blocks{experts}{stem}{head} were calibrated."


def describe_head(blocks: Sequence[BlockReport]) -> str:
    """Return a sentence on the divergence that calibrating the head removed; empty if it was not measured."""
    for block in blocks:
        if block.divergence is not None and block.divergence[1] < block.divergence[0]:
            before, after = tell_apart(*block.divergence, _digits_of(block.divergence[1]))
            return (
                f"{block.name} was fitted to the experts' predictions: with it, the divergence from them on held-out "
                f"examples fell from {before} to {after} nats"
            )
    return ""


ADAPTER = "adapter"
"""Name of the adapter's folder inside an output."""


@dataclass(frozen=True)
class AdapterReport:
    """The report on the adapter that holds the updates."""

    rank: int
    share: float
    """Share of the updates' sum of squares that the adapter holds, from 0 to 1."""
    bytes: int
    """Total size of the adapter's files."""
    left_out: list[str]
    """Paths of changed parameters that the adapter cannot hold."""

    def __str__(self) -> str:
        more = ", …" if len(self.left_out) > 1 else ""
        left_out = f"; an adapter cannot hold {self.left_out[0]}{more} ({len(self.left_out)})" if self.left_out else ""
        size = tell_bytes(self.bytes)
        return f"the adapter of rank {self.rank} holds {write_share(self.share)} of the updates ({size}){left_out}"


@dataclass(frozen=True)
class Refinement:
    """The report on refining by a distillation. Divergences are the mean KL(expert ‖ model) of predictions on the
    held-out examples that refining is checked on, in nats, by task."""

    merged: dict[str, float]
    """Divergence of the merged model."""
    before: dict[str, float]
    """Divergence of the calibrated model before it was refined."""
    after: dict[str, float]
    """Divergence of the result; equal to `before` if the updates are not used."""
    steps: int = 0
    """Number of steps done."""
    best: int = 0
    """Number of steps after which the updates were best; 0 if they never helped."""
    share: float = 1.0
    """Share of the best updates that is kept, from 0 to 1."""
    seconds: float = 0.0

    def __str__(self) -> str:
        of_merged, before, after = (fmean(of.values()) for of in (self.merged, self.before, self.after))
        if not self.share:
            spent = f"{self.steps} steps in {self.seconds:.0f} s"
            return f"refining did not help on held-out rows ({spent}), and is left out"
        part = "" if self.share == 1 else f"{self.share:g} of the updates of "
        updates = f"refined by {part}the first {self.best} of {self.steps} steps ({self.seconds:.0f} s)"
        digits = _digits_of(after)
        was, now = tell_apart(before, after, digits)
        figures = (
            f"KL divergence from the experts is {now} nats (merged: {of_merged:.{digits}f}; before refining: {was})"
        )
        return f"{updates}, the best on held-out rows: {figures}"


def _digits_of(nats: float) -> int:
    """Return how many decimal places show a divergence, which can be small."""
    return 3 if nats >= 0.01 else 4 if nats >= 0.001 else 6


def write_share(share: float) -> str:
    """Write a share in percent; a share below 0.9999 is written as at most 99.9 %."""
    return f"{min(100 * share, 99.9 if share < 0.9999 else 100):.1f} %"


def describe_ridges(blocks: Sequence[BlockReport]) -> str:
    """Return a sentence on the modules that needed a larger ridge than requested; empty if there are none."""
    names = [
        f"{block.path_of(module)} ({module.ridge:g})" for block in blocks for module in block.modules if module.ridge
    ]
    what = "a larger ridge than requested, because the equations had no stable solution with it"
    return f"{what}: {list_some(names)}" if names else ""


def describe_guard(blocks: Sequence[BlockReport]) -> str:
    """Return a sentence on how many updates were reduced or undone on held-out rows; empty if no update was checked."""
    inside = [module for block in blocks if not block.is_head for module in block.modules]
    steps = [module.step for module in inside if module.step is not None]
    if not steps:
        return ""
    reduced, undone = [step for step in steps if 0 < step < 1], steps.count(0.0)
    if not reduced and not undone:
        return f"all {len(steps)} updates hold up on held-out examples"
    what = f"{len(reduced) + undone} of {len(steps)} updates went too far on held-out examples"
    were_scaled, were_undone = ("was" if count == 1 else "were" for count in (len(reduced), undone))
    if not reduced:
        return f"{what} and {were_undone} undone"
    scaled = f"{were_scaled} scaled down to {fmean(reduced):.2f}{' on average' * (len(reduced) > 1)}"
    return f"{what}: {len(reduced)} {scaled}; {undone} {were_undone} undone" if undone else f"{what} and {scaled}"
