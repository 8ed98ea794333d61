"""Tests of map(fn, workers=...): elements are those of the same pipeline without workers, and so are errors."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat import nest
from mpistrat.data import Dataset

ROWS = 23
SLOW = 600e-6


def equal(found, expected):
    found, expected = nest.flatten(found)[0], nest.flatten(expected)[0]
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def same(make, epochs=2):
    """Compare ``make(workers)`` with ``make(None)``."""
    found, expected = make(2), make(None)
    for _ in range(epochs):
        for a, b in zip(found, expected, strict=True):
            equal(a, b)


def processes(dataset):
    """The processes in which the function of a dataset of their numbers was called."""
    return {each for batch in dataset for each in batch.tolist()}


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- elements --------------------------------------------------------------------------------------------


@dataclass
class Pair:
    number: object
    text: object


MAPS = {
    "number": lambda x: x + 1,
    "tuple": lambda x: (x, np.full(3, x)),
    "dict": lambda x: {"a": np.float32(x), "b": {"c": str(x)}},
    "dataclass": lambda x: Pair(x, np.datetime64(int(x), "s")),
    "large": lambda x: np.full((1 << 15,), x, np.float64),
    "object": lambda x: np.array([{"of": int(x)}, None], object)[0:1],
}


@pytest.mark.full
@pytest.mark.parametrize("name", MAPS)
def test_structures(name):
    same(lambda workers: Dataset.range(ROWS).map(MAPS[name], workers=workers).batch(6))
    same(lambda workers: Dataset.range(3).map(MAPS[name], workers=workers), epochs=1)


@pytest.mark.full
def test_rows_of_structures():
    rows = Dataset.from_arrays({"x": np.random.default_rng(0).random((ROWS, 20_000)), "y": np.arange(ROWS)})
    same(lambda workers: rows.map(lambda row: Pair(row["x"] + row["y"], 1), workers=workers).batch(9))
    pairs = rows.map(lambda row: Pair(row["x"], row["y"]))
    same(lambda workers: pairs.map(lambda pair: pair.number * pair.text, workers=workers).batch(9))


@pytest.mark.full
@settings(max_examples=int(os.environ.get("MPISTRAT_TEST_PIPELINES", "12")))
@given(
    n=st.integers(0, 40),
    kind=st.sampled_from(["range", "stream", "zip"]),
    steps=st.lists(
        st.sampled_from(["add", "seed", "seed again", "threads", "shuffle", "skip", "repeat", "take"]), max_size=5
    ),
    batch=st.sampled_from([None, 1, 3, 8, 50]),
    workers=st.sampled_from([1, 2, 3, "auto"]),
    last=st.sampled_from(["add", "pad"]),
)
def test_random_pipelines(n, kind, steps, batch, workers, last):
    def make(workers):
        dataset = Dataset.range(n)
        if kind == "stream":
            dataset = Dataset.from_iterable(lambda: iter(range(n)))
        if kind == "zip":
            dataset = Dataset.zip(dataset.map(lambda x: x + 1, workers=workers), dataset).map(lambda a, b: a * b)
        used = set()
        for step in steps:
            if step in ("seed", "seed again"):
                if step not in used:
                    seed = len(step)
                    dataset = dataset.map(lambda x, rng: x + rng.integers(100), workers=workers, seed=seed)
                used.add(step)
            else:
                dataset = {
                    "add": lambda it: it.map(lambda x: x + 1, workers=workers),
                    "threads": lambda it: it.map(lambda x: x * 3, num_parallel_calls=2, workers=workers),
                    "shuffle": lambda it: it.shuffle(5, seed=3),
                    "skip": lambda it: it.skip(2),
                    "repeat": lambda it: it.repeat(2),
                    "take": lambda it: it.take(17),
                }[step](dataset)
        if last == "pad" and batch:
            return dataset.map(lambda x: np.full(int(x) % 3, x), workers=workers).padded_batch(
                batch, drop_remainder=n % 2
            )
        return dataset if batch is None else dataset.batch(batch).map(lambda x: -x)

    same(lambda given: make(given and workers))


def test_rows_by_number():
    dataset = Dataset.range(ROWS).map(lambda x: x * x, workers=2)
    assert int(dataset[4]) == 16
    assert [x.tolist() for x in dataset[3:9].batch(4)] == [[9, 16, 25, 36], [49, 64]]


# --- the processes ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_processes_start_once_and_end_with_the_dataset():
    dataset = Dataset.range(64).map(lambda x: [time.sleep(0.002), os.getpid()][1], workers=2).batch(64)
    first, second = processes(dataset), processes(dataset)
    assert first == second
    assert len(first) == 2
    assert os.getpid() not in first
    del dataset
    gc.collect()
    wait_until(lambda: not any(map(is_running, first)))


@pytest.mark.full
def test_copies_have_processes_of_their_own():
    dataset = Dataset.range(ROWS).map(lambda x: os.getpid(), workers=1).batch(ROWS)
    first = processes(dataset)
    assert not first & processes(copy.deepcopy(dataset))
    named = Dataset.range(ROWS).map(np.square, workers=1).batch(ROWS)
    (squares,) = named
    (again,) = pickle.loads(pickle.dumps(named))
    assert squares.tolist() == again.tolist()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_processes_of_its_own():
    dataset = Dataset.range(ROWS).map(lambda x: os.getpid(), workers=1).batch(ROWS)
    first = processes(dataset)
    child = os.fork()
    if child == 0:
        os._exit(len(processes(dataset) & first))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert processes(dataset) == first


def test_what_a_worker_has_of_the_rank(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_SIZE", "PRTE_X", "SLURM_PROCID", "OMP_NUM_THREADS", "MINE"):
        monkeypatch.setenv(name, "3")
    names = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")

    def look(x):
        left = [name for name in os.environ if name.startswith(names)]
        return str((left, os.environ["MINE"], os.environ["OMP_NUM_THREADS"], sorted(os.sched_getaffinity(0))))

    (found,) = Dataset.range(2).map(look, workers=1).batch(2)
    assert set(found.tolist()) == {str(([], "3", "1", sorted(os.sched_getaffinity(0))))}


def test_signals_for_all_processes_of_a_rank_do_not_end_a_worker():
    def call(x):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return x

    assert [int(x) for x in Dataset.range(4).map(call, workers=2).batch(4).take(1).unbatch()] == [0, 1, 2, 3]


def test_a_worker_is_not_a_rank():
    def call(x):
        return mpistrat.MultiWorkerMirroredStrategy().num_replicas_in_sync

    with pytest.raises(RuntimeError, match="not a rank"):
        list(Dataset.range(4).map(call, workers=1).batch(4))


# --- errors -----------------------------------------------------------------------------------------------


def broken(x):
    return 1 // (int(x) - 7)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_an_error_has_its_row_and_its_traceback(workers):
    dataset = Dataset.range(40).map(lambda x: broken(x) + broken(x + 1), workers=workers).batch(30)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as raised:
            list(dataset)
        told = str(raised.value.__cause__)
        assert "row 6 of the source, epoch" in told
        assert "in broken" in told
        assert "worker process " in told
    stream = Dataset.from_iterable(lambda: iter(range(40))).map(lambda x: broken(x), workers="auto").batch(30)
    with pytest.raises(ZeroDivisionError):
        list(stream)


def test_errors_and_results_that_cannot_be_pickled():
    class Strange(Exception):
        def __init__(self, one, two):
            super().__init__("strange")
            self.lock = threading.Lock()

    def call(x):
        if x == 3:
            raise Strange(1, 2)
        return x

    with pytest.raises(RuntimeError, match="strange"):
        list(Dataset.range(6).map(call, workers=2).batch(6))

    def locked(x):
        return np.array([threading.Lock() if x > 2 else 1], object)

    with pytest.raises(TypeError, match="cannot be sent") as raised:
        list(Dataset.range(6).map(locked, workers=1).batch(6))
    assert "row 3 of the source" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("how", "told"), [("os.kill(os.getpid(), 9)", "signal 9 .SIGKILL."), ("os._exit(3)", "status 3")]
)
def test_a_worker_that_dies(how, told):
    def call(x):
        if x == 5:
            eval(how)
        return os.getpid()

    dataset = Dataset.range(4, 8).map(call, workers=2).batch(4)
    with pytest.raises(RuntimeError, match=f"worker process [0-9]+ of map.* {told}"):
        list(dataset)
    assert len(processes(Dataset.range(10, 14).map(call, workers=2).batch(4))) in (1, 2)


def test_what_is_wrong_is_said_at_once():
    dataset, lock = Dataset.range(4), threading.Lock()
    for wrong in (0, -1, 1.5, True, "many", [2]):
        with pytest.raises(ValueError, match=r"workers of map\(\) must be 'auto', or an integer"):
            dataset.map(abs, workers=wrong)
    with pytest.raises(ValueError, match=r"call it before batch\(\)"):
        dataset.batch(2).map(abs, workers=2)

    def holds_a_lock(x):
        return lock

    with pytest.raises(TypeError, match=r"function .*holds_a_lock cannot be sent, because of 'lock'"):
        dataset.map(holds_a_lock, workers="auto")
    rng = np.random.default_rng(0)
    with pytest.warns(UserWarning, match="random generator 'rng'"):
        dataset.map(lambda x: rng.random(), workers=2)


# --- "auto" -----------------------------------------------------------------------------------------------


def test_auto_takes_processes_for_slow_functions_only(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def call(x, seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return os.getpid()

    for seconds, is_slow in ((0, False), (SLOW, True)):
        dataset = Dataset.range(60).map(lambda x, s=seconds: call(x, s), workers="auto").batch(10)
        processes(dataset)
        assert (os.getpid() not in processes(dataset)) == is_slow


@pytest.mark.full
@pytest.mark.parametrize(
    ("cores", "there", "ranks", "count"),
    [(1, 8, 8, 1), (8, 8, 9, 1), (4, 8, 2, 4), (8, 8, 2, 4), (4, 16, 8, 2), (2, 2, 1, 2)],
)
def test_auto_counts_the_cores_of_the_rank(monkeypatch, cores, there, ranks, count):
    masks = {0: set(range(cores)), 1: set(range(there))}
    monkeypatch.setattr(os, "sched_getaffinity", masks.get)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
    dataset = Dataset.range(100).map(lambda x: [time.sleep(SLOW), os.getpid()][1], workers="auto").batch(50)
    processes(dataset)
    found = processes(dataset)
    assert len(found) == count
    assert (os.getpid() in found) == (count == 1)
    assert len([*dataset.unbatch()]) == 100


# --- programs ---------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import numpy as np
import beside
from mpistrat.data import Dataset

print("the body of the program")
scale = 3

def call(x):
    return beside.double(x) * scale

class Own(Exception):
    pass

def fail(x):
    raise Own("of the program", int(x))

try:
    list(Dataset.range(3).map(fail, workers=2).batch(3))
except Own as error:
    print(error)
print(sum(batch.sum() for batch in Dataset.range(10).map(call, workers=2).batch(4)))
"""


def test_a_program_without_a_guard_and_a_module_beside_it(run_alone, tmp_path):
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("numpy", "cloudpickle", "pickle", "fcntl", "mpistrat", "beside"):
        (here / f"{name}.py").write_text("print('from the current directory')\n")
    ended = run_alone(tmp_path / "program.py", cwd=here).check()
    assert ended.output.splitlines() == ["the body of the program", "('of the program', 0)", "270"]


ENDING = """
import sys, time
from mpistrat.data import Dataset
dataset = Dataset.range(8).map(lambda x: (time.sleep(float(sys.argv[1])), x)[1], workers=2).batch(4).prefetch(2)
iterator = iter(dataset)
print(next(iterator).tolist(), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("last", ["", "raise SystemExit(0)", "kept = [iterator]; kept.append(kept)"])
def test_a_program_that_ends_early(run_alone, last):
    ended = run_alone("-W", "error", "-c", ENDING + last, "0.2").check()
    assert ended.output == "[0, 1, 2, 3]\n"
