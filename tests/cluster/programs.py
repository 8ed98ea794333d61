"""What the ranks on the nodes run: ``python programs.py NAME``. Rank 0 prints one line of JSON."""

import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI
from nodes import HEADER, MARGIN

import mpistrat
from mpistrat.runtime.agreement import agreement
from mpistrat.runtime.topology import Topology

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SHORT, LONG = (1, 1_001, 16_385), (131_072, 300_001)
CASES = [(length, dtype) for length in SHORT for dtype in ("float32", "float64", "complex64", "int32", "float16")]
CASES += [(length, dtype) for length in LONG for dtype in ("float32", "float16")]
COUNTED = (1 << 20, (1 << 20) + 4, 5_000_012)  # bytes
REDUCTIONS, MOST_REDUCTIONS = 4, 100


def say(what):
    """What every rank has to say, by rank."""
    told = WORLD.gather(what)
    if RANK == 0:
        print(json.dumps(told), flush=True)


def in_replica(strategy, method, *arguments):
    return strategy.run(lambda: getattr(mpistrat.get_replica_context(), method)(*arguments))


# --- what must be right --------------------------------------------------------------------------------


def values(length, dtype, rank):
    """Small whole numbers, which any order adds up to the same."""
    return ((np.arange(length) * 7 + 3 * rank) % 11).astype(dtype)


def all_reduce(strategy):
    """A name for each reduction that does not give what NumPy gives for all ranks' values."""
    wrong = []
    for length, dtype in CASES:
        total = sum(values(length, dtype, rank) for rank in range(SIZE))
        mean = total.astype(np.float64 if dtype == "int32" else dtype)
        mean /= mean.dtype.type(SIZE)
        buffer = strategy.experimental_buffers_like(np.empty(length, dtype))
        for op, expected in (("SUM", total), ("MEAN", mean)):
            for turn in ("first", "second"):
                buffer[...] = values(length, dtype, RANK)
                for kind, value in (("array", values(length, dtype, RANK)), ("buffer", buffer)):
                    got = in_replica(strategy, "all_reduce", op, value)
                    if got.dtype != expected.dtype or not np.allclose(got, expected, rtol=1e-6, atol=0):
                        wrong.append(f"{turn} {op} of {kind}: {length} x {dtype}")
    return wrong


def many_arrays(strategy):
    shapes = [(3,), (), (70_000,), (5, 7), (0, 2), (400, 300), (11,)] * 3
    wrong = []
    for turn in ("first", "second"):
        mine = [np.full(shape, RANK + i, np.float32) for i, shape in enumerate(shapes)]
        totals = in_replica(strategy, "all_reduce", "SUM", mine)
        for i, total in enumerate(totals):
            if total.shape != shapes[i] or not (total == SIZE * (SIZE - 1) // 2 + SIZE * i).all():
                wrong.append(f"{turn} {i}")
    return wrong


def gather(strategy):
    wrong = []
    for width in (3, 9_000):
        for turn in ("first", "second"):
            mine = np.arange((RANK + 1) * width).reshape(RANK + 1, width) + RANK
            expected = np.concatenate([np.arange((r + 1) * width).reshape(r + 1, width) + r for r in range(SIZE)])
            got = {"strategy": strategy.gather(mine, axis=0), "replica": in_replica(strategy, "all_gather", mine, 0)}
            wrong += [f"{turn} {name}, {width} wide" for name in got if not np.array_equal(got[name], expected)]
    return wrong


def broadcast(strategy):
    wrong = []
    for length in (3, 200_001):
        for turn in ("first", "second"):
            with strategy.scope():
                variable = mpistrat.Variable(np.arange(length) * 1.5 + RANK)
            if not np.array_equal(np.asarray(variable), np.arange(length) * 1.5):
                wrong.append(f"{turn} of {length}")
    return wrong


def bits():
    """Digests of what the reproducible reductions give."""
    found = {}
    for name in ("exact", "ordered"):
        options = mpistrat.experimental.CommunicationOptions(implementation=name)
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup(), communication_options=options)
        digest = hashlib.sha256()
        for dtype in (np.float32, np.float64, np.complex64):
            if name == "exact":  # the same examples on any number of ranks
                random = np.random.default_rng(3)
                whole, exponents = (random.integers(-(2**52), 2**52, (301, 14)), random.integers(-78, -38, (301, 14)))
                examples = np.ldexp(whole, exponents).astype(dtype)
                totals = [strategy.reduce(op, examples[RANK::SIZE], axis=0) for op in ("SUM", "MEAN")]
            else:
                random = np.random.default_rng([RANK, 5])
                value = np.ldexp(random.integers(-(2**52), 2**52, 40_001), random.integers(-78, -38, 40_001))
                totals = [strategy.reduce(op, value.astype(dtype), axis=None) for op in ("SUM", "MEAN")]
            for total in totals:
                digest.update(total.tobytes())
        found[name] = digest.hexdigest()[:16]
        strategy.comm.Free()
    return found


def mismatch(strategy):
    """What each rank is told if the last node has another shape, dtype, or another call altogether."""
    last = RANK in Topology.of(strategy.comm).nodes[-1]
    calls = {
        "shape": lambda: in_replica(strategy, "all_reduce", "SUM", np.ones(1000 + last)),
        "large": lambda: in_replica(strategy, "all_reduce", "SUM", np.ones(300_000 + last)),
        "dtype": lambda: in_replica(strategy, "all_reduce", "SUM", np.ones(5, "f4" if last else "i4")),
        "call": lambda: strategy.gather(np.ones(5), 0) if last else strategy.reduce("SUM", np.ones(5), axis=None),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
            told[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    told["afterwards"] = float(strategy.reduce("SUM", 1.0, axis=None))
    return told


# --- bytes on the wire -----------------------------------------------------------------------------------


def sent():
    """Bytes that this node has sent to others, but for headers of packets."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            nbytes, packets = map(int, numbers.split()[8:10])
            return nbytes - HEADER * packets
    raise RuntimeError("this node has no eth0")


def bytes_of(reduction, enough):
    """Bytes that this node sends for one reduction: the least of several, since a late packet is sent again.

    On a busy machine many are late: the ranks go on until so many bytes were enough on each node.
    """
    reduction()
    found = []
    while len(found) < MOST_REDUCTIONS:
        if len(found) >= REDUCTIONS and WORLD.allreduce(min(found) <= enough, MPI.LAND):
            break
        WORLD.Barrier()
        before = sent()
        WORLD.Barrier()
        reduction()
        WORLD.Barrier()
        after = sent()
        WORLD.Barrier()
        found.append(after - before)
    return min(found)


def all_reduction(strategy, value):
    return lambda: in_replica(strategy, "all_reduce", "SUM", value)


def traffic(strategy):
    """By kind and size of array: bytes that this node sends, as a multiple of that size."""
    found = {}
    nodes = len(Topology.of(strategy.comm).nodes)
    enough = MARGIN * 2 * (nodes - 1) / nodes
    for nbytes in COUNTED:
        array = np.ones(nbytes // 4, np.float32)
        buffer = strategy.experimental_buffers_like(array)
        for kind, value in (("array", array), ("buffer", buffer)):
            used = bytes_of(all_reduction(strategy, value), enough * nbytes)
            found[f"{kind} of {nbytes}"] = used / nbytes
    array, total = np.ones((2, 1 << 18), np.float32)
    many = [np.ones(25_000 + i, np.float32) for i in range(64)]
    nbytes = sum(each.nbytes for each in many)
    for kind, value in (("a list", many), ("buffers", strategy.experimental_buffers_like(many))):
        used = bytes_of(all_reduction(strategy, value), enough * nbytes)
        found[f"{kind} of {nbytes}"] = used / nbytes
    found[f"mpi of {array.nbytes}"] = bytes_of(lambda: WORLD.Allreduce(array, total), math.inf) / array.nbytes
    return found


def tree_traffic():
    """Bytes that this node sends for an all-reduce by the fixed tree, as a multiple of the array."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup(), virtual_replicas=SIZE)
    array = np.ones(COUNTED[0] // 4, np.float32)
    multiple = bytes_of(all_reduction(strategy, array), MARGIN * 2 * array.nbytes) / array.nbytes
    strategy.comm.Free()
    return multiple


def everything():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    topology = Topology.of(strategy.comm)
    say(
        {
            "host": os.uname().nodename,
            "nodes": topology.nodes,
            "node_rank": topology.node.rank,
            "rail": topology.rail.size,
            "all_reduce": all_reduce(strategy),
            "many_arrays": many_arrays(strategy),
            "gather": gather(strategy),
            "broadcast": broadcast(strategy),
            "bits": bits(),
            "traffic": traffic(strategy),
            "tree": tree_traffic(),
            "mismatch": mismatch(strategy),
        }
    )


# --- faults ------------------------------------------------------------------------------------------------


def reduce_for_ever():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    value = np.ones(100_000, np.float32)
    for step in range(1 << 30):
        in_replica(strategy, "all_reduce", "MEAN", value)
        if step == 3 and RANK == 0:
            print("in step", flush=True)
        yield step


def goes_on():
    for _ in reduce_for_ever():
        pass


def killed():
    for step in reduce_for_ever():
        if step == 10 and RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def raises():
    for step in reduce_for_ever():
        if step == 10 and RANK == SIZE - 1:
            raise ValueError("on purpose")


def late():
    """The last node is late: all others are told who did not come."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=10)
    late = RANK in Topology.of(strategy.comm).nodes[-1]
    told = ""
    WORLD.Barrier()
    if late:
        WORLD.Barrier()  # until the others have given up
    else:
        agreement._GRACE = 100.0  # rank 0 of a busy machine may take more than a second to answer, and be named
    try:
        in_replica(strategy, "all_reduce", "SUM", np.ones(1000), options)
    except (TimeoutError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    if not late:
        WORLD.Barrier()
    say(told)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
