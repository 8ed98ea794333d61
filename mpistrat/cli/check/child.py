"""The process of `mpistrat check` that calls MPI, and may hang or crash: ``python -m ... FD OPTIONS``.

It sends its facts as lines of JSON to the process that watches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from mpistrat.cli.check.checks import CHECKS, thread_level
from mpistrat.cli.check.job import START, Blame, CheckOptions, SilenceError, TimedExchange, Trouble

_PR_SET_PDEATHSIG = 1


class Wire:
    """A pipe for lines of JSON to the process that watches this one."""

    def __init__(self, descriptor: int):
        self._file = open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until the process ends

    def tell(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")

    def stage(self, name: str) -> None:
        """Report the next stage, which may hang."""
        self.tell(stage=name)


def _stay(wire: Wire, **message: Any) -> NoReturn:
    """Report what went wrong, and wait to be killed: launchers end the job when a process leaves MPI early."""
    wire.tell(**message)
    while True:
        signal.pause()


def main(descriptor: int, options: CheckOptions) -> None:
    """Run the checks of this rank."""
    with contextlib.suppress(AttributeError, OSError):  # Linux kills this process when the one that watches it ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    wire = Wire(descriptor)
    facts: dict[str, Any] = {"host": socket.gethostname()}
    for check in CHECKS:
        if check.local is not None:
            wire.stage(check.title)
            facts[check.name] = check.local(options)
    wire.tell(facts=facts)
    if "error" in facts["library"]:
        _stay(wire, trouble=Trouble(Blame.LIBRARY, "no MPI library"))
    wire.stage(START)
    from mpi4py import MPI

    from mpistrat.launch.launch import AloneError, check_singleton, check_wheel

    library = MPI.Get_library_version()
    try:
        check_wheel(library, lambda: str(facts["library"]["file"]), os.environ)
        if not MPI.Is_initialized():
            MPI.Init_thread()
        world = MPI.COMM_WORLD
        check_singleton(world.size, library, os.environ)
    except AloneError as error:
        _stay(wire, alone=(error.problem, error.remedy))
    facts["library"]["threads"] = thread_level(MPI)
    wire.tell(facts=facts)
    try:
        _together(wire, world, facts, options)
    except SilenceError as error:
        _stay(wire, trouble=Trouble(Blame.SILENCE, str(error)))
    except Exception as error:  # mostly an error of MPI: the report shows it
        _stay(wire, trouble=Trouble(Blame.FAILED, f"{type(error).__name__}: {error}"))
    wire.stage("the end of MPI")
    MPI.Finalize()
    wire.tell(done=True)


def _together(wire: Wire, world: Any, facts: dict[str, Any], options: CheckOptions) -> None:
    """Run the checks that need messages between ranks. Rank 0 reports the facts."""
    # A shorter limit than the watching process has, so that the error names the silent ranks.
    exchange = TimedExchange(world.Dup(), options.limit * 0.8)
    wire.stage("a message to rank 0")
    everyone = exchange.gather(facts)
    wire.stage("the search for ranks of one node")
    from mpistrat.runtime.topology import Topology

    exchange.topology = topology = Topology.of(world)
    exchange.leaders = tuple(ranks[0] for ranks in topology.nodes)
    exchanged: dict[str, Any] = {}
    for check in CHECKS:
        if check.exchange is not None:
            wire.stage(check.title)
            exchanged[check.name] = check.exchange(exchange, options)
            exchange.barrier()
    if everyone is not None:
        for node, ranks in enumerate(topology.nodes):
            for rank in ranks:
                everyone[rank]["node"] = node
        wire.tell(everyone=everyone, exchanged=exchanged)
    exchange.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), CheckOptions(**json.loads(sys.argv[2])))
