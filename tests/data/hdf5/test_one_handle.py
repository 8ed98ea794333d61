"""Rows with members of variable length, while several handles could be open on their file. HDF5 crashes if two are."""

import subprocess
import sys

import h5py
import pytest

PROGRAM = """
import gc, os, sys, warnings
import h5py, numpy as np
from mpistrat.data import Dataset

KIND = [("i", "i4"), ("s", h5py.string_dtype())]
with h5py.File("v.h5", "w") as file:
    rows = file.create_dataset("rows", (64,), dtype=KIND, track_times=True)
    rows[...] = np.array([(k, b"x" * (k % 5)) for k in range(64)], KIND)
    inner = file.create_dataset("arrays", (64,), dtype=np.dtype((KIND, (2,))))
    inner[...] = np.repeat(rows[...], 2).reshape(64, 2)
    expected = rows[...]

def make(name="rows"):
    return iter(Dataset.from_hdf5("v.h5", name).batch(4))

def check(*batches):
    for batch in batches:
        assert batch["i"].tolist() == expected["i"][batch["i"].ravel()].reshape(batch["i"].shape).tolist()
        assert batch["s"].tolist() == expected["s"][batch["i"].ravel()].reshape(batch["i"].shape).tolist()
    return sum(map(len, batches))

def two(name="rows"):
    one, other = make(name), make(name)
    check(next(one), next(other))
    assert check(*one) == 60
    del one
    gc.collect()
    assert check(*other) == 60

def arrays():
    two("arrays")

def programs_first():  # the type of the dataset is that of the handle which the program closes
    mine = h5py.File("v.h5", "r")
    look = mine["rows"]
    assert look[1]["i"] == 1
    rows, others = make(), make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(next(rows), next(others))
    assert any("open by h5py" in str(each.message) for each in said), said
    mine.close()
    gc.collect()
    assert check(*rows) == 60 and check(*others) == 60

def programs_last():
    rows = make()
    check(next(rows))
    mine = h5py.File("v.h5", "r")
    look = mine["rows"]
    assert look[1]["i"] == 1
    check(*rows)
    del rows
    gc.collect()
    assert look[63]["s"] == b"xxx"
    mine.close()
    assert check(*make()) == 64
    gc.collect()
    with h5py.File("v.h5", "a"):  # nothing holds it now
        pass

def forked():
    rows = make()
    check(next(rows))
    child = os.fork()
    if not child:
        status = 1
        try:
            assert check(*rows) == 60 and check(*make()) == 64
            status = 0
        finally:
            os._exit(status)
    assert check(*make()) == 64
    assert os.waitpid(child, 0)[1] == 0
    assert check(*rows) == 60

def replaced():  # another file at the path of an open one
    rows = make()
    check(next(rows))
    with h5py.File("new.h5", "w") as file:
        file["rows"] = np.arange(5)
    os.replace("v.h5", "old.h5")
    os.replace("new.h5", "v.h5")
    assert [b.tolist() for b in Dataset.from_hdf5("v.h5", "rows").batch(5)] == [[0, 1, 2, 3, 4]]

globals()[sys.argv[1]]()
print("ended")
"""


old = pytest.mark.skipif(
    h5py.version.version_tuple[:2] < (3, 11), reason="h5py 3.10 cannot read the arrays of compounds that it writes"
)


@pytest.mark.parametrize(
    "way",
    [
        "two",
        pytest.param("arrays", marks=old),
        *(
            pytest.param(way, marks=pytest.mark.full)
            for way in ("programs_first", "programs_last", "forked", "replaced")
        ),
    ],
)
def test_handles_of_one_file(way, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
