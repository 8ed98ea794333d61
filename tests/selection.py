"""The choice of parameters with which the core runs a test that has many."""

from collections.abc import Iterable
from typing import Any

import pytest


def core(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters: of the core those that are named, of the rest all others."""
    values = list(values)
    assert set(quick) <= set(values)
    return [pytest.param(value, marks=() if value in quick else pytest.mark.full) for value in values]
