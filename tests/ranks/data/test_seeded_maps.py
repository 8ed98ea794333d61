"""Generators of ``map(fn, seed=...)``: the same numbers on any number of ranks and threads, and after a resume."""

import functools
import random
import warnings

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.data import AutoShardPolicy, Dataset, Options

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SEED, ROWS = 7, 20


def oracle(row, epoch, seed=SEED):
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, row, 0, 0])).random()


def noisy(row, rng):
    return np.stack([np.float64(row), rng.random()])


def divided(strategy, dataset, policy=AutoShardPolicy.DATA):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def of_all(strategy, batches):
    mine = [tuple(row) for batch in batches for row in batch.tolist()]
    return sorted(row for rows in strategy.comm.allgather(mine) for row in rows)


def expected(epoch, rows=range(ROWS)):
    return sorted((float(row), oracle(row, epoch)) for row in rows)


DATASETS = {
    "range": lambda: Dataset.range(ROWS),
    "shuffled": lambda: Dataset.range(ROWS).shuffle(seed=3),
    "stream": lambda: Dataset.from_iterable(lambda: iter(range(ROWS))),
    "shuffled stream": lambda: Dataset.from_iterable(lambda: iter(range(ROWS))).shuffle(4, seed=3),
    "mapped before": lambda: Dataset.range(-1, ROWS - 1).map(lambda row: row + 1),
    "combined": lambda: Dataset.range(9).concatenate(Dataset.range(9, ROWS)),
}


@pytest.mark.parametrize("calls", [None, 3])
@pytest.mark.parametrize("name", DATASETS)
def test_the_numbers_of_each_epoch(strategy, name, calls):
    distributed = divided(strategy, DATASETS[name]().map(noisy, calls, seed=SEED).batch(6))
    for epoch in range(2):
        assert of_all(strategy, distributed) == expected(epoch)
    again = divided(strategy, DATASETS[name]().map(noisy, seed=SEED).batch(6))
    iterator = iter(again)
    begun = [next(iterator)]
    state = iterator.state()
    again.restore(state)
    assert of_all(strategy, [*begun, *again]) == expected(0)
    with pytest.raises(ValueError, match=r"pipeline is .*map\(seed=7\)"):
        divided(strategy, DATASETS[name]().map(noisy, seed=8).batch(6)).restore(state)


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.FILE])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_files(strategy, tmp_path, policy, shuffle):
    lengths = (3, 5, 4, 6, 2)
    if RANK == 0:
        for number, first in enumerate(np.cumsum((0, *lengths))[:-1]):
            with h5py.File(tmp_path / f"{number}.h5", "w") as file:
                file["x"] = np.arange(first, first + lengths[number])
    strategy.barrier()
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), "x")
    dataset = dataset.shuffle(seed=1) if shuffle else dataset
    distributed = divided(strategy, dataset.map(noisy, seed=SEED).batch(6), policy)
    for epoch in range(2):
        assert of_all(strategy, distributed) == expected(epoch)


def test_parts_pairs_and_repetitions(strategy):
    one = Dataset.range(ROWS).map(noisy, seed=SEED)
    zipped = Dataset.zip(one, Dataset.range(ROWS)).map(lambda a, b, rng: np.append(a, rng.random()), seed=1)
    found = of_all(strategy, divided(strategy, zipped.batch(7)))
    assert found == sorted((float(row), oracle(row, 0), oracle(row, 0, 1)) for row in range(ROWS))
    numbered = Dataset.range(5, 9).enumerate().map(lambda i, x, rng: np.array([i, x, rng.random()]), seed=2)
    found = of_all(strategy, divided(strategy, numbered.batch(3)))
    assert found == [(float(i), i + 5.0, oracle(i, 0, 2)) for i in range(4)]
    repeated = of_all(strategy, divided(strategy, Dataset.range(ROWS).map(noisy, seed=SEED).repeat(2).batch(7)))
    assert repeated == sorted(expected(0) + expected(1))
    cached = divided(strategy, one.cache().batch(6))
    assert of_all(strategy, cached) == of_all(strategy, cached) == expected(0)
    assert [*map(tuple, (row.tolist() for row in one))] == expected(0)


def test_seeds_that_are_refused(strategy):
    dataset = Dataset.range(4)
    for seed, error in ((-1, ValueError), (2**64, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="seed of map"):
            dataset.map(noisy, seed=seed)
    with pytest.raises(ValueError, match=r"before batch\(\)"):
        dataset.batch(2).map(noisy, seed=1)
    with pytest.raises(ValueError, match=r"another map\(\) has the seed 1"):
        dataset.map(noisy, seed=1).map(noisy, seed=1)
    if SIZE > 1:
        with pytest.raises(ValueError, match="must distribute the same dataset, but its pipeline"):
            divided(strategy, dataset.map(noisy, seed=RANK).batch(2))


RNG, PYTHON = np.random.default_rng(0), random.Random(0)


class Augment:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, row):
        return row + self.rng.random()

    method = __call__


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda row: row + RNG.random(), "RNG"),
        (lambda row, own=PYTHON: row + own.random(), "own"),
        (Augment(np.random.RandomState(0)), "rng"),
        (Augment(RNG).method, "rng"),
        (functools.partial(lambda rng, row: row + rng.random(), RNG), "0"),
        (lambda row: row + np.random.default_rng((7, int(row))).random(), None),
        (np.square, None),
    ],
)
def test_generators_of_the_program_are_warned_of(strategy, fn, name):
    dataset = Dataset.range(6).map(fn).cache().batch(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        divided(strategy, dataset)
    expected = name is not None and SIZE > 1 and RANK == 0
    assert [f"random generator {name!r}" in str(each.message) for each in told] == [True] * expected
