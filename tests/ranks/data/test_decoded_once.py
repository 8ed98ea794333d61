"""Tests that the ranks of a node decode each chunk once together, and that no rank depends on another one."""

import threading
import time

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, Options
from mpistrat.data.formats.parquet import Parquet
from mpistrat.data.formats.zarr import Zarr
from mpistrat.data.hdf5 import chunks
from mpistrat.data.hdf5.reader import _OpenColumn
from mpistrat.data.rows.lanes import piece
from mpistrat.memory import made_once
from mpistrat.memory import node as shared
from tests.selection import core

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
CHUNK, CHUNKS, WIDE = 512, 41, 32  # rows of 128 bytes, chunks of 64 KiB, the last one short
ROWS = CHUNK * (CHUNKS - 1) + 100
BATCH = 200


def x_of(rows):
    return (np.asarray(rows)[:, None] + np.arange(WIDE) / 64).astype("f4")


def write_hdf5(path, x, compression="gzip"):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(CHUNK, WIDE), compression=compression)


def write_parquet(path, x):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.FixedSizeListArray.from_arrays(arrow.array(x.ravel()), WIDE)
    parquet.write_table(arrow.table({"x": rows}), path, row_group_size=CHUNK)


def write_zarr(path, x):
    made = pytest.importorskip("zarr").open(path, mode="w", shape=x.shape, chunks=(CHUNK, WIDE), dtype="f4")
    made[:] = x


FORMATS = {
    "gzip": (write_hdf5, lambda path: Dataset.from_hdf5(path, "x"), chunks, "decode"),
    "lzf": (
        lambda path, x: write_hdf5(path, x, "lzf"),
        lambda path: Dataset.from_hdf5(path, "x"),
        _OpenColumn,
        "_read_run",
    ),
    "parquet": (write_parquet, lambda path: Dataset.from_parquet(path, "x"), Parquet, "block"),
    "zarr": (write_zarr, Dataset.from_zarr, Zarr, "block"),
}


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture
def decoded(monkeypatch):
    """Return a function that counts the calls of a decoder, and calls another function before each."""

    def count(owner, name, before=lambda: None):
        real, calls = getattr(owner, name), []

        def decode(*args, **kwargs):
            calls.append(1)
            before()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, decode)
        return calls

    return count


@pytest.fixture
def path(comm, tmp_path, request):
    form = getattr(request, "param", "gzip")
    if comm.rank == 0:
        FORMATS[form][0](tmp_path / "x", x_of(np.arange(ROWS)))
    comm.Barrier()
    return tmp_path / "x"


def dataset_of(path, form="gzip", memory=None, prefetch=0, policy="DATA"):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    dataset = FORMATS[form][1](path)
    if memory:
        options.shuffle_memory = memory
        dataset = dataset.shuffle(seed=3)
    return dataset.batch(BATCH).prefetch(prefetch).with_options(options)


def pieces(*args, **kwargs):
    """What this rank must get of `dataset_of`, by a read of this process alone."""
    batches = [*dataset_of(*args, **kwargs)]
    return [batch[slice(*piece(len(batch), SIZE, RANK))] for batch in batches]


def equal(found, wanted):
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("memory", core([None, 2 << 20], 2 << 20), ids=["in order", "shuffled"])
@pytest.mark.parametrize(("path", "form"), [(form, form) for form in FORMATS], indirect=["path"], ids=[*FORMATS])
def test_the_node_decodes_each_chunk_once(comm, strategy, decoded, path, form, memory):
    dataset = dataset_of(path, form, memory)
    wanted = pieces(path, form, memory)
    distributed = strategy.experimental_distribute_dataset(dataset)
    calls = decoded(*FORMATS[form][2:])
    found = []
    for batch in distributed:
        found.append(batch)
        comm.Barrier()  # as a training step does
    assert equal(found, wanted)
    assert comm.allreduce(len(calls)) == CHUNKS


@pytest.mark.parametrize("memory", [None, 2 << 20], ids=["in order", "shuffled"])
def test_ranks_at_different_places(comm, strategy, path, memory):
    """They read ahead, two iterators each, and one rank is slower: rows stay right."""
    dataset = dataset_of(path, memory=memory, prefetch=4)
    wanted = pieces(path, memory=memory)
    distributed = strategy.experimental_distribute_dataset(dataset)
    other = strategy.experimental_distribute_dataset(dataset)
    first, found = [], []
    iterator = iter(other)
    for number, batch in enumerate(distributed):
        found.append(batch)
        if RANK == SIZE - 1 and number % 10 == 0:
            time.sleep(0.01)
        if number % 2:
            first.append(next(iterator))
    second = [*iterator]
    assert equal(found, wanted)
    assert equal(first + second, wanted)
    comm.Barrier()


@pytest.mark.skipif(SIZE == 1, reason="needs another rank")
def test_no_rank_waits_for_a_rank_that_is_stuck(comm, monkeypatch, strategy, decoded, path):
    monkeypatch.setattr(made_once, "_STALLED_S", 0.1)
    dataset = dataset_of(path)
    wanted = pieces(path)
    go_on = threading.Event()
    calls = decoded(chunks, "decode", go_on.wait if RANK == 0 else lambda: None)
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = []
    reading = threading.Thread(target=lambda: found.extend(distributed), daemon=True)
    if RANK == 0:
        reading.start()
        while not calls:  # it has begun to make a chunk that all others need
            time.sleep(0.001)
    comm.Barrier()
    if RANK:
        reading.start()
        reading.join(60)
        assert equal(found, wanted)
    comm.Barrier()
    go_on.set()
    reading.join(60)
    assert equal(found, wanted)
    comm.Barrier()


@pytest.mark.skipif(SIZE == 1, reason="needs another rank")
def test_each_rank_raises_for_a_damaged_chunk(comm, strategy, path):
    if RANK == 0:
        with h5py.File(path, "r") as file:
            place = file["x"].id.get_chunk_info(5).byte_offset
        with open(path, "r+b") as file:
            file.seek(place + 10)
            file.write(b"\xff" * 40)
    comm.Barrier()
    distributed = strategy.experimental_distribute_dataset(dataset_of(path))
    with pytest.raises(DataFileError, match="cannot be read"):
        list(distributed)
    comm.Barrier()


@pytest.mark.skipif(SIZE == 1, reason="needs another rank")
def test_without_shared_memory_each_rank_decodes(comm, monkeypatch, caplog, strategy, decoded, path):
    def refused(*_):
        raise OSError("no memory")

    wanted = pieces(path)
    monkeypatch.setattr(shared, "_check_free", refused)
    distributed = strategy.experimental_distribute_dataset(dataset_of(path))
    calls = decoded(chunks, "decode")
    assert equal([*distributed], wanted)
    assert len(calls) >= CHUNKS - 1  # without the last one, if this rank has no row of it
    assert ("each rank decodes what it needs" in caplog.text) == (RANK == 0)
    comm.Barrier()


def test_a_file_that_is_written_again_with_the_same_layout(comm, strategy, path):
    """The chunks of before are not taken for those of now."""
    values = x_of(np.arange(ROWS))
    for now in values, values[::-1]:
        comm.Barrier()
        if RANK == 0:
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=now, chunks=(CHUNK, WIDE), shuffle=True)
        comm.Barrier()
        if now is values:
            distributed = strategy.experimental_distribute_dataset(dataset_of(path))
        assert equal([*distributed], pieces(path))
    comm.Barrier()
