"""What launchers printed, as it was recorded: banners are left out, and all other messages pass."""

import os
import time

import pytest

from mpistrat.cli.run.streams import Banners, Death, LauncherMessages

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
WARNING = (
    "[warn] Epoll MOD(1) on fd 20 failed. Old events were 6; read change was 0 (none); write change was 2 (del); "
    "close change was 0 (none): Bad file descriptor\n"
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
MPICH_ABORT = "application called MPI_Abort(MPI_COMM_WORLD, 42) - process 1\n"

TRACEBACK = """Traceback (most recent call last):
  File "prog.py", line 17, in <module>
    raise ValueError("x")
          ^^^^^^^^^^^^^^^
ValueError: x
"""


def passed(banners, text):
    """What comes out of a stream that has ended."""
    return banners.cut(text.encode(), ended=True)[0].decode()


@pytest.mark.parametrize(
    ("family", "text", "deaths"),
    [
        ("openmpi", ABORT + ABORTED, []),
        ("openmpi", NONZERO, []),
        ("openmpi", LOST + NONZERO + WARNING, []),
        ("openmpi", KILLED, [Death(11, rank=1, pid=4222)]),
        ("openmpi", ABORT_4, []),
        ("openmpi", PRIMARY_4 + NONZERO_4, []),
        ("openmpi", PRIMARY_4 + KILLED_4, [Death(9, rank=1, pid=0)]),
        ("mpich", MPICH_ABORT, []),
        ("mpich", TERMINATION, [Death(9, or_signals=(1, 8))]),
        ("mpich", TERMINATION.replace("CODE: 9", "CODE: 11"), [Death(11, pid=4212)]),
        ("mpich", TERMINATION.replace("(signal 9)", "(signal 15)"), [Death(15, or_signals=(6, 7, 14))]),
    ],
)
@pytest.mark.parametrize("before", ["", TRACEBACK, "-----\n", "\n"])
def test_banners_are_left_out(family, text, deaths, before):
    banners = Banners(family, "vm.cluster")
    assert passed(banners, before + text + "after\n") == before + "after\n"
    assert banners.deaths == deaths
    assert banners.failed


@pytest.mark.parametrize("family", ["openmpi", "mpich"])
@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK,
        DASHES,
        DASHES + DASHES,
        f"{DASHES}| a table | of the program |\n{DASHES}",
        f"{DASHES}MPI_ABORT was never called\n{DASHES}",
        "-" * 5000 + "\n",
        EQUALS + EQUALS + "== title ==\n",
        f"\n\n{EQUALS}short test summary info\n{EQUALS}",
        "Abort(1) is what I do\n",
        "[vm:00000] *** An error occurred in MPI_Send\n[vm:00000] *** on communicator MPI_COMM_WORLD\n",
        "[vm:1] PMIX ERROR: PMIX_ERR_OUT_OF_RESOURCE in file a.c at line 3\n",
        f"{DASHES}It appears as if there is not enough space for /dev/shm/x\n{DASHES}",
    ],
)
def test_all_else_passes(family, text):
    banners = Banners(family, "vm.cluster")
    assert passed(banners, text) == text
    assert not banners.failed
    assert not banners.deaths


def test_several_and_what_is_between():
    banners = Banners("openmpi", "vm")
    assert passed(banners, "a\n" + KILLED + "b\n" + KILLED + ABORTED + "c\n") == "a\nb\nc\n"
    assert len(banners.deaths) == 2


def test_one_that_has_begun_waits_for_its_end_and_half_of_it_is_left_out():
    begun = ABORT[:200].encode()
    banners = Banners("openmpi", "vm")
    assert banners.cut(b"before\n" + begun) == (b"before\n", begun)
    assert not banners.failed
    assert banners.cut(begun, ended=True) == (b"", b"")
    assert banners.failed


def test_one_that_never_ends_is_none():
    text = ABORT[:200].encode() + b"x" * 5000
    assert Banners("openmpi", "vm").cut(text) == (text, b"")


def test_other_hosts_may_say_what_they_like():
    assert passed(Banners("openmpi", "other"), LOST) == LOST


@pytest.mark.parametrize(
    ("family", "text", "aborted"),
    [
        ("openmpi", ABORT, True),
        ("openmpi", ABORT[:200], True),  # the launcher has failed meanwhile
        ("openmpi", ABORTED, True),
        ("openmpi", ABORTED.replace("abort", "exit"), False),
        ("openmpi", KILLED, False),
        ("mpich", MPICH_ABORT, True),
        ("mpich", "Abort(1) is what the program prints\n", False),
    ],
)
def test_a_call_of_abort(family, text, aborted):
    """The launcher then ends the ranks in any order."""
    banners = Banners(family, "vm")
    passed(banners, text)
    assert banners.aborted is aborted


def test_messages_pass_while_the_job_runs(capfd):
    """A message that is complete, after a moment of silence; a banner in two pieces is left out."""
    out, end = os.pipe()
    messages = LauncherMessages(os.fdopen(out, "rb", buffering=0), "openmpi", "vm")
    os.write(end, b"a warning\n" + KILLED[:130].encode())
    seen = ""
    while "a warning" not in seen:
        time.sleep(0.1)  # readouterr() reads, then truncates: text that is written in between is lost
        seen += capfd.readouterr().err
    os.write(end, KILLED[130:].encode())
    os.close(end)
    messages.join(60)
    assert seen + capfd.readouterr().err == "a warning\n"
    assert messages.banners.deaths == [Death(11, rank=1, pid=4222)]


def test_a_stream_that_another_process_keeps_open_is_not_waited_for():
    out, end = os.pipe()
    messages = LauncherMessages(os.fdopen(out, "rb", buffering=0), "mpich", "vm")
    messages.join(0.05)
    os.close(end)
    messages.join(60)
