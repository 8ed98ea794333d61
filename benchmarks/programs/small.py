"""Measure small work: the training loop of the main example, and single calls, cold and hot."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault, repeated

if TYPE_CHECKING:
    from small_digits import Call, Work

LOOPS = ("loop, data in memory", "loop, data in HDF5 files")
_TOUCHED = 8 << 20  # bytes
_OBJECTS = 5000


Ways: TypeAlias = "Mapping[str, Call]"  # by case


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    # Imported here: these load the BLAS, which reads its number of threads from the environment set before.
    from mpi4py import MPI
    from small_digits import random_digits, write_files
    from small_with_library import ways

    from mpistrat.bench.tune import interleaved

    comm = MPI.COMM_WORLD.Dup()
    report = Report("small", comm.size)
    folder = tempfile.TemporaryDirectory(prefix="mpistrat-bench-") if comm.rank == 0 else None
    try:
        where = Path(comm.bcast(folder and folder.name))
        if folder is not None:
            write_files(random_digits(), where)
        comm.Barrier()
        work = _work(where, arguments.epochs)
        programs = {LIBRARY: ways(work), "by hand": _by_hand(comm, work)}
        if any_fault(comm, _faults(programs)):
            return 1
        cold = _Colder()
        for case in programs[LIBRARY]:
            of_case = {way: calls[case] for way, calls in programs.items() if case in calls}
            repetitions = arguments.repetitions
            if case in LOOPS:
                samples = interleaved(comm, of_case, max(1, repetitions // 3), warmup=1)
                steps = arguments.epochs * _batches()
                for way, seconds in samples.items():
                    report.add(f"{case}, a step", way, 0, median(seconds) / steps)
                continue
            for kind, options in (("cold", {"before": cold}), ("hot", {"inner": arguments.inner})):
                report.add_medians(f"{case}, {kind}", 0, interleaved(comm, of_case, repetitions, **options))
        comm.Barrier()
    finally:
        if folder is not None:
            folder.cleanup()
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


def _batches() -> int:
    from small_digits import BATCH, FILES

    return -(-sum(FILES) // BATCH)


def _work(folder: Path, epochs: int) -> Work:
    import numpy as np
    from small_digits import Work, initial_weights

    random = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    few = [floats(*value.shape) for value in initial_weights()]
    many = [floats(32, 32) if i % 2 == 0 else floats(32) for i in range(200)]
    arrays = [floats(int(length)) for length in np.geomspace(16, 4096, 60)]
    return Work(floats(128), few, many, floats(1 << 14), arrays, folder, epochs)


def _by_hand(comm: Any, work: Work) -> Ways:
    """Return the calls by hand."""
    import numpy as np
    import small_by_hand as by_hand
    import small_digits as digits
    from overhead_by_hand import all_reduce_list

    def step(optimizer, gradients):
        parameters = optimizer(comm, [np.ones_like(gradient) for gradient in gradients])

        def times(k):
            for _ in range(k):
                parameters.apply(gradients)
            return parameters.views

        return times

    def loop(train, *data):
        network = digits.loss_and_gradients
        return lambda k: train(comm, network, digits.initial_weights(), *data, digits.BATCH, work.epochs)

    mean = by_hand.Mean(comm)

    def update_state(k):
        for _ in range(k):
            mean.update_state(work.values)

    return {
        "loop, data in memory": loop(by_hand.train, *digits.random_digits()),
        "loop, data in HDF5 files": loop(by_hand.train_on_files, work.folder),
        "Adam, 6 variables": step(by_hand.Adam, work.few),
        "Adam, 200 variables": step(by_hand.Adam, work.many),
        "SGD, 6 variables": step(by_hand.Sgd, work.few),
        "SGD, 200 variables": step(by_hand.Sgd, work.many),
        "reduce of one float": by_hand.reduce_one(comm, np.ones(1, np.float32)),
        "reduce of 64 KiB": by_hand.reduce_one(comm, work.array),
        "all_reduce of 60 arrays": all_reduce_list(comm, work.arrays),
        "all_reduce of a number": by_hand.reduce_number(comm, 3),
        "run": repeated(lambda: None),
        "update_state": update_state,
        "result": repeated(mean.result),
    }


class _Colder:
    """Empties the caches, as a program does that computes between two calls."""

    def __init__(self) -> None:
        import numpy as np

        self._memory = np.zeros(_TOUCHED, np.uint8)
        self._objects: list[Any] = []

    def __call__(self) -> None:
        self._memory += 1
        self._objects = [(i, str(i)) for i in range(_OBJECTS)]


def _faults(programs: Mapping[str, Ways]) -> list[str]:
    """Return how results differ from the library's. It makes each call once."""
    faults = []
    for case, ours in programs[LIBRARY].items():
        expected = ours(1)
        for way, calls in programs.items():
            if way == LIBRARY or case not in calls:
                continue
            got = calls[case](1)
            if case in LOOPS:  # in another order of rows
                if not got[-1] <= max(got[0], expected[-1] * 1.5):
                    faults.append(f"{case}: {way} ends with the loss {got[-1]:.3g}, not {expected[-1]:.3g}")
            elif not all(map(_close, _listed(got), _listed(expected))):
                faults.append(f"{case}: the result of {way} is not that of {LIBRARY}")
    return faults


def _listed(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def _close(one: Any, two: Any) -> bool:
    import numpy as np

    if one is None or two is None:
        return one is two
    return np.shape(one) == np.shape(two) and np.allclose(one, two, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=21)
    under_ranks.count(parser, "--epochs", 20, "epochs of a loop")
    under_ranks.count(parser, "--inner", 100, "hot calls per measurement")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
