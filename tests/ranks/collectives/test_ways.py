"""Ways a user asks for: algorithms by name, further operations, limited patience."""

import hashlib
import os
import time

import ml_dtypes
import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CollectiveAllReduce
from mpistrat.collectives.algorithms.choose import ALGORITHMS
from mpistrat.collectives.asynchronous import InFlight
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.collective_lock import CollectiveLock

pytestmark = pytest.mark.four_ranks

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
LAYOUTS = layouts("0000", "0011", "0001", "0101", "0123")


def strategy_on(layout, **options):
    return mpistrat.MultiWorkerMirroredStrategy(
        comm=on_nodes(layout), communication_options=CommunicationOptions(**options)
    )


# --- by name ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", [*sorted({*ALGORITHMS} - {"identity"}), "LEADER", "ring"])
def test_algorithm_by_name(name):
    for layout in LAYOUTS:
        strategy = strategy_on(layout, implementation=name)
        for length in (1, 5_000, 300_001):
            for _ in range(2):
                assert (strategy.reduce("SUM", np.ones(length), axis=None) == SIZE).all()
        strategy.comm.Free()


def test_unknown_names(strategy, monkeypatch):
    with pytest.raises(ValueError, match=r"'fast' is not an implementation.*ordered"):
        CommunicationOptions(implementation="fast")
    with pytest.raises(ValueError, match="3"):
        CommunicationOptions(implementation=3)
    monkeypatch.setenv("MPISTRAT_ALL_REDUCE", "fast")
    with pytest.raises(ValueError, match="MPISTRAT_ALL_REDUCE=fast"):
        CommunicationOptions()


def test_algorithm_by_environment(monkeypatch):
    monkeypatch.setenv("MPISTRAT_ALL_REDUCE", "ordered")
    assert CommunicationOptions().algorithm == "ordered"
    assert CommunicationOptions(implementation="mpi").algorithm == "mpi"
    assert CommunicationOptions(implementation="ring").algorithm is None
    assert mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", 1.0, axis=None) == SIZE


def test_nccl_without_gpu(strategy):
    def fn():
        replica = mpistrat.get_replica_context()
        return replica.all_reduce("SUM", np.ones(3), CommunicationOptions(implementation="nccl"))

    if SIZE > 1:
        with pytest.raises(RuntimeError, match="NCCL"):
            strategy.run(fn)


def test_ranks_that_ask_for_different_algorithms(strategy):
    def fn():
        name = "mpi" if RANK == 0 else "hierarchical"
        options = CommunicationOptions(implementation=name)
        return mpistrat.get_replica_context().all_reduce("SUM", np.ones(3), options)

    if SIZE > 1:
        with pytest.raises(ValueError, match="do not fit together"):
            strategy.run(fn)


# --- the same bits ---------------------------------------------------------------------------------------

# Of the values of `nasty` on as many replicas, added in the order of ranks: for every MPI library.
DIGESTS = {1: "3313f48046c6871c", 2: "b37cde88c30a50fc", 3: "a73245c922928469", 4: "e87e37aed13af7aa"}


def nasty(rank, length, dtype):
    random = np.random.default_rng([rank, length])
    values = random.standard_normal(length) * 2.0 ** random.integers(-12, 12, length)
    return values.astype(dtype)


@pytest.mark.full
def test_ordered_gives_the_same_bits_on_every_layout():
    found = set()
    for layout in LAYOUTS:
        for bytes_per_pack in (0, 1000):
            strategy = strategy_on(layout, implementation="ordered", bytes_per_pack=bytes_per_pack)
            digest = hashlib.sha256()
            for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64):
                values = [nasty(RANK, length, dtype) for length in (1, 777, 40_001)]
                for op in ("SUM", "MEAN"):
                    for total in strategy.reduce(op, values, axis=None):
                        digest.update(total.tobytes())
            found.add(digest.hexdigest())
            values = [nasty(rank, 777, np.float32) for rank in range(SIZE)]
            want = values[0]
            for value in values[1:]:
                want = want + value
            np.testing.assert_array_equal(strategy.reduce("SUM", values[RANK], axis=None), want)
            strategy.comm.Free()
    assert len(found) == 1
    assert found.pop()[:16] == DIGESTS[SIZE]


# --- further operations ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [CollectiveAllReduce, mpistrat.HierarchicalCopyAllReduce, mpistrat.ReductionToOneDevice]
)
@pytest.mark.parametrize("algorithm", [None, "mpi", "ordered"])
@pytest.mark.parametrize(("name", "oracle"), [("MAX", np.max), ("min", np.min), ("Prod", np.prod)])
def test_further_operations(kind, algorithm, name, oracle):
    if kind is not CollectiveAllReduce and algorithm:
        return
    for layout in layouts("0000", "0101"):
        strategy = strategy_on(layout)
        ops = kind(algorithm) if algorithm else kind()
        ops = ops.bound_to(strategy.extended.engine.topology)
        for dtype in (np.float32, np.float16, np.int64, np.int8):
            values = [np.array([rank + 1, 3 - rank, rank % 2]).astype(dtype) for rank in range(SIZE)]
            got = ops.batch_reduce(name, [(values[RANK], "cpu:0")] * 2)
            for each in got:
                np.testing.assert_array_equal(each, oracle(values, axis=0).astype(dtype))
        if name != "Prod":
            value = np.array([1.0, np.nan if RANK == SIZE - 1 else 2.0])
            got = np.asarray(ops.reduce(name, value, "cpu:0"))
            assert got[0] == 1.0
            assert np.isnan(got[1])
            with pytest.raises(TypeError, match="no order"):
                ops.reduce(name, np.ones(1, complex), "cpu:0")
        with pytest.raises(ValueError, match="not a reduction"):
            strategy.reduce(f"{name}_OF_ALL", 1.0, axis=None)
        strategy.comm.Free()


@pytest.mark.full
@pytest.mark.parametrize("algorithm", [None, "leader", "hierarchical"])
def test_all_ranks_get_the_same_bits(algorithm):
    """Of products of complex numbers, and of zeros and NaN with either sign: these are not commutative."""
    rng = np.random.default_rng(RANK)
    signs = np.where(rng.random(300) < 0.5, -1.0, 1.0)
    cases = {
        "Prod": rng.normal(size=300) + 1j * rng.normal(size=300),
        "Max": np.concatenate([0 * signs, np.copysign(np.nan, signs)]),
    }
    for layout in LAYOUTS:
        strategy = strategy_on(layout)
        ops = CollectiveAllReduce(algorithm).bound_to(strategy.extended.engine.topology)
        for name, value in cases.items():
            for _ in range(2):
                got = np.asarray(ops.reduce(name, value, "cpu:0")).tobytes()
                assert set(MPI.COMM_WORLD.allgather(got)) == {got}, (layout, name)
        strategy.comm.Free()


def test_a_buffer_and_a_part_of_it_that_is_copied():
    """The part is that of the buffer before it was reduced."""
    for layout in LAYOUTS:
        strategy = strategy_on(layout)
        buffer = strategy.experimental_buffers_like(np.zeros((10, 20)))
        for parts in ([buffer, buffer[::2]], [buffer.T, buffer]):
            buffer[...] = 1
            for total in strategy.reduce("SUM", parts, axis=None):
                assert (total == SIZE).all(), layout
        strategy.comm.Free()


def test_left_by_an_error_between_nodes(monkeypatch):
    """The rank that left refuses all further work, since the others are in the middle of it; so here all leave."""
    if SIZE < 2:
        return
    strategy = strategy_on("0101"[:SIZE], implementation="hierarchical")
    if strategy.extended.engine.topology.memory is None:
        return

    def fails(*args):
        raise MemoryError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(CollectiveLock, "_token_of_next_meeting", fails)
        with pytest.raises(MemoryError):
            strategy.reduce("SUM", np.ones(100_000), axis=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"after a MemoryError .* not in step"):
            strategy.reduce("SUM", np.ones(100_000), axis=None)
    strategy.extended.engine.topology.lock.left = ""  # or the end of this program would end the job


def test_buffers_that_no_memory_holds(strategy):
    with pytest.raises(MemoryError):
        strategy.experimental_buffers_like(np.broadcast_to(0.0, 1 << 55))
    assert strategy.reduce("SUM", 1.0, axis=None) == SIZE


# --- limited patience ------------------------------------------------------------------------------------


def test_limited_patience_where_nobody_is_late():
    strategy = strategy_on("0011", timeout_seconds=60)
    buffer = strategy.experimental_buffers_like(np.zeros(5))
    for _ in range(3):
        assert strategy.reduce("SUM", 1.0, axis=None) == SIZE
        assert len(strategy.gather(np.ones(2), axis=0)) == 2 * SIZE
        buffer[:] = 1
        assert (strategy.reduce("SUM", buffer, axis=None) == SIZE).all()
    strategy.comm.Free()


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_is_named(comm, late):
    if late >= SIZE or SIZE == 1:
        return
    of_all = MPI.COMM_WORLD.Dup()
    patient = mpistrat.MultiWorkerMirroredStrategy(comm=of_all)
    assert patient.reduce("SUM", 1.0, axis=None) == SIZE
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        comm=of_all, communication_options=CommunicationOptions(timeout_seconds=0.3)
    )
    if late == RANK:
        comm.Barrier()  # until the others have given up
    with pytest.raises(TimeoutError) as caught:
        strategy.reduce("SUM", np.ones(3), axis=None)
    if late != RANK:
        comm.Barrier()
    text = str(caught.value)
    assert "all_reduce SUM float64[3]" in text
    assert "0.3 s" in text
    if late != RANK:
        assert f"rank {late} of {SIZE} did not come" in text or f"rank {late}, " in text or "ranks" in text
    for call in (strategy.barrier, lambda: strategy.reduce("SUM", 1.0, axis=None)):
        with pytest.raises(RuntimeError, match="after a time-out"):
            call()
    assert mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", 1.0, axis=None) == SIZE


SPARSE = mpistrat.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
LIMITED = {
    "a structure": lambda replica, options: replica.all_reduce("SUM", {"a": 1.0}, options),
    "a structure, gathered": lambda replica, options: replica.all_gather({"a": np.ones(2)}, 0, options),
    "a structure, scattered": lambda replica, options: replica.experimental_reduce_scatter(
        "SUM", [np.ones(2)], options
    ),
    "a structure, asynchronous": lambda replica, options: replica.experimental_all_reduce_async(
        "SUM", [np.ones(2)], options
    ).wait(),
    "sparse rows": lambda replica, options: replica.all_reduce("SUM", SPARSE, options),
    "sparse rows of extended": lambda replica, options: replica.merge_call(
        lambda strategy: strategy.extended.reduce_to("SUM", SPARSE, "cpu:0", options)
    ),
}


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(
    ("case", "ops"),
    [
        ("a structure", None),
        *(pytest.param(case, None, marks=pytest.mark.full) for case in LIMITED if case != "a structure"),
        pytest.param("sparse rows", mpistrat.ReductionToOneDevice, marks=pytest.mark.full),
    ],
)
def test_patience_of_one_call(comm, case, ops):
    call = LIMITED[case]
    strategy = mpistrat.MirroredStrategy(comm=MPI.COMM_WORLD.Dup(), cross_device_ops=ops and ops())
    in_replica(strategy, lambda replica: call(replica, CommunicationOptions(timeout_seconds=60)))
    if RANK == SIZE - 1:
        comm.Barrier()  # until the other has given up
    with pytest.raises(TimeoutError, match=r"did not come within 0\.2 s"):
        in_replica(strategy, lambda replica: call(replica, CommunicationOptions(timeout_seconds=0.2)))
    if RANK != SIZE - 1:
        comm.Barrier()


# --- asynchronous ----------------------------------------------------------------------------------------


def in_replica(strategy, fn):
    return strategy.run(lambda: fn(mpistrat.get_replica_context()))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_many_in_flight_waited_for_in_any_order(strategy, op):
    def fn(replica):
        values = [
            {
                "a": np.full((3, 5), i + RANK, dtype),
                "b": [np.full(2000 * i, float(i)), np.float32(RANK), np.ones((0, 2))],
            }
            for i, dtype in enumerate((np.float32, np.float64, np.int64, np.float16, ml_dtypes.bfloat16))
        ]
        pending = [replica.experimental_all_reduce_async(op, value) for value in values]
        for value in values:
            value["a"][...] = 99  # the values were copied
        assert replica.all_reduce("SUM", 1.0) == SIZE  # others go on meanwhile
        return [pending[i].wait() for i in (3, 1, 4, 0, 2)]

    for _ in range(2):
        for i, got in zip((3, 1, 4, 0, 2), in_replica(strategy, fn), strict=True):
            ranks = np.arange(SIZE)
            combined = np.sum if op == "SUM" else np.mean
            assert (got["a"].astype(float) == combined(i + ranks)).all() or got["a"].dtype.itemsize == 2
            assert abs(got["a"].astype(float) - combined(i + ranks)).max() < 0.05
            assert (got["b"][0] == i * (SIZE if op == "SUM" else 1)).all()
            assert got["b"][1] == np.float32(combined(ranks))
            assert got["b"][2].shape == (0, 2)
    assert not strategy.extended.engine.topology.slot(InFlight)


def test_pending(strategy):
    def fn(replica):
        pending = replica.experimental_all_reduce_async("SUM", np.ones(10))
        while not pending.test():
            pass
        assert pending.wait() is pending.wait()
        assert "done" in repr(pending)
        with pytest.raises(TypeError, match="IndexedSlices"):
            replica.experimental_all_reduce_async("SUM", mpistrat.IndexedSlices(np.ones((1, 2)), [0]))
        if SIZE > 1:
            with pytest.raises(ValueError, match="do not fit together"):
                replica.experimental_all_reduce_async("SUM", np.ones(3 + RANK))
            with pytest.raises(RuntimeError, match="different collectives"):
                (replica.experimental_all_reduce_async if RANK else replica.all_reduce)("SUM", np.ones(3))
        replica.experimental_all_reduce_async("SUM", np.ones(100_000))  # nobody waits for it
        return pending.wait()

    assert (in_replica(strategy, fn) == SIZE).all()


def test_waiting_for_a_limited_time():
    options = CommunicationOptions(timeout_seconds=30)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup(), communication_options=options)
    got = in_replica(strategy, lambda replica: replica.experimental_all_reduce_async("SUM", 1.0).wait())
    assert got == SIZE


@pytest.mark.full
@pytest.mark.ranks(min=2, max=2)
def test_waiting_too_long_ends_the_work(tmp_path):
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup())
    there = MPI.COMM_WORLD.bcast(tmp_path) / "there"
    options = CommunicationOptions(timeout_seconds=1)
    values = np.ones(3_000_000, np.float32)

    def fn(replica):
        MPI.COMM_WORLD.Barrier()
        pending = replica.experimental_all_reduce_async("SUM", values, options)
        if RANK:
            while not there.exists():  # and MPI makes no progress here
                time.sleep(0.01)
        else:
            number = strategy.extended.engine.topology.lock.sequence
            what = rf"all_reduce_async SUM float32\[3000000\] \(collective number {number}\)"
            with pytest.raises(TimeoutError, match=rf"{what}.* within 1 s.*is not known"):
                pending.wait()
            for call in (pending.wait, strategy.barrier):
                with pytest.raises(RuntimeError, match=r"after a time-out: .* not in step any more"):
                    call()
            there.touch()
        MPI.COMM_WORLD.Barrier()
        while not pending.test():
            pass
        assert (pending.wait() == 2).all()

    in_replica(strategy, fn)


# --- what must not be mixed up -----------------------------------------------------------------------------


def test_an_operation_left_by_an_error_is_not_continued_by_another(monkeypatch):
    """Rank 1 leaves a reduction in its third piece, and makes another one of the same shape."""
    strategy = strategy_on("0000")
    value = np.ones(1_000_000)
    if SIZE == 1 or strategy.extended.engine.topology.memory is None:
        return
    original, calls = CollectiveLock._token_of_next_meeting, []

    def fails(self):
        calls.append(1)
        if len(calls) == 3 and RANK == 1:
            raise MemoryError("in the middle")
        return original(self)

    monkeypatch.setattr(CollectiveLock, "_token_of_next_meeting", fails)
    if RANK == 1:
        with pytest.raises(MemoryError):
            strategy.reduce("SUM", value, axis=None)
    with pytest.raises(RuntimeError, match="number"):
        strategy.reduce("SUM", value, axis=None)


def test_what_lies_between_two_parts_of_a_buffer_is_left_alone(strategy):
    buffer = strategy.experimental_buffers_like(np.zeros(20))
    buffer[:] = 1
    strategy.reduce("SUM", [buffer[:8], buffer[10:]], axis=None)
    assert (buffer[8:10] == 1).all()
    assert (buffer[:8] == SIZE).all()
    assert (buffer[10:] == SIZE).all()


def test_variables_take_a_copy_of_a_buffer(strategy):
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(3), aggregation=mpistrat.VariableAggregation.SUM)
        metric = mpistrat.Variable(
            np.zeros(3),
            synchronization=mpistrat.VariableSynchronization.ON_READ,
            aggregation=mpistrat.VariableAggregation.SUM,
        )
    buffer = strategy.experimental_buffers_like(np.zeros(3))
    buffer[:] = 1
    strategy.run(lambda: variable.assign_add(buffer))
    assert (buffer == 1).all()
    assert (variable == SIZE).all()
    strategy.run(lambda: metric.assign_add(np.full(3, RANK + 1.0)))
    variable.assign(metric)
    assert (np.asarray(variable) == SIZE * (SIZE + 1) / 2).all()


def test_forked_processes_are_refused(strategy):
    if SIZE == 1:
        return
    strategy.reduce("SUM", 1.0, axis=None)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            strategy.reduce("SUM", 1.0, axis=None)
            text = "no error"
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        assert "forked process" in file.read()
    assert strategy.reduce("SUM", 1.0, axis=None) == SIZE


def test_a_number_does_not_keep_its_message(strategy):
    arrays = [np.float64(1.0), *[np.ones(1000) for _ in range(5)]]
    total = strategy.reduce("SUM", arrays, axis=None)[0]
    base = total.base if isinstance(total, np.ndarray) else None
    assert base is None or base.nbytes <= 64


@pytest.mark.parametrize("name", ["ordered", "exact"])
def test_guarantees_are_not_dropped(strategy, name):
    options = CommunicationOptions(implementation=name)
    with pytest.raises(ValueError, match=name):
        in_replica(strategy, lambda replica: replica.experimental_all_reduce_async("SUM", np.ones(3), options))


@pytest.mark.filterwarnings("ignore:.*outside of `strategy.run`:RuntimeWarning")
def test_the_default_strategy_returns_a_copy_of_its_input():
    value = np.ones(3)
    total = mpistrat.get_replica_context().all_reduce("SUM", value)
    value += 1
    assert total.tolist() == [1, 1, 1]
