"""Compare asynchronous training with TensorFlow's, in turn: the same network, closures and numbers of processes.

``python benchmarks/asynchronous/against_tensorflow.py --tensorflow PYTHON`` starts a coordinator, a parameter server
and 1 or 2 workers, once with each library in each round, and prints medians of the rounds. PYTHON is an interpreter
that has TensorFlow, which need not be in the environment of this library. Measured are steps of training and empty
closures, scheduled all at once after a warm-up, and the time from ``schedule`` until ``fetch`` has the result.
The status is 1 if the losses of the two libraries do not agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
OURS, THEIRS = "mpistrat", "TensorFlow"
ROWS = {"steps": "steps/s", "closures": "empty closures/s", "latency": "schedule and fetch, ms"}
SECONDS = 120  # of one run
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"
Figures = dict[str, float]


def main() -> int:
    """Print a table for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensorflow", default=sys.executable, metavar="PYTHON", help="default: this Python")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--closures", type=int, default=500, help="steps; there are 4 empty closures for each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each process (default: as the libraries choose)")
    options = parser.parse_args()
    libraries = [OURS, THEIRS]
    if subprocess.run([options.tensorflow, "-c", FIND]).returncode:
        print("TensorFlow is left out: it is not installed")
        libraries.remove(THEIRS)
    for workers in options.workers:
        runs: dict[str, list[Figures]] = {library: [] for library in libraries}
        for _ in range(options.rounds):
            for library, found in runs.items():
                found.append(run(library, workers, options))
        check(runs, workers)
        report(runs, workers)
    return 0


def run(library: str, workers: int, options: argparse.Namespace) -> Figures:
    """Return the figures of one run, in processes of its own."""
    arguments = ["--workers", str(workers), "--closures", str(options.closures)]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    if options.threads:
        arguments += ["--threads", str(options.threads)]
        environ["OMP_NUM_THREADS"] = str(options.threads)
    if library == OURS:
        launcher = [sys.executable, "-m", "mpistrat", "run", "-n", str(workers + 2)]
        command = [*launcher, str(FOLDER / "with_mpistrat.py")]
    else:
        command = [options.tensorflow, str(FOLDER / "with_tensorflow.py")]
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ended = subprocess.run(
        [*command, *arguments], env=environ, timeout=SECONDS, capture_output=True, text=True, errors="replace"
    )
    if ended.returncode:
        sys.exit(f"{library}, {workers} workers: exit status {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def check(runs: dict[str, list[Figures]], workers: int) -> None:
    """Exit with status 1 if a run has not learned, or if single workers have other losses."""
    for library, found in runs.items():
        for each in found:
            if not each["last"] < each["first"] / 2:
                sys.exit(f"{library}, {workers} workers: the loss went from {each['first']} to {each['last']}")
    if workers == 1:  # several workers take their steps in no certain order
        for key in ("first", "last"):
            losses = [each[key] for found in runs.values() for each in found]
            if not math.isclose(min(losses), max(losses), rel_tol=0.01):
                sys.exit(f"the {key} losses differ between the runs: {losses}")


def report(runs: dict[str, list[Figures]], workers: int) -> None:
    """Print the medians of all rounds, and the quotients of the first two libraries."""
    print(f"workers: {workers}".ljust(24) + "".join(library.rjust(12) for library in runs) + "    ratio")
    for key, name in ROWS.items():
        scale = 1e3 if key == "latency" else 1.0
        medians = [scale * statistics.median(each[key] for each in found) for found in runs.values()]
        ratio = f"{medians[0] / medians[1]:9.2f}" if len(medians) > 1 else ""
        print(name.ljust(24) + "".join(f"{each:12,.{3 if key == 'latency' else 0}f}" for each in medians) + ratio)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
