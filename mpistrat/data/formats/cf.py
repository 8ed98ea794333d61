"""Values as the CF conventions of netCDF mean them: packed, unsigned and missing ones, booleans, times and texts.

Decoded as by ``xarray.open_dataset``, to the same dtypes. What xarray makes Python objects, except texts, raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.records import Attributes, Column, varying
from mpistrat.data.rows.spec import native

_FILLS, _PACKED, _NAMES = (
    ("missing_value", "_FillValue"),
    ("scale_factor", "add_offset"),
    ("units", "calendar", "dtype"),
)
USED = (*_FILLS, *_PACKED, *_NAMES, "_Unsigned")
_SPANS = {f"timedelta64[{unit}]": 1000**i for i, unit in enumerate(("ns", "us", "ms", "s"))}
_UNITS = ("nanoseconds", "microseconds", "milliseconds", "seconds", "minutes", "hours", "days")
_NANOSECONDS = dict(zip(_UNITS, (*_SPANS.values(), 60 * 10**9, 3600 * 10**9, 86400 * 10**9), strict=True))
_CLOCK = r"[T ]+(\d\d?):(\d\d?)(?::(\d\d?)(?:\.(\d{1,6})0*)?)?"
# Without a clock, xarray takes +1 for nothing.
_ZONE = r"Z|UTC|GMT|([+-])(\d\d?):?(\d\d)?"
_DATE = re.compile(rf"(\d{{4}})-(\d\d?)-(\d\d?)(?:{_CLOCK}|(?!\s*[+-]\d\d?$))\s*(?:{_ZONE})?")
_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
_MISSING = np.iinfo(np.int64).min  # as an integer, NaT
_MOST = 9.2e18  # of an int64


def decoded(column: Column, attributes: Mapping[str, Any], where: str) -> Column:
    """Return the description of a column whose stored values are decoded by these attributes."""
    stored = native(column.stored)
    used = _meaning({name: _plain(value) for name, value in attributes.items()}, stored, where)
    if not used:
        return column
    meaning = "" if "units" in dict(used) else column.meaning  # files may count times from other dates
    return column._replace(dtype=decode(np.empty(0, stored), used, where).dtype, attributes=used, meaning=meaning)


def _meaning(attributes: dict[str, Any], stored: np.dtype, where: str) -> Attributes:
    """Return the attributes that change what values of a dtype mean."""
    if varying(stored) is str and not any(name in attributes for name in _FILLS):
        return (("_Encoding", "utf-8"),)
    # Without NaN, which is the missing value of floats anyway.
    fills = {name: fill[fill == fill] for name in _FILLS if name in attributes for fill in [np.ravel(attributes[name])]}
    meaning = {name: fill for name, fill in fills.items() if len(fill) or stored.kind not in "iu"}
    packed = {name: attributes[name] for name in _PACKED if name in attributes}
    meaning = {**meaning, **packed} if packed or any(map(len, meaning.values())) else {}
    kinds = [stored.kind, *(np.asarray(value).dtype.kind for value in meaning.values())]
    if meaning and not (set(kinds) <= set("iuf") and all(np.size(value) == 1 for value in packed.values())):
        _refuse(where, f"values of the type {stored} have {meaning}")
    unsigned = attributes.get("_Unsigned")
    if unsigned is not None and stored.kind in "iu":
        if unsigned not in ("true", "false"):
            _refuse(where, f"_Unsigned is {unsigned!r}, neither 'true' nor 'false'")
        if (unsigned == "true") == (stored.kind == "i"):
            meaning["_Unsigned"] = unsigned
            if "_FillValue" in meaning:  # not missing_value, as in xarray
                meaning["_FillValue"] = meaning["_FillValue"].astype(stored).view(_other_sign(stored))
    units, calendar, dtype = (str(attributes.get(name, "")) for name in _NAMES)
    if stored.kind in "iuf" and ("since" in units or (units in _NANOSECONDS and (meaning or dtype in _SPANS))):
        meaning |= {"units": units, "calendar": calendar.lower() or "standard"}
    if dtype == "bool" and "units" in meaning:
        _refuse(where, f"truth values have the units {units!r}")
    if dtype == "bool" or (dtype in _SPANS and "units" in meaning):
        meaning["dtype"] = dtype
    return tuple(meaning.items())


def decode(values: np.ndarray, attributes: Attributes, where: str) -> np.ndarray:
    """Return what stored values mean. Raise DataFileError if no dtype of NumPy can hold it."""
    by_name = dict(attributes)
    if "_Encoding" in by_name:
        try:
            texts = [text.decode() if isinstance(text, bytes) else text for text in values.flat]
        except UnicodeDecodeError as error:
            _refuse(where, f"a text is not UTF-8 ({error})")
        return np.array(texts, object).reshape(values.shape)
    fills = [fill for name in _FILLS for fill in by_name.get(name, ())]
    packed, units, dtype = any(name in by_name for name in _PACKED), by_name.get("units", ""), by_name.get("dtype", "")
    if "_Unsigned" in by_name:
        values = values.view(_other_sign(values.dtype))
    whole = values.dtype.kind in "iu"
    if fills:
        missing: Any = np.nan
        if packed:
            kind = _float_of(values.dtype, by_name)
        elif whole and units:
            kind, missing = np.dtype(np.int64), _MISSING
        else:
            kind = np.dtype(np.float32 if values.dtype.itemsize <= 2 else np.float64) if whole else values.dtype
        if kind.kind in "iu" and (packed or ("since" not in units and dtype not in _SPANS)):
            _refuse(where, f"integers with a fill value and the units {units!r} have no value for a missing one")
        values = values.astype(kind)
        values[np.logical_or.reduce([values == fill for fill in fills])] = missing
    if packed:
        same = any(name in by_name for name in _FILLS) and not units
        values = values.astype(values.dtype if same else _float_of(values.dtype, by_name))
        for name, apply in zip(_PACKED, (np.multiply, np.add), strict=True):
            if name in by_name:
                number = by_name[name]
                apply(values, number[0] if isinstance(number, np.ndarray) else number, out=values)
    if "since" in units:
        return _dates(values, units, by_name["calendar"], where)
    if dtype in _SPANS:
        if values.dtype.kind == "f" or _NANOSECONDS[units] < _SPANS[dtype]:  # xarray's dtype depends on the values
            _refuse(where, f"{dtype} of {units} that are {values.dtype}")
        return _counted(values, _NANOSECONDS[units], _SPANS[dtype], 0, where)
    return values.astype(bool) if dtype else values


def _dates(values: np.ndarray, units: str, calendar: str, where: str) -> np.ndarray:
    unit, _, date = (text.strip() for text in units.rpartition(" since "))
    scale, match = _NANOSECONDS.get(unit.lower().removesuffix("s") + "s"), _DATE.fullmatch(date)
    try:
        # The years that datetime64[ns] has as wholes. Others raise IndexError below.
        *parts, sign, hours, minutes = match.groups("0") if match and 1678 <= int(match[1]) <= 2261 else ("0",) * 3
        begin = np.datetime64("{}-{:0>2}-{:0>2}T{:0>2}:{:0>2}:{:0>2}.{}".format(*parts), "ns")
        begin -= int(f"{sign}1") * np.timedelta64(60 * int(hours) + int(minutes), "m")  # to UTC
    except (IndexError, ValueError):  # another text, or a day that no month has
        scale = None
    if scale is None or calendar not in _CALENDARS:
        _refuse(where, f"datetime64[ns] does not hold all {units!r} of the calendar {calendar!r}")
    return begin + _counted(values, scale, 1, int(begin.astype(np.int64)), where)


def _counted(values: np.ndarray, scale: int, unit: int, begin: int, where: str) -> np.ndarray:
    """Return times in units of ``unit`` ns from counts of ``scale`` ns."""
    floats = values.dtype.kind == "f"
    gone = np.isnan(values) if floats else values == _MISSING
    counts = np.where(gone, 0, values)
    # Compared as floats: integers would wrap around.
    if (np.abs(counts * np.float64(scale // unit) + begin) > _MOST).any():
        _refuse(where, f"a time is out of the range of 64 bits, in units of {unit} ns")
    counts = (counts.astype(np.float64 if floats else np.int64) * (scale // unit)).astype(np.int64)
    counts[gone] = _MISSING
    return counts.view(next(name for name, its in _SPANS.items() if its == unit))


def _float_of(dtype: np.dtype, attributes: dict[str, Any]) -> np.dtype:
    """Return the dtype of unpacked values, as xarray chooses it."""
    scale, offset = (np.asarray(attributes[name]).dtype if name in attributes else None for name in _PACKED)
    if scale is not None and scale == offset and scale in (np.float32, np.float64):
        return np.dtype(np.float64) if dtype.kind in "iu" and dtype.itemsize == 4 else scale
    return np.dtype(np.float64) if scale is None or offset is not None else scale


def _other_sign(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{'u' if dtype.kind == 'i' else 'i'}{dtype.itemsize}")


def _plain(value: Any) -> Any:
    """Return an attribute as a text, an array of one axis or a number of Python: HDF5 and JSON differ in these."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.ravel(value)
        alone = value.dtype.kind in "SUO" and len(value) == 1
        return _plain(value.tolist()[0]) if alone else value.astype(native(value.dtype))
    return value


def _refuse(where: str, message: str) -> NoReturn:
    raise DataFileError(f"{where}: {message}; fix: decode=False gives what is stored")
