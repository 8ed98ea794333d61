"""A trace in numbers: the share of each phase, the collectives that took longest, and the ranks that came last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mpistrat.cli.table import amount, three_digits
from mpistrat.cli.trace.spans import MEET, PHASES, Span, Track, shares

_MOST_COLLECTIVES = 10
# What gives its values to other ranks before it returns. Others only compare what they were given.
_MOVES = ("all_reduce", "all_gather", "broadcast", "gather", "reduce_scatter")


def summary(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the numbers of a trace, as values that JSON can hold. Times are in seconds.

    ``ranks`` has of each rank its host, seconds, steps and the share of each phase. ``collectives`` has those that took
    longest. ``imbalance`` is what the busiest rank was busy more than the mean, as a share. ``last`` is how often each
    rank came last to a collective. ``waited`` is the mean time for which a rank waited for others.
    """
    main = [each for each in tracks if each.thread == 0]
    ranks: dict[int, dict[str, Any]] = {}
    for track in main:
        row = ranks.setdefault(
            track.rank, {"rank": track.rank, "host": track.host[0], "steps": 0, "phases": dict.fromkeys(PHASES, 0.0)}
        )
        row["steps"] += len(track.steps)
        for phase, nanoseconds in shares(track.spans).items():
            row["phases"][phase] += nanoseconds / 1e9
    for row in ranks.values():
        row["seconds"] = sum(row["phases"].values())
        row["shares"] = {name: each / (row["seconds"] or 1.0) for name, each in row.pop("phases").items()}
    busy = [row["seconds"] * (1 - row["shares"][MEET]) for row in ranks.values()]
    mean = sum(busy) / max(1, len(busy))
    collectives, last = _collectives(tracks)
    return {
        "ranks": list(ranks.values()),
        "collectives": collectives,
        "imbalance": max(busy) / mean - 1 if mean else 0.0,
        "waited": sum(row["seconds"] * row["shares"][MEET] for row in ranks.values()) / max(1, len(ranks)),
        "last": [{"rank": rank, "collectives": count} for rank, count in last.most_common()],
    }


def _collectives(tracks: Sequence[Track]) -> tuple[list[dict[str, Any]], Counter[int]]:
    calls: dict[tuple[str, str], list[Any]] = {}
    arrivals: dict[tuple[int, int], dict[int, int]] = {}
    for track in tracks:
        for index, span in enumerate(track.spans):
            call = span.call
            if call is None:
                continue
            found = calls.setdefault((call.operation, call.place), [0, 0, 0, 0])
            found[0] += 1
            found[1] += span.end - span.begin
            found[2] += _waited(track.spans, index)
            found[3] = call.nbytes
            if call.size > 1:
                arrivals.setdefault((call.communicator, call.number), {})[track.rank] = span.begin
    ranks = len({track.rank for track in tracks})
    rows = []
    for (operation, place), (count, total, waited, nbytes) in calls.items():
        moving = (total - waited) / count if operation.split(" ")[0] in _MOVES else 0.0
        rows.append(
            {
                "operation": operation,
                "place": place,
                "calls_per_rank": count / ranks,
                "seconds_per_call": total / count / 1e9,
                "waited_per_call": waited / count / 1e9,
                "bytes": nbytes,
                "bytes_per_second": nbytes / moving * 1e9 if moving else 0.0,
            }
        )
    rows.sort(key=lambda row: -row["seconds_per_call"] * row["calls_per_rank"])
    last = Counter(max(each, key=lambda rank: each[rank]) for each in arrivals.values() if len(each) > 1)
    return rows[:_MOST_COLLECTIVES], last


def _waited(spans: Sequence[Span], index: int) -> int:
    """Return for how long a collective waited for the other ranks."""
    waited, end = 0, spans[index].end
    for each in spans[index + 1 :]:
        if each.begin >= end:
            break
        if each.name == MEET:
            waited += each.own
    return waited


def lines(told: dict[str, Any]) -> list[str]:
    """Return the numbers as text."""
    ranks = told["ranks"]
    shown = [f"{'phase':<14} {'mean':>7}  {'least':>7} (rank)  {'most':>7} (rank)"]
    for phase in PHASES:
        of = sorted((row["shares"][phase], row["rank"]) for row in ranks)
        if of[-1][0]:
            mean = sum(share for share, _ in of) / len(of)
            (least, first), (most, last) = of[0], of[-1]
            shown.append(f"{phase:<14} {mean:7.2%}  {least:7.2%} {f'({first})':<6}  {most:7.2%} ({last})")
    if told["collectives"]:
        shown += ["", f"{'calls':>7} {'a call':>10} {'waiting':>10} {'bytes':>10} {'bytes/s':>10}  collective"]
    for row in told["collectives"]:
        shown.append(
            f"{row['calls_per_rank']:7.0f} {_seconds(row['seconds_per_call']):>10} "
            f"{_seconds(row['waited_per_call']):>10} {amount(row['bytes']):>10} "
            f"{amount(row['bytes_per_second']) if row['bytes_per_second'] else '':>10}  "
            f"{row['operation']} at {row['place'] or '?'}"
        )
    if len(ranks) > 1:
        waited = f"a rank waited {_seconds(told['waited'])} for others"
        shown += ["", f"{waited}; the busiest rank had {told['imbalance']:.1%} more to do than the mean"]
        number = sum(each["collectives"] for each in told["last"])
        most = ", ".join(f"rank {each['rank']} {each['collectives'] / number:.0%}" for each in told["last"][:4])
        if most:
            shown.append(f"last in {number} collectives: {most}")
    return shown


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us"
