"""Device pointers by a CUDA-aware MPI, as `test_gpu_collectives` has it; the stand-in's are pointers of the host.

On a GPU where the environment says that this MPI library can (MPISTRAT_GPU_DIRECT=on).
"""

import os

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.arrays.gpu import pinned
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.gpu.all_reduce import Obstacles
from mpistrat.experimental import CommunicationOptions

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
USER_SAYS_CUDA_AWARE = os.environ.get("MPISTRAT_GPU_DIRECT") == "on"
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.complex64]
LENGTHS = (1, 0, 777, 40_001, 5)
FIRST = mpistrat.VariableAggregation.ONLY_FIRST_REPLICA


def values_of(rank, dtype, lengths=LENGTHS):
    random = np.random.default_rng(rank)
    return [(100 * random.standard_normal(length)).astype(dtype).reshape(-1, 1) for length in lengths]


def strategy_with(comm=None, **options):
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=CommunicationOptions(**options))


def assert_equal(cupy, got, want):
    assert type(got) is cupy.ndarray
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.get(), want)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A new cache of verdicts, and no wish of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MPISTRAT_GPU_DIRECT", raising=False)


def by_moves(implementation="auto"):
    """A strategy on a communicator of which nothing is known yet."""
    return strategy_with(MPI.COMM_WORLD.Dup(), implementation=implementation)


def is_cuda_aware(cupy):
    """Whether device pointers may be given to this MPI library: those of the fake are pointers of the host."""
    return hasattr(cupy.cuda.runtime, "gpus")


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_moves_of_device_pointers(cupy, cache, monkeypatch, op):
    """On a GPU where the environment says that this MPI library can (MPISTRAT_GPU_DIRECT=on)."""
    if not (is_cuda_aware(cupy) or USER_SAYS_CUDA_AWARE):
        return
    monkeypatch.setattr("mpistrat.collectives.gpu.pointers._idle", {})
    monkeypatch.setenv("MPISTRAT_GPU_DIRECT", "on")
    monkeypatch.setattr("mpistrat.collectives.gpu.pointers.PIECE_BYTES", 40_000)
    strategy, host = by_moves("gpu_direct"), strategy_with(implementation="ordered")
    for dtype in DTYPES:
        mine = values_of(RANK, dtype)
        got = strategy.reduce(op, [cupy.asarray(value) for value in mine], axis=None)
        for one, other in zip(got, host.reduce(op, mine, axis=None), strict=True):
            assert_equal(cupy, one, other)  # both add up in the order of ranks
    strategy.comm.Free()


@pytest.fixture
def pointers(cupy, cache, monkeypatch):
    """A strategy whose moves go by device pointers in small pieces, and which of them were made."""
    if not (is_cuda_aware(cupy) or USER_SAYS_CUDA_AWARE):
        yield None, []
        return
    monkeypatch.setattr(gpu_pointers, "_idle", {})
    monkeypatch.setattr(gpu_pointers, "PIECE_BYTES", 4096)
    monkeypatch.setenv("MPISTRAT_GPU_DIRECT", "on")
    strategy = by_moves()
    yield strategy, counted(monkeypatch)
    strategy.comm.Free()


def counted(monkeypatch):
    """The names of the moves by device pointers from now on."""
    made = []
    for name in ("all_to_all", "all_gather", "all_gather_uneven", "broadcast"):
        original = getattr(gpu_pointers, name)
        monkeypatch.setattr(
            gpu_pointers, name, lambda *args, name=name, original=original: (made.append(name), original(*args))[1]
        )
    return made


def reduce_scatter(strategy, op, value):
    return strategy.run(lambda: mpistrat.get_replica_context().experimental_reduce_scatter(op, value))


@pytest.mark.parametrize("dtype", [*DTYPES, np.bool_])
@pytest.mark.parametrize("lengths", ["even", "uneven", "none of one", "none"])
def test_all_gather(cupy, pointers, monkeypatch, dtype, lengths):
    strategy, made = pointers
    if strategy is None:
        return
    rows = {"even": 700, "uneven": 500 * RANK + 3, "none of one": 60 * (RANK != 0), "none": 0}[lengths]
    whole = (100 * np.random.default_rng(RANK).standard_normal((rows, 5))).astype(dtype)
    monkeypatch.setattr(pinned, "download", None)  # nothing goes by the host
    for value, of_cupy, axis in (
        (whole, cupy.asarray(whole), 0),
        (whole.T, cupy.asarray(whole).T, -1),
        (whole[:, ::2], cupy.asarray(whole)[:, ::2], 0),
    ):
        want = strategy_with().gather(np.ascontiguousarray(value), axis=axis)
        assert_equal(cupy, strategy.gather(of_cupy, axis=axis), want)
    same = lengths in ("even", "none")
    if SIZE > 1 and lengths != "none":
        assert set(made) >= {"all_gather" if same else "all_gather_uneven"}
    assert bool(made) == (SIZE > 1 and lengths != "none")


@pytest.mark.parametrize("dtype", [*DTYPES, np.bool_])
def test_broadcast(cupy, pointers, monkeypatch, dtype):
    """Of a value, of what replica 0 assigns to a variable, and of a variable that is read."""
    strategy, made = pointers
    if strategy is None:
        return
    monkeypatch.setattr(pinned, "download", None)
    first, mine = values_of(0, dtype)[3], values_of(RANK, dtype)[3]
    assert_equal(cupy, strategy.extended.broadcast_to(cupy.asarray(mine), "cpu:0").values[0], first)
    scalar = strategy.extended.broadcast_to(cupy.asarray(mine[0, 0]), "cpu:0").values[0]
    assert_equal(cupy, scalar, first[0, 0, ...])
    assert strategy.extended.broadcast_to(cupy.asarray(mine[:0]), "cpu:0").values[0].shape == (0, 1)
    assert made == ["broadcast"] * len(made)
    assert bool(made) == (SIZE > 1)


def test_broadcast_of_variables(cupy, cache, monkeypatch):
    if not (is_cuda_aware(cupy) or USER_SAYS_CUDA_AWARE):
        return
    monkeypatch.setenv("MPISTRAT_GPU_DIRECT", "on")
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup(), device="cuda:0")
    with strategy.scope():
        mirrored = mpistrat.Variable(np.zeros(3), aggregation=FIRST)
        own = mpistrat.Variable(
            np.zeros(3), synchronization=mpistrat.VariableSynchronization.ON_READ, aggregation=FIRST
        )
    made = counted(monkeypatch)
    for value in (cupy.full(3, RANK + 1.0), np.full(3, RANK + 1.0)):  # on the host it goes to the GPU first
        strategy.run(lambda value=value: mirrored.assign(value))
        assert mirrored.numpy().tolist() == [1] * 3
        mirrored.assign(np.zeros(3))
    strategy.run(lambda: own.assign(cupy.full(3, RANK + 1.0)))
    assert own.read_value().tolist() == [1] * 3
    assert made == ["broadcast"] * (3 if SIZE > 1 else 0)
    strategy.comm.Free()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(cupy, pointers, monkeypatch, op, dtype):
    """Added up in the order of ranks, as on the host of one node; parts differ by a row, or are empty."""
    strategy, made = pointers
    if strategy is None:
        return
    monkeypatch.setattr(pinned, "download", None)
    for rows in (4 * SIZE, 4 * SIZE + 1, SIZE - 1, 0, 1009):
        mine = (100 * np.random.default_rng(RANK).standard_normal((rows, 3))).astype(dtype)
        assert_equal(cupy, reduce_scatter(strategy, op, cupy.asarray(mine)), reduce_scatter(strategy_with(), op, mine))
    assert made == ["all_to_all"] * len(made)
    assert bool(made) == (SIZE > 1)


def test_rows_of_all_replicas(cupy, pointers):
    strategy, made = pointers
    if strategy is None:
        return
    rows = mpistrat.IndexedSlices(cupy.full((RANK + 1, 2), RANK + 1.0), cupy.full(RANK + 1, RANK), (SIZE, 2))
    total = strategy.reduce("MEAN", rows, axis=None)
    assert type(total.values) is type(total.indices) is cupy.ndarray
    assert total.to_dense().tolist() == [[(rank + 1) ** 2 / SIZE] * 2 for rank in range(SIZE)]
    assert bool(made) == (SIZE > 1)


def test_what_the_stream_still_does_comes_before_a_move(cupy, pointers):
    """The value is written by work that waits in the caller's stream, of which there are two."""
    strategy, _ = pointers
    if strategy is None or not hasattr(cupy.cuda.Stream.null, "put"):
        return
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            for call, want in (
                (lambda x: strategy.gather(x, axis=0), 7.0),
                (lambda x: strategy.extended.broadcast_to(x, "cpu:0").values[0], 7.0),
                (lambda x: reduce_scatter(strategy, "SUM", x), 7.0 * SIZE),
            ):
                value = cupy.zeros(5_000, np.float32)
                stream.put(lambda value=value: value._host.fill(7))
                got = call(value)
                value[...] = 0
                assert (got.get() == want).all()


def test_moves_that_do_not_fit_together(cupy, pointers):
    strategy, _ = pointers
    if strategy is None or SIZE == 1:
        return
    with pytest.raises(ValueError, match=r"(?s)do not fit together.*all_gather on GPUs"):
        strategy.gather(cupy.ones((2, 3 + RANK)), axis=0)
    with pytest.raises(ValueError, match=r"(?s)do not fit together.*broadcast on GPUs"):
        strategy.extended.broadcast_to(cupy.ones(3 + RANK), "cpu:0")
    with pytest.raises(ValueError, match=r"(?s)do not fit together.*reduce_scatter on GPUs"):
        reduce_scatter(strategy, "SUM", cupy.ones(3 + RANK))
    with pytest.raises(RuntimeError, match=r"(?s)ranks? 0.*all_gather on GPUs"):
        strategy.gather(np.ones(3) if RANK == 0 else cupy.ones(3), axis=0)
    with pytest.raises(ValueError, match="scalar"):
        strategy.gather(cupy.asarray(np.float32(1)), axis=0)
    with pytest.raises(ValueError, match="scalar"):
        reduce_scatter(strategy, "SUM", cupy.asarray(np.float32(1)))
    with pytest.raises(TypeError, match="bool"):
        reduce_scatter(strategy, "SUM", cupy.ones(3, bool))


def test_each_operation_is_trusted_for_itself(cupy, cache, monkeypatch):
    """What is not known to work goes by the host, with the same results."""
    if SIZE == 1 or not is_cuda_aware(cupy):
        return
    works = gpu_pointers.WORKS
    calls = {
        "Allgather": lambda strategy: strategy.gather(cupy.full(3, RANK), axis=0),
        "Allgatherv": lambda strategy: strategy.gather(cupy.full(RANK + 1, RANK), axis=0),
        "Bcast": lambda strategy: strategy.extended.broadcast_to(cupy.full(3, RANK), "cpu:0").values[0],
        "Alltoall": lambda strategy: reduce_scatter(strategy, "SUM", cupy.full(4 * SIZE, RANK)),
    }
    assert set(calls) == set(gpu_pointers.OPERATIONS)
    names = {
        "Allgather": "all_gather",
        "Allgatherv": "all_gather_uneven",
        "Bcast": "broadcast",
        "Alltoall": "all_to_all",
    }
    want = {name: call(by_moves()).get() for name, call in calls.items()}
    made = counted(monkeypatch)
    for one in calls:
        strategy = by_moves()
        if RANK == 0:
            key = gpu_pointers.key_of(strategy.extended.engine.topology, 0)
            others = dict.fromkeys(set(calls) - {one}, "gives wrong values")
            gpu_pointers.write_verdicts(key, {one: works, **others})
        strategy.barrier()
        for name, call in calls.items():
            made.clear()
            assert_equal(cupy, call(strategy), want[name])
            assert made == [names[one]] * (name == one)
        strategy.comm.Free()


def test_only_what_was_tried_is_used(cupy, cache, monkeypatch, capsys):
    from mpistrat.cli.check import gpu_probe

    if SIZE == 1 or not is_cuda_aware(cupy):
        return
    monkeypatch.setattr(cupy.cuda.runtime, "gpus", ["shared"])  # NCCL refuses
    monkeypatch.setattr(gpu_pointers, "PIECE_BYTES", 1 << 20)  # the probe's largest message

    def fails(text):
        strategy = by_moves("gpu_direct")
        with pytest.raises(RuntimeError, match=text):
            strategy.reduce("SUM", cupy.ones(3), axis=None)
        by_itself = strategy_with(strategy.comm)
        assert by_itself.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
        strategy.comm.Free()

    fails("Alltoall.*was not tried here: run mpistrat check --gpu-direct")
    assert gpu_probe.main() == 0
    if RANK == 0:
        assert "Allgather on the memory of GPUs works" in capsys.readouterr().out
    strategy = by_moves("gpu_direct")
    topology = strategy.extended.engine.topology
    assert strategy.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    assert strategy_with(strategy.comm).reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    assert topology.slot(Obstacles)[0]["gpu_direct"] == ""
    monkeypatch.setenv("MPISTRAT_GPU_DIRECT", "off")
    fails("MPISTRAT_GPU_DIRECT is off")
    monkeypatch.setenv("MPISTRAT_GPU_DIRECT", "auto")
    if RANK == 0:  # a library that crashes leaves this
        gpu_pointers.write_verdicts(
            gpu_pointers.key_of(topology, 0), {"Alltoall": "works", "Allgather": gpu_pointers.TRYING}
        )
    fails("Allgather.*was tried, and did not come back")
    assert gpu_probe.main() == 0
    if RANK == 0:  # what did not come back last
        order = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]
        assert order == ["Alltoall", "Allgatherv", "Bcast", "Allgather"]
    if RANK == 0:
        gpu_pointers.path_of_verdicts(gpu_pointers.key_of(topology, 0)).write_text("{")
    fails("was not tried here")
    assert gpu_probe.main() == 0
    for name in ("MPICH_GPU_SUPPORT_ENABLED", "UCX_TLS", "OMPI_MCA_pml"):  # of which each turns support on or off
        with monkeypatch.context() as other:
            other.setenv(name, "other")
            fails("was not tried here")
    with monkeypatch.context() as other:
        other.setattr(gpu_pointers, "PIECE_BYTES", 1 << 10)
        fails("was not tried here")
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")  # does not matter
    assert by_moves("gpu_direct").reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    monkeypatch.setattr(cupy.cuda.runtime, "driver", 13000)  # another driver, and all is to be tried again
    fails("was not tried here")
    monkeypatch.setattr(cupy.cuda.runtime, "driver", 12000 + RANK)
    fails("of several kinds")
    strategy.comm.Free()
