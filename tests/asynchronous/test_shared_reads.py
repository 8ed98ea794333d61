"""Variables of a parameter server of the same node are read without messages."""

import os
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "shared_reads.py"


@pytest.mark.mpich
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors may write in another order")
def test_reads_of_a_node(run_ranks):
    run_ranks(4, PROGRAM, limit=120).check().shows("all checks passed")
