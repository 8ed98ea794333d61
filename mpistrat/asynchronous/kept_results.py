"""Results of a task farm that are kept in a file, so that a job that was ended goes on with the rest.

The file is written anew when results have come, and appears whole or not at all. It is read without pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import h5py
import numpy as np

from mpistrat.arrays import json_arrays
from mpistrat.messages.fingerprint import fingerprint
from mpistrat.process import failure
from mpistrat.process.files import appearing, local_path

_PAUSE_FACTOR = 19  # times the seconds of a write, until the next one: writes take 5 % of the time at most
_MAX_DEPTH = 100  # levels of lists, tuples and dicts: a reader of JSON has a limit, too


class KeptResults:
    """The results of the calls of a function, kept in a file. ``loaded`` has those of an existing file, by number.

    Raise ValueError if the file is of other calls, and TypeError if an argument cannot be compared.
    """

    def __init__(self, path: str | os.PathLike[str], function: Any, calls: Sequence[tuple[Any, ...]]):
        self._path = local_path(path)
        self._count = len(calls)
        module = getattr(function, "__module__", None)
        self._digests = [fingerprint(function, module), *(fingerprint(call, module) for call in calls)]
        self.loaded: dict[int, Any] = self._read(calls) if self._path.exists() else {}
        self._texts = {number: json.dumps(_encoded(value)) for number, value in self.loaded.items()}
        self._saved = self._before = len(self._texts)
        self._news: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()  # which a signal handler may put to
        self._error: Exception | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_when_due, name="mpistrat-results", daemon=True)
        self._thread.start()
        _open.append(self)
        _replace_handler(signal.SIG_DFL, _end_by_signal)

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self._count) if number not in self.loaded]

    def take(self, numbers: list[int], in_chunk: bool, value: Any) -> None:
        """Keep the results of calls."""
        for number, result in zip(numbers, value if in_chunk else [value], strict=True):
            try:
                self._news.put({number: json.dumps(_encoded(result))})
            except TypeError as error:
                self._error = self._error or TypeError(f"result of call {number}: {error}")

    def in_order(self, results: Iterator[Any]) -> Iterator[Any]:
        """Yield the results of all calls; ``results`` has those that were not in the file."""
        try:
            for number in range(self._count):
                yield self.loaded.pop(number) if number in self.loaded else next(results)
                self._raise()
        finally:
            self.close()

    def close(self) -> None:
        """Write the rest, and report missing results. Raise OSError if a write fails, TypeError if one is not kept."""
        self._news.put({})
        self._thread.join()
        if self in _open:
            _open.remove(self)
            if not _open:
                _replace_handler(_end_by_signal, signal.SIG_DFL)
            if self._saved < self._count:
                summary = f"{self._path} has {self._saved} of {self._count} results"
                failure.write(f"\nmpistrat: {summary}: the same program, started again, runs the others\n")
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_when_due(self) -> None:
        due, closing = 0.0, False
        while not closing:
            wait = None if len(self._texts) == self._saved else max(0.0, due - time.monotonic())
            with contextlib.suppress(queue.Empty):
                self._texts |= (news := self._news.get(timeout=wait))
                closing = not news
            start = time.monotonic()
            # The last write also adds the columns, if this run has brought results.
            if len(self._texts) == (self._before if closing else self._saved) or (start < due and not closing):
                continue
            try:
                self._write(_columns(self._texts) if closing else {})
            except OSError as error:
                self._error = self._error or error
                return
            self._saved = len(self._texts)
            due = time.monotonic() + _PAUSE_FACTOR * (time.monotonic() - start)

    def _write(self, columns: dict[str, Any]) -> None:
        members = ",".join(f'"{number}":{text}' for number, text in sorted(self._texts.items()))
        with appearing(self._path, replace=True) as temporary, h5py.File(temporary, "w") as file:
            # fletcher32: reading a damaged file raises.
            for name, text in (("results", f"{{{members}}}"), ("calls", json.dumps(self._digests))):
                file.create_dataset(name, data=np.frombuffer(text.encode(), np.uint8), chunks=True, fletcher32=True)
            for name, column in columns.items():
                file[name] = column

    def _read(self, calls: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        try:
            with h5py.File(self._path) as file:
                digests, results = (json.loads(file[name][()].tobytes()) for name in ("calls", "results"))
            results = {int(number): _decoded(value) for number, value in results.items()}
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self._path} has no results that Executor.map kept ({error}): give keep= another name"
            ) from error
        if digests[:1] != self._digests[:1]:
            raise ValueError(
                f"{self._path} has results of another function, or of an earlier text of it: give keep= another name, "
                "or remove the file to compute all results anew"
            )
        if digests != self._digests:
            pairs = enumerate(zip(digests[1:], self._digests[1:], strict=False))
            first = next((number for number, (theirs, own) in pairs if theirs != own), None)
            change = f"call {first} is of {calls[first]!r} now" if first is not None else f"there are {len(calls)} now"
            raise ValueError(
                f"{self._path} has results of {len(digests) - 1} calls of other arguments: {change}. Give keep= "
                "another name, or remove the file"
            )
        return results


_open: list[KeptResults] = []
os.register_at_fork(after_in_child=_open.clear)  # the thread that writes is not in a child


def _replace_handler(before: Any, after: Any) -> None:
    # Python lets only the main thread set handlers. A handler of the program stays.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is before:
        signal.signal(signal.SIGTERM, after)


def _end_by_signal(number: int, _: FrameType | None) -> None:
    """Write the results that have come. Then end this process by the signal, unless a later handler called this one."""
    ends = signal.getsignal(number) is _end_by_signal
    for results in [*_open]:
        with contextlib.suppress(Exception):
            results.close()
    if ends:  # the last file that was closed has put the default back
        os.kill(os.getpid(), number)


# --- results as JSON ---------------------------------------------------------------------------------------


def _encoded(value: Any, depth: int = 0) -> Any:
    """Return a result in a form that JSON restores exactly. Raise TypeError if it has no such form."""
    kind = type(value)
    if kind in (int, str):
        return json_arrays.exact(value, 64)
    if kind is float and value != value:  # a NaN has a sign, and bits of its own
        return {"float": np.float64(value).tobytes().hex()}
    if value is None or kind in (bool, float):
        return value
    if depth > _MAX_DEPTH:
        raise TypeError(f"keep= keeps at most {_MAX_DEPTH} levels of lists, tuples and dicts")
    if kind is complex:
        return {"complex": [_encoded(value.real), _encoded(value.imag)]}
    if kind in (list, tuple):
        return {kind.__name__: [_encoded(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(key, depth + 1), _encoded(item, depth + 1)] for key, item in value.items()]}
    number = isinstance(value, np.generic) and kind.__module__ == "numpy"  # not of a class of the program
    if (number or kind is np.ndarray) and value.dtype.kind in "biufc":
        return json_arrays.packed(value)
    text = f"an array of {value.dtype}" if kind is np.ndarray else kind.__qualname__
    raise TypeError(f"keep= keeps numbers, texts, NumPy arrays, lists, tuples, dicts of these, not {text}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    match value:
        case {"int": _} | {"text": _} if len(value) == 1:
            return json_arrays.restored(value)
        case {"float": bits}:
            return np.frombuffer(bytes.fromhex(bits), "<f8").item()
        case {"complex": [real, imaginary]}:
            return complex(_decoded(real), _decoded(imaginary))
        case {"list": items}:
            return [*map(_decoded, items)]
        case {"tuple": items}:
            return tuple(map(_decoded, items))
        case {"dict": pairs}:
            return {_decoded(key): _decoded(item) for key, item in pairs}
        case {"array": _}:
            return json_arrays.unpacked(value)
    raise ValueError("a result has another form")


def _columns(texts: dict[int, str]) -> dict[str, Any]:
    """Return columns for readers of the file: one array for numbers or equal arrays, or one for each key of dicts."""
    numbers = sorted(texts)
    rows = [_decoded(json.loads(texts[number])) for number in numbers]
    if not all(type(row) is dict and row.keys() == rows[0].keys() for row in rows):
        rows = [{"value": row} for row in rows]
    columns = {}
    for name in filter(lambda key: isinstance(key, str) and key.isidentifier(), rows[0]):
        values = [row[name] for row in rows]
        if all(isinstance(value, (int, float, complex, np.generic, np.ndarray)) for value in values):
            column = [*map(np.asarray, values)]
            if len({(array.dtype, array.shape) for array in column}) == 1 and column[0].dtype != object:
                columns[f"values/{name}"] = np.stack(column)
    return {"numbers": numbers, **columns} if columns else {}
