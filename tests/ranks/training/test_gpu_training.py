"""Variables, optimizers, metrics and buffers on a GPU, as `test_gpu_collectives` has it."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization
from mpistrat.arrays.gpu import kernels
from mpistrat.optimizers import SGD, Adam, AdamW

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.01),
    "amsgrad": lambda: Adam(0.01, amsgrad=True),
    "adamw": lambda: AdamW(0.01, weight_decay=0.1),
}


@pytest.fixture
def on_gpu(cupy):
    """A strategy whose variables live on this rank's GPU."""
    return mpistrat.MultiWorkerMirroredStrategy(device="cuda:0")


def own(variable):
    """This replica's copy, on the host."""
    return variable.own_copy().get()


# --- variables -----------------------------------------------------------------------------------------------


def test_a_variable_lives_on_the_gpu(cupy, on_gpu):
    with on_gpu.scope():
        v = mpistrat.Variable(np.full((2, 3), RANK, np.float32), name="v")
    assert type(v.own_copy()) is cupy.ndarray
    assert v.device == "cuda:0"
    assert (own(v) == 0).all()  # replica 0's
    assert (np.asarray(v) == 0).all()
    assert type(v.numpy()) is np.ndarray
    assert type(v.read_value()) is cupy.ndarray
    assert "shape=(2, 3)" in repr(v)
    v.assign(np.ones((2, 3), np.float32))
    v.assign_add(cupy.ones((2, 3), np.float32))
    v.assign_sub(0.5 * v)
    assert (own(v) == 1).all()
    assert type(v * 2) is cupy.ndarray
    assert type(v @ cupy.ones(3, np.float32)) is cupy.ndarray
    assert (v[0].get() == 1).all()
    v[0] = 5.0
    assert own(v)[:, 0].tolist() == [5, 1]
    v += 1
    assert own(v)[:, 0].tolist() == [6, 2]
    view = v[1]
    view += 7
    assert own(v)[1, 0] == 2  # a copy
    for wrong, error in [(np.ones(3), ValueError), (cupy.ones(3), ValueError), (cupy.ones((2, 3), complex), TypeError)]:
        with pytest.raises(error, match="'v"):
            v.assign(wrong)
    assert cupy.asarray(v).data.ptr == v.own_copy().data.ptr


def test_bfloat16_needs_a_newer_cupy(cupy, on_gpu, monkeypatch):
    monkeypatch.setattr(cupy, "__version__", "13.6.0")
    with on_gpu.scope():
        mpistrat.Variable(np.zeros(3, np.float16))
        with pytest.raises(TypeError, match=r"bfloat16 on a GPU needs CuPy 14 or later.*13\.6\.0"):
            mpistrat.Variable(np.zeros(3, ml_dtypes.bfloat16))


def test_other_libraries_take_a_variable(cupy, on_gpu):
    """CuPy without waiting for the stream, and with a dtype that CUDA's array interface has no word for."""
    stream = cupy.cuda.get_current_stream()
    with on_gpu.scope():
        v = mpistrat.Variable(np.arange(4), dtype=ml_dtypes.bfloat16)
        w = mpistrat.Variable(np.arange(4.0))
    with mpistrat.MultiWorkerMirroredStrategy(device="cpu").scope():
        on_host = mpistrat.Variable(np.arange(4.0))
    if hasattr(stream, "put"):
        stream.put(lambda: None)
    taken = cupy.asarray(v)
    assert (taken.data.ptr, taken.dtype) == (v.own_copy().data.ptr, ml_dtypes.bfloat16)
    if hasattr(stream, "put"):
        assert stream.queue
    assert (cupy.arange(4.0) * w).tolist() == (w * cupy.arange(4.0)).tolist() == [0, 1, 4, 9]
    assert cupy.from_dlpack(w).data.ptr == w.own_copy().data.ptr
    assert not hasattr(on_host, "__cupy_get_ndarray__")
    assert np.from_dlpack(on_host).ctypes.data == on_host.own_copy().ctypes.data


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_assignments_in_replicas(cupy, on_gpu, aggregation):
    with on_gpu.scope():
        v = mpistrat.Variable(np.zeros(3), aggregation=VariableAggregation[aggregation])
    want = {"SUM": sum(range(SIZE)), "MEAN": (SIZE - 1) / 2, "ONLY_FIRST_REPLICA": 0}[aggregation]
    for value in (cupy.full(3, float(RANK)), np.full(3, float(RANK))):
        on_gpu.run(lambda value=value: v.assign(value))
        assert own(v).tolist() == [want] * 3
    v.assign(v * 0)
    on_gpu.run(lambda: v.assign_add(np.full(3, RANK)))
    assert own(v).tolist() == [want] * 3


def test_sync_on_read(cupy, on_gpu):
    with on_gpu.scope():
        v = mpistrat.Variable(0.0, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM)
    on_gpu.run(lambda: v.assign_add(RANK + 1.0))
    assert float(v) == SIZE * (SIZE + 1) / 2
    assert float(on_gpu.run(lambda: float(v))) == RANK + 1
    assert float(on_gpu.reduce("SUM", v, axis=None)) == SIZE * (SIZE + 1) / 2 or SIZE > 1


@pytest.mark.parametrize("method", ["add", "sub", "mul", "div", "min", "max", "update"])
@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_scatter(cupy, on_gpu, method, library):
    values, indices = np.arange(1.0, 7.0).reshape(3, 2), np.array([4, 1, 4])
    found = []
    for strategy in (on_gpu, mpistrat.MultiWorkerMirroredStrategy(device="cpu")):
        with strategy.scope():
            v = mpistrat.Variable(np.arange(10.0).reshape(5, 2), aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        place = cupy.asarray if strategy is on_gpu and library == "cupy" else np.asarray
        rows = mpistrat.IndexedSlices(place(values), place(indices), (5, 2))
        getattr(v, f"scatter_{method}")(rows)
        strategy.run(lambda v=v, rows=rows: getattr(v, f"scatter_{method}")(rows))
        with pytest.raises(ValueError, match="do not fit"):
            getattr(v, f"scatter_{method}")(mpistrat.IndexedSlices(place(values), place(indices + 3)))
        found.append(np.asarray(v))
    np.testing.assert_array_equal(*found)


def test_rows_of_all_replicas(cupy, on_gpu):
    rows = mpistrat.IndexedSlices(cupy.full((1, 2), RANK + 1.0), cupy.asarray(np.array([RANK])), (SIZE, 2))
    total = on_gpu.reduce("MEAN", rows, axis=None)
    assert type(total.values) is type(total.indices) is cupy.ndarray
    want = [[(rank + 1) / SIZE] * 2 for rank in range(SIZE)]
    assert total.to_dense().tolist() == want


def test_where_the_strategy_is(cupy, on_gpu, monkeypatch):
    with cupy.cuda.Device(0):
        assert on_gpu.extended.worker_devices == ("cuda:0",)
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            elsewhere = cupy.ones(3)
        with pytest.raises(ValueError, match="lives on cuda:1, and this rank's device is cuda:0"):
            on_gpu.reduce("SUM", elsewhere, axis=None)
    monkeypatch.setenv("MPISTRAT_DEVICE", "cuda")
    for strategy in (mpistrat.MultiWorkerMirroredStrategy(), mpistrat.MirroredStrategy()):
        (name,) = strategy.extended.worker_devices
        assert name.startswith("cuda:")
    if hasattr(cupy.cuda.runtime, "error"):
        if RANK == SIZE - 1:
            monkeypatch.setattr(cupy.cuda.runtime, "error", (100, "cudaErrorNoDevice"))
        with pytest.raises(RuntimeError, match=f"rank {SIZE - 1}: device cuda.*sees no GPU"):
            mpistrat.MultiWorkerMirroredStrategy()
        monkeypatch.setenv("MPISTRAT_DEVICE", "auto")
        assert mpistrat.MultiWorkerMirroredStrategy().extended.worker_devices == ("cpu:0",)


@pytest.mark.ranks(min=4)
@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        (["ab", "ab", "cd", "cd"], "abcd"),
        (["ab", "cd", "ab", "cd"], "acbd"),  # each socket in turn, as Slurm does by default
        (["abcd"] * 4, "abcd"),
        (["a", "b", "c", "d"], "abcd"),
    ],
)
def test_ranks_that_see_the_same_gpus_divide_them(cupy, monkeypatch, masks, expected):
    if not hasattr(cupy.cuda.runtime, "gpus"):
        pytest.skip("the GPUs that are there are the same for all ranks")
    monkeypatch.setattr(cupy.cuda.runtime, "gpus", list(masks[RANK]))
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetPCIBusId", lambda device: masks[RANK][device])
    for strategy in (
        mpistrat.MultiWorkerMirroredStrategy(device="cuda"),
        mpistrat.MultiWorkerMirroredStrategy(device=" Auto"),
    ):
        (name,) = strategy.extended.worker_devices
        assert masks[RANK][int(name.removeprefix("cuda:"))] == expected[RANK]


def test_checkpoints(cupy, on_gpu, tmp_path):
    with on_gpu.scope():
        v = mpistrat.Variable(np.arange(3.0), name="v")
        w = mpistrat.Variable(np.zeros(3), name="v")
    mpistrat.training.save([v], tmp_path / "file.h5")
    mpistrat.training.load([w], tmp_path / "file.h5")
    assert own(w).tolist() == [0, 1, 2]


def test_metrics(cupy, on_gpu):
    with on_gpu.scope():
        accuracy = mpistrat.metrics.SparseCategoricalAccuracy()
        loss = mpistrat.metrics.Mean()
    labels, outputs = cupy.asarray(np.array([1, 0])), cupy.asarray(np.array([[0, 1.0], [0, 1]]))
    on_gpu.run(lambda: accuracy.update_state(labels, outputs))
    on_gpu.run(lambda: loss.update_state(cupy.full(4, float(RANK))))
    assert float(accuracy.result()) == 0.5
    assert float(loss.result()) == (SIZE - 1) / 2


# --- optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_steps_as_on_the_host(cupy, on_gpu, monkeypatch, name, dtype):
    """In one launch for all variables. Half precision is computed in float32, which the host's is not."""
    half = dtype not in (np.float32, np.float64)
    if half and name not in ("sgd", "momentum", "nesterov"):
        return  # on the host the second moment vanishes
    launches = []
    original = kernels.EachElement.launch
    monkeypatch.setattr(kernels.EachElement, "launch", lambda *args: (launches.append(args[0]), original(*args))[1])
    found = []
    for place, strategy in ((cupy.asarray, on_gpu), (np.asarray, mpistrat.MultiWorkerMirroredStrategy(device="cpu"))):
        random = np.random.default_rng(RANK)
        with strategy.scope():
            variables = [mpistrat.Variable(np.ones(n, dtype)) for n in (3, 10_000, 1, 0)]
            optimizer = OPTIMIZERS[name]()
        for _ in range(3):
            gradients = [place(random.standard_normal(v.shape).astype(dtype)) for v in variables]
            launches.clear()
            strategy.run(lambda o=optimizer, g=gradients, v=variables: o.apply_gradients(zip(g, v, strict=True)))
            if strategy is on_gpu:
                assert len(launches) == 2  # to pack and to update
        assert optimizer.iterations == 3
        found.append([np.asarray(v).astype(np.float64) for v in (*variables, *optimizer.variables)])
    limit = 0.02 if half else 1e-12 if dtype is np.float64 else 1e-6
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)


def test_sparse_gradients_and_several_dtypes(cupy, on_gpu):
    for name in ("sgd", "adam"):
        found = []
        for strategy in (on_gpu, mpistrat.MultiWorkerMirroredStrategy(device="cpu")):
            place = cupy.asarray if strategy is on_gpu else np.asarray
            with strategy.scope():
                table = mpistrat.Variable(np.ones((6, 2)))
                single = mpistrat.Variable(np.ones(5, np.float32))
                double = mpistrat.Variable(np.ones(4))
                optimizer = OPTIMIZERS[name]()
            rows = mpistrat.IndexedSlices(place(np.full((2, 2), RANK + 1.0)), place(np.array([RANK, 4])), (6, 2))
            pairs = [(rows, table), (place(np.ones(5, np.float32)), single), (place(np.ones(4)), double)]
            for _ in range(2):
                strategy.run(lambda o=optimizer, p=pairs: o.apply_gradients(p))
            found.append([np.asarray(v) for v in (table, single, double)])
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_gradients_that_do_not_fit(cupy, on_gpu):
    with on_gpu.scope():
        v = mpistrat.Variable(np.ones(3), name="v")
        optimizer = SGD(0.1)
    for wrong in (cupy.ones(4), cupy.ones(3, complex)):
        with pytest.raises(ValueError, match="'v'"):
            on_gpu.run(lambda wrong=wrong: optimizer.apply_gradients([(wrong, v)]))
    on_gpu.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))  # of the host
    np.testing.assert_allclose(own(v), 1 - 0.1 * SIZE)


def test_half_precision_in_kernels(cupy):
    """Every float16 and bfloat16 survives the way to float32 and back; what lies between rounds to even."""
    add = kernels.EachElement("test_add", ["a", "b"], ["b"], [], "b = a + b;")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        every = np.arange(1 << 16).astype(np.uint16).view(dtype)
        other = np.resize(np.random.default_rng(0).permutation(every), every.shape)
        with np.errstate(all="ignore"):
            for b in (np.zeros_like(every), other):
                got = cupy.asarray(b)
                add([[cupy.asarray(every)], [got]])
                want = (every.astype(np.float32) + b.astype(np.float32)).astype(dtype)
                got = got.get()
                undefined = np.isnan(want.astype(np.float32))
                assert (np.isnan(got.astype(np.float32)) == undefined).all()
                np.testing.assert_array_equal(got.view(np.uint16)[~undefined], want.view(np.uint16)[~undefined])


# --- buffers -----------------------------------------------------------------------------------------------


def test_buffers(cupy, on_gpu, monkeypatch):
    like = {"a": cupy.ones((3, 2), np.float32), "b": [cupy.ones(64, np.float32), cupy.ones(5)]}
    buffers = on_gpu.experimental_buffers_like(like)
    launches = []
    monkeypatch.setattr(kernels.EachElement, "launch", lambda *args: launches.append(args))
    for _ in range(2):
        buffers["a"][...] = RANK
        buffers["b"][0][...] = 1
        buffers["b"][1][...] = 2
        got = on_gpu.reduce("SUM", buffers, axis=None)
        assert got["a"] is buffers["a"]
        assert got["a"].tolist() == [[sum(range(SIZE))] * 2] * 3
        assert got["b"][0].tolist() == [SIZE] * 64
        assert got["b"][1].tolist() == [2 * SIZE] * 5
    assert not launches  # nothing is packed
    mixed = on_gpu.reduce("MEAN", [buffers["a"], cupy.ones(2)], axis=None)
    assert mixed[0] is buffers["a"]
    assert mixed[1].tolist() == [1, 1]
    arenas = on_gpu.extended.engine.arenas
    before = len(arenas)
    del buffers, got, mixed
    assert len(arenas) == before - 1
    with pytest.raises(ValueError, match="2 of 3 arrays live on a GPU"):
        on_gpu.experimental_buffers_like([cupy.ones(1), cupy.ones(2), np.ones(3)])
