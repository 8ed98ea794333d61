import numpy as np

from mpistrat.coordinator import Executor


def simulate(seed):
    return np.random.default_rng(seed).standard_normal(10_000).cumsum().max()


with Executor() as executor:
    if executor is not None:  # rank 0 hands out the tasks, the others run them
        print(max(executor.map(simulate, range(500))))
