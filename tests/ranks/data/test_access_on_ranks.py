"""Elements taken by number under several ranks: one order for any number of ranks, exact states, errors on all."""

import glob
import itertools
import os

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import DataFileError, Dataset

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture
def files(comm, tmp_path):
    folder = comm.bcast(str(tmp_path))
    if RANK == 0:
        for name, rows in ("a", 17), ("b", 9), ("c", 30):
            with h5py.File(f"{folder}/{name}.h5", "w") as file:
                file["x"], file["key"] = np.arange(rows) + 100 * ord(name), np.arange(rows) // 4
    comm.barrier()
    return f"{folder}/*.h5"


def kinds(files):
    lengths = Dataset.range(1, 30)
    rows = Dataset.from_hdf5(files, {"x": "x", "key": "key"})
    train, test = rows.split([0.6, 0.4], seed=2, by="key")
    return {
        "select": rows.select(range(50, 3, -2)),
        "slice": rows[-20:5:-1].shuffle(seed=1),
        "split": train.shuffle(seed=1),
        "split in order": test,
        "folds": Dataset.range(40).k_folds(3, seed=4)[1][0].shuffle(seed=2, mode="exact"),
        "filter": rows.filter(lambda key: key % 3 != 1, by="key").shuffle(seed=1),
        "filter in order": Dataset.range(40).filter(lambda x: x % 7 > 2, by=lambda x: x),
        "balance": rows.sample(by="key", seed=3).repeat(2),
        "sample": rows.sample("key", seed=3).repeat(2),
        "sample once": Dataset.range(30).sample(np.arange(30.0), replacement=False, seed=3),
        "windows": rows.window(4, 2, drop_remainder=True, across_files=False).shuffle(seed=5),
        "windows in order": rows.window(4, 3, 2, drop_remainder=True),
        "windows of a stream": lengths.window(3, 2, drop_remainder=True),
        "unbatch": lengths.batch(4).map(lambda x: x + 1).unbatch(),
        "flat_map": lengths.shuffle(seed=1).flat_map(lambda n: Dataset.range(n % 4).shuffle(seed=2)),
        "interleave": lengths.interleave(lambda n: Dataset.range(n, n + n % 5).shuffle(seed=2), 3, 2),
        "scan": lengths.scan(0, lambda total, n: (total + n, total)).take_while(lambda x: x < 300),
        "pack": lengths.map(lambda n: np.full(n, n)).pack(7),
        "buckets": lengths.map(lambda n: np.full(n, n)).bucket_by_length(len, [10, 20], [6, 5, 4], [40]),
    }


def flat(batch):
    return np.asarray(batch["x"] if isinstance(batch, dict) else batch).tolist()


def whole_batches(comm, batches):
    return [[x for part in step for x in part] for step in zip(*comm.allgather([*map(flat, batches)]), strict=True)]


KINDS = [
    "filter",
    "filter in order",
    "balance",
    "select",
    "slice",
    "split",
    "split in order",
    "folds",
    "sample",
    "sample once",
    "windows",
    "windows in order",
]
KINDS += ["windows of a stream", "unbatch", "flat_map", "interleave", "scan", "pack", "buckets"]


def batched(dataset, size):
    return dataset if dataset.batch_size else dataset.batch(size)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_one_process(strategy, comm, files, kind):
    made = strategy.experimental_distribute_dataset(batched(kinds(files)[kind], 5))
    alone = batched(kinds(files)[kind], 5)
    lanes = "lanes=" in repr(made).replace("no lanes=", "")
    for _ in range(2):
        found, expected = whole_batches(comm, made), [*map(flat, alone)]
        if not lanes:
            assert found == expected
        else:
            assert [*map(len, found)] == [*map(len, expected)]
            assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*expected))
    iterator = iter(made)
    _ = [next(iterator) for _ in range(2)]
    state = iterator.state()
    rest = [x for batch in whole_batches(comm, iterator) for x in batch]
    again = strategy.experimental_distribute_dataset(batched(kinds(files)[kind], 5 if lanes else 4))
    again.restore(state)
    assert rest == [x for batch in whole_batches(comm, again) for x in batch]


def test_a_damaged_file_is_named_on_all_ranks(strategy, comm, files):
    """By the attribute too, so that a program can leave it out, wherever it was found."""
    paths = sorted(glob.glob(files))
    for path in paths[:2]:
        if RANK == 0:
            os.truncate(path, 1000)
    comm.barrier()
    for _ in range(2):
        with pytest.raises(DataFileError, match="truncated") as caught:
            strategy.experimental_distribute_dataset(Dataset.from_hdf5(paths, "x").batch(3))
        paths.remove(caught.value.path)
    assert len({*comm.allgather(tuple(paths))}) == 1
    batches = strategy.experimental_distribute_dataset(Dataset.from_hdf5(paths, "x").batch(3))
    assert comm.allreduce(sum(map(len, batches))) == 30


def test_keys_that_one_rank_cannot_read_raise_on_all(strategy):
    def key(row):
        if row >= 20 - 20 // SIZE:  # of the last rank
            raise RuntimeError("no key")
        return row

    part, _ = Dataset.range(20).split(0.5, seed=1, by=key)
    with pytest.raises(RuntimeError, match="no key"):
        strategy.experimental_distribute_dataset(part.batch(4))
    assert strategy.reduce("SUM", 1, axis=None) == SIZE


def test_each_rank_reads_the_keys_of_its_share(strategy, comm):
    seen = []

    def key(row):
        seen.append(int(row))
        return row % 7

    part, _ = Dataset.range(40).split(0.5, seed=1, by=key)
    made = strategy.experimental_distribute_dataset(part.batch(4))
    assert len(seen) <= -(-40 // SIZE)
    assert sorted(x for each in comm.allgather(seen) for x in each) == [*range(40)]
    found = sorted(x for batch in whole_batches(comm, made) for x in batch)
    assert found == sorted(int(x) for x in Dataset.range(40).split(0.5, seed=1, by=lambda row: row % 7)[0])


def test_drawn_seeds_are_those_of_rank_0_and_choices_that_differ_are_refused(strategy, comm):
    made = strategy.experimental_distribute_dataset(Dataset.range(40).sample(np.ones(40)).batch(8))
    assert len({*comm.allgather(made.state()["seeds"][0])}) == 1
    if SIZE > 1:
        for wrong in (Dataset.range(9).select([RANK]), Dataset.range(9).sample([1 + RANK] * 9, seed=1)):
            with pytest.raises(ValueError, match="same dataset"):
                strategy.experimental_distribute_dataset(wrong.batch(2))
    with pytest.raises(IndexError, match="index 9"):
        strategy.experimental_distribute_dataset(Dataset.range(9).select([9]).batch(2))
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
