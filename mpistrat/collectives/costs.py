"""What the algorithms cost where that was measured: a file for each MPI library and layout of ranks.

`mpistrat bench tune` writes it. It is read only where MPISTRAT_TUNED is set, by rank 0 for all.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpistrat.collectives.algorithm import Algorithm
from mpistrat.runtime import mpi
from mpistrat.runtime.topology import Topology

VARIABLE = "MPISTRAT_TUNED"
_FORMAT = 1
_log = logging.getLogger(__name__)

Points = Mapping[str, Sequence[tuple[int, float]]]  # name of an algorithm -> bytes and seconds, ascending


def path_of(topology: Topology) -> Path:
    """Where measurements for this MPI library and layout are kept: in XDG_CACHE_HOME or ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(_key(topology)).encode()).hexdigest()[:16]
    return cache / "mpistrat" / f"costs-{name}.json"


def to_json(topology: Topology, points: Points) -> str:
    """The text of the file."""
    return json.dumps({"format": _FORMAT, "for": _key(topology), "points": points}, indent=1) + "\n"


def heed(topology: Topology) -> None:
    """Let `choose` go by what was measured here, if that is asked for. Collective when first called."""
    if topology.costs is None:
        topology.costs = read(topology) or {}


def of(topology: Topology, algorithm: Algorithm, nbytes: int) -> float:
    """Seconds that a message takes: measured, where anything was measured here, else predicted."""
    if not topology.costs:
        return algorithm.cost(topology, nbytes)
    points = topology.costs.get(algorithm.name)
    return seconds(points, nbytes) if points else math.inf


def read(topology: Topology) -> Points | None:
    """What was measured here, the same on all ranks; None if MPISTRAT_TUNED is not set. Collective."""
    found = None
    if topology.rank == 0 and topology.size > 1 and os.environ.get(VARIABLE, "0") not in ("", "0"):
        path: Path | str = "what was measured"
        try:
            path = path_of(topology)
            found = parse(path.read_text(), _key(topology))
        except FileNotFoundError:
            _log.warning("%s is set, but nothing was measured here: run mpistrat bench tune", VARIABLE)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:  # and no rank waits for this one
            _log.warning("%s is not used: %s", path, error)
    return topology.broadcast_object(found)


def parse(text: str, key: Sequence[object]) -> Points:
    """The points in the text of a file.

    Raises
    ------
    ValueError
        If it is no such text, or one for another MPI library or layout.
    """
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
        raise ValueError(f"its points are no positive numbers: {points}")
    return points


def seconds(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """What ``nbytes`` bytes take: on a straight line between two points, in proportion beyond the last.

    Examples
    --------
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


def _key(topology: Topology) -> list[object]:
    version: str = mpi.start().Get_library_version()
    return [version.split("\n")[0].split(",")[0].rstrip("\0 "), list(topology.ranks_per_node)]
