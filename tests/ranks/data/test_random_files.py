"""Files that h5py, pyarrow and pandas write with options at random: their rows, or an error, on any number of ranks.

Some bytes are cut off or flipped then. The rows are those that the library of the format reads, those that were
written, or refused.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from tests.data.formats import random_tables
from tests.selection import core

pytest.importorskip("pyarrow")
FILES = 30  # of each format
pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="few rows")


@pytest.mark.parametrize("form", core(random_tables.FORMATS, "csv"))
def test_random_files(comm, tmp_path, form):
    if form == "csv":
        pytest.importorskip("pandas")
    found = Counter(random_tables.compare(form, seed, tmp_path, comm) for seed in range(FILES))
    assert found["equal"] > FILES // 3


@pytest.mark.full
@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="one rank is enough")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["hdf5", "parquet"])
def test_random_damage(tmp_path, form):
    write, outcomes = random_tables.FORMATS[form][0], Counter()
    for seed in range(FILES):
        rng, path, bad = np.random.default_rng(seed), tmp_path / f"{seed}.{form}", tmp_path / f"bad.{form}"
        try:
            write(path, rng)
        except Exception:  # options that do not go together
            continue
        for _ in range(8):
            data = bytearray(Path(path).read_bytes())
            for place in rng.integers(len(data), size=3).tolist():
                data[place] ^= 1 << int(rng.integers(8))
            bad.write_bytes(data[: int(rng.integers(1, len(data)))] if not rng.integers(4) else data)
            try:
                found = random_tables.verdict(form, bad, random_tables.library_reads(form, bad))
            except AssertionError:  # HDF5 takes rows that a damaged index does not lead to for unwritten ones
                found = random_tables.verdict(form, bad, random_tables.library_reads(form, path))
            outcomes["rows" if found == "equal" else "refused"] += 1
    assert min(outcomes["rows"], outcomes["refused"]) > FILES // 3, outcomes
