"""The handles that asynchronous calls of ``torch.distributed`` return."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch._C import _distributed_c10d

from mpistrat.process import mpi, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.agreement.operation import TimedOutError

_LONGEST_PAUSE = 0.001  # seconds: each look lets MPI send the next piece


c10d: Any = _distributed_c10d  # its stubs lack functions
_work_from_future: Callable[..., Any] = attrgetter("_create_work_from_future")(c10d)


def devices_of(tensors: Sequence[torch.Tensor], kind: str = "") -> list[torch.device]:
    """Return the devices of tensors except the host, or of one kind: a future refuses tensors of other devices."""
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return [device for device in devices if device.type.startswith(kind)]


def keep_handles() -> None:
    """Let the functions of torch's C++ part that take a handle from Python keep its Python object, too.

    They keep the C++ part alone, which is never complete without the Python object: a wait for it does not end.
    `DistributedDataParallel.join` passes a handle in this way. Handles that C++ code gets from the methods of a process
    group are whole.
    """
    for owner, name in ((c10d.Reducer, "_set_forward_pass_work_handle"), (c10d, "_register_work")):
        setattr(owner, name, _with_whole_handles(getattr(owner, name)))


def _with_whole_handles(function: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        function(*(arg.whole() if isinstance(arg, Done | PendingWork) else arg for arg in args))

    return call


class Done(torch.distributed.Work):
    """The handle of a call that is complete when it returns, except for work that it has queued on GPUs.

    This work is in the stream that was current at the call. `wait` lets the stream that is current then wait for it.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._tensors = tensors
        self._queued = [torch.cuda.current_stream(gpu).record_event() for gpu in devices_of(tensors, "cuda")]

    def is_completed(self) -> bool:
        """Return whether the work that was queued on GPUs is done."""
        return all(event.query() for event in self._queued)

    def is_success(self) -> bool:
        """Return True: a call that fails raises instead of returning a handle."""
        return True

    def exception(self) -> None:
        """Return None."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream of each GPU wait for the call's work there. Return True at once."""
        for gpu, event in zip(devices_of(self._tensors, "cuda"), self._queued, strict=True):
            torch.cuda.current_stream(gpu).wait_event(event)
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the result."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a completed future of the result."""
        self.wait()  # the future records the streams that are current now
        future: Any = torch.futures.Future(devices=devices_of(self._tensors))
        future.set_result(self._tensors)
        return future

    def whole(self) -> torch.distributed.Work:
        """Return a handle of C++ with the same result."""
        return _work_from_future(self.get_future())


class PendingWork(torch.distributed.Work):
    """The handle of a message in flight. MPI makes progress in `is_completed`, `wait` and the future's methods.

    ``call`` is the message, for errors. ``finish`` is called with the statuses of MPI when all requests are complete.
    `wait` waits for ``seconds``. ``ended()`` tells whether the ranks that could complete the message have ended.
    ``earlier`` are receives that a message with the same source and tag went to first.
    """

    def __init__(
        self,
        call: str,
        requests: list[Any],
        finish: Callable[[Sequence[Any]], object],
        seconds: float,
        tensors: list[torch.Tensor],
        ended: Callable[[], bool],
    ):
        super().__init__()
        self._call = call
        self._requests = requests
        self._finish = finish
        self._seconds = seconds
        self._tensors = tensors
        self._ended = ended
        self._error: BaseException | None = None
        self._future: _Future | None = None
        self._source = -1
        self.source_and_tag = (-1, -1)  # of a receive
        self.earlier: list[PendingWork] = []
        self._arrived: list[Any] = []  # the statuses, until `finish` is called

    def is_completed(self) -> bool:
        """Return whether the message is complete. The call lets MPI make progress."""
        if self._requests:
            MPI = mpi.start()
            statuses = [MPI.Status() for _ in self._requests]
            try:
                if not MPI.Request.Testall(self._requests, statuses):
                    return False
            except MPI.Exception as error:
                codes = {error.error_code, *(status.error for status in statuses)}
                # After a truncation `finish` raises an error with both sizes, from the note of the message.
                if MPI.ERR_TRUNCATE not in map(MPI.Get_error_class, codes):
                    self._error = error
            self._requests, self._arrived, self._source = [], statuses, statuses[0].source
        if self._arrived:
            # Their messages have arrived before this one, so they do not wait for anything that follows from it. Notes
            # must be read in this order.
            if not all(receive.is_completed() for receive in self.earlier):
                return False
            statuses, self._arrived, self.earlier = self._arrived, [], []
            try:
                if self._error is None:
                    self._finish(statuses)
                for gpu in devices_of(self._tensors, "cuda"):
                    torch.cuda.current_stream(gpu).synchronize()  # `wait` may be called in another stream
            except Exception as error:
                self._error = error
            if self._future is not None:
                self._future.complete(self._tensors, self._error)
        return True

    def is_success(self) -> bool:
        """Return whether the message is complete, without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the message, or None."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete.

        Raise TimeoutError if that takes longer than ``timeout``, by default the process group's. Raise RuntimeError if
        the ranks that could complete it have ended their programs.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        wait_until(
            self.is_completed,
            self._ended,
            lambda: f"{self._call} was not complete",
            seconds if seconds > 0 else self._seconds,
            ", and the other side has ended its program",
            Backoff(_LONGEST_PAUSE),
        )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the message."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors. It completes when the program waits for it, or for the handle."""
        if self._future is None:
            self._future = _Future(self)
            if not self._requests and not self._arrived:
                self._future.complete(self._tensors, self._error)
        return self._future

    def whole(self) -> torch.distributed.Work:
        """Return a handle of C++ whose `wait` calls this one's."""
        return c10d.PythonCallbackWork(self.wait)

    def give_up(self) -> bool:
        """Cancel the message if it is not complete. Return whether MPI is done with its memory."""
        if self.is_completed():
            return True
        self._error = RuntimeError(f"{self._call} was not complete when the process group was destroyed")
        for request in self._requests:
            request.Cancel()
        if not mpi.start().Request.Testall(self._requests):
            return False
        self._requests = []
        return True


class _Future(torch.futures.Future):
    """A future that lets MPI make progress when it is asked."""

    def __init__(self, work: PendingWork):
        super().__init__(devices=devices_of(work.result()))
        self._work = work

    def complete(self, tensors: list[torch.Tensor], error: BaseException | None) -> None:
        if error is None:
            self.set_result(tensors)
        else:
            self.set_exception(error)

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def value(self) -> Any:
        self._work.is_completed()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        # torch's own method returns a future whose wait() does not let MPI make progress.
        after = _Future(self._work)

        def call(done: Any) -> None:
            try:
                after.set_result(callback(done))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(call)
        return after


# --- which ranks have ended their programs: no message of theirs will come -------------------------------

_TAG = 0  # on a communicator of its own
_CHECK_INTERVAL_S = 1.0  # seconds of waiting between looks for ranks that have ended
_ends: _Ends | None = None


class _Ends:
    """The ranks of a job that have ended, on a communicator of its own. Creating it is collective."""

    def __init__(self, world: Any):
        self._comm = world.Dup()
        self._ended: set[int] = set()
        self._sent: list[Any] = []
        program_end.register(EndStep.TORCH, self._announce_end)

    def _announce_end(self) -> None:
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        # Without content, and not waited for: a rank that never looks must not hold up the end of this one.
        self._sent = [self._comm.isend(None, rank, _TAG) for rank in others]

    def include(self, ranks: set[int]) -> bool:
        self._ended.update(rank for rank, _ in mpi.messages(self._comm, _TAG))
        return ranks <= self._ended


def announce_ends(world: Any) -> None:
    """Let each rank of the job tell the others when it ends. Collective over them; further calls do nothing."""
    global _ends
    if _ends is None:
        _ends = _Ends(world)


def have_ended(ranks: Iterable[int]) -> bool:
    """Return whether these ranks of the job have all ended their programs, as far as is known; False for no ranks."""
    wanted = set(ranks)
    return _ends is not None and bool(wanted) and _ends.include(wanted)


def wait_until(
    done: Callable[[], bool],
    ended: Callable[[], bool],
    problem: Callable[[], str],
    seconds: float,
    gone: str,
    backoff: Backoff | None = None,
) -> None:
    """Wait until ``done()``. ``ended()`` tells whether the ranks that can bring it about have ended.

    ``problem()`` is the beginning of the text of errors. Raise TimeoutError after ``seconds``. Raise RuntimeError if
    these ranks have ended; its text ends with ``gone``.
    """
    start, pauses = time.monotonic(), backoff or Backoff()
    look, were_gone = _CHECK_INTERVAL_S, False
    while not done():
        waited = time.monotonic() - start
        if waited > seconds:
            raise TimedOutError(f"{problem()} within {seconds:g} s")
        if waited > look:
            if were_gone:  # ended before the last look, so their last messages have been read since
                raise RuntimeError(f"{problem()}{gone}")
            were_gone, look = ended(), waited + _CHECK_INTERVAL_S
        pauses.pause()
