"""Tests of the memory of a node under threads, and with little memory."""

import errno
import os
import threading
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.data import AutoShardPolicy, Dataset, Options
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.memory import made_once
from mpistrat.memory.made_once import FilledOnce
from mpistrat.memory.node import NoSharedMemoryError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SIZES = (900, 501, 700, 33)
ROWS = sum(SIZES)


@pytest.fixture
def files(comm, tmp_path):
    if comm.rank == 0:
        first = 0
        for number, rows in enumerate(SIZES):
            with h5py.File(tmp_path / f"{number}.h5", "w") as f:
                f["y"] = np.arange(first, first + rows)
            first += rows
    comm.Barrier()
    return str(tmp_path / "*.h5")


def shuffled(files, policy="DATA"):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return Dataset.from_hdf5(files, "y").shuffle(seed=1).batch(60).with_options(options)


def rows_of(dataset):
    return [batch.tolist() for batch in dataset]


def test_threads_fill_two_memories_in_opposite_orders(comm):
    """With a lock for each, the system sees a deadlock: each process holds one and waits for the other."""
    memories = [FilledOnce(8, 1, comm) for _ in range(2)]
    if RANK % 2:
        memories.reverse()
    errors, holds, go_on = [], threading.Event(), threading.Event()

    def fill(memory):
        try:
            memory.fill(0, [(0, 8)], lambda: holds.set() or go_on.wait())
        except OSError as error:
            errors.append(error)

    first, second = (threading.Thread(target=fill, args=(memory,)) for memory in memories)
    first.start()
    holds.wait(0.2)
    comm.Barrier()
    second.start()
    second.join(0.1)  # it waits for the memory that the other rank fills
    go_on.set()
    first.join()
    second.join()
    assert not errors


@pytest.mark.skipif(SIZE == 1, reason="one rank shares nothing")
def test_half_of_the_free_shared_memory_is_left(comm, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=2, f_frsize=4096))
    assert len(FilledOnce(4096, 1, comm).memory) > 4096
    with pytest.raises(NoSharedMemoryError, match=r"cannot share 4097 bytes .* 8192 bytes are free there"):
        FilledOnce(4097, 1, comm)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096))
    assert len(FilledOnce(4097, 1, comm).memory) > 4097


@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_little_shared_memory_leaves_rows_in_memory_of_the_rank(comm, strategy, files, monkeypatch, policy):
    expected = rows_of(strategy.experimental_distribute_dataset(shuffled(files, policy)))
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=4096))
    made = strategy.experimental_distribute_dataset(shuffled(files, policy))
    assert rows_of(made) == expected
    monkeypatch.setattr(FileReader, "read_run", _fails)
    monkeypatch.setattr(FileReader, "read_rows", _fails)
    assert len(rows_of(made)) == len(expected)  # the second epoch reads no file


def _fails(*arguments):
    raise AssertionError("read again")


def test_a_process_without_memory_reads_windows(comm, strategy, files, monkeypatch, caplog):
    def none_left(size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    expected = rows_of(strategy.experimental_distribute_dataset(shuffled(files)))
    alone = rows_of(shuffled(files))
    monkeypatch.setattr(made_once, "new_memory", none_left)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=4096))
    assert rows_of(strategy.experimental_distribute_dataset(shuffled(files))) == expected
    assert "is not kept in memory, which makes reading slower: [Errno 12]" in caplog.text
    assert rows_of(shuffled(files)) == alone
