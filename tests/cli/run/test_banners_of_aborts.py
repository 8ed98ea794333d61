"""Whether a banner tells that a rank has called MPI_Abort: the launcher then ends the ranks in any order."""

import pytest

from mpistrat.cli.run.banners import Filter, of_stderr

DASHES = b"-" * 74 + b"\n"
CALLED = DASHES + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
EXITED = DASHES + b"prterun has exited due to process rank 1 with PID 0 on node vm calling\n%s. This may\n"
KILLED = (
    DASHES + b"prterun noticed that process rank 1 with PID 4222 on node vm exited on\nsignal 9 (Killed).\n"
)


@pytest.mark.parametrize(
    ("family", "text", "aborted"),
    [
        ("openmpi", CALLED + DASHES, True),
        ("openmpi", CALLED, True),  # the launcher has failed meanwhile
        ("openmpi", EXITED % b'"abort"' + DASHES, True),
        ("openmpi", EXITED % b'"exit"' + DASHES, False),
        ("openmpi", KILLED + DASHES, False),
        ("mpich", b"Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm, 1)\n", True),
        ("mpich", b"Abort(1) is what the program prints\n", False),
    ],
)
def test_a_call_of_abort(family, text, aborted):
    banners = Filter(of_stderr(family, "vm"))
    banners.feed(text)
    banners.close()
    assert banners.aborted is aborted


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("before", [b"", b"no newline", b"last words\n"])
def test_text_between_a_banner_and_its_nul(before, size):
    """Of ranks that print while the job is ended. A second NUL is the program's own."""
    banners = Filter(of_stderr("openmpi", "vm"))
    text = CALLED + DASHES + before + b"\0last words\n" + EXITED % b'"abort"' + DASHES + b"a\0b"
    passed = [banners.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert b"".join([*passed, banners.close()]) == before + b"last words\na\0b"
