"""What several nodes see, as one view."""

import dataclasses
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpistrat.monitor import report, view
from mpistrat.monitor.process import Links, ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.monitor.view import Notices
from mpistrat.record.read import Entry, Membership, Record

SIZE = 4
PATIENCE = 60.0  # seconds


def record(rank, inside, clock=0.0):
    """The record of a rank: of two, node0 and node1 have two each, with clocks of their own."""
    entry = Entry(7, 3, "barrier", "a.py:1 in f", 0, 50.0 - clock, 0.0, 0.0 if inside else 51.0 - clock)
    return Record(
        path=f"record-{rank}",
        clock=clock,
        host=f"node{rank // 2}",
        pid=1000 + rank % 2,  # processes of two nodes may have the same number
        rank=rank,
        size=SIZE,
        memberships=(Membership(7, SIZE, rank, entry),),
        entries=(entry,),
    )


def view_of(node, *, missing=()):
    """What a node sees of its two ranks."""
    clock = 1000.0 * node
    ranks = (2 * node, 2 * node + 1)
    records = tuple(record(rank, rank not in missing, clock) for rank in ranks)
    return view.JobView(
        60.0 - clock,
        records,
        {each.key: ProcessFacts("S", "clock_nanosleep") for each in records},
        {each.key: Stacks((Frame("a.py", 9, "g"),)) for each in records},
        frozenset(),
        (Links(f"node{node}", ranks, (), (), ()),),
        tuple(f"node{rank // 2}" for rank in range(SIZE)),
    )


def test_a_view_travels_whole():
    seen = dataclasses.replace(view_of(1), hosts=())
    assert view.from_json(json.loads(json.dumps(view.as_json(seen)))) == seen


def test_two_nodes_with_different_clocks_and_equal_processes():
    both = view.joined([view_of(0), view_of(1, missing=[3])])
    (wait,) = report.waits_in(both)
    assert [each.rank for each in wait.waiting] == [0, 1, 2]
    assert [each.rank for each in wait.missing] == [3]
    assert {each.last.entered for found in both.records for each in found.memberships} == {50.0}
    text = report.text(both, [wait], 0)
    assert "ranks 0-2 of 4 have waited for rank 3 since" in text
    assert "rank 3 (node1 process 1001): sleeps, at a.py:9 in g" in text
    assert "for 10 s" in text


def test_of_two_orders_the_rank_that_differs_is_named_first():
    """Though it has waited for longer than the others."""

    def waits(each, token, entered):
        entry = Entry(token, 1, f"barrier {token}", "a.py:1 in f", 0, entered, 0.0, 0.0)
        both = tuple(Membership(i, SIZE, each.rank, entry if i == token else None) for i in (8, 9))
        return dataclasses.replace(each, memberships=both, entries=(entry,))

    both = view.joined([view_of(0), view_of(1)])
    records = [waits(each, *((9, 40.0) if each.rank == 2 else (8, 50.0))) for each in both.records]
    seen = dataclasses.replace(both, records=tuple(records))
    lines = report.causes(seen, report.waits_in(seen))
    assert lines[0].startswith("ranks 0-1, 3 of 4 have waited for rank 2 since")
    assert [line for line in lines if "cause: " in line] == [
        "  cause: other order. Use two strategies in the same order on all ranks."
    ]


@pytest.mark.parametrize(("answered", "cause"), [(True, "node"), (False, "on another node")])
def test_a_node_that_does_not_answer(answered, cause):
    seen = view_of(0)
    if answered:  # by a third node, which has no rank in this communicator
        seen = dataclasses.replace(seen, links=(*seen.links, Links("node2", (), (), (), ())))
    text = report.text(seen, report.waits_in(seen), 0)
    assert "ranks 0-1 of 4 have waited for ranks 2-3 since" in text
    assert "ranks 2-3 (node1): no " in text
    assert f"cause: {cause}. " in text


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_lowest_rank_that_asks_collects_what_all_nodes_say(directory):
    first, second = Notices("job", 1), Notices("job", 2)
    second.ask("call-1", view_of(1))
    assert second.collects(view_of(1))
    assert first.unanswered([0, 1]) == ["call-1"]
    first.ask("call-1", view_of(0))
    assert first.unanswered([0, 1]) == []
    assert first.collects(view_of(0))
    assert not second.collects(view_of(1))
    seen = first.collect("call-1", view_of(0), SIZE, PATIENCE, lambda: True)
    assert seen.ranks == {0, 1, 2, 3}
    assert first.claim("call-1")
    assert not second.claim("call-1")


def test_a_node_that_does_not_wait_says_what_it_sees_when_it_is_asked(directory):
    waits, other = Notices("job", 0), Notices("job", 3)
    waits.ask("call-1", view_of(0))
    (call,) = other.unanswered([2, 3])
    other.say(call, view_of(1, missing=[2, 3]))
    assert other.unanswered([2, 3]) == []
    assert waits.collects(view_of(0))
    assert waits.collect(call, view_of(0), SIZE, PATIENCE, lambda: True).ranks == {0, 1, 2, 3}
    waits.take_down()
    other.take_down()
    assert other.unanswered([2, 3]) == []


class Clock:
    """Time that passes in calls of ``sleep`` only."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("mpistrat.monitor.view.time", clock)
    return clock


def test_a_node_that_gives_signs_of_life_is_waited_for(directory, clock):
    waits, other = Notices("job", 0), Notices("job", 3)
    waits.ask("call-1", view_of(0))
    (call,) = other.unanswered([2, 3])
    with other.looking() as sign:

        def beat():
            sign()
            if clock.now > 10:
                other.say(call, view_of(1))
            return True

        assert waits.collect(call, view_of(0), SIZE, 2.0, beat).ranks == {0, 1, 2, 3}


def test_a_node_that_gives_no_signs_any_more_is_not_waited_for(directory, clock):
    waits, other = Notices("job", 0), Notices("job", 3)
    waits.ask("call-1", view_of(0))
    with other.looking():
        assert waits.collect("call-1", view_of(0), SIZE, 2.0, lambda: True).ranks == {0, 1}
    assert 2.0 < clock.now < 4.0


def test_a_rank_stops_to_collect_where_a_lower_one_asks(directory):
    """It could not answer the lower one meanwhile, which would take its node for one that is gone."""
    lower, higher = Notices("job", 0), Notices("job", 3)
    higher.ask("call-1", view_of(1))

    def ask():
        lower.ask("call-2", view_of(0))
        return True

    assert higher.collect("call-1", view_of(1), SIZE, math.inf, ask).ranks == {2, 3}
    assert higher.unanswered([2, 3]) == ["call-2"]


def test_a_rank_stops_to_collect_where_it_waits_no_longer(directory):
    waits = Notices("job", 0)
    waits.ask("call-1", view_of(0))
    assert waits.collect("call-1", view_of(0), SIZE, math.inf, lambda: False).ranks == {0, 1}


def test_ranks_that_collect_do_not_wait_for_each_other(directory, monkeypatch):
    """One that is not seen may have asked before it had a communicator with the others."""
    monkeypatch.setattr("mpistrat.monitor.view._SIGN", 0.01)
    waits, other, end = Notices("job", 0), Notices("job", 3), threading.Event()
    waits.ask("call-1", view_of(0))
    alone = dataclasses.replace(view_of(1), records=())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other.collect, "call-2", alone, SIZE, math.inf, lambda: not end.is_set())
        try:
            assert waits.collect("call-1", view_of(0), SIZE, 0.5, lambda: True).ranks == {0, 1}
        finally:
            end.set()


def test_another_job_with_the_same_key_does_not_count(directory):
    def elsewhere(seen):
        records = [
            dataclasses.replace(each, memberships=(dataclasses.replace(each.memberships[0], token=8),))
            for each in seen.records
        ]
        return dataclasses.replace(seen, records=tuple(records))

    own, other = Notices("job", 2), Notices("job", 0)
    other.ask("call-1", elsewhere(view_of(0)))
    own.ask("call-1", view_of(1))
    assert own.collects(view_of(1))
    assert own.collect("call-1", view_of(1), SIZE, -60.0, lambda: True).ranks == {2, 3}
    other.leave()
    own.leave()
    assert not any(directory.rglob("*board*"))


def test_what_a_rank_told_that_is_gone_goes_with_the_last_rank(directory):
    waits, gone, other = Notices("job", 0), Notices("job", 2), Notices("job", 3)
    gone.announce_exit(view_of(1))
    waits.ask("call-1", view_of(0))
    assert waits.collect("call-1", view_of(0), SIZE, PATIENCE, lambda: True).ranks == {0, 1, 2, 3}
    waits.take_down()  # that hang is over
    assert other.any()
    waits.leave()
    assert not other.any()
    assert not any(directory.rglob("*board*"))
    waits.ask("call-2", view_of(0))  # the watchdog was late
    assert not any(directory.rglob("*board*"))
