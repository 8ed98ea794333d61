"""A checkpoint that 8 ranks wrote, on other numbers of ranks."""

PROGRAM = """
import os, sys
import numpy as np
import h5py
from mpi4py import MPI
import mpistrat
from mpistrat.data import Block
from mpistrat.runtime.topology import Limits
from mpistrat.runtime.topology import Topology
from mpistrat.training import load, save
from mpistrat.storage import layout

folder = sys.argv[1]
layout._PIECE = 4096
rank = MPI.COMM_WORLD.rank
whole = np.random.default_rng(0).normal(size=(100, 30, 7))
trained = np.random.default_rng(1).normal(size=20_000)


def block_of(rank, size, values):
    low, high = (len(whole) * each // size for each in (rank, rank + 1))
    return Block(values[low:high].copy(), (low, 0, 0), whole.shape)


def among(size):
    comm = MPI.COMM_WORLD.Split(0 if rank < size else MPI.UNDEFINED)
    if comm == MPI.COMM_NULL:
        return None
    Topology.of(comm, limits=Limits(save_alone_bytes=0))
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm)


if (strategy := among(8)) is not None:
    with strategy.scope():
        save({"v": mpistrat.Variable(trained)}, f"{folder}/a.h5", own={"x": block_of(rank, 8, whole)})
MPI.COMM_WORLD.Barrier()
with h5py.File(f"{folder}/a.h5") as file:
    assert (file["x"][()] == whole).all() and (file["v"][()] == trained).all()
for size in (1, 3, 5, 12):
    if (strategy := among(size)) is not None:
        read, preadv = [], os.preadv

        def counted(descriptor, buffers, offset):
            read.append(preadv(descriptor, buffers, offset))
            return read[-1]

        with strategy.scope():
            v, mine = mpistrat.Variable(np.zeros(20_000)), block_of(rank, size, np.zeros_like(whole))
            os.preadv = counted
            load({"v": v}, f"{folder}/a.h5", own={"x": mine})
            os.preadv = preadv
        assert (mine.array == block_of(rank, size, whole).array).all() and (v.read_value() == trained).all()
        # What it needs, and up to the ends of pieces at both borders; rank 0 reads the variable, too.
        need = mine.array.nbytes + 2 * 4096 + (rank == 0) * trained.nbytes
        assert sum(read) <= need, (sum(read), need)
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        print("loaded on", size, flush=True)
"""


def test_saved_on_8_and_loaded_on_1_3_5_and_12(run_ranks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_ranks(12, tmp_path / "program.py", tmp_path, limit=200)
    ended.check().shows(*(f"loaded on {size}" for size in (1, 3, 5, 12)))
