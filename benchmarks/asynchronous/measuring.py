"""What is measured of a coordinator. The calls have the same names in both libraries."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

WARM_UP, LATENCIES = 50, 100
EMPTY = 4  # empty closures for each step: they are short


def options() -> argparse.Namespace:
    """Return what the comparison asks one run of a library for."""
    parser = argparse.ArgumentParser(description="one run of one library; against_tensorflow.py starts it")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--closures", type=int, required=True)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def measure(coordinator: Any, step: Callable[..., Any], data: Any, empty: Callable[[], Any], closures: int) -> None:
    """Print the rates of steps and of empty closures, the latency of one, and the first and last loss."""
    losses = [coordinator.schedule(step, args=(data,)) for _ in range(WARM_UP)]
    coordinator.join()
    start = time.perf_counter()
    losses += [coordinator.schedule(step, args=(data,)) for _ in range(closures)]
    coordinator.join()
    steps = time.perf_counter() - start

    for _ in range(WARM_UP):
        coordinator.schedule(empty)
    coordinator.join()
    start = time.perf_counter()
    for _ in range(EMPTY * closures):
        coordinator.schedule(empty)
    coordinator.join()
    calls = time.perf_counter() - start

    latencies = []
    for _ in range(LATENCIES):
        start = time.perf_counter()
        coordinator.fetch(coordinator.schedule(empty))
        latencies.append(time.perf_counter() - start)
    figures = {
        "steps": closures / steps,
        "closures": EMPTY * closures / calls,
        "latency": statistics.median(latencies),
        "first": float(coordinator.fetch(losses[0])),
        "last": float(coordinator.fetch(losses[-1])),
    }
    print(json.dumps(figures), flush=True)
