"""The examples with roles and task farms do what their first lines say."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_digits_are_recognised_asynchronously(run_ranks, tmp_path):
    ended = run_ranks(4, EXAMPLES / "train_digits_async.py", limit=200, cwd=tmp_path).check()
    (accuracy,) = re.findall(r"^test accuracy (0\.\d{3})  360 images", ended.output, re.MULTILINE)
    assert float(accuracy) >= 0.96


def test_a_sweep_tries_all_settings(run_ranks, tmp_path):
    options = ("--widths=4", "--ridges=3")
    ended = run_ranks(3, EXAMPLES / "sweep.py", *options, limit=120, cwd=tmp_path).check()
    assert re.search(r"^12 settings, best: accuracy 0\.9\d\d with \d+ features", ended.output, re.MULTILINE), str(ended)
    assert (tmp_path / "sweep-out" / "gantt.png").read_bytes().startswith(b"\x89PNG")
