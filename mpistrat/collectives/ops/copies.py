"""The cross-device ops of a single replica, whose values are the results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.ops.default import CollectiveAllReduce
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.values import snapshot


class Copies(CollectiveAllReduce):
    """The cross-device ops of the default strategy, whose one replica may reduce objects of any type."""

    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        """Return copies of the values, and buffers themselves: buffers are reduced where they are."""
        arenas = self._arenas
        return [each if id(getattr(each, "base", None)) in arenas else snapshot(each) for each in values]

    def joins_arrays(self, options: CommunicationOptions) -> bool:
        """Return False: values are copied one by one."""
        return False
