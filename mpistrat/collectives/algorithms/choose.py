"""The table of all-reduce algorithms, and the choice of one for each message."""

from __future__ import annotations

import bisect
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.contract import WHOLE, Algorithm, Cost
from mpistrat.collectives.algorithms.exact import ExactAllReduce
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce, LeaderAllReduce, OrderedAllReduce
from mpistrat.collectives.algorithms.mpi import HierarchicalCopy, MpiAllReduce, MpiNonblockingAllReduce
from mpistrat.collectives.algorithms.tree import TreeAllReduce
from mpistrat.process import files, mpi
from mpistrat.runtime.environment import RuntimeOptions, rc
from mpistrat.runtime.topology import Slot, Topology


class Identity(Algorithm):
    """The all-reduce of a single replica, whose result is its value."""

    name = "identity"

    def fits(self, topology: Topology) -> bool:
        return topology.size == 1

    def cost(self, topology: Topology) -> Cost:
        return Cost(0.0, 0.0)

    def piece_bytes(self, topology: Topology) -> int:
        return WHOLE

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        if send is not receive:
            receive[...] = send


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Identity(),
        HierarchicalAllReduce(),
        LeaderAllReduce(),
        MpiAllReduce(),
        MpiNonblockingAllReduce(),
        HierarchicalCopy(),
        OrderedAllReduce(),
        ExactAllReduce(),
        TreeAllReduce(),
    )
}

IN_PLACE = HierarchicalAllReduce.name  # the algorithm that reduces buffers where they are
GPU_ROUTES = ("nccl", "gpu_direct", "pinned")  # the names of the routes for arrays on GPUs


class Candidate(NamedTuple):
    """An algorithm that works on some ranks, its cost there, and the bytes of the largest message that it takes."""

    algorithm: Algorithm
    cost: Cost
    piece_bytes: int

    def seconds(self, nbytes: int) -> float:
        fixed, per_byte, per_piece, piece = self.cost
        return fixed + per_byte * nbytes + per_piece * -(-nbytes // piece)


class Choice(Slot):
    """The algorithms that work on the ranks of a topology, prepared once, and the choice of one for each message."""

    candidates: Mapping[str, Candidate] = MappingProxyType({})  # by the name of the algorithm
    # the measured times of the algorithms, which replace the predicted costs if there are any. None before
    # `load_measured_costs`.
    measured: Points | None = None

    @classmethod
    def of(cls, topology: Topology) -> Choice:
        """Return the choice of a topology. Does not communicate."""
        choice = topology.slot(cls)
        if not choice.candidates:
            works = [ALGORITHMS["identity"]] if topology.size == 1 else ALGORITHMS.values()
            choice.candidates = {
                algorithm.name: Candidate(algorithm, algorithm.cost(topology), algorithm.piece_bytes(topology))
                for algorithm in works
                if algorithm.fits(topology)
            }
        return choice

    def load_measured_costs(self, topology: Topology) -> None:
        """Use the measured costs if ``rc.tuned`` is true on rank 0. The first call is collective."""
        if self.measured is None:
            points, tuned = None, rc.tuned  # read on every rank, so that all raise
            if topology.rank == 0 and topology.size > 1 and tuned:
                points = read_points(topology)
            self.measured = topology.broadcast_object(points) or {}

    def best(self, nbytes: int, dtype: np.dtype, name: str | None = None) -> Candidate:
        """Return the algorithm of this name, or the one with the lowest cost.

        Raise ValueError for an unknown name, and RuntimeError if no candidate combines this dtype here.
        """
        able = self._able(dtype, name)
        return min(able, key=lambda candidate: self._seconds(candidate, nbytes))

    def in_place_is_faster(self, nbytes: int, algorithm: Algorithm) -> bool:
        """Return whether buffers of a node are predicted to be reduced faster in place than by ``algorithm``."""
        in_place = self.candidates.get(IN_PLACE)
        if in_place is None:
            return False
        fixed, per_byte, per_piece, _ = in_place.cost  # one piece
        return fixed + per_byte * nbytes + per_piece < self.candidates[algorithm.name].seconds(nbytes)

    def piece_bytes(self, dtype: np.dtype, name: str | None = None) -> int:
        """Return the bytes of a message that every algorithm that may be chosen takes in one piece."""
        return min(candidate.piece_bytes for candidate in self._able(dtype, name))

    def _able(self, dtype: np.dtype, name: str | None) -> list[Candidate]:
        candidates = self.candidates
        if "identity" in candidates:
            return [candidates["identity"]]
        if name is None:
            named = [candidate for candidate in candidates.values() if not candidate.algorithm.by_name_only]
        elif name in ALGORITHMS:
            named = [candidates[name]] if name in candidates else []
        elif name in GPU_ROUTES:
            raise RuntimeError(f"implementation {name.upper()} combines arrays on GPUs, not {dtype} here: use AUTO")
        else:
            raise ValueError(f"{name!r} is not an all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
        able = [candidate for candidate in named if dtype.char in candidate.algorithm.dtypes]
        if not able:
            raise RuntimeError(
                f"no all-reduce {f'by the name of {name} ' if name else ''}combines {dtype} on these ranks, where "
                f"{', '.join(candidates)} work"
            )
        return able

    def describe(self) -> str:
        """Return a table of the algorithms chosen for float32 messages of growing size, and of all costs."""
        dtype = np.dtype(np.float32)
        able = self._able(dtype, None)
        lines = ["bytes        chosen              " + "".join(f"{candidate.algorithm.name:>22}" for candidate in able)]
        for exponent in range(2, 31, 4):
            nbytes = 1 << exponent
            chosen = self.best(nbytes, dtype).algorithm.name
            seconds = [self._seconds(candidate, nbytes) for candidate in able]
            lines.append(f"{nbytes:<12} {chosen:<20}" + "".join(f"{time * 1e6:>19.1f} us" for time in seconds))
        return "\n".join(lines)

    def _seconds(self, candidate: Candidate, nbytes: int) -> float:
        if not self.measured:
            return candidate.seconds(nbytes)
        points = self.measured.get(candidate.algorithm.name)
        return seconds_of(points, nbytes) if points else math.inf


# --- measured costs -------------------------------------------------------------


Points = Mapping[str, Sequence[tuple[int, float]]]  # name of an algorithm -> bytes and seconds, ascending
_FORMAT = 1
_log = logging.getLogger(__name__)


def seconds_of(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the seconds for ``nbytes`` bytes, interpolated between two points, proportional beyond the last.

    >>> measured = [(1000, 1e-5), (2000, 2e-5)]
    >>> [round(1e6 * seconds_of(measured, nbytes)) for nbytes in (10, 1500, 4000)]
    [10, 15, 40]
    """
    i = bisect.bisect_left(points, (nbytes, 0.0))
    if i == 0:
        return points[0][1]
    if i == len(points):
        return points[-1][1] * nbytes / points[-1][0]
    (low, first), (high, last) = points[i - 1], points[i]
    return first + (last - first) * (nbytes - low) / (high - low)


def path_of_points(topology: Topology) -> Path:
    return files.cache_path("costs", _key(topology))


def points_to_json(topology: Topology, points: Points) -> str:
    return json.dumps({"format": _FORMAT, "for": _key(topology), "points": points}, indent=1) + "\n"


def read_points(topology: Topology) -> Points | None:
    """Return the measured costs; None, with a warning, if the file is missing or cannot be used."""
    path: Path | str = "what was measured"
    try:
        path = path_of_points(topology)
        return parse_points(path.read_text(), _key(topology))
    except FileNotFoundError:
        _log.warning("%s is set, but nothing was measured: run mpistrat bench tune", RuntimeOptions.tuned.origin(rc))
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        # Not raised, since the other ranks wait for rank 0.
        _log.warning("%s is not used: %s", path, error)
    return None


def parse_points(text: str, key: Sequence[object]) -> Points:
    """Return the points in the text of a file. Raise ValueError if it has another format, MPI library or layout."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("it is of another version of mpistrat: run mpistrat bench tune again")
    if content.get("for") != list(key):
        raise ValueError(f"it is for {content.get('for')}, not for {list(key)}")
    try:
        return {str(name): _ascending(pairs) for name, pairs in content["points"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its points are of another kind: {error}") from None


def _ascending(pairs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    points = sorted((int(nbytes), float(seconds)) for nbytes, seconds in pairs)
    if not points or not all(nbytes > 0 and 0 < seconds < math.inf for nbytes, seconds in points):
        raise ValueError(f"its points are not positive numbers: {points}")
    return points


def _key(topology: Topology) -> list[object]:
    version: str = mpi.start().Get_library_version()
    return [version.split("\n")[0].split(",")[0].rstrip("\0 "), list(topology.ranks_per_node)]
