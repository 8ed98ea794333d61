"""Functions that leave, calls that come too late, interruptions: an error or a result, never a hang."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs" / "misuse.py"
SHOWN = {"refusals": ["refused at the end"], "interruptions": ["interrupted"], "a_farm_without_a_block": []}


@pytest.mark.mpich
def test_two_servers_asked_in_two_orders(run_ranks):
    name = "two_servers_asked_in_two_orders"
    run_ranks(4, PROGRAMS, name, limit=120).check().shows(f"{name} passed")


@pytest.mark.mpich
@pytest.mark.parametrize("name", SHOWN)
def test_it_ends(run_ranks, name):
    run_ranks(3, PROGRAMS, name, limit=120).check().shows(f"{name} passed", *SHOWN[name])
