"""Large letters of ranks that are lost while they send."""

import gc
import struct
import weakref
from types import SimpleNamespace

from mpistrat.messages.post import REQUEST, Post
from mpistrat.runtime.process import mpi


class Comm:
    """A communicator on which large letters arrive whose arrays never come."""

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
    post = Post(comm)
    post.losses = SimpleNamespace(ranks=set(), note=lambda error: None)
    for _ in range(3):
        assert post.receive(REQUEST) is None
    gc.collect()
    assert len(comm.memory) == 3
    assert all(each() is not None for each in comm.memory)
