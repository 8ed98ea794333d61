"""Calls of the functions given to ``map`` for single rows, one after another or in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

from mpistrat import context
from mpistrat.data.pipeline.transforms import Map
from mpistrat.data.rows import elements
from mpistrat.runtime.agreement import threads


def mapped_rows(rows: Iterable[Any], maps: Sequence[Map]) -> list[Any]:
    """Return rows after all functions, in order.

    Neighbouring functions with the same number of calls are called row by row.
    """
    found = [*rows]
    for calls, same in groupby(maps, lambda each: each.calls):
        functions = [each.fn for each in same]
        if calls == 1 or len(found) < 2:
            found = [elements.mapped(row, functions) for row in found]
        else:
            call = partial(_in_thread, [*context.stack()], functions)
            with ThreadPoolExecutor(min(calls, len(found)), "mpistrat-map") as pool:
                found = [*pool.map(call, found)]
    return found


def _in_thread(modes: list[context.Mode], functions: Sequence[Any], row: Any) -> Any:
    """Return a row after some functions, with the strategy of the caller and without collectives."""
    mine = context.stack()
    before = mine[:]
    mine[:] = modes
    this = threading.get_ident()
    threads.without.setdefault(this, threads.MAKES_A_BATCH)
    try:
        return elements.mapped(row, functions)
    finally:
        threads.without.pop(this, None)
        mine[:] = before
