"""Draw the traces in a directory: the share of each phase on each rank, and what each rank did in its last steps.

python docs/images/timeline.py traces docs/images/timeline.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from mpistrat.cli import trace, trace_files
from mpistrat.cli.trace_files import PHASES, Track, tracks

_COLOURS = dict(
    zip(PHASES, ("#e69f00", "#f0e442", "#d55e00", "#0072b2", "#56b4e9", "#cc79a7", "#c9d6c0"), strict=True)
)  # told apart by colour-blind readers, too
_SHOWN_STEPS = 4
_MOST_SPANS = 4000  # of a rank that are drawn
_MOST_RANKS = 64


def draw(path: Path, tracks: Sequence[Track]) -> None:
    """Write a PNG."""
    main = [each for each in tracks if each.thread == 0 and each.spans][:_MOST_RANKS]
    ranks = [row for row in trace.summarized(tracks)["ranks"] if any(track.rank == row["rank"] for track in main)]
    height = 1.6 + 0.26 * len(ranks)
    figure = Figure(figsize=(9, 1.2 + 2 * height), layout="constrained")
    shares, times = figure.subplots(2)
    labels = [f"rank {row['rank']}" for row in ranks]
    left = [0.0] * len(ranks)
    for phase in PHASES:
        widths = [100 * row["shares"][phase] for row in ranks]
        if any(widths):
            shares.barh(labels, widths, left=left, color=_COLOURS[phase], label=phase)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    shares.set(xlim=(0, 100), xlabel="share of the time, %")
    shares.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=7)
    begin, end = _window(main)
    places = {row["rank"]: i for i, row in enumerate(ranks)}
    for track in main:
        for phase, bars in _bars(track, begin, end).items():
            times.broken_barh(bars, (places[track.rank] - 0.4, 0.8), color=_COLOURS[phase])
    times.set(xlim=(0, (end - begin) / 1e6), xlabel="ms, at the end of the trace")
    times.set_yticks(range(len(labels)), labels)
    times.invert_yaxis()
    figure.savefig(path, format="png", dpi=110)


def _window(tracks: Sequence[Track]) -> tuple[int, int]:
    """Return the time of the last steps; without steps the last tenth."""
    end = max((track.spans[-1].end for track in tracks), default=1)
    begin = min((track.spans[0].begin for track in tracks), default=0)
    for track in tracks:
        if len(track.steps) > _SHOWN_STEPS:
            return track.steps[-1 - _SHOWN_STEPS], track.steps[-1]
    return end - max(1, (end - begin) // 10), end


def _bars(track: Track, begin: int, end: int) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    inside = [each for each in track.spans if each.own and each.end > begin and each.begin < end]
    for each in inside[-_MOST_SPANS:]:
        start, stop = max(each.begin, begin), min(each.end, end)
        found.setdefault(each.name, []).append(((start - begin) / 1e6, (stop - start) / 1e6))
    return found


if __name__ == "__main__":
    job = trace_files.jobs(trace_files.traces(Path(sys.argv[1]))[0])[-1]
    clocks, _ = trace_files.aligned(job)
    draw(Path(sys.argv[2]), [track for each in job for track in tracks(each, clocks[each])])
