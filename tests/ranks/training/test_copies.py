"""Copies of a state in memory: what is written is read, or it is not used."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpistrat
from mpistrat.runtime.topology import Topology
from mpistrat.training.elastic_copies import MemoryCopies, newest, newest_steps

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = ["bool", "i1", "u8", "f2", "f4", "f8", "c16", "S3", np.dtype("bfloat16")]
ARRAYS = st.lists(st.tuples(st.sampled_from(range(len(DTYPES))), st.lists(st.integers(0, 5), max_size=3)), max_size=6)


@pytest.fixture
def folder(comm, tmp_path):
    folder = comm.bcast(tmp_path / "copies")
    if comm.rank == 0:
        folder.mkdir(mode=0o700)
    comm.Barrier()
    return folder


def made(what, seed):
    rng = np.random.default_rng(seed)
    return {
        f"{i}/é": rng.integers(0, 2, shape).astype("i1").astype(DTYPES[dtype]) for i, (dtype, shape) in enumerate(what)
    }


@settings(max_examples=25, deadline=None)
@given(what=ARRAYS, more=ARRAYS, run=st.integers(0, 3))
def test_what_is_written_is_read(comm, folder, what, more, run):
    topology = Topology.of(comm)
    copies = MemoryCopies(folder / "0", topology, run)
    for step, arrays in ((3, made(what, 0)), (5, made(more, 1)), (9, made(what, 2))):
        topology.barrier()
        copies.write(step, arrays)
    assert copies.steps == [5, 9]
    topology.barrier()
    step, found = newest(folder / "0", topology, run + 1)
    assert newest(folder / "0", topology, run) is None  # of a run before this one
    assert (step, newest_steps(folder)) == (9, [9])
    if comm.rank:
        assert found is None
    else:
        expected = made(what, 2)
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name].tobytes() == value.tobytes()
    topology.barrier()


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_that_was_changed_is_not_used(comm, folder, seed):
    topology = Topology.of(comm)
    rng = np.random.default_rng(seed)
    copies = MemoryCopies(folder, topology, 0)
    for step in (1, 2):
        topology.barrier()
        copies.write(step, {"a": np.arange(100.0) + step, "b": np.ones((3, 4), "f4")})
    topology.barrier()
    if comm.rank == 0:
        path = folder / f"0.1.{rng.integers(comm.size)}"
        content = path.read_bytes()
        used = 48 + len('[["a","float64","<f8",[100]],["b","float32","<f4",[3,4]]]') + 848 // comm.size
        place = 8 + seed if seed < 4 else int(rng.integers(used))  # the step, or anything
        with path.open("r+b") as file:
            if seed == 4:
                file.truncate(place)
            else:
                file.seek(place)
                file.write(bytes([content[place] ^ 1 << int(rng.integers(8))]))
    topology.barrier()
    step, found = newest(folder, topology, 1)
    assert step == 1
    if comm.rank == 0:
        np.testing.assert_array_equal(found["a"], np.arange(100.0) + 1)
    topology.barrier()


def test_a_node_keeps_one_old_copy_until_a_new_one_is_whole(comm, folder):
    topology = Topology.of(comm)

    def write(copies, step):
        topology.barrier()
        copies.write(step, {"a": np.full(100, step)})
        topology.barrier()
        parts = sorted(path.name[:4] for path in folder.glob("*.0"))  # the run and the slot of rank 0's
        topology.barrier()
        return parts

    before, after = MemoryCopies(folder, topology, 0), MemoryCopies(folder, topology, 1)
    assert [write(before, step) for step in (1, 2)] == [["0.0."], ["0.0.", "0.1."]]
    assert newest(folder, topology, 1)[0] == 2
    assert [write(after, step) for step in (3, 4)] == [["0.1.", "1.0."], ["1.0.", "1.1."]]
    assert newest(folder, topology, 2)[0] == 4


def test_a_folder_of_others_is_refused_on_all_ranks(comm, folder):
    if comm.rank == 0:
        os.chmod(folder, 0o755)
    comm.Barrier()
    with pytest.raises(OSError, match="not a directory of this user alone"):
        MemoryCopies(folder, Topology.of(comm), 0).write(1, {"a": np.ones(3)})


def test_no_room_is_an_error_on_all_ranks(comm, folder):
    mpistrat.rc.elastic_memory = 100
    try:
        with pytest.raises(OSError, match=r"800 bytes in .*, where at most 100 are taken"):
            MemoryCopies(folder, Topology.of(comm), 0).write(1, {"a": np.ones(100)})
    finally:
        del mpistrat.rc.elastic_memory


def test_room_for_two_copies_is_enough(comm, folder, monkeypatch):
    arrays = {"a": np.zeros(1 << 20, "u1")}

    def free(path):
        used = sum(path.stat().st_blocks for path in folder.iterdir()) * 512
        return SimpleNamespace(f_frsize=1, f_bavail=2 * arrays["a"].nbytes + (1 << 16) - used)

    monkeypatch.setattr(os, "statvfs", free)
    topology = Topology.of(comm)
    copies = MemoryCopies(folder, topology, 0)
    for step in (1, 2, 3):
        topology.barrier()
        copies.write(step, arrays)
    assert copies.steps == [2, 3]


@pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="two nodes have two ranks")
@pytest.mark.parametrize("lost", ["the first node", "a part of the first node", "nothing"])
def test_the_newest_copy_of_any_node_wins(comm, tmp_path, lost):
    """Nodes have folders of their own; the state of one that is lost, or is one step behind, comes from another one."""
    own = comm.Dup()
    topology = Topology.of(own, split=lambda comm: int(comm.rank >= comm.size // 2))
    node = 0 if comm.rank < comm.size // 2 else 1
    folder = comm.bcast(tmp_path / "node") / str(node)
    copies = MemoryCopies(folder, topology, 0)
    for step in (1, 2):
        topology.barrier()
        copies.write(step, {"a": np.arange(11.0) * step})
    topology.barrier()
    if topology.node.rank == 0 and node == 0 and lost != "nothing":
        for path in folder.iterdir():
            if lost == "the first node" or path.name.startswith("0.1."):
                path.unlink()
    topology.barrier()
    step, found = newest(folder, topology, 1)
    assert step == 2
    if comm.rank == 0:
        np.testing.assert_array_equal(found["a"], np.arange(11.0) * 2)
    topology.barrier()
    own.Free()
