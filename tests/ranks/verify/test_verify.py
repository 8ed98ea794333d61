"""Values that a fault changes are found, with the rank that has it; others are not."""

import collections
import gc
import pickle

import numpy as np
import pytest
from mpi4py import MPI
from ranks.verify import quiet_programs, quiet_steps, random_flips

import mpistrat
from mpistrat import training
from mpistrat.collectives.reduction import Reduction
from mpistrat.verify.checks import CheckedReduction, Checks

pytestmark = pytest.mark.ranks(min=2)


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setattr(mpistrat.rc, "verify", "copies,sums")
    with np.errstate(all="ignore"):
        yield MPI.COMM_WORLD.Dup()


@pytest.fixture
def strategy(comm):
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm)


def checks_of(strategy):
    return strategy.extended.engine.topology.slot(Checks)


def reductions(strategy, count):
    for _ in range(count):
        strategy.reduce("SUM", 1.0, axis=None)


@pytest.mark.parametrize("algorithm", ["auto", "tree", "exact"])
def test_flips_are_found_and_the_rank_is_named(comm, algorithm):
    counts = collections.Counter()
    trained = random_flips.Training(comm, algorithm)
    random_flips.flips(trained, ("weight", "slot", "result"), 12, [comm.size, 1], counts, eager=True)
    assert not sum(number for (_, what), number in counts.items() if what in ("missed", "other ranks"))
    assert sum(number for (_, what), number in counts.items() if what == "right rank") >= 10


def test_a_wrong_contribution_to_an_ordered_sum_is_found_where_it_is_sampled(comm):
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        comm=comm, communication_options=mpistrat.experimental.CommunicationOptions(implementation="ordered")
    )
    rng, hits = np.random.default_rng(3), []
    with random_flips.faulty_reduction("contribution", comm.rank == 1, rng, hits):
        checks_of(strategy).left = 1
        values = [np.full(100, 1.5), np.full(100, comm.rank + 1.0)]
        with pytest.raises(mpistrat.CorruptionError, match="all_reduce SUM has a wrong result") as caught:
            strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", values))
    assert len(caught.value.elements) == 1
    # All ranks have the same wrong sum, which does not tell whose it is.
    assert caught.value.ranks == tuple(range(comm.size))
    assert strategy.reduce("SUM", 1.0, axis=None) == comm.size  # the ranks are in step


@pytest.mark.parametrize("algorithm", ["auto", "ordered", "tree", "exact"])
def test_a_share_of_the_flips_in_shared_memory_is_found(comm, algorithm):
    counts = collections.Counter()
    trained = random_flips.Training(comm, algorithm, "float64")
    random_flips.flips(trained, ("shared memory",), 20, [comm.size, 2], counts, eager=True)
    found = sum(counts["shared memory", f"found in {when}"] for when in ("steps", "save"))  # by one rank only
    for bits in "equal bits", "rounded":
        found += counts[f"sum, {bits}", "found"]
    assert found
    assert not counts["shared memory", "missed"]


@pytest.mark.parametrize("algorithm", ["auto", "ordered", "tree", "exact", "mpi"])
def test_steps_of_any_values_raise_no_alarm(comm, algorithm):
    counts = collections.Counter()
    quiet_steps.steps(quiet_steps.Program(comm, algorithm, [5]), 60, counts)
    assert counts["verifications"] > 5


@pytest.mark.parametrize(("algorithm", "replicas"), [("tree", 5), ("exact", 6)])
def test_steps_of_virtual_replicas_raise_no_alarm(comm, algorithm, replicas):
    counts = collections.Counter()
    quiet_steps.steps(quiet_steps.Program(comm, algorithm, [6], replicas), 30, counts)
    assert counts["verifications"] > 3


@pytest.mark.parametrize("algorithm", ["tree", "exact"])
def test_a_verification_that_falls_due_while_replicas_are_added_draws_none_of_their_partial_sums(comm, algorithm):
    """By rank and not by replica, these have other bits: another thread's reduction may have counted meanwhile."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=2 * comm.size + 1)
    engine, checks = strategy.extended.engine, checks_of(strategy)
    rng = np.random.default_rng(comm.rank)
    options = mpistrat.experimental.CommunicationOptions(implementation=algorithm)
    sums = engine.ops.sums(mpistrat.ReduceOp.SUM, ((np.dtype("f4"), (1000,)),), options, None)
    for _ in range(5):
        checks.left = 5
        sums.begin()
        for replica in engine.replicas.local:
            sums.add(replica, [(10.0 ** rng.integers(-6, 6, 1000) * rng.normal(size=1000)).astype("f4")])
        checks.left = 1
        sums.total(None)


@pytest.mark.parametrize(("name", "seed"), [("mesh", 1), *(("restarts", optimizer) for optimizer in range(3))])
def test_programs_raise_no_alarm(comm, name, seed):
    counts = collections.Counter()
    with quiet_programs.counted(counts, share=0):
        quiet_programs.PROGRAMS[name](comm, 60, [seed])
    assert counts["verifications"] > 2


def test_a_flip_in_virtual_replicas_is_found(comm):
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=4)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(10), name="v", aggregation=mpistrat.VariableAggregation.SUM)
    if comm.rank == 1:
        v.own_copy()[7] = 3.0

    with pytest.raises(mpistrat.CorruptionError, match="variable 'v' is not the same on all ranks") as caught:
        reductions(strategy, 20)
    assert caught.value.elements == ((7,),)
    assert caught.value.values == (tuple(3.0 if rank == 1 else 0.0 for rank in range(comm.size)),)


def test_the_error_says_variable_elements_ranks_values_and_node(strategy):
    with strategy.scope():
        mpistrat.Variable(np.arange(6.0).reshape(2, 3), name="other")
        v = mpistrat.Variable(np.arange(12.0).reshape(3, 4), name="dense/kernel")
    if strategy.comm.rank == 1:
        v.own_copy()[1, 2] = -5.0
    with pytest.raises(mpistrat.CorruptionError) as caught:
        reductions(strategy, 20)
    error, size = caught.value, strategy.comm.size
    assert (error.name, error.elements) == ("dense/kernel", ((1, 2),))
    assert error.values == (tuple(-5.0 if rank == 1 else 6.0 for rank in range(size)),)
    assert error.ranks == ((1,) if size > 2 else (0, 1))
    host = strategy.extended.engine.topology.hosts[1]
    parts = "variable 'dense/kernel'", "[1, 2] is 6.0 on rank 0, -5.0 on rank 1", f"rank 1 ({host})", ", step "
    assert [part for part in parts if part not in str(error)] == []
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_difference_is_found_before_a_file_is_written(strategy, tmp_path):
    path = strategy.comm.bcast(tmp_path) / "weights.h5"
    with strategy.scope():
        v = mpistrat.Variable(np.ones(100_000), name="v")
    training.save([v], path)
    written = path.stat().st_mtime_ns
    strategy.barrier()
    if strategy.comm.rank == strategy.comm.size - 1:
        v.own_copy()[77_777] = np.nextafter(1.0, 2.0)
    for save in (training.save, training.save_async):
        with pytest.raises(mpistrat.CorruptionError, match="77777"):
            save([v], path)
    assert path.stat().st_mtime_ns == written


def test_values_that_are_equal_with_other_bits_are_no_fault(strategy):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(4), name="v")
    odd = strategy.comm.rank % 2
    v.own_copy()[...] = [-0.0 if odd else 0.0, -np.nan if odd else np.nan, np.inf, 5e-324]
    reductions(strategy, 30)


def test_variables_that_some_ranks_have_dropped_are_left_out(strategy):
    with strategy.scope():
        kept = [mpistrat.Variable(np.ones(5), name=f"v{i}") for i in range(4)]
    if strategy.comm.rank == 0:
        del kept[1]
        gc.collect()
    reductions(strategy, 200)
    if strategy.comm.rank == 1:
        kept[-1].own_copy()[0] = 2.0
    with pytest.raises(mpistrat.CorruptionError, match="'v3'"):
        training.save([kept[-1]], "unused.h5")


def test_reductions_are_of_another_class_only_where_they_verify(comm, strategy, monkeypatch):
    monkeypatch.setattr(mpistrat.rc, "verify", "off")
    plain = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup())
    for each, kind in ((plain, Reduction), (strategy, CheckedReduction)):
        key, out = ((np.dtype("f"), (3,)),), np.zeros(3, "f")
        reduction = each.extended.engine.joined_all_reduce(mpistrat.ReduceOp.SUM, key, out, None)
        assert type(reduction) is kind


def test_sharded_state_is_left_out_and_its_steps_verify(strategy):
    with strategy.scope():
        v, other = mpistrat.Variable(np.ones(40, np.float32)), mpistrat.Variable(np.ones(40), name="other")
        on_read = mpistrat.Variable(
            0.0, synchronization=mpistrat.VariableSynchronization.ON_READ, aggregation=mpistrat.VariableAggregation.SUM
        )
        optimizer = mpistrat.optimizers.Adam(0.1, shard_state=True)

    def step():
        on_read.assign_add(float(strategy.comm.rank))
        optimizer.apply_gradients([(np.ones(40, np.float32), v)])

    for _ in range(40):
        strategy.run(step)
    if strategy.comm.rank == 1:
        other.own_copy()[3] = 7.0
    checks_of(strategy).left = 1
    with pytest.raises(mpistrat.CorruptionError, match=r"\[3\] is"):
        strategy.run(step)
