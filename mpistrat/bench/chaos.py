"""Run a program again and again, lose ranks of it at random moments, and compare what it prints last.

Each run has an empty directory of its own as the working directory, in which the program finds no file of another run.
So give absolute paths to the program.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from typing import NamedTuple

import numpy as np

from mpistrat.bench import under_ranks
from mpistrat.launch.launchers import ranks_below
from mpistrat.process import children

_SIGNALS = {"killed": signal.SIGKILL, "crashed": signal.SIGSEGV, "stopped": signal.SIGSTOP}
_HOW = ("killed", "killed", "killed", "crashed", "stopped")
_STOPPED_S = 0.3
_MOST_LOSSES = 2  # of one run: three at the same step would be taken for the fault of the program
_LATE_S = 60.0  # beside five times the time of a run without a loss: the run hangs


class Fault(NamedTuple):
    """What happens to some ranks, at a part of the time that a run without a fault takes."""

    how: str
    ranks: tuple[int, ...]
    at: float

    def __str__(self) -> str:
        name = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{name} {', '.join(map(str, self.ranks))} {self.how} at {100 * self.at:.0f} %"


class EndedRun(NamedTuple):
    """How a run has ended: its exit status, None after it hung, and the ends of its outputs."""

    status: int | None
    result: str
    messages: str
    seconds: float
    faults: list[Fault]  # those that came before its end


def main(argv: list[str]) -> int:
    """Run the subject with these arguments."""
    parser = argparse.ArgumentParser(prog="mpistrat bench chaos", description=__doc__)
    parser.add_argument("-n", type=under_ranks.positive, default=2, help="number of ranks (%(default)s)")
    under_ranks.count(parser, "--losses", 20, "losses in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, ranks and signals (%(default)s)")
    parser.add_argument("--fewer", action="store_true", help="go on with one rank less after a loss")
    parser.add_argument("--standby", action="store_true", help="start the ranks of the next run before a loss")
    parser.add_argument("-m", action="store_true", dest="is_module", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", metavar="PROGRAM", help="what mpistrat run would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the program")
    arguments = parser.parse_args(argv)
    name = ["-m", arguments.program] if arguments.is_module else [os.path.abspath(arguments.program)]
    program = [*name, *arguments.arguments]
    options = ["--elastic", "fewer" if arguments.fewer else "same", *["--standby"] * arguments.standby]
    command = children.running("mpistrat", "run", "-n", str(arguments.n))
    environ = under_ranks.environment()
    if arguments.is_module:  # of the directory from which Python takes it, as the one of a run is empty
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), environ.get("PYTHONPATH")]))
    undisturbed = _run([*command, *program], environ, [], 0)
    if undisturbed.status or not undisturbed.result:
        print(undisturbed.messages)
        print(f"without a loss: exit status {undisturbed.status}, last line {undisturbed.result!r}: nothing to compare")
        return 1
    print(f"without a loss: {undisturbed.seconds:.1f} s, last line {undisturbed.result!r}", flush=True)
    rng = np.random.default_rng(arguments.seed)
    losses = runs = wrong = 0
    while losses < arguments.losses and runs < 4 * arguments.losses:  # some runs end before their loss
        faults = [_drawn(rng, arguments.n) for _ in range(rng.integers(1, _MOST_LOSSES + 1))]
        run = _run([*command, *options, *program], environ, faults, undisturbed.seconds)
        same = run.status == 0 and run.result == undisturbed.result
        runs, wrong = runs + 1, wrong + (not same)
        losses += sum(fault.how != "stopped" for fault in run.faults)
        came = "; ".join(map(str, run.faults)) or "ended before a fault came"
        end = "hangs" if run.status is None else f"exit status {run.status}, last line {run.result!r}"
        print(f"{runs:4} {came}: {'the same' if same else end}, {run.seconds:.1f} s", flush=True)
        if not same:
            print(run.messages, flush=True)
    print(f"{losses} losses in {runs} runs with seed {arguments.seed}: {runs - wrong} with the same last line")
    if losses < arguments.losses:
        print("most runs ended before their losses: the program is too short")
    return int(wrong > 0 or losses < arguments.losses)


def _drawn(rng: np.random.Generator, ranks: int) -> Fault:
    victims = range(ranks) if rng.random() < 0.25 else sorted({*rng.integers(0, ranks, rng.integers(1, 3)).tolist()})
    return Fault(str(rng.choice(_HOW)), tuple(victims), rng.random())


def _run(command: list[str], environ: dict[str, str], faults: list[Fault], usual: float) -> EndedRun:
    """Run a command, with a fault in each start of its ranks. ``usual`` is its time in seconds; 0 for no limit."""
    start = time.monotonic()
    end = start + (len(faults) + 1) * 5 * usual + _LATE_S if usual else math.inf
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mpistrat-chaos-", ignore_cleanup_errors=True))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        job = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1]
        )
        stack.callback(_end, job)
        came = _disturb(job, faults, usual, end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(None if end == math.inf else max(0.0, end - time.monotonic()))
        for file in files:
            file.seek(0)
        output, messages = (file.read().decode(errors="replace").rstrip() for file in files)
        return EndedRun(job.poll(), output.rpartition("\n")[2], messages[-4000:], time.monotonic() - start, came)


def _disturb(job: subprocess.Popen[bytes], faults: list[Fault], usual: float, end: float) -> list[Fault]:
    """Let faults happen to a job, and return those that came before its end or ``end``."""
    over: set[int] = set()  # the ranks of starts that a loss has ended
    for i, fault in enumerate(faults):
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(fault.at * usual)
        while job.poll() is None and not _ranks(job.pid, over) and time.monotonic() < end:  # the next start begins
            time.sleep(0.01)
        ranks = _ranks(job.pid, over)
        running = sorted(ranks)  # fewer than at first, with --fewer
        victims = {ranks[running[rank % len(running)]] for rank in fault.ranks} if running else {}
        if job.poll() is not None or not victims:
            return faults[:i]
        for victim in victims:
            _send(victim, _SIGNALS[fault.how])
        if fault.how == "stopped":
            time.sleep(_STOPPED_S)
            for victim in victims:
                _send(victim, signal.SIGCONT)
        else:
            over.update(ranks.values())
    return faults


def _ranks(job: int, over: set[int]) -> dict[int, int]:
    """Return the process of each rank that runs: the eldest, since those of the next start may wait already."""
    eldest_last = sorted(ranks_below(job).items(), reverse=True)
    return {rank: process for process, rank in eldest_last if process not in over}


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that hangs: its launcher and, through it, the ranks."""
    if job.poll() is None:
        ranks = [*ranks_below(job.pid)]
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
        for process in [*ranks, job.pid]:
            _send(process, signal.SIGKILL)
        job.wait()
