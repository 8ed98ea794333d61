"""All-reduce and its sisters on several nodes: right, on no more bytes than needed, ended by what goes wrong.

``python -m pytest tests/cluster``. The nodes are namespaces of this machine, so it needs root on Linux.
"""

import json
import time
from pathlib import Path

import pytest
from nodes import MARGIN

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT = 200
pytestmark = pytest.mark.timeout(900)
LAYOUTS = [
    pytest.param((2, 2, 2, 2), id="4x2"),
    pytest.param((4, 4), id="2x4"),
    pytest.param((3, 1, 2), id="3,1,2", marks=pytest.mark.mpich),
]


@pytest.fixture(scope="session", params=LAYOUTS)
def layout(request):
    """How many ranks each node has."""
    return request.param


def told_in(output):
    """What the program printed last; mpirun may warn before it and after it, in lines that begin with ``[node0:``."""
    lines = [line for line in output.splitlines() if line.startswith(('["', "[{"))]
    assert lines, output
    return json.loads(lines[-1])


@pytest.fixture(scope="session")
def told(cluster, layout):
    """What each rank found, by rank, in one run for all tests of a layout."""
    status, output = cluster.run(layout, PROGRAMS, "everything", limit=LIMIT, OMP_NUM_THREADS="1")
    assert status == 0, output
    return told_in(output)


def nodes_of(layout):
    """The ranks of each node."""
    ends = [sum(layout[: i + 1]) for i in range(len(layout))]
    return [list(range(end - n, end)) for end, n in zip(ends, layout, strict=True)]


def test_topology(told, layout):
    nodes = nodes_of(layout)
    assert [each["nodes"] for each in told] == [nodes] * len(told)
    for i, ranks in enumerate(nodes):
        for node_rank, rank in enumerate(ranks):
            assert told[rank]["host"] == f"node{i}"
            assert told[rank]["node_rank"] == node_rank
            assert told[rank]["rail"] == sum(n > node_rank for n in layout)


@pytest.mark.parametrize("what", ["all_reduce", "many_arrays", "gather", "broadcast"])
def test_right(told, what):
    assert [each[what] for each in told] == [[]] * len(told)


# By the number of ranks, for every layout and MPI library; exact sums do not depend on the former either.
EXACT, ORDERED = "6f5bf31e11649d95", {8: "c8a86b67a6b1a3b4", 6: "2b88b31cb1654da1"}


def test_bits(told):
    assert [each["bits"] for each in told] == [{"exact": EXACT, "ordered": ORDERED[len(told)]}] * len(told)


def test_bytes_on_the_wire(told, layout):
    """Every node sends 2 (nodes - 1) / nodes times the array: the least that any algorithm can do with.

    Headers of packets are not counted; those of MPI's own messages, and what the ranks say to agree, are
    within the hundredth.
    """
    least = 2 * (len(layout) - 1) / len(layout)
    for ranks in nodes_of(layout):
        traffic = told[ranks[0]]["traffic"]
        ours = {case: multiple for case, multiple in traffic.items() if not case.startswith("mpi")}
        assert len(ours) == 8
        for case, multiple in ours.items():
            assert least <= multiple <= MARGIN * least, (case, traffic)


# By the number of nodes: what the busiest one sends. Nodes of equal size send the least that any algorithm can do with.
TREE = {4: 1.5, 2: 1.0, 3: 2.0}


def test_bytes_of_the_fixed_tree(told, layout):
    busiest = max(each["tree"] for each in told)
    assert TREE[len(layout)] <= busiest <= MARGIN * TREE[len(layout)], [each["tree"] for each in told]


def test_the_network_is_used(told):
    """By the library's own all-reduce too: it does not know that the nodes are one machine."""
    assert min(each["traffic"][f"mpi of {1 << 20}"] for each in told) >= 1 / 2


def test_mismatch_is_told_on_all_ranks(told, layout):
    last = nodes_of(layout)[-1]
    ranks = f"rank{'s' * (len(last) > 1)} {last[0]}" + (f"-{last[-1]}" if len(last) > 1 else "")
    for rank, each in enumerate(told):
        said = each["mismatch"]
        assert said.pop("afterwards") == len(told)
        assert set(said) == {"shape", "large", "dtype", "call"}
        for case, text in said.items():
            kind = "MismatchError" if case == "call" else "ValueMismatchError"
            assert text.startswith(f"{kind}: rank {rank}: the ranks met "), text
            assert f"  {ranks}: " in text, text


@pytest.mark.mpich
@pytest.mark.parametrize("name", ["killed", "raises"])
def test_job_ends_with_one_of_its_ranks(cluster, name):
    status, output = cluster.run((2, 1, 1), PROGRAMS, name, limit=LIMIT)
    assert status not in (0, None), output
    if name == "raises":
        assert "ValueError: on purpose" in output


def test_late_ranks_are_named(cluster):
    _, output = cluster.run((2, 1, 2), PROGRAMS, "late", limit=LIMIT)
    for text in told_in(output)[:3]:
        assert text.startswith("TimedOutError: "), text
        assert "ranks 3-4 of 5 did not come within 10 s" in text


def test_job_ends_with_one_of_its_cables(cluster):
    """If the daemons of mpirun are told to look after each other, as those of Open MPI can be."""
    times = [("time", 2), ("intvl", 1), ("probes", 3)]
    options = [word for name, n in times for word in ("--prtemca", f"oob_tcp_keepalive_{name}", str(n))]
    started = cluster.start((1, 1, 1), PROGRAMS, "goes_on", options=options)
    started.wait_for("in step\n", LIMIT)
    cluster.cut(2)
    try:
        assert started.wait(LIMIT) is not None, f"it went on for {LIMIT} s: {started.output()}"
        assert "daemon" in started.output()
    finally:
        cluster.heal(2)
        cluster.clear()
        started.wait(10)


@pytest.mark.mpich
def test_nothing_is_left_behind(cluster):
    """After all of the above, and a moment for daemons to end."""
    end = time.monotonic() + LIMIT
    while (found := cluster.processes()) and time.monotonic() < end:
        time.sleep(0.1)
    assert found == {}
