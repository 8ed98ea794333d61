"""The arrays of HDF5, npz and safetensors files, one at a time. Sizes that a file cannot hold are errors."""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpistrat.data.errors import DataFileError, check_bytes, what_it_is
from mpistrat.data.formats.contract import needed
from mpistrat.data.formats.npy import header
from mpistrat.data.rows.spec import in_native_order
from mpistrat.process.files import appearing
from mpistrat.training.checkpoint import names
from mpistrat.training.checkpoint.format import dtype_of
from mpistrat.training.checkpoint.read import described, read
from mpistrat.training.checkpoint.write import write

_MOST_HEADER = 12 << 10  # bytes of an npy header: NumPy takes 10,000 characters
_KINDS = ("bool", "int", "uint", "float", "complex", "bfloat16", "bytes")
_OF_SAFETENSORS = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"} | {
    f"{name[0].upper()}{bits}": f"{name}{bits}" for name in ("int", "uint", "float") for bits in (8, 16, 32, 64)
}


class ArrayEntry(NamedTuple):
    """An array of a file. ``checksum`` describes the checksums that the file has of it, and is empty without any."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str


class ArrayFile(NamedTuple):
    """A file of arrays."""

    path: Path
    kind: str
    entries: dict[str, ArrayEntry]
    load: Callable[[str], np.ndarray]

    def array(self, name: str) -> np.ndarray:
        """Return an array, compared with its checksums. Raise DataFileError if it is damaged, or not of numbers."""
        if not self.has_numbers(name):
            reason = f"it is of dtype {self.entries[name].dtype}, and only numbers are read"
            raise DataFileError(f"file {str(self.path)!r}, array {name!r}: {reason}")
        with _errors_of(self.path, name):
            return self.load(name)

    def has_numbers(self, name: str) -> bool:
        """Return whether an array is of a dtype that can be read."""
        return self.entries[name].dtype.startswith(_KINDS)


def arrays_of(path: Path) -> ArrayFile:
    """Open a file of the format that its first bytes tell. Raise OSError or DataFileError if it cannot be read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with open(path, "rb") as file:
        first = file.read(10)
    with _errors_of(path):
        if first.startswith(b"PK"):
            return _npz(path)
        if path.suffix == ".safetensors" or first[8:] == b'{"':  # JSON, behind its length in 8 bytes
            return _safetensors(path)
        if what_it_is(str(path)) and not first.startswith(b"\x89HDF"):
            raise DataFileError.of_file(str(path), what_it_is(str(path)))
        return _hdf5(path)


@contextlib.contextmanager
def _errors_of(path: Path, name: str = "") -> Iterator[None]:
    """Turn the errors of libraries, which answer damage with errors of any kind, into DataFileError."""
    try:
        yield
    except (DataFileError, ImportError):
        raise
    except Exception as error:
        location = f"file {str(path)!r}" + (f", array {name!r}" if name else "")
        reason = f"it cannot be read ({error or type(error).__name__})"
        raise DataFileError(f"{location}: {reason}; fix: copy or write it again") from None


def _hdf5(path: Path) -> ArrayFile:
    arrays = described(path)

    def load(name: str) -> np.ndarray:
        dtype, shape, _ = arrays[name]
        into = np.empty(shape, dtype)
        read({name: into}, path)
        return into

    entries = {
        name: ArrayEntry(dtype.name, shape, math.prod(shape) * dtype.itemsize, f"XXH3 x {count}" if count else "")
        for name, (dtype, shape, count) in arrays.items()
    }
    return ArrayFile(path, "HDF5", entries, load)


def _npz(path: Path) -> ArrayFile:
    entries: dict[str, ArrayEntry] = {}

    def load(name: str) -> np.ndarray:
        with np.load(path, allow_pickle=False) as archive:
            value = in_native_order(np.asarray(archive[name], order="C"))
        return value.view(dtype_of("bfloat16")) if value.dtype.kind == "V" else value

    with zipfile.ZipFile(path) as archive:
        if "model.weights.h5" in archive.namelist():
            raise DataFileError(
                f"file {str(path)!r}: it is a model of Keras, whose weights are an HDF5 file inside: unpack it by "
                f"`python -m zipfile -e {path} FOLDER`, and give FOLDER/model.weights.h5"
            )
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with _errors_of(path, name):
                with archive.open(info) as member:
                    head = io.BytesIO(member.read(_MOST_HEADER))
                shape, _, dtype = header(head)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or name == info.filename or name in entries:
                    raise ValueError("it holds Python objects, is there twice, or is not named NAME.npy")
                if min(shape, default=0) < 0 or head.tell() + size != info.file_size:
                    raise ValueError(f"it has {info.file_size} bytes for shape {shape} of {dtype}")
                if info.compress_type != zipfile.ZIP_STORED:
                    check_bytes(size, f"file {str(path)!r}, array {name!r}", "it")
                elif info.file_size > path.stat().st_size:
                    raise ValueError(f"it has {info.file_size} bytes, more than the file")
                kind = "bfloat16" if dtype == np.dtype("V2") else dtype.name  # NumPy writes bfloat16 as V2
                entries[name] = ArrayEntry(kind, shape, size, f"CRC-32 {info.CRC:08x}")
    return ArrayFile(path, "npz", entries, load)


def _safetensors(path: Path) -> ArrayFile:
    library = needed("safetensors", "safetensors files")

    def load(name: str) -> np.ndarray:
        with library.safe_open(path, framework="np") as file:
            return np.asarray(file.get_tensor(name))

    def entry(tensor: Any) -> ArrayEntry:
        kind, shape = str(tensor.get_dtype()), tuple(tensor.get_shape())
        dtype = _OF_SAFETENSORS.get(kind)
        size = math.prod(shape) * dtype_of(dtype).itemsize if dtype else 0
        return ArrayEntry(dtype or kind, shape, size, "")

    with library.safe_open(path, framework="np") as file:
        entries = {name: entry(file.get_slice(name)) for name in sorted(file.keys())}
    return ArrayFile(path, "safetensors", entries, load)


def write_arrays(values: Mapping[str, np.ndarray], path: Path, kind: str) -> None:
    """Write arrays to a new file, whole or not at all. Raise ValueError or TypeError if it cannot hold them."""
    with appearing(path, replace=False) as temporary:
        if kind == "HDF5":
            write(names.named(dict(values)), temporary)
        elif kind == "npz":
            with zipfile.ZipFile(temporary, "w") as archive:
                for name, value in values.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # else 2 GiB at most
                        np.lib.format.write_array(member, value, allow_pickle=False)
        else:
            library = needed("safetensors.numpy", "safetensors files")
            try:
                library.save_file(dict(values), temporary)
            except Exception as error:  # the library's own class is a plain Exception
                raise ValueError(f"{path}: {error}") from None


def statistics(value: np.ndarray) -> dict[str, float | None]:
    """Return counts of all elements, and statistics of the finite ones; of complex numbers, of magnitudes."""
    if value.dtype.kind == "S":
        return {"elements": value.size}
    real = np.abs(value) if value.dtype.kind == "c" else value.astype("f8")
    finite = real[np.isfinite(real)]
    result: dict[str, float | None] = {"elements": value.size, "zeros": int(np.count_nonzero(real == 0))}
    result |= {"nan": int(np.isnan(real).sum()), "infinite": int(np.isinf(real).sum())}
    with np.errstate(over="ignore", invalid="ignore"):
        for name in ("min", "max", "mean", "std"):
            result[name] = _finite(getattr(finite, name)()) if finite.size else None
    return result


def difference(one: np.ndarray, other: np.ndarray) -> tuple[int, float | None]:
    """Return how many elements differ, and the largest difference of elements that are finite in both."""
    kinds = one.dtype.kind + other.dtype.kind
    if "S" in kinds:
        return int(np.count_nonzero(one != other)) if kinds == "SS" else one.size, None
    # Long doubles have more bits than float64.
    least = np.dtype("c16" if "c" in kinds else "f8")
    wide = np.result_type(least, *(array.dtype for array in (one, other) if array.dtype.kind in "fc"))
    x, y = one.astype(wide), other.astype(wide)
    unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if {*kinds} <= {*"iub"}:  # float64 would round
        unequal = one != other
    both = unequal & np.isfinite(x) & np.isfinite(y)
    with np.errstate(over="ignore"):
        largest = _finite(np.abs(x[both] - y[both]).max()) if both.any() else None
    return int(np.count_nonzero(unequal)), largest


def _finite(number: Any) -> float | None:  # JSON has no NaN and no infinity
    return float(number) if np.isfinite(number) else None
