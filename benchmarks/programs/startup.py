"""Measure time and memory from the launch to the end of the first all-reduce."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

PROGRAMS = {LIBRARY: "startup_with_library.py", "by hand": "startup_by_hand.py"}
_LINE = re.compile(r"started (\S+) (\S+) (\d+) \.")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Start(NamedTuple):
    """A launch: the times of the slowest rank, and the memory of the largest."""

    since_launch: float
    since_first_line: float
    peak: int


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = under_ranks.parser(__doc__, repetitions=10)
    arguments = parser.parse_args(argv)
    if arguments.here or under_ranks.under_several_ranks():
        parser.error("startup measures launches, so it launches the ranks itself: call it without a launcher")
    launcher = arguments.launcher or _mpirun()
    starts: dict[str, list[Start]] = {way: [] for way in PROGRAMS}
    for repetition in range(arguments.repetitions + 1):
        ways = list(PROGRAMS) if repetition % 2 else list(PROGRAMS)[::-1]
        for way in ways:
            path = Path(__file__).with_name(PROGRAMS[way])
            start = _start(under_ranks.command(arguments.n, launcher, [str(path)]), arguments.n)
            if repetition:  # the first launch only warms the page cache
                starts[way].append(start)
    report = Report("startup", arguments.n)
    for case, what in (("launch to first all-reduce", 0), ("first line to first all-reduce", 1)):
        for way, measured in starts.items():
            report.add(case, way, 4, median(start[what] for start in measured))
    for way, measured in starts.items():
        report.add("memory", way, round(median(start.peak for start in measured)), 0.0)
    report.show(arguments.json)
    return 0


def _mpirun() -> str:
    """Return the command of mpirun. The checks of `mpistrat run` are not a cost of the library."""
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        sys.exit("found no mpirun beside this Python or on PATH: give a launcher by --launcher")
    return f"{shlex.quote(path)} -n {{n}}"


# Allow root, and more ranks than cores.
_LENIENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def _start(command: list[str], n: int) -> Start:
    begin = time.time()
    ended = subprocess.run(
        command, env=_LENIENT | under_ranks.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    lines = _LINE.findall(ended.stdout)
    if ended.returncode or len(lines) != n:
        sys.exit(
            f"`{shlex.join(command)}` ended with status {ended.returncode}, and {len(lines)} of {n} ranks came to "
            f"their first all-reduce:\n{ended.stdout}{ended.stderr}"
        )
    return Start(
        max(float(done) for _, done, _ in lines) - begin,
        max(float(done) - float(first) for first, done, _ in lines),
        max(int(peak) for *_, peak in lines) * _MAXRSS_UNIT,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
