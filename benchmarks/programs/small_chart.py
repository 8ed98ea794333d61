"""Draw how much longer small work takes with the library than by hand, from the rows of `small.py --json`.

python benchmarks/programs/small_chart.py rows-1.json rows-2.json chart.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Row

BY_HAND = "by hand"


def plot(files: Sequence[Sequence[Row]], path: str | Path) -> None:
    """Write a PNG with one bar for each case and file: the time of the library, divided by that of the rival."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    cases = list(dict.fromkeys(row.case for rows in files for row in rows))
    height = 0.8 / len(files)
    for number, rows in enumerate(files):
        seconds = {(row.case, row.way): row.seconds for row in rows}
        both = [
            (i, seconds[case, LIBRARY] / seconds[case, BY_HAND])
            for i, case in enumerate(cases)
            if (case, LIBRARY) in seconds and (case, BY_HAND) in seconds
        ]
        places = [i + (number - (len(files) - 1) / 2) * height for i, _ in both]
        ranks = rows[0].n
        label = f"{ranks} rank{'s' * (ranks > 1)}"
        axes.barh(places, [quotient - 1 for _, quotient in both], height, left=1, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([1, 1.5, 2, 3, 5, 10, 15], ["1", "1.5", "2", "3", "5", "10", "15"])
    axes.set_xlabel("time of mpistrat / time by hand")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path, help="files of --json")
    parser.add_argument("chart", type=Path)
    arguments = parser.parse_args()
    plot([[Row(**row) for row in json.loads(path.read_text())] for path in arguments.rows], arguments.chart)


if __name__ == "__main__":
    main()
