"""How results are refined whose experts are random: they are farther away than any that were fine-tuned."""

from __future__ import annotations

from dataclasses import replace

from featcal_cli.calibration.distillation import SHORT

GENTLE = replace(SHORT, peak=0.01)
