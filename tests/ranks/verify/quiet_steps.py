"""Steps without a fault, of values and dtypes at random, in which nothing may be found.

``mpistrat run -n 3 -m tests.ranks.verify.quiet_steps 10000 7 4 1`` makes so many steps from a seed, with at most so
many between two verifications, and counts these. The last number is how often each is made: to draw one takes longer.
"""

import collections
import sys

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.verify import checks

SUM = mpistrat.VariableAggregation.SUM
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 5e-324, 1e-40, -1e-38, 1e38, 1e308, 6e4, 1.0, -1.0)
DTYPES = [*"bBhHiIlLqQefdgFD"]
OPS = ("SUM", "MEAN", "MAX", "MIN", "PROD")
ALGORITHMS = ("auto", "ordered", "tree", "exact", "mpi")


def values(rng, dtype, shape):
    """Return normal numbers, some of which are special."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    parts = []
    for _ in range(2 if dtype.kind == "c" else 1):
        part = np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-5, 6))
        part[rng.random(shape) < rng.choice([0, 0.1, 0.9])] = rng.choice(SPECIAL)
        parts.append(part)
    with np.errstate(all="ignore"):
        return (parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1]).astype(dtype)


class Program:
    """Variables of some dtypes, and reductions of arrays and buffers."""

    def __init__(self, comm, algorithm, seed, virtual=None):
        options = mpistrat.experimental.CommunicationOptions(implementation=algorithm)
        more = {} if virtual is None else {"virtual_replicas": virtual}
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options, **more)
        topology = self.strategy.extended.engine.topology
        self.checks, self.algorithm = topology.slot(checks.Checks), algorithm
        self.shared = np.random.default_rng(seed)  # the same on all ranks
        self.rng = np.random.default_rng([topology.rank, *seed])
        with self.strategy.scope():
            self.variables = [
                mpistrat.Variable(values(self.shared, dtype, shape), aggregation=SUM, trainable=False)
                for dtype, shape in zip(DTYPES, [(3, 5), (300,), ()] * 10, strict=False)
                if dtype != "g" or algorithm != "exact"
            ]
            self.weights = [mpistrat.Variable(np.ones(shape, "f")) for shape in [(40, 20), (20,)]]
            self.optimizer = mpistrat.optimizers.SGD(0.1, momentum=0.9)
        likes = [np.zeros(700, "f"), np.zeros(20, "d")]
        self.buffers = self.strategy.experimental_buffers_like(likes) if virtual is None else []

    def draw(self):
        """Return the kind of a step, and the step."""
        kinds = ["reduce", "apply", "list", "assign", "buffers"]
        kind = self.shared.choice(kinds if self.buffers else kinds[:3])
        dtype, op = self.shared.choice(DTYPES), self.shared.choice(OPS)
        shape = [(), (7,), (3, 4), (0,), (500,), (9000,)][self.shared.integers(6)]
        if kind == "apply":
            gradients = [values(self.rng, "f", w.shape) for w in self.weights]
            return kind, lambda: self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        if kind == "assign":
            variable = self.variables[self.shared.integers(len(self.variables))]
            value = values(self.rng, variable.dtype, variable.shape)
            return kind, lambda: variable.assign(value)
        if kind == "buffers":
            contents = [values(self.rng, buffer.dtype, buffer.shape) for buffer in self.buffers]
            return kind, lambda: self.reduce_buffers(contents)
        if dtype in "FD" and op in ("MAX", "MIN"):
            op = "SUM"
        if self.algorithm == "exact" and (dtype in "gG" or op == "PROD"):
            dtype, op = "d", "SUM"
        count = 1 if kind == "reduce" else int(self.shared.integers(1, 5))
        tree = [values(self.rng, dtype, shape) for _ in range(count)]
        return kind, lambda: mpistrat.get_replica_context().all_reduce(op, tree)

    def reduce_buffers(self, contents):
        for buffer, content in zip(self.buffers, contents, strict=True):
            buffer[...] = content
        mpistrat.get_replica_context().all_reduce("SUM", self.buffers)


def steps(program, count, counts, most=4, times=1):
    for _ in range(count // times):
        kind, step = program.draw()
        for _ in range(times):
            program.checks.left = min(program.checks.left, int(program.shared.integers(1, most + 1)))
            counts["verifications"] += program.checks.left <= 1
            counts[str(kind)] += 1
            program.strategy.run(step)


def main(count, seed, most=4, times=1):
    mpistrat.rc.verify = "copies,sums"
    np.seterr(all="ignore")
    counts = collections.Counter()
    layouts = [(algorithm, None) for algorithm in ALGORITHMS] + [("tree", 5), ("exact", 6)]
    for i, (algorithm, virtual) in enumerate(layouts):
        program = Program(MPI.COMM_WORLD.Dup(), algorithm, [seed, i], virtual)
        steps(program, (count + len(layouts) - 1 - i) // len(layouts), counts, most, times)
    if MPI.COMM_WORLD.rank == 0:
        print(dict(counts), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
