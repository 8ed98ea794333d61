"""Programs of a coordinator that are drawn by a seed, against an exact model: ``drawn.py SEED COUNT [kills]``.

For 200 programs: ``for seed in $(seq 67); do mpistrat run --ft -n 6 drawn.py $seed 3 kills; done``.

Each program schedules calls that write to variables on parameter servers, some of which raise. With ``kills``, some
calls kill the worker that runs them, once each, while workers are left: before or after they write, or by a timer at
any later moment, which may lie inside another call, in MPI, or while the worker waits. Every call must count once: the
model adds up what was scheduled.
"""

import os
import random
import signal
import sys
import tempfile

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.experimental.partitioners import FixedShardsPartitioner

SEED, COUNT, KILLS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["kills"]
ROWS = 7


class Model:
    """The variables as one process would have them."""

    def __init__(self, values):
        self.number, self.table = int(values[0]), values[1].copy()


def die(flag, after):
    """Kill this worker after some seconds, if no call with this flag has done so."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if after:
        signal.setitimer(signal.ITIMER_REAL, after)  # SIGALRM has no handler: it ends the process wherever it is
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def call_of(variables, amount, rows, raises, flag="", late=False, after=0.0):
    """A call that adds to both variables. It may raise after that, or kill its worker before, after or later."""
    number, table = variables

    def call():
        if flag and not late:
            die(flag, after)
        number.assign_add(amount)
        table.scatter_add(mpistrat.IndexedSlices(np.full((len(rows), 2), float(amount)), np.array(rows)))
        if flag and late:
            die(flag, after)
        if raises:
            raise ArithmeticError(f"on purpose {amount}")
        return amount

    return call


def error_of_join(coordinator):
    try:
        coordinator.join()
    except ArithmeticError as error:
        return str(error)
    return "none"


def run_program(draw, coordinator, variables, model, flags, workers):
    """Draw and run one program. Return how many workers it has killed."""
    killed = 0
    for _ in range(draw.randint(1, 3)):
        scheduled = []
        for _ in range(draw.randint(1, 12)):
            amount, rows = draw.randint(-5, 9), [draw.randrange(ROWS) for _ in range(draw.randint(1, 3))]
            flag = ""
            if KILLS and killed < workers - 1 and draw.random() < 0.08:
                flag, killed = os.path.join(flags, f"{draw.random()}"), killed + 1
            after = draw.choice([0.0, 0.1 * draw.random() ** 3])
            call = call_of(variables, amount, rows, False, flag, draw.random() < 0.5, after)
            scheduled.append((amount, coordinator.schedule(call)))
            model.number += amount
            np.add.at(model.table, rows, float(amount))
        if draw.random() < 0.7:
            coordinator.join()
        assert [value.fetch() for _, value in scheduled] == [amount for amount, _ in scheduled]
        if draw.random() < 0.4:
            coordinator.schedule(call_of(variables, 99, [0], True))
            assert error_of_join(coordinator) == "on purpose 99"
    coordinator.join()
    assert int(variables[0].numpy()) == model.number
    np.testing.assert_array_equal(variables[1].numpy(), model.table)
    return killed


def main():
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])
    servers = 1 + SEED % 2
    workers = size - 1 - servers
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": workers, "ps": servers})
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return
    strategy = mpistrat.ParameterServerStrategy(resolver, variable_partitioner=FixedShardsPartitioner(servers))
    coordinator = ClusterCoordinator(strategy, exactly_once=True)
    with strategy.scope():
        variables = [mpistrat.Variable(0), mpistrat.Variable(np.zeros((ROWS, 2)))]
    model, killed = Model([each.numpy() for each in variables]), 0
    with tempfile.TemporaryDirectory() as flags:
        for number in range(COUNT):
            draw = random.Random(1000 * SEED + number)
            killed += run_program(draw, coordinator, variables, model, flags, workers - killed)
    print(f"{COUNT} programs of seed {SEED} were right, {killed} workers killed")


if __name__ == "__main__":
    main()
