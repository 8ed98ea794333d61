"""Lightning and accelerate train as with Gloo, bit by bit on two ranks."""

import importlib.util
import re
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("lightning_programs.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_weights_are_those_of_gloo(name, run_ranks, tmp_path):
    pytest.importorskip("torch")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found = []
    for backend in ("mpistrat", "gloo"):
        ended = run_ranks(2, PROGRAMS, name, backend, limit=140, cwd=tmp_path).check()
        found.append(re.findall(r"^weights (\w{64})$", ended.output, re.MULTILINE))
    assert len(found[0]) == 2
    assert len({*found[0], *found[1]}) == 1


@pytest.mark.fault
def test_another_number_of_devices_is_refused(run_ranks, tmp_path):
    pytest.importorskip("lightning")
    ended = run_ranks(2, PROGRAMS, "lightning", "mpistrat", "3", limit=140, cwd=tmp_path)
    assert ended.status not in (0, None), str(ended)
    ended.shows("give it devices=2, num_nodes=1")
