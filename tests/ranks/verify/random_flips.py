"""Bits flipped at random in a training on several ranks, and what is found of them.

``mpistrat run -n 3 -m tests.ranks.verify.random_flips 1000 7`` flips so many bits from a seed, and counts.
"""

import collections
import contextlib
import sys

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat import verify
from mpistrat.verify import checks

KINDS = ("weight", "slot", "result", "contribution")
SHAPES = ((20, 30), (30,), (7, 3, 2), ())
DTYPES = ("float32", "float64", "float16")


def flipped(array, rng):
    """Return a copy of which one bit is another."""
    array = np.array(array)
    data = array.reshape(-1).view(np.uint8)
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    return array


class Training:
    """A small training, whose gradients are drawn. ``algorithm`` reduces them."""

    def __init__(self, comm, algorithm="auto", dtype="float32"):
        options = mpistrat.experimental.CommunicationOptions(implementation=algorithm)
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options)
        self.topology = self.strategy.extended.engine.topology
        self.rng = np.random.default_rng(self.topology.rank)
        with self.strategy.scope():
            self.weights = [mpistrat.Variable(np.ones(shape, dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)]
            self.optimizer = mpistrat.optimizers.Adam(0.01)
        self.step()

    @property
    def variables(self):
        return [*self.weights, *self.optimizer.variables]

    def step(self):
        gradients = [self.rng.normal(size=w.shape).astype(w.dtype) for w in self.weights]
        self.strategy.run(lambda: self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True)))

    def state(self):
        return [np.array(variable.own_copy()) for variable in self.variables]

    def restore(self, state):
        for variable, value in zip(self.variables, state, strict=True):
            variable.own_copy()[...] = value

    def differs(self):
        """Whether copies differ in value, by another way: the arrays themselves."""
        of_ranks = self.strategy.comm.allgather(self.state())
        pairs = [pair for copies in of_ranks for pair in zip(of_ranks[0], copies, strict=True)]
        return not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@contextlib.contextmanager
def faulty_reduction(kind, is_faulty, rng, hits):
    """Change what goes into the next reduction of this rank, or what comes out of it. The samples are taken before."""
    run = checks.run_unchecked

    def faulty(reduction, values, timeout_seconds=None):
        if not is_faulty or hits:
            return run(reduction, values, timeout_seconds)
        hits.append(1)
        if kind == "contribution":
            values = list(values)
            i = rng.integers(len(values))
            values[i] = flipped(values[i], rng)
            return run(reduction, values, timeout_seconds)
        out = run(reduction, values, timeout_seconds)
        i = rng.integers(len(out))
        out[i][...] = flipped(out[i], rng)
        return out

    checks.run_unchecked = faulty
    try:
        yield
    finally:
        checks.run_unchecked = run


def flips(training, kinds, count, seed, counts, eager=False):
    """Flip ``count`` bits, and let the training find them: within some steps, or by the comparison before a save."""
    shared = np.random.default_rng(seed)  # the same on all ranks
    checks_of_ranks, size = training.topology.slot(checks.Checks), training.topology.size
    for _ in range(count):
        kind, rank = kinds[shared.integers(len(kinds))], int(shared.integers(size))
        is_faulty, rng = training.topology.rank == rank, np.random.default_rng(int(shared.integers(1 << 40)))
        before, hits, steps, error, when = training.state(), [], int(shared.integers(0, 20)), None, "steps"
        if eager:
            checks_of_ranks.left = 1 if kind == "contribution" else int(shared.integers(1, 4))
        # Not the number of steps: powers of a wrong one overflow, which ends the job at once.
        variables = training.weights if kind == "weight" else training.optimizer.variables[1:]
        number = int(shared.integers(len(variables)))
        if is_faulty and kind in ("weight", "slot"):
            copy = variables[number].own_copy()
            copy[...] = flipped(copy, rng)
        try:
            with faulty_reduction(kind, is_faulty and kind in ("result", "contribution"), rng, hits):
                for _ in range(max(1, steps) if kind in ("result", "contribution") else steps):
                    training.step()
            when = "save"
            verify.require_equal(training.topology)
        except mpistrat.CorruptionError as caught:
            error = caught
        if error is None:
            missed = training.differs()  # else the bit changed no value, or steps have evened it out
            counts[kind, "missed" if missed else "without effect on copies"] += 1
        else:
            counts[kind, f"found in {when}"] += 1
            if kind != "contribution":
                right = error.ranks == (rank,) or (size == 2 and error.ranks == (0, 1))
                counts[kind, "right rank" if right else "other ranks"] += 1
        errors = training.strategy.comm.allgather(None if error is None else (error.name, error.ranks, error.elements))
        assert errors == errors[:1] * size
        training.restore(before)


def main(count, seed):
    mpistrat.rc.verify = "copies,sums"
    np.seterr(all="ignore")
    counts = collections.Counter()
    for i, (dtype, algorithm) in enumerate(
        (dtype, algorithm) for dtype in DTYPES for algorithm in ("auto", "ordered", "tree", "exact", "mpi")
    ):
        comm = MPI.COMM_WORLD.Dup()
        share = (count + 14 - i) // 15
        for eager in (False, True):
            training = Training(comm, algorithm, dtype)
            flips(training, KINDS, share // 2 + eager * share % 2, [seed, i, eager], counts, eager)
    if MPI.COMM_WORLD.rank == 0:
        for (kind, what), number in sorted(counts.items()):
            print(f"{kind:13}{what:26}{number:6}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
