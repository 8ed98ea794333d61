"""Task farms on 4 ranks: ``python farms.py NAME`` runs the function of that name with an executor, on rank 0."""

import contextlib
import logging
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from raised import raised

import mpistrat
from mpistrat.coordinator import Executor


def farm():
    with Executor(MPI.COMM_WORLD) as executor:
        if executor is not None:
            tasks_that_wait_behind_a_long_one(executor)
            tasks_of_several_ranks(executor)
            wrong_numbers_of_ranks(executor)
            statistics(executor)
            more_functions_than_workers_keep(executor)
            maps(executor)
            executors_in_calls(executor)
            communicators_of_failed_calls(executor)
            what_cannot_be_sent(executor)
            callbacks_run_in_one_thread(executor)
            interrupted_submits(executor)
            tasks_that_interrupt(executor)
            maps_with_a_buffer(executor)
    left, waiting = Executor(MPI.COMM_WORLD), []
    with contextlib.suppress(KeyError), left as executor:
        if executor is not None:
            an_error_in_the_block(executor, waiting)
    assert all(each.cancelled() for each in waiting)
    assert "make another" in str(raised(left.__enter__))
    with Executor(MPI.COMM_WORLD, time_limit=0.5) as executor:
        if executor is not None:
            time_limits(executor)
    if MPI.COMM_WORLD.rank:
        error = raised(without_an_if)
        assert type(error) is RuntimeError
        assert "write `if executor is not None:`" in str(error)
    else:
        without_an_if()


def without_an_if():
    with Executor() as executor:
        assert [*executor.map(abs, [-1, -2])] == [1, 2]


# --- taken back ----------------------------------------------------------------------------------------


def tasks_that_wait_behind_a_long_one(executor):
    """The long ones end when those after them have run, wherever these were handed to at first."""
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(10):
            list(executor.map(abs, range(50)))  # workers with short tasks are handed tasks ahead
            paths = [Path(folder) / f"{turn}-{i}" for i in range(3)]
            long = [executor.submit(wait_for, paths) for _ in range(executor.workers - 1)]
            executor.submit(time.sleep, 0.01)
            short = [executor.submit(path.touch) for path in paths]
            assert [each.result() for each in short] == [None] * 3
            assert [each.result() for each in long] == [True] * len(long)


def wait_for(paths):
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if all(path.exists() for path in paths):
            return True
        time.sleep(0.001)
    return False


# --- several ranks -------------------------------------------------------------------------------------


def tasks_of_several_ranks(executor):
    for ranks in range(1, executor.workers + 1):
        results = [executor.submit(together, i, ranks=ranks, scale=2) for i in range(7)]
        alone = executor.submit(abs, -1)
        expected = [(ranks, sum(2 * (i + rank) for rank in range(ranks))) for i in range(7)]
        assert [each.result() for each in results] == expected
        assert alone.result() == 1
    error = raised(executor.submit(fails_on_last, ranks=2).result)
    assert type(error) is ZeroDivisionError
    assert "fails_on_last" in str(error.__cause__)
    array = executor.submit(lambda comm, x: comm.allreduce(x), np.ones(100_000), ranks=2).result()
    np.testing.assert_array_equal(array, np.full(100_000, 2.0))


def together(comm, i, scale):
    return comm.size, comm.allreduce(scale * (i + comm.rank))


def fails_on_last(comm):
    if comm.rank == comm.size - 1:
        raise ZeroDivisionError
    return lambda: comm  # cannot be sent


def executors_in_calls(executor):
    """One that other ranks would have to make, too, is refused; on the ranks of the call it works."""
    for ranks in (None, 2):
        error = raised(executor.submit(farm_on_all, ranks=ranks).result)
        assert "do not all run the function" in str(error)
    assert executor.submit(farm_within, ranks=2).result() == [1, 2]
    assert {*executor.map(worker_number, range(20))} <= {0, 1, 2}


def farm_on_all(*_):
    Executor(MPI.COMM_WORLD)


def farm_within(comm):
    with Executor(comm) as executor:
        return None if executor is None else [*executor.map(abs, [-1, -2])]


def worker_number(_):
    time.sleep(0.002)
    return mpistrat.coordinator.experimental_get_current_worker_index()


def communicators_of_failed_calls(executor):
    """MPI libraries have about 2000: each is freed when its call has ended on all ranks."""
    for _ in range(3):
        assert type(raised(executor.submit(marks_and_fails, ranks=executor.workers).result)) is OSError
    assert executor.submit(lambda comm: comm.allreduce(freed()), ranks=executor.workers).result() == 3 * 3


def marks_and_fails(comm):
    import builtins

    noted = builtins.__dict__.setdefault("freed_communicators", [])  # this function is a copy on its worker
    comm.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: noted.append(1)), None)
    raise OSError


def freed():
    import builtins

    return len(builtins.freed_communicators)


def what_cannot_be_sent(executor):
    """The error names the part: an argument, what a method or a function captures, or a default."""
    lock = threading.Lock()
    holder = type("Holder", (), {"method": lambda self: None})()
    holder.lock = lock
    for call, text in {
        (abs, 1, (lock,)): "argument 1 of the call, a tuple",
        (holder.method,): "'self', a Holder",
        (lambda x=lock: x,): "'x', a lock",
        (lambda: [(lambda: lock) for _ in range(1)],): "'lock', a lock",
    }.items():
        assert text in str(raised(executor.submit, *call))


def callbacks_run_in_one_thread(executor):
    """A callback may want a lock that its own or another thread holds in `submit`."""
    lock, seen, threads = threading.Lock(), [], set()

    def done(future):
        with lock:
            seen.append(future.result())
            threads.add(threading.current_thread())

    def submits():
        for i in range(300):
            with lock:
                future = executor.submit(abs, -i)
            future.add_done_callback(done)

    submitters = [threading.Thread(target=submits, daemon=True) for _ in range(2)]
    for each in submitters:
        each.start()
    for each in submitters:
        each.join(60)
        assert not each.is_alive()
    assert executor.submit(abs, -1).result() == 1
    end = time.monotonic() + 60
    while len(seen) < 600 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(seen) == sorted([*range(300)] * 2)
    # A callback that is added when the future has its result runs in the thread that adds it.
    assert len(threads - {*submitters}) == 1


def interrupted_submits(executor):
    """An interrupt of `submit` loses no other call, and the executor goes on."""
    futures, interrupts = [], 0

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + i % 20))
                futures.append((i, executor.submit(abs, -i)))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    assert all(future.result(60) == i for i, future in futures)


def tasks_that_interrupt(executor):
    assert isinstance(executor.submit(raises_interrupt).exception(), KeyboardInterrupt)
    assert executor.submit(abs, -1).result() == 1


def raises_interrupt():
    raise KeyboardInterrupt


def maps_with_a_buffer(executor):
    """Arguments are read as results are taken, as in Python 3.14."""
    for chunksize, first in (1, 4), (3, 12):
        read = []
        numbers = (read.append(i) or -i for i in range(30))
        results = executor.map(abs, numbers, chunksize=chunksize, buffersize=4)
        assert len(read) == first
        assert next(results) == 0
        assert len(read) == first + chunksize
        assert [*results] == [*range(1, 30)]
    assert [*executor.map(abs, [], buffersize=1)] == []
    assert "> 0" in str(raised(lambda: executor.map(abs, [1], buffersize=0)))
    assert "integer" in str(raised(lambda: executor.map(abs, [1], buffersize="1")))


def an_error_in_the_block(executor, waiting):
    """What has not begun is cancelled: the program ends without it."""
    futures = [executor.submit(time.sleep, 0.2) for _ in range(20 * executor.workers)]
    futures[0].result()
    waiting += futures[10 * executor.workers :]
    raise KeyError


def wrong_numbers_of_ranks(executor):
    for ranks in (0, -1, executor.workers + 1):
        assert f"not {ranks}" in str(raised(executor.submit, together, ranks=ranks))
    for wrong in ({"time_limit": 0}, {"time_limit": float("nan")}, {"retries": -1}):
        assert type(raised(Executor, MPI.COMM_WORLD, **wrong)) is ValueError


# --- the rest ------------------------------------------------------------------------------------------


class Line:
    """A callable that is not a function, as optimizers have."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, x):
        return self.slope * x


def maps(executor):
    assert list(executor.map(Line(3), range(10))) == [3 * i for i in range(10)]
    before = executor.statistics().ended
    assert list(executor.map(Line(3), range(10), chunksize=4)) == [3 * i for i in range(10)]
    assert executor.statistics().ended - before == 10  # calls, not chunks
    assert type(raised(lambda: next(executor.map(time.sleep, [0.5], timeout=0.01)))).__name__ == "TimeoutError"
    assert type(raised(executor.map, 3, [1])) is TypeError
    results = executor.map(wait_or_fail, range(20))
    assert type(raised(list, results)) is ArithmeticError


def wait_or_fail(i):
    time.sleep(0.01)
    if i == 2:
        raise ArithmeticError(i)


def more_functions_than_workers_keep(executor):
    functions = [lambda x, i=i: x + i for i in range(300)]
    futures = [executor.submit(function, 1) for function in functions * 2]
    assert [future.result() for future in futures] == [*range(1, 301)] * 2


def statistics(executor):
    executor.submit(time.sleep, 0.05).result()
    before = executor.statistics()
    executor.submit(time.sleep, 0.05).result()
    raised(executor.submit(wait_or_fail, 2).result)
    after = executor.statistics()
    assert (after.ended - before.ended, after.waiting, after.running) == (2, 0, 0)
    assert sum(each.failed for each in after.workers) - sum(each.failed for each in before.workers) == 1
    assert [each.rank for each in after.workers] == [1, 2, 3]
    assert sum(each.busy_seconds for each in after.workers) > 0.1
    assert after.per_second > 0
    assert f"{after.ended} calls ended" in str(after)


def time_limits(executor):
    slow = executor.submit(time.sleep, 40)
    endless = executor.submit(count)
    quick = executor.submit(abs, -2)
    for each in (slow, endless):
        error = raised(each.result)
        assert type(error) is TimeoutError
        assert "0.5 s, its time limit" in str(error)
    assert quick.result() == 2
    large = executor.submit(lambda x: time.sleep(40) or x, np.zeros(1_000_000))
    assert type(raised(large.result)) is TimeoutError
    assert executor.submit(abs, -2).result() == 2
    assert type(raised(executor.submit(delete_for_ever).result)) is TimeoutError


class SlowToDelete:
    def __del__(self):  # Python ignores errors that are raised here
        time.sleep(0.02)


def delete_for_ever():
    while True:
        SlowToDelete()
        for _ in range(100_000):
            pass


def count():
    while True:
        pass


def reads_with_a_time_limit():
    """A function that only reads a variable is interrupted between two messages, and the worker lives on."""
    resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs={"chief": 1, "worker": 2, "ps": 1})
    if resolver.task_type != "chief":
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    strategy = mpistrat.ParameterServerStrategy(resolver)
    with strategy.scope():
        v = mpistrat.Variable(np.arange(100_000.0))

    def read():
        while True:
            v.read_value()

    with Executor(strategy, time_limit=0.1) as limited, Executor(strategy) as executor:
        for _ in range(3):
            assert type(raised(limited.submit(read).result)) is TimeoutError
            assert executor.submit(lambda: v.read_value().sum()).result() == v.numpy().sum()


def stuck():
    """One rank of a function raises, and the other waits for it in a collective."""
    with Executor(MPI.COMM_WORLD) as executor:
        if executor is not None:
            executor.submit(raises_before_a_collective, ranks=2).result()


def raises_before_a_collective(comm):
    if comm.rank == 0:
        raise ArithmeticError("on purpose")
    comm.Barrier()


def one_worker():
    """Of two ranks one works, which is said if calls wait. Errors of calls are returned, and the worker goes on."""
    said = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said.set() if "rank 0 hands out calls" in record.getMessage() else None
    logging.getLogger("mpistrat").addHandler(handler)
    with Executor() as executor, tempfile.TemporaryDirectory() as folder:
        if executor is not None:
            end = str(Path(folder) / "end")
            waiting = [executor.submit(exists, end) for _ in range(2)]
            assert said.wait(60)
            Path(end).touch()
            assert all(each.result() for each in waiting)
            found = [*executor.map(divided, [1, 0, 2], on_error="keep")]
            assert (found[0], type(found[1]), found[2]) == (1, ZeroDivisionError, 0.5)
            assert "worker 0" in str(found[1].__cause__)
            if sys.version_info >= (3, 11):
                assert found[1].__notes__ == ["the call: divided(0)"]


def exists(path):
    while not Path(path).exists():
        time.sleep(0.01)
    return True


def divided(x):
    return 1 / x


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    if MPI.COMM_WORLD.rank == 0:
        print("all checks passed")
