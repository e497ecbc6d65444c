"""What tests/distributed/test_ranks.py lets torchrun start by the Python verbs: the jobs of a file, in turn."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from featcal_cli.calibration.distillation import SHORT
from featcal_cli.runtime.distributed import leave_ranks
from featcal_cli.workflows import calibrate, plan, verbs
from featcal_cli.workflows.inspect_drift import inspect_drift

GENTLE = replace(SHORT, peak=0.01)
"""How results are refined whose experts are random: they are farther away than any that were fine-tuned."""


def run_all(jobs: Path) -> None:
    """Every rank names an output of its own for each job, and leaves what it got beside the file.

    A job is to `inspect`, or else to calibrate.
    """
    rank = os.environ["RANK"]
    vars(calibrate)["plot_drift"], vars(plan)["SHORT"] = lambda _: b"", GENTLE
    for name, job in json.loads(jobs.read_text(encoding="utf-8")).items():
        place = jobs.parent / f"{name}-{rank}"
        if job.get("inspect"):
            seen = inspect_drift(job["recipe"], device="cpu", plot=place.with_suffix(".png")).to_json()
        else:
            result = verbs.calibrate(job["recipe"], output=place, device="cpu", **job["options"])
            seen = result.report.to_json()
        place.with_suffix(".json").write_text(seen, encoding="utf-8")
    leave_ranks()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
