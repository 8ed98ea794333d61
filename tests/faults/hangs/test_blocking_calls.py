"""A report changes nothing for the rank that it is about, and tells what that waits for."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).with_name("blocking_calls.py")


def test_no_call_ends_before_it_is_reported(run_ranks, tmp_path):
    ended = run_ranks(
        2, PROGRAM, limit=360, MPISTRAT_HANG_SECONDS="1", MPISTRAT_RECORD_DIR=str(tmp_path)
    ).check()
    ended.shows("30 calls waited until they were reported")


BEGIN = """
import ctypes, os, sys, threading, time
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
strategy.barrier()
if strategy.comm.rank == 1:
"""
WAYS = {
    "standard input": "os.dup2(os.pipe()[0], 0); input()",
    "another program": "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(100)'])",
    "C code": "threading.Thread(target=sum, args=(range(10**10),)).start(); time.sleep(0.1)",
    # With the interpreter's lock, and in a call that a signal would end: no stack is asked for.
    "C code with the lock": "ctypes.PyDLL(None).sleep(100); print('went on')",
}


@pytest.mark.parametrize("name", WAYS)
def test_what_it_waits_for(run_ranks, tmp_path, name):
    program = tmp_path / "program.py"
    program.write_text(f"{BEGIN}    {WAYS[name]}\nstrategy.barrier()\n")
    ended = run_ranks(
        2,
        program,
        MPISTRAT_HANG_SECONDS="1",
        MPISTRAT_HANG_ABORT_SECONDS="6",
        MPISTRAT_RECORD_DIR=str(tmp_path),
    )
    assert ended.status == 42, str(ended)
    named = re.findall(
        r"rank 0 of 2 has waited for rank 1 since.*\n.*\n(.*)\n  cause: ([^.]+)\.", ended.output
    )
    assert named, str(ended)
    assert {cause for _, cause in named} == {name.removesuffix(" with the lock")}, str(ended)
    assert ("another thread of it is in C code" in named[0][0]) == (name == "C code"), str(ended)
    assert "went on" not in ended.output
