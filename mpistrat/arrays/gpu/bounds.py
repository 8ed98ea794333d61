"""Upper bounds of the bandwidth of a GPU's memory and of its link to the host, and the cores next to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mpistrat.arrays.device import cupy_for

_SYSTEM = Path("/sys/bus/pci/devices")
_FOR_BYTES = ((60, 242 / 256), (8, 128 / 130), (0, 8 / 10))  # (least GT/s, fraction that is payload)


class Bounds(NamedTuple):
    """Bandwidths of a GPU in bytes per second, None where unknown."""

    memory: float | None  # bytes read plus bytes written
    link: float | None  # one direction, to the host or from it. Both directions at once carry twice as much.
    link_name: str  # such as ``"PCIe 32 GT/s x16"``; empty where unknown

    def __str__(self) -> str:
        said = [] if self.memory is None else [f"memory {self.memory / 1e9:.0f} GB/s"]
        if self.link is not None:
            said.append(f"{self.link_name} {self.link / 1e9:.0f} GB/s each way")
        return ", ".join(said) or "bounds unknown"


def bounds(device: int) -> Bounds:
    """Return the bounds of a GPU that this process sees. An idle link is slow: its full speed counts."""
    runtime = cupy_for("bounds of a GPU").cuda.runtime
    try:
        # Two transfers for each clock tick.
        kilohertz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, device)
        bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, device)
        memory = 2e3 * kilohertz * bits / 8 or None
    except (runtime.CUDARuntimeError, AttributeError):  # a driver or a CuPy without this attribute
        memory = None
    link, name = _link(runtime.deviceGetPCIBusId(device).lower())
    return Bounds(memory, link, name)


def near_cores(device: int) -> frozenset[int]:
    """Return the cores of the NUMA node to which a GPU is attached; none if the system does not tell."""
    bus_id = cupy_for("cores near a GPU").cuda.runtime.deviceGetPCIBusId(device).lower()
    try:
        parts = (_SYSTEM / bus_id / "local_cpulist").read_text().strip().split(",")
    except OSError:
        return frozenset()
    ends = [part.split("-") for part in parts if part]
    return frozenset(core for each in ends for core in range(int(each[0]), int(each[-1]) + 1))


def _link(bus_id: str) -> tuple[float | None, str]:
    try:
        speed = (_SYSTEM / bus_id / "max_link_speed").read_text()
        lanes = int((_SYSTEM / bus_id / "current_link_width").read_text())
    except (OSError, ValueError):
        return None, ""
    found = re.match(r"([\d.]+) GT/s", speed)
    if found is None or not 0 < lanes <= 32:
        return None, ""
    transfers = float(found[1])
    return link_bandwidth(transfers, lanes), f"PCIe {transfers:g} GT/s x{lanes}"


def link_bandwidth(transfers: float, lanes: int) -> float:
    """Return the bytes per second, in one direction, of a PCI Express link with lanes of ``transfers`` GT/s.

    >>> f"{link_bandwidth(32, 16):.3g}"
    '6.3e+10'
    """
    left = next(left for least, left in _FOR_BYTES if transfers >= least)
    return transfers * 1e9 / 8 * lanes * left
