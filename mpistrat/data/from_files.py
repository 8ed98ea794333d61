"""Datasets of rows of files, one method for each format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import numpy as np

    from mpistrat.data.dataset import Dataset
    from mpistrat.data.formats.contract import Format


# Imports of formats are late: `import mpistrat.data` must load no h5py, pyarrow, zarr or Pillow.
class FromFiles:
    """The methods of a dataset that make one of files."""

    @overload
    @classmethod
    def from_hdf5(
        cls, files: Any, datasets: str, manifest: str | os.PathLike[str] | None = None, check_finite: bool = False
    ) -> Dataset[np.ndarray]: ...
    @overload
    @classmethod
    def from_hdf5(
        cls,
        files: Any,
        datasets: tuple[str, ...],
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> Dataset[tuple[np.ndarray, ...]]: ...
    @overload
    @classmethod
    def from_hdf5(
        cls,
        files: Any,
        datasets: dict[str, str],
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> Dataset[dict[str, np.ndarray]]: ...
    @overload
    @classmethod
    def from_hdf5(
        cls, files: Any, datasets: Any, manifest: str | os.PathLike[str] | None = None, check_finite: bool = False
    ) -> Dataset[Any]: ...
    @classmethod
    def from_hdf5(
        cls, files: Any, datasets: Any, manifest: str | os.PathLike[str] | None = None, check_finite: bool = False
    ) -> Dataset[Any]:
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
        from mpistrat.data.formats.hdf5 import Hdf5

        return cls._of_files(Hdf5(), files, datasets, manifest, check_finite)

    @classmethod
    def from_netcdf(
        cls,
        files: Any,
        variables: Any,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
        decode: bool = True,
    ) -> Dataset[Any]:
        """Return a dataset of the rows of netCDF-4 files, which are HDF5 files.

        Parameters
        ----------
        variables : str, tuple or dict of str
            Names of variables whose axis 0 is the axis of the samples.
        files, manifest, check_finite
            As for `from_hdf5`, which raises the same errors.
        decode : bool
            Whether values are decoded as by ``xarray.open_dataset``: by ``scale_factor``, ``add_offset`` and
            ``_Unsigned``, with NaN for ``_FillValue`` and ``missing_value``, and with times of NumPy. What NumPy's
            dtypes cannot hold, such as dates of other calendars, raises `DataFileError`. False gives what is stored.
        """
        from mpistrat.data.formats.hdf5 import NetCdf

        return cls._of_files(NetCdf(decode), files, variables, manifest, check_finite)

    @classmethod
    def from_npy(
        cls, files: Any, manifest: str | os.PathLike[str] | None = None, check_finite: bool = False, arrays: Any = None
    ) -> Dataset[Any]:
        """Return a dataset of the rows of files that ``numpy.save`` or ``numpy.savez`` wrote.

        Rows are read where they lie. An array in Fortran order takes one read for each value of a row.

        Parameters
        ----------
        files, manifest, check_finite
            As for `from_hdf5`, which raises the same errors.
        arrays : str, tuple or dict of str, optional
            Names of arrays of ``.npz`` files. By default a dict of all arrays of the first file, which is opened at
            once. Archives of ``numpy.savez_compressed`` are refused.

        Examples
        --------
        >>> import numpy as np, os, tempfile
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name, rows in ("a", 3), ("b", 2):
        ...     np.save(os.path.join(folder.name, name), np.arange(rows))
        >>> list(Dataset.from_npy(os.path.join(folder.name, "*.npy")).batch(4))
        [array([0, 1, 2, 0]), array([1])]
        >>> folder.cleanup()
        """
        from mpistrat.data.formats.npy import Npy

        files = [files] if isinstance(files, (str, bytes, os.PathLike)) else [*files]  # of an iterator, once
        if arrays is None and not all(os.fsdecode(path).endswith(".npz") for path in files):
            # An npy file has one array, without a name.
            arrays = "x"
        return cls._of_files(Npy(), files, arrays, manifest, check_finite)

    @classmethod
    def from_parquet(
        cls,
        files: Any,
        columns: Any = None,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
        null: Mapping[str, Any] | None = None,
        filters: Any = None,
    ) -> Dataset[Any]:
        """Return a dataset of the rows of Parquet files. It needs pyarrow.

        A row group is read as a whole, and the last ones are kept. A shuffle permutes row groups, then the rows of a
        few of them: row groups of a few MiB are best.

        Parameters
        ----------
        columns : str, tuple or dict of str, optional
            Names of columns: of fields of structures as ``"point.x"``, and of parts of the folders' names, as
            ``year=2020/a.parquet``. Strings and lists of variable length become arrays of objects, and categories
            their values. By default a dict of all columns of the first file, which is opened at once.
        null : dict, optional
            What stands for missing values of a column. NaN and NaT stand for missing floats and times. Other missing
            values raise `DataFileError` without this. NaN makes a column of integers float64, as in pandas.
        filters : list of tuples, list of lists or pyarrow expression, optional
            Conditions on rows, as of ``pyarrow.parquet.read_table``: ``[("x", ">", 3), ("y", "in", {1, 2})]``. Row
            groups without such rows are left out by their statistics, and rows of the others are counted once, when
            a file is described. So the length stays known.
        files, manifest, check_finite
            As for `from_hdf5`, which raises the same errors.
        """
        from mpistrat.data.formats.parquet import Parquet

        return cls._of_files(Parquet(null, filters), files, columns, manifest, check_finite)

    @classmethod
    def from_zarr(
        cls,
        files: Any,
        arrays: Any = ".",
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
        decode: bool = True,
    ) -> Dataset[Any]:
        """Return a dataset of the rows of Zarr stores on disk. It needs zarr.

        Parameters
        ----------
        files : str, os.PathLike or list of those
            Folders that are stores, and glob patterns that match such folders.
        arrays : str, tuple or dict of str
            Names of arrays of a group. By default the store is an array itself.
        manifest, check_finite
            As for `from_hdf5`, which raises the same errors.
        decode : bool
            Whether values are decoded by their attributes, as by `from_netcdf`.
        """
        from mpistrat.data.formats.zarr import Zarr

        return cls._of_files(Zarr(decode), files, arrays, manifest, check_finite)

    @classmethod
    def from_csv(
        cls,
        files: Any,
        columns: Any = None,
        dtypes: Mapping[str, Any] | None = None,
        delimiter: str = ",",
        header: bool = True,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
        na_values: Sequence[str] = (),
        comment: str | None = None,
        encoding: str = "utf-8",
        on_bad_row: Literal["raise", "skip"] = "raise",
    ) -> Dataset[Any]:
        """Return a dataset of the rows of CSV files. It needs pyarrow.

        A file is read once when it is described, to find its lines. Files that gzip compressed are unpacked in memory,
        up to ``mpistrat.rc.data_block_bytes``.

        Parameters
        ----------
        columns : str, tuple or dict of str, optional
            Names of columns. By default a dict of all columns of the first file, which is opened at once.
        dtypes : dict from str to dtype, optional
            Types of columns. Columns that are not named have float64. ``str`` gives arrays of objects.
        delimiter : str
            What separates values.
        header : bool
            Whether the first line names the columns. Otherwise they are named ``"0"``, ``"1"`` and so on.
        na_values : sequence of str
            Texts of missing values, as ``("", "NA")``: NaN in a column of floats, NaT in one of times. In other columns
            they raise `DataFileError`; a column of ``str`` keeps the text.
        comment : str, optional
            A character. Lines that begin with it are left out.
        encoding : str
            UTF-8, or an encoding of one byte for each character, such as ``"latin-1"``.
        on_bad_row : {"raise", "skip"}
            What happens to a row that cannot be decoded: with another number of values, or a value that is not of its
            dtype. ``"skip"`` leaves such rows out. All rows are then decoded once when a file is described, and a
            warning says how many rows of the file are left out, and the lines of the first. So the length is known, and
            rows and batches are the same on any number of ranks.
        files, manifest, check_finite
            As for `from_hdf5`, which raises the same errors.

        Examples
        --------
        >>> import os, tempfile
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with open(os.path.join(folder.name, "a.csv"), "w") as file:
        ...     _ = file.write("x,label\\n0.5,1\\n1.5,0\\n")
        >>> path = os.path.join(folder.name, "a.csv")
        >>> list(Dataset.from_csv(path, ("x", "label"), {"label": int}).batch(2))
        [(array([0.5, 1.5]), array([1, 0]))]
        >>> folder.cleanup()
        """
        from mpistrat.data.formats.text import Csv

        return cls._of_files(
            Csv(dtypes or {}, delimiter, header, na_values, comment, encoding, on_bad_row),
            files,
            columns,
            manifest,
            check_finite,
        )

    @classmethod
    def from_text(
        cls,
        files: Any,
        encoding: str = "utf-8",
        manifest: str | os.PathLike[str] | None = None,
        on_bad_row: Literal["raise", "skip"] = "raise",
    ) -> Dataset[Any]:
        """Return a dataset of the lines of text files, as ``str``.

        Lines end as Python reads them: by ``\\n``, ``\\r\\n`` or ``\\r``, which are left out. Empty lines are rows. A
        file is read once when it is described, to find its lines. Files that gzip compressed are unpacked in memory,
        up to ``mpistrat.rc.data_block_bytes``.

        Parameters
        ----------
        encoding : str
            UTF-8, or an encoding of one byte for each character, such as ``"latin-1"``.
        files, manifest
            As for `from_hdf5`, which raises the same errors.
        on_bad_row : {"raise", "skip"}
            As for `from_csv`: ``"skip"`` leaves out lines that are not in ``encoding``.

        Examples
        --------
        >>> import os, tempfile
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with open(os.path.join(folder.name, "a.txt"), "w") as file:
        ...     _ = file.write("first\\nsecond\\nthird\\n")
        >>> lines = Dataset.from_text(os.path.join(folder.name, "*.txt"))
        >>> len(lines), lines[1], list(lines.shuffle(seed=1).batch(2))
        (3, 'second', [array(['second', 'third'], dtype=object), array(['first'], dtype=object)])
        >>> folder.cleanup()
        """
        from mpistrat.data.formats.text import Text

        return cls._of_files(Text(encoding, on_bad_row), files, "line", manifest, False)

    @classmethod
    def from_images(
        cls,
        folder: str | os.PathLike[str],
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        on_bad_row: Literal["raise", "skip"] = "raise",
    ) -> Dataset[Any]:
        """Return a dataset of pairs: an image, and the number of its class. It needs Pillow.

        Each folder in ``folder`` is a class, and classes are numbered in the order of their names: 0 is
        ``sorted(os.listdir(folder))[0]``. Images may lie in folders below. One rank looks for them. `split` and
        `sample` with ``by=1`` do not read the images.

        Parameters
        ----------
        size : tuple of int, optional
            Height and width to which images are scaled. By default they keep their sizes, and images of different sizes
            cannot be batched, except by `padded_batch`.
        mode : str
            Pillow's mode of the images: "RGB" for arrays of height, width and 3 channels, "L" for gray ones of height
            and width.
        on_bad_row : {"raise", "skip"}
            As for `from_csv`: ``"skip"`` leaves out images that Pillow cannot read. All are read once before the first
            epoch, divided over the ranks.

        Raises
        ------
        FileNotFoundError
            If there are no images.
        DataFileError
            When rows are read, if Pillow cannot read a file.

        Examples
        --------
        >>> import os, tempfile
        >>> from PIL import Image
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name, color in ("cat", "black"), ("dog", "white"):
        ...     os.mkdir(os.path.join(folder.name, name))
        ...     Image.new("RGB", (5, 4), color).save(os.path.join(folder.name, name, "1.png"))
        >>> image, label = Dataset.from_images(folder.name)[1]
        >>> image.shape, int(image.max()), int(label)
        ((4, 5, 3), 255, 1)
        >>> folder.cleanup()
        """
        from mpistrat.data.sources.images import ImageSource

        return cls(ImageSource(folder, size, mode, on_bad_row))  # type: ignore[call-arg, return-value]

    @classmethod
    def from_tar(
        cls,
        files: Any,
        fields: Any,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        decode: bool = True,
        manifest: str | os.PathLike[str] | None = None,
        on_bad_row: Literal["raise", "skip"] = "raise",
    ) -> Dataset[Any]:
        """Return a dataset of the samples of tar archives, as WebDataset writes them.

        Members whose names are equal up to the first dot are a sample, and follow each other. The headers of a file are
        read once when it is described. Then a sample is read by its place, in any order.

        Parameters
        ----------
        fields : str, tuple or dict of str
            What follows the first dot of members' names, in small letters: ``("jpg", "cls")``. ``"jpg;png"`` takes the
            one that a sample has. A sample with other fields, too, has these left out.
        size, mode
            As for `from_images`. Without ``size``, all images must have one size.
        decode : bool
            Whether images become arrays (by Pillow), ``npy`` its array, ``cls``, ``class``, ``count``, ``index`` and
            ``id`` an int64, and ``txt``, ``text``, ``transcript`` and ``json`` a ``str``. Other fields are ``bytes``.
            False leaves all fields as ``bytes``, for functions of `map`, as for images of different sizes.
        on_bad_row : {"raise", "skip"}
            As for `from_csv`: ``"skip"`` leaves out samples that cannot be decoded, or that lack a field.
        files, manifest
            As for `from_hdf5`, which raises the same errors.

        Examples
        --------
        >>> import io, os, tarfile, tempfile
        >>> from mpistrat.data import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "a.tar")
        >>> with tarfile.open(path, "w") as archive:
        ...     for name, text in ("1.cls", b"7"), ("1.txt", b"seven"), ("2.cls", b"8"), ("2.txt", b"eight"):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(text)
        ...         archive.addfile(member, io.BytesIO(text))
        >>> list(Dataset.from_tar(path, ("txt", "cls")).batch(2))
        [(array(['seven', 'eight'], dtype=object), array([7, 8]))]
        >>> folder.cleanup()
        """
        from mpistrat.data.formats.tar import Tar

        return cls._of_files(Tar(size, mode, decode, on_bad_row), files, fields, manifest, False)

    @classmethod
    def _of_files(
        cls, file_format: Format, files: Any, names: Any, manifest: str | os.PathLike[str] | None, check_finite: bool
    ) -> Dataset[Any]:
        from mpistrat.data.hdf5.manifest import FileList
        from mpistrat.data.sources.files import FileSource

        if names is None:
            # This process opens the first file for the names of its columns.
            names = {name: name for name in file_format.columns(FileList(files, file_format.name).paths()[0])}
        return cls(FileSource.open(file_format, files, names, manifest, check_finite))  # type: ignore[call-arg, return-value]
