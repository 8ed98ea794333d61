"""Tests of lanes under several ranks: the steps, rows and weights of one rank, and files of its own for each."""

import os

import h5py
import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, Dataset, Options
from mpistrat.data.distribute.autoshard import divide
from mpistrat.data.distribute.state import resumed
from mpistrat.replicas import ReplicaGroup

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FILES = 60


class Alone:
    size, rank = 1, 0


@pytest.fixture
def files(comm, tmp_path):
    if RANK == 0:
        random, first = np.random.default_rng(0), 0
        for number in range(FILES):
            rows = int(random.integers(2, 30))
            with h5py.File(tmp_path / f"{number:02}.h5", "w") as f:
                x = random.normal(number % 7, 1, (rows, 4))
                f["x"], f["y"], f["n"] = x, x.sum(1), np.arange(first, first + rows)
                f["file"] = np.full(rows, number)
            first += rows
    comm.Barrier()
    return str(tmp_path / "*.h5")


def alone(dataset):
    """Return the division of a dataset for one replica."""
    ready = dataset.definition.ready()
    return divide(AutoShardPolicy.AUTO, ready.source, ready.transforms, ReplicaGroup(Alone()), False)


def global_batches(strategy, iterator, most=-1):
    """Return the rows of the next global batches, those of rank after rank."""
    found = []
    while len(found) != most:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        mine = [row for part in strategy.experimental_local_results(batch) for row in part.tolist()]
        found.append([row for part in strategy.comm.allgather(mine) for row in part])
    return found


@pytest.mark.parametrize("layout", layouts("0000", "0101"))
def test_steps_and_rows_are_those_of_one_rank(files, layout, monkeypatch):
    comm = on_nodes(layout)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    dataset = Dataset.from_hdf5(files, "n").shuffle(seed=1).batch(24)
    distributed = strategy.experimental_distribute_dataset(dataset)
    one = alone(dataset)
    expected = [[one.batch(step, epoch).tolist() for step in range(one.steps)] for epoch in range(2)]
    opened = set()
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: opened.add(path) or real(path, *more, **named))
    for epoch in range(2):
        iterator = iter(distributed)
        assert distributed.cardinality == one.steps
        assert global_batches(strategy, iterator) == expected[epoch]
        if epoch == 0:
            mine = sum(str(path).endswith(".h5") for path in opened)
            assert comm.allreduce(mine) <= FILES + 2 * (SIZE - 1)  # one is shared by two neighbours
    # From the middle of an epoch, by the division of one rank; and back from its state.
    iterator = iter(distributed)
    seen = global_batches(strategy, iterator, 3)
    state = iterator.state()
    _, place = resumed(one, state)
    left = [place.division.batch(step, 2).tolist() for step in range(place.division.steps)]
    assert len(seen) == 3
    assert global_batches(strategy, iterator) == left
    again = strategy.experimental_distribute_dataset(Dataset.from_hdf5(files, "n").shuffle().batch(24))
    if strategy.comm.size > 1:
        assert len({str(each) for each in comm.allgather(again.state()["seeds"])}) == 1
    again.restore(state)
    assert global_batches(strategy, iter(again)) == left
    comm.Free()


def trained(strategy, files):
    dataset = Dataset.from_hdf5(files, ("x", "y")).shuffle(seed=1).batch(24)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        weights = mpistrat.Variable(np.zeros(4), name="weights")
        optimizer = mpistrat.optimizers.SGD(learning_rate=0.01)

    def step(x, y):
        count = mpistrat.get_replica_context().all_reduce("SUM", len(x))
        optimizer.apply_gradients([(x.T @ (x @ weights - y) / count, weights)])

    for _ in range(2):
        for batch in distributed:
            strategy.run(step, args=batch)
    return distributed.cardinality, np.asarray(weights)


def serial_weights(files):
    one = alone(Dataset.from_hdf5(files, ("x", "y")).shuffle(seed=1).batch(24))
    weights = np.zeros(4)
    for epoch in range(2):
        for step in range(one.steps):
            x, y = one.batch(step, epoch)
            weights -= 0.01 * (x.T @ (x @ weights - y) / len(x))
    return one.steps, weights


def test_weights_are_those_of_one_rank(files):
    steps, weights = trained(mpistrat.MultiWorkerMirroredStrategy(), files)
    serial_steps, serial = serial_weights(files)
    assert steps == serial_steps
    np.testing.assert_allclose(weights, serial, rtol=1e-10)


def test_bits_are_those_of_any_number_of_ranks(files):
    steps, weights = trained(mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=5), files)
    comm = MPI.COMM_SELF.Dup()  # all replicas on this rank
    alone_steps, by_itself = trained(mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=5), files)
    comm.Free()
    assert steps == alone_steps
    assert weights.tobytes() == by_itself.tobytes()


def test_rows_stay_in_order_without_a_shuffle(files):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    dataset = Dataset.from_hdf5(files, "n").batch(24)
    found = global_batches(strategy, iter(strategy.experimental_distribute_dataset(dataset)))
    assert found == [each.tolist() for each in dataset]


def test_a_rank_with_another_policy_raises_on_all(files, strategy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = (
        AutoShardPolicy.FILE if RANK == SIZE - 1 else AutoShardPolicy.AUTO
    )
    dataset = Dataset.from_hdf5(files, "n").shuffle(seed=1).batch(24).with_options(options)
    if SIZE == 1:
        return
    with pytest.raises(ValueError, match=f"auto_shard_policy is FILE on rank {SIZE - 1} and AUTO on rank 0"):
        strategy.experimental_distribute_dataset(dataset)


def test_a_file_that_vanishes_fails_on_the_rank_that_has_it(files, strategy):
    """The others read their files. Without messages nobody waits."""
    dataset = Dataset.from_hdf5(files, ("n", "file")).shuffle(seed=1).batch(24)
    distributed = strategy.experimental_distribute_dataset(dataset)
    strategy.barrier()
    if RANK == 0:
        os.unlink(files.replace("*", "07"))
    strategy.barrier()
    seen, error = [], None
    try:
        for _, file in distributed:
            seen.extend(file.tolist())
    except mpistrat.data.DataFileError as caught:
        error = caught
    told = strategy.comm.allgather(None if error is None else str(error))
    failed = [each for each in told if each]
    assert 1 <= len(failed) <= 2
    assert all("07.h5" in each for each in failed)
    assert 7 not in seen
