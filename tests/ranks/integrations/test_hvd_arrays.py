"""Horovod's calls on NumPy arrays give what NumPy gives serially; ranks that disagree raise."""

import pathlib

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
import mpistrat.integrations.hvd as hvd
from mpistrat.data import Dataset
from mpistrat.runtime.agreement.operation import MismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
pytestmark = pytest.mark.full
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
OPS = {hvd.Sum: np.sum, hvd.Average: np.mean, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}


@pytest.fixture(autouse=True)
def initialized():
    hvd.init()


def of_rank(rank, dtype=np.float64, shape=(3, 5)):
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 5) % 4 - 1 + rank).reshape(shape).astype(dtype)


def everyone(dtype=np.float64, shape=(3, 5)):
    return np.stack([of_rank(rank, dtype, shape) for rank in range(SIZE)])


# --- places --------------------------------------------------------------------------------------------


def test_places():
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()


def test_init_and_shutdown_in_turns():
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"hvd.init"):
            hvd.rank()
        with pytest.raises(ValueError, match=r"hvd.init"):
            hvd.allreduce(1.0)
        hvd.init()
        hvd.init()
        assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE
    with pytest.raises(TypeError, match="process_sets"):
        hvd.shutdown() or hvd.init(comm=[0])


def test_names_that_are_left_out_say_what_to_use():
    advised = {"elastic": "ElasticLoop", "SyncBatchNorm": "torch.nn", "start_timeline": "trace"}
    advised["ElasticSampler"] = r"experimental_distribute_dataset\(\), whose state\(\) and restore\(\)"
    advised["callbacks"] = "use mpistrat.integrations.hvd.keras.callbacks"
    for name, advice in advised.items():
        with pytest.raises(AttributeError, match=f"has no '{name}'.*{advice}"):
            getattr(hvd, name)
    distributed = mpistrat.MultiWorkerMirroredStrategy().experimental_distribute_dataset(Dataset.range(4).batch(2))
    distributed.restore(distributed.state())
    assert (pathlib.Path(hvd.__file__).parent / "keras" / "callbacks.py").exists()
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        hvd.nonsense  # noqa: B018


# --- reductions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 0), (40, 50)])
def test_allreduce(op, dtype, shape):
    own = of_rank(RANK, dtype, shape)
    expected = OPS[op](everyone("float64", shape), axis=0).astype(dtype)  # integers are cut towards 0
    got = hvd.allreduce(own, op=op)
    assert np.asarray(got).dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=1e-3 if dtype == "float16" else 1e-6)
    np.testing.assert_array_equal(own, of_rank(RANK, dtype, shape))
    one, two = hvd.synchronize(hvd.grouped_allreduce_async([own, own[None]], op=op))
    np.testing.assert_array_equal(one, got)
    np.testing.assert_array_equal(two[0], got)
    handle = hvd.allreduce_async_(own, op=op)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is own
    np.testing.assert_array_equal(own, got)


def test_average_of_integers_does_not_overflow():
    assert hvd.allreduce(np.full(3, 100, np.int8)).tolist() == [100] * 3
    assert hvd.grouped_allreduce([np.full(2, 100, np.int8), np.full(1, 0.5)])[1].tolist() == [0.5]
    large = np.uint64(2**63 + 6)
    assert int(hvd.allreduce(large if RANK == 0 else np.uint64(0))) == int(large) // SIZE


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_scales(dtype):
    own = np.arange(6, dtype=dtype) * (RANK + 1)
    total = sum(range(1, SIZE + 1)) * np.arange(6)
    got = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    np.testing.assert_array_equal(got, total.astype(dtype))
    got = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5)
    np.testing.assert_array_equal(got, sum((np.arange(6) * (r + 1) * 0.5).astype(dtype) for r in range(SIZE)))


@pytest.mark.filterwarnings("ignore:`average` has been replaced:DeprecationWarning")
def test_former_argument():
    assert hvd.allreduce(1.0, average=False) == SIZE
    assert hvd.allreduce(1.0, average=True) == 1
    with pytest.raises(ValueError, match="Please provide only one"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match="Adasum"):
        hvd.allreduce(1.0, op="Sum")


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Max])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_reducescatter(rows, op, dtype):
    lengths = [rows // SIZE + (rank < rows % SIZE) for rank in range(SIZE)]
    start = sum(lengths[:RANK])
    expected = OPS[op](everyone("float64", (rows, 3)), axis=0).astype(dtype)
    got = hvd.reducescatter(of_rank(RANK, dtype, (rows, 3)), op=op, name="part")
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected[start : start + lengths[RANK]], rtol=1e-6)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.reducescatter(np.ones(3), op=hvd.Adasum)


def adasum(vectors):
    if len(vectors) == 1:
        return vectors[0]
    a, b = adasum(vectors[::2]), adasum(vectors[1::2])
    dot, na, nb = a @ b, a @ a, b @ b
    return (1 - dot / na / 2 if na else 1) * a + (1 - dot / nb / 2 if nb else 1) * b


def test_adasum():
    own = of_rank(RANK, "float64", (9,))
    if SIZE & (SIZE - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(own, op=hvd.Adasum)
        return
    vectors = [*everyone("float64", (9,))]
    if SIZE == 4:  # neighbours first, then pairs
        vectors = [vectors[i] for i in (0, 1, 2, 3)]
        expected = adasum([adasum(vectors[:2]), adasum(vectors[2:])])
    else:
        expected = adasum(vectors)
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Adasum), expected, rtol=1e-12)
    half = hvd.grouped_allreduce([own.astype("float16"), np.zeros((2, 2))], op=hvd.Adasum)
    np.testing.assert_allclose(half[0], expected, rtol=1e-2)
    assert not half[1].any()
    with pytest.raises(TypeError, match="int64"):
        hvd.allreduce(np.ones(3, np.int64), op=hvd.Adasum)


# --- moves ---------------------------------------------------------------------------------------------


def test_allgather():
    own = np.full((RANK, 2), RANK)
    expected = np.concatenate([np.full((rank, 2), rank) for rank in range(SIZE)])
    np.testing.assert_array_equal(hvd.allgather(own), expected)
    np.testing.assert_array_equal(hvd.synchronize(hvd.allgather_async(own, name="rows")), expected)
    (got,) = hvd.grouped_allgather([own])
    np.testing.assert_array_equal(got, expected)
    with pytest.raises((ValueError, MismatchError)):
        hvd.allgather(1.0)


@pytest.mark.parametrize("root", sorted({0, LAST}))
def test_broadcast(root):
    own = of_rank(RANK)
    np.testing.assert_array_equal(hvd.broadcast(own, root, name="start"), of_rank(root))
    np.testing.assert_array_equal(own, of_rank(RANK))
    assert hvd.broadcast_(own, root) is own
    np.testing.assert_array_equal(own, of_rank(root))
    assert hvd.broadcast_object({"rank": RANK}, root) == {"rank": root}
    assert hvd.allgather_object({"rank": RANK}, name="x") == [{"rank": rank} for rank in range(SIZE)]
    for wrong in (SIZE, -1):
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(own, wrong)


def test_alltoall():
    lengths = [(RANK + to) % 3 for to in range(SIZE)]
    own = np.repeat([10 * RANK + to for to in range(SIZE)], lengths)
    got, counts = hvd.alltoall(own, splits=lengths)
    expected = [(sender + RANK) % 3 for sender in range(SIZE)]
    assert np.asarray(counts).tolist() == expected
    assert got.tolist() == np.repeat([10 * sender + RANK for sender in range(SIZE)], expected).tolist()
    even = hvd.alltoall(np.repeat(np.arange(SIZE), 2)[:, None] * np.ones((1, 3)), name="even")
    assert even.shape == (2 * SIZE, 3)
    assert (even == RANK).all()
    for splits in ([1] * (SIZE + 1), [-1] * SIZE, [0.5] * SIZE):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(np.ones(SIZE), splits=splits)


# --- process sets --------------------------------------------------------------------------------------


def test_process_sets():
    even = hvd.add_process_set(range(0, SIZE, 2))
    if RANK % 2:
        assert not even.included()
        with pytest.raises(ValueError, match="is not in"):
            hvd.allreduce(1.0, process_set=even)
    else:
        ranks = [*range(0, SIZE, 2)]
        assert (even.included(), even.size(), even.rank()) == (True, len(ranks), RANK // 2)
        assert hvd.allreduce(RANK, op=hvd.Sum, process_set=even) == sum(ranks)
        assert hvd.allgather(np.array([RANK]), process_set=even).tolist() == ranks
        assert hvd.broadcast(RANK, ranks[-1], process_set=even) == ranks[-1]
        assert hvd.allgather_object(RANK, process_set=even) == ranks
        hvd.barrier(process_set=even)
        if SIZE > 1:
            with pytest.raises(ValueError, match="root_rank 1"):
                hvd.broadcast(RANK, 1, process_set=even)
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE
    with pytest.raises(ValueError, match="in use already"):
        hvd.add_process_set(range(0, SIZE, 2))
    with pytest.raises(ValueError, match="beyond"):
        hvd.add_process_set([0, SIZE])
    with pytest.raises(NotImplementedError, match="process sets"):
        hvd.join()
    empty = hvd.add_process_set([])
    assert (empty.included(), empty.size()) == (False, 0)
    assert hvd.remove_process_set(empty)
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert even.process_set_id is None
    with pytest.raises(ValueError, match="not in use"):
        hvd.allreduce(1.0, process_set=even)


def test_process_sets_of_init():
    hvd.shutdown()
    mine = hvd.ProcessSet([LAST])
    hvd.init(process_sets=[mine])
    assert mine.included() == (RANK == LAST)
    if RANK == LAST:
        assert hvd.allreduce(5.0, process_set=mine) == 5
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert mine.included() is None


@several
def test_other_process_sets_on_other_ranks_raise():
    with pytest.raises(MismatchError):
        hvd.add_process_set([min(RANK, 1)])
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


# --- join ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(SIZE))
def test_join(first):
    """One rank after the other has no more data; the last to join is told to all."""
    steps = (RANK - first) % SIZE
    for step in range(steps):
        here = SIZE - 1 - step  # ranks that have not joined
        assert hvd.allreduce(np.ones(3), op=hvd.Sum, name=f"step {step}").tolist() == [here] * 3
        assert hvd.allreduce(np.full(2, float(SIZE))).tolist() == [here] * 2
        one, two = hvd.grouped_allreduce([np.ones(2, np.float16), np.full((2, 2), SIZE)])
        assert (one == np.float16(here / SIZE)).all()
        assert (two == here).all()
    assert hvd.join() == (first - 1) % SIZE
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


@several
def test_other_collectives_do_not_go_on_without_ranks_that_joined():
    if RANK == 0:
        hvd.join()
        return
    calls = [
        lambda: hvd.allgather(np.ones(2)),
        lambda: hvd.broadcast(np.ones(2), 1, name="start"),
        lambda: hvd.alltoall(np.ones(SIZE)),
        lambda: hvd.reducescatter(np.ones(SIZE), name="rows"),
        lambda: hvd.allreduce(1.0, op=hvd.Max),
        lambda: hvd.allreduce("text"),
        lambda: hvd.broadcast(np.ones(2), SIZE),
        lambda: hvd.broadcast_object(1),
        hvd.barrier,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"\[0\] have joined"):
            call()
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE - 1
    hvd.join()


@several
@pytest.mark.ranks(min=3)
def test_ranks_that_disagree_while_one_has_joined_raise():
    if RANK == 0:
        with pytest.raises(MismatchError, match="first"):
            hvd.join()
    else:
        with pytest.raises(MismatchError, match="second"):
            hvd.allreduce(1.0, name="first" if RANK == 1 else "second")
    hvd.join()


@several
def test_ranks_that_do_not_notice_one_that_joined_raise():
    if RANK:
        with pytest.raises(MismatchError, match="join"):
            hvd.add_process_set([0])
    with pytest.raises(MismatchError, match="join"):
        hvd.join()
    hvd.barrier()


# --- ranks that disagree -------------------------------------------------------------------------------


@several
def test_names_in_another_order_raise_and_are_named():
    names = ["weights", "bias"]
    for call in (
        lambda name: hvd.allreduce(np.ones(3), name=name),
        lambda name: hvd.allreduce_async_(np.ones(3), name=name),
        lambda name: hvd.grouped_allreduce([np.ones(3)], name=name),
        lambda name: hvd.allgather(np.ones(3), name=name),
        lambda name: hvd.broadcast(np.ones(3), 0, name=name),
        lambda name: hvd.alltoall(np.ones(SIZE), name=name),
        lambda name: hvd.reducescatter(np.ones(3), name=name),
        lambda name: hvd.broadcast_object(1, name=name),
        lambda name: hvd.allgather_object(1, name=name),
    ):
        with pytest.raises(MismatchError, match="named weights") as caught:
            call(names[RANK == 0])
        assert "named bias" in str(caught.value)
        assert "test_hvd_arrays.py" in str(caught.value)
    hvd.barrier()


@several
def test_what_differs_on_one_rank_raises_on_all():
    odd = RANK == LAST
    ways = [
        lambda: hvd.allreduce(np.ones(3 + odd)),
        lambda: hvd.allreduce(np.ones(3, "f4" if odd else "f8")),
        lambda: hvd.allreduce(np.ones(3), op=hvd.Max if odd else hvd.Min),
        lambda: hvd.allreduce("text" if odd else np.ones(3)),
        lambda: hvd.allreduce(np.ones(3), name="x" if odd else None),
        lambda: hvd.allreduce(np.ones(3), prescale_factor=1.0 + odd),
        lambda: hvd.allreduce(np.ones(3), postscale_factor=1.0 + odd),
        lambda: hvd.allreduce(np.ones(3), postscale_factor="text" if odd else 1.0),
        lambda: hvd.allreduce(np.ones(3, int), op=hvd.Sum if odd else hvd.Average),
        lambda: hvd.reducescatter(np.ones(3, int), op=hvd.Sum if odd else hvd.Average),
        lambda: hvd.reducescatter(np.ones(3), postscale_factor=1.0 + odd),
        lambda: hvd.grouped_allreduce([np.ones(3)] * (1 + odd)),
        lambda: hvd.allgather(np.ones((2, 2 + odd))),
        lambda: hvd.broadcast(np.ones(3), int(odd)),
        lambda: hvd.broadcast(np.ones(3), SIZE if odd else 0),
        lambda: hvd.alltoall(np.ones((SIZE, 1 + odd))),
        lambda: hvd.alltoall(np.ones(SIZE), splits=[0] * SIZE if odd else [1] * SIZE),
        lambda: hvd.reducescatter(np.ones(3 + odd)),
        lambda: hvd.barrier() if odd else hvd.allreduce(1.0),
    ]
    for way in ways:
        with pytest.raises(MismatchError):
            way()
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE
