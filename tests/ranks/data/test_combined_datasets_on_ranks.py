"""Tests of combined datasets under several ranks: one order for any number of ranks, even steps, exact states."""

import itertools
import os
import shutil

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset
from mpistrat.data.distribute.dataset import DistributedDataset
from mpistrat.runtime.topology import Topology
from tests.ranks.layouts import layouts, on_nodes

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def kinds(seed):
    a = Dataset.range(40).shuffle(seed=seed)
    b = Dataset.range(100, 123).map(lambda x: x + 1, num_parallel_calls=2)
    return {
        "zip": Dataset.zip(a, b).map(lambda x, y: 1000 * x + y),
        "mixture": Dataset.sample_from_datasets([a, b.concatenate(b)], [1, 2], seed=seed),
        "cache": a.enumerate().cache().map(lambda k, x: 1000 * k + x),
        "filter": a.filter(lambda x: x % 3 > 0).concatenate(b),
        "generator": Dataset.from_generator(lambda: iter(range(23))),
    }


def whole_batches(comm, batches):
    return [[x for part in step for x in part] for step in zip(*comm.allgather(batches), strict=True)]


@pytest.mark.parametrize("kind", kinds(1))
def test_batches_are_those_of_one_process(strategy, comm, kind):
    made = strategy.experimental_distribute_dataset(kinds(1)[kind].batch(5))
    alone = kinds(1)[kind].batch(5)
    for _ in range(2):
        mine = [batch.tolist() for batch in made]
        assert len(set(comm.allgather(len(mine)))) == 1
        assert whole_batches(comm, mine) == [batch.tolist() for batch in alone]


@pytest.mark.parametrize("kind", kinds(1))
def test_seeds_that_were_drawn_are_restored(strategy, comm, kind):
    made = strategy.experimental_distribute_dataset(kinds(None)[kind].batch(5))
    iterator = iter(made)
    begun = [batch.tolist() for batch in itertools.islice(iterator, 3)]
    state = iterator.state()
    rest = [x for batch in whole_batches(comm, [batch.tolist() for batch in iterator]) for x in batch]
    again = strategy.experimental_distribute_dataset(kinds(None)[kind].batch(4))
    again.restore(state)
    assert rest == [x for batch in whole_batches(comm, [batch.tolist() for batch in again]) for x in batch]
    assert len(begun) == 3


def test_padded_batches_of_vectors(strategy, comm):
    rows = Dataset.range(1, 12).map(lambda n: np.full(n, n)).padded_batch(4, padded_shapes=[12])
    mine = [batch.tolist() for batch in strategy.experimental_distribute_dataset(rows)]
    assert whole_batches(comm, mine) == [batch.tolist() for batch in rows]


def test_mixtures_that_differ_are_refused(strategy):
    if SIZE > 1:
        mixed = Dataset.sample_from_datasets([Dataset.range(9)] * 2, [1, 1 + RANK], seed=1).batch(2)
        with pytest.raises(ValueError, match="same dataset"):
            strategy.experimental_distribute_dataset(mixed)
    assert strategy.reduce("SUM", 1, axis=None) == SIZE


def noted(made):
    def double(x):
        made.append(int(x))
        return {"x": x, "y": np.full(3, 2.0 * x)}

    return Dataset.range(31).shuffle().map(double)


def of_all(comm, dataset):
    pieces = [each["x"].tolist() for each in dataset]
    return [x for batch in whole_batches(comm, pieces) for x in batch]


def test_the_ranks_make_a_cache_together_once(strategy, comm, tmp_path):
    folder, made, later = comm.bcast(tmp_path) / "kept", [], []
    one = strategy.experimental_distribute_dataset(noted(made).cache(folder).shuffle(seed=1).batch(5))
    calls = [x for each in comm.allgather(made) for x in each]
    assert {*calls} == {*range(31)}
    assert SIZE == 1 or len({*made}) < 31
    order = of_all(comm, one)
    assert sorted(order) == [*range(31)]
    iterator = iter(strategy.experimental_distribute_dataset(noted(later).cache(folder).shuffle(seed=1).batch(6)))
    begun = [next(iterator)["x"].tolist() for _ in range(2)]
    state = iterator.state()
    assert [x for batch in whole_batches(comm, begun) for x in batch] == order[:12]
    assert len({*later}) <= 1 + 8 * (RANK == 0)  # one for the structure, and eight that are compared
    again = strategy.experimental_distribute_dataset(noted(later).cache(folder).shuffle(seed=1).batch(4))
    again.restore(state)
    assert of_all(comm, again) == order[12:]
    with pytest.raises(ValueError, match="pipeline: "):
        strategy.experimental_distribute_dataset(noted(later).skip(1).cache(folder).batch(4))


def test_an_error_on_one_rank_leaves_no_cache(strategy, comm, tmp_path):
    def bad(x):
        if x == 30:
            raise KeyError("row 30")
        return x

    folder = comm.bcast(tmp_path)
    for _ in range(2):
        with pytest.raises((KeyError, RuntimeError, LookupError), match="row 30"):
            strategy.experimental_distribute_dataset(Dataset.range(31).map(bad).cache(folder).batch(4))
    assert not [*folder.glob("*.json")]


def test_rows_of_ranks_that_differ_are_refused(strategy, comm, tmp_path):
    def of_this_rank(x):
        return x + RANK

    cached = Dataset.range(31).map(of_this_rank).cache(comm.bcast(tmp_path)).batch(4)
    if SIZE > 1:
        with pytest.raises(ValueError, match="is not the one"):
            strategy.experimental_distribute_dataset(cached)


def test_a_cache_that_is_there_is_only_read(strategy, comm, tmp_path, monkeypatch):
    folder = comm.bcast(tmp_path)
    cached = Dataset.range(31).cache(folder).batch(4)
    expected = [batch.tolist() for batch in strategy.experimental_distribute_dataset(cached)]
    monkeypatch.setattr("mpistrat.data.combine.cached.writers", None)  # it writes a file
    again = Dataset.range(31).cache(folder).batch(4)
    assert [batch.tolist() for batch in strategy.experimental_distribute_dataset(again)] == expected


def test_a_stream_is_kept_with_a_length(strategy, comm, tmp_path):
    rows = Dataset.range(40).filter(lambda x: x % 3 > 0).cache(comm.bcast(tmp_path)).batch(4)
    made = strategy.experimental_distribute_dataset(rows)
    assert len(made) == 7
    assert whole_batches(comm, [batch.tolist() for batch in made]) == [batch.tolist() for batch in rows]


@pytest.mark.parametrize("layout", layouts("0011", "0101"))
def test_nodes_with_folders_of_their_own_keep_all_rows(comm, tmp_path, monkeypatch, layout):
    on = on_nodes(layout)
    folder = comm.bcast(tmp_path) / layout[RANK]
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    for _ in range(2):
        made = DistributedDataset(noted([]).cache("kept").batch(5), Topology.of(on))
        assert sorted(of_all(comm, made)) == [*range(31)]
    assert len([name for name in os.listdir("kept") if name.endswith(".h5")]) == 1
    comm.Barrier()
    if "1" in layout:
        if layout.index("1") == RANK:
            shutil.rmtree("kept")
        comm.Barrier()
        with pytest.raises(ValueError, match="another order on each node"):
            DistributedDataset(noted([]).cache("kept").batch(5), Topology.of(on))
        if RANK in (layout.index("0"), layout.index("1")):
            shutil.rmtree("kept", ignore_errors=True)
        comm.Barrier()
        # One node has the rows of another dataset: the others must not wait for it.
        if layout.index("1") == RANK:
            list(Dataset.range(5).cache("kept"))
        comm.Barrier()
        with pytest.raises((ValueError, RuntimeError), match="another dataset"):
            DistributedDataset(noted([]).cache("kept").batch(5), Topology.of(on))
    Topology.of(on).free()
    on.Free()
