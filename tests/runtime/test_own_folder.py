"""Directories that ranks share: what was not made here is neither used nor removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.launch.launchers import hashed
from mpistrat.runtime.without_mpi import board
from mpistrat.runtime.without_mpi.board import FileQueue, Inbox, SharedDirectory

KEY = "a job"
MESSAGES = f"messages {KEY}"


@pytest.fixture
def results(tmp_path):
    """A directory of the user with results, one level down."""
    made = tmp_path / "results"
    (made / "run1").mkdir(parents=True)
    (made / "run1" / "data").write_text("of months")
    (made / "file").write_text("too")
    return made


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_another_directory_at_the_expected_place(tmp_path, results, mode, monkeypatch):
    home, place = tmp_path / "home", tmp_path / "place"
    for each in (home, place):
        each.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    results.chmod(mode)
    planted = home / f".mpistrat-board-{hashed(MESSAGES)}"
    results.rename(planted)
    place.chmod(0o777)  # others may write here: it is not used
    inbox, outbox = Inbox(KEY), FileQueue(KEY, 1)
    assert not inbox.works
    assert not outbox.works
    outbox.put("message")
    outbox.close()
    inbox.close()
    own_folder_of_board = home / f".mpistrat-board-{hashed(KEY)}"
    planted.rename(own_folder_of_board)
    os.utime(own_folder_of_board, (0, 0))  # older than those that are removed
    board = SharedDirectory(KEY)
    board.post("notice", 1)
    board.claim("notice")
    board.take_down(["file", "notice"])
    SharedDirectory("another job").post("notice", 1)
    assert (own_folder_of_board / "run1" / "data").read_text() == "of months"
    assert (own_folder_of_board / "file").read_text() == "too"
    assert list(place.iterdir()) == []


def test_what_was_made_is_used_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inbox, outbox = Inbox(KEY), FileQueue(KEY, 1)
    outbox.put({"all": "well"})
    inbox.collect()
    assert inbox.messages == {1: {"all": "well"}}
    outbox.close()
    inbox.close()
    assert list(tmp_path.iterdir()) == []


def test_directories_in_one_that_was_made_stay(tmp_path):
    folder = tmp_path / "made"
    assert board.make_own_folder(folder)
    assert board.make_own_folder(folder)
    (folder / "inside").mkdir()
    (folder / "file").write_text("")
    (tmp_path / "target").write_text("stays")
    (folder / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="not empty"):
        board.remove_own_folder(folder)
    assert [each.name for each in folder.iterdir()] == ["inside"]
    assert (tmp_path / "target").read_text() == "stays"
    (tmp_path / "to made").symlink_to(folder)
    with pytest.raises(OSError):
        board.remove_own_folder(tmp_path / "to made")


VICTIM = """
import os, sys
import mpistrat.launch.launchers
from mpistrat.runtime.without_mpi.board import Inbox
os.setgid(65533)
os.setuid(65533)  # after the imports: the other user may not read this Python
os.environ["HOME"] = sys.argv[1]
os.chdir(sys.argv[2])
inbox = Inbox("a job")
inbox.close()
print("works", inbox.works)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")
def test_two_users_of_one_folder(tmp_path):
    """Another user renames the results of the first one, in a folder that both write to, to the expected name."""
    shared, home = tmp_path / "shared", tmp_path / "home"
    for each in (*reversed(tmp_path.parents[:3]), tmp_path):
        each.chmod(each.stat().st_mode | 0o055)
    shared.mkdir()
    home.mkdir()
    (shared / "results").mkdir(mode=0o700)
    (shared / "results" / "data").write_text("of months")
    for each in (home, shared / "results", shared / "results" / "data"):
        os.chown(each, 65533, 65533)
    shared.chmod(0o777)
    rename = ["import os, sys; os.setuid(65534); os.rename(*sys.argv[1:])", shared / "results"]
    planted = shared / f".mpistrat-board-{hashed(MESSAGES)}"
    subprocess.run([sys.executable, "-c", *map(str, rename), str(planted)], check=True)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(home), str(shared)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout == "works True\n", done.stderr
    assert (planted / "data").read_text() == "of months"
    assert list(home.iterdir()) == []
