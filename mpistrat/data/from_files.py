"""Datasets of rows of files, one method for each format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class FromFiles:
    """The methods of a dataset that make one of files."""

    @classmethod
    def from_hdf5(
        cls,
        files: Any,
        datasets: Any,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> Self:
        """Return a dataset of the rows of HDF5 files.

        Files may have different lengths. Their rows follow each other in the order of the files. The files
        are described (shapes, lengths, layouts) when the description is first needed. Among several replicas,
        one replica describes a file for all of them.

        Parameters
        ----------
        files : str, os.PathLike or list of those
            Paths and glob patterns (``**`` included). The matches of a pattern are sorted. A file that ``**``
            finds several times through links to folders is read once.
        datasets : str, tuple or dict of str
            Names of HDF5 datasets whose axis 0 is the axis of the samples. They give an element its structure:
            an array for ``"x"``, a tuple for ``("x", "y")``, a dict for ``{"image": "x"}``. A compound type
            becomes a structured array. Values have the byte order of the machine.
        manifest : path, optional
            A file that keeps the description of the files between jobs, so that the next job need not open
            all of them. It is written if it does not exist.
        check_finite : bool
            Whether to raise `NotFiniteError` when a row that is read holds NaN or infinity. The error names the
            file, the dataset and the row.

        Returns
        -------
        Dataset

        Raises
        ------
        FileNotFoundError
            If a file does not exist or a pattern matches none.
        ValueError
            If ``files`` is empty.
        DataFileError, DatasetNotFoundError, DatasetMismatchError, EmptyDatasetError
            In a job of one process, the first file is checked at once. The other files are checked when their
            lengths are first needed. Among several ranks, missing files and all other faults raise on all ranks,
            when the dataset is distributed. `DataFileError` is also raised for a stale manifest: one of other
            files, or of files that have been written to since.

        Examples
        --------
        >>> import h5py, os, tempfile
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name, rows in ("a", 3), ("b", 2):
        ...     with h5py.File(os.path.join(folder.name, name + ".h5"), "w") as f:
        ...         f["x"] = range(rows)
        >>> list(Dataset.from_hdf5(os.path.join(folder.name, "*.h5"), "x").batch(4))
        [array([0, 1, 2, 0]), array([1])]
        >>> folder.cleanup()
        """
        from mpistrat.data.sources.hdf5 import Hdf5Source

        return cls(Hdf5Source.open(files, datasets, manifest, check_finite))  # type: ignore[call-arg]
