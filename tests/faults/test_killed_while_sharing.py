"""Whether something stays in /dev/shm when a job is killed while its ranks make memory in common."""

import os
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_while_sharing.py")
SHARED = Path("/dev/shm")

pytestmark = [pytest.mark.fault, pytest.mark.skipif(not SHARED.is_dir(), reason="there is no /dev/shm")]


def ours():
    # Jobs that run beside this one have their flight records there.
    names = {name for name in os.listdir(SHARED) if name.startswith("mpistrat-")}
    return {name for name in names if not name.startswith("mpistrat-record-")}


def is_left(before):
    """Whether something stays. What jobs beside this one make has a name for a moment only."""
    end = time.monotonic() + 60
    while ours() - before:
        if time.monotonic() > end:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("first", [[], ["first"]])
@pytest.mark.parametrize("named", ["named", "nameless"])
@pytest.mark.parametrize(("where", "rank"), [("ftruncate", 0), ("pwrite", 0), ("stat", 1), ("pread", 1)])
def test_nothing_is_left(run_ranks, where, rank, named, first):
    before = ours()
    ended = run_ranks(2, PROGRAM, where, rank, named, *first)
    assert ended.status == 128 + 9, str(ended)
    assert "no rank was killed" not in ended.output
    assert not is_left(before)


def test_nothing_is_left_just_before_it_would_be_removed(run_ranks):
    before = ours()
    assert run_ranks(3, PROGRAM, "unlink", 0, "named").status == 128 + 9
    assert not is_left(before)
