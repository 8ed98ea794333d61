"""Measure saving variables to a file, loading them, and the pause of training, beside h5py and bare bytes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated

TENSORS = 200


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    folder = None
    if comm.rank == 0:
        arguments.data.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.data)
    report = Report("checkpoint", comm.size)
    try:
        _Measurement(comm, arguments, comm.bcast(folder and folder.name), report).run()
        comm.Barrier()
    finally:
        if folder is not None:
            folder.cleanup()
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


class _Measurement:
    """The measurement of all cases."""

    def __init__(self, comm: Any, arguments: argparse.Namespace, folder: str, report: Report):
        import array_bytes
        import checkpoint_h5py_by_hand
        import numpy as np

        import mpistrat

        self._comm, self._report, self._folder = comm, report, folder
        self._repetitions = arguments.repetitions
        # Modules that write arrays to a file, and read them into existing arrays.
        self._others: dict[str, ModuleType] = {"raw": array_bytes, "h5py": checkpoint_h5py_by_hand}
        length = max(1, arguments.megabytes * 1_000_000 // 4 // TENSORS)
        numbers = np.random.default_rng(0)
        self._arrays = [numbers.standard_normal(length, np.float32) for _ in range(TENSORS)]
        with mpistrat.MultiWorkerMirroredStrategy(comm=comm).scope():
            self._variables = [mpistrat.Variable(value, name=str(i)) for i, value in enumerate(self._arrays)]
        self._pending: Any = None

    def run(self) -> None:
        """Measure all cases."""
        from mpistrat.training import load, save, save_async

        variables, path = self._variables, self._path(LIBRARY)

        def begin() -> None:
            self._pending = save_async(variables, path)

        self._compare(
            "save",
            {LIBRARY: partial(save, variables, path)}
            | {
                name: self._on_first(other.write, self._arrays, self._path(name))
                for name, other in self._others.items()
            },
        )
        into = [array.copy() for array in self._arrays]
        self._compare(
            "load",
            {LIBRARY: partial(load, variables, path)}
            | {name: self._on_first(other.read, into, self._path(name)) for name, other in self._others.items()},
        )
        self._compare("training stands still", {LIBRARY: begin, "save": partial(save, variables, path)}, self._wait)
        self._wait()

    def _path(self, way: str) -> str:
        return str(Path(self._folder) / way)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def _on_first(self, call: Callable[..., object], *arguments: object) -> Callable[[], object]:
        """Return a call that only the first rank makes."""
        return partial(call, *arguments) if self._comm.rank == 0 else lambda: None

    def _compare(
        self, case: str, ways: dict[str, Callable[[], object]], before: Callable[[], object] | None = None
    ) -> None:
        from mpistrat.bench.tune import interleaved

        calls = {_in_words(case, name): repeated(way) for name, way in ways.items()}
        seconds = interleaved(self._comm, calls, self._repetitions, warmup=1, before=before)
        self._report.add_medians(case, sum(array.nbytes for array in self._arrays), seconds)


def _in_words(case: str, way: str) -> str:
    if way != "raw":
        return way
    return "raw write and fsync" if case == "save" else "raw read"


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, 11)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder for the files")
    under_ranks.count(parser, "--megabytes", 440, f"size of {TENSORS} float32 arrays")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
