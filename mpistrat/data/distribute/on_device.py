"""Copies of batches to a replica's GPU, made ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.runtime.device import Device
from mpistrat.runtime.gpu.feed import Sent, feed, received

_KINDS = "biufc"
_FURTHER = ("bfloat16",)


class OnItsWay(NamedTuple):
    """A batch whose arrays of numbers are being copied to a GPU.

    Attributes
    ----------
    leaves : list
        The leaves of the batch, with None in place of each array that is copied.
    rebuild : callable
        Makes the batch from its leaves.
    sent : Sent
        The arrays that are being copied.
    """

    leaves: list[Any]
    rebuild: Callable[[list[Any]], Any]
    sent: Sent


def fetched(batch: Any, device: Device) -> Any:
    """Start the copy of a batch to a device, and return what `handed_over` takes; on the host, the batch itself.

    A thread that reads ahead continues with the next batch while this one is copied and the GPU computes.
    """
    if device.kind == "cpu":
        return batch
    leaves, rebuild = nest.flatten(batch)
    copied = [each for each in leaves if _goes(each)]
    with feed(device.index) as stream:
        sent = stream.send(copied)
    return OnItsWay([None if _goes(each) else each for each in leaves], rebuild, sent)


def handed_over(batch: Any, device: Device) -> Any:
    """Return a batch that was fetched, ready for the caller's stream; on a GPU its arrays are CuPy arrays."""
    if device.kind == "cpu":
        return batch
    arrived = iter(received(batch.sent))
    return batch.rebuild([next(arrived) if each is None else each for each in batch.leaves])


def _goes(value: Any) -> bool:
    return type(value) is np.ndarray and (value.dtype.kind in _KINDS or value.dtype.name in _FURTHER)
