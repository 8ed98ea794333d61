"""Tests of input under several ranks that play more replicas: each replica gets the same bits on any number of them."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import (
    AutoShardPolicy,
    DataFileError,
    Dataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    Options,
)
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.topology import Topology

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS = 53


@pytest.fixture
def ranks(comm):
    return Topology.of(comm)


@pytest.fixture
def files(tmp_path, comm):
    folder = comm.bcast(tmp_path)
    paths = [folder / f"{number}.h5" for number in range(8)]
    if RANK == 0:
        for number, part in enumerate(np.array_split(np.arange(ROWS), len(paths))):
            with h5py.File(paths[number], "w") as f:
                f.create_dataset("x", data=part[:, None] * np.ones(3), chunks=(2, 3), compression="gzip")
    comm.Barrier()
    return paths


def kinds(files):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    rows = {
        "arrays": Dataset.from_arrays(np.arange(ROWS)[:, None] * np.ones(3)).shuffle(seed=2),
        "files": Dataset.from_hdf5(files, "x").shuffle(seed=2),
        "generator": Dataset.from_generator(lambda: iter(np.arange(ROWS)[:, None] * np.ones(3))),
    }
    return {kind: each.with_options(options) for kind, each in rows.items()}


def seen(comm, distributed, group):
    """Return the batches of all replicas, on every rank."""
    mine = [[part.tolist() for part in batch.values] for batch in distributed]
    everyone = comm.allgather((group.first, [*zip(*mine, strict=True)]))
    return [[*steps] for _, own in sorted(everyone) for steps in own]


@pytest.mark.parametrize("kind", ["arrays", "files", "generator"])
@pytest.mark.parametrize(("size", "batch"), [(6, 12), (6, 11), (8, 9), (8, 5)])
def test_pieces_are_those_that_numpy_cuts(comm, ranks, files, kind, size, batch):
    group = ReplicaGroup.dealt(ranks, size)
    distributed = DistributedDataset(kinds(files)[kind].batch(batch), ranks, replicas=group)
    serial = kinds(files)[kind].batch(batch)
    for _ in range(2):
        pieces = [np.array_split(whole, size) for whole in serial]
        oracle = [[step[replica].tolist() for step in pieces] for replica in range(size)]
        assert seen(comm, distributed, group) == oracle


@pytest.mark.parametrize("kind", ["arrays", "files", "generator"])
def test_datasets_of_a_function(comm, ranks, files, kind):
    def dataset_fn(context):
        return kinds(files)[kind].shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    group = ReplicaGroup.dealt(ranks, 6)
    distributed = DistributedDatasetsFromFunction(dataset_fn, ranks, replicas=group)
    oracle = [[batch.tolist() for batch in kinds(files)[kind].shard(6, each).batch(2)] for each in range(6)]
    most = max(map(len, oracle))
    found = seen(comm, distributed, group)
    assert found == [[*own, *([[]] * (most - len(own)))] for own in oracle]
    state = distributed.state()
    assert comm.allgather(state) == [state] * SIZE


def raised(fn):
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_broken_file_is_told_to_every_rank(comm, ranks, files):
    if RANK == SIZE - 1:
        files[SIZE - 1].write_text("no HDF5")  # which this rank describes
    comm.Barrier()
    group = ReplicaGroup.dealt(ranks, 6)
    told = comm.allgather(
        raised(lambda: DistributedDataset(Dataset.from_hdf5(files, "x").batch(6), ranks, replicas=group))
    )
    assert [*{*told}] == told[:1]
    assert "DataFileError" in told[0]
    assert f"{SIZE - 1}.h5" in told[0]


def test_a_file_that_one_replica_reads_is_told_to_every_rank(comm, ranks, files):
    """All ranks leave the call, and none waits for the rank that plays the replica."""
    if RANK == 0:
        files[5].write_text("no HDF5")
    comm.Barrier()

    def dataset_fn(context):
        rows = Dataset.from_hdf5(files[context.input_pipeline_id], "x")
        return rows.batch(2)

    group = ReplicaGroup.dealt(ranks, 6)
    told = raised(lambda: DistributedDatasetsFromFunction(dataset_fn, ranks, replicas=group))
    where = f"rank {group.rank_of(5)}, for replica 5"
    if 5 in group.local:
        assert told.startswith(DataFileError.__name__)
    else:
        assert told.startswith(f"RuntimeError: dataset_fn raised on {where}: DataFileError")
    assert "5.h5" in told
    assert mpistrat.MultiWorkerMirroredStrategy().agree(True)


def test_an_array_of_another_length_on_one_rank(comm, ranks):
    rows = Dataset.range(12 + (RANK == SIZE - 1)).batch(6)
    group = ReplicaGroup.dealt(ranks, 8)
    told = comm.allgather(raised(lambda: DistributedDataset(rows, ranks, replicas=group)))
    if SIZE > 1:
        assert [*{*told}] == told[:1]
        assert f"on rank {SIZE - 1}" in told[0]
    else:
        assert told == ["nothing"]


def test_a_strategy_gives_each_replica_its_rows(comm, files):
    """From files to a sum: the same bits on any number of ranks, as NumPy computes them."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=6)
    x = np.random.default_rng(0).standard_normal((ROWS, 3)).astype("f4")
    distributed = strategy.experimental_distribute_dataset(Dataset.from_arrays((x, x[:, 0])).batch(11))

    def step(rows, first):
        assert (rows[:, 0] == first).all()
        return rows.sum(axis=0)

    found = []
    for rows, first in distributed:
        total = strategy.reduce("SUM", strategy.run(step, args=(rows, first)), axis=None)
        assert len(strategy.experimental_local_results(rows)) == len(first.values)
        found.append(np.asarray(total).tobytes())
    parts = [[part.sum(axis=0) for part in np.array_split(x[k : k + 11], 6)] for k in range(0, ROWS, 11)]
    oracle = [(((a + b) + (c + d)) + (e + f)).tobytes() for a, b, c, d, e, f in parts]
    assert found == oracle


@pytest.mark.ranks(max=3)
def test_devices_of_a_rank_share_its_batches(comm):
    strategy = mpistrat.MirroredStrategy(devices=["cpu:0", "cpu:1", "cpu:2"])
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return Dataset.range(9).batch(1)

    whole = strategy.experimental_distribute_dataset(Dataset.range(7).batch(3))
    own = strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [(SIZE, RANK, 3)]
    for distributed, totals in ((whole, [3, 12, 6]), (own, None)):
        sums = [
            float(strategy.reduce("SUM", strategy.run(lambda x: float(np.sum(x)), args=(x,)), axis=None))
            for x in distributed
        ]
        if totals is not None:
            assert sums == totals
        assert sum(sums) == (21 if totals else 36 * SIZE)


@pytest.mark.ranks(max=1)
def test_the_last_round_of_a_rank_is_filled_with_empty_batches_as_in_tensorflow():
    strategy = mpistrat.MirroredStrategy(devices=["cpu:0", "cpu:1", "cpu:2"])
    rounds = strategy.distribute_datasets_from_function(lambda context: Dataset.range(7).batch(2))
    found = [[part.tolist() for part in strategy.experimental_local_results(x)] for x in rounds]
    assert found == [[[0, 1], [2, 3], [4, 5]], [[6], [], []]]
    whole = strategy.experimental_distribute_dataset(Dataset.range(8).batch(6))
    found = [[part.tolist() for part in strategy.experimental_local_results(x)] for x in whole]
    assert found == [[[0, 1], [2, 3], [4, 5]], [[6], [7], []]]
