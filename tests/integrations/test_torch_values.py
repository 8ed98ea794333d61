"""Tensors of PyTorch go in and come back as they were."""

import subprocess
import sys

import numpy as np
import pytest

import mpistrat
from mpistrat.arrays.arrays import buffer_like, copied, from_host, to_host

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_dtypes_and_shapes(strategy, dtype, shape):
    value = torch.ones(shape, dtype=getattr(torch, dtype))
    total = strategy.reduce("SUM", value, axis=None)
    assert type(total) is torch.Tensor
    assert (total.dtype, total.shape) == (value.dtype, value.shape)
    assert torch.equal(total, value)


@pytest.mark.parametrize("make", [lambda t: t, torch.nn.Parameter, lambda t: t * 1])
def test_results_have_no_history(strategy, make):
    value = make(torch.ones(3, requires_grad=True))
    total = strategy.reduce("SUM", value, axis=None)
    assert not total.requires_grad
    assert total.tolist() == [1, 1, 1]
    assert value.requires_grad


def test_data_is_not_copied():
    for value in (torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16), torch.ones(4)[::2]):
        host = to_host(value)
        assert host.ctypes.data == value.data_ptr()
        assert from_host(host, value).data_ptr() == value.data_ptr()


def test_pending_conjugation_and_negation_are_done():
    assert to_host(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert to_host(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2]


def test_sparse_tensors_are_refused(strategy):
    with pytest.raises(TypeError, match="to_dense"):
        strategy.reduce("SUM", torch.ones(3).to_sparse(), axis=None)


def test_variables_take_tensors_and_give_their_memory(strategy):
    with strategy.scope():
        variable = mpistrat.Variable(torch.ones(2, requires_grad=True))
    shared = torch.from_dlpack(variable)
    variable.assign(torch.full((2,), 3.0, requires_grad=True))
    assert shared.tolist() == [3, 3]


def test_buffers_are_tensors_that_are_reduced_where_they_are(strategy):
    template = {"w": torch.ones(2, 3, requires_grad=True), "b": torch.ones(3, dtype=torch.float64)}
    buffers = strategy.experimental_buffers_like(template)
    assert {name: (each.dtype, each.shape) for name, each in buffers.items()} == {
        name: (each.dtype, each.shape) for name, each in template.items()
    }
    for each in buffers.values():
        each.fill_(2)
    totals = strategy.reduce("MEAN", buffers, axis=None)
    assert totals["w"] is buffers["w"]
    assert totals["b"] is buffers["b"]
    assert totals["w"].tolist() == [[2, 2, 2]] * 2


def test_the_memory_of_a_buffer_that_is_gone_is_any_memory():
    buffer = np.ones(3)
    tensor = buffer_like(buffer, torch.ones(3, dtype=torch.float64))
    assert to_host(tensor) is buffer
    view = tensor[:2]
    del tensor, buffer
    assert to_host(view).tolist() == [1, 1]


def test_import_of_the_package_does_not_load_torch():
    code = "import sys, mpistrat; mpistrat.MultiWorkerMirroredStrategy().reduce('SUM', 1.0, axis=None); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


def test_views_of_buffers_keep_their_strides(strategy):
    (buffer,) = strategy.experimental_buffers_like([torch.zeros(3, 3)])
    buffer.copy_(torch.arange(9.0).reshape(3, 3))
    assert to_host(buffer.t()).tolist() == buffer.t().tolist()
    assert strategy.gather(buffer.t(), axis=0).tolist() == buffer.t().tolist()


@pytest.mark.parametrize("value", [torch.Size([2, 3]), torch.Size([])])
def test_shapes_are_no_tensors(value):
    assert to_host(value).tolist() == list(value)
    assert copied(value) is value


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), torch.float32, torch.device("cpu")], ids=str)
def test_other_things_of_torch_are_refused(value):
    assert copied(value) is value
    with pytest.raises(TypeError, match="expected an array or a number"):
        to_host(value)


def test_arrays_of_pandas_without_labels_are_reduced(strategy):
    pandas = pytest.importorskip("pandas")
    for value in (pandas.Index([1, 2]), pandas.Categorical([1, 2]), pandas.array([1, 2])):
        assert copied(value) is value
        if value.dtype != "Int64":
            assert np.asarray(strategy.reduce("SUM", value, axis=None)).tolist() == [1, 2]
