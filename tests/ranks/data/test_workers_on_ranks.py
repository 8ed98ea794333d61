"""``map(fn, workers=2)`` under several ranks: batches, states and errors are those of the pipeline without workers."""

import itertools

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, Dataset, Options
from tests.selection import core

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS = 30


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def noisy(dataset, workers):
    return dataset.map(lambda x, rng: (x, rng.random()), seed=3, workers=workers).map(
        lambda x, noise: np.stack([np.float64(x), noise]), num_parallel_calls=2, workers=workers
    )


DATASETS = {
    "shuffled": lambda workers: noisy(Dataset.range(ROWS).shuffle(seed=1), workers).batch(9),
    "stream": lambda workers: noisy(Dataset.from_iterable(lambda: iter(range(ROWS))), workers).batch(9).prefetch(0),
    "zip": lambda workers: Dataset.zip(noisy(Dataset.range(ROWS), workers), Dataset.range(ROWS)).batch(12),
    "padded": lambda workers: (
        Dataset.range(ROWS).map(lambda x: np.full(x % 4, x), workers=workers).padded_batch(8, [3])
    ),
    "few rows": lambda workers: noisy(Dataset.range(2), workers).batch(2),
}


def as_lists(batch):
    return [each.tolist() for each in batch] if isinstance(batch, tuple) else batch.tolist()


@pytest.mark.parametrize("name", core(DATASETS, "shuffled", "stream"))
def test_batches_and_states(strategy, name):
    found, expected = (strategy.experimental_distribute_dataset(DATASETS[name](workers)) for workers in (2, None))
    for _ in range(2):
        assert [*map(as_lists, found)] == [*map(as_lists, expected)]
    iterator = iter(found)
    begun = [*map(as_lists, itertools.islice(iterator, 1))]
    expected.restore(iterator.state())  # of workers, restored without
    rest = [*map(as_lists, expected)]
    assert [*map(as_lists, iterator)] == rest
    assert len(begun) == 1


@pytest.mark.full
def test_files(strategy, tmp_path):
    for number in range(4):
        if RANK == 0:
            with h5py.File(tmp_path / f"{number}.h5", "w") as file:
                file["x"] = np.arange(5 + number) + 100 * number
    strategy.barrier()
    for policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.FILE):
        options = Options()
        options.experimental_distribute.auto_shard_policy = policy
        found, expected = (
            strategy.experimental_distribute_dataset(
                noisy(Dataset.from_hdf5(str(tmp_path / "*.h5"), "x").shuffle(seed=2), workers)
                .batch(6)
                .with_options(options)
            )
            for workers in (2, None)
        )
        assert [*map(as_lists, found)] == [*map(as_lists, expected)]


def test_an_error_of_a_row_is_raised_on_its_rank(strategy, comm):
    def call(x):
        if x == 13:
            raise KeyError("thirteen")
        return x

    batches = iter(strategy.experimental_distribute_dataset(Dataset.range(ROWS).map(call, workers=2).batch(ROWS)))
    told = ""
    try:
        next(batches)
    except KeyError as error:
        told = str(error.__cause__)
    found = [text for text in comm.allgather(told) if text]
    assert len(found) == 1
    assert "row 13 of the source, epoch 0" in found[0]


def test_what_is_wrong_raises_on_every_rank_before_any_message(strategy, comm):
    with pytest.raises(ValueError, match="workers of map"):
        Dataset.range(4).map(abs, workers=0)
    with pytest.raises(TypeError, match="cannot be sent"):
        Dataset.range(4).map(lambda x: comm, workers="auto")
