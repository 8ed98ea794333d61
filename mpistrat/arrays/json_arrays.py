"""NumPy arrays, numbers and texts in JSON, bit by bit."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_text(value: Any) -> bool:
    """Return whether a value is a text that JSON gives back as it was: it makes one character of two surrogates."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def exact(value: int | str, most_bits: int, mark: str = "") -> Any:
    """Return an integer or a text as JSON gives it back, in a dict with a key that begins with ``mark`` if need be.

    Python reads at most 4,300 decimal digits: integers of more than ``most_bits`` are written in hexadecimal ones.

    >>> exact(1 << 70, 64), restored(exact(1 << 70, 64)) == 1 << 70
    ({'int': '0x400000000000000000'}, True)
    """
    if isinstance(value, str):
        return value if is_text(value) else {f"{mark}text": value.encode("utf-32-le", "surrogatepass").hex()}
    return value if value.bit_length() <= most_bits else {f"{mark}int": hex(value)}


def restored(fields: dict[str, Any], mark: str = "") -> Any:
    """Return the integer or text of a dict that `exact` has made; another dict as it is."""
    if fields.keys() == {f"{mark}int"}:
        return int(fields[f"{mark}int"], 16)
    if fields.keys() == {f"{mark}text"}:
        return bytes.fromhex(fields[f"{mark}text"]).decode("utf-32-le", "surrogatepass")
    return fields


def packed(value: np.ndarray | np.generic) -> dict[str, Any]:
    """Return an array, or a number of NumPy, as a dict for JSON. Raise TypeError if it is not of plain numbers.

    Examples
    --------
    >>> packed(np.array([1.0, 2.0], np.float16))
    {'array': 'ADwAQA==', 'dtype': '<f2', 'shape': [2]}
    >>> unpacked(_)
    array([1., 2.], dtype=float16)
    """
    if value.dtype.kind not in "biufc":
        raise TypeError(f"JSON keeps arrays of numbers, not of {value.dtype}")
    data = base64.b64encode(value.tobytes()).decode()  # tobytes() copies in C order
    shape = None if isinstance(value, np.generic) else list(value.shape)
    return {"array": data, "dtype": value.dtype.str, "shape": shape}


def unpacked(fields: dict[str, Any]) -> Any:
    """Return what was `packed`, in memory of its own. Raise ValueError for anything else, as of a damaged file."""
    try:
        dtype = np.dtype(fields["dtype"])
        if dtype.kind not in "biufc":  # an array of objects would be made of the bytes of a file
            raise ValueError(f"an array of {dtype}")
        array = np.frombuffer(bytearray(base64.b64decode(fields["array"], validate=True)), dtype)
        return array[0] if fields["shape"] is None else array.reshape(fields["shape"])
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"not an array in JSON ({error!r})") from None
