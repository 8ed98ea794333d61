"""What groups of ranks exchange, each of which is in sync by itself, and how they send less than their arrays."""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.movement.moves import all_gather, all_gather_parts
from mpistrat.collectives.ops.default import CollectiveAllReduce
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.collectives.reduction import new_array
from mpistrat.process import mpi
from mpistrat.representation import require
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.values import ReduceOp

Memory = dict[str, np.ndarray]


class LossyCompression(ABC):
    """How the groups of a strategy send less than their arrays.

    What an exchange leaves out is kept on the rank that owns the array, and added to what it sends next (error
    feedback). The sum over all exchanges equals the sum of the arrays, except for the last error. An array that is not
    finite in one group is not in all, as after an all-reduce, and does not change what is kept.
    """

    #: The names in `memory`. One is "error".
    kinds: tuple[str, ...] = ("error",)

    @abstractmethod
    def memory(self, value: np.ndarray) -> Memory:
        """Return what is kept between exchanges of arrays like this one. Empty if they are sent whole."""

    @abstractmethod
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        """Add up weighted approximations of contiguous arrays, and keep errors in ``memories``. Collective."""


class PowerSGD(LossyCompression):
    """Send an array as a product of two thin matrices: ``rank * (n + m)`` numbers in place of ``n * m``.

    The first axes of an array make the rows of the matrix, the others its columns, divided where the two are shortest
    together. Vectors, and arrays that would not become smaller, are sent whole.

    Parameters
    ----------
    rank : int
        The number of columns of the thin matrices. 1 to 4 are usual.

    Raises
    ------
    TypeError
        If ``rank`` is not an int.
    ValueError
        If it is below 1.

    Notes
    -----
    The algorithm is that of T. Vogels, S. P. Karimireddy, M. Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression
    for Distributed Optimization" (NeurIPS 2019): one step of the power method, begun with the last result.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.PowerSGD(rank=4)
    PowerSGD(rank=4)
    """

    kinds = ("error", "right")

    def __init__(self, rank: int = 4):
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise TypeError(f"rank must be an int, not {rank!r}")
        require(rank >= 1, "rank must be at least 1", rank)
        self.rank = int(rank)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    def memory(self, value: np.ndarray) -> Memory:
        rows, columns = _as_matrix(value).shape if value.ndim > 1 and value.size else (1, 1)
        if self.rank * (rows + columns) >= rows * columns or value.dtype.char in "gG":
            return {}  # LAPACK has no long doubles
        # Equal in all groups. The method has converged to the first directions after some steps from any start.
        start = np.random.default_rng([rows, columns]).standard_normal((columns, self.rank))
        return {"error": np.zeros(value.shape, value.dtype), "right": start.astype(value.real.dtype)}

    @np.errstate(all="ignore")
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        matrices, lefts = [], []
        for value, memory in zip(values, memories, strict=True):
            given, error = _as_matrix(value), _as_matrix(memory["error"])
            matrices.append(new_array(error.size, error.dtype).reshape(error.shape))
            lefts.append(np.empty((len(error), self.rank), error.dtype))
            for rows in _blocks(error):
                block = np.multiply(given[rows], groups.weight, out=matrices[-1][rows])
                block += error[rows]
                np.matmul(block, memory["right"], out=lefts[-1][rows])
        lefts = [np.linalg.qr(each)[0] for each in groups.sums(lefts)]
        owns = [left.T @ each for left, each in zip(lefts, matrices, strict=True)]
        totals = []
        for memory, matrix, left, own, right in zip(memories, matrices, lefts, owns, groups.sums(owns), strict=True):
            error, total = memory["error"], new_array(matrix.size, matrix.dtype).reshape(matrix.shape)
            for rows in _blocks(matrix):
                block = np.matmul(left[rows], own, out=total[rows])
                matrix[rows] -= block
                np.matmul(left[rows], right, out=block)
            totals.append(total.view(error.dtype).reshape(error.shape))
            if np.isfinite(right).all():  # in all groups alike
                memory["error"] = matrix.view(error.dtype).reshape(error.shape)
                found = right.any(axis=1)  # a row of zeros, as of a first gradient that is 0, would stay so for ever
                memory["right"][:, found] = right[found].T
        return totals


class TopK(LossyCompression):
    """Send the largest elements of an array, with their positions.

    Parameters
    ----------
    share : float
        The share of the elements that each group sends, one at least. In (0, 1].

    Raises
    ------
    ValueError
        If ``share`` is out of range.

    Notes
    -----
    See S. U. Stich, J.-B. Cordonnier, M. Jaggi: "Sparsified SGD with Memory" (NeurIPS 2018).

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.TopK(share=0.01)
    TopK(share=0.01)
    """

    def __init__(self, share: float = 0.01):
        require(0 < share <= 1, "share must be in (0, 1]", share)
        self.share = float(share)

    def __repr__(self) -> str:
        return f"TopK(share={self.share})"

    def memory(self, value: np.ndarray) -> Memory:
        return {"error": np.zeros(value.shape, value.dtype)} if value.size > 1 else {}

    @np.errstate(all="ignore")
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        found = []
        for value, memory in zip(values, memories, strict=True):
            kept = value * groups.weight + memory["error"]
            error = kept.reshape(-1)
            count = max(1, int(self.share * error.size))
            where = np.argpartition(np.abs(error), -count)[-count:]  # NaN comes last
            positions, elements = groups.concatenated(where), groups.concatenated(error[where])
            error[where] = 0
            memory["error"] = kept if np.isfinite(elements).all() else memory["error"]  # in all groups alike
            total = np.zeros_like(error)
            np.add.at(total, positions, elements)  # in the order of groups: the same bits in all
            found.append(total.reshape(value.shape))
        return found


def _blocks(matrix: np.ndarray) -> list[slice]:
    """Return the rows of a matrix in blocks of 128 KiB, which stay in a cache."""
    rows = (128 << 10) // matrix[0].nbytes + 1
    return [slice(first, first + rows) for first in range(0, len(matrix), rows)]


def _as_matrix(value: np.ndarray) -> np.ndarray:
    """Return a view of a contiguous array as the matrix of real numbers whose two sides are the shortest together.

    Of a convolution, these are all but the channels that it makes, wherever a library puts these.
    """
    splits = [math.prod(value.shape[:axis]) for axis in range(1, value.ndim)]
    rows = value.reshape(min(splits, key=lambda rows: rows + value.size // rows), -1)
    return rows.view(rows.real.dtype)


# --- the groups -----------------------------------------------------------------


_NAME = "groups"
_Places = tuple[tuple[int, int], ...]


class _Rails(Slot, dict[_Places, Any]):
    """The rail of this rank for each division into groups: a strategy of equal groups takes the one that was made.

    A key has the first rank of the group, and the place in it, of each rank. Strategies end without a collective call,
    so none of them can free a communicator: rails are freed with the communicator of all ranks.
    """

    def are_in_step(self, places: _Places) -> bool:
        """Return whether there is such a division, and no error has left a collective of this rank's rail."""
        rail = self.get(places)
        return places in self and not (rail and Topology.of(rail).lock.given_up)

    def close(self) -> None:
        for rail in filter(None, self.values()):
            rail.Free()
        self.clear()


class BetweenGroups:
    """The groups of a strategy, how often they exchange, and by which ranks.

    Ranks of one place in their groups make a rail. Each rail carries the arrays that it owns, so that all links of a
    node work, and none carries an array twice. Ranks beyond the smallest group own none.

    Collective over ``everyone``. ``group`` are the ranks of this one. ``sync_every`` is the number of steps between two
    exchanges. Raise MismatchError on every rank if ``sync_every``, ``compression`` or ``outer`` differ, and
    ValueError if a group has ranks that are not among ``everyone``.

    This is group ``index`` of ``count``, with ``replicas_before`` replicas in groups of a smaller index, and ``weight``
    is its share of all ranks: of a mean over all rows. The first ``owners_in_group`` ranks of each group own arrays: as
    many as the smallest group has.
    """

    def __init__(
        self,
        group: Topology,
        everyone: Topology,
        sync_every: int,
        compression: LossyCompression | None,
        outer: Any,
        options: CommunicationOptions,
    ):
        config = {} if outer is None else outer.get_config()
        numbers = tuple((name, repr(value)) for name, value in config.items() if not callable(value))
        structures.agree(everyone, _NAME, sync_every, repr(compression), type(outer).__name__, numbers)
        self.group = group
        self.sync_every, self.compression, self.outer = sync_every, compression, outer
        first = group.broadcast_object(everyone.rank)
        places = tuple(everyone.all_gather_object((first, group.rank)))
        firsts = [each for each, _ in places]
        if not everyone.all_true(firsts.count(first) == group.size):
            raise ValueError("the ranks of a group must be among those of the strategy: give comm=mesh.parent")
        self.count, self.index = len(set(firsts)), sorted(set(firsts)).index(first)
        self.replicas_before = sum(each < first for each in firsts)
        self.weight = group.size / everyone.size
        self.owners_in_group = min(firsts.count(each) for each in firsts)
        rails = everyone.slot(_Rails)
        if not everyone.all_true(rails.are_in_step(places)):
            color = group.rank if group.rank < self.owners_in_group else mpi.start().UNDEFINED
            rails[places] = everyone.world.Split(color, key=everyone.rank)
        rail = rails[places]
        self._options, self._label = options, f"group {self.index} (rank {everyone.rank})"
        if rail:  # others have no rail, and own nothing
            self._rail = Topology.of(rail).limited(options.timeout_seconds)
            self._ops = CollectiveAllReduce().bound_to(self._rail)

    def owners(self, nbytes: Sequence[int]) -> list[int]:
        """Return which rank of a group owns each of several arrays: about the same number of bytes on each."""
        loads, found = [0] * self.owners_in_group, [0] * len(nbytes)
        for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
            found[i] = loads.index(min(loads))
            loads[found[i]] += nbytes[i]
        return found

    def sums(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Add up arrays over the groups. Collective over the rail."""
        return self._ops.all_reduce(ReduceOp.SUM, values, self._options, _NAME) if values else []

    def concatenated(self, value: np.ndarray) -> np.ndarray:
        """Return the rows of all groups, in their order. Collective over the rail."""
        return all_gather(self._rail, value, 0, self._options.timeout_seconds)

    def compare(self, step: int, what: Sequence[str], notes: Sequence[str]) -> list[set[str]]:
        """Return what the groups note on each of the things that they exchange. Collective over the rail.

        Raise MismatchError if they do not exchange the same, after the same step.
        """
        if self.group.rank >= self.owners_in_group:
            return []
        reports = self._rail.all_gather_object((self._label, step, what, notes))
        labels, steps, names, noted = zip(*reports, strict=True)
        wrong, shown = "give all the same number of steps", [f"step {each}" for each in steps]
        if len({*steps}) == 1:
            rows = itertools.zip_longest(*names, fillvalue="nothing more")
            wrong, shown = "train the same in all", next(([*row] for row in rows if len({*row}) > 1), [])
        if shown:
            lines = "".join(f"\n  {label}: {each}" for label, each in zip(labels, shown, strict=True))
            raise MismatchError(f"groups met in different exchanges: {wrong}{lines}")
        return [{*row} for row in zip(*noted, strict=True)]

    @contextlib.contextmanager
    def refusal(self) -> Iterator[None]:
        """Context in which an error of this rank raises on the others of its group, when they come to `share`."""
        try:
            yield
        except Exception as error:
            structures.refuse(_NAME, self.group, error, self._options.timeout_seconds)
            raise

    def share(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> None:
        """Copy each contiguous array from the rank that owns it to the others of this group. Collective over them."""
        parts: list[list[np.ndarray]] = [[] for _ in range(self.group.size)]
        for array, owner in zip(arrays, owners, strict=True):
            parts[owner].append(as_bytes(array))
        if self.group.size > 1:
            all_gather_parts(self.group, parts, _NAME, self._options.timeout_seconds)
