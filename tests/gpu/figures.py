"""What a session on a GPU has to show, and what it has shown so far: figures.json, of the files that its steps leave.

python3 tests/gpu/figures.py STEPS FOLDER
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FAR = 64 << 20  # bytes at which routes are compared
ROUTES = ("nccl", "gpu_direct", "pinned")
UNPINNED, CUDA_AWARE = "unpinned copy and one call", "one call on device pointers"
COPY = "a copy on the GPU"

Found = dict[str, Any]


def figures(steps: Path) -> list[Found]:
    """All rows, those that were not measured with ``"met": null`` and the reason."""
    return [row for look in LOOKS for row in look(steps)]


def row(what: str, wanted: str, figure: Any = None, met: bool | None = None, why: str = "") -> Found:
    return {"what": what, "wanted": wanted, "figure": figure, "met": met, **({"why": why} if why else {})}


def machine(steps: Path) -> Iterator[Found]:
    text = read(steps / "info-2.txt")
    for name in ("cupy", "library", "devices", "arrays on GPUs", "device pointers"):
        found = re.search(rf"^  {name}  +(.*)$", text, re.MULTILINE)
        yield row(name, "", found and found[1])


def tests(steps: Path) -> Iterator[Found]:
    for name in ("tests-2", "tests-4", "tests-1", "commands", "direct-tests"):
        text = read(steps / f"{name}.txt")
        counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)\b", text)}
        bad = sum(n for word, n in counts.items() if word != "passed")
        met = only_whole(steps, name, not bad) if counts else None
        failed = re.findall(r"^FAILED (\S+)", text, re.MULTILINE)
        yield row(name, "all pass", {**counts, "failures": failed[:20]} if counts else None, met)


def routes(steps: Path) -> Iterator[Found]:
    """What each comparison comes to at 64 MiB, or at the largest size that was measured."""
    for name, way, wanted in (("bench-2", UNPINNED, 3.0), ("direct-bench", CUDA_AWARE, 1.5)):
        what, text = f"pinned against {way!r}, {name}", f">= {wanted:g} times as fast"
        seconds, nbytes = at_size(steps / f"{name}.json")
        ours, theirs = seconds.get("mpistrat, pinned"), seconds.get(way)
        if ours is None or theirs is None:
            yield row(what, text)
        else:
            yield row(f"{what}, {nbytes} bytes", text, round(theirs / ours, 3), theirs >= wanted * ours)


def each_route(steps: Path) -> Iterator[Found]:
    for name in ("bench-2", "bench-4", "bench-1", "direct-bench"):
        rows = load(steps / f"{name}.json") or []
        for nbytes in sorted({each["bytes"] for each in rows}):
            rate = {
                each["way"]: round(nbytes / each["seconds"] / 1e9, 3)
                for each in rows
                if each["bytes"] == nbytes and each["seconds"]
            }
            yield row(f"GB/s, {name}, {nbytes} bytes", "", rate)


def kernels(steps: Path) -> Iterator[Found]:
    rates = load(steps / "bandwidth.json") or {}
    bound = rates.get(COPY)
    for what, wanted in (("pack", 0.8), ("update", 0.8)):
        shares = {name: rate / bound for name, rate in rates.items() if name.startswith(what) and bound}
        least = min(shares, key=lambda name: shares[name], default=None)
        text = f">= {wanted:.0%} of the copy on the GPU"
        if least is None:
            yield row(f"kernels: {what}", text)
        else:
            figure = {"least": least, "share": round(shares[least], 3), "of": bound}
            met = only_whole(steps, "bandwidth", shares[least] >= wanted)
            yield row(f"kernels: {what}", text, figure, met)
    if rates:
        yield row("kernels, GB/s", "", {name: round(rate / 1e9, 1) for name, rate in rates.items()})


def growth(steps: Path) -> Iterator[Found]:
    found = load(steps / "growth.json") or {}
    for route in ROUTES:
        what, wanted = f"growth of memory by {route}", "none after 10,000 all-reduces"
        each = found.get(route)
        if each is None or "why" in each:
            yield row(what, wanted, why=(each or {}).get("why", ""))
        else:
            yield row(what, wanted, each, None if each["times"] < 10_000 else not each["grew"])


def job(steps: Path) -> Iterator[Found]:
    histories = [load(steps / f"job-{device}" / "history.json") for device in ("cpu", "cuda")]
    what, wanted = "main job: accuracy on the host, and on the GPU", "equal within 0.005"
    if None in histories:
        yield row(what, wanted)
        return
    accuracy = [each["accuracy"] for each in histories]
    yield row(what, wanted, accuracy, abs(accuracy[0] - accuracy[1]) <= 0.005)


def sanitizer(steps: Path) -> Iterator[Found]:
    for name in ("memcheck", "racecheck"):
        text = read(steps / f"{name}.txt")
        found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
        count = found and int(found[1] or found[2])
        yield row(f"compute-sanitizer, {name}", "no errors", count, None if count is None else count == 0)


LOOKS: tuple[Callable[[Path], Iterator[Found]], ...] = (
    machine, tests, routes, kernels, growth, job, sanitizer, each_route,
)  # fmt: skip


def at_size(path: Path) -> tuple[dict[str, float], int]:
    """Seconds of each way at 64 MiB, or the largest size below that was measured."""
    rows = load(path) or []
    nbytes = max((each["bytes"] for each in rows if each["bytes"] <= FAR), default=0)
    return {each["way"]: each["seconds"] for each in rows if each["bytes"] == nbytes}, nbytes


def only_whole(steps: Path, name: str, met: bool) -> bool | None:
    """What a step found; if that is well, but the step was stopped before its end, nothing."""
    return None if met and read(steps / f"{name}.status").strip() != "0" else met


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def load(path: Path) -> Any:
    try:
        return json.loads(read(path))
    except ValueError:
        return None


def main() -> int:
    """Write figures.json, whole or not at all."""
    steps, folder = map(Path, sys.argv[1:3])
    rows = figures(steps)
    for each in rows:
        if each["met"] is None and each["figure"] is None and "why" not in each:
            each["why"] = "not measured"
    new = folder / "figures.json.new"
    new.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(new, folder / "figures.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
