"""Several processes, started by torchrun: the same weights as one, each has its part of the examples, one writes and
speaks."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import BY_NAME, TASKS, Saved, changed_tensors, save_family
from outcome import distance, numbers_in
from rank_jobs import GENTLE
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.reporting.report import Report
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.workflows import plan
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

FEATCAL: dict[str, Any] = {"method": "featcal", "rho": 1.0}
PROGRAM = str(Path(__file__).parents[1] / "support" / "rank_jobs.py")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Kind:
    family: str
    tasks: int
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    merge: bool = False


KINDS = {
    "two tasks": Kind("bert", 2, {}, {}),
    "one task": Kind("deberta", 1, {"norms": "all"}, {"batch_size": 5}),
    "blocks that run again": Kind("albert", 3, {}, {"batch_size": 4}),
    "mixtures": Kind("mixtral", 3, {}, {"batch_size": 5}),
    "merged on the way": Kind("bert", 2, {}, {}, merge=True),
    "convolutions": Kind("mobilevit", 2, {}, {"batch_size": 4}),
    "one example": Kind("bert", 2, {"examples": 1}, {}),
    "featcal": Kind("bert", 1, FEATCAL, {"batch_size": 5}),
    "featcal, one example": Kind("bert", 2, {**FEATCAL, "examples": 1}, {}),
    "featcal, causal": Kind("gpt2", 2, FEATCAL, {"batch_size": 4}),
    "featcal, mixtures": Kind("mixtral", 2, FEATCAL, {"batch_size": 5}),
    "featcal, encoder-decoder": Kind("t5", 1, FEATCAL, {"batch_size": 5}),
}
PRECISE = {"paper": 1e-5, "featcal": 1e-4}
"""Of the update: how far results may lie apart, as sums of several processes are rounded otherwise, and
module-by-module steps in float32 carry that on (4e-5 was seen)."""
PAIRED = ("two tasks", "mixtures", "featcal", "featcal, one example")
SIZES = {2: PAIRED, 3: tuple(name for name in KINDS if name not in ("two tasks", "featcal"))}
"""How many processes there are, and what they do: of two, what parts of equal size may get wrong; of three, all but
what others of its kinds stand for."""
JOBS = [(name, size) for size, names in SIZES.items() for name in names]


def torchrun(*program: object, size: int = 2, largest: int | None = None) -> subprocess.CompletedProcess[str]:
    """Processes that have ended, with all that they and torchrun wrote; `largest`: bytes that a file may have."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    return subprocess.run(
        [*line, *map(str, program)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=None if largest is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )


def recipe_of(saved: Saved, kind: Kind) -> dict[str, Any]:
    recipe: dict[str, Any] = saved.recipe(**kind.settings)
    recipe["tasks"] = {task: recipe["tasks"][task] for task in TASKS[: kind.tasks]}
    return recipe | ({"merged": {"method": "average"}} if kind.merge else {})


@dataclass(frozen=True)
class Done:
    """What one process and several have made of a job."""

    folder: Path
    name: str
    alone: Report

    def weights(self, of: str) -> dict[str, Tensor]:
        """Of the first of several processes ("2/": of two), or of the one that was alone."""
        return load_file(self.folder / of / f"{self.name}-0" / "model.safetensors")

    def reports(self, size: int) -> list[Report]:
        """What the verb returned, by rank."""
        files = [self.folder / str(size) / f"{self.name}-{rank}.json" for rank in range(size)]
        return [Report.from_json(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    folder = tmp_path_factory.mktemp("families")
    return {name: save_family(folder / name, BY_NAME[name]) for name in {kind.family for kind in KINDS.values()}}


@pytest.fixture(scope="module")
def folder(families: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes, as many as the name of a folder in it says, have done these jobs, and an inspection."""
    folder = tmp_path_factory.mktemp("ranks")
    for size, names in SIZES.items():
        inspected = recipe_of(families["bert"], KINDS["featcal"])
        jobs: dict[str, Any] = {"inspection": {"recipe": inspected, "inspect": True}}
        for name in names:
            kind = KINDS[name]
            jobs[name] = {"recipe": recipe_of(families[kind.family], kind), "options": kind.options}
        (folder / str(size)).mkdir()
        (folder / str(size) / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        run = torchrun(PROGRAM, folder / str(size) / "jobs.json", size=size)
        assert run.returncode == 0, run.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def done(families: dict[str, Saved], folder: Path) -> dict[str, Done]:
    """The same done by this process too."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHORT", GENTLE)
        for name, kind in KINDS.items():
            recipe = recipe_of(families[kind.family], kind)
            result = calibrate(recipe, output=folder / "alone" / f"{name}-0", device="cpu", **kind.options)
            found[name] = Done(folder, name, result.report)
    return found


@pytest.mark.parametrize(("name", "size"), JOBS)
def test_processes_do_what_one_does(done: dict[str, Done], families: dict[str, Saved], name: str, size: int) -> None:
    """Also where a process has no example of a task, or a table of positions is counted once. Rows and steps of every
    module are told, settings, notes, and the drift on all examples together."""
    weights, together = (done[name].weights(of) for of in ("alone", str(size)))
    start = load_file(families[KINDS[name].family].folder / "merged" / "model.safetensors")
    assert weights.keys() == together.keys()
    apart, moved = distance(weights, together), distance(weights, start)
    assert moved > 0 and apart <= PRECISE[KINDS[name].settings.get("method", "paper")] * moved, apart / moved
    alone = done[name].alone
    for report in done[name].reports(size):
        for key in ("ridge", "rho", "alpha", "metric", "guard", "token_weights", "examples", "chosen_by"):
            assert report.settings[key] == alone.settings[key]
        for ours, theirs in zip(report.blocks, alone.blocks, strict=True):
            assert ours.skipped == theirs.skipped
            # the rows of a table of distances are told once for each batch, and parts of a batch are batches
            rows = [[(x.name, "pos_" in x.name or x.rows) for x in each.modules] for each in (ours, theirs)]
            steps = [[-1 if x.step is None else x.step for x in each.modules] for each in (ours, theirs)]
            assert rows[0] == rows[1]
            # sums of several ranks are rounded otherwise, and a step is a share of the update
            assert steps[0] == pytest.approx(steps[1], rel=1e-3, abs=1e-5)
        assert list(report.drift) == list(alone.drift) and report.measures.keys() == alone.measures.keys()
        for task, drift in alone.drift.items():
            found = report.drift[task]
            assert (found.before, found.after) == pytest.approx((drift.before, drift.after), rel=1e-4)
        assert report.environment["ranks"] == str(size)
        assert len(report.cost["expert_bytes_by_rank"]) == size
    first = done[name].reports(size)[0]
    assert without_seconds(first.notes) == without_seconds(alone.notes)
    is_refined = name in ("featcal, causal", "featcal, encoder-decoder", "featcal, mixtures")
    assert {report.is_refined for report in (alone, *done[name].reports(size))} == {is_refined}


def without_seconds(notes: Sequence[str]) -> list[str]:
    return [re.sub(r"\(\d+ s\)|in \d+ s", "", note) for note in notes]


def test_only_the_first_writes(folder: Path) -> None:
    """Every rank was given a place of its own."""
    for size, names in SIZES.items():
        made = {path.name for path in (folder / str(size)).iterdir() if path.is_dir()}
        assert made == {f"{name}-0" for name in names}
        assert [path.name for path in (folder / str(size)).glob("*.png")] == ["inspection-0.png"]


def test_an_inspection_is_shared_too(families: dict[str, Saved], folder: Path) -> None:
    alone = json.loads(inspect_drift(recipe_of(families["bert"], KINDS["featcal"]), device="cpu").to_json())
    for size in SIZES:
        for rank in range(size):
            found = json.loads((folder / str(size) / f"inspection-{rank}.json").read_text())
            for task, whole in alone["tasks"].items():
                assert numbers_in(found["tasks"][task]) == pytest.approx(numbers_in(whole), rel=1e-4, abs=1e-6)


def test_one_rank_says_what_is_wrong_and_the_next_run_goes_on(done: dict[str, Done], tmp_path: Path) -> None:
    """An expert is broken in its last block, which all ranks see: one says so, and all end. The repaired one makes
    another job, which is begun anew and cannot write its output. The next run, of three processes, computes no block
    again, gives the very bytes of a whole one, and speaks once."""
    saved = save_family(tmp_path / "family", BY_NAME["bert"])
    file = tmp_path / "family" / "green" / "model.safetensors"
    sound = file.read_bytes()
    with changed_tensors(file.parent) as tensors:
        tensors["encoder.layer.1.output.dense.weight"][0, 0] = torch.nan
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(recipe_of(saved, KINDS["two tasks"]), sort_keys=False), encoding="utf-8")
    command = ("-m", "featcal_cli", "calibrate", "-r", recipe, "-o", output, "--device", "cpu")
    broken = torchrun(*command)
    assert broken.returncode != 0 and not output.exists()
    assert re.search("rank [01]: error: expert green has NaN or infinity in", broken.stderr)
    assert broken.stderr.count("error:") == 1
    file.write_bytes(sound)
    full = torchrun(*command, "--restart", largest=len(sound) - 1)
    assert "File too large" in full.stderr and full.returncode != 0 and not output.exists()
    again = torchrun(*command, size=3)
    assert again.returncode == 0, again.stderr[-4000:]
    assert "2 of 2 blocks were taken over" in again.stderr and again.stdout.count("the calibrated model is in") == 1
    whole = done["two tasks"].folder / "2" / "two tasks-0" / "model.safetensors"
    assert (output / "model.safetensors").read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"family", "recipe.yaml", "out"}


def test_gpus_starts_processes_and_hands_on(done: dict[str, Done], families: dict[str, Saved], tmp_path: Path) -> None:
    """The weights are those of as many processes under torchrun. A wrong expert ends in one message and exit code 2,
    and not in the launcher's report."""
    recipe, wrong = tmp_path / "recipe.yaml", tmp_path / "wrong.yaml"
    job = recipe_of(families["bert"], KINDS["two tasks"])
    recipe.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    job["tasks"]["red"]["expert"] = str(tmp_path / "nowhere")
    wrong.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    command = (sys.executable, "-m", "featcal_cli", "--gpus", "2", "calibrate", "--device", "cpu", "-o", "out", "-r")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "env": offline, "timeout": 300}
    results = [subprocess.run([*command, path], **how) for path in (wrong, recipe)]
    assert [result.returncode for result in results] == [2, 0], results
    assert results[0].stderr.count("error:") == 1 and "Traceback" not in results[0].stderr
    whole = done["two tasks"].folder / "2" / "two tasks-0" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("tasks", "size"), [(1, 1), (3, 1), (2, 2), (3, 2), (8, 3), (1, 4), (3, 8), (5, 5)])
def test_every_task_has_one_rank_and_ranks_have_as_many(tasks: int, size: int) -> None:
    names = [f"task {number}" for number in range(tasks)]
    owned = [Ranks(size, rank).own(names) for rank in range(size)]
    assert [task for each in owned for task in each] == names
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
