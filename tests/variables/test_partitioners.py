"""How many shards a partitioner gives, against the definition of each."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from mpistrat.variables.partitioners import shards_wanted

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
DTYPES = st.sampled_from(["float64", "float32", "float16", "int8", "bool", "complex64", ">i4"])


def at(answer, axis):
    """The number at the axis; all others are 1."""
    number = answer[axis]
    assert answer == [number if each == axis % len(answer) else 1 for each in range(len(answer))]
    return number


class TestOracle:
    @given(SHAPES, DTYPES, st.integers(1, 60), st.integers(-4, 3))
    def test_fixed(self, shape, dtype, shards, axis):
        axis %= len(shape)
        for place in (axis, axis - len(shape)):
            assert at(FixedShardsPartitioner(shards)(shape, dtype, place), place) == min(shards, shape[axis])

    @given(SHAPES, DTYPES, st.integers(1, 2000), st.integers(1, 60), st.integers(0, 3))
    def test_min_size(self, shape, dtype, least, most, axis):
        axis %= len(shape)
        number = at(MinSizePartitioner(least, most)(shape, dtype, axis), axis)
        nbytes = np.zeros(shape, dtype).nbytes
        assert number == max(1, min(shape[axis], most, math.ceil(nbytes / least)))

    @given(SHAPES, DTYPES, st.integers(1, 2000), st.none() | st.integers(0, 60), st.integers(0, 3))
    def test_max_size(self, shape, dtype, most_bytes, most, axis):
        axis %= len(shape)
        number = at(MaxSizePartitioner(most_bytes, most)(shape, dtype, axis), axis)
        # The fewest shards of whole rows that fit; a row that does not fit is a shard of its own.
        row = np.zeros(shape, dtype).take([0], axis).nbytes
        fits = [k for k in range(1, shape[axis] + 1) if math.ceil(shape[axis] / k) * row <= most_bytes]
        rows = max((n for n in range(1, shape[axis] + 1) if n * row <= most_bytes), default=1)
        assert not fits or math.ceil(shape[axis] / rows) == fits[0]
        unlimited = math.ceil(shape[axis] / rows)
        assert number == (min(unlimited, most) if most else unlimited)

    def test_strings(self):
        for partitioner, shards in ((MinSizePartitioner(32, 100), 5), (MaxSizePartitioner(32), 5)):
            assert partitioner((10,), "U5") == partitioner((10,), object) == [shards]
        assert MinSizePartitioner(32, 100, bytes_per_string=1)((10,), str) == [1]


class TestEdges:
    ALL = (FixedShardsPartitioner(3), MinSizePartitioner(1, 9), MaxSizePartitioner(1))

    @pytest.mark.parametrize("partitioner", ALL)
    @pytest.mark.parametrize(("shape", "axis"), [((), 0), ((2,), 1), ((2, 3), -3)])
    def test_an_axis_that_there_is_not(self, partitioner, shape, axis):
        with pytest.raises(ValueError, match=f"has no axis {axis} to cut"):
            partitioner(shape, "float32", axis)

    @pytest.mark.parametrize("partitioner", ALL)
    @pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
    def test_no_elements_are_one_shard(self, partitioner, shape):
        assert partitioner(shape, "float32") == [1] * len(shape)

    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (lambda: FixedShardsPartitioner(0), ValueError),
            (lambda: FixedShardsPartitioner(2.5), TypeError),
            (lambda: MinSizePartitioner(0), ValueError),
            (lambda: MinSizePartitioner(max_shards=0), ValueError),
            (lambda: MinSizePartitioner(bytes_per_string=0), ValueError),
            (lambda: MinSizePartitioner("8"), TypeError),
            (lambda: MaxSizePartitioner(0), ValueError),
            (lambda: MaxSizePartitioner(8, max_shards=-1), ValueError),
            (lambda: MaxSizePartitioner(8, bytes_per_string=0), ValueError),
            (lambda: FixedShardsPartitioner(2)((-1, 2), "float32"), ValueError),
            (lambda: FixedShardsPartitioner(2)((1.5, 2), "float32"), TypeError),
            (lambda: MaxSizePartitioner(8)((4,), "floaty"), TypeError),
            (lambda: Partitioner()((2,), "float32"), NotImplementedError),
        ],
    )
    def test_refusals(self, make, error):
        with pytest.raises(error):
            make()

    def test_addresses(self):
        assert mpistrat.experimental.partitioners.Partitioner is Partitioner
        assert all(isinstance(each, Partitioner) for each in self.ALL)


class TestAnswersThatAStrategyTakes:
    def test_number_of_shards(self):
        assert shards_wanted(lambda shape, dtype: [9, 1], (2, 3), np.dtype("f4")) == 2
        assert shards_wanted(FixedShardsPartitioner(3), (10,), np.dtype("f4")) == 3

    def test_scalars_are_not_asked(self):
        assert shards_wanted(lambda shape, dtype: 1 / 0, (), np.dtype("f4")) == 1

    @pytest.mark.parametrize("answer", [[], [0, 1], [1, 2], [2], [2, 1, 1], [-1, 1]])
    def test_others_are_refused(self, answer):
        with pytest.raises(ValueError, match="must return a number for each axis"):
            shards_wanted(lambda shape, dtype: answer, (4, 2), np.dtype("f4"))
