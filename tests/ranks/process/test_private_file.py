"""Files that the ranks of a node have open together, however they can be handed on."""

import os
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.memory import node as shared_memory
from mpistrat.process import private_file

WORLD = MPI.COMM_WORLD
NODE = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
FOLDER = "/dev/shm"

pytestmark = pytest.mark.skipif(not Path(FOLDER).is_dir(), reason="there is no /dev/shm")


@pytest.fixture
def made(monkeypatch):
    """The paths of files with a name that this rank makes: jobs beside this one have such files, too."""
    create, paths = private_file.create, []

    def noted(*arguments):
        descriptor, path = create(*arguments)
        paths.append(path)
        return descriptor, path

    monkeypatch.setattr(private_file, "create", noted)
    return paths


def refuse(*_):
    raise OSError("not here")


def same_on_all(descriptor):
    """Whether what one rank writes is what all read."""
    text = WORLD.bcast(os.urandom(8))
    if NODE.rank == 0:
        os.pwrite(descriptor, text, 0)
    NODE.Barrier()
    return os.pread(descriptor, 8, 0) == text


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc")
def test_needs_no_name(monkeypatch):
    monkeypatch.setattr(private_file, "create", refuse)
    descriptor = private_file.share(NODE, FOLDER, 100)
    assert os.fstat(descriptor).st_nlink == 0
    assert not os.pread(descriptor, 100, 0).strip(b"\0")
    NODE.Barrier()
    assert same_on_all(descriptor)
    NODE.Barrier()
    os.close(descriptor)


def test_has_a_name_for_a_moment_where_it_needs_one(monkeypatch, made):
    monkeypatch.setattr(private_file, "create_without_name", refuse)
    descriptor = private_file.share(NODE, FOLDER, 0)
    NODE.Barrier()
    assert os.fstat(descriptor).st_nlink == 0
    assert len(made) == (NODE.rank == 0)
    assert not any(map(os.path.exists, made))
    assert same_on_all(descriptor)
    NODE.Barrier()
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["file", "pipe", "missing"])
def test_another_file_is_left_alone(kind, monkeypatch, tmp_path):
    """What the path of the first rank may be elsewhere: that of another process, in a container of its own."""
    path = tmp_path / "other"
    if NODE.rank == 0:  # all have the same folder
        if kind == "file":
            path.write_bytes(b"precious")
        elif kind == "pipe":
            os.mkfifo(path)
    own = private_file.create_without_name
    monkeypatch.setattr(private_file, "create_without_name", lambda folder: (own(folder)[0], str(path)))
    descriptor = private_file.share(NODE, FOLDER, 50)
    assert same_on_all(descriptor)
    if kind == "file":
        assert path.read_bytes() == b"precious"
    NODE.Barrier()
    os.close(descriptor)


def test_error_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(private_file, "create_without_name", refuse)
    monkeypatch.setattr(private_file, "create", refuse)
    with pytest.raises(OSError, match="not here"):
        private_file.share(NODE, FOLDER, 50)
    with pytest.raises(shared_memory.NoSharedMemoryError, match=f"{NODE.size} ranks of a node .*not here"):
        shared_memory.share(NODE, 50)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("own", "common"), [(1, 0), (5000, 1), (0, 7)])
def test_memory_is_zeroed_and_common(own, common, named, monkeypatch):
    if named:
        monkeypatch.setattr(private_file, "create_without_name", refuse)
    shared = shared_memory.share(NODE, own, common)
    assert shared.rows.shape[1] >= own
    assert len(shared.common) >= common
    assert not shared.rows.any()
    assert not shared.common.any()
    NODE.Barrier()
    if own:
        shared.rows[NODE.rank, :own] = NODE.rank + 1
        NODE.Barrier()
        assert np.array_equal(shared.rows[:, own - 1], np.arange(1, NODE.size + 1))
    NODE.Barrier()


@pytest.mark.parametrize("named", [False, True])
def test_no_room(named, monkeypatch, made):
    if named:
        monkeypatch.setattr(private_file, "create_without_name", refuse)
    room = os.statvfs(FOLDER)
    nbytes = (room.f_blocks + 1) * room.f_frsize
    with pytest.raises(shared_memory.NoSharedMemoryError, match=r"No space left|Cannot allocate"):
        shared_memory.share(NODE, nbytes)
    assert len(made) == (named and NODE.rank == 0)
    assert not any(map(os.path.exists, made))
