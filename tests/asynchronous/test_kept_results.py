"""Farms that keep their results in a file, and farms of one rank: both run in this process, or are killed in others."""

import concurrent.futures
import functools
import json
import pickle
import re
import signal
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.asynchronous import statistics
from mpistrat.asynchronous.kept_results import fingerprint
from mpistrat.coordinator import Executor

PROGRAM = Path(__file__).parent / "programs" / "kept_farm.py"
RESULTS = [
    None,
    True,
    3,
    2.5,
    float("inf"),
    1 - 2j,
    "text",
    np.float32(0.1),
    np.array(4),
    np.arange(6.0).reshape(2, 3),
    np.zeros((0, 2), bool),
    (1, [2, (3,)], {"a": {4: np.ones(2, np.complex64)}, (1, 2): "b"}),
]


@pytest.fixture
def executor():
    with Executor() as made:
        yield made


def test_ended_three_times(run_ranks, tmp_path):
    count = 400
    for last, number in ((100, signal.SIGKILL), (200, signal.SIGTERM), (300, signal.SIGKILL)):
        ended = run_ranks(3, PROGRAM, tmp_path, count, last, int(number))
        assert ended.status not in (0, None), str(ended)
        told = re.search(r"mpistrat: \S+/results\.h5 has (\d+) of 400 results: the same program", ended.output)
        with h5py.File(tmp_path / "results.h5") as file:
            kept = len(json.loads(file["results"][()].tobytes()))
        # On a busy machine, workers may have computed the last of them before rank 0 looks at its 200th.
        assert bool(told) == (number == signal.SIGTERM and kept < count), str(ended)
        assert told is None or int(told[1]) >= last
    run_ranks(3, PROGRAM, tmp_path, count, 0, 0).check().shows("as in one process")
    ran = [int(line) for path in tmp_path.glob("ran-*") for line in path.read_text().split()]
    rank_0 = count  # which computes all of them anew at the end, to compare
    assert sorted({*ran}) == [*range(count)]
    assert count + rank_0 <= len(ran) < 2 * count + rank_0  # those that were running, or not yet written, ran again


@pytest.mark.parametrize("chunksize", [1, 5])
def test_results_are_equal_and_do_not_run_again(executor, tmp_path, chunksize):
    ran = []
    path = tmp_path / "new" / "results.h5"
    numbers = range(len(RESULTS))
    for _ in range(2):
        found = [*executor.map(RESULTS.__getitem__, numbers, keep=path, chunksize=chunksize)]
        assert repr(found) == repr(RESULTS)
        assert [type(each) for each in found] == [type(each) for each in RESULTS]
        ran.append(executor.statistics().ended)
    assert ran == [len(RESULTS)] * 2


def test_a_failed_call_loses_no_result(executor, tmp_path, capsys):
    path, switch = tmp_path / "results.h5", tmp_path / "repaired"

    def sometimes(i):
        if i == 3 and not switch.exists():
            raise ArithmeticError(i)
        return -i

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ArithmeticError):
        list(executor.map(sometimes, range(6), keep=path))
    assert re.search(r"results\.h5 has [3-5] of 6 results: ", capsys.readouterr().err)
    assert signal.getsignal(signal.SIGTERM) is before
    ended = executor.statistics().ended
    switch.touch()
    assert [*executor.map(sometimes, range(6), keep=path)] == [0, -1, -2, -3, -4, -5]
    assert executor.statistics().ended - ended <= 3
    assert capsys.readouterr().err == ""


def test_written_while_others_run(executor, tmp_path):
    """A result does not wait in memory for the next one, which may take hours."""
    path = tmp_path / "results.h5"
    results = executor.map(functools.partial(wait_for, tmp_path / "end"), range(2), keep=path)
    assert next(results) == 0
    limit = time.monotonic() + 20
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    assert path.exists()
    (tmp_path / "end").touch()
    assert next(results) == 1


def wait_for(path, i):
    while i and not path.exists():
        time.sleep(0.01)
    return i


def test_another_function_or_other_arguments(executor, tmp_path):
    path, scale = tmp_path / "results.h5", 2

    def scaled(x, y=(1, 1)):
        return scale * x + float(sum(y))

    assert [*executor.map(scaled, [1, 2], keep=path)] == [4.0, 6.0]
    for call, match in {
        lambda: executor.map(lambda x: x, [1, 2], keep=path): "results of another function",
        lambda: executor.map(scaled, [1, 3], keep=path): r"2 calls of other arguments: call 1 is of \(3,\) now",
        lambda: executor.map(scaled, [1], keep=path): "2 calls of other arguments: there are 1 now",
        lambda: executor.map(scaled, [1, 2], [np.ones(2)] * 2, keep=path): r"call 0 is of \(1, array",
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    scale = 3
    with pytest.raises(ValueError, match="results of another function"):
        executor.map(scaled, [1, 2], keep=path)


def test_what_cannot_be_kept(executor, tmp_path):
    for number, (value, name) in enumerate(
        {Path("a"): "PosixPath", b"bytes": "bytes", np.str_("t"): "str_", frozenset([1]): "frozenset"}.items()
    ):
        results = executor.map(lambda _, value=value: [value], [0], keep=tmp_path / str(number))
        with pytest.raises(TypeError, match=f"result of call 0: keep= keeps numbers, .* not {name}"):
            list(results)
    with pytest.raises(TypeError, match="lock"):
        executor.map(lambda lock: 1, [threading.Lock()], keep=tmp_path / "lock")


class Dangerous:
    def __reduce__(self):
        return (sys.exit, ("a file was unpickled",))


def test_other_files_are_refused(executor, tmp_path):
    path = tmp_path / "results.h5"
    list(executor.map(abs, [-1, -2], keep=path))
    whole = path.read_bytes()
    with h5py.File(path) as file:
        calls = json.loads(file["calls"][()].tobytes())

    def h5(results):
        path.unlink()
        with h5py.File(path, "w") as file:
            for name, text in (("results", results), ("calls", json.dumps(calls).encode())):
                file[name] = np.frombuffer(text, np.uint8)

    for spoil in (
        lambda: path.write_bytes(b"text"),
        lambda: path.write_bytes(pickle.dumps(Dangerous())),
        lambda: path.write_bytes(whole[: len(whole) // 2]),
        lambda: h5(pickle.dumps(Dangerous())),
        lambda: h5(b"[]"),
        lambda: h5(b'{"0": {"array": "gAAA", "dtype": "|O", "shape": null}}'),
        lambda: h5(b'{"0": {"array": "AAAA", "dtype": "<f8", "shape": [7]}}'),
        lambda: h5(b'{"0": {"unknown": 1}}'),
    ):
        path.write_bytes(whole)
        spoil()
        with pytest.raises(ValueError, match=r"has no results that Executor\.map kept"):
            executor.map(abs, [-1, -2], keep=path)
    path.write_bytes(whole)
    assert [*executor.map(abs, [-1, -2], keep=path)] == [1, 2]


def test_a_file_that_cannot_be_written(executor, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder"):
        executor.map(abs, [1], keep=tmp_path / "folder")
    results = executor.map(functools.partial(take_away, tmp_path / "gone"), [1], keep=tmp_path / "gone" / "a.h5")
    with pytest.raises(OSError, match="gone"):
        list(results)


def take_away(folder, i):
    folder.rmdir()
    return i


def helper(x):
    return x + 1


def calls_helper(x):
    return helper(x) if x in {"a", "b", "c"} else calls_helper(x)


def test_fingerprints_are_those_of_another_process(run_alone):
    """Unlike pickles: the order of a set depends on the process."""
    found = {run_alone("-c", PRINT, PYTHONHASHSEED=str(seed)).check().output for seed in (1, 2)}
    assert len(found) == 1
    assert fingerprint(calls_helper, __name__) == found.pop().strip()


PRINT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_kept_results as tests
print(tests.fingerprint(tests.calls_helper, tests.__name__))
"""


def test_one_rank_alone(executor):
    assert executor.workers == 1
    given = [1]
    future = executor.submit(lambda values, more: values + [more], given, more=2)
    assert (future.result(), given) == ([1, 2], [1])
    assert executor.submit(lambda comm, x: (comm.size, comm.allreduce(x)), 5, ranks=1).result() == (1, 5)
    with pytest.raises(ValueError, match="between 1 and 1"):
        executor.submit(abs, ranks=2)
    for error in (ArithmeticError, SystemExit, KeyboardInterrupt):
        assert type(executor.submit(fail, error).exception()) is error
    assert executor.submit(threading.get_ident).result() != threading.get_ident()
    before = executor.statistics()
    assert [*executor.map(abs, range(-20, 0), chunksize=6)] == [*range(20, 0, -1)]
    assert executor.statistics().ended - before.ended == 20  # calls, not chunks


def fail(error):
    raise error


def test_one_rank_tries_again_and_has_a_limit(tmp_path):
    def twice():
        with open(tmp_path / "tries", "a") as file:
            file.write("x")
        if (tmp_path / "tries").stat().st_size < 3:
            raise OSError

    with Executor(retries=2, time_limit=0.05) as executor:
        executor.submit(twice).result()
        with pytest.raises(TimeoutError, match=r"more than 0\.05 s, its time limit"):
            executor.submit(time.sleep, 0.1).result()
        waiting = [executor.submit(time.sleep, 0.02) for _ in range(20)]
        executor.shutdown(cancel_futures=True)
    assert waiting[-1].cancelled()
    assert concurrent.futures.wait(waiting, timeout=0).not_done == set()


def test_a_line_a_minute_in_a_log(monkeypatch, capsys):
    monkeypatch.delenv("MPISTRAT_PROGRESS", raising=False)
    monkeypatch.setattr(statistics, "_EVERY", 0.02)
    for arguments, shown in (({}, True), ({"progress": False}, False)):
        with Executor(**arguments) as executor:
            executor.submit(time.sleep, 0.05).result()
            assert capsys.readouterr().err == ""
            list(executor.map(time.sleep, [0.01] * 20, chunksize=2))
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) == shown
        assert all(re.match(r"calls: +\d+%.*\d+/20 \[.*call", line) for line in lines), lines
        assert not shown or "20/20" in lines[-1]


def test_kept_results_count_as_done(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("MPISTRAT_PROGRESS", raising=False)
    monkeypatch.setattr(statistics, "_EVERY", 0.02)
    with pytest.raises(ZeroDivisionError), Executor(progress=False) as executor:
        list(executor.map(divide, [[tmp_path, i] for i in range(20)], keep=tmp_path / "results.h5"))
    (tmp_path / "repaired").touch()
    with Executor() as executor:
        capsys.readouterr()
        list(executor.map(divide, [[tmp_path, i] for i in range(20)], keep=tmp_path / "results.h5"))
    counts = [int(each) for each in re.findall(r"(\d+)/20 ", capsys.readouterr().err)]
    assert counts[0] > 10
    assert counts[-1] == 20


def divide(given):
    folder, i = given
    time.sleep(0.02)
    return i / (i != 10 or (folder / "repaired").exists())
