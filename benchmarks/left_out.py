"""Which setting of the grid the other families choose for a family, and what it is worth there.

    python benchmarks/left_out.py TABLE...

A TABLE is a file with what selection.py printed of one family. Of the others, the setting is chosen whose smallest
share of the best gain is largest. Prints Markdown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

GAIN = re.compile(r"^\| (λ [^|]*) \| ([-+.\de]+) \|", re.MULTILINE)


def read_shares(table: str) -> dict[str, float]:
    """By setting, its mean gain over that of the best."""
    gains = {settings: float(gain) for settings, gain in GAIN.findall(table)}
    best = max(gains.values())
    return {settings: gain / best for settings, gain in gains.items()}


def main() -> None:
    """Print a line for each family."""
    tables = [Path(path).read_text() for path in sys.argv[1:]]
    shares = {table.split("**")[1]: read_shares(table) for table in tables}
    print("| family | chosen on the others | smallest share there | share here |\n|---|---|---|---|")
    for family, here in shares.items():
        others = [of for name, of in shares.items() if name != family]
        worst = {settings: min(of[settings] for of in others) for settings in here}
        chosen = max(worst, key=lambda settings: worst[settings])
        print(f"| {family} | {chosen} | {100 * worst[chosen]:.0f} % | {100 * here[chosen]:.0f} % |")


if __name__ == "__main__":
    main()
