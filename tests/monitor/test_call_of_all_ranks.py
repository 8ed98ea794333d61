"""A collective that all ranks are in: it may be stuck, or the last rank may just have come."""

import pytest
from monitor.records import record_of

from mpistrat.monitor import report, waits
from mpistrat.monitor.process import Links, ProcessFacts
from mpistrat.monitor.view import JobView
from mpistrat.record.read import Entry

NOW = 130.0


def record(rank, entered, number=4):
    return record_of(rank, Entry(7, number, "all_reduce", "train.py:2 in <module>", 0, entered, 0.0, 0.0))


@pytest.mark.parametrize(("entered", "goes_on"), [((5.0, 5.1), False), ((5.0, 129.0), True), ((5.0, 60.0), False)])
def test_a_rank_that_came_late_lets_the_call_go_on(entered, goes_on):
    (wait,) = waits.waits([record(0, entered[0]), record(1, entered[1])], ())
    assert wait.goes_on(NOW) == goes_on


def test_a_rank_that_does_not_come_keeps_the_call():
    (wait,) = waits.waits([record(0, 129.0)], ())
    assert not wait.goes_on(NOW)


@pytest.mark.parametrize(("nodes", "cause"), [(1, "no progress"), (2, "network")])
def test_the_cause_on_one_node_is_not_its_network(nodes, cause):
    records = (record(0, 5.0), record(1, 5.0))
    links = tuple(Links(f"node{i}", (i,), (), (), ()) for i in range(nodes))
    facts = {each.key: ProcessFacts("R") for each in records}
    seen = JobView(NOW, records, facts, {}, frozenset(), links)
    text = report.text(seen, report.waits_in(seen), 0)
    assert f"cause: {cause}. All ranks are in this call and get no further" in text


@pytest.mark.parametrize("dead", [(), ("eth0",)])
def test_a_node_whose_link_was_cut_in_the_call_before(dead):
    """The other rank has left that call, and waits in the next one."""
    records = (record(0, 5.0, 5), record(1, 4.9, 4))
    links = tuple(Links(f"node{i}", (i,), (), dead if i else (), ()) for i in range(2))
    facts = {each.key: ProcessFacts("R") for each in records}
    seen = JobView(NOW, records, facts, {}, frozenset(), links)
    lines = report.causes(seen, report.waits_in(seen))
    assert any(each.startswith("rank 0 of 2 has waited for rank 1 since") for each in lines[: 1 if dead else None])
    assert {each.split(".")[0] for each in lines if "cause:" in each} == {"  cause: network"}
