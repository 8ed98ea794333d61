"""What a merged trace must keep to: the trace event format, as Perfetto and chrome://tracing read it.

The format is documented in "Trace Event Format" (complete, instant, metadata and flow events). Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PHASES = {"INPUT_WAIT", "REDUCE_PACK", "REDUCE_MEET", "REDUCE_WIRE", "REDUCE_UNPACK", "SAVE", "USER"}
REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
NANOSECOND = 0.001


class Merged:
    """A merged trace that keeps to the format.

    Attributes
    ----------
    ranks : dict of int to tuple of int
        The node and the track of each rank.
    slices : dict
        For each track the slices (name, begin, end, category, arguments), in the order of their beginnings.
    flows : dict
        For each flow its events, in the order of time.
    """

    def __init__(self, path: Path):
        opener = gzip.open if path.name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as file:
            self.whole: dict[str, Any] = json.load(file)
        events = self.whole["traceEvents"]
        self.ranks: dict[int, tuple[int, int]] = {}
        self.slices: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.flows: dict[int, list[Any]] = defaultdict(list)
        nodes, names = {}, {}
        for event in events:
            assert set(event) - {"args"} == REQUIRED[event["ph"]] - {"args"} | {"ph"}, event
            assert {type(event["pid"]), type(event["tid"])} == {int}
            track = event["pid"], event["tid"]
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    nodes[event["pid"]] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    assert track not in names, f"two tracks have the place of {names[track]}"
                    names[track] = event["args"]["name"]
                continue
            assert event["ts"] >= 0, event
            assert track in names, event
            if event["ph"] == "X":
                assert event["dur"] >= 0
                end = event["ts"] + event["dur"]
                self.slices[track].append((event["name"], event["ts"], end, event["cat"], event.get("args")))
            elif event["ph"] in "stf":
                self.flows[event["id"]].append(event)
        for (pid, tid), name in names.items():
            if "thread" not in name:
                rank = int(name.removeprefix("rank "))
                assert tid not in nodes, "a thread has the number of a process: Perfetto would mix them"
                assert rank not in self.ranks, f"rank {rank} has two tracks"
                self.ranks[rank] = pid, tid
        assert set(nodes) == {pid for pid, _ in names}
        assert len(set(names.values())) == len({tid for _, tid in names}) == len(names)
        self._check_nesting()
        self._check_flows()

    def _check_nesting(self) -> None:
        """A slice lies in another one or beside it. Phases do not overlap, unless one is around a whole collective."""
        for track, slices in self.slices.items():
            around: list[Any] = []
            last = 0.0
            for one in slices:
                name, begin, end, category, _ = one
                assert begin >= last - NANOSECOND, f"{track}: {one} is out of order"
                last = begin
                while around and around[-1][2] <= begin + NANOSECOND / 2:
                    around.pop()
                if around:
                    assert end <= around[-1][2] + NANOSECOND / 2, f"{track}: {one} leaves {around[-1]}"
                    assert around[-1][3] == "collective" or around[-1][0] in ("SAVE", "INPUT_WAIT"), one
                assert category == "collective" or name in PHASES, one
                around.append(one)

    def _check_flows(self) -> None:
        """A flow has one beginning and one end, in the order of time, each in a slice of the same collective."""
        for number, events in self.flows.items():
            kinds = [event["ph"] for event in events]
            assert kinds == ["s", *["t"] * (len(events) - 2), "f"], (number, kinds)
            times = [event["ts"] for event in events]
            assert times == sorted(times)
            tracks = [(event["pid"], event["tid"]) for event in events]
            assert len(set(tracks)) == len(tracks)
            met = {self.collective_at(track, time) for track, time in zip(tracks, times, strict=True)}
            assert len(met) == 1, met

    def collective_at(self, track: tuple[int, int], time: float) -> tuple[str, int]:
        """The name and the number of the collective that begins on a track at a time."""
        found = [
            (name, args["number"])
            for name, begin, _, category, args in self.slices[track]
            if category == "collective" and abs(begin - time) < NANOSECOND / 2
        ]
        assert len(found) == 1, (track, time, found)
        return found[0]

    def of_rank(self, rank: int) -> list[Any]:
        """The slices of a rank."""
        return self.slices[self.ranks[rank]]

    def check_clocks(self, most: float) -> None:
        """Check that no rank leaves a barrier before another has come, but for some microseconds."""
        barriers = defaultdict(list)
        for (_, tid), slices in self.slices.items():
            for name, begin, end, category, args in slices:
                if category == "collective" and name == "barrier":
                    barriers[args["number"]].append((begin, end, tid))
        seen = 0
        for number, ranks in barriers.items():
            if len(ranks) == len(self.ranks):
                seen += 1
                late, early = max(begin for begin, *_ in ranks), min(end for _, end, _ in ranks)
                assert early >= late - most, f"barrier {number}: {ranks}"
        assert seen or len(self.ranks) == 1
