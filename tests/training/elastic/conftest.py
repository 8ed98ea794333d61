"""Start program.py, and look for what it leaves."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_program

PROGRAM = Path(__file__).with_name("program.py")


def result(ended):
    """What the program has computed."""
    ended.check()
    return re.search(r"\w{32} rows seen {3.0} steps 18", ended.output)[0]


def named(folder, by="cmdline"):
    """The processes whose command, or ``environ``, names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(folder) in (process / by).read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def nothing_left(folder, before, seconds=60):
    """Check that no process names the folder, and no copies are new. Those of other tests end with them."""
    new = {each for each in {*os.listdir("/dev/shm")} - before if each.startswith("mpistrat-elastic")}
    until = time.monotonic() + seconds
    while left := new & {*os.listdir("/dev/shm")} or named(folder):
        assert time.monotonic() < until, left
        # Jobs of other tests take longer on a busy machine.
        if not named(folder) and any(named(each, "environ") for each in new):
            until = time.monotonic() + seconds
        time.sleep(0.05)


@pytest.fixture
def run(tmp_path):
    def start(ranks, losses=(), *options, program=(str(PROGRAM),), limit=120, **environ):
        before = {*os.listdir("/dev/shm")}
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        command = [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks), *options, *program, str(folder)]
        ended = run_program([*command, json.dumps(losses)], limit, ROOT, **environ)
        nothing_left(folder, before)
        return ended

    return start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(PROGRAM), str(folder), "[]"]
    return result(run_program(command, 120, ROOT))
