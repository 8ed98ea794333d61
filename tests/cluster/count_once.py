"""Count calls while workers are killed: ``mpistrat run --ft -n 8 count_once.py [--calls 10000] [--seed 0]``.

One chief, two parameter servers and five workers. Each call adds 1 to a variable of each parameter server. Four of the
five workers are killed at random moments. Ends with status 0 if they were, and each call counted once.
"""

import argparse
import os
import random
import signal
import sys
import threading
import time

from mpi4py import MPI

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator, experimental_get_current_worker_index

JOBS = {"chief": 1, "ps": 2, "worker": 5}


def die_soon(seconds):
    """Kill this worker after some time, whatever it does then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resolver = MpiClusterResolver(MPI.COMM_WORLD, jobs=JOBS)
    if resolver.task_type != "chief":
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    chance = random.Random(given.seed)
    victims = chance.sample(range(JOBS["worker"]), 4)
    ends = {victim: chance.randrange(given.calls * 9 // 10) for victim in victims}  # with this call
    dying = {victim: chance.uniform(0, 0.02) for victim in victims}
    strategy = mpistrat.ParameterServerStrategy(resolver)
    with strategy.scope():
        counters = [mpistrat.Variable(0) for _ in range(2)]
    coordinator = ClusterCoordinator(strategy, exactly_once=True)

    def count(call):
        number = experimental_get_current_worker_index()
        if call >= ends.get(number, given.calls):
            del ends[number]  # of this worker's copy
            die_soon(dying[number])
        for counter in counters:
            counter.assign_add(1)

    start = time.monotonic()
    for call in range(given.calls):
        coordinator.schedule(count, args=(call,))
    coordinator.join()
    took = time.monotonic() - start
    statistics = coordinator.statistics()
    lost = sum(each.lost for each in statistics.workers)
    found = [int(counter.numpy()) for counter in counters]
    sys.stdout.write(
        f"seed {given.seed}: counted {found} of {given.calls} in {took:.1f} s; {lost} workers lost, after calls "
        f"{sorted(ends.values())}\n"
    )
    sys.stdout.flush()
    sys.exit(found != [given.calls] * 2 or lost != len(victims))


if __name__ == "__main__":
    main()
