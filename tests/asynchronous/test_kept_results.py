"""Farms that keep their results in a file, and farms of one rank: both run in this process, or are killed in others."""

import collections
import concurrent.futures
import contextlib
import enum
import functools
import io
import json
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import h5py
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import pytest

from mpistrat.asynchronous import statistics
from mpistrat.coordinator import Executor
from mpistrat.messages.fingerprint import fingerprint

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


def test_interrupted_on_all_ranks(run_ranks, tmp_path):
    for _ in range(3):  # where a worker is interrupted depends on the moment
        ended = run_ranks(3, PROGRAM, tmp_path, 20_000, 200, int(signal.SIGINT))
        assert ended.status not in (0, None), str(ended)
        told = re.search(r"mpistrat: \S+/results\.h5 has (\d+) of 20000 results: the same program", ended.output)
        with h5py.File(tmp_path / "results.h5") as file:
            assert len(json.loads(file["results"][()].tobytes())) == int(told[1]) >= 200
        for path in tmp_path.iterdir():  # also the numbers of processes that are gone
            path.unlink()


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


class Number(np.float64):
    pass


class Color(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")
DTYPES = ["?", "i1", ">i2", "<u8", "f2", ">f4", "f8", "g", ">c8", "c16"]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(14_000, 15_000).map(lambda bits: -(3 << bits)),  # more digits than Python writes, and JSON
    st.sampled_from([float("-nan"), np.float64("-nan"), complex(-0.0, float("-nan")), -0.0]),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=6),  # also lone surrogates, which os.fsdecode returns
    st.lists(st.sampled_from("\ud83d\ude00\U0001f600\0a"), max_size=4).map("".join),
    st.sampled_from(DTYPES).flatmap(lambda dtype: hypothesis.extra.numpy.arrays(dtype, st.sampled_from(SHAPES))),
    st.sampled_from(DTYPES).flatmap(lambda dtype: hypothesis.extra.numpy.arrays(dtype, 1).map(lambda each: each[0])),
)
SHAPES = [(), (0, 2), (3,), (2, 3)]
strange = st.sampled_from(
    [b"b", Color.RED, Pair(1, 2), np.str_("t"), {1}, np.zeros(2, "M8[s]"), np.ma.ones(2), np.zeros(1, "V2")]
)
hashable = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.tuples(st.booleans(), st.floats()))


def tree(leaf):
    below = lambda each: st.lists(each, max_size=3) | st.dictionaries(hashable, each, max_size=3)  # noqa: E731
    return st.recursive(leaf, lambda each: below(each) | st.lists(each, max_size=3).map(tuple), max_leaves=5)


def exactly(value):
    """What of a value can be seen: types, bits, and the order of keys."""
    if isinstance(value, (list, tuple)):
        return type(value), [*map(exactly, value)]
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(each)) for key, each in value.items()]
    if isinstance(value, (np.ndarray, np.generic)):
        bits = repr(value.tolist()) if value.dtype.char == "g" else value.tobytes()  # its padding has no value
        return type(value), value.dtype.str, value.shape, bits
    if isinstance(value, (float, complex)):
        return type(value), np.array(value).tobytes()
    return type(value), value


@hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(values=st.lists(tree(leaves), min_size=1, max_size=8), odd=st.none() | tree(leaves | strange))
@hypothesis.example(values=[1, 10**5000, "\ud83d" + "\ude00"], odd=None)  # too long for Python's str, and no character
def test_what_is_read_is_what_was_returned(values, odd):
    """Or TypeError names the call: nothing comes back as another value, type or text."""
    with tempfile.TemporaryDirectory() as folder, Executor(progress=False) as executor:
        path, numbers = Path(folder) / "results.h5", range(len(values) + 1)
        values = [*values, odd]
        with contextlib.redirect_stderr(io.StringIO()):  # it says what is missing
            refused, returned = None, []
            try:
                returned += executor.map(values.__getitem__, numbers, keep=path)
            except TypeError as error:
                refused = str(error)
                values.pop()
            found = executor.map([].__getitem__, numbers, keep=path)
            read = [next(found) for _ in values]
            found.close()
        assert refused is None or f"result of call {len(values)}: keep= keeps numbers" in refused
        count = min(len(read), len(returned))  # the error may come before or after the result that it names
        assert exactly(read[:count]) == exactly(returned[:count])  # not of `values`: a pickle takes a class away
        assert count == len(values) or refused


def test_results_without_an_end_are_refused(executor, tmp_path):
    for number in range(2):
        with pytest.raises(TypeError, match=r"result of call 0: keep= keeps at most 100 levels"):
            list(executor.map(lambda i, kind=number: made_deep(kind), [0], keep=tmp_path / str(number)))


def made_deep(kind):
    made = []
    if kind == 0:
        made.append(made)
    for _ in range(200):
        made = [made]
    return made


def test_numbers_and_arrays_are_arrays_of_the_file(executor, tmp_path):
    pd = pytest.importorskip("pandas")
    path = tmp_path / "results.h5"
    for _ in range(2):  # the second time nothing is written
        list(executor.map(lambda i: {"i": i, "x": np.arange(2.0) * i, "t": "text", "a/b": i}, range(5), keep=path))
        with h5py.File(path) as file:
            frame = pd.DataFrame({"i": file["values/i"][()]}, index=file["numbers"][()])
            assert frame["i"].tolist() == frame.index.tolist() == [*range(5)]
            np.testing.assert_array_equal(file["values/x"], np.arange(5.0)[:, None] * [0, 1])
            assert [*file["values"]] == ["i", "x"]
    for number, (function, shape) in enumerate(
        {
            np.float32: "(3,) float32",
            complex: "(3,) complex128",
            bool: "(3,) bool",
            str: "",
            half: "",
            one_more: "",
        }.items()
    ):
        path = tmp_path / str(number)
        list(executor.map(function, range(3), keep=path))
        with h5py.File(path) as file:
            assert ("values" in file) == bool(shape)
            assert not shape or f"{file['values/value'].shape} {file['values/value'].dtype}" == shape


def half(i):
    return i / 2 if i % 2 else i // 2


def one_more(i):
    return np.zeros(i)


def test_errors_that_are_returned(executor, tmp_path):
    path, switch = tmp_path / "results.h5", tmp_path / "repaired"

    def sometimes(i):
        if i % 3 == 0 and not switch.exists():
            raise ArithmeticError(i)
        return -i

    for keep in (None, path):
        found = [*executor.map(sometimes, range(5), keep=keep, on_error="keep")]
        assert [repr(each) for each in found] == ["ArithmeticError(0)", "-1", "-2", "ArithmeticError(3)", "-4"]
        if sys.version_info >= (3, 11):
            assert "sometimes(3)" in found[3].__notes__[0]
    switch.touch()
    ended = executor.statistics().ended
    assert [*executor.map(sometimes, range(5), keep=path)] == [0, -1, -2, -3, -4]
    assert executor.statistics().ended - ended == 2
    with pytest.raises(concurrent.futures.TimeoutError):
        list(executor.map(time.sleep, [1], timeout=0.01, on_error="keep"))
    for wrong in ({"on_error": "ignore"}, {"on_error": "keep", "chunksize": 2}):
        with pytest.raises(ValueError, match=r'on_error must be "raise", or "keep" with chunksize=1'):
            executor.map(abs, [1], **wrong)


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
    with pytest.raises(TypeError, match=r"not Number"):
        list(executor.map(Number, [1], keep=tmp_path / "number"))
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


def test_a_list_that_contains_itself_has_no_fingerprint():
    own = []
    own.append(own)
    with pytest.raises(TypeError, match="a list that contains itself"):
        fingerprint(own)


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


@pytest.mark.full
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
