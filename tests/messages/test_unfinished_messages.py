"""Large messages of ranks that are lost while they send."""

import gc
import struct
import weakref
from types import SimpleNamespace

import pytest

from mpistrat.messages import pickling
from mpistrat.messages.mailbox import REQUEST, Mailbox
from mpistrat.messages.pickling import Packed
from mpistrat.process import mpi


class Comm:
    """A communicator on which large messages arrive whose arrays never come."""

    rank, size = 0, 4

    def __init__(self):
        self.memory = []  # that MPI may still write to

    def Improbe(self, source, tag, status):
        frame = struct.pack("<IIBQ", 0, 1, False, 1000)
        status.Set_elements(mpi.start().BYTE, len(frame))

        def receive(target):
            target[0][:] = frame

        return SimpleNamespace(Recv=receive)

    def Irecv(self, target, source, tag):
        self.memory.append(weakref.ref(target[0]))

        def wait():
            raise mpi.start().Exception(mpi.start().ERR_OTHER)

        return SimpleNamespace(Wait=wait)


def test_the_memory_of_each_unfinished_letter_is_kept():
    comm = Comm()
    mailbox = Mailbox(comm)
    mailbox.losses = SimpleNamespace(ranks=set(), note=lambda error: None)
    for _ in range(3):
        assert mailbox.receive(REQUEST) is None
    gc.collect()
    assert len(comm.memory) == 3
    assert all(each() is not None for each in comm.memory)


class Failed:
    """A group of ranks that MPI knows to have failed."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.size = len(ranks)

    def Translate_ranks(self, which, own):
        return [self.ranks[i] for i in which]

    def Free(self):
        pass


class Losing(Comm):
    """A communicator on which a message fails, and whose lost ranks are known after some looks."""

    def __init__(self, error, known_after, lost=(2,)):
        super().__init__()
        self.error, self.known_after, self.lost, self.looks = error, known_after, list(lost), 0

    def Get_failed(self):
        self.looks += 1
        return Failed(self.lost if self.looks > self.known_after else [])

    def Get_group(self):
        return Failed([])

    def Ack_failed(self, count):
        pass

    def Iprobe(self, *_):
        raise mpi.start().Exception(mpi.start().ERR_PROC_FAILED_PENDING)

    def Isend(self, what, to, tag):
        def test():
            raise mpi.start().Exception(self.error)

        return SimpleNamespace(Test=test)


@pytest.fixture(scope="module")
def losses_have_classes():
    if mpi.start().ERR_PROC_FAILED == mpi.start().ERR_UNKNOWN:
        pytest.skip("this MPI has no classes of errors for lost ranks")


@pytest.mark.usefixtures("losses_have_classes")
@pytest.mark.parametrize("known_after", [0, 1, 3])
@pytest.mark.parametrize("name", ["ERR_PROC_FAILED", "ERR_OTHER", "ERR_INTERN", "ERR_PENDING", "ERR_UNKNOWN"])
def test_an_error_of_any_class_may_be_the_first_sign_of_a_loss(name, known_after, monkeypatch):
    monkeypatch.setattr(pickling.mpi, "survives_losses", lambda: True)
    monkeypatch.setattr(pickling.mpi, "leave_without_finalize", lambda: None)
    monkeypatch.setattr(pickling.failure, "revoke_at_end", lambda comm: None)
    if name == "ERR_PROC_FAILED":
        known_after = 0  # this class names it at once
    comm = Losing(getattr(mpi.start(), name), known_after)
    mailbox = Mailbox(comm)
    mailbox.send(2, "kind", body=Packed(b"", (b"x" * 100,)))
    mailbox.flush()
    assert mailbox.losses.ranks == {2}


@pytest.mark.usefixtures("losses_have_classes")
def test_an_error_without_a_loss_is_raised(monkeypatch):
    monkeypatch.setattr(pickling.mpi, "survives_losses", lambda: True)
    monkeypatch.setattr(pickling.mpi, "leave_without_finalize", lambda: None)
    monkeypatch.setattr(pickling.failure, "revoke_at_end", lambda comm: None)
    monkeypatch.setattr(pickling, "_LOSS_REPORT_S", 0.05)
    mailbox = Mailbox(Losing(mpi.start().ERR_TRUNCATE, 10**9))
    with pytest.raises(mpi.start().Exception):
        mailbox.send(2, "kind")
