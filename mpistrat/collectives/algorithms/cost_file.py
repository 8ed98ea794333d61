"""The measured costs of the algorithms, in a file for each MPI library and layout of ranks.

`mpistrat bench tune` writes the file.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpistrat.process import files, mpi
from mpistrat.runtime.environment import RuntimeOptions, rc
from mpistrat.runtime.topology import Topology

Points = Mapping[str, Sequence[tuple[int, float]]]  # name of an algorithm -> bytes and seconds, ascending
_FORMAT = 1
_log = logging.getLogger(__name__)


def seconds(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the seconds for ``nbytes`` bytes, interpolated between two points, proportional beyond the last.

    >>> measured = [(1000, 1e-5), (2000, 2e-5)]
    >>> [round(1e6 * seconds(measured, nbytes)) for nbytes in (10, 1500, 4000)]
    [10, 15, 40]
    """
    i = bisect.bisect_left(points, (nbytes, 0.0))
    if i == 0:
        return points[0][1]
    if i == len(points):
        return points[-1][1] * nbytes / points[-1][0]
    (low, first), (high, last) = points[i - 1], points[i]
    return first + (last - first) * (nbytes - low) / (high - low)


def path_of(topology: Topology) -> Path:
    return files.cache_path("costs", _key(topology))


def to_json(topology: Topology, points: Points) -> str:
    return json.dumps({"format": _FORMAT, "for": _key(topology), "points": points}, indent=1) + "\n"


def read(topology: Topology) -> Points | None:
    """Return the measured costs; None, with a warning, if the file is missing or cannot be used."""
    path: Path | str = "what was measured"
    try:
        path = path_of(topology)
        return parse(path.read_text(), _key(topology))
    except FileNotFoundError:
        _log.warning("%s is set, but nothing was measured: run mpistrat bench tune", RuntimeOptions.tuned.origin(rc))
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        # Not raised, since the other ranks wait for rank 0.
        _log.warning("%s is not used: %s", path, error)
    return None


def parse(text: str, key: Sequence[object]) -> Points:
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
