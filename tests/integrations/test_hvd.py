"""Programs with Horovod's calls that go wrong end with an error that says what happened."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("hvd_programs.py")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("leaves", ["the end of the program", "named step"]),
        ("killed_in_join", ["signal 9"]),
        ("ends_without_join", ["the end of the program", "join"]),
    ],
)
def test_jobs_that_go_wrong_end(name, texts, run_ranks):
    ended = run_ranks(2, PROGRAMS, name)
    assert ended.status not in (0, None), str(ended)
    ended.shows(*texts)


def test_calls_for_arrays_do_not_load_torch():
    code = "import sys, mpistrat.integrations.hvd as hvd; hvd.init(); hvd.allreduce(1.0); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
