"""Tests that chunks that must be decoded as wholes are decoded once in an epoch, shuffled or not."""

import threading
from collections import Counter
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from selection import core

from mpistrat.data import AutoShardPolicy, Dataset
from mpistrat.data.distribute.autoshard import divide
from mpistrat.data.distribute.state import Position, resumed, state_of
from mpistrat.data.hdf5 import chunks
from mpistrat.data.hdf5.reader import _OpenColumn
from mpistrat.data.rows import blocks
from mpistrat.data.rows.blocks import BlockOrder, Blocks, WholeChunks
from mpistrat.replicas import ReplicaGroup

ROW = 1 << 10  # bytes
KEPT = 48 << 10  # instead of 48 MiB: all sizes are divided by 1024 here


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_DECODED", KEPT)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 3 << 9)
    monkeypatch.setattr(blocks, "_WINDOW_BYTES", KEPT)


@pytest.fixture
def decodes(monkeypatch):
    """Count how often each chunk is decoded, by its content, or by the place of a read through HDF5."""
    counts, lock = Counter(), threading.Lock()  # several threads decode
    real, real_run = chunks.decode, _OpenColumn._read_run

    def decode(raw, *more):
        with lock:
            counts[bytes(raw)] += 1
        return real(raw, *more)

    def read_run(self, first, last, out):
        if self.column.decoded:
            size = self.column.chunk_rows
            with lock:
                counts.update((self._id.id, number) for number in range(first // size, -(-last // size)))
        real_run(self, first, last, out)

    monkeypatch.setattr(chunks, "decode", decode)
    monkeypatch.setattr(_OpenColumn, "_read_run", read_run)
    return counts


def written(folder, sizes, chunk, name="x", shape=(ROW // 4,), across=None, **how):
    first = 0
    for i, rows in enumerate(sizes):
        values = np.arange(first, first + rows, dtype="f4")
        data = np.broadcast_to(values.reshape(-1, *[1] * len(shape)), (rows, *shape))
        with h5py.File(folder / f"{i}.h5", "a") as f:
            f.create_dataset(name, data=data, chunks=(min(chunk, rows), *(across or shape)), **how)
        first += rows
    return str(folder / "*.h5")


def epoch(dataset, epoch, replicas=1, policy="DATA"):
    """Return the first value of all rows, replica by replica."""
    seen = []
    for rank in range(replicas):
        division = divide(
            AutoShardPolicy[policy],
            dataset.definition.source,
            dataset.definition.transforms,
            ReplicaGroup(SimpleNamespace(size=replicas, rank=rank)),
            False,
        )
        batches = (batch for made in division.batches(0, epoch, 2) for batch in made)
        seen.append([float(row.flat[0]) for batch in batches for row in batch])
    return seen


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compression", ["gzip", "lzf"])  # decoded by this library, and by HDF5
@pytest.mark.parametrize("chunk", core([1, 2, 5, 6, 11, 12, 13, 30, 60], 2, 13, 60))  # KiB
@pytest.mark.parametrize("batch", core([3, 16, 50], 16))
def test_every_chunk_is_decoded_once(tmp_path, decodes, compression, chunk, batch):
    dataset = Dataset.from_hdf5(written(tmp_path, [600, 240], chunk, compression=compression), "x")
    shuffled = dataset.shuffle(seed=3).batch(batch)
    chunks = -(-600 // chunk) + -(-240 // chunk)
    cut = 600 % chunk + 240 % chunk > chunk  # the rest of the second file lies in two blocks
    for number in range(2):
        decodes.clear()
        ((*seen,),) = epoch(shuffled, number)
        assert sorted(seen) == list(range(840))
        assert seen != sorted(seen)
        assert sum(decodes.values()) in (chunks, chunks + cut)
        assert len(decodes) == chunks


@pytest.mark.full
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("chunk", [2, 6, 12])
def test_once_by_each_replica(tmp_path, decodes, replicas, chunk):
    """Each replica reads its own rows only, so no replica uses all rows of a chunk."""
    pattern = written(tmp_path, [600, 240], chunk, compression="gzip")
    orders = []
    for rank in range(replicas):
        dataset = Dataset.from_hdf5(pattern, "x").shuffle(seed=3).batch(15)
        peer = ReplicaGroup(SimpleNamespace(size=replicas, rank=rank))
        division = divide(AutoShardPolicy.DATA, dataset.definition.source, dataset.definition.transforms, peer, False)
        decodes.clear()
        orders.append([[float(row[0]) for row in division.batch(k, 0)] for k in range(division.steps)])
        assert max(decodes.values()) == 1
    together = [[row for piece in pieces for row in piece] for pieces in zip(*orders, strict=True)]
    (alone,) = epoch(Dataset.from_hdf5(pattern, "x").shuffle(seed=3).batch(15), 0)
    assert [row for batch in together for row in batch] == alone


@pytest.mark.usefixtures("small")
def test_chunks_of_several_datasets_and_of_parts_of_rows(tmp_path, decodes):
    written(tmp_path, [480, 240], 3, "x", compression="gzip")
    written(tmp_path, [480, 240], 2, "z", shape=(16, 16), across=(16, 8), compression="gzip")
    pattern = written(tmp_path, [480, 240], 240, "y", shape=(), compression="gzip")
    dataset = Dataset.from_hdf5(pattern, ("x", "z", "y"))
    assert dataset.definition.source.blocks()[:2] == (6, 1)  # 240 rows would be too many
    seen = [int(y) for *_, labels in dataset.shuffle(seed=0).batch(7) for y in labels]
    assert sorted(seen) == list(range(720))
    assert sum(decodes.values()) == 720 // 3 + 2 * 720 // 2 + 3


@pytest.mark.usefixtures("small")
def test_many_small_files(tmp_path, decodes):
    """Files shorter than a block share blocks, and a chunk lies in at most two blocks."""
    sizes = [3 + i % 5 for i in range(60)]
    dataset = Dataset.from_hdf5(written(tmp_path, sizes, 4, compression="gzip"), "x").shuffle(seed=1)
    (seen,) = epoch(dataset.batch(8), 0)
    assert sorted(seen) == list(range(sum(sizes)))
    assert max(decodes.values()) <= 2


@pytest.mark.usefixtures("small")
def test_a_state_names_the_blocks_on_which_the_order_depends(tmp_path):
    """Also under FILE, where a replica may have files of another layout than the first file."""
    for folder, chunk in (("a", 2), ("b", 8)):
        (tmp_path / folder).mkdir()
        for i in range(4):
            with h5py.File(tmp_path / folder / f"{i}.h5", "w") as f:
                x = np.zeros((96, ROW // 4), "f4")
                f.create_dataset("x", data=x, chunks=(2 if i == 0 else chunk, ROW // 4), compression="gzip")
    found = []
    for folder in "ab":
        dataset = Dataset.from_hdf5(str(tmp_path / folder / "*.h5"), "x").shuffle(seed=0).batch(8)
        for policy in ("DATA", "FILE"):
            peers = [ReplicaGroup(SimpleNamespace(size=2, rank=rank)) for rank in range(2)]
            made = [
                divide(AutoShardPolicy[policy], dataset.definition.source, dataset.definition.transforms, peer, False)
                for peer in peers
            ]
            states = [state_of(each, Position(each, 0, 3)) for each in made]
            assert states[0] == states[1]
            for each in made:
                source = each.plan._source
                assert list(source.blocks()[:2]) == states[0]["source"]["blocks"]
                assert source.blocks().starts[-1] == len(source)
            found.append((made[0], states[0]))
    (data_a, _), (file_a, _), (_, data_b), (_, file_b) = found
    assert [state["source"]["blocks"] for _, state in found] == [[2, 12], [2, 12], [8, 3], [8, 3]]
    for division, state in ((data_a, data_b), (file_a, file_b)):
        digest = {**state["source"], "digest": division.whole.source.identity()["digest"]}
        with pytest.raises(ValueError, match=r"shuffled blocks .* is \[8, 3\], but here it is \[2, 12\]"):
            resumed(division, {**state, "source": digest})


def test_windows_that_can_be_kept():
    starts = np.array([0, 10_000])

    def of(chunk, row=48 << 10, **more):
        return Blocks.of(row, chunk, starts, [[WholeChunks(chunk, chunk * row)]], **more)[:2]

    assert of(32) == (32, 16)  # 1.5 MiB each, and 24 MiB together
    assert of(100) == (100, 5)
    assert of(200) == (200, 2)
    assert of(1000) == (1000, 1)
    assert Blocks.of(48 << 10, 32, starts)[:2] == (32, 32)
    # With a second dataset whose chunks do not coincide with blocks.
    more = [[WholeChunks(32, 32 * (48 << 10))], [WholeChunks(10_000, 10_000 * (1 << 10))]]
    assert Blocks.of(49 << 10, 32, starts, more)[:2] == (32, 1)
    # Few blocks are not permuted as a whole if they exceed the cache of decoded chunks.
    order = BlockOrder(7000, Blocks.of(48 << 10, 1000, starts, [[WholeChunks(1000, 1000 * (48 << 10))]]))
    found = order(np.arange(7000), 0, 0).reshape(7, 1000)
    assert [len(set(part // 1000)) for part in found] == [1] * 7
