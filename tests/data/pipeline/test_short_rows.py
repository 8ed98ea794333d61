"""Tests of shuffled small rows of HDF5 files: in memory if they fit, otherwise in windows of the memory given."""

import functools
import os
import pickle
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import AutoShardPolicy, ChecksumError, Dataset, DistributedDataset, NotFiniteError, Options
from mpistrat.data.rows.blocks import Blocks

WIDTH = 2048  # of a row, in float32: 8 KiB
SIZES = (200, 131, 70)
ROWS = sum(SIZES)
MEMORY = {"all": 1 << 30, "windows": ROWS * WIDTH * 2, "least": 0}


def write(folder, sizes, width, **how):
    """Write files of rows that hold their number, which is also dataset y."""
    first = 0
    for number, rows in enumerate(sizes):
        numbers = np.arange(first, first + rows)
        chunks = {"chunks": (min(rows, 1000 if width < 100 else 16), width), **how} if how else {}
        with h5py.File(folder / f"{number}.h5", "w") as f:
            f.create_dataset("x", data=np.repeat(numbers.astype("f4")[:, None], width, 1), **chunks)
            f.create_dataset("y", data=numbers, **({**chunks, "chunks": chunks["chunks"][:1]} if how else {}))
        first += rows
    return str(folder / "*.h5")


@pytest.fixture(scope="module", params=["contiguous", "gzip"])
def files(request, tmp_path_factory):
    how = {"compression": "gzip", "compression_opts": 1} if request.param == "gzip" else {}
    return write(tmp_path_factory.mktemp("files"), SIZES, WIDTH, **how)


def shuffled(files, batch=10, memory=1 << 30, policy="DATA", seed=3, **more):
    options = Options()
    options.shuffle_memory = memory
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    dataset = Dataset.from_hdf5(files, ("x", "y"), **more).shuffle(seed=seed)
    return dataset.batch(batch).with_options(options)


def numbers(batches):
    found = []
    for x, y in batches:
        assert (x == y[:, None]).all()
        found += y.tolist()
    return found


# --- the order ----------------------------------------------------------------------------

# CRC-32 of the numbers of the rows of two epochs, before rows were kept in memory.
RECORDED = {
    "contiguous": {
        "block": (1532459464, 728767758),
        "exact": (3026628557, 3541408904),
        "lanes": (810406673, 1368373228),
    },
    "gzip": {"block": (1693814757, 430696758), "exact": (3026628557, 3541408904), "lanes": (1688015106, 1965791188)},
}
BLOCKS = {"contiguous": [14564, 31], "gzip": [15000, 16]}


@pytest.mark.parametrize("how", RECORDED)
def test_rows_that_fit_keep_the_order_of_files(tmp_path, how, replicas):
    """A change here changes every seeded run of every user, and refuses their saved states."""
    filters = {"compression": "gzip", "compression_opts": 1} if how == "gzip" else {}
    files = write(tmp_path, (70_000, 50_001, 30_002), 25, **filters)
    for name, recorded in RECORDED[how].items():
        mode, policy = ("block", "AUTO") if name == "lanes" else (name, "DATA")
        options = Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
        shuffled = Dataset.from_hdf5(files, ("x", "y")).shuffle(seed=5, mode=mode)
        dataset = shuffled.batch(1000).with_options(options)
        (distributed,) = replicas(1, lambda peer, dataset=dataset: DistributedDataset(dataset, peer))
        for crc in recorded:
            rows = np.concatenate([y for _, y in distributed]).astype("<i8")
            assert zlib.crc32(rows.tobytes()) == crc
        assert distributed.state()["source"]["blocks"] == BLOCKS[how]
        assert distributed.state()["version"] == 1


@settings(derandomize=True, database=None, deadline=None, max_examples=12)
@given(
    memory=st.sampled_from(sorted(MEMORY)),
    replicas_of_two=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batches=st.tuples(st.integers(4, 150), st.integers(4, 150)),
    policy=st.sampled_from(["DATA", "DATA", "FILE", "OFF"]),
    steps=st.integers(0, 20),
    epoch=st.integers(0, 1),
)
def test_every_row_comes_once_also_after_a_restart(
    files, replicas, memory, replicas_of_two, batches, policy, steps, epoch
):
    (before, after), (batch, batch_after) = replicas_of_two, batches
    if policy == "FILE":
        before = min(before, len(SIZES))
    if policy != "DATA":
        after, batch_after = before, batch

    def first_part(peer):
        made = DistributedDataset(shuffled(files, batch, MEMORY[memory], policy), peer)
        for _ in range(epoch):
            next(iter(made))
        iterator = iter(made)
        mine = numbers([each for _, each in zip(range(steps), iterator, strict=False)])
        return mine, iterator.state()

    parts = replicas(before, first_part)

    def second_part(peer):
        made = DistributedDataset(shuffled(files, batch_after, MEMORY[memory], policy), peer)
        made.restore(parts[peer.rank][1] if policy != "DATA" else parts[0][1])
        return numbers(made)

    rest = replicas(after, second_part)
    times = before if policy == "OFF" else 1
    seen = [row for mine, _ in parts for row in mine] + [row for mine in rest for row in mine]
    assert sorted(seen) == sorted(list(range(ROWS)) * times)


@pytest.mark.parametrize("memory", MEMORY)
def test_the_order_depends_on_the_options_and_not_on_the_replicas(files, replicas, memory):
    def replica(peer):
        return [y.tolist() for _, y in DistributedDataset(shuffled(files, 12, MEMORY[memory]), peer)]

    alone = numbers(shuffled(files, 7, MEMORY[memory]))
    for size in (1, 3):
        pieces = replicas(size, replica)
        assert [row for step in zip(*pieces, strict=True) for piece in step for row in piece] == alone
    assert (alone == numbers(shuffled(files, 7))) == (memory == "all")


def test_a_state_of_other_windows_is_refused(files, replicas):
    def replica(peer):
        state = DistributedDataset(shuffled(files), peer).state()
        for memory in ("windows", "least"):
            with pytest.raises(ValueError, match=r"shuffled blocks .* is \[\d+, \d+\].*Options\.shuffle_memory"):
                DistributedDataset(shuffled(files, memory=MEMORY[memory]), peer).restore(state)
        DistributedDataset(shuffled(files, memory=1 << 29), peer).restore(state)

    replicas(1, replica)


def test_windows_mix_rows_of_many_blocks(tmp_path):
    """Neighbours in a file get far apart, and a batch has rows of nearly all blocks of its window."""
    files = write(tmp_path, (300_000,), 4)  # of 24 bytes
    order = np.array(numbers(shuffled(files, 5000, memory=2 << 20)))
    block = 65536 // 24
    assert len(np.unique(order)) == len(order)
    assert (np.abs(np.diff(order)) > block).mean() > 0.8
    batches = order.reshape(-1, 500)
    # A window has 8 blocks of 1/110 of the rows: 500 rows drawn at random miss none of them.
    assert np.median([len(np.unique(each // block)) for each in batches]) >= 8
    # Windows are of blocks from everywhere: the mean of a window is near to the mean of all.
    windows = order[: 8 * block * 13].reshape(13, -1).mean(axis=1) / len(order)
    assert np.abs(windows - 0.5).mean() < 0.1


# --- reading ------------------------------------------------------------------------------


def test_rows_are_read_once_and_then_without_a_system_call(files, replicas, monkeypatch):
    calls = []
    real = os.preadv

    def spy(*arguments):
        calls.append(arguments)
        return real(*arguments)

    (made,) = replicas(1, lambda peer: DistributedDataset(shuffled(files), peer))
    monkeypatch.setattr(os, "preadv", spy)
    first = numbers(made)
    assert calls
    calls.clear()
    assert sorted(numbers(made)) == sorted(first) == list(range(ROWS))
    assert not calls


def test_a_batch_is_the_callers_own(files, replicas):
    def replica(peer):
        made = DistributedDataset(shuffled(files), peer)
        for x, y in made:
            x[...] = -1
            y[...] = -1
        return numbers(made)

    first, second = replicas(2, replica)
    assert sorted(first + second) == list(range(ROWS))


def test_few_rows_of_many_are_not_worth_the_memory(files, replicas):
    for taken, kept in ((ROWS // 9, False), (ROWS // 7, True)):
        dataset = Dataset.from_hdf5(files, ("x", "y")).shuffle(seed=1).take(taken).batch(10)
        (made,) = replicas(1, lambda peer, dataset=dataset: DistributedDataset(dataset, peer))
        assert made._passes.division.whole.source.in_memory is kept
        assert len(numbers(made)) == taken


def test_a_copy_of_a_dataset_reads_for_itself(files):
    dataset = shuffled(files, memory=1 << 30)
    assert numbers(pickle.loads(pickle.dumps(dataset))) == numbers(dataset)


def test_shuffle_memory_is_compared(files, replica_errors):
    errors = replica_errors(2, lambda peer: DistributedDataset(shuffled(files, memory=1000 + peer.rank), peer))
    assert ["its shuffle_memory is 1001 on rank 1 and 1000 on rank 0" in str(each) for each in errors] == [True] * 2


def test_the_option():
    options = Options()
    assert options.shuffle_memory == 1 << 30
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="shuffle_memory must be a number of bytes"):
            options.shuffle_memory = wrong
    options.shuffle_memory = 5
    assert "shuffle_memory=5" in repr(options)
    assert options != Options()
    assert Options().merge(options).merge(Options()) == options


# --- faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
def test_a_damaged_chunk_is_told_at_its_batch(tmp_path, replicas, memory):
    files = write(tmp_path, SIZES, WIDTH, fletcher32=True)
    expected = numbers(shuffled(files, memory=MEMORY[memory]))
    with h5py.File(tmp_path / "1.h5") as f:
        place = f["x"].id.get_chunk_info(3).byte_offset
    with open(tmp_path / "1.h5", "r+b") as f:
        f.seek(place)
        f.write(b"spoilt")
    bad = range(SIZES[0] + 48, SIZES[0] + 64)
    at = min(expected.index(row) for row in bad) // 10

    def replica(peer, prefetch):
        seen = []
        made = DistributedDataset(shuffled(files, memory=MEMORY[memory]).prefetch(prefetch), peer)
        with pytest.raises(ChecksumError, match=r"1\.h5', dataset 'x': rows .* cannot be read"):
            seen.extend(numbers([batch]) for batch in made)
        assert [row for rows in seen for row in rows] == expected[: 10 * at]

    for prefetch in (-1, 0, 2):
        replicas(1, functools.partial(replica, prefetch=prefetch))


@pytest.mark.parametrize("memory", MEMORY)
def test_values_that_are_not_finite_are_found(tmp_path, replicas, memory):
    files = write(tmp_path, SIZES, WIDTH)
    with h5py.File(tmp_path / "2.h5", "r+") as f:
        f["x"][7, 1] = np.nan

    def replica(peer):
        made = DistributedDataset(shuffled(files, memory=MEMORY[memory], check_finite=True), peer)
        with pytest.raises(NotFiniteError, match=r"2\.h5', dataset 'x': row 7 has the value nan"):
            numbers(made)

    replicas(1, replica)


# --- memory -------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_memory_stays_at_the_limit(tmp_path, run_alone):
    """A list of the numbers of all rows would take 800 MB."""
    memory = 64 << 20
    ended = run_alone(Path(__file__).with_name("many_rows_program.py"), tmp_path / "a.h5", memory).check()
    grown, rows = map(int, ended.output.split())
    assert rows >= 2_000_000
    assert grown <= memory + (32 << 20), ended.output


def test_blocks_follow_the_memory():
    ends = np.array([0, 10**8])
    for memory in (1 << 40, 1 << 30, 384 << 20):
        assert Blocks.of(100, 0, ends, memory=memory)[:2] == Blocks.of(100, 0, ends)[:2] == (15729, 31)
    for memory in (256 << 20, 64 << 20, 8 << 20):
        blocks = Blocks.of(100, 0, ends, memory=memory)
        assert 8 <= blocks.window <= 64
        assert 0.9 * memory / 8 < blocks.rows * blocks.window * 100 <= memory / 8
    assert Blocks.of(100, 0, ends, memory=0)[:2] == (655, 8)
