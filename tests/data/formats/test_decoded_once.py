"""Chunks that can be read only as wholes: how often they are decoded."""

import warnings

import numpy as np
import pytest

from mpistrat.data import Dataset, Options
from mpistrat.data.formats.zarr import Zarr

zarr = pytest.importorskip("zarr", reason="zarr is not installed")
CHUNK, CHUNKS = 2048, 80  # chunks of 128 KiB, 10 MiB in all


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store whose last chunk is short, so that batches and windows do not end together."""
    path = tmp_path_factory.mktemp("chunks") / "a.zarr"
    array = zarr.open(path, mode="w", shape=(CHUNK * CHUNKS + 500, 16), chunks=(CHUNK, 16), dtype="f4")
    array[:] = 1
    return path


@pytest.fixture
def decoded(monkeypatch):
    """The numbers of the chunks that are decoded."""
    numbers, block = [], Zarr.block

    def counted(self, path, record, number):
        numbers.append(number)
        return block(self, path, record, number)

    monkeypatch.setattr(Zarr, "block", counted)
    return numbers


def shuffled(path, memory, mode="block"):
    options = Options()
    options.shuffle_memory = memory << 20
    return Dataset.from_zarr(path).shuffle(seed=1, mode=mode).with_options(options)


@pytest.mark.parametrize("batch", [512, 1500, 4096])
def test_a_shuffle_decodes_each_chunk_once(path, decoded, batch):
    rows = sum(len(batch) for batch in shuffled(path, memory=6).batch(batch))
    assert rows == CHUNK * CHUNKS + 500
    assert sorted(decoded) == list(range(CHUNKS + 1))


def test_an_exact_shuffle_beyond_the_memory_warns(path, monkeypatch):
    monkeypatch.setattr("mpistrat.data.sources.files.MOST_DECODED", 1 << 20)
    with pytest.warns(UserWarning, match=r"decodes nearly all chunks again .*: use mode='block'"):
        next(iter(shuffled(path, 6, "exact").batch(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(shuffled(path, 6).batch(4)))
        next(iter(shuffled(path, 64, "exact").batch(4)))


@pytest.mark.parametrize(
    "endless",
    [
        lambda rows: rows.repeat(),
        lambda rows: rows.repeat().map(np.sqrt).enumerate(),
        lambda rows: Dataset.zip(rows.repeat(), rows.repeat()),
        lambda rows: rows.concatenate(rows.repeat()),
    ],
)
def test_an_endless_dataset_is_not_cached(endless):
    with pytest.raises(ValueError, match="is endless: call cache"):
        endless(Dataset.range(4)).cache()
    assert len(list(endless(Dataset.range(4)).take(3).cache())) == 3
