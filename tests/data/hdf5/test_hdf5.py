"""Tests of rows of HDF5 files, compared with h5py."""

import gc
import os
import pickle

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset, DistributedDataset, Options
from mpistrat.data.hdf5.raw import RawRows
from mpistrat.data.hdf5.reader import FileReader

LAYOUTS = {
    "contiguous": {},
    "rows": {"chunks": (1, 3)},
    "chunks": {"chunks": (7, 2), "maxshape": (None, 3)},
    "gzip": {"chunks": (5, 3), "maxshape": (None, 3), "compression": "gzip"},
    "lzf+fletcher": {"chunks": (4, 3), "maxshape": (None, 3), "compression": "lzf", "fletcher32": True},
}


def write(path, rows, start=0, **layout):
    x = (np.arange(start, start + rows)[:, None] + [[0, 0.25, 0.5]]).astype("f4")
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=x, **layout)
        f["inner/y"] = np.arange(start, start + rows)
    return x


def with_policy(dataset, name):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return dataset.with_options(options)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    made = {}
    for name, layout in LAYOUTS.items():
        paths, values, start = [], [], 0
        for i, rows in enumerate((11, 1, 23, 6)):
            paths.append(folder / f"{name}-{i}.h5")
            values.append(write(paths[-1], rows, start, **layout))
            start += rows
        made[name] = paths, np.concatenate(values)
    return made


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(st.integers(0, 40), max_size=30))
def test_any_rows_in_any_order(layouts, layout, rows):
    paths, expected = layouts[layout]
    source = Dataset.from_hdf5(paths, ("x", "inner/y")).definition.source
    x, y = source.read(np.array(rows, np.int64))
    np.testing.assert_array_equal(x, expected[rows].reshape(-1, 3))
    assert (x.dtype, x.shape, y.tolist()) == (np.float32, (len(rows), 3), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipelines(layouts, layout):
    paths, expected = layouts[layout]
    dataset = Dataset.from_hdf5(paths, {"x": "x"})
    assert len(dataset) == 41
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in dataset.batch(8)]), expected)
    shuffled = np.concatenate([b["x"] for b in dataset.shuffle(seed=1).batch(8)])
    assert shuffled[:, 0].tolist() != expected[:, 0].tolist()
    np.testing.assert_array_equal(shuffled[np.argsort(shuffled[:, 0])], expected)
    np.testing.assert_array_equal(np.stack([row["x"] for row in dataset]), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_replicas_share_files(layouts, replicas, size):
    paths, expected = layouts["gzip"]

    def replica(peer):
        dataset = with_policy(Dataset.from_hdf5(paths, "x").shuffle(seed=3).batch(9), "DATA")
        return [batch[:, 0].tolist() for batch in DistributedDataset(dataset, peer)]

    found = replicas(size, replica)
    assert {len(mine) for mine in found} == {5}
    assert sorted(row for mine in found for piece in mine for row in piece) == expected[:, 0].tolist()


def test_each_file_is_described_once_for_all(tmp_path, replicas, monkeypatch):
    from mpistrat.data.formats import hdf5

    for i in range(6):
        write(tmp_path / f"{i}.h5", 3 + i)
    calls = []
    real = hdf5.describe
    monkeypatch.setattr(hdf5, "describe", lambda path, names: calls.append(path) or real(path, names))

    def replica(peer):
        dataset = with_policy(Dataset.from_hdf5(str(tmp_path / "*.h5"), "x").batch(4), "DATA")
        return [DistributedDataset(dataset, peer).cardinality for _ in range(2)]

    assert replicas(3, replica) == [[9, 9]] * 3
    others = [os.path.basename(path) for path in calls if not path.endswith("0.h5")]
    assert sorted(others) == [f"{i}.h5" for i in range(1, 6)]


def test_own_rows_only_are_read(tmp_path, replicas, monkeypatch):
    write(tmp_path / "a.h5", 40)
    seen = {}
    real = RawRows.read_run

    def spy(rows, files, first, out):
        seen.setdefault(rows.owner, []).append((first, first + len(out)))
        real(rows, files, first, out)

    monkeypatch.setattr(RawRows, "read_run", spy)

    def replica(peer):
        monkeypatch.setattr(RawRows, "owner", peer.rank, raising=False)
        dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x").batch(8)
        for ahead, read in (
            (0, [(k, k + 8) for k in range(0, 40, 8)]),
            (4, [(0, 8), (8, 24), (24, 40)]),  # two lists of two may wait
            (-1, [(0, 8), (8, 24), (24, 40)]),  # lists grow
        ):
            seen.clear()
            assert len(list(DistributedDataset(dataset.prefetch(ahead), peer))) == 5
            assert seen == {0: read}, ahead

    replicas(1, replica)
    seen.clear()

    class Second:
        rank, size = 1, 2

        def all_gather_object(self, obj):
            of_first = ([str(tmp_path / "a.h5")], None) if obj is None else {0: record} if obj == {} else obj
            return [of_first, obj]

    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x")
    record = dataset.definition.source._manifests.first()
    list(DistributedDataset(dataset.batch(8).prefetch(0), Second()))
    assert seen == {0: [(k + 4, k + 8) for k in range(0, 40, 8)]}


def test_files_are_named_in_many_ways(tmp_path):
    for name, start in (("b", 3), ("a", 0), ("c", 6)):
        write(tmp_path / f"{name}.h5", 3, start)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "d[1].h5", 2, 9)

    def y(files):
        return [int(i) for i in Dataset.from_hdf5(files, "inner/y")]

    assert y(str(tmp_path / "*.h5")) == list(range(9))
    assert y(tmp_path / "c.h5") == [6, 7, 8]
    assert y([tmp_path / "c.h5", str(tmp_path / "[ab].h5")]) == [6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert y(str(tmp_path / "**" / "*.h5")) == list(range(11))
    assert y(str(tmp_path / "sub" / "d[1].h5")) == [9, 10]
    assert y((tmp_path / "a.h5", tmp_path / "a.h5")) == [0, 1, 2] * 2
    (tmp_path / "circle").symlink_to(".")
    (tmp_path / "alias").symlink_to("sub")
    assert y(str(tmp_path / "**" / "*.h5")) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert y(str(tmp_path / "circle" / "alias" / "*.h5")) == [9, 10]


def test_types(tmp_path):
    compound = np.array([(1, [1.5, 2.5]), (2, [3.5, 4.5])], [("n", ">i2"), ("v", "<f4", (2,))])
    columns = {
        "compound": compound,
        "big": np.arange(2, dtype=">f8"),
        "flag": np.array([True, False]),
        "half": np.array([1, 2], "f2"),
        "wave": np.array([1 + 2j, 3], "c8"),
        "fixed": np.array([b"ab", b"c"]),
        "image": np.arange(24, dtype="u1").reshape(2, 3, 4),
    }
    with h5py.File(tmp_path / "t.h5", "w") as f:
        for name, values in columns.items():
            f[name] = values
        f.create_dataset("text", data=["eins", "zwei"], dtype=h5py.string_dtype())
        ragged = f.create_dataset("ragged", (2,), h5py.vlen_dtype("i4"))
        ragged[0], ragged[1] = [1, 2, 3], [4]
        pairs = np.dtype(("f4", (2,)))
        h5py.h5d.create(f.id, b"pairs", h5py.h5t.py_create(pairs, logical=True), h5py.h5s.create_simple((2,))).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype="f4"), h5py.h5t.py_create(pairs, logical=True)
        )
    for name, values in columns.items():
        (batch,) = Dataset.from_hdf5(tmp_path / "t.h5", name).shuffle(seed=0).batch(2)
        order = [int(i) for i in Dataset.range(2).shuffle(seed=0)]
        assert batch.dtype.isnative
        assert batch.dtype.itemsize == values.dtype.itemsize
        np.testing.assert_array_equal(batch, values[order].astype(batch.dtype), err_msg=name)
    (text,) = Dataset.from_hdf5(tmp_path / "t.h5", "text").batch(2)
    assert text.tolist() == [b"eins", b"zwei"]
    (lists,) = Dataset.from_hdf5(tmp_path / "t.h5", "ragged").batch(2)
    assert [x.tolist() for x in lists] == [[1, 2, 3], [4]]
    dataset = Dataset.from_hdf5(tmp_path / "t.h5", "pairs")
    assert dataset.element_spec == ArraySpec((2,), "f4")
    assert [x.tolist() for x in dataset.batch(2)] == [[[0, 1], [2, 3]]]


def test_many_files_with_few_open(tmp_path, monkeypatch):
    for i in range(12):
        write(tmp_path / f"{i:02}.h5", 2, 2 * i)
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), "inner/y")
    dataset.definition.source._reader = reader = FileReader(most_open=3)
    for _ in range(2):
        assert sorted(int(i) for b in dataset.shuffle(seed=1).batch(5) for i in b) == list(range(24))
    assert len(reader._descriptors) == 3
    reader.close()
    assert len(reader._descriptors) == 0
    assert [int(i) for i in dataset.take(3)] == [0, 1, 2]
    copy = pickle.loads(pickle.dumps(dataset.definition.source))
    assert copy.read(np.array([3])).tolist() == [3]


def test_a_virtual_dataset_of_more_files_than_may_be_open(tmp_path):
    layout = h5py.VirtualLayout((8, 3), "f4")
    for i in range(4):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file.create_dataset("x", data=np.full((2, 3), i, "f4"), chunks=(2, 3), compression="lzf")
            layout[2 * i : 2 * i + 2] = h5py.VirtualSource(file["x"])
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    dataset = Dataset.from_hdf5(tmp_path / "all.h5", "x")
    dataset.definition.source._reader = FileReader(most_open=2)
    assert [int(row[0]) for batch in dataset.batch(3) for row in batch] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own_files(tmp_path):
    write(tmp_path / "a.h5", 5)
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "inner/y")
    assert [int(i) for i in dataset] == list(range(5))
    reader = dataset.definition.source._reader
    before = reader._descriptors
    child = os.fork()
    if child == 0:
        try:
            same = [int(i) for i in dataset] == list(range(5))
            own = reader._descriptors is not before and len(reader._descriptors) == 1
            os._exit(0 if same and own else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [int(i) for i in dataset] == list(range(5))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_memory_of_its_own(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(64 * 10_000, dtype=np.float32).reshape(64, 10_000)
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x").batch(8)
    held = next(iter(dataset))
    child = os.fork()
    if child == 0:
        try:
            held[...] = -7
            os._exit(0 if next(iter(dataset))[0, 1] == 1 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held[0, 1] == 1


def test_files_are_closed_with_their_dataset(tmp_path):
    write(tmp_path / "a.h5", 5)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert len(list(Dataset.from_hdf5(tmp_path / "a.h5", "inner/y"))) == 5
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_state_of_other_blocks_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((400, 1000)), np.zeros((400, 700))
    strategy = mpistrat.OneDeviceStrategy("cpu:0")

    def iterator(names, shuffled):
        dataset = Dataset.from_hdf5(tmp_path / "a.h5", names)
        dataset = dataset.shuffle(seed=1) if shuffled else dataset
        return iter(strategy.experimental_distribute_dataset(dataset.batch(10)))

    for shuffled in (False, True):
        one, other = iterator(("x",), shuffled), iterator(("x", "y"), shuffled)
        next(one)
        if shuffled:
            with pytest.raises(ValueError, match="shuffled blocks"):
                other.restore(one.state())
        else:
            other.restore(one.state())
            assert len(list(other)) == 39


@pytest.mark.parametrize(("position", "error"), [(-3, ValueError), ("7", TypeError), (2.0, TypeError)])
def test_a_state_with_another_kind_of_place_is_refused(position, error):
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(20).batch(4)))
    state = {**iterator.state()}
    place = "position" if "position" in state else "step"
    with pytest.raises(error, match=place):
        iterator.restore({**state, place: position})


def test_stop_iteration_of_a_function_does_not_end_the_dataset():
    def stops(x):
        if x == 4:
            raise StopIteration
        return x

    for dataset in (Dataset.range(10), Dataset.from_iterable(lambda: iter(range(10)))):
        for prefetch in (0, 2):
            with pytest.raises(RuntimeError, match="StopIteration"):
                list(dataset.map(stops).batch(2).prefetch(prefetch))


# --- AutoShardPolicy.FILE -----------------------------------------------------------------


def test_file_policy_deals_files(tmp_path, replicas):
    for i, rows in enumerate((4, 2, 3)):
        write(tmp_path / f"{i}.h5", rows, 10 * i)

    def replica(peer):
        dataset = with_policy(Dataset.from_hdf5(str(tmp_path / "*.h5"), "inner/y").batch(5), "FILE")
        distributed = DistributedDataset(dataset, peer)
        assert distributed.cardinality == 3
        return [batch.tolist() for batch in distributed]

    assert replicas(2, replica) == [[[0, 1, 2], [3, 20, 21], [22]], [[10, 11], [], []]]


def test_file_policy_shuffles_and_repeats_own_rows(tmp_path, replicas):
    for i, rows in enumerate((4, 2, 3)):
        write(tmp_path / f"{i}.h5", rows, 10 * i)

    def replica(peer):
        dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), "inner/y").shuffle(seed=1).repeat(2).batch(4)
        return [batch.tolist() for batch in DistributedDataset(with_policy(dataset, "FILE"), peer)]

    first, second = replicas(2, replica)
    assert len(first) == len(second) == 7
    assert sorted(row for b in first for row in b) == sorted([0, 1, 2, 3, 20, 21, 22] * 2)
    assert sorted(row for b in second for row in b) == sorted([10, 11] * 2)


def test_file_policy_with_too_few(tmp_path, replica_errors):
    write(tmp_path / "0.h5", 9)
    write(tmp_path / "1.h5", 9)

    def replica(batch):
        return lambda p: DistributedDataset(
            with_policy(Dataset.from_hdf5(str(tmp_path / "*.h5"), "x").batch(batch), "FILE"), p
        )

    for error in replica_errors(3, replica(6)):
        assert isinstance(error, ValueError)
        assert "2 files with rows for 3 replicas" in str(error)
    for error in replica_errors(2, replica(1)):
        assert isinstance(error, ValueError)
        assert "batch(1) is shared by 2 replicas" in str(error)


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
def test_a_file_that_the_program_has_open_itself(tmp_path, locking):
    write(tmp_path / "a.h5", 5)
    with h5py.File(tmp_path / "a.h5", "r", locking=locking):
        assert [int(i) for i in Dataset.from_hdf5(tmp_path / "a.h5", "inner/y")] == list(range(5))
