"""The board on which the nodes of a job leave notices for each other, and its patience with file systems."""

import os
import tempfile
import threading
import time

import pytest

from mpistrat.process.waiting import within
from mpistrat.runtime.without_mpi.board import SharedDirectory


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Three directories: that for work, the home, and that for temporary files."""
    for name in ("work", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
def test_the_working_directory_is_used_if_it_is_on_a_file_system_of_its_own(places, monkeypatch):
    SharedDirectory("job").post("first", 1)
    assert [each.parent for each in places.rglob(".mpistrat-board-*")] == [places / "home"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        monkeypatch.chdir(other)
        board = SharedDirectory("job")
        board.post("second", 2)
        assert len(os.listdir(other)) == 1
        board.take_down(["second"])
        assert not os.listdir(other)
    assert SharedDirectory("job").names() == {"first"}


def test_a_file_system_that_does_not_answer_is_left_alone_until_it_does(places, monkeypatch):
    release, hangs = threading.Event(), []
    listdir = os.listdir

    def hang(path):
        if str(path).startswith(str(places / "home")):
            hangs.append(path)
            release.wait(60)
        return listdir(path)

    board = SharedDirectory("job")
    board.post("first", 1)
    monkeypatch.setattr("mpistrat.runtime.without_mpi.board._ANSWER_S", 0.2)
    monkeypatch.setattr("os.listdir", hang)
    assert board.names() == set()
    assert board.names() == set()
    while not hangs:  # until the thread that asks had a core
        pass
    assert len(hangs) == 1
    monkeypatch.setattr("mpistrat.runtime.without_mpi.board._ANSWER_S", 60.0)
    release.set()
    while not board.names():  # until the thread that hung has ended
        pass
    assert board.names() == {"first"}


def test_nodes_that_share_one_directory_only_read_each_others_notices(places, monkeypatch):
    SharedDirectory("job").post("first", {"rank": 0})
    (places / "elsewhere").mkdir()
    monkeypatch.chdir(places / "elsewhere")  # another node: only the home is the same
    monkeypatch.setattr("tempfile.tempdir", str(places / "elsewhere"))
    other = SharedDirectory("job")
    assert other.names() == {"first"}
    assert other.read("first") == {"rank": 0}
    assert other.claim("report")
    monkeypatch.chdir(places / "work")
    assert not SharedDirectory("job").claim("report")


def test_a_board_leaves_nothing(places):
    board = SharedDirectory("job")
    assert not any(places.rglob("*board*"))  # not before the first notice
    board.post("first", 1)
    board.post("second", 1)
    board.take_down(["first"])
    assert board.names() == {"second"}
    board.take_down([], lambda name: name == "second")
    assert board.names() == set()
    assert not any(places.rglob("*board*"))


def test_the_boards_of_jobs_do_not_mix(places):
    SharedDirectory("job").post("first", 1)
    assert SharedDirectory("other").names() == set()
    assert SharedDirectory("other").read("first") is None


def test_a_directory_that_others_can_write_to_is_passed_over(places):
    SharedDirectory("job").post("first", 1)
    for folder in places.rglob(".mpistrat-board-*"):
        folder.chmod(0o777)
    assert SharedDirectory("job").names() == set()
    assert not SharedDirectory("job").read("first")


def test_places_that_cannot_be_written_are_passed_over(places):
    (places / "work" / "file").touch()
    board = SharedDirectory("job", [places / "work" / "file"])
    board.post("first", 1)
    assert board.read("first") == 1


def test_old_boards_are_removed(places):
    SharedDirectory("killed").post("first", 1)
    old = list(places.rglob(".mpistrat-board-*"))
    for folder in old:
        os.utime(folder, (time.time() - 1e6,) * 2)
    SharedDirectory("job").post("first", 1)
    assert old
    assert not any(each.exists() for each in old)


def test_a_damaged_notice_is_none(places):
    board = SharedDirectory("job")
    board.post("first", 1)
    for path in places.rglob("first.json"):
        path.write_text("{")
    assert board.read("first") is None


def test_a_result_or_an_error_comes_back():
    assert within(60.0, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


def test_a_call_that_does_not_return_is_left_alone():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, release.wait)
    release.set()


def test_a_notice_that_comes_late_is_taken_down_all_the_same(places, monkeypatch):
    """A file system hangs while a rank asks, and answers again after the hang: other ranks must not see it then."""
    from mpistrat.runtime.without_mpi import board as module

    answers, write = threading.Event(), module.write_json

    def write_late(path, value):
        answers.wait(60)
        write(path, value)

    monkeypatch.setattr(module, "write_json", write_late)
    late = SharedDirectory("job")
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    late.post("asks", 1)
    assert late.names() == set()
    before = set(threading.enumerate())
    late.take_down({"asks"})
    (removal,) = set(threading.enumerate()) - before
    answers.set()
    removal.join(60)
    assert SharedDirectory("job").names() == set()
    assert not any(places.rglob(".mpistrat-board-*"))


@pytest.mark.parametrize(("kind", "delay"), [("nfs4", 60.0), ("nfs", 60.0), ("ext4", 0.0)])
def test_a_network_file_system_may_show_notices_late(places, monkeypatch, kind, delay):
    device = os.stat(places).st_dev
    mounts = places / "mountinfo"
    mounts.write_text(
        "21 1 0:999999 / / rw - tmpfs tmpfs rw\n"
        "22 1 0:999998 / /media/caf\u00e9 rw - vfat usb rw\n"  # not UTF-8, as the names of mounts may be
        f"36 25 {os.major(device)}:{os.minor(device)} / /home rw,relatime shared:1 - {kind} server:/home rw\n",
        encoding="latin-1",
    )
    monkeypatch.setattr("mpistrat.runtime.without_mpi.board._MOUNTS", mounts)
    assert SharedDirectory("job").delay == delay
