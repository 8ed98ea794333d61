"""Errors for names that the package does not have."""

import functools
import operator
import re
import subprocess
import sys

import pytest

import mpistrat
from mpistrat import absent, data

ADVICE = [
    *((mpistrat, name, advice) for name, advice in absent.OF_DISTRIBUTE.items()),
    *((data, name, advice) for name, advice in absent.OF_DATA.items()),
]


@pytest.mark.parametrize(("module", "name", "advice"), ADVICE, ids=lambda x: x if isinstance(x, str) else "")
def test_advice(module, name, advice):
    with pytest.raises(AttributeError, match=re.escape(f"{module.__name__} has no {name!r}: use {advice}")):
        getattr(module, name)
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    objects = {"mpistrat": mpistrat, "strategy": strategy}
    for root, path in re.findall(r"\b(mpistrat|strategy)((?:\.\w+)+)", advice):
        functools.reduce(getattr, path[1:].split("."), objects[root])  # what the advice names is there
    for method in re.findall(r"get_replica_context\(\)\.(\w+)", advice):
        assert hasattr(mpistrat.ReplicaContext, method)


@pytest.mark.parametrize("module", [mpistrat, data])
def test_a_name_that_no_library_has(module):
    with pytest.raises(AttributeError, match=f"^{module.__name__} has no 'Bicycle'$"):
        operator.attrgetter("Bicycle")(module)
    with pytest.raises(ImportError):
        exec(f"from {module.__name__} import Bicycle")


def test_a_typing_error_is_answered_by_python():
    program = "import mpistrat; mpistrat.MiroredStrategy"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Did you mean: 'MirroredStrategy'?" in done.stderr


@pytest.mark.parametrize(
    ("module", "name", "imported"),
    [
        ("mpistrat", "MirroredStrategy", "mpistrat.strategies"),
        ("mpistrat.data", "Dataset", "mpistrat.data.dataset"),
    ],
)
def test_an_error_of_an_import_is_not_hidden(module, name, imported):
    program = f"""
import importlib, sys, types
class Broken(types.ModuleType):
    def __getattr__(self, name):
        raise AttributeError("the cause")
module = importlib.import_module({module!r})
sys.modules[{imported!r}] = Broken({imported!r})
module.{name}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "AttributeError: the cause"
