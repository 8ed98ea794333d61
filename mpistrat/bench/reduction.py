"""All-reduces that are timed: by which algorithms, and how often within some seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key")
_MEASUREMENT_SECONDS = 0.005
_FEWEST = 3  # minimum of repetitions


def all_reduces(strategy: Any, value: Any, totals: list[Any], name: str | None = None) -> Callable[[int], object]:
    """Return ``times(k)``, which sums a value k times over the ranks, and keeps the last sum in ``totals[0]``.

    ``name`` is the algorithm; by default the library chooses it.
    """
    # Not sooner than here: this loads the BLAS, which reads its number of threads from the environment.
    import mpistrat
    from mpistrat.experimental import CommunicationOptions

    options = None if name is None else CommunicationOptions(implementation=name)

    def times(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            total = replica.all_reduce("SUM", value, options)
        totals[:] = [total]

    return lambda k: strategy.run(times, (k,))


def interleaved_for(
    comm: Any, ways: Mapping[Key, Callable[[int], object]], repetitions: int, seconds: float
) -> dict[Key, list[float]]:
    """Return the seconds of each way as `timing.interleaved` does, within about ``seconds`` in all.

    Fast operations are repeated in each measurement, so that it lasts a few milliseconds.
    """
    from mpistrat.bench.measuring.timing import interleaved

    once = [samples[0] for samples in interleaved(comm, ways, 1, warmup=1).values()]
    inner = max(1, min(1000, int(_MEASUREMENT_SECONDS / max(once))))
    affordable = int(seconds / (sum(once) * inner)) - 1
    return interleaved(comm, ways, min(repetitions, max(_FEWEST, affordable)), inner, warmup=1)


def algorithms(topology: Any, names: Sequence[str]) -> list[str]:
    """Return the names of algorithms. ``"all"`` stands for all that can reduce float32 here.

    Raise SystemExit if a name is unknown.
    """
    from mpistrat.collectives.algorithms.choose import ALGORITHMS

    if "all" in names:
        able = [name for name, each in ALGORITHMS.items() if name != "identity" and each.fits(topology)]
        return able if topology.size > 1 else []
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is not an all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    return list(dict.fromkeys(names))
