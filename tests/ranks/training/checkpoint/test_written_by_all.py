"""Checkpoints that all ranks write: what is equal on all, what each has of its own, and blocks."""

import errno
import itertools
import os
import resource
import time
import types

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from ranks.layouts import SIZE, layouts, on_nodes

import mpistrat
from mpistrat.data import Block, ChecksumError
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Limits, Topology
from mpistrat.storage import layout
from mpistrat.training import Checkpoint, load, load_arrays, save, save_async
from mpistrat.training.checkpoint import by_all
from mpistrat.training.checkpoint.format import OF_BOXES
from mpistrat.training.checkpoint.names import named
from mpistrat.training.checkpoint.write import write

RANK = MPI.COMM_WORLD.rank
SAVES = {"save": save, "async": lambda *args, **options: save_async(*args, **options).wait()}


@pytest.fixture(params=SAVES)
def save_by(request):
    return SAVES[request.param]


@pytest.fixture(params=layouts("0101"))
def ranks(request, monkeypatch):
    """A strategy whose saves are all divided, and in small pieces."""
    monkeypatch.setattr(layout, "_PIECE", 1 << 12)
    monkeypatch.setattr(layout, "_SMALL", 64)
    comm = on_nodes(request.param, save_alone_bytes=0)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    with strategy.scope():
        yield strategy
    comm.Free()


def state_of(seed):
    random = np.random.default_rng(seed)
    return {
        "w": random.normal(size=(300, 17)).astype("f4"),
        "layers": [random.normal(size=3), random.integers(99, size=100_001).astype("u1")],
        "half": random.normal(size=5000).astype("f2"),
        "none": np.ones((0, 3)),
        "one": np.array(3.5),
        "words": mpistrat.Variable(random.integers(999, size=3000).astype("S3")),
    }


def content(path):
    """Every dataset of a file as h5py alone reads it, and its checksums."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                found.update({name: (item[()], dict(item.attrs).get("checksums"))})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def assert_same(one, other):
    assert [*one] == [*other]
    for name in one:
        for mine, want in zip(one[name], other[name], strict=True):
            np.testing.assert_array_equal(mine, want, strict=True)


def test_the_file_is_that_of_one_rank(ranks, save_by, tmp_path):
    state = state_of(1)
    save_by(state, tmp_path / "new" / "all.h5")
    values = {name: np.asarray(each, order="C") for name, each in named(state).items()}
    if RANK == 0:
        write(values, tmp_path / "chief.h5")
    ranks.barrier()
    assert_same(content(tmp_path / "new" / "all.h5"), content(tmp_path / "chief.h5"))
    like = state_of(2)
    load(like, tmp_path / "new" / "all.h5")
    for mine, want in zip(*(mpistrat.nest.flatten(each)[0] for each in (like, state)), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(want))
    ranks.barrier()
    assert os.listdir(tmp_path / "new") == ["all.h5"]


@pytest.mark.ranks(min=2)
def test_each_rank_writes_its_share(ranks, tmp_path, monkeypatch):
    written = []
    pwrite = os.pwrite

    def counted(descriptor, data, offset):
        written.append(len(data))
        return pwrite(descriptor, data, offset)

    state = {"a": np.arange(500_000.0), "b": np.ones(400_000, "f4")}
    save({"a": np.ones(1)}, tmp_path / "first.h5")  # the trial of the directory
    monkeypatch.setattr(os, "pwrite", counted)
    save(state, tmp_path / "w.h5")
    total = sum(each.nbytes for each in state.values())
    assert abs(sum(written) - total / SIZE) < 200_000
    of_all = ranks.extended.engine.topology.all_gather_object(sum(written))
    assert total <= sum(of_all) < total + 200_000


def test_a_checkpoint_of_objects(ranks, tmp_path):
    weights = mpistrat.Variable(np.arange(9000.0))
    checkpoint = Checkpoint(weights=weights, rng=np.random.default_rng(RANK))
    path = checkpoint.save(tmp_path / "model")
    weights.assign(np.zeros(9000))
    checkpoint.restore(path).assert_consumed()
    assert (weights.read_value() == np.arange(9000.0)).all()


def test_bytes_are_those_at_the_call_and_the_file_comes_by_itself(ranks, tmp_path):
    v, array = mpistrat.Variable(np.arange(90_000.0)), np.arange(30_000)
    u = np.full(1000, RANK)
    pending = save_async({"v": v, "a": array}, tmp_path / "v.h5", own={"u": u})
    v.assign(np.zeros(90_000))
    array[:] = u[:] = -1
    limit = time.monotonic() + 60
    while not (tmp_path / "v.h5").exists():  # no call of the program helps
        assert time.monotonic() < limit
        time.sleep(0.01)
    found = {name: value for name, (value, _) in content(tmp_path / "v.h5").items()}
    assert (found["v"] == np.arange(90_000.0)).all()
    assert (found["a"] == np.arange(30_000)).all()
    assert all((found[f"u/{rank}"] == rank).all() for rank in range(SIZE))
    pending.wait()
    assert os.listdir(tmp_path) == ["v.h5"]
    ranks.barrier()


def own_of(rank):
    return {
        "u": np.full((rank + 1, 3), rank, "f4"),
        "deep": {"n": np.arange(2000 * rank), "half": np.full(3, rank, "f2")},
    }


def test_what_each_rank_has_of_its_own(ranks, save_by, tmp_path):
    path = tmp_path / "o.h5"
    of_replica = mpistrat.PerReplica((np.full(5, 10.0 * RANK),))
    save_by({"w": np.ones(3), "p": of_replica}, path, own=own_of(RANK))
    found = {name: value for name, (value, _) in content(path).items()}
    for rank in range(SIZE):
        want = own_of(rank)
        np.testing.assert_array_equal(found[f"u/{rank}"], want["u"], strict=True)
        np.testing.assert_array_equal(found[f"deep/n/{rank}"], want["deep"]["n"], strict=True)
        np.testing.assert_array_equal(found[f"p/{rank}"], np.full(5, 10.0 * rank))
    like = mpistrat.nest.map_structure(np.zeros_like, own_of(RANK))
    w, p = np.zeros(3), np.zeros(5)
    load({"w": w, "p": mpistrat.PerReplica((p,))}, path, own=like)
    assert w.all()
    assert (p == 10 * RANK).all()
    for mine, want in zip(*(mpistrat.nest.flatten(each)[0] for each in (like, own_of(RANK))), strict=True):
        np.testing.assert_array_equal(mine, want, strict=True)
    assert load_arrays(path)["u"][str(SIZE - 1)].shape == (SIZE, 3)


def test_parts_of_another_number_of_ranks(ranks, tmp_path):
    save({"u": {str(rank): np.ones(2) for rank in range(SIZE + 1)}}, tmp_path / "o.h5")
    u = np.zeros(2)
    with pytest.raises(ValueError, match=rf"has 'u' of {SIZE + 1} ranks, and there are {SIZE} now: load with as many"):
        load({}, tmp_path / "o.h5", own={"u": u})
    assert not u.any()


def box(rank, of, length):
    """The rows of a rank, of a length that the number of ranks does not divide."""
    low, high = (length * each // of for each in (rank, rank + 1))
    return slice(low, high)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_become_one_dataset(ranks, save_by, tmp_path, axis):
    whole = np.random.default_rng(3).normal(size=(37, 41, 5)).astype("f4")
    where = [slice(None)] * 3
    where[axis] = box(RANK, SIZE, whole.shape[axis])
    offset = [0 if axis != i else where[axis].start for i in range(3)]
    block = Block(whole[tuple(where)], offset, whole.shape)
    empty = Block(np.zeros((0, 2)), (0, 0), (0, 2))
    save_by({"b": block, "n": np.arange(3)}, tmp_path / "b.h5", own={"none": empty})
    found = content(tmp_path / "b.h5")
    np.testing.assert_array_equal(found["b"][0], whole, strict=True)
    assert found["none"][0].shape == (0, 2)
    np.testing.assert_array_equal(load_arrays(tmp_path / "b.h5")["b"], whole, strict=True)
    # Boxes of another division, and what was saved as one array.
    other = box(RANK, SIZE, whole.shape[1 - axis])
    back = np.zeros_like(whole[(other,) if axis else (slice(None), other)])
    offset = (other.start, 0, 0) if axis else (0, other.start, 0)
    save({"m": whole}, tmp_path / "m.h5")
    for path, name in (("b.h5", "b"), ("m.h5", "m")):
        back[:] = 0
        load({}, tmp_path / path, own={name: Block(back, offset, whole.shape)})
        np.testing.assert_array_equal(back, whole[(other,) if axis else (slice(None), other)])
    full = np.zeros_like(whole)
    load({"b": full}, tmp_path / "b.h5")
    np.testing.assert_array_equal(full, whole)


def test_what_differs_has_the_values_of_one_rank(ranks, save_by, tmp_path):
    mine = np.arange(20_000.0) + RANK  # in pieces of several ranks, if it were divided
    save_by({"w": mine}, tmp_path / "chief.h5", differing="chief")
    np.testing.assert_array_equal(load_arrays(tmp_path / "chief.h5")["w"], np.arange(20_000.0))
    if SIZE > 1:
        v = mpistrat.Variable(np.zeros(20_000))
        v.own_copy()[:] = RANK  # by a mistake of the program
        with pytest.raises(ValueError, match="not the same on all ranks"):
            save_by([v], tmp_path / "v.h5")


@pytest.mark.ranks(min=2)
def test_a_difference_of_one_element_is_found(ranks, tmp_path):
    """By each `save`, and of a variable by one of 64 asynchronous saves: each compares other pages."""
    v, last = mpistrat.Variable(np.zeros(40_000)), RANK == SIZE - 1
    v.own_copy()[12_345] = last
    array = np.zeros(40_000)
    array[12_345] = last
    different = rf"1 of 1 arrays \(.*\) are not the same on all ranks: those of rank {SIZE - 1} differ from rank 0's"
    for call, state in ((save, [v]), (save, [array]), (save_async, [array])):
        with pytest.raises(ValueError, match=different):
            call(state, tmp_path / "v.h5")
    ranks.barrier()
    assert os.listdir(tmp_path) == []

    def save_64_times():
        for _ in range(64):
            save_async([v], tmp_path / "v.h5").wait()

    with pytest.raises(ValueError, match=different):
        save_64_times()
    with pytest.raises(ValueError, match=different):  # until it is mended
        save_async([v], tmp_path / "v.h5")
    v.own_copy()[12_345] = 0
    save_async([v], tmp_path / "v.h5").wait()


def slots_of(strategy, seed):
    """Variables, and what an optimizer has for them, with values."""
    random = np.random.default_rng(seed)
    variables = [mpistrat.Variable(np.zeros(shape)) for shape in [(31, 7, 11), (), (2000,), (0, 3), (5, 900)]]
    optimizer = mpistrat.optimizers.Adam(shard_state=True)
    optimizer.build(variables)
    for each in optimizer.variables:
        each.assign(random.integers(0, 9, each.shape).astype(each.dtype))
    return optimizer.variables


@pytest.mark.four_ranks
def test_what_is_shared_out_is_not_gathered(ranks, save_by, tmp_path, monkeypatch):
    slots, path = slots_of(ranks, 1), tmp_path / "s.h5"
    want = {str(i): each.read_value() for i, each in enumerate(slots)}
    files = dict(zip(want, slots_of(ranks, 2), strict=True))
    with monkeypatch.context() as patch:
        for name in ("_read", "_update_across_replicas"):
            patch.setattr("mpistrat.training.optimizers.state.ShardedVariable." + name, None)
        save_by(dict(zip(want, slots, strict=True)), path)
        load(files, path)
    for name, each in files.items():
        np.testing.assert_array_equal(each.read_value(), want[name], strict=True)
    found = content(path)
    for name, value in want.items():
        np.testing.assert_array_equal(found[name][0], value, strict=True)
    # Files that one rank wrote, of which each rank reads its part, and such that other ranks do not see.
    save({name: value.copy() for name, value in want.items()}, tmp_path / "whole.h5")
    for file, seen in itertools.product(("s.h5", "whole.h5"), (True, False)):
        files = dict(zip(want, slots_of(ranks, 3), strict=True))
        with monkeypatch.context() as patch:
            patch.setattr(by_all, "is_one_file", lambda *_, seen=seen: seen)
            load(files, tmp_path / file)
        for name, each in files.items():
            np.testing.assert_array_equal(each.read_value(), want[name], strict=True)
    ranks.barrier()


@pytest.mark.ranks(min=2)
def test_what_is_shared_out_and_does_not_fit(ranks, tmp_path):
    slots = slots_of(ranks, 1)
    save({str(i): each for i, each in enumerate(slots[:4])}, tmp_path / "s.h5")
    state = {str(i): each for i, each in enumerate([*slots[1:4], slots[4]])}
    before = [each.read_value() for each in slots]
    with pytest.raises(ValueError, match=r"s\.h5: "):
        load(state, tmp_path / "s.h5")
    assert all((each.read_value() == value).all() for each, value in zip(slots, before, strict=True))
    ranks.barrier()


def test_a_damaged_table_of_boxes_is_refused(ranks, tmp_path):
    back = np.ones((40, 8))
    block = Block(np.zeros((40, 8)), (40 * RANK, 0), (40 * SIZE, 8))  # whose checksums are equal
    save({"b": block}, tmp_path / "b.h5")
    ranks.barrier()
    if RANK == 0:
        with h5py.File(tmp_path / "b.h5", "r+") as file:
            file[OF_BOXES + "b"][0, 0] = 8  # of rows from 0 on
    ranks.barrier()
    with pytest.raises(ChecksumError, match="its table of boxes is damaged"):
        load({}, tmp_path / "b.h5", own={"b": Block(back, block.offset, block.global_shape)})
    assert back.all()


def test_a_damaged_block_is_refused_on_all_ranks(ranks, tmp_path):
    rows = box(RANK, SIZE, 400)
    back = np.zeros((rows.stop - rows.start, 9))
    block = Block(back + RANK, (rows.start, 0), (400, 9))
    save({"b": block}, tmp_path / "b.h5")
    ranks.barrier()
    if RANK == 0:
        with h5py.File(tmp_path / "b.h5", "r+") as file:
            file["b"][399, 8] += 1
    ranks.barrier()
    with pytest.raises(ChecksumError, match="dataset 'b': the values of the box"):
        load({}, tmp_path / "b.h5", own={"b": Block(back, block.offset, block.global_shape)})
    assert not back.any()


@pytest.mark.ranks(min=2)
def test_blocks_that_do_not_fit_together(ranks, save_by, tmp_path):
    last = RANK == SIZE - 1
    for offset, shape, dtype, text in (
        (RANK if not last else 0, (SIZE,), "f8", r"the blocks of rank 0 .* and rank \d .* overlap"),
        (RANK, (SIZE + 1,), "f8", f"have {SIZE} of the {SIZE + 1} elements"),
        (RANK, (SIZE + last,), "f8", f"the block of rank {SIZE - 1} is of float64 with the global shape"),
        (RANK, (SIZE,), "f4" if last else "f8", f"the block of rank {SIZE - 1} is of float32"),
    ):
        with pytest.raises(ValueError, match=f"'b': .*{text}"):
            save_by({"b": Block(np.zeros(1, dtype), (offset,), shape)}, tmp_path / "b.h5")
    ranks.barrier()
    assert os.listdir(tmp_path) == []


@pytest.mark.ranks(min=2)
def test_kinds_and_paths_that_differ_between_ranks(ranks, save_by, tmp_path):
    u, last = np.ones(3), RANK == SIZE - 1
    block = Block(np.ones(1), (RANK,), (SIZE,))
    for state, own in (({}, {"u": block if last else u}), ({"u": u} if last else {}, {} if last else {"u": u})):
        with pytest.raises(MismatchError):
            save_by(state or {"v": u}, tmp_path / "b.h5", own=own or None)
    with pytest.raises(MismatchError, match=r"other\.h5"):
        save_by({"v": u}, tmp_path / ("other.h5" if last else "b.h5"))
    ranks.barrier()
    assert os.listdir(tmp_path) == []
    save_by({"v": u}, tmp_path / "b.h5")


def test_what_cannot_be_a_ranks_own(ranks, tmp_path):
    for state, own, error, text in (
        ({}, {"v": mpistrat.Variable(1.0)}, TypeError, "own has 'v', a variable"),
        ({"u": np.ones(2)}, {"u": np.ones(2)}, ValueError, "'u' is in the state and in own"),
        ({"u/0": np.ones(2)}, {"u": np.ones(2)}, ValueError, "cannot both be in a file"),
        ({}, {"u": np.array(["a"])}, TypeError, "'u' is a numpy.ndarray of <U1"),
        ({}, {}, ValueError, "no variables"),
    ):
        with pytest.raises(error, match=text):
            save(state, tmp_path / "b.h5", own=own)
    with pytest.raises(TypeError, match=r"'u' is .*load\(\) fills it"):
        load_arrays(tmp_path / "b.h5", {"u": mpistrat.PerReplica((np.ones(2),))})


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("where", ["write", "copy", "disk"])
def test_one_rank_that_fails_fails_on_all(ranks, save_by, tmp_path, monkeypatch, where):
    def fails(*_, **__):
        raise OSError(28, "no space for one rank")

    state, path = {"a": np.arange(90_000.0)}, tmp_path / "a.h5"
    save(state, path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            if where == "disk":  # the system says so in the middle of a write
                resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
            elif where == "copy":
                patch.setattr("mpistrat.training.checkpoint.write._part_of", fails)
            else:
                patch.setattr("mpistrat.training.checkpoint.write.write_box", fails)
                patch.setattr("mpistrat.training.checkpoint.write.checksum", fails)
        with pytest.raises(OSError, match=r"no space for one rank|so a checkpoint of 720000 bytes was not written"):
            save_by({"a": np.zeros(90_000)}, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    ranks.barrier()
    assert os.listdir(tmp_path) == ["a.h5"]
    with pytest.raises(NotADirectoryError):
        save_by(state, path / "below a file.h5")
    save_by({"a": np.zeros(90_000)}, path)
    assert not load_arrays(path)["a"].any()


@pytest.mark.parametrize("alone", [True, False])
def test_no_space_is_found_before_writing(comm, save_by, tmp_path, monkeypatch, alone):
    own = comm.Dup()
    Topology.of(own, limits=Limits(save_alone_bytes=1 << 30 if alone else 0))
    with mpistrat.MultiWorkerMirroredStrategy(comm=own).scope():
        state, path = {"a": np.ones(90_000)}, tmp_path / "a.h5"
        save_by(state, path)
        free = types.SimpleNamespace(f_blocks=999, f_bavail=175, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda folder: free)
        told = r"No space left on device for 720000 bytes: 716800 are free, so a checkpoint of 720000 bytes was not"
        with pytest.raises(OSError, match=told) as caught:
            save_by({"a": np.zeros(90_000)}, path)
        assert caught.value.errno == errno.ENOSPC or RANK
        assert load_arrays(path)["a"].all()
        free.f_blocks = 0  # of a file system that does not say
        save_by(state, path)
        comm.Barrier()
        assert os.listdir(tmp_path) == ["a.h5"]
    own.Free()


@pytest.mark.ranks(min=2)
def test_a_directory_that_some_ranks_do_not_see(ranks, save_by, tmp_path, monkeypatch):
    """Each rank has another directory under one name, as disks of nodes: the chief alone writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"node {RANK}").mkdir()
    monkeypatch.chdir(tmp_path / f"node {RANK}")
    save_by({"a": np.arange(90_000.0)}, "disk/a.h5")
    ranks.barrier()
    assert sorted(os.listdir(".")) == (["disk"] if RANK == 0 else [])
    if RANK == 0:
        assert os.listdir("disk") == ["a.h5"]
        assert (content("disk/a.h5")["a"][0] == np.arange(90_000.0)).all()
    slots = slots_of(ranks, 1)  # rank 0 writes and reads them for all
    want = [each.read_value() for each in slots]
    save_by({str(i): each for i, each in enumerate(slots)}, "disk/s.h5")
    like = slots_of(ranks, 2)
    load({str(i): each for i, each in enumerate(like)}, "disk/s.h5")
    for each, value in zip(like, want, strict=True):
        np.testing.assert_array_equal(each.read_value(), value, strict=True)
    seen = r"ranks? 1.* cannot write to rank 0's files in disk, and each rank writes its own parts"
    with pytest.raises(OSError, match=seen):
        save_by({}, "disk/b.h5", own={"u": np.ones(3)})


@pytest.mark.ranks(min=2)
def test_two_jobs_that_save_to_one_path(save_by, comm, tmp_path):
    own = comm.Split(RANK % 2)
    Topology.of(own, limits=Limits(save_alone_bytes=0))
    with mpistrat.MultiWorkerMirroredStrategy(comm=own).scope():
        for i in range(5):
            save_by({"a": np.full(90_000, 10 * (RANK % 2) + i)}, tmp_path / "a.h5")
    comm.Barrier()
    (value,) = {*load_arrays(tmp_path / "a.h5")["a"].tolist()}
    assert value in (4, 14)
    assert os.listdir(tmp_path) == ["a.h5"]
    own.Free()
