"""featcal's calibration stage alone, in a process of its own: what it cost, printed as JSON.

    python benchmarks/stage.py FAMILY EXAMPLES DEVICE RESULT

The stage begins with loaded models and read examples, and ends when every block is solved. It finds the blocks, runs
the stems, walks, and keeps finished blocks on disk; drift is not measured and updates are not checked, as in the
official code. The finished blocks stay in the folder RESULT.
"""

# ruff: noqa: E402
from __future__ import annotations

from featcal_cli.__main__ import use_large_pages

use_large_pages()  # as the command does, before anything makes a tensor

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from meters import Clock
from shapes import recipe_of

from featcal_cli.calibration.algorithm import calibrate_blocks
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.journal import Journal
from featcal_cli.engine.job import CALIBRATED, Job, Measurement
from featcal_cli.workflows.preflight import Preflight, prepare
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.setup import Models, fetch_models, load_models, set_up

PAPER = {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
"""λ, ρ and α for CLIP."""


def load(folder: Path, examples: int, device: str) -> tuple[Session, Preflight, Models]:
    """What the stage begins with."""
    recipe = recipe_of(folder, examples, method="paper", norms="layernorm", **PAPER)
    session = Session(recipe, RunOptions(device))
    plan = prepare(session)
    return session, plan, load_models(fetch_models(session, plan), None, Path(), "")


def run_stage(session: Session, plan: Preflight, models: Models, result: Path) -> Job:
    """The job that comes back is done."""
    calibration = plan.recipe.calibration
    job = set_up(session, plan, models, result).make_job({CALIBRATED: models.student}, {})
    job = replace(job, drift=Measurement({}, {}))
    for found in plan.examples.values():  # the job has them
        found.fitted.clear()
    settings = Hyperparameters(PAPER["ridge"], PAPER["rho"], PAPER["alpha"])
    calibrate_blocks(job, settings, Journal(result, {}), bias=calibration.bias, watch=lambda _: None)
    return job


def main() -> None:
    """Load, run, print."""
    folder, examples, device, result = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    shutil.rmtree(result, ignore_errors=True)  # or an earlier run's blocks would be taken over
    session, plan, models = load(folder, examples, device)
    with Clock(session.device) as clock:
        job = run_stage(session, plan, models, result)
    read = sum(runner.bytes_read for runner in job.experts.values())
    print(json.dumps({**clock.to_dict(), "expert_bytes_read": read}))


if __name__ == "__main__":
    main()
