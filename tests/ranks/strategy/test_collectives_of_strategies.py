"""Reductions by MAX, MIN and PROD, broadcasts, gathers and scatters of a strategy give what NumPy gives serially."""

import dataclasses

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.operation import MismatchError

pytestmark = pytest.mark.four_ranks

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
LAST = SIZE - 1
ORACLES = {"MAX": np.max, "MIN": np.min, "PROD": np.prod}
LAYOUTS = layouts("0000", "0011", "0010")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


@pytest.fixture(scope="module", params=LAYOUTS)
def strategy(request):
    comm = on_nodes(request.param, chunk_bytes=1000, message_bytes=700)
    yield mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    comm.Free()


def values_of(rank, dtype=np.float64, shape=(3, 5)):
    count = int(np.prod(shape))
    return (((np.arange(count) * 7 + rank * 5) % 11) % 3 + rank + 1).reshape(shape).astype(dtype)


def everyone(*arguments, **more):
    return [values_of(rank, *arguments, **more) for rank in range(SIZE)]


# --- reductions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int64"])
def test_further_reductions(strategy, name, dtype):
    expected = ORACLES[name](everyone(dtype), axis=0).astype(dtype)
    own = values_of(RANK, dtype)
    ways = [
        lambda: strategy.all_reduce(name, own),
        lambda: strategy.all_reduce(name.lower(), {"a": [own]})["a"][0],
        lambda: strategy.all_reduce(name, mpistrat.PerReplica((own,))),
        lambda: strategy.reduce(name, own, axis=None),
        lambda: strategy.run(lambda: mpistrat.get_replica_context().all_reduce(name, own)),
        lambda: strategy.extended.reduce_to(name, own, "cpu:0").values[0],
    ]
    for way in ways:
        got = way()
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_further_reductions_over_axes_of_other_lengths(strategy, name, axis, dtype):
    """Rank 0 has no rows, and the rank after it has the most."""
    rows = [values_of(rank, dtype, (SIZE - rank if rank else 0, 4)) for rank in range(SIZE)]
    if axis in (1, -1):
        rows = [each.T for each in rows]
    if SIZE == 1 and name != "PROD":
        with pytest.raises(ValueError, match="no values on any replica"):
            strategy.reduce(name, rows[RANK], axis)
        return
    expected = ORACLES[name](np.concatenate(rows, axis=1 if axis in (1, -1) else 0), axis=axis)
    got = strategy.reduce(name, rows[RANK], axis)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_numbers_and_mirrored_values(strategy):
    assert strategy.all_reduce("MAX", 0.1 * (RANK + 1)) == 0.1 * SIZE
    assert strategy.all_reduce("MIN", RANK) == 0
    mirrored = strategy.extended.reduce_to("MAX", float(RANK), "cpu:0")
    assert strategy.all_reduce("MIN", [mirrored, RANK]) == [LAST, 0]
    assert strategy.reduce("MAX", mirrored, axis=None) == LAST
    with pytest.raises(ValueError, match="PROD of a mirrored"):
        strategy.all_reduce("PROD", mirrored)


def test_nan_is_not_lost(strategy):
    own = np.array([1.0, np.nan if RANK == LAST else 2.0])
    for name in ("MAX", "MIN"):
        assert np.isnan(strategy.all_reduce(name, own)).tolist() == [False, True]
        assert np.isnan(strategy.reduce(name, own, axis=0))


@pytest.mark.parametrize("implementation", ["ordered", "exact"])
def test_options_of_a_call(strategy, implementation):
    options = CommunicationOptions(implementation=implementation)
    own = np.float32(0.1) * np.arange(1, 5, dtype=np.float32) * (RANK + 1)
    assert strategy.all_reduce("MAX", own, options).tolist() == (own / (RANK + 1) * SIZE).tolist()
    if implementation == "exact" and SIZE > 1:
        with pytest.raises(ValueError, match="PROD"):
            strategy.all_reduce("PROD", own, options)


def test_what_has_no_order_is_refused(strategy):
    for value in (1j, np.array([True]), "text"):
        with pytest.raises(TypeError):
            strategy.all_reduce("MAX", value)
    with pytest.raises(ValueError, match="'PROD'"):
        strategy.all_reduce("LARGEST", 1.0)
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(lambda: strategy.all_reduce("MAX", 1.0))
    strategy.barrier()


@several
def test_other_ops_on_other_ranks_raise(strategy):
    with pytest.raises(MismatchError, match="MIN"):
        strategy.all_reduce("MIN" if RANK else "MAX", 1.0)
    with pytest.raises(MismatchError):
        strategy.reduce("MIN" if RANK else "MAX", np.ones(3), axis=0)
    assert strategy.all_reduce("MAX", RANK) == LAST


# --- broadcast -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    first: object
    second: object


@pytest.mark.parametrize("src", sorted({0, LAST}))
def test_broadcast_of_a_structure(strategy, src):
    def tree(rank):
        return {"a": Pair(values_of(rank), None), "b": [np.float32(rank), rank, values_of(rank, "c8", (0, 2))]}

    got, expected = strategy.broadcast(tree(RANK), src), tree(src)
    np.testing.assert_array_equal(got["a"].first, expected["a"].first)
    assert got["a"].second is None
    assert got["b"][:2] == [src, src]
    assert got["b"][2].shape == (0, 2)


def test_broadcast_of_variables_and_distributed_values(strategy):
    with strategy.scope():
        variable = mpistrat.Variable(5.0)
    got = strategy.broadcast([variable, mpistrat.PerReplica((RANK,))], LAST)
    assert got == [5.0, LAST]
    assert strategy.broadcast([], 0) == []


def test_large_broadcast(strategy):
    own = values_of(RANK, shape=(300, 1000))
    np.testing.assert_array_equal(strategy.broadcast(own, LAST), values_of(LAST, shape=(300, 1000)))


def test_objects(strategy):
    objects = [{"rank": rank, "name": "x" * rank} for rank in range(SIZE)]
    assert strategy.gather_object(objects[RANK]) == objects
    assert strategy.gather_object(objects[RANK], dst=LAST) == (objects if RANK == LAST else None)
    assert strategy.broadcast_object(objects[RANK], LAST) == objects[LAST]


# --- gather and scatter --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dst", sorted({0, LAST}))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_to_one(strategy, dst, axis):
    shapes = [{0: (rank, 2, 3), 1: (2, rank, 3), -1: (2, 3, rank)}[axis] for rank in range(SIZE)]
    parts = [values_of(rank, "f4", shape) for rank, shape in enumerate(shapes)]
    got = strategy.gather({"a": parts[RANK], "b": [-parts[RANK]]}, axis, dst=dst)
    if dst != RANK:
        assert got is None
        return
    np.testing.assert_array_equal(got["a"], np.concatenate(parts, axis))
    np.testing.assert_array_equal(got["b"][0], -np.concatenate(parts, axis))


@pytest.mark.full
@pytest.mark.parametrize("src", sorted({0, LAST}))
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("rows", [0, 7, 400])
def test_scatter_and_back(strategy, src, axis, rows):
    shape = {0: (rows, 3, 2), 1: (3, rows, 2), -1: (3, 2, rows)}[axis]
    whole = {"a": values_of(9, shape=shape), "b": [values_of(8, "i2", shape)]}
    got = strategy.scatter(whole if src == RANK else None, axis, src)
    lengths = [rows // SIZE + (rank < rows % SIZE) for rank in range(SIZE)]
    start = sum(lengths[:RANK])
    for part, all_of_it in ((got["a"], whole["a"]), (got["b"][0], whole["b"][0])):
        assert part.dtype == all_of_it.dtype
        mine = np.take(all_of_it, range(start, start + lengths[RANK]), axis)
        np.testing.assert_array_equal(part, mine)
    np.testing.assert_array_equal(strategy.gather(got["a"], axis), whole["a"])


def test_scattered_arrays_are_copies(strategy):
    whole = np.zeros(SIZE)
    part = strategy.scatter(whole)
    part += 1
    assert whole.tolist() == [0] * SIZE


# --- wrong arguments -----------------------------------------------------------------------------------


def calls(strategy, value, rank):
    yield lambda: strategy.broadcast(value, rank)
    yield lambda: strategy.scatter(value, 0, rank)
    yield lambda: strategy.gather(value, 0, dst=rank)
    yield lambda: strategy.gather_object(value, rank)
    yield lambda: strategy.broadcast_object(value, rank)


@pytest.mark.parametrize(("rank", "error"), [(SIZE, ValueError), (-1, ValueError), (True, TypeError), ("0", TypeError)])
def test_ranks_that_are_not_replicas(strategy, rank, error):
    for call in calls(strategy, np.ones(3), rank):
        with pytest.raises(error, match="replica"):
            call()
    strategy.barrier()


def test_values_that_cannot_be_sent(strategy):
    objects, rows = np.array([None]), mpistrat.IndexedSlices(np.ones((1, 2)), [0], (4, 2))
    for value in (objects, rows, {"a": [objects]}):
        for call in [*calls(strategy, value, 0)][:3]:
            with pytest.raises((TypeError, NotImplementedError, MismatchError)):
                call()
    for way in (lambda: strategy.scatter(1.0), lambda: strategy.gather(1.0, 0, dst=0)):
        with pytest.raises((ValueError, MismatchError)):
            way()
    strategy.barrier()


def test_numbers_of_replicas_and_axes_may_be_scalars_of_numpy(strategy):
    number = np.int64 if RANK else int
    for call in calls(strategy, np.ones(3), number(LAST)):
        call()
    assert len(strategy.scatter(np.ones(2 * SIZE), number(0))) == 2


def test_only_outside_of_replica_functions(strategy):
    for call in calls(strategy, np.ones(3), 0):
        with pytest.raises(RuntimeError, match="cross-replica"):
            strategy.run(call)


@several
def test_one_wrong_rank_stops_all(strategy):
    bad = np.ones(3) if RANK else np.array([None])
    other = {"b" if RANK else "a": np.ones(2)}
    ways = [
        *[*calls(strategy, bad, 0)][:3],
        *calls(strategy, np.ones(3), SIZE if RANK else 0),
        lambda: strategy.broadcast(other),
        lambda: strategy.gather(other, 0, dst=0),
        lambda: strategy.broadcast(np.ones(2 + RANK % 2)),
        lambda: strategy.gather(np.ones((2, 2 + RANK % 2)), 0, dst=0),
        lambda: strategy.gather(np.ones(2), 0, dst=RANK % 2),
        lambda: strategy.scatter(np.ones(2), 0, RANK % 2),
        lambda: strategy.scatter(np.ones((2, 2)), RANK % 2),
        lambda: strategy.gather_object(1, RANK % 2),
        lambda: strategy.gather_object(1 if RANK else lambda: 1),  # which cannot be pickled
        lambda: strategy.gather_object(1 if RANK else lambda: 1, LAST),
        lambda: strategy.broadcast_object(lambda: 1),
        lambda: strategy.barrier() if RANK else strategy.scatter(np.ones(3)),
    ]
    for way in ways:
        with pytest.raises(MismatchError):
            way()
    strategy.barrier()
