"""A backend of joblib, and with it of scikit-learn, that runs on the workers of an `Executor`.

Importing this module registers the backend ``"mpistrat"``. It needs joblib, which scikit-learn brings along.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from joblib.parallel import FallbackToBackend, ParallelBackendBase, SequentialBackend, register_parallel_backend

from mpistrat.asynchronous import on_worker
from mpistrat.asynchronous.executor import current_executor
from mpistrat.coordinator import Executor


class Backend(ParallelBackendBase):
    """Runs the calls of ``joblib.Parallel`` on all workers of an executor.

    Any ``n_jobs`` but 1 uses all workers. ``Parallel`` within a call runs sequentially on its worker.

    Parameters
    ----------
    executor : Executor, optional
        By default the executor of the innermost ``with`` block.
    **options : object
        As for the base class.

    Examples
    --------
    >>> import joblib, mpistrat.integrations.joblib
    >>> with mpistrat.coordinator.Executor(MPI.COMM_WORLD) as executor:  # doctest: +SKIP
    ...     if executor is not None:
    ...         with joblib.parallel_config(backend="mpistrat"):
    ...             joblib.Parallel()(joblib.delayed(abs)(x) for x in (-1, 2))
    [1, 2]
    """

    default_n_jobs = -1
    supports_retrieve_callback = True

    def __init__(self, executor: Executor | None = None, **options: Any):
        super().__init__(**options)
        self._executor = executor
        if executor is None and not on_worker.is_worker():  # `configure` runs nested calls on their worker
            self._executor = current_executor()
        self._open: set[concurrent.futures.Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers, or 1 for one job. Raise ValueError if ``n_jobs`` is 0."""
        if n_jobs == 0:
            raise ValueError("n_jobs must be -1 for all workers, or 1 for none of them, not 0")
        return 1 if n_jobs == 1 or self._executor is None else self._executor.workers

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Return the number of workers; for one job, leave the work to the sequential backend."""
        if n_jobs == 1 or self._executor is None:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        number: int = super().configure(n_jobs, parallel, **options)
        return number

    def submit(
        self, func: Callable[[], Any], callback: Callable[[concurrent.futures.Future[Any]], None] | None = None
    ) -> concurrent.futures.Future[Any]:
        """Queue a batch of calls, and return its future."""
        assert self._executor is not None  # or `configure` has left the work to the sequential backend
        future = self._executor.submit(_call, func)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def apply_async(self, func: Callable[[], Any], callback: Any = None) -> concurrent.futures.Future[Any]:
        """Do as `submit`: the name that joblib used before 1.5."""
        return self.submit(func, callback)

    def retrieve_result_callback(self, out: concurrent.futures.Future[Any]) -> Any:
        """Return the results of a batch."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that have not begun."""
        for future in [*self._open]:
            future.cancel()

    def get_nested_backend(self) -> tuple[ParallelBackendBase, None]:
        """Return the sequential backend: a worker is one process of the job."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


def _call(batch: Callable[[], Any]) -> Any:
    """Call a batch, which travels as an argument: workers keep functions, but not arguments."""
    return batch()


register_parallel_backend("mpistrat", Backend)
