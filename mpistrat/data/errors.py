"""What can be wrong with data files.

Every message says which file and dataset, what is wrong, and what to do. Found while the files are
described, the error is raised on every rank; found while rows are read, on the rank that reads them.
"""

from __future__ import annotations


class DataFileError(RuntimeError):
    """A file cannot be read: no HDF5 file, truncated, empty of bytes, vanished or changed."""


class ChecksumError(DataFileError):
    """The stored checksum of a dataset does not match its data."""


class NotFiniteError(ValueError):
    """A row has NaN or infinity in it, and the program wanted to know (``check_finite``)."""


class FilterUnavailableError(RuntimeError):
    """A dataset is stored with a compression filter that this installation lacks."""


class DatasetNotFoundError(ValueError):
    """A file has no dataset of the wanted name."""


class DatasetMismatchError(ValueError):
    """Datasets that belong together disagree in length, dtype or shape."""


class EmptyDatasetError(ValueError):
    """All files together hold no row."""
