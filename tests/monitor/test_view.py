"""What several nodes see, as one view."""

import dataclasses
import json

import pytest

from mpistrat.monitor import report, view
from mpistrat.monitor.between_nodes import Notices
from mpistrat.monitor.links import Links
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.runtime.record.layout import Phase
from mpistrat.runtime.record.read import Entry, Membership, Record

SIZE = 4


def record(rank, inside, clock=0.0):
    """The record of a rank: of two, node0 and node1 have two each, with clocks of their own."""
    entry = Entry(7, 3, "barrier", "a.py:1 in f", 0, 50.0 - clock, 0.0, 0.0 if inside else 51.0 - clock)
    return Record(
        **dict.fromkeys(("launch", "job", "program", "note"), ""),
        **dict.fromkeys(("started", "main_thread", "signal", "step", "bytes"), 0),
        **dict.fromkeys(("phase_since", "heartbeat", "beat_every", "step_since"), 0.0),
        **dict.fromkeys(("moves", "exit_status", "out_of_memory_kills")),
        path=f"record-{rank}",
        clock=clock,
        host=f"node{rank // 2}",
        pid=1000 + rank % 2,  # processes of two nodes may have the same number
        rank=rank,
        size=SIZE,
        phase=Phase.USER_CODE,
        memberships=(Membership(7, SIZE, rank, entry),),
        steps=(),
        entries=(entry,),
    )


def view_of(node, *, missing=()):
    """What a node sees of its two ranks."""
    clock = 1000.0 * node
    ranks = (2 * node, 2 * node + 1)
    records = tuple(record(rank, rank not in missing, clock) for rank in ranks)
    return view.View(
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
    assert "ranks 0-2 of 4 wait for rank 3 since" in text
    assert "rank 3 (node1 process 1001): sleeps, at a.py:9 in g" in text
    assert "for 10 s" in text


@pytest.mark.parametrize(("answered", "cause"), [(True, "node"), (False, "on another node")])
def test_a_node_that_does_not_answer(answered, cause):
    seen = view_of(0)
    if answered:  # by a third node, which has no rank in this communicator
        seen = dataclasses.replace(seen, links=(*seen.links, Links("node2", (), (), (), ())))
    text = report.text(seen, report.waits_in(seen), 0)
    assert "ranks 0-1 of 4 wait for ranks 2-3 since" in text
    assert "ranks 2-3 (node1): no " in text
    assert f"cause: {cause}. " in text


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_lowest_rank_that_asks_collects_what_all_nodes_say(directory):
    first, second = Notices("job", 1), Notices("job", 2)
    second.ask("call-1", view_of(1))
    assert second.collects()
    assert first.unanswered([0, 1]) == ["call-1"]
    first.ask("call-1", view_of(0))
    assert first.unanswered([0, 1]) == []
    assert first.collects()
    assert not second.collects()
    seen = first.collect("call-1", view_of(0), SIZE, 0.0, lambda: None)
    assert seen.ranks == {0, 1, 2, 3}
    assert first.claim("call-1")
    assert not second.claim("call-1")


def test_a_node_that_does_not_wait_says_what_it_sees_when_it_is_asked(directory):
    waits, other = Notices("job", 0), Notices("job", 3)
    waits.ask("call-1", view_of(0))
    (call,) = other.unanswered([2, 3])
    other.say(call, view_of(1, missing=[2, 3]))
    assert other.unanswered([2, 3]) == []
    assert waits.collects()
    assert waits.collect(call, view_of(0), SIZE, 0.0, lambda: None).ranks == {0, 1, 2, 3}
    waits.take_down()
    other.take_down()
    assert other.unanswered([2, 3]) == []
