"""The chart of small work."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "shared"))

from reporting import Row

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "programs" / "small_chart.py"


@pytest.mark.full
def test_small_chart(tmp_path, run_alone):
    pytest.importorskip("matplotlib")
    files = []
    for n in (1, 2):
        ways = {"run, hot": {"mpistrat": 3.0, "by hand": 1.0}, "a case with one way": {"mpistrat": 1.0}}
        rows = [
            Row("small", case, way, 0, seconds, n)._asdict()
            for case, each in ways.items()
            for way, seconds in each.items()
        ]
        files.append(tmp_path / f"{n}.json")
        files[-1].write_text(json.dumps(rows))
    chart = tmp_path / "chart.png"
    run_alone(PROGRAM, *files, chart, limit=100).check()
    assert chart.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
