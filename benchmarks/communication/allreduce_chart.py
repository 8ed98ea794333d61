"""Draw time and bandwidth by size of the array, from the rows of `allreduce.py --json`.

python benchmarks/communication/allreduce_chart.py rows.json chart.png --ranks-per-node 2,2,2,2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from array_ways import BOUND, BUFFERS, COPY, WIRE, least_bytes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Row


def plot(rows: Sequence[Row], ranks_per_node: Sequence[int], path: str | Path) -> None:
    """Write the results of `allreduce` as a PNG. Bus bandwidth is the result of `least_bytes` divided by the time."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    time, bandwidth = figure.subplots(1, 2)
    bound = WIRE if any(row.way == WIRE for row in rows) else COPY
    found = _lines(rows, bound)
    for i, ((case, way), line) in enumerate(found.items()):
        nbytes = [row.bytes for row in line]
        rates = [least_bytes(ranks_per_node, row.bytes) / row.seconds / 1e9 for row in line]
        style = _style(case, way, i)
        time.plot(nbytes, [1e3 * row.seconds for row in line], label=_label(case, way), **style)
        bandwidth.plot(nbytes, rates, **style)
    sizes = sorted({row.bytes for row in rows})
    for axes, unit in ((time, "time, ms"), (bandwidth, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("array")
        axes.set_ylabel(unit)
        shown = sizes[:: max(1, len(sizes) // 6)]
        axes.set_xticks(shown, [in_words(nbytes) for nbytes in shown], fontsize=8)
        axes.grid(alpha=0.3)
    nodes = len(ranks_per_node)
    where = "one node" if nodes == 1 else f"{nodes} nodes"
    figure.suptitle(f"All-reduce of float32, {sum(ranks_per_node)} ranks on {where}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})


def in_words(nbytes: int) -> str:
    """Return a size in the largest unit that divides it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def _lines(rows: Sequence[Row], bound: str) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of each line. A competitor with rows in both cases is one line."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        if row.case == BOUND and row.way != bound:
            continue
        case = row.case if row.way.startswith(LIBRARY) or row.case == BOUND else ""
        line = lines.setdefault((case, row.way), [])
        if not line or line[-1].bytes != row.bytes:
            line.append(row)
    return lines


def _label(case: str, way: str) -> str:
    if case == BOUND:
        return f"bound: {way}"
    return f"{way}, {case}" if case else way


def _style(case: str, way: str, i: int) -> dict[str, Any]:
    if case == BOUND:
        return {"color": "black", "linestyle": "--", "linewidth": 1}
    if way == LIBRARY:
        return {"color": "tab:red" if case == BUFFERS else "tab:blue", "linewidth": 2.5, "marker": "o"}
    if case:
        return {"color": f"C{2 + i % 8}", "linewidth": 1, "marker": "."}
    return {"color": str(0.35 + 0.12 * (i % 4)), "linewidth": 1.5, "marker": "sv^D"[i % 4], "markersize": 4}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what --json has written")
    parser.add_argument("chart", type=Path, help="the PNG to write")
    parser.add_argument("--ranks-per-node", required=True, help="such as 2,2,2,2")
    given = parser.parse_args()
    counts = [int(count) for count in given.ranks_per_node.split(",")]
    plot([Row(**row) for row in json.loads(given.rows.read_text())], counts, given.chart)
