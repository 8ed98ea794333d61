"""Which node has lost its link, from what the systems of the nodes tell."""

import socket

import pytest

from mpistrat.monitor import process
from mpistrat.monitor.process import Links


def node(number, *silent, dead=()):
    """A node with two ranks, to which the nodes with these numbers do not acknowledge its data."""
    ranks = (2 * number, 2 * number + 1)
    return Links(f"node{number}", ranks, (f"10.0.0.{number}",), dead, tuple(f"10.0.0.{i}" for i in silent))


@pytest.mark.parametrize(
    ("nodes", "at_fault"),
    [
        ([node(0), node(1, 2), node(2), node(3, 2)], ["node2"]),
        ([node(0), node(1, 2), node(2, 3), node(3)], ["node2"]),
        ([node(0), node(1, 2), node(2), node(3)], ["node1", "node2"]),  # one of both
        ([node(0, 1), node(1), node(2, 3), node(3)], []),  # no node is at all ends
        ([node(0), node(1, 9), node(2)], []),  # an address that is not of the job
        ([node(0), node(1, 2), node(2, dead=("eth0",))], ["node2"]),
        ([], []),
    ],
)
def test_the_node_at_an_end_of_all_broken_connections(nodes, at_fault):
    assert [each.host for each in process.at_fault(nodes)] == at_fault


def test_a_link_to_this_node_itself_does_not_count():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        seen = process.look_at_links([0])
    assert not [each for each in seen.addresses if each.startswith("127.")]
    assert (seen.host, seen.ranks) == (socket.gethostname(), (0,))
