"""One file for all ranks, in the trace event format that Perfetto and chrome://tracing read.

Each node is a process of that format, and each rank a thread of it. Flow events tie the calls of one collective.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from mpistrat.cli.trace.spans import Call, Track
from mpistrat.process import atomic_file

# The number of a thread: that of the rank behind a digit. Perfetto takes thread 0 for an idle core, and a thread with
# the number of a process for a thread of that.
_THREAD = 1_000_000


def write(path: Path, tracks: Sequence[Track], facts: dict[str, Any]) -> int:
    """Write the file, compressed if its name ends in ``.gz``. Return the number of events.

    Raise OSError if the file cannot be written.
    """
    with atomic_file.appearing(path, replace=True) as temporary:
        if path.name.endswith(".gz"):
            with gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file:
                return _write(file, tracks, facts)
        with open(temporary, "w", encoding="utf-8") as file:
            return _write(file, tracks, facts)


def _write(file: TextIO, tracks: Sequence[Track], facts: dict[str, Any]) -> int:
    count = 0

    def put(text: str) -> None:
        nonlocal count
        file.write(",\n" + text if count else text)
        count += 1

    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [\n')
    nodes: dict[tuple[str, int], int] = {}
    for track in tracks:
        nodes.setdefault(track.host, len(nodes) + 1)
    origin = min((each.spans[0].begin for each in tracks if each.spans), default=0)
    for (name, _), pid in nodes.items():
        put(_metadata("process_name", pid, 0, name=f"node {name}"))
        put(_metadata("process_sort_index", pid, 0, sort_index=pid))
    flows: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
    named = set()
    for track in tracks:
        pid, tid = nodes[track.host], track.rank + _THREAD * (track.thread + 1)
        if (pid, tid) not in named:
            named.add((pid, tid))
            thread = f", thread {track.thread}" if track.thread else ""
            put(_metadata("thread_name", pid, tid, name=f"rank {track.rank}{thread}"))
            put(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        _put_track(put, track, pid, tid, origin)
        for span in track.spans:
            if span.call is not None and span.call.communicator:
                key = span.call.communicator, span.call.number
                # A collective that was interrupted may be repeated: the last one counts.
                flows.setdefault(key, {})[track.rank] = span.begin - origin, pid, tid
    for i, ends in enumerate(flows.values()):
        _put_flow(put, i + 1, sorted(ends.values()))
    file.write("\n]}\n")
    return count


def _metadata(what: str, pid: int, tid: int, **values: Any) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values})


def _put_track(put: Callable[[str], None], track: Track, pid: int, tid: int, origin: int) -> None:
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    for span in track.spans:
        name = names.get(span.name) or names.setdefault(span.name, json.dumps(span.name))
        arguments = f', "args": {_arguments(span.call, places)}' if span.call is not None else ""
        kind = "collective" if span.call is not None else "phase"
        put(
            f'{{"ph": "X", "name": {name}, "cat": "{kind}", "pid": {pid}, "tid": {tid}, '
            f'"ts": {_microseconds(span.begin - origin)}, "dur": {_microseconds(span.end - span.begin)}{arguments}}}'
        )
    for number, time in enumerate(track.steps, 1):
        put(
            f'{{"ph": "i", "s": "t", "name": "end of step {number}", "cat": "step", "pid": {pid}, "tid": {tid}, '
            f'"ts": {_microseconds(time - origin)}}}'
        )


def _arguments(call: Call, places: dict[str, str]) -> str:
    place = places.get(call.place) or places.setdefault(call.place, json.dumps(call.place))
    finished = "" if call.finished else ', "finished": false'
    return f'{{"at": {place}, "number": {call.number}, "bytes": {call.nbytes}, "ranks": {call.size}{finished}}}'


def _put_flow(put: Callable[[str], None], number: int, ends: Sequence[tuple[int, int, int]]) -> None:
    if len(ends) < 2:
        return
    for i, (time, pid, tid) in enumerate(ends):
        kind = '"s"' if i == 0 else '"f", "bp": "e"' if i == len(ends) - 1 else '"t"'
        put(
            f'{{"ph": {kind}, "id": {number}, "name": "collective", "cat": "collective", "pid": {pid}, '
            f'"tid": {tid}, "ts": {_microseconds(time)}}}'
        )


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
