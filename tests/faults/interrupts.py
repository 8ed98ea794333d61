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
from functools import partial

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Topology

WORLD = MPI.COMM_WORLD
LIMIT = 20  # seconds of a draw
RANK, SIZE = WORLD.rank, WORLD.size
MIRRORED = {"aggregation": mpistrat.VariableAggregation.MEAN}
ON_READ = {"synchronization": mpistrat.VariableSynchronization.ON_READ, "aggregation": mpistrat.VariableAggregation.SUM}


class InterruptError(Exception):
    """What the signal handler raises."""


class Draw:
    """One strategy, and calls of one kind on it."""

    def __init__(self, comm, kind, length, implementation="auto", nodes=1, limit=None):
        made = Topology.of(comm, split=lambda world: world.rank % nodes)
        assert len(made.nodes) == nodes
        self.kind, self.length, self.implementation, self.nodes = kind, length, implementation, nodes
        options = CommunicationOptions(implementation=implementation, timeout_seconds=limit)
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options)
        with self.strategy.scope():
            self.mirrored = mpistrat.Variable(np.zeros(length), **MIRRORED)
            self.on_read = mpistrat.Variable(np.zeros(length), **ON_READ)
        self.buffer = self.strategy.experimental_buffers_like(np.zeros(length))

    @classmethod
    def by_chance(cls, comm, chance, ways):
        nodes = chance.choice([1, 2]) if ways == "any" else 1
        any_way = ["auto", "mpi", "hierarchical", "leader", "ordered", "exact"]
        implementation = chance.choice(any_way) if ways == "any" else "auto"
        limit = chance.choice([None, LIMIT / 2]) if ways == "any" else None
        kind = chance.choice(sorted(KINDS if ways == "any" else MEETING))
        if implementation in ("ordered", "exact") and kind in ("begin", "wait", "scatter"):
            kind = "all_reduce"
        length = chance.choice([1, 5, 3_000, 40_000, 250_000])
        return cls(comm, kind, length, implementation, nodes, limit)

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
    return (lambda: mpistrat.get_replica_context().experimental_reduce_scatter("SUM", value), unchanged, total(step))


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
    return (lambda: draw.strategy.extended.broadcast_to(value, "cpu:0"), lambda found: found.values[0], 10.0 * step)


def reduce_to(draw, step):
    value = own(draw, step)
    return (lambda: draw.strategy.extended.reduce_to("SUM", value, "cpu:0"), lambda found: found.values[0], total(step))


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
    for each in (reduce, mean, over_axis, halves, several, gather, on_read, broadcast, reduce_to, in_place, agree)
}
MPI_ONLY = {"begin", "wait", "scatter", "agree", "several", "gather", "over_axis", "broadcast"}
MEETING = KINDS.keys() - MPI_ONLY


armed = False


def handler(*_):
    if armed:
        raise InterruptError


def made(draw, step, delay=None, nap=0.0):
    """Make a call, again as often as it is interrupted, check its result; how often it was, and how long it took."""
    global armed
    call, check = prepared(draw, step)
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
    check(result)
    return times, took


def prepared(draw, step):
    """A call of a draw, and a function that checks its result."""
    call, read, expected = KINDS[draw.kind](draw, step)

    def check(result):
        found = np.asarray(read(result))
        if not (found == expected).all():
            wrong(f"{draw!r}, step {step}: {found} instead of {expected}")

    return call, check


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


def played(draw, play, is_shared_memory_only, cause="was interrupted by InterruptError"):
    """Play a draw. How often each rank was interrupted; None for all of them if they raise."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    times, error = 0, None
    try:
        times = draw.strategy.run(play, (draw,)) if draw.kind in IN_REPLICA else play(draw)
    except RuntimeError as caught:
        error = str(caught)
        if not isinstance(caught, MismatchError) and not is_shared_memory_only:
            raise  # and end the job: the ranks that wait for this one cannot be told
    told = WORLD.allgather((times, error))
    faulthandler.cancel_dump_traceback_later()
    errors = [error for _, error in told if error is not None]
    if errors and (len(errors) < SIZE or any(cause not in each for each in errors)):
        wrong(f"{draw!r}: {told}")
    return [None] * SIZE if errors else [times for times, _ in told]


def wrong(text):
    print(f"WRONG on rank {RANK}: {text}", flush=True)
    MPI.COMM_WORLD.Abort(3)


def main(ways, seed, first, last):
    signal.signal(signal.SIGALRM, handler)
    for number in range(first, last):
        chance = random.Random(f"{seed} {number}")
        draw = Draw.by_chance(WORLD.Dup(), chance, ways)
        WORLD.Barrier()
        if RANK == 0:
            print(f"draw {number}: {draw!r}", flush=True)
        ended = played(draw, partial(play, chance=chance), is_shared_memory_only=ways == "meeting")
        if RANK == 0:
            print("raised" if None in ended else "right", sum(filter(None, ended)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
