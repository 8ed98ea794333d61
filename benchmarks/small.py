"""Compare `mpistrat bench small` with the same work in NumPy, h5py and mpi4py."""

import sys

from mpistrat.bench import small


def rivals(comm, work):
    """Return the calls by hand."""
    import numpy as np
    import small_by_hand as by_hand

    from mpistrat.bench.programs import digits

    def step(optimizer, gradients):
        parameters = optimizer(comm, [np.ones_like(gradient) for gradient in gradients])

        def times(k):
            for _ in range(k):
                parameters.apply(gradients)
            return parameters.views

        return times

    def loop(train, *data):
        network = digits.loss_and_gradients
        return lambda k: train(comm, network, digits.initial_weights(), *data, digits.BATCH, work.epochs)

    mean = by_hand.Mean(comm)

    def update_state(k):
        for _ in range(k):
            mean.update_state(work.values)

    def result(k):
        for _ in range(k):
            found = mean.result()
        return found

    def nothing():
        pass

    def run(k):
        for _ in range(k):
            nothing()

    calls = {
        "loop, data in memory": loop(by_hand.train, *digits.random_digits()),
        "loop, data in HDF5 files": loop(by_hand.train_on_files, work.folder),
        "Adam, 6 variables": step(by_hand.Adam, work.few),
        "Adam, 200 variables": step(by_hand.Adam, work.many),
        "SGD, 6 variables": step(by_hand.Sgd, work.few),
        "SGD, 200 variables": step(by_hand.Sgd, work.many),
        "reduce of one float": by_hand.reduce_one(comm, np.ones(1, np.float32)),
        "reduce of 64 KiB": by_hand.reduce_one(comm, work.array),
        "all_reduce of 60 arrays": by_hand.reduce_list(comm, work.arrays),
        "all_reduce of a number": by_hand.reduce_number(comm, 3),
        "run": run,
        "update_state": update_state,
        "result": result,
    }
    return {"by hand": calls}


if __name__ == "__main__":
    sys.exit(small.main(sys.argv[1:], [__file__], rivals))
