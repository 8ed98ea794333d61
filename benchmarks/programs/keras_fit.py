"""Time steps of Keras' `Model.fit` under a strategy: 670,000 parameters, batches of 256 rows.

    KERAS_BACKEND=jax python benchmarks/programs/keras_fit.py  one rank, against plain Keras
    KERAS_BACKEND=torch mpistrat run -n 2 benchmarks/programs/keras_fit.py  against DDP with Gloo, in the same processes

The two programs take turns. Each line has the median of a step in milliseconds, and the ratio of the medians. Set
OMP_NUM_THREADS=1, so that ranks do not share cores.
"""

import os
import statistics
import tempfile
import time

import keras
import numpy as np

import mpistrat
import mpistrat.integrations.keras  # trains over ranks

ROWS, FEATURES, WIDTH, STEPS, TURNS = 256, 256, 664, 20, 15


def made():
    """Return a network of 670,000 parameters."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(WIDTH, activation="relu")])
    model.add(keras.layers.Dense(WIDTH, activation="relu"))
    model.add(keras.layers.Dense(WIDTH // 8, activation="relu"))
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def fitting(x, y):
    """Return a function that makes the steps of an epoch by `fit`."""
    model = made()
    return lambda: model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)


def by_ddp(x, y, comm):
    """Return a function that makes the same steps of the same network of Keras in a loop of PyTorch's DDP."""
    import torch
    import torch.distributed as dist

    file = comm.bcast(os.path.join(tempfile.mkdtemp(), "store"))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=comm.rank, world_size=comm.size)
    model = made()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    loss_of = torch.nn.CrossEntropyLoss()
    own = ROWS // comm.size
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    def steps():
        for start in range(own * comm.rank, len(x), ROWS):
            optimizer.zero_grad()
            loss_of(parallel(x[start : start + own]), y[start : start + own]).backward()
            optimizer.step()

    return steps


def main():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * STEPS, FEATURES)).astype(np.float32)
    y = random.integers(0, 10, size=ROWS * STEPS)
    other = by_ddp(x, y, strategy.comm) if strategy.num_replicas_in_sync > 1 else fitting(x, y)
    with strategy.scope():
        programs = {"fit in a scope": fitting(x, y)}
    programs["DDP with Gloo" if strategy.num_replicas_in_sync > 1 else "plain fit"] = other
    times = {name: [] for name in programs}
    for turn in range(TURNS):
        for name, program in list(programs.items())[:: 1 if turn % 2 else -1]:
            strategy.barrier()
            start = time.perf_counter()
            program()
            if turn > 1:  # the first turns compile
                times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    if strategy.is_chief:
        medians = [statistics.median(each) for each in times.values()]
        for name, median in zip(times, medians, strict=True):
            print(f"{keras.backend.backend()} {strategy.num_replicas_in_sync} ranks  {name:14}  {median:6.2f} ms")
        print(f"ratio {medians[0] / medians[1]:.3f}")


if __name__ == "__main__":
    main()
