"""A removed ordering does not pass `test_order_of_streams`."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mutants.py")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_mutant_is_found(run_alone):
    ended = run_alone(PROGRAM, limit=280).check()
    assert "MISSED" not in ended.output
    ended.shows("without a mutant all tests pass", "46 of 46 mutants found")
