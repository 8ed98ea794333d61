"""Tests of ranks that play several replicas: which rows each replica gets, on any number of ranks."""

import itertools
import json

import h5py
import numpy as np
import pytest
from selection import core

from mpistrat import nest
from mpistrat.data import (
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    InputOptions,
    InputReplicationMode,
    Options,
)
from mpistrat.data.rows.lanes import part_of, piece, pieces
from mpistrat.replicas import ReplicaGroup
from mpistrat.values import PerReplica

ROWS = 67
RANKS = (1, 2, 3, 4)
STREAMED = ("generator", "filter")
LENGTHS = (9, 8, 7, 9, 8, 9, 8, 9)
CUTS = [(6, 12), (6, 13), (6, 11), (8, 16), (8, 9), (8, 15), (8, 5), (8, 67)]  # numbers of replicas, and batches


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    first = 0
    for number, rows in enumerate(LENGTHS):
        with h5py.File(folder / f"{number}.h5", "w") as f:
            x = np.arange(first, first + rows, dtype="f4")[:, None] * np.ones(3, "f4")
            f.create_dataset("x", data=x, chunks=(2, 3), compression="gzip" if number % 2 else None)
        first += rows
    assert first == ROWS
    return [str(folder / f"{number}.h5") for number in range(len(LENGTHS))]


def made(kind, files, seed):
    x = np.arange(ROWS, dtype="f4")[:, None] * np.ones(3, "f4")
    rows = {
        "arrays": lambda: Dataset.from_arrays(x),
        "mapped": lambda: Dataset.from_arrays(x).map(lambda row: row * 0.5),
        "files": lambda: Dataset.from_hdf5(files, "x"),
        "generator": lambda: Dataset.from_generator(lambda: iter(x.copy())),
        "filter": lambda: Dataset.from_arrays(x).filter(lambda row: row[0] % 5 > 0),
    }[kind]()
    return rows if seed is None else rows.shuffle(buffer_size=16, seed=seed)


def batched(dataset, size):
    """Make batches whose values show where each was cut: a function of the batch sees the rows of one replica."""
    return dataset.batch(size).map(lambda x: (x, x - x.sum(axis=0, dtype="f8")))


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return dataset.with_options(options)


def bits(tree):
    return [(leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in nest.flatten(tree)[0]]


def by_replica(replicas, ranks, size, make, use=list, **dealing):
    """Return what each replica gets: ``use(distributed)`` of each rank, taken apart by replica."""

    def rank(peer):
        group = ReplicaGroup.dealt(peer, size, **dealing)
        return group.local, [components(batch) for batch in use(make(peer, group))]

    found = {}
    for local, steps in replicas(ranks, rank):
        for place, replica in enumerate(local):
            found[replica] = [step[place] for step in steps]
    assert [*found] == [*range(size)]
    assert len({*map(len, found.values())}) == 1
    return [found[replica] for replica in range(size)]


def components(batch):
    """Return the batches of the replicas of this rank."""
    leaves, rebuild = nest.flatten(batch)
    if not all(isinstance(leaf, PerReplica) for leaf in leaves):
        return [batch]
    return [rebuild([*values]) for values in zip(*(leaf.values for leaf in leaves), strict=True)]


def as_bits(steps_by_replica):
    return [[bits(batch) for batch in steps] for steps in steps_by_replica]


def mapped(x):
    return bits((x, x - x.sum(axis=0, dtype="f8")))


# --- one dataset for all replicas ---------------------------------------------------------


@pytest.mark.parametrize("n", range(30))
def test_a_rank_cuts_its_rows_where_each_replica_would(n):
    for size in range(1, 10):
        for first, last in itertools.combinations(range(size + 1), 2):
            start, stop = pieces(n, size, range(first, last))
            found = [part_of(range(start, stop), last - first, each) for each in range(last - first)]
            assert found == [range(*piece(n, size, replica)) for replica in range(first, last)]


@pytest.mark.parametrize("seed", core([None, 3], 3))
@pytest.mark.parametrize("kind", ["arrays", "mapped", "files", "generator", "filter"])
@pytest.mark.parametrize("cut", core(CUTS, (6, 13)), ids=str)
def test_data_is_cut_as_numpy_splits(replicas, files, kind, cut, seed):
    size, batch = cut
    dataset = made(kind, files, seed).batch(batch)
    serial = [list(dataset) for _ in range(2)]
    assert (seed is None) == (bits(serial[0]) == bits(serial[1]))
    for epoch, batches in enumerate(serial):
        oracle = [[mapped(np.array_split(whole, size)[replica]) for whole in batches] for replica in range(size)]
        for ranks in RANKS:

            def make(peer, group, epoch=epoch):
                rows = with_policy(batched(made(kind, files, seed), batch), "DATA")
                distributed = DistributedDataset(rows, peer, replicas=group)
                for _ in range(epoch):
                    list(distributed)
                return distributed

            assert as_bits(by_replica(replicas, ranks, size, make)) == oracle


@pytest.mark.parametrize("prefetch", core([0, 1, 5], 1))
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("files", "FILE"), *itertools.product(["files", "arrays", "generator"], ["DATA", "OFF", "HINT"])],
)
@pytest.mark.parametrize(("size", "batch"), [(6, 13), pytest.param(8, 8, marks=pytest.mark.full)])
def test_no_policy_depends_on_the_number_of_ranks(replicas, files, kind, policy, size, batch, prefetch):
    def make(peer, group):
        rows = made(kind, files, 5)
        rows = rows.shard(-1, -1) if policy == "HINT" else rows
        rows = with_policy(batched(rows, batch).prefetch(prefetch), policy)
        return DistributedDataset(rows, peer, replicas=group)

    first, *others = [as_bits(by_replica(replicas, ranks, size, make)) for ranks in (*RANKS, size)]
    assert all(other == first for other in others)
    seen = [np.frombuffer(b, d).reshape(s)[:, 0] for steps in first for ((d, s, b), _) in steps]
    each = sorted(np.concatenate(seen).tolist())
    assert each == sorted([*range(ROWS)] * (size if policy == "OFF" else 1))


def test_files_are_dealt_to_replicas(replicas, files):
    batch, size = 13, 6
    share = [len(part) for part in np.array_split(range(batch), size)]
    x = np.split(np.arange(ROWS, dtype="f4"), np.cumsum(LENGTHS)[:-1])
    own = [np.concatenate(x[replica::size]) for replica in range(size)]
    steps = max(-(-len(rows) // n) for rows, n in zip(own, share, strict=True))
    oracle = [[rows[k * n : (k + 1) * n].tolist() for k in range(steps)] for rows, n in zip(own, share, strict=True)]
    assert not oracle[-1][-1]

    def make(peer, group):
        rows = with_policy(Dataset.from_hdf5(files, "x").batch(batch), "FILE")
        return DistributedDataset(rows, peer, replicas=group)

    for ranks in RANKS:
        found = by_replica(replicas, ranks, size, make)
        assert [[batch[:, 0].tolist() for batch in steps] for steps in found] == oracle


def test_rows_of_a_batch_are_read_once(replicas, files):
    calls = []

    class Counted(type(Dataset.from_arrays(np.arange(4)).definition.source)):
        def read(self, rows):
            calls.append(len(rows))
            return super().read(rows)

    source = Counted(np.arange(24.0))

    def make(peer, group):
        return DistributedDataset(Dataset(source).batch(12).prefetch(0), peer, replicas=group)

    by_replica(replicas, 1, 6, make)
    assert calls == [12, 12]


def test_structures_and_one_replica(replicas):
    """With virtual replicas the leaves are PerReplica on any number of ranks, else where a rank plays several."""

    def make(peer, group):
        rows = Dataset.from_arrays({"x": np.arange(8), "y": (np.ones(8), np.zeros((8, 2)))}).batch(4)
        distributed = DistributedDataset(rows, peer, replicas=group)
        return next(iter(distributed)), distributed.element_spec

    for ranks, virtual in itertools.product((1, 2, 4), (True, False)):
        for batch, spec in replicas(
            ranks, lambda peer, v=virtual: make(peer, ReplicaGroup.dealt(peer, 4, is_virtual=v))
        ):
            assert spec["y"][1].shape == (None, 2)
            leaves = [batch["x"], *batch["y"]]
            if virtual or ranks < 4:
                assert [len(leaf.values) for leaf in leaves] == [4 // ranks] * 3
                assert leaves[2].values[0].shape == (1, 2)
            else:
                assert leaves[2].shape == (1, 2)


def test_a_function_may_write_to_the_rows_of_its_replica(replicas):
    """Under OFF, the replicas of a rank get the same rows."""

    def add_one(x):
        x += 1
        return x

    for rows in (Dataset.from_iterable(np.zeros((4, 2))), Dataset.from_arrays(np.zeros((4, 2)))):

        def make(peer, group, rows=rows):
            return DistributedDataset(with_policy(rows.map(add_one).batch(2), "OFF"), peer, replicas=group)

        assert all((x == 1).all() for steps in by_replica(replicas, 1, 2, make) for x in steps)


def test_off_and_hints_of_devices_follow_the_ranks(replicas):
    """As in TensorFlow: a worker sees everything, and deals it to its devices."""
    kinds = {
        ("OFF", 1): [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]],
        ("OFF", 2): [[[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]] * 2,
        ("HINT", 1): [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]],
        ("HINT", 2): [[[0, 2], [4, 6], [8], []], [[1, 3], [5, 7], [9], []]],
    }
    for (policy, ranks), oracle in kinds.items():
        for rows in (Dataset.range(10), Dataset.from_iterable(range(10))):

            def make(peer, group, rows=rows, policy=policy):
                rows = rows.shard(-1, -1) if policy == "HINT" else rows
                return DistributedDataset(with_policy(rows.batch(4), policy), peer, replicas=group)

            found = by_replica(replicas, ranks, 2, make, is_virtual=False)
            assert [[batch.tolist() for batch in steps] for steps in found] == oracle


def test_devices_and_files(replicas, files):
    """Files are dealt to ranks, so one file is enough for two devices of one."""

    def make(peer, group):
        rows = with_policy(Dataset.from_hdf5(files[: peer.size], "x").batch(8), "FILE")
        return DistributedDataset(rows, peer, replicas=group)

    (a, b) = by_replica(replicas, 1, 2, make, is_virtual=False)
    assert [x[:, 0].tolist() for x in (*a, *b)] == [[0, 1, 2, 3], [8], [4, 5, 6, 7], []]
    found = by_replica(replicas, 2, 3, make, is_virtual=False)  # rank 0 plays one, rank 1 plays two
    assert [[x[:, 0].tolist() for x in steps] for steps in found] == [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        [[9, 10, 11], [14, 15], []],
        [[12, 13], [16], []],
    ]


# --- a dataset for each replica, or for each rank -----------------------------------------


def of_context(kind, files, seen=None):
    def dataset_fn(context):
        if seen is not None:
            seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        rows = made(kind, files, None)
        rows = rows.shuffle(buffer_size=100)  # of which all pipelines get the seed of the first
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return batched(rows, 2 if context.input_pipeline_id % 2 else 3)

    return dataset_fn


@pytest.mark.parametrize("kind", ["arrays", "files", "generator"])
@pytest.mark.parametrize("size", core([6, 8], 6))
def test_each_virtual_replica_has_a_dataset(replicas, files, kind, size):
    kept = {}
    for ranks in (*RANKS, size):
        seen = []

        def make(peer, group, seen=seen):
            made = DistributedDatasetsFromFunction(of_context(kind, files, seen), peer, replicas=group)
            state = made.state()  # of the first run, whose seed was drawn
            made.restore(kept.setdefault("state", state))
            return made

        found = as_bits(by_replica(replicas, ranks, size, make))
        assert sorted(seen) == [(size, replica, size) for replica in range(size)]
        assert found == kept.setdefault("found", found)
        rows = [np.frombuffer(b, d).reshape(s)[:, 0].tolist() for steps in found for ((d, s, b), _) in steps]
        assert sorted(itertools.chain(*rows)) == [*range(ROWS)]
        assert [] in rows


def test_ranks_that_alternate_between_nodes(replicas):
    """The replicas of a node follow each other, so those of rank 1 come after those of rank 2."""

    def on_nodes(make):
        def of_rank(peer):
            peer.nodes = ((0, 2), (1, 3))
            group = ReplicaGroup.dealt(peer, 8)
            return group.local, [components(batch) for batch in make(peer, group)]

        found = replicas(4, of_rank)
        assert [local.start for local, _ in found] == [0, 4, 2, 6]
        return [
            [step[place].tolist() for step in steps]
            for local, steps in sorted(found, key=lambda each: each[0].start)
            for place in range(len(local))
        ]

    def dataset_fn(context):
        return Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(1)

    for make in (
        lambda peer, group: DistributedDataset(Dataset.range(8).batch(8), peer, replicas=group),
        lambda peer, group: DistributedDatasetsFromFunction(dataset_fn, peer, replicas=group),
    ):
        assert on_nodes(make) == [[[replica]] for replica in range(8)]


@pytest.mark.parametrize("make_rows", [Dataset.range, lambda n: Dataset.from_iterable(range(n))])
def test_a_rank_deals_batches_to_its_devices_in_turn(replicas, make_rows):
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return make_rows(7).batch(2)

    def make(peer, group):
        return DistributedDatasetsFromFunction(dataset_fn, peer, replicas=group)

    found = by_replica(replicas, 1, 3, make, is_virtual=False)
    assert seen == [(1, 0, 3)]
    assert [[x.tolist() for x in steps] for steps in found] == [[[0, 1], [6]], [[2, 3], []], [[4, 5], []]]
    seen.clear()
    found = by_replica(replicas, 2, 3, make, is_virtual=False)
    assert sorted(seen) == [(2, 0, 3), (2, 1, 3)]
    assert [[x.tolist() for x in steps] for steps in found] == [
        [[0, 1], [2, 3], [4, 5], [6]],
        [[0, 1], [4, 5], [], []],
        [[2, 3], [6], [], []],
    ]


def test_single_rows_are_dealt_too(replicas):
    def make(peer, group):
        return DistributedDatasetsFromFunction(lambda context: Dataset.range(6), peer, replicas=group)

    found = by_replica(replicas, 1, 3, make, is_virtual=False)
    assert [[int(x) for x in steps] for steps in found] == [[0, 3], [1, 4], [2, 5]]
    assert all(x.shape == () for steps in found for x in steps)


def test_a_pipeline_for_each_device_on_request(replicas):
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def dataset_fn(context):
        return Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id).batch(1)

    def make(peer, group):
        return DistributedDatasetsFromFunction(dataset_fn, peer, options, replicas=group)

    for ranks in (1, 2):
        found = by_replica(replicas, ranks, 3, make, is_virtual=False)
        assert [[x.tolist() for x in steps] for steps in found] == [[[0], [3]], [[1], [4]], [[2], [5]]]


# --- states -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", core(["DATA", "FILE", "OFF", "HINT", "own", "own stream"], "DATA", "FILE"))
def test_an_epoch_goes_on_on_another_number_of_ranks(replicas, files, policy):
    def make(peer, group):
        if policy.startswith("own"):
            fn = of_context("generator" if "stream" in policy else "files", files)
            return DistributedDatasetsFromFunction(fn, peer, replicas=group)
        rows = Dataset.from_hdf5(files, "x").shuffle()
        rows = rows.shard(-1, -1) if policy == "HINT" else rows
        return DistributedDataset(with_policy(batched(rows, 13), policy), peer, replicas=group)

    states = []

    def begun(distributed):
        iterator = iter(distributed)
        next(iterator)
        next(iterator)
        states.append(json.loads(json.dumps(iterator.state())))
        return iterator

    rest = as_bits(by_replica(replicas, 4, 6, make, begun))
    assert all(state == states[0] for state in states)

    def resumed(distributed):
        distributed.restore(states[0])
        return iter(distributed)

    for ranks in (1, 3, 6):
        assert as_bits(by_replica(replicas, ranks, 6, make, resumed)) == rest


def test_states_of_other_datasets_and_ranks_are_refused(replicas, files):
    def of(dataset_fn, ranks=2, size=6, **dealing):
        (made, *_) = replicas(
            ranks,
            lambda peer: DistributedDatasetsFromFunction(
                dataset_fn, peer, replicas=ReplicaGroup.dealt(peer, size, **dealing)
            ),
        )
        return made

    def other(context):
        rows = of_context("files", files)(context)
        return Dataset.from_hdf5(files[1:], "x").shuffle().batch(2) if context.input_pipeline_id == 5 else rows

    state = of(of_context("files", files)).state()
    with pytest.raises(ValueError, match=r"dataset of replica 5 is .*let dataset_fn return"):
        of(other).restore(state)
    with pytest.raises(ValueError, match="number of replicas is 6, but here it is 8"):
        of(of_context("files", files), size=8).restore(state)
    with pytest.raises(TypeError, match="datasets"):
        of(of_context("files", files)).restore({k: v for k, v in state.items() if k != "datasets"})

    def plain(context):
        return Dataset.range(12).batch(2)

    state = of(plain, ranks=2, is_virtual=False).state()
    of(plain, ranks=2, is_virtual=False).restore(state)
    with pytest.raises(ValueError, match="number of input pipelines is 2, but here it is 3"):
        of(plain, ranks=3, is_virtual=False).restore(state)


# --- faults -------------------------------------------------------------------------------


def failures(replica_errors, make, ranks=3, size=8):
    return replica_errors(ranks, lambda peer: make(peer, ReplicaGroup.dealt(peer, size)))


def test_an_error_for_one_replica_reaches_all_ranks(replica_errors):
    def broken(context):
        if context.input_pipeline_id == 4:
            raise KeyError("no such thing")
        return Dataset.range(4).batch(2)

    a, b, c = failures(
        replica_errors, lambda peer, group: DistributedDatasetsFromFunction(broken, peer, replicas=group)
    )
    assert type(b) is KeyError
    for each in (a, c):
        assert type(each) is RuntimeError
        assert str(each) == "dataset_fn raised on rank 1, for replica 4: KeyError: 'no such thing'"

    def wrong(context):
        return 3 if context.input_pipeline_id == 7 else Dataset.range(4).batch(2)

    for each in failures(
        replica_errors, lambda peer, group: DistributedDatasetsFromFunction(wrong, peer, replicas=group)
    ):
        assert type(each) is TypeError
        assert "on rank 2, for replica 7 it returned int" in str(each)

    def single(context):
        rows = Dataset.range(4 + context.input_pipeline_id)
        return rows if context.input_pipeline_id == 1 else rows.batch(2)

    for each in failures(
        replica_errors, lambda peer, group: DistributedDatasetsFromFunction(single, peer, replicas=group)
    ):
        assert type(each) is ValueError
        assert "rank 0, for replica 1 has single rows" in str(each)


def test_structures_that_differ_between_replicas_of_a_rank(replica_errors):
    def dataset_fn(context):
        x = np.arange(4)
        return Dataset.from_arrays((x, x) if context.input_pipeline_id == 1 else x).batch(2)

    def make(peer, group):
        return next(iter(DistributedDatasetsFromFunction(dataset_fn, peer, replicas=group)))

    found = failures(replica_errors, make, ranks=1, size=3)
    assert type(found[0]) is ValueError
    assert "replicas [0, 1, 2] have [1, 2, 1] arrays" in str(found[0])


def test_too_few_files_for_the_replicas(replica_errors, files):
    def make(peer, group):
        rows = with_policy(Dataset.from_hdf5(files, "x").batch(16), "FILE")
        return DistributedDataset(rows, peer, replicas=group)

    for each in failures(replica_errors, make, size=9):
        assert type(each) is ValueError
        assert "8 files with rows for 9 replicas" in str(each)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_error_of_one_replica_is_raised_at_its_step(replicas, prefetch):
    """The steps before it are complete, and the step can be read again."""
    broken = [True]

    def fn(x):
        if x == 9 and broken[0]:
            raise OSError("lost")
        return x

    def make(peer, group):
        rows = Dataset.from_arrays(np.arange(12)).map(fn).batch(4).prefetch(prefetch)
        return DistributedDataset(rows, peer, replicas=group)

    def use(distributed):
        iterator = iter(distributed)
        yield from itertools.islice(iterator, 2)
        with pytest.raises(OSError, match="lost"):
            next(iterator)
        broken[0] = False
        yield next(iterator)

    found = by_replica(replicas, 1, 3, make, use)
    assert [[x.tolist() for x in steps] for steps in found] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2], [6], [10]],
        [[3], [7], [11]],
    ]
