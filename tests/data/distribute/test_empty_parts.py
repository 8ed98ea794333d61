"""Test of an error that NumPy raises for a part of a batch without rows."""

import pytest

PROGRAM = """
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
dataset = mpistrat.data.{dataset}
for batch in strategy.experimental_distribute_dataset(dataset.batch(4)):
    batch.{reduction}()
"""


@pytest.mark.parametrize(
    ("dataset", "reduction", "numpy"),
    [
        ("Dataset.range(5)", "max", "zero-size array to reduction operation maximum"),
        ("Dataset.from_iterable(range(5))", "argmin", "attempt to get argmin of an empty sequence"),
    ],
)
def test_a_reduction_of_an_empty_part_is_explained(run_ranks, tmp_path, dataset, reduction, numpy):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(dataset=dataset, reduction=reduction))
    ended = run_ranks(2, program)
    ended.shows("rank 1 of 2 failed", numpy, "This rank got an empty part of a batch", "drop_remainder=True")
    assert ended.status
