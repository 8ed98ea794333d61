"""The programs for other libraries give the same result on any number of ranks.

A library that is not installed leaves its program out.
"""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NUMBER = re.compile(r"\d+\.\d+")

# Each program: the modules that it needs, what starts the lines to compare, and how far their numbers may differ.
PROGRAMS = {
    "scipy_cg": (("scipy",), "3600 unknowns, 208 iterations, residual ", 1e-6),
    "pandas_table": (
        ("pandas", "sklearn"),
        tuple("123456789"),
        1e-3,
    ),  # the months; averaged models depend on the ranks
    "jax_optax": (("jax", "optax", "sklearn"), ("epoch ", "test accuracy "), 2e-3),
    "keras_gradienttape": (("tensorflow", "sklearn"), "epoch ", 5e-3),
    "keras_fit": (("keras", "tensorflow", "sklearn"), "epoch ", 5e-3),
}


def programs():
    for name, (needs, *rest) in PROGRAMS.items():
        missing = [each for each in needs if importlib.util.find_spec(each) is None]
        marks = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")
        yield pytest.param(name, *rest, marks=marks, id=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "start", "tolerance"), list(programs()))
def test_result_is_that_of_one_rank(run_alone, run_ranks, tmp_path, name, start, tolerance):
    found = []
    for run in (run_alone, lambda *args, **kwargs: run_ranks(3, *args, **kwargs)):
        ended = run(EXAMPLES / f"{name}.py", cwd=tmp_path, limit=140).check()
        lines = [line for line in ended.output.splitlines() if line.startswith(start)]
        assert lines, str(ended)
        found.append(lines)
    one, three = found
    assert [NUMBER.sub("#", line) for line in one] == [NUMBER.sub("#", line) for line in three]
    for before, after in zip(one, three, strict=True):
        numbers = [[float(each) for each in NUMBER.findall(line)] for line in (before, after)]
        assert numbers[0] == pytest.approx(numbers[1], abs=tolerance)


@pytest.mark.full
def test_functions_for_the_array_api(run_ranks, tmp_path):
    """Functions of other libraries take an array that is cut over ranks."""
    for module, version in (("scipy", "1.15"), ("sklearn", "1.7")):
        pytest.importorskip(module, version)
    program = tmp_path / "program.py"
    program.write_text(
        """
import numpy as np, scipy.special, sklearn.metrics
import mpistrat
sklearn.set_config(array_api_dispatch=True)
mesh, (x, y) = mpistrat.Mesh.for_grid(2), np.random.default_rng(0).random((2, 7, 6))
u, v = (mpistrat.ShardedArray.from_array(each, mesh=mesh, axes=("x", "y")) for each in (x, y))
for function in (lambda x: scipy.special.softmax(x, axis=0), lambda x: scipy.special.xlogy(x, x)):
    np.testing.assert_allclose(function(u).gather(), function(x), rtol=1e-12)
for xp in (np, u.__array_namespace__()):
    np.testing.assert_array_equal(xp.clip(u, 0.2, 0.8).gather(), np.clip(x, 0.2, 0.8))
np.testing.assert_array_equal(np.clip(u, a_min=None, a_max=0.5).gather(), np.clip(x, None, 0.5))
for name in ("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error"):
    function = getattr(sklearn.metrics, name)
    np.testing.assert_allclose(function(u, v), function(x, y), rtol=1e-12)
"""
    )
    run_ranks(4, program, SCIPY_ARRAY_API="1").check()
