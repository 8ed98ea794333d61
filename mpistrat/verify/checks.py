"""When ranks verify, and what: `watch` lets the reductions of a topology do so."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.tree import Shares
from mpistrat.collectives.reduction import Reduction, Reductions
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import Operation, operation
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.verify.copies import EqualCopies, EqualVariable, Piece, difference, digest_of
from mpistrat.verify.digest import digest
from mpistrat.verify.sums import SumSample, wrong_result

_SHARE = 125  # verifications take at most one in so many parts of the time: 0.8 %, and 0.2 % for what is not measured
_FIRST, _MOST = 8, 1 << 20  # reductions before the first verification, and the most between two
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 256 << 20  # of a share
_FIRST_COST, _MOST_COST = 100_000, 10**9  # ns; what takes longer is a pause of the process

run_unchecked = Reduction.run


class Checks(Slot):
    """The verifications of a topology. One follows every ``every``-th reduction, a number that all ranks agree on.

    It pays off what the verification before took on the slowest rank, also if that loaded code or waited for a core.
    ``left`` counts the reductions until the next one. ``ended`` is when the last one did, in ns.
    """

    def __init__(self) -> None:
        self.copies = EqualCopies()
        self.left = self._every = _FIRST
        self._nbytes = _LEAST_BYTES
        self._cost, self.ended = _FIRST_COST, time.perf_counter_ns()

    def sample(self, topology: Topology, op: str, algorithm: Any, order: Iterable[int]) -> SumSample | None:
        """Return a sample of the next reduction, if sums are verified."""
        if "sums" not in topology.verify:
            return None
        return SumSample(op, algorithm, [*order], digest(topology.lock.sequence.to_bytes(8, "little")))

    def verify(self, topology: Topology, sample: SumSample | None, out: Sequence[Any], seconds: float | None) -> None:
        """Compare the next share of the copies, and a sample of a reduction. Collective.

        Raise CorruptionError on every rank if one differs.
        """
        began, lock, world = time.perf_counter_ns(), topology.lock, topology.world
        with lock.collective(operation("verify", len(self.copies)), timeout_seconds=seconds):
            pieces = self.copies.next_share(world, self._nbytes) if "copies" in topology.verify else []
            numbers = [digest_of(pieces), 0, 0]
            if sample is not None:
                result = sample.result(out)
                numbers[1] = digest(result.reshape(-1).view(np.uint8).data) if sample.has_equal_bits else 0
                root = lock.sequence % topology.size
                rows = world.gather(sample.rows, root)
                numbers[2] = int(rows is not None and bool(sample.wrong(rows, result).any()))
            mean = (began - self.ended) // self._every
            are_equal, (is_wrong, cost, mean) = self._compared(world, numbers[:2], numbers[2], self._cost, -mean)
            error = None if are_equal[0] else difference(topology, pieces)
            if error is None and sample is not None and (is_wrong or not are_equal[1]):
                error = wrong_result(topology, sample, result)
            if error is not None:
                raise error
        self._pace(cost, max(1, -mean))
        self.ended = time.perf_counter_ns()
        self._cost = min(self.ended - began + (0 if sample is None else sample.nanoseconds), _MOST_COST)

    @staticmethod
    def _compared(world: Any, digests: Sequence[int], *numbers: int) -> tuple[list[bool], list[int]]:
        """Return whether each digest is equal on all ranks, and the maxima of numbers. One message of a few bytes."""
        halves = [number >> 1 for number in digests]
        largest = np.array([*halves, *[~half for half in halves], *numbers], np.int64)
        world.Allreduce(mpi.start().IN_PLACE, largest, mpi.start().MAX)
        count, values = len(halves), largest.tolist()
        ends = zip(values[:count], values[count : 2 * count], strict=True)
        return [high == ~low for high, low in ends], values[2 * count :]

    def _pace(self, cost: int, mean: int) -> None:
        """Set when the next verification is, and its share, by the time of one and of a reduction in ns."""
        self.left = self._every = min(max(1, -(-_SHARE * cost // mean)), _MOST)
        if 2 * _SHARE * cost < mean and self._nbytes < _MOST_BYTES:
            self._nbytes *= 2
        elif self._every > 1 and self._nbytes > _LEAST_BYTES:
            self._nbytes //= 2

    def verify_all(self, topology: Topology) -> None:
        """Compare all copies. Collective. Raise CorruptionError on every rank if one differs."""
        with topology.lock.collective(operation("verify all", len(self.copies))):
            pieces: list[Piece] = self.copies.all_pieces(topology.world)
            (are_equal,), _ = self._compared(topology.world, [digest_of(pieces)])
            if not are_equal and (error := difference(topology, pieces)) is not None:
                raise error


class CheckedReduction(Reduction):
    """A prepared all-reduce, some of whose calls are followed by a verification."""

    __slots__ = ("_by_replica", "_checks", "_op", "_ranks", "_sample", "_way")

    def __init__(self, topology: Topology, operation: Operation, *args: Any, **kwargs: Any):
        super().__init__(topology, operation, *args, **kwargs)
        self._ranks, self._checks = topology, topology.slot(Checks)
        # Its first part is the name of the op, and the last one that of the algorithm.
        self._op, self._way = str(operation.parts[0]), operation.parts[-1]
        self._sample: SumSample | None = None
        self._by_replica = False  # whether values are added one by one, and sampled then

    def sample(self, shares: Shares) -> SumSample | None:
        self._by_replica, self._sample = True, None
        if self._checks.left <= 1:
            row_of = {replica: row for row, replica in enumerate(itertools.chain(*shares.blocks))}
            order = [row_of[replica] for replica in sorted(row_of)]
            self._sample = self._checks.sample(self._ranks, self._op, self._way, order)
        return self._sample

    def run(self, values: Sequence[Any], timeout_seconds: float | None = None) -> Any:
        checks = self._checks
        if checks.left > 1:
            out = run_unchecked(self, values, timeout_seconds)
            checks.left -= 1  # after it: all ranks raise an error of a reduction, or none goes on
            return out
        ranks, sample = self._ranks, self._sample
        if not self._by_replica:  # else partial sums would be drawn, where this was not due yet when they began
            order = itertools.chain(*ranks.nodes) if self._way == "tree" else range(ranks.size)
            sample = checks.sample(ranks, self._op, self._way, order)
            if sample is not None:
                sample.take(values)
        out = run_unchecked(self, values, timeout_seconds)
        checks.verify(ranks, sample, out, timeout_seconds)
        return out


def watch(topology: Topology) -> None:
    """Let the reductions that are prepared from now on verify, if ``rc.verify`` asks for it."""
    if topology.verify and topology.size > 1:
        topology.slot(Reductions).kind = CheckedReduction


def count_reduction(topology: Topology) -> None:
    """Count a reduction of a kind that `watch` does not see, and compare the next share if it is time. Collective."""
    if topology.verify and topology.size > 1:
        checks = topology.slot(Checks)
        checks.left -= 1
        if checks.left < 1:
            checks.verify(topology, None, (), None)


def register(topology: Topology, variable: EqualVariable) -> None:
    """Let the ranks compare the copies of a variable that they have just created together."""
    if "copies" in topology.verify and topology.size > 1:
        topology.slot(Checks).copies.add(variable)


def require_equal(topology: Topology) -> None:
    """Compare all copies of variables on these ranks, if ``rc.verify`` asks for it. Collective.

    Raise CorruptionError on every rank if one differs.
    """
    if "copies" in topology.verify and topology.size > 1:
        topology.slot(Checks).verify_all(topology)
