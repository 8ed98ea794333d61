"""Tests of the memory of reading: it holds the batches that wait or are in use, and does not grow."""

import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from mpistrat.data import AUTOTUNE, AutoShardPolicy, Dataset
from mpistrat.data.distribute.autoshard import divide
from mpistrat.replicas import ReplicaGroup

PROGRAM = Path(__file__).with_name("memory_program.py")
BEYOND, GROWTH = 64 << 20, 16 << 20
SMALL, LARGE = 64 << 10, 32 << 20
LAYOUTS = {
    "contiguous": {},
    "contiguous, shuffled": {},
    "gzip, shuffled": {"compression": "gzip", "compression_opts": 1},
    "vlen": {},
    "mapped rows": {},
    "mapped batches": {},
    "rests": {},
}


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
@pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["64 KiB", "32 MiB"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_memory_is_bounded_and_flat_over_fifty_epochs(tmp_path, case, nbytes, run_alone):
    path, batches = tmp_path / "a.h5", 40 if nbytes == SMALL else 2
    width = max(16, min(nbytes // 8, 256 << 10) // 4)  # of a row, in float32
    size = nbytes // (4 * width)
    rows = batches * size + 1
    stored = width // 64 if "mapped" in case else width
    with h5py.File(path, "w") as f:
        how = dict(LAYOUTS[case], **({"chunks": (max(1, size // 16), width)} if "gzip" in case else {}))
        if case == "vlen":
            x = f.create_dataset("x", (rows,), h5py.vlen_dtype("f4"))
        else:
            x = f.create_dataset("x", (rows, stored), "f4", **how)
        for start in range(0, rows, size):
            block = np.arange(start, min(start + size, rows), dtype="f4")[:, None].repeat(stored, axis=1)
            if case == "vlen":
                for i, row in enumerate(block):
                    x[start + i] = row
            else:
                x[start : start + len(block)] = block
    waiting = 16 if nbytes == SMALL and "mapped" not in case else 2
    ended = run_alone(
        PROGRAM, path, case, str(size), str(waiting), "0.001",
        limit=100,
        # How much freed memory malloc keeps depends on the timing of threads: these settings make it keep none.
        MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="1048576",
    ).check()  # fmt: skip
    beyond, growth, largest = map(int, ended.output.split())
    assert largest == nbytes
    assert beyond <= BEYOND, ended.output
    assert growth <= GROWTH, ended.output


@pytest.mark.parametrize("policy", ["DATA", "FILE", "OFF"])
def test_how_far_ahead_follows_from_the_batch_size(tmp_path, policy):
    """The next batch does not decide, since it may be the small one at the end."""
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.h5", "w") as f:
            f.create_dataset("x", (41, 1024, 256), "f4", fillvalue=1)  # of 1 MiB
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), "x")

    def ahead(size, shuffled):
        rows = dataset.batch(size)
        rows = rows.repeat(2).shuffle(seed=0) if shuffled else rows
        peers = [ReplicaGroup(SimpleNamespace(size=2, rank=rank)) for rank in range(2)]
        made = [
            divide(AutoShardPolicy[policy], rows.definition.source, rows.definition.transforms, peer, False)
            for peer in peers
        ]
        assert len({each.prefetch_sizes(AUTOTUNE) for each in made}) == 1
        return made[0].prefetch_sizes(AUTOTUNE)

    for shuffled in (False, True):
        assert ahead(16, shuffled) == (2, 1)  # two of 8 MiB
        assert ahead(4, shuffled) == (1, 2)  # once two of 2 MiB
        assert ahead(2, shuffled) == (2, 2)  # two times two of 1 MiB
