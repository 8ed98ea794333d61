"""What launchers printed, as it was recorded, through the filter: at once, in pieces, and byte by byte."""

import pytest
from selection import core

from mpistrat.cli.run.banners import Death, Filter, of_stderr, of_stdout

DASHES = "-" * 74 + "\n"
EQUALS = "=" * 83 + "\n"

# Open MPI 5.0.11
ABORT = f"""{DASHES}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[2397,1],1]
  Errorcode: 42

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{DASHES}"""
ABORTED = f"""{DASHES}prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{DASHES}\0"""
NONZERO = f"""{DASHES}prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-4155@1,1]
   Exit code:    3
{DASHES}"""
KILLED = f"""{DASHES}prterun noticed that process rank 1 with PID 4222 on node vm exited on
signal 11 (Segmentation fault).
{DASHES}"""
LOST = (
    "[vm:04304] PMIX ERROR: PMIX_ERR_UNREACH in file "
    "/openmpi-5.0.11/3rd-party/openpmix/src/server/pmix_server.c at line 3146\n"
)
# Open MPI 4.1.4
ABORT_4 = f"""{DASHES}MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
with errorcode 1.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{DASHES}"""
PRIMARY_4 = f"""{DASHES}Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{DASHES}"""
NONZERO_4 = f"""{DASHES}mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[18763,1],1]
  Exit code:    3
{DASHES}"""
KILLED_4 = f"""{DASHES}mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
{DASHES}"""
# MPICH 5.0.2
TERMINATION = f"""
{EQUALS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4212 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{EQUALS}YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
MPICH_ABORT = (
    "Abort(42) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 42) - process 1\n"
)

OPEN_MPI_ERR = of_stderr("openmpi", "vm.cluster")
MPICH_ERR = of_stderr("mpich", "vm.cluster")
MPICH_OUT = of_stdout("mpich")

TRACEBACK = """Traceback (most recent call last):
  File "prog.py", line 17, in <module>
    raise ValueError("x")
          ^^^^^^^^^^^^^^^
ValueError: x
"""


def filtered(banners, text, size):
    """What comes out, and the filter."""
    unwanted = Filter(banners)
    data = text.encode()
    pieces = [unwanted.feed(data[start : start + size]) for start in range(0, len(data), size)]
    return b"".join([*pieces, unwanted.close()]).decode(), unwanted


@pytest.mark.parametrize("size", core([1, 2, 7, 64, 75, 4096, 1 << 20], 7, 1 << 20))
@pytest.mark.parametrize(
    ("banners", "text", "deaths"),
    [
        (OPEN_MPI_ERR, ABORT + ABORTED, []),
        (OPEN_MPI_ERR, NONZERO, []),
        (OPEN_MPI_ERR, LOST + NONZERO, []),
        (OPEN_MPI_ERR, KILLED, [Death(11, rank=1, pid=4222)]),
        (OPEN_MPI_ERR, ABORT_4, []),
        (OPEN_MPI_ERR, PRIMARY_4 + NONZERO_4, []),
        (OPEN_MPI_ERR, PRIMARY_4 + KILLED_4, [Death(9, rank=1, pid=0)]),
        (MPICH_ERR, MPICH_ABORT, []),
        (MPICH_OUT, TERMINATION, [Death(9, or_signals=(1, 8))]),
        (MPICH_OUT, TERMINATION.replace("CODE: 9", "CODE: 11"), [Death(11, pid=4212)]),
        (MPICH_OUT, TERMINATION.replace("(signal 9)", "(signal 15)"), [Death(15, or_signals=(6, 7, 14))]),
    ],
)
@pytest.mark.parametrize(
    "before", ["", TRACEBACK, "50%|####  | 3/6", "epoch 1\r", "-----", "\n", "no newline"]
)
def test_banners_are_dropped(banners, text, deaths, before, size):
    passed, unwanted = filtered(banners, before + text, size)
    # The empty line before MPICH's is left where it ends a line of the program.
    assert passed in (before, before + "\n" if banners is MPICH_OUT else before)
    assert unwanted.deaths == deaths
    assert unwanted.failed


@pytest.mark.parametrize("size", core([1, 3, 74, 1 << 20], 3))
@pytest.mark.parametrize("banners", [OPEN_MPI_ERR, MPICH_ERR, MPICH_OUT])
@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK,
        DASHES,
        DASHES + DASHES,
        f"{DASHES}| a table | of the program |\n{DASHES}",
        f"{DASHES}MPI_ABORT was never called\n{DASHES}",
        "-" * 5000 + "\n",
        "-" * 30 + "\n",
        EQUALS + EQUALS + "== title ==\n",
        f"\n\n{EQUALS}short test summary info\n{EQUALS}",
        "Abort(",
        "Abort(1) is what I do\n",
        "Abort(706822) on node 1 (rank 1 in comm 0): Fatal error in internal_Send_c: Invalid rank, error stack:\n",
        "[vm:00000] *** An error occurred in MPI_Send\n[vm:00000] *** on communicator MPI_COMM_WORLD\n",
        "[vm:1] PMIX ERROR: PMIX_ERR_OUT_OF_RESOURCE in file a.c at line 3\n",
        f"{DASHES}It appears as if there is not enough space for /dev/shm/x\n{DASHES}",
        "\r 10%|#         |\r 20%|##        |",
        "a\0b\0",
        "\0",
    ],
)
def test_all_else_passes(banners, text, size):
    passed, unwanted = filtered(banners, text, size)
    assert passed == text
    assert not unwanted.failed
    assert not unwanted.deaths


@pytest.mark.parametrize("banners", [OPEN_MPI_ERR, MPICH_ERR, MPICH_OUT])
@pytest.mark.parametrize(
    "text", ["\r 10%|#         |", "no newline", "a line\n", "(Pdb) ", "[other:1] text", "x - y"]
)
def test_what_can_become_no_banner_passes_at_once(banners, text):
    unwanted = Filter(banners)
    assert unwanted.feed(text.encode()) == text.encode()
    assert not unwanted.holds


def test_what_looks_like_one_waits_only_until_it_is_told_to_go_on():
    unwanted = Filter(OPEN_MPI_ERR)
    assert unwanted.feed(b"list:\n- one\n-----") == b"list:\n- one\n"
    assert unwanted.holds
    assert unwanted.flush() == b"-----"
    assert not unwanted.holds


def test_one_that_has_begun_waits_for_its_end_and_half_of_it_is_dropped():
    begun = ABORT[:200].encode()
    unwanted = Filter(OPEN_MPI_ERR)
    assert unwanted.feed(b"before\n" + begun) == b"before\n"
    assert unwanted.flush() == b""
    assert unwanted.feed(ABORT[200:].encode() + b"after\n") == b"after\n"
    half = Filter(OPEN_MPI_ERR)
    assert half.feed(begun) + half.close() == b""
    assert half.failed


def test_one_that_never_ends_is_none():
    unwanted = Filter(OPEN_MPI_ERR)
    text = ABORT[:200].encode() + b"x" * 5000
    assert unwanted.feed(text) == text


def test_between_what_the_program_prints():
    passed, unwanted = filtered(OPEN_MPI_ERR, TRACEBACK + KILLED + "more\n" + KILLED + ABORTED + "end\n", 50)
    assert passed == TRACEBACK + "more\nend\n"
    assert len(unwanted.deaths) == 2


def test_other_hosts_may_say_what_they_like():
    assert filtered(of_stderr("openmpi", "other"), LOST, 10)[0] == LOST
