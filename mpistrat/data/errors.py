"""Errors in data files, and the limits at which they are raised.

Every message says which file and dataset, what is wrong, and what to do. An error that is found while the
files are described raises on every rank. An error that is found while rows are read raises on the rank that
reads them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from mpistrat.process import failure
from mpistrat.runtime.environment import rc


class DataFileError(RuntimeError):
    """A file that cannot be read: not HDF5, truncated, empty, vanished or changed.

    Attributes
    ----------
    path, what : str or None
        The file, and what is wrong with it. None if the error concerns a dataset of a file, or several files.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from mpistrat.data import Dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.h5"
    ...     _ = pathlib.Path(path).write_bytes(b"no HDF5 file")
    ...     try:
    ...         Dataset.from_hdf5(path, "x")
    ...     except DataFileError as error:
    ...         print(str(error).partition(";")[0].replace(folder, "..."))
    file '.../a.h5': it is not an HDF5 file (12 bytes)
    """

    path: str | None = None
    what: str | None = None

    @classmethod
    def of_file(cls, path: str, what: str) -> DataFileError:
        """Return the error that concerns a whole file."""
        error = cls(f"file {path!r}: {what}")
        error.path, error.what = path, what
        return error

    @classmethod
    def unreadable(cls, path: str, error: OSError) -> DataFileError:
        """Return the error for a file that the system cannot open or read."""
        return cls.of_file(path, f"it cannot be read ({error.strerror}); fix: bring it back")

    def in_dataset(self, name: str) -> DataFileError:
        """Return this error with the name of a dataset added, if it concerns a whole file."""
        if self.path is None:
            return self
        return type(self)(f"file {self.path!r}, dataset {name!r}: {self.what}")


class ChecksumError(DataFileError):
    """A stored checksum that does not match the data of a dataset.

    Examples
    --------
    >>> import h5py, pathlib, tempfile, numpy as np
    >>> from mpistrat.data import Dataset
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "a.h5"
    >>> with h5py.File(path, "w") as file:
    ...     x = file.create_dataset("x", data=np.zeros(4), chunks=(4,), fletcher32=True)
    ...     place = x.id.get_chunk_info(0).byte_offset
    >>> with open(path, "r+b") as raw:
    ...     _ = raw.seek(place), raw.write(b"spoilt")
    >>> try:
    ...     list(Dataset.from_hdf5(path, "x").batch(4))
    ... except ChecksumError as error:
    ...     print(type(error).__name__)
    ChecksumError
    >>> folder.cleanup()
    """


class NotFiniteError(ValueError):
    """A row that holds NaN or infinity, where the program asked for the check (``check_finite=True``).

    Examples
    --------
    >>> import tempfile
    >>> from mpistrat.data import Dataset, write_hdf5
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.h5"
    ...     write_hdf5(path, {"x": [1.0, float("nan")]})
    ...     try:
    ...         list(Dataset.from_hdf5(path, "x", check_finite=True).batch(2))
    ...     except NotFiniteError as error:
    ...         print(str(error).partition(";")[0].replace(folder, "..."))
    file '.../a.h5', dataset 'x': row 1 has the value nan
    """


class FilterUnavailableError(RuntimeError):
    """A dataset that is stored with a compression filter that this installation lacks.

    Examples
    --------
    >>> import h5py, pathlib, tempfile
    >>> from mpistrat.data import Dataset
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "a.h5"
    >>> kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    >>> kind.set_chunk((4,))
    >>> kind.set_filter(500, h5py.h5z.FLAG_OPTIONAL)  # a number that no filter has
    >>> with h5py.File(path, "w") as file:
    ...     space = h5py.h5s.create_simple((4,))
    ...     x = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, space, kind)
    ...     x.write_direct_chunk((0,), bytes(32))
    >>> try:
    ...     list(Dataset.from_hdf5(path, "x").batch(4))
    ... except FilterUnavailableError as error:
    ...     print(type(error).__name__)
    FilterUnavailableError
    >>> folder.cleanup()
    """


class DatasetNotFoundError(ValueError):
    """A dataset name that a file does not have.

    Examples
    --------
    >>> import tempfile
    >>> from mpistrat.data import Dataset, write_hdf5
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.h5"
    ...     write_hdf5(path, {"x": [1.0]})
    ...     try:
    ...         Dataset.from_hdf5(path, "y")
    ...     except DatasetNotFoundError as error:
    ...         print(str(error).partition(";")[0].replace(folder, "..."))
    file '.../a.h5' has no dataset 'y'
    """


class DatasetMismatchError(ValueError):
    """Datasets that belong together and differ in length, dtype or shape.

    Examples
    --------
    >>> import h5py, tempfile
    >>> from mpistrat.data import Dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.h5"
    ...     with h5py.File(path, "w") as file:
    ...         file["x"], file["y"] = [1, 2, 3], [1, 2]
    ...     try:
    ...         Dataset.from_hdf5(path, ("x", "y"))
    ...     except DatasetMismatchError as error:
    ...         print(str(error).partition(";")[0].replace(folder, "..."))
    file '.../a.h5': dataset 'x' has 3 rows and dataset 'y' has 2
    """


class EmptyDatasetError(ValueError):
    """Files that hold no row, all of them together.

    Examples
    --------
    >>> import h5py, tempfile
    >>> from mpistrat.data import Dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.h5"
    ...     with h5py.File(path, "w") as file:
    ...         file["x"] = []
    ...     try:
    ...         len(Dataset.from_hdf5(path, "x"))
    ...     except EmptyDatasetError as error:
    ...         print(str(error).partition(";")[0].replace(folder, "..."))
    none of the 1 files has a row in dataset 'x', the first is '.../a.h5'
    """


_OWN = (
    DataFileError,
    NotFiniteError,
    FilterUnavailableError,
    DatasetNotFoundError,
    DatasetMismatchError,
    EmptyDatasetError,
)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Raise any error of h5py as a `DataFileError` that says where; errors of this file pass as they are.

    h5py answers damage with errors of many kinds, few of which name the file.
    """
    try:
        yield
    except _OWN:
        raise
    except Exception as error:
        raise DataFileError(
            f"{where}: HDF5 cannot read it ({reason_of(error)}); fix: see the error, and write it again if damaged"
        ) from error


@contextlib.contextmanager
def naming_damage(path: str) -> Iterator[None]:
    """Raise an error of a library that does not expect a damaged file as a `DataFileError` that names the file."""
    try:
        yield
    except (*_OWN, OSError, ImportError):
        raise
    except Exception as error:
        what = f"it cannot be described ({type(error).__name__}: {error})"
        raise DataFileError.of_file(path, f"{what}; fix: see the error, and write it again if damaged") from error


def reason_of(error: BaseException) -> str:
    """Return what HDF5 says is the reason, which h5py puts in parentheses."""
    text = str(error.args[0]) if error.args else type(error).__name__
    _, _, rest = text.partition("(")
    return rest.rstrip(")") or text or type(error).__name__


def explain_empty_parts() -> None:
    """Let NumPy's errors about arrays without elements be explained, since this rank got a part without rows."""
    for part in ("zero-size array to reduction operation", "of an empty sequence"):
        failure.explanations[part] = (
            "This rank got an empty part of a batch: a global batch with fewer rows than replicas has none for some. "
            "Give the reduction a value for no rows, as in batch.max(initial=-numpy.inf), skip the part, or let all "
            "batches be full: batch(..., drop_remainder=True)."
        )


# The first bytes, what such a file is, and what reads it.
_SIGNATURES = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "Dataset.from_hdf5 (from_netcdf for netCDF)"),
    (b"PAR1", "a Parquet file", "Dataset.from_parquet"),
    (b"\x93NUMPY", "an npy file", "Dataset.from_npy"),
    (b"PK\x03\x04", "a zip archive", "Dataset.from_npy for an npz file, or unpack it"),
    (b"CDF", "a netCDF file of version 3", "`nccopy -k netCDF-4` to convert it, then Dataset.from_netcdf"),
    (b"ARROW1", "an Arrow file", "pyarrow to write it as Parquet, then Dataset.from_parquet"),
    (b"\x1f\x8b", "compressed by gzip", "gunzip first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "zstd -d first"),
)
_OF_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_LONGEST = max(len(start) for start, _, _ in _SIGNATURES)


def what_it_is(path: str) -> str:
    """Return what a file or folder is, and what reads it. Empty if its first bytes do not tell."""
    if any(os.path.exists(os.path.join(path, name)) for name in _OF_ZARR):
        return "it is a Zarr store; fix: use Dataset.from_zarr"
    first = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(_LONGEST)
    texts = (f"it is {what}; fix: use {reader}" for start, what, reader in _SIGNATURES if first.startswith(start))
    return next(texts, "")


def not_of_format(path: str, reader: str, what: str) -> DataFileError:
    """Return the error for a file that its reader cannot read: what it is, or ``what`` if it is for this reader."""
    other = what_it_is(path)
    # Where `other` names the same reader, the file is of its format, and damaged.
    return DataFileError.of_file(path, other if other and reader not in other else what)


# --- limits: a few bytes of a file may ask for more than any memory holds, or name any file of the system ---


def check_bytes(nbytes: int, where: str, what: str) -> None:
    """Raise DataFileError if what must be held in memory as a whole exceeds ``mpistrat.rc.data_block_bytes``."""
    if nbytes > rc.data_block_bytes:
        raise DataFileError(
            f"{where}: {what} has {nbytes} bytes, and MPISTRAT_DATA_BLOCK_BYTES={rc.data_block_bytes} is the limit; "
            "fix: write smaller ones, or raise the limit if you trust the file"
        )


def check_blocks(count: int, where: str) -> None:
    """Raise DataFileError if a table of more blocks than ``mpistrat.rc.data_blocks`` would be kept."""
    if count > rc.data_blocks:
        raise DataFileError(
            f"{where}: it has {count} chunks or more, and MPISTRAT_DATA_BLOCKS={rc.data_blocks} is the limit; fix: "
            "write larger ones, or raise the limit if you trust the file"
        )


def check_path(path: str, where: str = "") -> None:
    """Raise DataFileError unless a path is a regular file or folder in ``mpistrat.rc.data_root``, or does not exist."""
    # A data file may name any file of the system. Opening a FIFO waits for ever, and a device may have no end.
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # the code that opens it has a better message
        return
    where = where or f"file {path!r}"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataFileError(f"{where}: {path!r} is not a regular file; fix: check where it is from")
    root = rc.data_root
    real = os.path.realpath(root)
    if root and os.path.commonpath([os.path.realpath(path), real]) != real:
        raise DataFileError(
            f"{where}: {path!r} is outside of MPISTRAT_DATA_ROOT={root}; fix: move it there, or name another folder"
        )
