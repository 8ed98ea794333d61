"""Ranks that are killed while they append to a file: the steps that were flushed are whole, and others go on with it.

``MPISTRAT_TEST_KILLS=300 python -m pytest tests/data/write/test_killed_writer.py`` kills more jobs.
"""

import contextlib
import os
import random
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

PROGRAM = """
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import mpistrat
from mpistrat.data import Writer

path, seconds, compress, shards = sys.argv[1], float(sys.argv[2]), *[*sys.argv[3:], None, None][:2]
version = {"zarr_format": 3, "shards": int(shards)} if shards else {}
comm = mpistrat.MultiWorkerMirroredStrategy().comm
processes = comm.allgather(os.getpid())


flushed = threading.Event()


def kill():
    if seconds > 0.1:
        flushed.wait()
    time.sleep(seconds)
    others = [each for each in processes if each != os.getpid()]
    for each in [*random.sample(others, len(others)), os.getpid()]:
        os.kill(each, signal.SIGKILL)


with Writer(path, "a", compress=compress, **version) as writer:
    step = writer.steps("u")
    comm.Barrier()
    if comm.rank == 0:
        threading.Thread(target=kill, daemon=True).start()
    while True:
        writer.append("u", np.arange(comm.rank * 3000, (comm.rank + 1) * 3000) + step)
        writer.append("time", step / 2)
        step += 1
        if step % 3 == 0:
            writer.flush()
            if comm.rank == 0:
                with open(f"{path}.flushed", "w") as file:
                    file.write(f"{step:20}")
                flushed.set()
"""
HOW = [("u.h5",), ("u.h5", "gzip"), ("u.zarr",)]
with contextlib.suppress(ImportError):
    import zarr

    HOW += [("u.zarr", "gzip", "5")] * hasattr(zarr, "create_array")
KILLS = int(os.environ.get("MPISTRAT_TEST_KILLS", len(HOW)))

pytestmark = pytest.mark.fault


@pytest.fixture
def folder(tmp_path):
    """A folder in memory, if there is one: no time goes into syncs, and the kills meet the writes."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def stored(path):
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {name: file[name][()] for name in file}
    store = pytest.importorskip("zarr").open(str(path), mode="r")
    return {name: store[name][...] for name in store}


@pytest.mark.timeout(120 * KILLS)
def test_flushed_steps_are_whole(run_ranks, folder):
    """In each file, a job goes on where the one before was killed."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    draw, sizes = random.Random(os.urandom(8)), {}
    for number in range(KILLS):
        how = HOW[number % len(HOW)]
        path = folder / "-".join(how[1:]) / how[0]
        path.parent.mkdir(exist_ok=True)
        flushed = Path(f"{path}.flushed")
        before = int(flushed.read_text() or 0) if flushed.exists() else 0
        ended = run_ranks(4, program, path, draw.uniform(0.1 if number < len(HOW) else 0, 0.5), *how[1:], limit=100)
        assert ended.status not in (0, None), str(ended)
        assert "Traceback" not in ended.output, str(ended)
        least = max(before, int(flushed.read_text() or 0) if flushed.exists() else 0)
        found = stored(path)
        assert least == 0 or {*found} == {"u", "time"}
        for values in found.values():
            steps = np.arange(len(values))
            assert least <= len(values), (how, number)
            want = steps / 2 if values.ndim == 1 else np.arange(12_000) + steps[:, None]
            np.testing.assert_array_equal(values, want)
        sizes[how] = len(found.get("u", ()))
    assert len(HOW) > KILLS or all(sizes.values()), sizes
