"""Hostile data files, drawn by `hostile_files`: each ends soon, in little memory, and opens no other file.

``MPISTRAT_TEST_HOSTILE=2000 python -m pytest tests/data/test_hostile_files.py`` draws more files, and
``MPISTRAT_TEST_HOSTILE=57-58`` a single one again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from tests.data import hostile_files

pytest.importorskip("zarr", reason="zarr is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
MOST_MIB = 512 + (int(hostile_files.LIMITS["MPISTRAT_DATA_BLOCK_BYTES"]) >> 20)
ROOT = str(Path(__file__).parents[2])
OF_SYSTEM = (ROOT, "/proc/", "/sys/", "/usr/", "/lib", "/etc/ld.so", "/etc/ssl/", sys.prefix, sys.base_prefix)
TRACED = ["strace", "--follow-forks", "--seccomp-bpf", "-qq", "-e", "trace=open,openat,openat2,stat,newfstatat,access"]


def numbers():
    """Return the first number and the last one of each test: what the environment says, else a few in the core."""
    if given := os.environ.get("MPISTRAT_TEST_HOSTILE"):
        first, _, last = given.rpartition("-")
        return [(int(first or 0), int(last))]
    return [(0, 10), pytest.param(10, 40, marks=pytest.mark.full), pytest.param(40, 200, marks=pytest.mark.full)]


def can_trace():
    return shutil.which("strace") and not subprocess.run([*TRACED, "true"], capture_output=True).returncode


@pytest.mark.timeout(0 if "MPISTRAT_TEST_HOSTILE" in os.environ else 300)
@pytest.mark.skipif(sys.platform != "linux", reason="the process reads its memory from /proc")
@pytest.mark.parametrize(("first", "last"), numbers())
def test_hostile_files(tmp_path, first, last):
    (tmp_path / "outside").mkdir()
    os.mkfifo(tmp_path / "outside" / "fifo")
    with h5py.File(tmp_path / "outside" / "secret.h5", "w") as file:
        file["x"] = hostile_files.ROWS
    log = tmp_path / "opened"
    command = [sys.executable, hostile_files.__file__, str(tmp_path), str(first), str(last)]
    done = subprocess.run(
        [*TRACED, "-o", str(log), *command] if can_trace() else command,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    opened = traced(log.read_text()) if log.exists() else {}
    wrong = []
    for line in done.stdout.splitlines():
        drawn, end = json.JSONDecoder().raw_decode(line)
        said = json.loads(line[end:] or '{"wrong": "it did not end"}')
        if said["wrong"]:
            wrong.append((drawn, said["wrong"]))
            continue
        if said["MiB"] > MOST_MIB:
            wrong.append((drawn, f"it took {said['MiB']} MiB"))
        own = str(tmp_path / str(drawn["number"]))
        paths = {*said["opened"], *opened.get(drawn["number"], ())}
        others = [path for path in paths if path[0] == "/" and not path.startswith((own, *OF_SYSTEM))]
        wrong += [(drawn, f"it opened {path}") for path in others]
    assert not wrong, "\n".join(map(str, wrong))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == last - first


def traced(log):
    """Return the files that were opened for each case."""
    found, number = {}, None
    for line in log.splitlines():
        if match := re.search(r'"/begin-(\d+)"', line):
            number = int(match[1])
        elif '"/end"' in line:
            number = None
        elif number is not None and (match := re.search(r' open\w*\((?:AT_FDCWD, )?"([^"]+)"', line)):
            found.setdefault(number, set()).add(match[1])
    return found
