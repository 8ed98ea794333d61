"""Buffers that reductions change in place, for nested structures of arrays."""

from __future__ import annotations

from typing import Any

from mpistrat import nest
from mpistrat.collectives import structures
from mpistrat.collectives.arenas.arena import buffers
from mpistrat.runtime import arrays
from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology
from mpistrat.values import component


def buffers_like(tree: Any, topology: Topology, own: Device) -> Any:
    """Return zeroed arrays of the same shapes and dtypes, in memory that the ranks of a node share. Collective.

    Parameters
    ----------
    tree : array, variable, or nested structure of these
    topology : Topology
    own : Device
        The device of this rank.

    Raises
    ------
    ValueError
        On every rank, if structures, shapes or dtypes differ between ranks, or some arrays live on a GPU.
    TypeError
        If an array holds Python objects.
    """
    leaves, rebuild, form = nest.take_apart(tree)
    with structures.refusals("experimental_buffers_like", topology):
        for each in leaves:
            arrays.refuse_masked(component(each))
        like = [arrays.dtype_and_shape(each) for each in leaves]
        on_gpu = [arrays.to_cupy(component(each)) for each in leaves if arrays.on_gpu(component(each))]
        if on_gpu and len(on_gpu) < len(leaves):
            raise ValueError(
                f"{len(on_gpu)} of {len(leaves)} arrays live on a GPU: make the buffers of these apart from the others"
            )
        device = arrays.require_one_device(on_gpu, own) if on_gpu else Device("cpu")
    made = buffers(topology, like, device, form)
    return rebuild([arrays.buffer_like(*each) for each in zip(made, leaves, strict=True)])
