"""An executor of `concurrent.futures` whose workers are ranks."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from mpistrat.asynchronous import on_worker
from mpistrat.asynchronous.dispatcher import Dispatcher, OneRank, Task, dispatcher_of
from mpistrat.asynchronous.kept_results import KeptResults
from mpistrat.asynchronous.server import serve
from mpistrat.asynchronous.statistics import CallsBar, Statistics
from mpistrat.messages.contact import end_with, meet_on, shut_down
from mpistrat.messages.mailbox import SentFunction
from mpistrat.messages.pickling import LostRankError, RepeatedLossError, pack_arguments
from mpistrat.process import mpi, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import Backoff
from mpistrat.strategies.parameter_server import ParameterServerStrategy

_IDLE_S = 1.0  # seconds that rank 0 waits for its only worker before it logs that
_log = logging.getLogger(__name__)


class Executor(concurrent.futures.Executor):
    """Runs calls of functions on other ranks: a `concurrent.futures.Executor` without processes of its own.

    On a communicator it is made on all ranks, and rank 0 uses it. The other ranks run the functions inside the
    ``with`` block until rank 0 leaves it; there the block gets None, as in ``mpi4py.futures.MPICommExecutor``. Rank 0
    runs no calls: of two ranks one works, which is logged if calls wait. Start one rank more than shall work. Ranks
    that do not enter the block run functions at the end of the program. With a
    `ParameterServerStrategy` it is made on the coordinator, and the functions run on the workers of the strategy, in
    its scope. One rank alone runs the functions itself, in a thread.

    A function runs in the main thread of its worker. A thread of rank 0 sends the calls, takes the results and runs
    the callbacks of futures. An exception that leaves the block cancels the calls that have not begun. The block is
    entered once.

    Parameters
    ----------
    where : mpi4py.MPI.Intracomm or ParameterServerStrategy, optional
        By default all ranks.
    retries : int
        How many times a call that raised an exception runs again, on any worker, before its future raises it.
    time_limit : float, optional
        Seconds after which TimeoutError is raised in a call, between two steps of Python. Compiled code is not
        interrupted. One rank alone raises it when the call returns.
    progress : bool, optional
        Whether rank 0 shows how many of the calls have ended: a bar on a terminal, a line a minute in a log. By
        default of `map` only. ``MPISTRAT_PROGRESS=0`` turns it off.

    Raises
    ------
    ValueError
        If ``retries`` is negative, or ``time_limit`` is not above 0.
    TypeError
        If ``where`` is something else.
    RuntimeError
        If MPI was started without support for several threads. In a function on a worker, if other ranks of the
        communicator do not run it, too.

    Examples
    --------
    >>> with Executor() as executor:
    ...     if executor is not None:
    ...         print(list(executor.map(abs, [-3, 2, -1])))
    [3, 2, 1]
    """

    def __init__(
        self, where: Any = None, *, retries: int = 0, time_limit: float | None = None, progress: bool | None = None
    ):
        if retries < 0:
            raise ValueError(f"retries must be 0 or more, not {retries}")
        if time_limit is not None and not 0 < time_limit < float("inf"):
            raise ValueError(f"time_limit must be a number of seconds above 0, not {time_limit}")
        MPI = mpi.start()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "an Executor takes results in a thread, and MPI was started without support for several: leave "
                "mpi4py.rc.thread_level at 'multiple'"
            )
        where = MPI.COMM_WORLD if where is None else where
        self._strategy: ParameterServerStrategy | None = None
        if isinstance(where, ParameterServerStrategy):
            self._strategy, self._contact = where, where.contact
        elif isinstance(where, MPI.Intracomm):
            on_worker.require_together(where)
            self._contact = meet_on(where)
        else:
            raise TypeError(f"an Executor takes a communicator or a ParameterServerStrategy, not {where!r}")
        self._retries, self._time_limit = retries, time_limit
        self._serves = self._contact.roles.chief != self._contact.mailbox.rank
        self._kept: list[KeptResults] = []
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._submitted: deque[Task] = deque()  # not yet taken by the thread
        self._outcomes: deque[Callable[[], None]] = deque()  # of calls that another thread saw end
        # Entered itself, not as the condition: an interrupt inside of Condition.__enter__ would leave it locked.
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._closed = False
        self._has_two_ranks = self._strategy is None and where.size == 2
        self._thread: threading.Thread | None = None
        if not self._serves:
            self._bar, self._shows_map = CallsBar(bool(progress)), progress is None
            self._dispatcher: Dispatcher | OneRank
            if self._strategy is not None:
                self._dispatcher = dispatcher_of(self._contact)
            elif where.size > 1:
                self._dispatcher = Dispatcher(self._contact)
            else:
                self._dispatcher = OneRank(where)
            program_end.register(EndStep.EXECUTORS, self._end)
        elif self._strategy is None:
            program_end.register(EndStep.EXECUTORS, self._serve)

    def __enter__(self) -> Executor | None:  # type: ignore[override]  # None on the ranks that serve
        if self._closed:
            raise RuntimeError("the Executor was shut down: make another for each with block")
        if not self._serves:
            _entered.append(self)
            return self
        self._serve()
        return None

    def _serve(self) -> None:
        """Serve rank 0, which may wait for results, also at the end of a program that did not enter the block."""
        self._closed = True
        program_end.unregister(EndStep.EXECUTORS, self._serve)
        serve(self._contact)
        self._contact.mailbox.close()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        missing = error.name if isinstance(error, AttributeError) and error.obj is None else None
        if self._serves and missing is not None and hasattr(self, missing):
            raise RuntimeError(
                f"{self._contact.role} has worked inside of the with block of an Executor, and gets None there: write "
                "`if executor is not None:` around what rank 0 does"
            ) from error
        if not self._serves:
            _entered.remove(self)
            self.shutdown(wait=True, cancel_futures=kind is not None)

    @property
    def workers(self) -> int:
        """Number of ranks that run functions."""
        return len(self._contact.roles.workers)

    def statistics(self) -> Statistics:
        """Return what the workers have done. ``print`` shows it as a table.

        Raises
        ------
        RuntimeError
            On a rank that is not the coordinator.
        """
        self._require_coordinator()
        return self._dispatcher.statistics()

    def _require_coordinator(self) -> None:
        if self._serves:
            raise RuntimeError(f"{self._contact.role} is a worker: rank 0 submits, inside the with block")

    def submit(  # type: ignore[override]  # a number of ranks is a new argument
        self, fn: Callable[..., Any], /, *args: Any, ranks: int | None = None, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Queue a call of a function, and return its future.

        The function and its arguments are sent by value, and large arrays without a copy by pickle. A plain function
        is sent once to each worker.

        Parameters
        ----------
        fn : callable
        *args, **kwargs : object
            Its arguments.
        ranks : int, optional
            Number of workers that call ``fn(comm, *args, **kwargs)`` together, where ``comm`` is their communicator.
            The future gets the result of rank 0 of ``comm``. Later calls wait until so many workers are free.

        Raises
        ------
        TypeError
            If the function is not callable, or a part of the call cannot be sent.
        ValueError
            If ``ranks`` is not between 1 and the number of workers.
        RuntimeError
            After `shutdown`, and on a rank that is not the coordinator.
        """
        self._require_coordinator()
        if ranks is not None and not 1 <= ranks <= self.workers:
            raise ValueError(f"ranks must be between 1 and {self.workers}, the number of workers, not {ranks}")
        return self._submit(self._packed(fn), fn, args, kwargs, ranks)

    def _packed(self, fn: Callable[..., Any]) -> SentFunction:
        if not callable(fn):
            raise TypeError(f"an Executor runs a function, not {fn!r}")
        return self._contact.functions.packed(fn)

    def _submit(
        self,
        function: SentFunction,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: int | None = None,
        calls: int = 1,
        keep: Callable[[Any], None] | None = None,
    ) -> concurrent.futures.Future[Any]:
        arguments, references = pack_arguments(args, kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        number = None if self._strategy is None else self._strategy.number

        def began() -> bool:
            return future.running() or future.set_running_or_notify_cancel()

        def attempt(left: int) -> Task:
            def ended(value: Any, error: BaseException | None) -> None:
                if keep is not None and error is None and not future.cancelled():
                    keep(value)  # before the caller has it, and may close the file
                ends = concurrent.futures.CancelledError, RepeatedLossError
                if error is not None and left and not isinstance(error, ends):
                    self._dispatcher.add(attempt(left - 1))
                elif threading.current_thread() is self._thread:
                    self._settle(future, value, error, calls)
                else:  # a coordinator of the same workers has received it
                    self._outcomes.append(lambda: self._settle(future, value, error, calls))

            kept = (fn, function.references, references, self._strategy)
            return Task(function, arguments, number, self, kept, ended, began, ranks, self._time_limit, calls=calls)

        task = attempt(self._retries)
        with self._lock:
            if self._closed:
                raise RuntimeError("the Executor was shut down: submit before that")
            # The thread sends it. Sent here, it would also take results and run the callbacks of other calls, which may
            # want a lock that the caller holds; and ^C could come between a message and what follows from it.
            self._submitted.append(task)
            self._open.add(future)
            self._bar.queued(calls)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="mpistrat-executor", daemon=True)
                self._thread.start()
            self._change.notify_all()
        return future

    def _settle(
        self, future: concurrent.futures.Future[Any], value: Any, error: BaseException | None, calls: int
    ) -> None:
        if error is not None:
            future.set_exception(error)
        elif not future.cancelled():
            future.set_result(value)
        with self._lock:
            self._open.discard(future)
            self._bar.ended(calls)
            self._change.notify_all()

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        keep: str | os.PathLike[str] | None = None,
        on_error: str = "raise",
    ) -> Iterator[Any]:
        """Return an iterator over the results of ``fn`` for the elements of the iterables, in their order.

        It shows the progress, unless the executor was made with ``progress=False``.

        Parameters
        ----------
        fn : callable
        *iterables : iterable
            Arguments, as for the builtin ``map``. They are read at once, unless there is a ``buffersize``.
        timeout : float, optional
            Seconds until the iterator raises TimeoutError, counted from this call.
        chunksize : int
            Number of calls that are sent to a worker together.
        buffersize : int, optional
            The most calls, or chunks of calls, whose results have not been taken from the iterator. Further arguments
            are read as results are taken. As in Python 3.14.
        keep : path, optional
            An HDF5 file for the results. A call whose result is in the file does not run again, so a job that was
            ended goes on with the rest. Results are numbers, texts, arrays of NumPy, and lists, tuples and dicts of
            these; the file is never unpickled. All arguments are read at once.
        on_error : str
            ``"raise"`` ends the iterator with the error of a call. ``"keep"`` returns the error in place of the result
            and goes on, for a ``chunksize`` of 1. Such a call has no result in the file: a program that is started
            again runs it again.

        Raises
        ------
        ValueError
            If ``chunksize`` or ``buffersize`` is less than 1. If ``on_error`` is unknown. If the file has results of
            another function or of other arguments.
        TypeError
            If ``buffersize`` is neither an int nor None. By the iterator, if a result cannot be kept.
        OSError
            By the iterator, if the file cannot be written.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize must be 1 or more, not {chunksize}")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError(f"buffersize must be an integer or None, not {buffersize!r}")
        if buffersize is not None and buffersize < 1:
            raise ValueError(f"buffersize must be None or > 0, not {buffersize}")
        if on_error != "raise" and (on_error != "keep" or chunksize > 1):
            raise ValueError(f'on_error must be "raise", or "keep" with chunksize=1, not {on_error!r} with {chunksize}')
        self._require_coordinator()
        self._bar.shown |= self._shows_map
        calls: Iterable[tuple[Any, ...]] = zip(*iterables, strict=False)
        function, kept = fn, None
        if keep is not None:
            listed = [*calls]
            kept = KeptResults(keep, fn, listed)
            self._kept.append(kept)
            with self._lock:
                self._bar.queued(len(kept.loaded), len(kept.loaded))
            calls = [listed[number] for number in kept.missing]
        if chunksize > 1:

            def function(*chunk: tuple[Any, ...]) -> list[Any]:
                return [on_worker.call(fn, arguments, {}) for arguments in chunk]

            calls = _chunks(calls, chunksize)
        results = self._map(function, calls, timeout, buffersize, chunksize, kept, on_error == "keep")
        if chunksize > 1:
            results = itertools.chain.from_iterable(results)
        return results if kept is None else kept.in_order(results)

    def _map(
        self,
        fn: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        timeout: float | None,
        buffersize: int | None,
        chunksize: int,
        kept: KeptResults | None,
        with_errors: bool,
    ) -> Iterator[Any]:
        function = self._packed(fn)  # once: an object that is not a plain function is packed at each use
        end = None if timeout is None else time.monotonic() + timeout
        numbers = iter(() if kept is None else kept.missing)

        def submitted(call: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
            count = len(call) if chunksize > 1 else 1
            keep = None if kept is None else partial(kept.take, [*itertools.islice(numbers, count)], chunksize > 1)
            return self._submit(function, fn, call, {}, calls=count, keep=keep)

        futures = map(submitted, calls)
        return _results(deque(itertools.islice(futures, buffersize)), futures, end, with_errors)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Free the ranks that serve a communicator when all calls have ended.

        Parameters
        ----------
        wait : bool
            Whether to wait until all calls have ended.
        cancel_futures : bool
            Whether to cancel the calls that have not begun.
        """
        with self._lock:
            self._closed = True
            waiting = list(self._open)
        if cancel_futures:
            for future in waiting:  # without the lock: cancel() runs callbacks, which may wait for other threads
                future.cancel()
        with self._lock:
            self._change.notify_all()
        if wait and not self._serves:
            if self._thread is not None:
                self._thread.join()
            self._bar.close()
            while self._kept:
                self._kept.pop().close()
            if self._strategy is None and not self._contact.mailbox.closed:
                shut_down(self._contact)
                self._contact.mailbox.close()
            program_end.unregister(EndStep.EXECUTORS, self._end)

    def _end(self) -> None:
        """Wait for all calls at the end of the program, as other executors do."""
        end_with(self.shutdown)

    def _drive(self) -> None:
        """Make progress while calls are open. If that fails, such as after an interrupted message, they fail too."""
        try:
            self._make_progress()
        except BaseException as error:
            with self._lock:
                self._closed = True
                failed, self._open = self._open, set()
            for future in failed:
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _make_progress(self) -> None:
        backoff = Backoff()
        idle_from = time.monotonic() + _IDLE_S if self._has_two_ranks else None
        while not self._contact.mailbox.closed:
            with self._lock:
                if not self._open:
                    if self._closed:
                        return
                    self._change.wait()
                    backoff.reset()
                    continue
            news = bool(self._submitted or self._outcomes)
            while self._submitted:
                self._dispatcher.add(self._submitted.popleft())
            while self._outcomes:
                self._outcomes.popleft()()
            if self._dispatcher.progress() or news:
                backoff.reset()
                continue
            if idle_from is not None and len(self._open) > 1 and time.monotonic() > idle_from:
                idle_from = None
                _log.warning(
                    "an Executor on 2 ranks has one worker: rank 0 hands out calls and runs none, and %d calls are not "
                    "done. Start one rank more than shall work",
                    len(self._open),
                )
            backoff.pause(self._wait_for_news)

    def _wait_for_news(self, seconds: float) -> None:
        with self._lock:
            if not self._submitted:
                self._change.wait(seconds)


def _chunks(calls: Iterable[tuple[Any, ...]], size: int) -> Iterator[tuple[Any, ...]]:
    iterator = iter(calls)
    while chunk := tuple(itertools.islice(iterator, size)):
        yield chunk


def _results(
    waiting: deque[concurrent.futures.Future[Any]],
    more: Iterator[concurrent.futures.Future[Any]],
    end: float | None,
    with_errors: bool,
) -> Iterator[Any]:
    """Yield results, or errors of calls, in their order. Cancel the other futures if one raises or the caller stops."""
    try:
        while waiting:
            waiting.extend(itertools.islice(more, 1))  # submit one more for the one that is taken
            future, left = waiting.popleft(), None if end is None else end - time.monotonic()
            error = future.exception(left) if with_errors else None
            # Unless the call itself was running when they were lost, no worker is left.
            if isinstance(error, LostRankError) and not isinstance(error, RepeatedLossError):
                raise error
            yield future.result(left) if error is None else error
    finally:
        for future in waiting:
            future.cancel()


_entered: list[Executor] = []  # executors whose with block this rank is in


def current_executor() -> Executor:
    """Return the executor of the innermost ``with`` block that this rank is in. Raise RuntimeError outside of one."""
    if not _entered:
        raise RuntimeError("no Executor is in use: call this in its with block, on the coordinator")
    return _entered[-1]
