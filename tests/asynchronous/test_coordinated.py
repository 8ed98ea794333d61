"""Programs whose ranks have roles, each checked on its coordinator."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs" / "coordinated.py"


@pytest.mark.mpich
@pytest.mark.parametrize(("name", "n"), [("training", 4), ("schedules", 4), ("farm", 2)])
def test_program(run_ranks, name, n):
    run_ranks(n, PROGRAMS, name, limit=200).check().shows("all checks passed")
