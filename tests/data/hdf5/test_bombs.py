"""Chunks that decode to more than they should: a few bytes of a file must not take gigabytes of memory."""

import tracemalloc
import zlib

import h5py
import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset
from mpistrat.data.hdf5 import chunks

LARGE = 64 << 20


def gzip_of(nbytes):
    return zlib.compress(bytes(nbytes))


def written(path, raw):
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (1000,), "u1", chunks=(1000,), compression="gzip")
        made.id.write_direct_chunk((0,), raw)
    return path


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (gzip_of(LARGE), r"a chunk of 1000 bytes inflates to more than 5099"),
        (gzip_of(1001), r"1001 bytes when decoded, instead of 1000"),
        (gzip_of(1000)[:-6], r"the stream ends after \d+ bytes"),
        (gzip_of(999), r"999 bytes when decoded, instead of 1000"),
    ],
)
def test_gzip(tmp_path, raw, text):
    dataset = Dataset.from_hdf5(written(tmp_path / "a.h5", raw), "x").batch(1000)
    assert len(dataset) == 1
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=text):
            list(dataset)
        assert tracemalloc.get_traced_memory()[1] < LARGE // 4
    finally:
        tracemalloc.stop()


def test_gzip_that_fits(tmp_path):
    (batch,) = Dataset.from_hdf5(written(tmp_path / "a.h5", gzip_of(1000)), "x").batch(1000)
    assert not batch.any()


@pytest.mark.parametrize("into", [False, True])
def test_zstd(into):
    packed = pytest.importorskip("zstandard").ZstdCompressor().compress(bytes(LARGE))
    place = np.empty(1000, np.uint8) if into else None
    tracemalloc.start()
    try:
        if into:  # no more is read than fits
            assert not chunks.decode(packed, [(chunks.ZSTD, ())], 0, 1000, place).any()
        else:
            with pytest.raises(ValueError, match="says that it has 67108864"):
                chunks.decode(packed, [(chunks.ZSTD, ())], 0, 1000, place)
        assert tracemalloc.get_traced_memory()[1] < LARGE // 4
    finally:
        tracemalloc.stop()
