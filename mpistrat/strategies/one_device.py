"""The strategy with one replica on one device."""

from __future__ import annotations

from mpistrat.arrays.device import Device
from mpistrat.strategy import Strategy
from mpistrat.strategy.extended import LocalExtended


class OneDeviceStrategy(Strategy):
    """One replica on the named device: to try a program, or to run it on one rank of many.

    Parameters
    ----------
    device : str
        Name of the device, such as ``"cpu:0"`` or ``"/gpu:0"``.

    Raises
    ------
    ValueError, TypeError
        If ``device`` is not the name of a device.
    RuntimeError
        If this process does not see the device.

    Examples
    --------
    >>> strategy = OneDeviceStrategy("cpu:0")
    >>> strategy.run(lambda x: x + 1, args=(1,))
    2
    """

    def __init__(self, device: str):
        super().__init__(LocalExtended(self, device=Device.parse(device).require()))
