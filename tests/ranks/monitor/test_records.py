"""What each rank writes to its flight record, and what the others read there."""

import os
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.record import flight_record, layout, read

needs_memory = pytest.mark.skipif(not Path(layout.FOLDER).is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture
def strategy(comm):
    made = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    if made.extended.engine.topology.lock.flight is None:
        pytest.skip(f"the record has {layout.MOST_COMMUNICATORS} communicators, which other tests did not free")
    return made


def own():
    return read.parse(flight_record.current().contents())


def test_collectives_are_noted_with_their_lines(strategy):
    strategy.reduce("SUM", np.ones((2, 3), np.float32), axis=None)
    strategy.barrier()
    reduced, barrier = own().entries[-2:]
    assert (reduced.operation, reduced.nbytes) == ("all_reduce SUM float32[2,3]", 24)
    assert barrier.operation == "barrier"
    assert barrier.number == reduced.number + 1
    assert barrier.place.startswith(f"{__file__}:")
    assert barrier.place.endswith(" in test_collectives_are_noted_with_their_lines")
    assert reduced.entered <= reduced.left <= barrier.entered <= barrier.left


def test_the_line_is_that_of_the_innermost_code_of_the_program(strategy):
    """Also where the call comes through other ways of the package than the call before."""

    def reduce():
        mpistrat.get_replica_context().all_reduce("SUM", np.ones(3))

    for call in (lambda: strategy.run(reduce), strategy.barrier, lambda: strategy.run(lambda: reduce())):
        call()
    functions = [each.place.rpartition(" in ")[2] for each in own().entries[-3:]]
    assert functions[0] == functions[2] == "reduce"


def test_the_ring_keeps_the_last_collectives(strategy):
    for _ in range(layout.MOST_EVENTS + 10):
        strategy.barrier()
    entries = own().entries
    assert len(entries) == layout.MOST_EVENTS
    assert [each.number for each in entries] == list(range(entries[0].number, entries[0].number + len(entries)))


def test_many_operations_and_lines_find_room(strategy):
    for length in range(layout.RECORD_TEXTS + 5):
        strategy.reduce("SUM", np.ones(length + 1), axis=None)
    entries = own().entries
    assert entries[-1].operation == f"all_reduce SUM float64[{layout.RECORD_TEXTS + 5}]"
    assert {each.operation for each in entries[:3]} == {""} or len(entries) < layout.MOST_EVENTS


def test_a_call_that_was_left_by_an_error_is_noted(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one rank does not disagree")
    with pytest.raises(ValueError):
        strategy.reduce("SUM", np.ones(1 + strategy.comm.rank), axis=None)
    record = own()
    assert "was left by ValueMismatchError" in record.note
    assert not record.waits


@needs_memory
def test_the_ranks_of_a_node_read_each_other(strategy):
    strategy.barrier()
    pids = strategy.comm.allgather(os.getpid())
    found = {each.pid: each for each in read.records() if each.lives}  # not of an ended process of this number
    assert set(pids) <= set(found)
    tokens = [{each.token for each in found[pid].memberships} for pid in pids]
    assert set.intersection(*tokens)
    strategy.barrier()


def test_steps_and_phases(strategy):
    mpistrat.experimental.step()
    after = own().step
    for _ in range(3):
        strategy.run(lambda: None)  # part of a step: the program says where those end
        mpistrat.experimental.step()
    assert own().step == after + 3
    with flight_record.phase(layout.Phase.INPUT):
        assert own().phase == layout.Phase.INPUT
    assert own().phase == layout.Phase.USER_CODE
    mpistrat.experimental.step()
    assert own().steps[-1][2] > 0


def test_statistics_are_those_of_all_ranks(strategy):
    mpistrat.experimental.step()
    found = strategy.experimental_statistics()
    assert [each.rank for each in found] == list(range(strategy.num_replicas_in_sync))
    assert all(each.host for each in found)
