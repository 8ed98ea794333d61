"""Batches of datasets that no strategy distributes: with ``rc.debug`` a warning if a replica function gets one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from mpistrat import nest

arrays: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()
"""The arrays that exist of such batches, by their ``id``. Empty without ``rc.debug``."""


def record_arrays(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, and note their arrays."""
    for batch in batches:
        for leaf in nest.flatten(batch)[0]:
            if isinstance(leaf, np.ndarray):
                # The dictionary drops an array with its last reference, before another gets its id.
                arrays[id(leaf)] = leaf
        yield batch


def warn_of(arguments: Any, replica: int, replicas: int) -> None:
    """Warn if an argument of a replica function is an array of such a batch, and there are other replicas."""
    if replicas > 1 and any(arrays.get(id(leaf)) is leaf for leaf in nest.flatten(arguments)[0]):
        warnings.warn(
            f"replica {replica}: `run` gets a batch of a dataset that is not distributed, so each of the {replicas} "
            "replicas computes on all of its rows: iterate over strategy.experimental_distribute_dataset(dataset)",
            RuntimeWarning,
            stacklevel=3,
        )
