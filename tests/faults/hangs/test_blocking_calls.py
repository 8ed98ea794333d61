"""A report changes nothing for the rank that it is about, and tells what that waits for."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).with_name("blocking_calls.py")


def test_no_call_ends_before_it_is_reported(run_ranks, tmp_path):
    ended = run_ranks(4, PROGRAM, limit=360, MPISTRAT_HANG_SECONDS="1", MPISTRAT_RECORD_DIR=str(tmp_path)).check()
    ended.shows("30 calls waited until they were reported")


BEGIN = """
import ctypes, os, sys, threading, time
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
strategy.barrier()
"""
# What ranks 1, 2, ... do, while rank 0 waits for them.
WAYS = (
    ("standard input", "os.dup2(os.pipe()[0], 0); input()"),
    ("another program", "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(100)'])"),
    ("C code", "threading.Thread(target=sum, args=(range(10**10),)).start(); time.sleep(0.1)"),
    # With the interpreter's lock, and in a call that a signal would end: no stack is asked for.
    ("C code", "ctypes.PyDLL(None).sleep(100); print('went on')"),
    ("finished", "from mpi4py import MPI; MPI.Finalize(); time.sleep(100)"),
)


def test_what_ranks_wait_for(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    ways = (f"if strategy.comm.rank == {rank}:\n    {do}\n" for rank, (_, do) in enumerate(WAYS, 1))
    program.write_text(f"{BEGIN}{''.join(ways)}strategy.barrier()\n")
    ended = run_ranks(
        6, program, MPISTRAT_HANG_SECONDS="1", MPISTRAT_HANG_ABORT_SECONDS="6", MPISTRAT_RECORD_DIR=str(tmp_path)
    )
    assert ended.status == 43, str(ended)
    ended.shows("rank 0 of 6 has waited for ranks 1-5 since")
    for rank, (cause, _) in enumerate(WAYS, 1):
        named = re.findall(rf"^  rank {rank} \((.*)\n  cause: ([^.]+)\.", ended.output, re.MULTILINE)
        assert {each for _, each in named} == {cause}, f"rank {rank}: {named} {ended}"
        assert any("another thread of it is in C code" in each for each, _ in named) == (rank == 3), str(ended)
    assert "went on" not in ended.output


REPLICAS = """
import threading
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=3)
lock = threading.Lock()


def holds(replica):
    with lock:
        return replica.all_reduce("SUM", 1.0)


def wants(replica):
    with lock:
        return replica.all_reduce("SUM", 1.0)


def step():
    replica = mpistrat.get_replica_context()
    kind = {0: replica.all_reduce, 1: lambda *_: holds(replica), 2: lambda *_: wants(replica)}
    return kind[replica.replica_id_in_sync_group]("SUM", 1.0)


strategy.run(step)
"""


def test_a_lock_that_one_replica_holds_and_another_wants(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(REPLICAS)
    ended = run_ranks(
        2, program, MPISTRAT_HANG_SECONDS="1", MPISTRAT_HANG_ABORT_SECONDS="6", MPISTRAT_RECORD_DIR=str(tmp_path)
    )
    assert ended.status == 43, str(ended)
    ended.shows("rank 0 of 2 has waited for rank 1 since", "cause: lock. Its other thread is shown below")
    both = r"  rank 1: .*\n(?:    .*\n)*    .*:11 in holds\n(?:    .*\n)*    another of its .*\n    .*:15 in wants\n"
    assert re.search(both, ended.output), str(ended)


HALO = """
import time
import numpy as np
from mpi4py import MPI
from mpistrat import Mesh, ShardedArray

u = ShardedArray.from_array(np.arange(8.0), mesh=Mesh(x=-1), axes=["x"])
halo = u.halo(1)
for _ in range(100):
    halo.exchange()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(60)
halo.exchange()
"""


def test_a_rank_that_does_not_come_to_an_exchange_of_halos(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HALO)
    ended = run_ranks(
        3, program, MPISTRAT_HANG_SECONDS="1", MPISTRAT_HANG_ABORT_SECONDS="4", MPISTRAT_RECORD_DIR=str(tmp_path)
    )
    assert ended.status == 43, str(ended)
    ended.shows("waited for rank 1 since", "ShardedArray.halo", "cause: sleep")
    # Exchanges that did not wait have no entry of their own, but they count.
    halo = r"ShardedArray\.halo {} at .*:{} .*\(collective number (\d+)\)"
    (waits,) = set(re.findall(r"ranks 0, 2: in " + halo.format(r"float64\[8\]", 13), ended.output))
    # Where rank 1 never waited, its last entry is what line 8 agreed on.
    last = halo.format(r"(?:float64\[8\]|8 x .*)", "(?:8|10)")
    (done,) = set(re.findall(r"rank 1: user code, \d+ s after " + last, ended.output))
    assert int(waits) == int(done) + 1, str(ended)


NCCL = """
import time

import cupy
import cupy.cuda.nccl
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
if strategy.comm.rank == 1:
    cupy.cuda.nccl.NcclCommunicator.__init__ = lambda *_: time.sleep(100)
strategy.reduce("SUM", cupy.ones(3), axis=None)
"""


def test_a_start_of_nccl_that_hangs(run_ranks, tmp_path):
    """No timeout limits it, since CuPy's call does not return."""
    fakes = Path(__file__).parents[2] / "fakes"
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(fakes)!r})\n{NCCL}")
    ended = run_ranks(
        2, program, MPISTRAT_HANG_SECONDS="1", MPISTRAT_HANG_ABORT_SECONDS="4", MPISTRAT_RECORD_DIR=str(tmp_path)
    )
    assert ended.status == 43, str(ended)
    ended.shows("rank 1: in the way of arrays on GPUs nccl")
