"""Tests of small rows that the ranks of a node read once, into memory that they share."""

import os
import threading

import h5py
import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, Options
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.memory import node as shared
from mpistrat.memory.made_once import FilledOnce
from mpistrat.memory.node import NoSharedMemoryError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SIZES = (4000, 3501, 2999, 500)
ROWS = sum(SIZES)


@pytest.fixture
def files(comm, tmp_path):
    if comm.rank == 0:
        first = 0
        for number, rows in enumerate(SIZES):
            numbers = np.arange(first, first + rows)
            with h5py.File(tmp_path / f"{number}.h5", "w") as f:
                f["x"], f["y"] = np.repeat(numbers.astype("f4")[:, None], 250, 1), numbers
            first += rows
    comm.Barrier()
    return str(tmp_path / "*.h5")


@pytest.fixture
def loaded(monkeypatch):
    """Return a list that gets the rows of every read of this rank."""
    found = []
    real = FileReader.read_run

    def spy(reader, path, record, first, out):
        found.append(len(out[0]))
        real(reader, path, record, first, out)

    monkeypatch.setattr(FileReader, "read_run", spy)
    return found


def distributed(strategy, files, policy="DATA", memory=1 << 30):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    options.shuffle_memory = memory
    dataset = Dataset.from_hdf5(files, ("x", "y")).shuffle(seed=1).batch(60).with_options(options)
    return strategy.experimental_distribute_dataset(dataset)


def numbers(batches):
    found = []
    for x, y in batches:
        assert (x == y[:, None]).all()
        found += y.tolist()
    return found


def all_of(comm, mine):
    return sorted(row for theirs in comm.allgather(mine) for row in theirs)


@pytest.mark.four_ranks
@pytest.mark.parametrize("layout", layouts("0000", "0011", "0101"))
@pytest.mark.parametrize("policy", ["DATA", "FILE", "OFF"])
def test_a_node_reads_its_files_once(comm, files, loaded, layout, policy):
    there = on_nodes(layout)
    try:
        made = distributed(mpistrat.MultiWorkerMirroredStrategy(comm=there), files, policy)
        for _ in range(2):
            times = SIZE if policy == "OFF" else 1
            assert all_of(comm, numbers(made)) == sorted(list(range(ROWS)) * times)
        nodes = 1 if policy == "FILE" else len({*layout})
        assert comm.allreduce(sum(loaded)) == ROWS * nodes
    finally:
        del made
        there.Free()


def test_a_rank_alone_reads_everything(comm, strategy, files, loaded):
    """The other ranks do not begin, or leave their loops early: no rank waits for them."""
    made = distributed(strategy, files)
    if RANK == 0:
        next(iter(made))
    comm.Barrier()
    assert comm.allreduce(sum(loaded)) == ROWS
    if RANK == SIZE - 1:
        next(iter(made))
    assert len(numbers(made)) >= ROWS // SIZE - 60
    comm.Barrier()
    assert comm.allreduce(sum(loaded)) == ROWS


def test_a_rank_that_cannot_read_stands_alone(comm, strategy, files, monkeypatch):
    made = distributed(strategy, files)
    if RANK == SIZE - 1:
        monkeypatch.setattr(FileReader, "read_run", _fails)
        monkeypatch.setattr(FileReader, "read_rows", _fails)
        with pytest.raises(DataFileError, match="no luck"):
            numbers(made)
        monkeypatch.undo()
    comm.Barrier()  # the other ranks would read the rows for it
    mine = numbers(made)
    if RANK == SIZE - 1:
        # Its second epoch: the rows of both epochs are complete by themselves.
        assert len(mine) in {len(range(RANK, ROWS, SIZE)) + i for i in range(-100, 100)}
    comm.Barrier()


def _fails(*arguments):
    raise DataFileError("no luck")


@pytest.mark.parametrize("fault", ["made", "filled"])
def test_too_little_shared_memory(comm, strategy, files, monkeypatch, fault, caplog):
    """Rows are then read by each rank: the same rows in the same order."""
    expected = [y.tolist() for _, y in distributed(strategy, files)]
    if SIZE > 1 and fault == "made":
        monkeypatch.setattr(shared, "FOLDER", "/nowhere")
    elif SIZE > 1:
        monkeypatch.setattr(FilledOnce, "fill", _full)
    made = distributed(strategy, files)
    assert [y.tolist() for _, y in made] == expected
    if SIZE > 1 and fault == "filled":
        assert "is not kept in memory" in caplog.text


def _full(*arguments):
    raise OSError("no space left on device")


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_windows_on_several_ranks(comm, strategy, files, memory):
    made = distributed(strategy, files, memory=memory)
    for _ in range(2):
        assert all_of(comm, numbers(made)) == list(range(ROWS))


# --- the memory itself --------------------------------------------------------------------


def test_pieces_are_filled_once_by_any_rank(comm):
    made = FilledOnce(10 * 1000, 10, comm)
    filled = []

    def load(piece):
        filled.append(piece)
        made.memory[1000 * piece : 1000 * (piece + 1)] = piece

    for k in range(10):
        piece = (k + RANK) % 10
        made.fill(piece, [(1000 * piece, 1000)], lambda piece=piece: load(piece))
    assert made.memory[:10_000].reshape(10, 1000).tolist() == [[piece] * 1000 for piece in range(10)]
    assert sorted(piece for theirs in comm.allgather(filled) for piece in theirs) == list(range(10))


def test_a_piece_whose_rank_failed_is_filled_by_the_next(comm):
    made = FilledOnce(100, 2, comm)

    def fail():
        raise ValueError("wrong")

    for turn in range(SIZE):
        if turn == RANK < SIZE - 1:
            with pytest.raises(ValueError, match="wrong"):
                made.fill(1, [(50, 50)], fail)
        elif turn == RANK:
            made.fill(1, [(50, 50)], lambda: made.memory[50:100].fill(7))
        comm.Barrier()
    made.fill(1, [(50, 50)], fail)
    assert set(made.memory[50:100].tolist()) == {7}


def test_a_rank_that_fills_keeps_the_others_waiting(comm):
    made = FilledOnce(100, 1, comm)
    go_on = threading.Event()

    def slow():
        go_on.wait(0.1)
        made.memory[:100] = 5

    comm.Barrier()
    made.fill(0, [(0, 100)], slow)
    assert set(made.memory[:100].tolist()) == {5}


@pytest.mark.skipif(SIZE == 1, reason="one rank shares nothing")
def test_one_rank_without_the_file(comm, monkeypatch):
    real = os.posix_fallocate

    def full(descriptor, *arguments):
        if RANK == SIZE - 1:
            raise OSError("no space")
        real(descriptor, *arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSharedMemoryError, match=f"cannot share 100 bytes in {shared.FOLDER}: no space"):
        FilledOnce(100, 1, comm)
