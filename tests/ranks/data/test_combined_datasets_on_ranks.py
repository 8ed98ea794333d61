"""Tests of combined datasets under several ranks: one order for any number of ranks, even steps, exact states."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def kinds(seed):
    a = Dataset.range(40).shuffle(seed=seed)
    b = Dataset.range(100, 123).map(lambda x: x + 1, num_parallel_calls=2)
    return {
        "zip": Dataset.zip(a, b).map(lambda x, y: 1000 * x + y),
        "mixture": Dataset.sample_from_datasets([a, b.concatenate(b)], [1, 2], seed=seed),
        "cache": a.enumerate().cache().map(lambda k, x: 1000 * k + x),
        "filter": a.filter(lambda x: x % 3 > 0).concatenate(b),
        "generator": Dataset.from_generator(lambda: iter(range(23))),
    }


def whole_batches(comm, batches):
    return [[x for part in step for x in part] for step in zip(*comm.allgather(batches), strict=True)]


@pytest.mark.parametrize("kind", kinds(1))
def test_batches_are_those_of_one_process(strategy, comm, kind):
    made = strategy.experimental_distribute_dataset(kinds(1)[kind].batch(5))
    alone = kinds(1)[kind].batch(5)
    for _ in range(2):
        mine = [batch.tolist() for batch in made]
        assert len(set(comm.allgather(len(mine)))) == 1
        assert whole_batches(comm, mine) == [batch.tolist() for batch in alone]


@pytest.mark.parametrize("kind", kinds(1))
def test_seeds_that_were_drawn_are_restored(strategy, comm, kind):
    made = strategy.experimental_distribute_dataset(kinds(None)[kind].batch(5))
    iterator = iter(made)
    begun = [batch.tolist() for batch in itertools.islice(iterator, 3)]
    state = iterator.state()
    rest = [x for batch in whole_batches(comm, [batch.tolist() for batch in iterator]) for x in batch]
    again = strategy.experimental_distribute_dataset(kinds(None)[kind].batch(4))
    again.restore(state)
    assert rest == [x for batch in whole_batches(comm, [batch.tolist() for batch in again]) for x in batch]
    assert len(begun) == 3


def test_padded_batches_of_vectors(strategy, comm):
    rows = Dataset.range(1, 12).map(lambda n: np.full(n, n)).padded_batch(4, padded_shapes=[12])
    mine = [batch.tolist() for batch in strategy.experimental_distribute_dataset(rows)]
    assert whole_batches(comm, mine) == [batch.tolist() for batch in rows]


def test_mixtures_that_differ_are_refused(strategy):
    if SIZE > 1:
        mixed = Dataset.sample_from_datasets([Dataset.range(9)] * 2, [1, 1 + RANK], seed=1).batch(2)
        with pytest.raises(ValueError, match="same dataset"):
            strategy.experimental_distribute_dataset(mixed)
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
