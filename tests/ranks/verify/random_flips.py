"""Bits flipped at random in a training on several ranks, and what is found of them.

``mpistrat run -n 3 -m tests.ranks.verify.random_flips 1000 7`` flips so many bits from a seed, and counts.
"""

import collections
import contextlib
import math
import sys

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat import verify
from mpistrat.verify import checks

KINDS = ("weight", "slot", "result", "contribution", "shared memory")
IN_SUM = ("contribution", "shared memory")  # all ranks get the same wrong sum
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
        self.has_equal_bits = algorithm in ("ordered", "tree", "exact")  # however the sum is computed
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
        return not all(are_same(copies, of_ranks[0]) for copies in of_ranks)


@contextlib.contextmanager
def before_barriers(memory, change):
    """Call a function whenever this rank may have written to its slot, and the others have not read it."""
    barrier = memory._barrier

    def changed_before():
        change()
        barrier()

    memory._barrier = changed_before
    try:
        yield
    finally:
        memory._barrier = barrier


@contextlib.contextmanager
def faulty_reduction(kind, is_faulty, rng, hits, sums=None, topology=None):
    """Change what goes into the next reduction of this rank, or what comes out of it. The samples are taken before.

    ``sums``, a list on all ranks, gets the sum, and the sum without the fault.
    """
    run = checks.run_unchecked

    def flip_in_slot(values):  # only one of its slots is read: barriers that begin a collective have no values
        generation = (
            topology.memory.generation ^ 1
        )  # the barrier has begun, and ranks write to the other slots after it
        slot, _ = topology.memory.slots(np.dtype(np.uint8), sum(value.nbytes for value in values), generation)
        slot[rng.integers(len(slot))] ^= 1 << rng.integers(8)

    def once(reduction, values, timeout_seconds):
        if not is_faulty:
            return run(reduction, values, timeout_seconds)
        if kind == "contribution":
            i = rng.integers(len(values))
            values[i][...] = flipped(values[i], rng)  # in place: sums may be computed where the values lie
            return run(reduction, values, timeout_seconds)
        if kind == "shared memory":
            with before_barriers(topology.memory, lambda: flip_in_slot(values)):
                return run(reduction, values, timeout_seconds)
        out = run(reduction, values, timeout_seconds)
        i = rng.integers(len(out))
        out[i][...] = flipped(out[i], rng)
        return out

    def faulty(reduction, values, timeout_seconds=None):
        if hits:
            return run(reduction, values, timeout_seconds)
        hits.append(1)
        if sums is None:
            return once(reduction, values, timeout_seconds)
        given = [np.array(value) for value in values]
        right = [np.array(total) for total in run(reduction, values, timeout_seconds)]
        for value, copy in zip(values, given, strict=True):
            value[...] = copy
        out = once(reduction, values, timeout_seconds)
        sums.extend(([np.array(total) for total in out], right))
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
        sums = [] if kind in IN_SUM else None
        if eager:
            checks_of_ranks.left = 1 if kind in IN_SUM else int(shared.integers(1, 4))
        # Not the number of steps: powers of a wrong one overflow, which ends the job at once.
        variables = training.weights if kind == "weight" else training.optimizer.variables[1:]
        number = int(shared.integers(len(variables)))
        if is_faulty and kind in ("weight", "slot"):
            copy = variables[number].own_copy()
            copy[...] = flipped(copy, rng)
        try:
            in_step = kind == "result" or kind in IN_SUM
            with faulty_reduction(kind, is_faulty and in_step, rng, hits, sums, training.topology):
                for _ in range(max(1, steps) if in_step else steps):
                    training.step()
            when = "save"
            verify.require_equal(training.topology)
        except mpistrat.CorruptionError as caught:
            error = caught
        of_ranks = training.strategy.comm.allgather(sums)
        if kind in IN_SUM and all(are_same(of_rank[0], of_ranks[0][0]) for of_rank in of_ranks):
            count_wrong_sum(training, not are_same(*sums), error, counts, eager)
        elif error is None:
            missed = training.differs()  # else the bit changed no value, or steps have evened it out
            counts[kind, "missed" if missed else "without effect on copies"] += 1
        else:
            counts[kind, f"found in {when}"] += 1
            right = error.ranks == (rank,) or (size == 2 and error.ranks == (0, 1))
            counts[kind, "right rank" if right else "other ranks"] += 1
        errors = training.strategy.comm.allgather(None if error is None else (error.name, error.ranks, error.elements))
        assert errors == errors[:1] * size
        training.restore(before)


def are_same(arrays, others):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(arrays, others, strict=True))


def count_wrong_sum(training, is_wrong, error, counts, eager):
    """Count a sum that all ranks have alike, by whether its bits can be computed again.

    A sample has a known share of the elements of eager ones.
    """
    bits = "sum, equal bits" if training.has_equal_bits else "sum, rounded"
    if not is_wrong:
        counts[bits, "right all the same"] += 1
        assert error is None
    elif eager:
        counts[bits, "wrong and sampled"] += 1
        counts[bits, "found"] += error is not None
        total = sum(math.prod(shape) for shape in SHAPES)
        counts[bits, "expected to be found"] += 256 / total
    else:
        counts[bits, "wrong, seldom sampled"] += 1
        counts[bits, "of these found"] += error is not None


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
            print(f"{kind:16}{what:26}{number:8.4g}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
