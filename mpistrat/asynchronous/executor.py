"""An executor of `concurrent.futures` whose workers are ranks."""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat.asynchronous.service import serve
from mpistrat.asynchronous.tasks import Dispatcher, Task, dispatcher_of
from mpistrat.messages.backoff import Backoff
from mpistrat.messages.contact import end_with, meet_on, say_goodbye
from mpistrat.messages.pickling import pack
from mpistrat.runtime.process import failure, mpi
from mpistrat.strategies.parameter_server import ParameterServerStrategy


class Executor(concurrent.futures.Executor):
    """Runs calls of functions on other ranks: a `concurrent.futures.Executor` without processes of its own.

    On a communicator it is made on all ranks, and rank 0 uses it. The other ranks run the functions inside the
    ``with`` block until rank 0 leaves it; there the block gets None, as in ``mpi4py.futures.MPICommExecutor``. Ranks
    that do not enter the block run functions at the end of the program. With a
    `ParameterServerStrategy` it is made on the coordinator, and the functions run on the workers of the strategy, in
    its scope.

    A function runs in the main thread of its worker. A thread of rank 0 takes the results.

    Parameters
    ----------
    where : mpi4py.MPI.Intracomm or ParameterServerStrategy
    retries : int
        How many times a call that raised an exception runs again, on any worker, before its future raises it.

    Raises
    ------
    ValueError
        If the communicator has one rank, or ``retries`` is negative.
    TypeError
        If ``where`` is something else.
    RuntimeError
        If MPI was started without support for several threads.

    Examples
    --------
    On two ranks or more:

    >>> with Executor(MPI.COMM_WORLD) as executor:  # doctest: +SKIP
    ...     if executor is not None:
    ...         print(list(executor.map(abs, [-3, 2, -1])))
    [3, 2, 1]
    """

    def __init__(self, where: Any, *, retries: int = 0):
        if retries < 0:
            raise ValueError(f"retries must be 0 or more, not {retries}")
        MPI = mpi.start()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "an Executor takes results in a thread, and MPI was started without support for several: leave "
                "mpi4py.rc.thread_level at 'multiple'"
            )
        self._strategy: ParameterServerStrategy | None = None
        if isinstance(where, ParameterServerStrategy):
            self._strategy, self._contact = where, where.contact
        elif isinstance(where, MPI.Intracomm):
            self._contact = meet_on(where)
        else:
            raise TypeError(f"an Executor takes a communicator or a ParameterServerStrategy, not {where!r}")
        self._retries = retries
        self._serves = self._contact.roles.chief != self._contact.post.rank
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._change = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        if not self._serves:
            if self._strategy is None:
                self._dispatcher = Dispatcher(self._contact)
            else:
                self._dispatcher = dispatcher_of(self._contact)
            atexit.register(self._end)
        elif self._strategy is None:
            atexit.register(self._serve_at_end)

    def __enter__(self) -> Executor | None:  # type: ignore[override]  # None on the ranks that serve
        if not self._serves:
            return self
        self._serve()
        return None

    def _serve(self) -> None:
        atexit.unregister(self._serve_at_end)
        serve(self._contact)
        self._contact.post.close()

    def _serve_at_end(self) -> None:
        """Serve if the program did not enter the block: rank 0 may wait for results."""
        if mpi.running() and not failure.pending():
            self._serve()

    def __exit__(self, *exc_info: object) -> None:
        if not self._serves:
            self.shutdown(wait=True)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Queue a call of a function, and return its future.

        The function and its arguments are sent by value, and large arrays without a copy by pickle. A plain function
        is sent once to each worker.

        Raises
        ------
        TypeError
            If the function is not callable, or a part of the call cannot be sent.
        RuntimeError
            After `shutdown`, and on a rank that is not the coordinator.
        """
        if self._serves:
            raise RuntimeError(f"{self._contact.role} is a worker: rank 0 submits, inside the with block")
        if not callable(fn):
            raise TypeError(f"submit takes a function, not {fn!r}")
        function = self._contact.functions.packed(fn)
        arguments, references = pack((args, kwargs), copy=True)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._change:
            if self._closed:
                raise RuntimeError("the Executor was shut down: submit before that")
            self._open.add(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="mpistrat-executor", daemon=True)
                self._thread.start()
            self._change.notify_all()
        number = None if self._strategy is None else self._strategy.number

        def began() -> bool:
            return future.running() or future.set_running_or_notify_cancel()

        def attempt(left: int) -> Task:
            def ended(value: Any, error: BaseException | None) -> None:
                if error is not None and left and not isinstance(error, concurrent.futures.CancelledError):
                    self._dispatcher.add(attempt(left - 1))
                    return
                if error is not None:
                    future.set_exception(error)
                elif not future.cancelled():
                    future.set_result(value)
                with self._change:
                    self._open.discard(future)
                    self._change.notify_all()

            return Task(function, arguments, number, self, (fn, references, self._strategy), ended, began)

        self._dispatcher.add(attempt(self._retries))
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Any]:
        """Return an iterator over the results of ``fn`` for the elements of the iterables, in their order.

        Parameters
        ----------
        fn : callable
        *iterables : iterable
            Arguments, as for the builtin ``map``. They are read at once.
        timeout : float, optional
            Seconds until the iterator raises TimeoutError, counted from this call.
        chunksize : int
            Number of calls that are sent to a worker together.

        Raises
        ------
        ValueError
            If ``chunksize`` is less than 1.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize must be 1 or more, not {chunksize}")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)

        def call_each(chunk: list[tuple[Any, ...]]) -> list[Any]:
            return [fn(*arguments) for arguments in chunk]

        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        return itertools.chain.from_iterable(super().map(call_each, chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Free the ranks that serve a communicator when all calls have ended.

        Parameters
        ----------
        wait : bool
            Whether to wait until all calls have ended.
        cancel_futures : bool
            Whether to cancel the calls that have not begun.
        """
        with self._change:
            self._closed = True
            waiting = list(self._open)
        if cancel_futures:
            for future in waiting:
                future.cancel()
        with self._change:
            self._change.notify_all()
        if wait and not self._serves:
            if self._thread is not None:
                self._thread.join()
            if self._strategy is None and not self._contact.post.closed:
                say_goodbye(self._contact.post)
                self._contact.post.close()
            atexit.unregister(self._end)

    def _end(self) -> None:
        """Wait for all calls at the end of the program, as other executors do."""
        if mpi.running() and not failure.pending():
            end_with(self.shutdown)

    def _drive(self) -> None:
        """Make progress while calls are open. If that fails, such as after an interrupted message, they fail too."""
        try:
            self._make_progress()
        except BaseException as error:
            with self._change:
                self._closed = True
                failed, self._open = self._open, set()
            for future in failed:
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _make_progress(self) -> None:
        backoff = Backoff()
        while not self._contact.post.closed:
            with self._change:
                if not self._open:
                    if self._closed:
                        return
                    self._change.wait()
                    backoff.reset()
                    continue
            if self._dispatcher.progress():
                backoff.reset()
            else:
                backoff.pause()


def _chunks(calls: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    iterator = iter(calls)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
