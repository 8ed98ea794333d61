"""The end of a program: its steps come in one order, and each function is called once, whatever else happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat
from mpistrat.process.program_end import EndStep

ORDER = ["READERS", "SAVES", "EXECUTORS", "SERVERS", "TORCH", "GOODBYES", "UNREAD", "NOTICES", "RECORD", "MPI"]
WITHOUT_MPI = ["READERS", "SAVES", "NOTICES", "RECORD"]  # after an error, and once MPI was finalized

# A stand-in for MPI, since the steps are told nothing else about it than whether it runs.
BEGIN = """
import atexit, os, sys, types
from functools import partial

atexit.register(print, "first")
finalized = False
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: finalized)

from mpistrat.process import failure, program_end
from mpistrat.process.program_end import EndStep

def say(*words):
    print(*words, flush=True)

def register(*names):
    for name in names:
        program_end.register(EndStep[name], partial(say, name))
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program], check=True, capture_output=True, text=True, timeout=60
    )


def said(program):
    """Return the lines that a program writes, without the last: an exit function from before all others."""
    ended = run(program)
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert lines.pop() == "first"
    return lines


# --- the order -----------------------------------------------------------------------------------------


def test_steps_come_in_the_written_order():
    assert [step.name for step in EndStep] == ORDER
    assert said("register(*reversed(EndStep.__members__))") == ORDER
    assert said("register(*EndStep.__members__)") == ORDER


def test_last_registered_of_a_step_is_first():
    program = """
for name in "abc":
    program_end.register(EndStep.GOODBYES, partial(say, name))
"""
    assert said(program) == ["c", "b", "a"]


def test_function_that_is_registered_again_becomes_the_last():
    program = """
a, b = partial(say, "a"), partial(say, "b")
for each in (a, b, a):
    program_end.register(EndStep.GOODBYES, each)
"""
    assert said(program) == ["a", "b"]


def test_function_that_was_taken_back_is_not_called():
    program = """
a = partial(say, "a")
program_end.register(EndStep.GOODBYES, a)
register("SAVES", "MPI")
program_end.unregister(EndStep.GOODBYES, a)
program_end.unregister(EndStep.GOODBYES, a)
"""
    assert said(program) == ["SAVES", "MPI"]


def test_functions_that_are_registered_during_the_end():
    program = """
def register_all():
    say("here")
    register("MPI", "GOODBYES", "SERVERS", "NOTICES")

program_end.register(EndStep.GOODBYES, register_all)
register("RECORD")
"""
    assert said(program) == ["here", "SERVERS", "GOODBYES", "NOTICES", "RECORD", "MPI"]


def test_later_step_that_is_registered_last_during_the_end():
    program = """
program_end.register(EndStep.READERS, partial(register, "RECORD", "SAVES"))
"""
    assert said(program) == ["SAVES", "RECORD"]


# --- beside exit functions of the program --------------------------------------------------------------


def test_places_among_exit_functions_of_the_program():
    """With the first strategy, but for records and MPI. A module that is imported later is torn down after readers."""
    program = """
register("RECORD", "MPI", "NOTICES")
atexit.register(say, "before the strategy")
register("GOODBYES")
atexit.register(say, "after the strategy")
register("UNREAD", "SAVES")
program_end.register(EndStep.READERS, register)
atexit.register(say, "a module")
program_end.register(EndStep.READERS, read := partial(say, "READERS"))
atexit.register(say, "another module")
program_end.unregister(EndStep.READERS, register)
program_end.register(EndStep.READERS, read)
"""
    assert said(program) == [
        *("READERS", "another module", "a module", "after the strategy"),
        *("SAVES", "GOODBYES", "UNREAD", "before the strategy", "NOTICES", "RECORD", "MPI"),
    ]


# --- errors, MPI that was finalized, forked children ---------------------------------------------------


@pytest.mark.parametrize("error", ["ValueError('on purpose')", "KeyboardInterrupt()", "SystemExit(3)"])
def test_error_is_reported_and_the_later_functions_are_called(error):
    program = f"""
def fail():
    raise {error}

for step in EndStep:
    register(step.name)
    program_end.register(step, fail)
"""
    ended = run(program)
    assert ended.stdout.splitlines() == [*ORDER, "first"]
    assert ended.stderr.count("Exception ignored in atexit callback: <function fail") == len(ORDER)
    name = error.partition("(")[0]
    assert sum(line.startswith(name) for line in ended.stderr.splitlines()) == len(ORDER)


def test_steps_without_mpi_remain_after_it_was_finalized():
    assert said("register(*EndStep.__members__)\nfinalized = True") == WITHOUT_MPI


def test_steps_without_mpi_remain_after_an_error():
    assert said("register(*EndStep.__members__)\nfailure.pending = lambda: True") == WITHOUT_MPI


def test_steps_without_mpi_remain_when_an_exit_function_finalizes_it():
    program = """
def finalize():
    global finalized
    finalized = True

program_end.register(EndStep.GOODBYES, finalize)
register(*EndStep.__members__)
program_end.register(EndStep.UNREAD, partial(say, "not called"))
"""
    expected = [*ORDER[: ORDER.index("UNREAD")], "NOTICES", "RECORD"]
    assert said(program) == expected


def test_forked_child_calls_its_own_functions_only():
    program = """
register("GOODBYES", "RECORD")
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    register("MPI", "SAVES")
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""
    assert said(program) == ["first", "SAVES", "MPI", "first", "GOODBYES", "RECORD"]


# --- all of the package --------------------------------------------------------------------------------


def test_no_other_file_registers_exit_functions():
    folder = Path(mpistrat.__file__).parent
    of_atexit = re.compile(r"^\s*(import|from)\b.*\batexit\b", re.MULTILINE)
    found = [each.name for each in sorted(folder.rglob("*.py")) if of_atexit.search(each.read_text("utf-8"))]
    assert found == ["program_end.py"]
