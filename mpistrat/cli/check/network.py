"""The checks between ranks: latency and bandwidth of pairs of nodes, and the clock of each node against rank 0's clock.

The difference of clocks is measured by the fastest of several round trips (F. Cristian, "Probabilistic clock
synchronization", Distributed Computing 3, 1989).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from statistics import median, median_high
from typing import Any, NamedTuple

from mpistrat.cli.check.job import CheckedJob, CheckOptions, Finding, Severity, TimedExchange, rounds
from mpistrat.representation import grouped

_ROUNDS = 16
_TRIPS = 20
_FEW_NODES = 4  # up to so many nodes, one pair at a time: pairs on a small machine disturb each other
_MOST_BYTES = 16 * 2**20
_SECONDS = 0.05  # duration of one message of the measurement
_SLOW = 20e6  # bytes per second: a slower network is unfit for training
_RATIO = 4  # times slower than usual
_AGAIN = 8  # maximum number of slow pairs to measure again, the slowest first
_LONG = 1e-3  # seconds of latency
# The clock of this rank. Tests replace it, because a program cannot set the clock of the machine.
now: Callable[[], float] = time.time
_CLOCK_TRIPS = 8
_ALL_RANKS = 64  # with more ranks, only the first rank of each node is asked
_CLOCK_LOOK, _CLOCK_FIX = 0.1, 1.0  # seconds


class Pair(NamedTuple):
    """The measurement of a pair of nodes, by their first ranks: latency in seconds, and bandwidth in bytes per second.

    ``again`` is whether the pair was slow and was measured a second time, alone.
    """

    a: int
    b: int
    latency: float
    rate: float
    again: bool = False


def measure_network(exchange: TimedExchange, options: CheckOptions) -> list[Pair] | None:
    """Measure the pairs of nodes. Measure slow pairs again, alone: other pairs may have disturbed them."""
    pairs = rounds(exchange.leaders, _ROUNDS)
    if len(exchange.leaders) <= _FEW_NODES:
        pairs = [[pair] for group in pairs for pair in group]
    measurements = _measured(exchange, pairs)
    suspicious = None if measurements is None else sorted(_slow(measurements), key=lambda pair: pair.rate)[:_AGAIN]
    alone = [[(pair.a, pair.b)] for pair in (Pair(*values) for values in exchange.broadcast(suspicious))]
    second = {(pair.a, pair.b): pair for pair in _measured(exchange, alone) or ()}
    if measurements is None:
        return None
    return [_better(pair, second.get((pair.a, pair.b))) for pair in measurements]


def _measured(exchange: TimedExchange, pairs: list[list[tuple[int, int]]]) -> list[Pair] | None:
    """Measure pairs, all pairs of a list at the same time. Return all results on rank 0, None elsewhere."""
    results = []
    for group in pairs:
        for a, b in group:
            if exchange.rank in (a, b):
                measured = measure(exchange, b if exchange.rank == a else a, first=exchange.rank == a)
                if exchange.rank == a:
                    results.append((a, b, *measured))
        exchange.barrier()
    gathered = exchange.gather(results)
    return None if gathered is None else [Pair(*pair) for rows in gathered for pair in rows]


def _better(first: Pair, second: Pair | None) -> Pair:
    if second is None:
        return first
    latency, rate = min(first.latency, second.latency), max(first.rate, second.rate)
    return Pair(first.a, first.b, latency, rate, again=True)


def _usual(pairs: list[Pair]) -> float:
    """Return the usual bandwidth: the median over nodes of the bandwidth of a node's median pair.

    The best pair is not typical: two nodes on one switch may be far faster than all others. Nor is the median of all
    pairs: with three nodes one bad link slows down two pairs.
    """
    by_node = grouped((node, pair.rate) for pair in pairs for node in (pair.a, pair.b))
    return median(median_high(rates) for rates in by_node.values())


def _slow(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs that are too slow by this measurement."""
    usual = _usual(pairs) if pairs else 0.0
    return [pair for pair in pairs if pair.rate < _SLOW or pair.rate * _RATIO < usual]


def measure(exchange: TimedExchange, peer: int, first: bool) -> tuple[float, float]:
    """Return latency and bandwidth to another rank, in the slower direction. Both ranks call it."""
    trips = []
    for _ in range(_TRIPS):
        start = time.perf_counter()
        _exchange_pair(exchange, peer, first, bytearray(8), bytearray(8))
        trips.append(time.perf_counter() - start)
    latency = median(trips) / 2
    rate = _rate(exchange, peer, first, 2**18)
    # A message that lasts for `_SECONDS` by the rate of 256 KiB: in a short one latency counts.
    count = int(min(_MOST_BYTES, max(2**18, rate * _SECONDS)))
    return latency, max(_rate(exchange, peer, first, count) for _ in range(2))


def _rate(exchange: TimedExchange, peer: int, first: bool, count: int) -> float:
    """Return the bytes per second in the slower direction, the same on both ranks."""
    data, word = bytearray(count), bytearray(8)
    slowest = 0.0
    for sends in (first, not first):
        start = time.perf_counter()
        if sends:
            _exchange_pair(exchange, peer, True, data, word)
            taken = int((time.perf_counter() - start) * 1e9)
            exchange.send(taken.to_bytes(8, "little"), peer)
        else:
            _exchange_pair(exchange, peer, False, word, data)
            taken = int.from_bytes(exchange.receive(peer, 8), "little")
        slowest = max(slowest, taken / 1e9)
    return count / slowest


def _exchange_pair(exchange: TimedExchange, peer: int, first: bool, out: bytearray, into: bytearray) -> None:
    """Exchange one message in each direction."""
    if first:
        exchange.send(out, peer)
        exchange.receive_into(into, peer)
    else:
        exchange.receive_into(into, peer)
        exchange.send(out, peer)


def judge_network(job: CheckedJob) -> Finding:
    measurements: Any = job.exchanged.get("network")
    if measurements is None:
        return Finding("the ranks could not communicate", Severity.UNKNOWN)
    if not measurements:
        return Finding("one node", Severity.OK)
    pairs = [Pair(int(a), int(b), *rest) for a, b, *rest in measurements]

    def name(pair: Pair) -> str:
        return "-".join(job.facts[rank]["host"] for rank in (pair.a, pair.b))

    slow = [pair for pair in _slow(pairs) if pair.again]
    slowest = min(slow or pairs, key=lambda pair: pair.rate)
    longest = max(pairs, key=lambda pair: pair.latency)
    text = f"worst bandwidth {_rate_text(slowest.rate)} ({name(slowest)})"
    if len(pairs) > 1:
        text += f", usual {_rate_text(_usual(pairs))}"
    text += f"; worst latency {longest.latency * 1e6:.0f} us ({name(longest)})"
    if slow:
        often = _in_all(slow)
        node = f"{job.facts[often]['host']} is in all slow pairs: " if often is not None else ""
        return Finding(
            text,
            Severity.FIX,
            f"{node}exclude that node (--exclude) and tell your administrators; if all pairs are slow, MPI does not "
            "use the fast network (UCX_NET_DEVICES, FI_PROVIDER, OMPI_MCA_btl_tcp_if_include)",
        )
    if longest.latency > _LONG:
        return Finding(text, Severity.LOOK, "small steps will be slow: more ranks than cores, or a slow network?")
    return Finding(text, Severity.OK)


def _in_all(pairs: list[Pair]) -> int | None:
    """Return the only rank that is in all of several pairs, or None."""
    common = set.intersection(*({pair.a, pair.b} for pair in pairs)) if len(pairs) > 1 else set()
    return common.pop() if len(common) == 1 else None


def _rate_text(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def compare_clocks(exchange: TimedExchange, options: CheckOptions) -> list[list[float]] | None:
    """Return the rank, the seconds by which its clock is ahead, and their error, for each rank that was asked."""
    peers = range(exchange.size) if exchange.size <= _ALL_RANKS else exchange.leaders
    if exchange.rank != 0:
        if exchange.rank in peers:
            for _ in range(_CLOCK_TRIPS):
                exchange.receive(0, 1)
                exchange.send(struct.pack("d", now()), 0)
        return None
    offsets = []
    for peer in peers:
        if peer == 0:
            continue
        best = (float("inf"), 0.0)
        for _ in range(_CLOCK_TRIPS):
            start = now()
            exchange.send(b"?", peer)
            (theirs,) = struct.unpack("d", exchange.receive(peer, 8))
            end = now()
            best = min(best, (end - start, theirs - (start + end) / 2))
        offsets.append([peer, best[1], best[0] / 2])
    return offsets


def judge_clocks(job: CheckedJob) -> Finding:
    offsets: Any = job.exchanged.get("clocks")
    if offsets is None:
        return Finding("the ranks could not be asked", Severity.UNKNOWN)
    if not offsets:
        return Finding("one rank", Severity.OK)
    rank, ahead, error = max(offsets, key=lambda row: abs(row[1]) - row[2])
    rank = int(rank)
    least = max(0.0, abs(ahead) - error)
    if least < _CLOCK_LOOK:
        return Finding(f"within {max(abs(row[1]) + row[2] for row in offsets) * 1e3:.1f} ms", Severity.OK)
    return Finding(
        f"rank {rank} ({job.facts[rank]['host']}) is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0",
        Severity.FIX if least >= _CLOCK_FIX else Severity.LOOK,
        "tell your administrators (chronyd or ntpd on that node): file times and time limits will be wrong",
    )
