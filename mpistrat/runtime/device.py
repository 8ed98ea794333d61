"""Devices by name."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(
    r"^(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+|\*))?$"
)
_KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


class Device(NamedTuple):
    """A device of this rank's node.

    Attributes
    ----------
    kind : str
        ``"cpu"`` or ``"cuda"``.
    index : int
        Which of its kind, among those this process sees.

    Examples
    --------
    >>> str(Device.parse("/gpu:1"))
    'cuda:1'
    >>> Device.parse("cpu:0").kind
    'cpu'
    """

    kind: str
    index: int = 0  # type: ignore[assignment]  # the field hides tuple.index, which nobody needs

    @classmethod
    def parse(cls, name: str | Device) -> Device:
        """The device called ``"cpu:0"``, ``"cuda:1"``, ``"/gpu:1"``, ``"GPU:1"`` or the like.

        Raises
        ------
        TypeError
            If ``name`` is neither a string nor a device.
        ValueError
            If it is no name of a device.
        """
        if isinstance(name, Device):
            return name
        if not isinstance(name, str):
            raise TypeError(f"a device is named by a string such as 'cpu:0' or 'cuda:1', not {name!r}")
        match = _NAME.match(name.strip())
        if match is None or match["kind"].lower() not in _KINDS:
            raise ValueError(f"{name!r} names no device: use 'cpu:0', 'cuda:1', '/gpu:1' or 'GPU:1'")
        index = match["index"]
        return cls(_KINDS[match["kind"].lower()], 0 if index in (None, "*") else int(index))

    def require(self) -> Device:
        """This device, if it is there.

        Raises
        ------
        RuntimeError
            If it is not: the text says what is missing.
        """
        if self.kind == "cuda":
            try:
                import cupy  # noqa: F401  # is there or not
            except ImportError as error:
                raise RuntimeError(
                    f"device {self} needs CuPy: pip install 'mpistrat[cuda12]' or 'mpistrat[cuda13]'"
                ) from error
            raise RuntimeError(
                f"device {self} cannot be used: this version keeps variables and reduces on the host. Use 'cpu:0'; "
                "arrays of CuPy and other libraries are taken, and given back as what they were"
            )
        return self

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"
