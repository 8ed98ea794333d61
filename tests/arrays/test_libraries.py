"""Arrays of libraries that are installed rarely, by what stands in for them."""

import sys
import types

import numpy as np
import pytest

import mpistrat
from mpistrat.arrays.arrays import copied, dtype_and_shape, from_host, to_host
from mpistrat.data import Dataset


@pytest.fixture
def tensorflow(monkeypatch):
    """As much of TensorFlow as the exchange of arrays needs: tensors, variables, and ``convert_to_tensor``."""
    module = types.ModuleType("tensorflow")

    class EagerTensor:
        __module__ = "tensorflow.python.framework.ops"

        def __init__(self, array):
            self.array = np.array(array)

        def __array__(self, dtype=None, copy=None):
            return np.array(self.array, dtype=dtype)

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    class ResourceVariable(EagerTensor):
        __module__ = "tensorflow.python.ops.resource_variable_ops"

        def assign(self, value):
            self.array[...] = value

        def read_value(self):
            return EagerTensor(self.array)

    module.EagerTensor, module.Variable, module.convert_to_tensor = EagerTensor, ResourceVariable, EagerTensor
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


@pytest.mark.parametrize("kind", ["EagerTensor", "Variable"])
def test_tensorflow_values_come_back_as_tensors(tensorflow, kind):
    value = getattr(tensorflow, kind)([1.0, 2.0])
    assert to_host(value).tolist() == [1.0, 2.0]
    back = from_host(np.array([3.0, 4.0]), value)
    assert type(back) is tensorflow.EagerTensor
    assert back.array.tolist() == [3.0, 4.0]
    total = mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", value, axis=None)
    assert type(total) is tensorflow.EagerTensor
    kept = copied(value)
    value.array[...] = 0
    assert kept.array.tolist() == [1.0, 2.0]


def test_values_that_jax_traces_are_refused_with_what_to_use():
    class Tracer:
        __module__ = "jax._src.core"
        shape, dtype = (2,), np.dtype(np.float32)

    class DynamicJaxprTracer(Tracer):
        __module__ = "jax._src.interpreters.partial_eval"

    with pytest.raises(TypeError, match=r"jax\.pure_callback"):
        to_host(DynamicJaxprTracer())
    with pytest.raises(TypeError, match=r"jax\.pure_callback"):
        mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", DynamicJaxprTracer(), axis=None)


def test_values_that_tensorflow_traces_are_refused_with_what_to_use():
    class SymbolicTensor:
        __module__ = "tensorflow.python.framework.ops"
        shape, dtype = (2,), np.dtype(np.float32)

    with pytest.raises(TypeError, match=r"tf\.function .* call the collective outside"):
        to_host(SymbolicTensor())
    with pytest.raises(TypeError, match=r"tf\.function .* call the collective outside"):
        mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", SymbolicTensor(), axis=None)


class TestPandas:
    @pytest.fixture
    def pandas(self):
        return pytest.importorskip("pandas")

    def test_frames_keep_their_labels(self, pandas):
        frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}, index=["x", "y"])
        total = mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", frame, axis=None)
        pandas.testing.assert_frame_equal(total, frame)
        longer = from_host(np.ones((3, 2)), frame)
        assert list(longer.columns) == ["a", "b"]
        assert list(longer.index) == [0, 1, 2]

    def test_series_keep_their_labels(self, pandas):
        series = pandas.Series([1, 2], index=["x", "y"], name="s")
        total = mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", series, axis=None)
        pandas.testing.assert_series_equal(total, series)

    def test_columns_that_may_lack_values_have_one_dtype(self, pandas):
        """Batches without a missing value were of integers, and the others of floats."""
        column = pandas.array([1, 2, None, 4], dtype="Int64")
        for rows in (column, pandas.Series(column)):
            first, second = Dataset.from_sequence(rows).batch(2)
            assert first.dtype == second.dtype == np.float64
            np.testing.assert_array_equal([*first, *second], [1, 2, np.nan, 4])

    def test_frames_of_objects_are_refused(self, pandas):
        with pytest.raises(TypeError, match="expected an array"):
            to_host(pandas.DataFrame({"a": ["x"]}))


def test_other_libraries_take_a_variable_without_a_copy():
    with mpistrat.MultiWorkerMirroredStrategy().scope():
        variable = mpistrat.Variable([1.0, 2.0])
    shared = np.from_dlpack(variable)
    variable.assign_add([1.0, 1.0])
    assert shared.tolist() == [2.0, 3.0]


def test_dtype_and_shape():
    assert dtype_and_shape([1.0, 2.0]) == (np.float64, (2,))
    assert dtype_and_shape(np.zeros((2, 3), np.int8)) == (np.int8, (2, 3))
