"""Latency and bandwidth between the nodes, pair by pair."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from mpistrat.cli.checks.finding import Finding, Job, Options, Verdict
from mpistrat.cli.checks.talk import Talk, rounds

_ROUNDS = 16
_TRIPS = 20
_FEW_NODES = 4  # up to here one pair at a time: on a small machine they would disturb each other
_MOST_BYTES = 16 * 2**20
_SECONDS = 0.05  # that one message of the measurement should take
_SLOW = 20e6  # bytes per second: less than that is not a network to train on
_RATIO = 4  # times slower than the best pair
_LONG = 1e-3  # seconds of latency


def talk(talk: Talk, options: Options) -> list[list[float]] | None:
    """For each pair of nodes: both first ranks, the latency in seconds, and the bandwidth in bytes per second."""
    pairs = rounds(talk.leaders, _ROUNDS)
    if len(talk.leaders) <= _FEW_NODES:
        pairs = [[pair] for each in pairs for pair in each]
    found = []
    for each in pairs:
        for a, b in each:
            if talk.rank in (a, b):
                measured = measure(talk, b if talk.rank == a else a, first=talk.rank == a)
                if talk.rank == a:
                    found.append([a, b, *measured])
        talk.meet()
    told = talk.comm.gather(found)
    return None if told is None else [pair for each in told for pair in each]


def measure(talk: Talk, peer: int, first: bool) -> tuple[float, float]:
    """Latency and bandwidth of the way to another rank, in the slower direction. Both call it."""
    trips = []
    for _ in range(_TRIPS):
        start = time.perf_counter()
        _turn(talk, peer, first, bytearray(8), bytearray(8))
        trips.append(time.perf_counter() - start)
    latency = median(trips) / 2
    rate = _rate(talk, peer, first, 2**18)
    count = int(min(_MOST_BYTES, max(2**18, rate * _SECONDS)))
    return latency, max(_rate(talk, peer, first, count) for _ in range(2))


def _rate(talk: Talk, peer: int, first: bool, count: int) -> float:
    """Bytes per second in the slower of the two directions, which both ranks learn."""
    data, word = bytearray(count), bytearray(8)
    slowest = 0.0
    for sends in (first, not first):
        start = time.perf_counter()
        if sends:
            _turn(talk, peer, True, data, word)
            taken = int((time.perf_counter() - start) * 1e9)
            talk.send(taken.to_bytes(8, "little"), peer)
        else:
            _turn(talk, peer, False, word, data)
            taken = int.from_bytes(talk.receive(peer, 8), "little")
        slowest = max(slowest, taken / 1e9)
    return count / slowest


def _turn(talk: Talk, peer: int, first: bool, out: bytearray, into: bytearray) -> None:
    """One message there and one back."""
    if first:
        talk.send(out, peer)
        talk.receive_into(into, peer)
    else:
        talk.receive_into(into, peer)
        talk.send(out, peer)


def judge(job: Job) -> Finding:
    pairs: Any = job.talked.get("network")
    if pairs is None:
        return Finding("the ranks could not talk", Verdict.UNKNOWN)
    if not pairs:
        return Finding("one node", Verdict.OK)

    def name(pair: list[float]) -> str:
        return "-".join(job.facts[int(rank)]["host"] for rank in pair[:2])

    slowest, best = min(pairs, key=lambda pair: pair[3]), max(pairs, key=lambda pair: pair[3])
    longest = max(pairs, key=lambda pair: pair[2])
    text = f"worst bandwidth {_rate_text(slowest[3])} ({name(slowest)})"
    if best is not slowest:
        text += f", best {_rate_text(best[3])} ({name(best)})"
    text += f"; worst latency {longest[2] * 1e6:.0f} us ({name(longest)})"
    if slowest[3] < _SLOW or slowest[3] * _RATIO < best[3]:
        often = _of_slow_pairs(pairs, best[3])
        node = f"{job.facts[often]['host']} is in all slow pairs: " if often is not None else ""
        return Finding(
            text,
            Verdict.FIX,
            f"{node}leave that node out (--exclude) and tell your administrators; if all pairs are slow, MPI does not "
            "use the fast network (UCX_NET_DEVICES, FI_PROVIDER, OMPI_MCA_btl_tcp_if_include)",
        )
    if longest[2] > _LONG:
        return Finding(
            text,
            Verdict.LOOK,
            "many small steps will wait: are there more ranks than cores, or a slow network?",
        )
    return Finding(text, Verdict.OK)


def _of_slow_pairs(pairs: list[list[float]], best: float) -> int | None:
    """The rank that is in all slow pairs, if there are several of these."""
    slow = [{int(a), int(b)} for a, b, _, rate in pairs if rate * _RATIO < best]
    common = set.intersection(*slow) if len(slow) > 1 else set()
    return common.pop() if len(common) == 1 else None


def _rate_text(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
