"""The way of an all-reduce through the package: few files, and none of a higher package below a lower one."""

import itertools
import os
import sys

import numpy as np
import pytest

import mpistrat

PACKAGE = os.path.dirname(mpistrat.__file__) + os.sep
ARRAY = np.ones(1, np.float32)
VALUES = {"array": ARRAY, "list": [np.ones((3, 4), np.float32), np.ones(5, np.float32), ARRAY]}
# Of the first, one more than the way needs: the label goes into the table of texts that records and traces share.
MOST_FILES_OF_FIRST, MOST_FILES, MOST_CALLS = 13, 6, 20
RECORD = "record/writers.py"  # MPISTRAT_RECORD=0 leaves it out
OF_RANKS = {"runtime", "memory", "record", "process"}  # below all others


def calls(fn):
    """Return the files of the package's functions that a call runs."""
    found = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_filename[len(PACKAGE) :])

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("name", VALUES)
def test_all_reduce_enters_few_files_and_each_room_once(name):
    """The first call of a kind prepares the reduction, from the strategy down to the ranks; the second runs it."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    strategy.run(lambda: None)
    found = []

    def step():
        replica = mpistrat.get_replica_context()
        found.extend(calls(lambda: replica.all_reduce("SUM", VALUES[name])) for _ in range(2))

    strategy.run(step)
    first, second = found
    files = list(dict.fromkeys(first))
    assert len(set(files)) <= MOST_FILES_OF_FIRST, files
    rooms = [file.split(os.sep)[0] for file in files]
    ways = [way for way, _ in itertools.groupby("ranks" if room in OF_RANKS else room for room in rooms)]
    assert ways == ["strategy", "collectives", "ranks"], files
    assert len(set(second) - {RECORD}) <= MOST_FILES, sorted(set(second))
    assert len(second) <= MOST_CALLS, second


class Doubling(mpistrat.collectives.CollectiveAllReduce):
    """Cross-device ops with one hook of their own."""

    def reduce_implementation(self, *arguments):
        return 2 * super().reduce_implementation(*arguments)


def test_subclass_with_one_hook_is_honoured_after_other_ops_reduced_the_same():
    """Ops of one communicator share prepared reductions: those with hooks must not skip the hooks."""
    size = mpistrat.MultiWorkerMirroredStrategy().num_replicas_in_sync
    for ops, factor in ((None, 1), (Doubling(), 2), (None, 1)):
        strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
        for _ in range(2):
            assert strategy.reduce("SUM", ARRAY, axis=None).tolist() == [factor * size]
            many = strategy.reduce("SUM", [ARRAY, ARRAY], axis=None)
            assert [each.tolist() for each in many] == [[size], [size]]
