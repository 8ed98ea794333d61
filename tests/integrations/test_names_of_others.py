"""Every name of a library that this one follows is here, or an error says what to use."""

import importlib
import inspect

import pytest

from mpistrat import absent, metrics, optimizers
from mpistrat.data import Dataset

# Where a library has names, where this one would have them, and its table of others.
PLACES = {
    "keras.metrics": (metrics, absent.OF_METRICS),
    "keras.optimizers": (optimizers, absent.OF_OPTIMIZERS),
    "torch.optim": (optimizers, absent.OF_OPTIMIZERS),
    "keras.optimizers.Optimizer": (optimizers.Adam, absent.OF_OPTIMIZER),
    "torch.optim.Optimizer": (optimizers.Adam, absent.OF_OPTIMIZER),
    "tensorflow.data.Dataset": (Dataset, absent.OF_DATASET),
}
# Names that no program of theirs writes: of the library's own machinery.
OTHERS = {
    "torch.optim.Optimizer": {"OptimizerPreHook", "OptimizerPostHook", "profile_hook_step"},
    "keras.optimizers.Optimizer": set(),
}


def find(place):
    """A module or a class by its path; without its library the test is skipped."""
    module, _, name = place.rpartition(".")
    if name[0].isupper():
        return getattr(find(module), name)
    try:
        return importlib.import_module(place)
    except (ImportError, ValueError):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            pytest.skip(f"{module.partition('.')[0]} is not installed")


def names(owner):
    """The public names of a module or class that it or its library defines."""
    for name in dir(owner):
        value = inspect.getattr_static(owner, name)
        if name.startswith("_") or (inspect.ismodule(value) and not hasattr(value, "__path__")):
            continue
        yield name


@pytest.mark.parametrize("place", PLACES)
def test_names(place, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    mine, table = PLACES[place]
    theirs = set(names(find(place))) - OTHERS.get(place, set())
    assert len(theirs) > 5
    unknown = {name for name in theirs if not hasattr(mine, name) and name not in table}
    assert unknown == set()
