"""A column has one dtype: in all batches, and in the pieces of one batch on all ranks."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS = 13
SOURCES = {
    "range": lambda: Dataset.range(ROWS),
    "shuffled": lambda: Dataset.range(ROWS).shuffle(seed=4),
    "zip": lambda: Dataset.zip(Dataset.range(ROWS), Dataset.range(ROWS)).map(lambda x, _: x),
    "sequence": lambda: Dataset.from_sequence(list(range(ROWS))),
    "iterable": lambda: Dataset.from_iterable(lambda: iter(range(ROWS))),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(ROWS))),
}


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def batches(strategy, dataset, size=4):
    return list(strategy.experimental_distribute_dataset(dataset.batch(size)))


@pytest.mark.parametrize("source", SOURCES)
def test_numbers_of_other_dtypes_are_converted(strategy, comm, source):
    """Even rows are floats, odd ones integers of several widths: a piece of odd rows alone would be of int16."""
    kinds = [np.float64, np.int16, np.float32, np.int64]
    made = batches(strategy, SOURCES[source]().map(lambda x: kinds[int(x) % 4](x)), 4)
    assert {batch.dtype for part in comm.allgather(made) for batch in part} == {np.dtype(np.float64)}
    rows = sorted(x for part in comm.allgather(made) for batch in part for x in batch)
    assert rows == list(range(ROWS))


def test_rows_of_a_sequence(strategy, comm):
    made = batches(strategy, Dataset.from_sequence([1.5, *range(1, ROWS)]))
    assert {batch.dtype for part in comm.allgather(made) for batch in part} == {np.dtype(np.float64)}


@pytest.mark.parametrize("source", ["range", "shuffled", "zip", "sequence"])
def test_a_value_that_would_change_is_refused(strategy, comm, source):
    """On the rank that has the row. The others read on: they need nothing of it."""
    dataset = SOURCES[source]().map(lambda x: int(x) if x != 5 else 5.5)
    told = ""
    try:
        made = batches(strategy, dataset)
        assert {batch.dtype for batch in made} == {np.dtype(np.int64)}
    except TypeError as error:
        told = str(error)
    (named,) = [text for text in comm.allgather(told) if text]
    assert "dtype float64 in a column of int64" in named
    assert "5.5" in named


def test_integers_beyond_the_bits_of_a_float(strategy):
    dataset = Dataset.range(2).map(lambda x: 0.5 if x == 0 else 2**60 + 1).batch(2)
    with pytest.raises(TypeError, match=r"row 1 .* int64 in a column of float64.*1152921504606846977"):
        list(dataset)


def test_padded_batches(strategy, comm):
    rows = Dataset.range(ROWS).map(lambda n: np.full(int(n) % 3, n, [np.float32, np.int8][int(n) % 2]))
    made = list(strategy.experimental_distribute_dataset(rows.padded_batch(4, padded_shapes=[3])))
    assert {batch.dtype for part in comm.allgather(made) for batch in part} == {np.dtype(np.float32)}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_of_other_dtypes_are_converted(strategy, comm, source):
    """Pieces of odd rows, and of rows beyond 5, would be of other dtypes."""
    kinds = [np.float64, np.int16, np.float32]
    made = batches(strategy, SOURCES[source](), 2 * SIZE)
    dataset = SOURCES[source]().batch(2 * SIZE)
    mapped = dataset.map(lambda x: x.astype(kinds[int(x[0] > 0) * (1 + int(x[0]) % 2)]) if len(x) else x)
    mapped = list(strategy.experimental_distribute_dataset(mapped))
    assert {batch.dtype for part in comm.allgather(mapped) for batch in part} == {np.dtype(np.float64)}
    assert [x for batch in mapped for x in batch] == [x for batch in made for x in batch]


@pytest.mark.ranks(min=2)  # one rank has one batch, which says the dtype
@pytest.mark.parametrize("source", ["range", "zip", "sequence"])
def test_a_value_of_a_batch_that_would_change_is_refused(strategy, comm, source):
    """On the rank that has the batch. The others read on: they need nothing of it."""
    dataset = SOURCES[source]().take(2 * SIZE).batch(2 * SIZE)
    dataset = dataset.map(lambda x: x if x[0] < 2 * SIZE - 2 else x * 1.5)
    told = ""
    try:
        (made,) = strategy.experimental_distribute_dataset(dataset)
        assert made.dtype == np.int64
    except TypeError as error:
        told = str(error)
    (named,) = [text for text in comm.allgather(told) if text]
    last = 1.5 * (2 * SIZE - 1)
    assert "row 1 of a batch that map() returned has dtype float64 in a column of int64" in named
    assert f"cannot hold {last}" in named


def test_numbers_that_a_batch_becomes(strategy, comm):
    dataset = Dataset.range(2 * SIZE).batch(2 * SIZE).map(lambda x: (int(x[0]) if x[0] else 0.0, len(x)))
    ((mean, count),) = strategy.experimental_distribute_dataset(dataset)
    assert (mean, count) == (2 * RANK, 2)
    assert [type(count), isinstance(mean, float)] == [int, True]


@pytest.mark.parametrize(("first", "last"), [("a", 7), ("1", 7), (7, "1")])
def test_texts_and_numbers_in_a_column(strategy, first, last):
    """A text is not read as a number, and a number is not written as a text."""
    dataset = Dataset.range(2 * SIZE).map(lambda x: first if x < 2 * SIZE - 1 else last)
    if RANK == SIZE - 1:
        with pytest.raises(TypeError, match=r"row 1 of a batch has dtype .* in a column of"):
            batches(strategy, dataset, 2 * SIZE)
    else:
        (made,) = batches(strategy, dataset, 2 * SIZE)
        assert made.tolist() == [first, first]


def test_texts_keep_their_lengths():
    first, second = Dataset.from_sequence(["a", "bcd", "ef", "ghijkl"]).batch(2)
    assert [*first, *second] == ["a", "bcd", "ef", "ghijkl"]
