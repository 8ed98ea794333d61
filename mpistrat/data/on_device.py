"""Batches on their way to a replica's GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.runtime import pinned
from mpistrat.runtime.device import Device, cupy_for

_KINDS = "biufc"
_FURTHER = ("bfloat16",)


def fetched(batch: Any, device: Device) -> Any:
    """A batch with its arrays of numbers on a device, there when this returns; other things as they are.

    Through pinned memory and on a stream of its own, so that a thread that reads ahead copies while the program
    computes.
    """
    if device.kind == "cpu":
        return batch

    def copied(value: Any) -> Any:
        if type(value) is not np.ndarray or not (value.dtype.kind in _KINDS or value.dtype.name in _FURTHER):
            return value
        return pinned.upload(value, device.index, wait=True)

    return nest.map_structure(copied, batch)


def handed_over(batch: Any, device: Device) -> Any:
    """A batch that another thread fetched, for work in the caller's stream.

    Its memory is that of the default stream: it is used again once it is given up there. Work in another stream may
    not be done by then, and gets a copy that belongs to that stream.
    """
    if device.kind == "cpu":
        return batch
    cupy = cupy_for("a batch")
    with cupy.cuda.Device(device.index):
        stream = cupy.cuda.get_current_stream()
        if stream.ptr == 0:
            return batch
        copies = nest.map_structure(
            lambda value: value.copy() if type(value) is cupy.ndarray else value, batch
        )
        stream.synchronize()
    return copies
