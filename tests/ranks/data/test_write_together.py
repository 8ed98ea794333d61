"""Tests of HDF5 files that all ranks write together: each its rows, in the order of the ranks."""

import os

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset, DatasetMismatchError, write_hdf5

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
UNEVEN = [5, 0, 3, 1200]
STORED = [{}, {"chunk": 7, "compress": "gzip"}]


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def rows_of(rank, count):
    numbers = np.arange(count) + 10_000 * rank
    return {"x": np.repeat(numbers[:, None], 3, 1).astype("f4"), "group/label": numbers, "flag": numbers % 2 == 0}


def expected(counts):
    everyone = [rows_of(rank, count) for rank, count in enumerate(counts[:SIZE])]
    return {name: np.concatenate([each[name] for each in everyone]) for name in everyone[0]}


def stored(path):
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]} if hasattr(item, "shape") else {}))
    return found


def assert_same(found, want):
    assert sorted(found) == sorted(want)
    for name in want:
        np.testing.assert_array_equal(found[name], want[name], strict=True)


@pytest.mark.parametrize("how", STORED, ids=str)
@pytest.mark.parametrize("counts", [UNEVEN, [0] * (SIZE - 1) + [2]], ids=str)
def test_each_rank_writes_its_rows(strategy, tmp_path, counts, how):
    path = tmp_path / "f.h5"
    write_hdf5(path, rows_of(RANK, counts[RANK]), strategy=strategy, **how)
    want = expected(counts)
    assert_same(stored(path), want)
    assert os.listdir(tmp_path) == ["f.h5"]
    (batch,) = Dataset.from_hdf5(path, "x").batch(len(want["x"]))
    assert (batch == want["x"]).all()
    strategy.barrier()


def test_rows_larger_than_a_block(strategy, tmp_path):
    mine = np.arange(300_000 + RANK, dtype="f8").reshape(-1, 1) + RANK
    mine = np.repeat(mine, 5, 1)
    for how in ({}, {"chunk": 50_000}):
        write_hdf5(tmp_path / "f.h5", mine, strategy=strategy, overwrite=True, **how)
        start = sum(300_000 + rank for rank in range(RANK))
        with h5py.File(tmp_path / "f.h5") as file:
            assert (file["x"][start : start + len(mine)] == mine).all()
        strategy.barrier()


def test_rows_of_no_bytes(strategy, tmp_path):
    write_hdf5(tmp_path / "f.h5", {"x": np.zeros((2, 0)), "y": np.ones(2, ">i2")}, strategy=strategy)
    assert_same(stored(tmp_path / "f.h5"), {"x": np.zeros((2 * SIZE, 0)), "y": np.ones(2 * SIZE, ">i2")})


def test_strings_and_datasets(strategy, tmp_path):
    write_hdf5(tmp_path / "s.h5", {"name": [f"rank {RANK}"] * RANK + ["one"]}, strategy=strategy)
    want = [text for rank in range(SIZE) for text in [f"rank {rank}"] * rank + ["one"]]
    assert [text.decode() for text in stored(tmp_path / "s.h5")["name"]] == want
    mine = Dataset.range(10).shard(SIZE, RANK).map(lambda x: {"y": x * 2})
    write_hdf5(tmp_path / "d.h5", mine, strategy=strategy)
    assert stored(tmp_path / "d.h5")["y"].tolist() == [2 * x for r in range(SIZE) for x in range(r, 10, SIZE)]


def test_a_rank_without_rows_may_have_another_dtype(strategy, tmp_path):
    mine = {"x": np.full((2, 3), RANK, "i4")} if RANK == 0 else {"x": []}
    write_hdf5(tmp_path / "f.h5", mine, strategy=strategy)  # rows of other ranks have 12 bytes
    assert_same(stored(tmp_path / "f.h5"), {"x": np.zeros((2, 3), "i4")})


class Unreadable:
    """Rows that cannot be read from the third on."""

    shape, dtype = (4_000_000, 1), np.dtype("f8")

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, where):
        if where.start > 2:
            raise OSError("the disk has gone")
        return np.zeros((where.stop - where.start, 1))


@pytest.mark.parametrize("how", [{}, {"chunk": 1_000_000}], ids=str)
def test_a_rank_that_fails_fails_on_all(strategy, tmp_path, how):
    last = SIZE - 1
    rows = Unreadable() if last == RANK else np.zeros((3, 1))
    with pytest.raises(OSError, match="the disk has gone" if last == RANK else f"rank {last}: the disk has gone"):
        write_hdf5(tmp_path / "f.h5", rows, strategy=strategy, **how)
    strategy.barrier()
    assert os.listdir(tmp_path) == []
    write_hdf5(tmp_path / "f.h5", np.zeros((3, 1)), strategy=strategy)  # the ranks are still in step


def test_arguments_of_one_rank_that_are_wrong(strategy, tmp_path):
    last = SIZE - 1
    wrong = [
        (ValueError, {"chunk": 0}, np.zeros(2)),
        (TypeError, {}, {1: np.zeros(2)}),
        (ValueError, {}, Dataset.range(3).batch(2)),
    ]
    if SIZE > 1:
        wrong += [
            (DatasetMismatchError, {}, np.zeros(2, "f4")),
            (DatasetMismatchError, {}, np.zeros((2, 1))),
            (DatasetMismatchError, {}, {"y": np.zeros(2)}),
            (ValueError, {"chunk": 2}, np.zeros(2)),
        ]
    for kind, options, rows in wrong:
        mine, how = (rows, options) if last == RANK else (np.zeros(2), {})
        with pytest.raises(kind, match=f"rank {last}" if last != RANK else None):
            write_hdf5(tmp_path / "f.h5", mine, strategy=strategy, **how)
    strategy.barrier()
    assert os.listdir(tmp_path) == []


def test_files_that_are_refused(strategy, tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        write_hdf5(tmp_path / "f.h5", np.zeros(0), strategy=strategy)
    with pytest.raises(ValueError, match="one file"):
        write_hdf5([tmp_path / "a.h5", tmp_path / "b.h5"], np.zeros(2), strategy=strategy)
    write_hdf5(tmp_path / "f.h5", np.zeros(1), strategy=strategy)
    with pytest.raises(FileExistsError):
        write_hdf5(tmp_path / "f.h5", np.ones(1), strategy=strategy)
    strategy.barrier()
    write_hdf5(tmp_path / "f.h5", np.ones(1), strategy=strategy, overwrite=True)
    assert stored(tmp_path / "f.h5")["x"].tolist() == [1] * SIZE
    if SIZE > 1:
        with pytest.raises(FileExistsError, match="strategy=strategy"):
            write_hdf5(tmp_path / "f.h5", np.ones(1))
