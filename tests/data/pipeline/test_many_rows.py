"""Tests of 10**8 rows: neither the start nor a restored state makes an array or a list with an entry for each row."""

import tracemalloc
import zlib

import h5py
import numpy as np
import pytest

from mpistrat.data import AutoShardPolicy, Dataset, DistributedDataset, Options
from tests.selection import core

ROWS, CHUNK, BATCH = 10**8, 10**5, 128
LEAST = ROWS // 4  # bytes of the smallest array that would be noticed
SHUFFLE_MEMORY = 4 << 20


@pytest.fixture(scope="module", params=["contiguous", "gzip"])
def file(request, tmp_path_factory):
    """A file of holes, or of chunks that are equal. Chunks are few, as their places are kept."""
    path = tmp_path_factory.mktemp("many") / "a.h5"
    with h5py.File(path, "w") as f:
        if request.param == "contiguous":
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            h5py.h5d.create(f.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((ROWS,)), how)
        else:
            x = f.create_dataset("x", (ROWS,), "i4", chunks=(CHUNK,), compression="gzip")
            chunk = zlib.compress(np.arange(CHUNK, dtype="i4").tobytes())
            for first in range(0, ROWS, CHUNK):
                x.id.write_direct_chunk((first,), chunk)
    return str(path)


@pytest.mark.parametrize("size", core([1, 2], 2))
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_nothing_has_an_entry_for_each_row(file, replicas, order, size):
    options = Options()
    options.shuffle_memory = SHUFFLE_MEMORY
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA

    def distributed(peer):
        dataset = Dataset.from_hdf5(file, "x")
        if order == "shuffled":
            dataset = dataset.shuffle(seed=1)
        return DistributedDataset(dataset.batch(BATCH).with_options(options), peer)

    def replica(peer):
        made = distributed(peer)
        iterator = iter(made)
        first = next(iterator)
        state = made.state() | {"position": ROWS // BATCH // 2 * BATCH}
        again = distributed(peer)
        again.restore(state)
        return len(first), len(next(iter(again))), next(iter(again)).tolist()  # also of the next epoch

    tracemalloc.start()
    try:
        found = replicas(size, replica)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [lengths[:2] for lengths in found] == [(BATCH // size, BATCH // size)] * size
    assert peak < LEAST
