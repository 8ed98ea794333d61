"""What verifications cost: the same steps with and without them take turns in one job.

``mpistrat run -n 2 benchmarks/programs/verify_step.py 3`` makes three rounds: the network of the digits, and 102 MB of
gradients.
"""

import itertools
import sys
import time

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.verify import checks

LAYERS, BATCH = (64, 128, 64, 10), 64


def digits(strategy):
    """Return a step of a perceptron on images of 64 pixels."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, LAYERS[0])).astype("f"), rng.normal(size=(BATCH, LAYERS[-1])).astype("f")
    with strategy.scope():
        shapes = [*itertools.pairwise(LAYERS)]
        weights = [mpistrat.Variable(rng.normal(size=shape).astype("f") / 10) for shape in shapes]
        optimizer = mpistrat.optimizers.Adam(1e-4)

    def replica():
        values = [x]
        for w in weights[:-1]:
            values.append(np.maximum(values[-1] @ np.asarray(w), 0))
        error, gradients = (values[-1] @ np.asarray(weights[-1]) - y) / BATCH, []
        for value, w in zip(reversed(values), reversed(weights), strict=True):
            gradients.insert(0, value.T @ error)
            error = (error @ np.asarray(w).T) * (value > 0)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    return lambda: strategy.run(replica)


def large(strategy):
    """Return a step with 102 MB of gradients, without a computation of them."""
    gradients = [np.full(25_500_000 // 4, 1e-6, "f") for _ in range(4)]
    with strategy.scope():
        weights = [mpistrat.Variable(np.zeros_like(each)) for each in gradients]
        optimizer = mpistrat.optimizers.SGD(0.1)
    return lambda: strategy.run(lambda: optimizer.apply_gradients(zip(gradients, weights, strict=True)))


def timed(function, spent):
    def call(*args):
        start = time.perf_counter()
        function(*args)
        spent.append(time.perf_counter() - start)

    return call


def main(rounds):
    spent = []
    checks.Checks.verify = timed(checks.Checks.verify, spent)
    for make, steps, blocks in ((digits, 100, 20), (large, 3, 6)):
        ways, seconds, verifying = {}, {}, []
        for verify in ("off", "copies,sums"):
            mpistrat.rc.verify = verify
            strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup())
            ways[verify] = make(strategy)
            verifying.append(strategy.extended.engine.topology.slot(checks.Checks))
        for step in ways.values():
            for _ in range(steps):
                step()
        for round_ in range(rounds):
            spent.clear()
            for _ in range(blocks):
                for verify, step in ways.items():
                    MPI.COMM_WORLD.Barrier()
                    start = time.perf_counter()
                    for _ in range(steps):
                        step()
                    elapsed = time.perf_counter() - start
                    seconds.setdefault((round_, verify), []).append(elapsed / steps)
                    if verify == "off":  # the time of this way must not count as time that verifications may use
                        verifying[-1].ended += int(elapsed * 1e9)
            off, on = (np.array(seconds[round_, verify]) for verify in ways)
            if MPI.COMM_WORLD.rank == 0:
                ratios = f"least {on.min() / off.min():.4f}, median of pairs {np.median(on / off):.4f}, "
                ratios += f"in {len(spent)} verifications {sum(spent) / (on.sum() * steps):.4f}"
                print(f"{make.__name__}: {off.min() * 1e6:.0f} us a step; verified: {ratios}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
