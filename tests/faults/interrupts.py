"""Random collectives, of which one is interrupted by a signal and repeated. See ``test_interrupts.py``.

    python -m mpistrat run -n 2 tests/faults/interrupts.py WAYS SEED FIRST LAST

Every draw has a communicator of its own. On it the ranks make the same calls; on one rank, or on all, a signal handler
raises at a random moment of one of them, and the program repeats that call. A draw ends well if all results are right,
or all ranks raise. Where the other ranks may wait inside MPI (WAYS is "any"), the interrupted rank alone raises, which
ends the job; with "meeting" they meet in shared memory only.
"""

import faulthandler
import random
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Topology

WORLD = MPI.COMM_WORLD
LIMIT = 5  # seconds of a draw
RANK, SIZE = WORLD.rank, WORLD.size
MIRRORED = {"aggregation": mpistrat.VariableAggregation.MEAN}
ON_READ = {
    "synchronization": mpistrat.VariableSynchronization.ON_READ,
    "aggregation": mpistrat.VariableAggregation.SUM,
}


class InterruptError(Exception):
    """What the signal handler raises."""


class Draw:
    """One strategy, and calls of one kind on it."""

    def __init__(self, ways, chance, comm):
        nodes = chance.choice([1, 2]) if ways == "any" else 1
        made = Topology.of(comm, split=lambda world: world.rank % nodes)
        assert len(made.nodes) == nodes
        any_way = ["auto", "mpi", "hierarchical", "leader", "ordered", "exact"]
        self.implementation = chance.choice(any_way) if ways == "any" else "auto"
        limit = chance.choice([None, LIMIT / 2]) if ways == "any" else None
        options = CommunicationOptions(implementation=self.implementation, timeout_seconds=limit)
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options)
        self.kind = chance.choice(sorted(KINDS.keys() - (MPI_ONLY if ways == "meeting" else set())))
        if self.implementation in ("ordered", "exact") and self.kind in ("begin", "wait", "scatter"):
            self.kind = "all_reduce"
        self.length = chance.choice([1, 5, 3_000, 40_000, 250_000])
        self.nodes = nodes
        with self.strategy.scope():
            self.mirrored = mpistrat.Variable(np.zeros(self.length), **MIRRORED)
            self.on_read = mpistrat.Variable(np.zeros(self.length), **ON_READ)
        self.buffer = self.strategy.experimental_buffers_like(np.zeros(self.length))

    def __repr__(self):
        return f"{self.kind} of {self.length} by {self.implementation} on {self.nodes} node(s)"


def own(draw, step):
    return np.full(draw.length, 10.0 * step + RANK)


def total(step):
    return SIZE * 10.0 * step + SIZE * (SIZE - 1) / 2


# Of each kind: what is called, and repeated if it is interrupted; a function of its result; what that must be.


def reduce(draw, step):
    value = own(draw, step)
    return lambda: draw.strategy.reduce("SUM", value, axis=None), unchanged, total(step)


def mean(draw, step):
    value = own(draw, step)
    return lambda: draw.strategy.reduce("MEAN", value, axis=None), unchanged, total(step) / SIZE


def over_axis(draw, step):
    value = own(draw, step)
    return lambda: draw.strategy.reduce("SUM", value, axis=0), unchanged, total(step) * draw.length


def halves(draw, step):
    value = np.full(draw.length, step, np.float16)
    return lambda: draw.strategy.reduce("SUM", value, axis=None), unchanged, SIZE * step


def several(draw, step):
    value = {"a": own(draw, step), "b": [np.full(3, 10.0 * step + RANK), 10.0 * step + RANK]}
    return (
        lambda: draw.strategy.reduce("SUM", value, axis=None),
        lambda found: np.concatenate([found["a"], found["b"][0], [found["b"][1]]]),
        total(step),
    )


def all_reduce(draw, step):
    value = own(draw, step)
    return lambda: mpistrat.get_replica_context().all_reduce("SUM", value), unchanged, total(step)


def begin(draw, step):
    value = own(draw, step)
    return (
        lambda: mpistrat.get_replica_context().experimental_all_reduce_async("SUM", value),
        lambda pending: pending.wait(),
        total(step),
    )


def wait(draw, step):
    pending = mpistrat.get_replica_context().experimental_all_reduce_async("MEAN", own(draw, step))
    return pending.wait, unchanged, total(step) / SIZE


def scatter(draw, step):
    value = own(draw, step)
    return (
        lambda: mpistrat.get_replica_context().experimental_reduce_scatter("SUM", value),
        unchanged,
        total(step),
    )


def gather(draw, step):
    value = [own(draw, step), own(draw, step) + 1]
    return (
        lambda: draw.strategy.gather(value, axis=0),
        lambda found: np.array([each.reshape(SIZE, -1).sum(0) - i * SIZE for i, each in enumerate(found)]),
        total(step),
    )


def on_read(draw, step):
    draw.strategy.run(lambda: draw.on_read.assign(own(draw, step)))
    return draw.on_read.read_value, unchanged, total(step)


def assign(draw, step):
    value = own(draw, step)
    return lambda: draw.mirrored.assign(value), lambda v: v.read_value(), total(step) / SIZE


def broadcast(draw, step):
    value = own(draw, step)
    return (
        lambda: draw.strategy.extended.broadcast_to(value, "cpu:0"),
        lambda found: found.values[0],
        10.0 * step,
    )


def reduce_to(draw, step):
    value = own(draw, step)
    return (
        lambda: draw.strategy.extended.reduce_to("SUM", value, "cpu:0"),
        lambda found: found.values[0],
        total(step),
    )


def in_place(draw, step):
    draw.buffer[...] = 10.0 * step + RANK
    return lambda: draw.strategy.reduce("SUM", draw.buffer, axis=None), np.copy, total(step)


def agree(draw, step):
    return lambda: draw.strategy.agree(bool(step % 2)), unchanged, bool(step % 2)


def unchanged(result):
    return result


IN_REPLICA = {each.__name__: each for each in (all_reduce, begin, wait, scatter, assign)}
KINDS = IN_REPLICA | {
    each.__name__: each
    for each in (
        reduce,
        mean,
        over_axis,
        halves,
        several,
        gather,
        on_read,
        broadcast,
        reduce_to,
        in_place,
        agree,
    )
}
MPI_ONLY = {"begin", "wait", "scatter", "agree", "several", "gather", "over_axis", "broadcast"}


armed = False


def handler(*_):
    if armed:
        raise InterruptError


def made(draw, step, delay=None, nap=0.0):
    """Make a call, again as often as it is interrupted, check its result; how often it was, and how long it took."""
    global armed
    call, read, expected = KINDS[draw.kind](draw, step)
    time.sleep(nap)
    times, result, start = 0, None, time.perf_counter()
    try:
        if delay is not None:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
        while result is None:
            try:
                result = call()
            except InterruptError:
                times, armed = times + 1, False
    except InterruptError:  # where this program calls setitimer, or jumps back
        armed = False
        result = call() if result is None else result
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.perf_counter() - start
    found = np.asarray(read(result))
    if not (found == expected).all():
        wrong(f"{draw!r}, step {step}: {found} instead of {expected}")
    return times, took


def play(draw, chance):
    """Make the calls; how often this rank was interrupted."""
    for step in (1, 2):
        _, took = made(draw, step)
    took = max(WORLD.allgather(took))
    victims = chance.choice([{0}, {SIZE - 1}, {SIZE - 1}, set(range(SIZE))])
    late, fraction = chance.choice([None, 0, SIZE - 1]), chance.random() * 1.5
    nap = 2 * took if late == RANK else 0.0
    times, _ = made(draw, 3, max(took * fraction, 1e-6) if RANK in victims else None, nap)
    for step in (4, 5, 6):
        more, _ = made(draw, step)
        times += more
    return times


def wrong(text):
    print(f"WRONG on rank {RANK}: {text}", flush=True)
    MPI.COMM_WORLD.Abort(3)


def main(ways, seed, first, last):
    signal.signal(signal.SIGALRM, handler)
    for number in range(first, last):
        chance = random.Random(f"{seed} {number}")
        draw = Draw(ways, chance, WORLD.Dup())
        WORLD.Barrier()
        if RANK == 0:
            print(f"draw {number}: {draw!r}", flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        times, error = 0, None
        try:
            times = draw.strategy.run(play, (draw, chance)) if draw.kind in IN_REPLICA else play(draw, chance)
        except RuntimeError as caught:
            error = str(caught)
            if not isinstance(caught, MismatchError) and ways == "any":
                raise  # and end the job: the ranks that wait for this one cannot be told
        told = WORLD.allgather((times, error))
        faulthandler.cancel_dump_traceback_later()
        errors = [error for _, error in told if error is not None]
        if errors and (len(errors) < SIZE or "was interrupted by InterruptError" not in errors[0]):
            wrong(f"{draw!r}: {told}")
        if RANK == 0:
            print("raised" if errors else "right", sum(times for times, _ in told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
