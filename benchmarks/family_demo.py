"""Make the family of `featcal demo`: python benchmarks/family_demo.py FOLDER.

Five questions about the handwritten digits that scikit-learn ships, each with a vision transformer of its own; see
recipes/demo/make.py, which trained them, for the data and its licence. Here they are only laid out and merged.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from judge import Family, Row, finish

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo"
TASKS: dict[str, Row] = {"digit": {}, "turned": {}, "parity": {}, "loops": {}, "high": {}}


def main() -> None:
    """Copy the demo's checkpoints and data into FOLDER and merge them."""
    folder = Path(sys.argv[1])
    for part in ("base", "experts", "data"):
        shutil.copytree(DEMO / part, folder / part)
    source = "scikit-learn's digits: Alpaydin and Kaynak (1998), https://doi.org/10.24432/C50P49 (CC BY 4.0)"
    finish(folder, Family("demo", "classification", source, TASKS))


if __name__ == "__main__":
    main()
