"""What programs of earlier releases do, beside the former names: mappings, iterators, input functions, classes."""

import collections
import types
import warnings
from collections.abc import Mapping, MutableMapping

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Frozen(Mapping):
    def __init__(self, content):
        self._content = dict(content)

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


class Changing(Frozen, MutableMapping):
    def __setitem__(self, key, value):
        self._content[key] = value

    def __delitem__(self, key):
        del self._content[key]


class Strange(Frozen):
    def __init__(self, first, second):
        super().__init__(first | second)


MAPPINGS = [Frozen, Changing, types.MappingProxyType, collections.UserDict, collections.ChainMap]


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_are_structure(strategy, kind):
    mine = strategy.experimental_distribute_values_from_function(lambda context: np.full(2, RANK))
    given = kind({"b": mine, "a": [1, kind({"c": mine})]})

    def fn(inside, keyword):
        assert type(inside) is type(keyword) is kind
        assert sorted(inside) == ["a", "b"]
        for each in (inside["b"], inside["a"][1]["c"], keyword["b"]):
            assert type(each) is np.ndarray
            assert each.tolist() == [RANK, RANK]
        return mpistrat.get_replica_context().all_reduce("SUM", kind({"x": inside["b"], "y": 1}))

    result = strategy.run(fn, args=(given,), kwargs={"keyword": given})
    assert type(result) is kind
    assert result["x"].tolist() == [sum(range(SIZE))] * 2
    assert result["y"] == SIZE
    assert strategy.reduce("SUM", result, axis=None)["y"] == SIZE * SIZE
    plain = kind({"x": 1})
    assert strategy.run(lambda x: x, args=(plain,)) is plain


def test_mappings_that_cannot_be_made(strategy):
    mine = mpistrat.PerReplica((1.0,))
    with pytest.raises(TypeError, match=r"Strange cannot be made of a dict"):
        strategy.run(lambda x: x, args=(Strange({"x": mine}, {}),))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_iterators_of_the_default_strategy(prefetch):
    default = mpistrat.get_strategy()
    for dataset in (
        Dataset.range(3).prefetch(prefetch),
        Dataset.from_iterable(lambda: range(3)).prefetch(prefetch),
        Dataset.range(6).batch(2).map(lambda x: x[0] // 2).prefetch(prefetch),
    ):
        distributed = default.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        assert iter(iterator) is iterator
        assert int(iterator.get_next()) == 0
        assert int(next(iterator)) == 1
        last = iterator.get_next_as_optional()
        assert last.has_value()
        assert int(last.get_value()) == 2
        for _ in range(2):
            assert not iterator.get_next_as_optional().has_value()
            with pytest.raises(StopIteration):
                iterator.get_next()
        assert list(map(int, distributed)) == [0, 1, 2]
    made = default.distribute_datasets_from_function(lambda context: Dataset.range(1).prefetch(prefetch))
    assert int(iter(made).get_next_as_optional().get_value()) == 0


def test_classes_of_both_names(strategy):
    former = mpistrat.experimental.MultiWorkerMirroredStrategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_former_name = former()
        version_1 = mpistrat.compat.v1.experimental.MultiWorkerMirroredStrategy()
    for each in (mpistrat.MultiWorkerMirroredStrategy(), by_former_name, version_1):
        assert isinstance(each, former)
        assert isinstance(each, mpistrat.MultiWorkerMirroredStrategy)
    assert not isinstance(mpistrat.MirroredStrategy(), former)
    assert not isinstance(
        mpistrat.MultiWorkerMirroredStrategy(), mpistrat.compat.v1.experimental.MultiWorkerMirroredStrategy
    )


# --- input functions of version 1 ----------------------------------------------------------------------


@pytest.fixture
def version_1():
    return mpistrat.compat.v1.MirroredStrategy()


def test_input_functions_that_return_a_function(version_1):
    def input_fn(context):
        numbers = iter(range(context.input_pipeline_id, 2 * SIZE, context.num_input_pipelines))
        return lambda: np.array([next(numbers)])

    iterator = version_1.make_input_fn_iterator(input_fn)
    assert iterator.initialize() == []
    assert iterator.get_next().tolist() == [RANK]
    total = version_1.experimental_local_results(iterator.get_next())[0]
    assert total.tolist() == [RANK + SIZE]
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_input_functions_that_return_a_dataset(version_1):
    iterator = version_1.make_input_fn_iterator(lambda context: Dataset.range(4).batch(2))
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


def test_input_functions_that_return_neither(version_1):
    with pytest.raises(TypeError, match="Dataset"):
        version_1.make_input_fn_iterator(lambda context: 3 if RANK == SIZE - 1 else list)


@pytest.mark.skipif(SIZE == 1, reason="needs two kinds")
def test_input_functions_that_return_different_kinds(version_1):
    with pytest.raises(TypeError, match="same kind"):
        version_1.make_input_fn_iterator(lambda context: list if RANK else Dataset.range(1).batch(1))
    with pytest.raises(RuntimeError if RANK else ZeroDivisionError):
        version_1.make_input_fn_iterator(lambda context: list if RANK else 1 / 0)
