"""HDF5, Parquet and CSV files that h5py, pyarrow and pandas write with options at random, and what they read there.

``python -m tests.data.formats.random_tables 100`` compares so many of each with this library, and counts; under ranks,
these share the rows. ``-v`` shows errors.
"""

import collections
import csv as standard
import datetime
import decimal
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.data import (
    AutoShardPolicy,
    DataFileError,
    Dataset,
    DatasetMismatchError,
    DatasetNotFoundError,
    EmptyDatasetError,
    FilterUnavailableError,
    Options,
)

REFUSED = (DataFileError, DatasetMismatchError, DatasetNotFoundError, EmptyDatasetError, FilterUnavailableError)
TEXTS = np.array(["", "a", "é", "a,b", 'say "q"', "l\nm", "x\r\ny", " s ", "1", "NA", "#c"], object)


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


_HDF5 = ["i1", ">u2", ">i4", "<i8", ">u8", "<f2", "<f4", ">f8", "g", "<c8", ">c16", "?", "S5", "V3", "time", "enum"]
_HDF5 += ["text", "ascii", "utf-8", "ragged", "texts", "rows", "nested", "both", "array", "enums", "reference"]


def hdf5_values(rng, shape):
    """Return a dtype that HDF5 stores, and values."""
    kind = pick(rng, *_HDF5)
    numbers, enum = rng.integers(0, 2, shape), h5py.enum_dtype({"A": 0, "B": 1}, "i2")
    texts = TEXTS[rng.integers(len(TEXTS), size=shape)]
    if kind == "enum":
        return enum, numbers.astype("i2")
    if kind in ("text", "ascii", "utf-8"):
        texts = np.where(np.frompyfunc(str.isascii, 1, 1)(texts).astype(bool), texts, "b") if kind == "ascii" else texts
        return h5py.string_dtype("ascii" if kind == "ascii" else "utf-8", None if kind != "utf-8" else 12), texts
    if kind in ("ragged", "texts"):
        values = np.empty(numbers.size, object)
        values[:] = [np.arange(i % 4, dtype="i4") for i in range(numbers.size)]
        return h5py.vlen_dtype("i4" if kind == "ragged" else "f8"), values.reshape(shape)
    if kind == "array":
        return np.dtype(("<f4", (2, 3))), rng.normal(size=(*shape, 2, 3)).astype("f4")
    if kind == "enums":
        return np.dtype((h5py.enum_dtype({"A": 0, "B": 1}, "i1"), (2,))), rng.integers(0, 2, (*shape, 2)).astype("i1")
    if kind == "time":
        return h5py.opaque_dtype(np.dtype("<M8[ms]")), numbers.astype("<M8[ms]")
    if kind == "reference":
        return h5py.ref_dtype, np.zeros(shape, h5py.ref_dtype)
    rows = {
        "rows": np.dtype([("i", ">i4"), ("f", ">f8", (2,)), ("s", "S3")], align=bool(rng.integers(2))),
        "nested": np.dtype([("p", [("q", "<u2"), ("b", "?")]), ("i", enum)]),
        "both": np.dtype([("i", "<i4"), ("s", h5py.string_dtype()), ("f", ">f8", (2,))], align=bool(rng.integers(2))),
    }
    if kind in rows:
        values = np.zeros(shape, rows[kind])
        values["i"] = numbers
        if kind == "both":
            values["s"] = texts
        return rows[kind], values
    if kind == "V3":
        return np.dtype("V3"), np.frombuffer(rng.bytes(3 * numbers.size), "V3").reshape(shape)
    return np.dtype(kind), (rng.normal(size=shape) if np.dtype(kind).kind in "fc" else numbers).astype(kind)


def _chunked(rng, dtype, shape):
    options = {"chunks": True if not rng.integers(4) else tuple(int(rng.integers(1, size + 1)) for size in shape)}
    options["maxshape"] = tuple(pick(rng, None, 2 * size) for size in shape) if rng.integers(2) else None
    options["compression"] = pick(
        rng, None, "gzip", "lzf", "szip" if h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP) else 9
    )
    options["shuffle"], options["fletcher32"] = pick(rng, True, False), rng.integers(3) == 0
    if dtype.kind in "iu" and not rng.integers(4):
        options["scaleoffset"] = pick(rng, 0, 8)
    elif dtype.kind == "f" and not rng.integers(4):
        options["scaleoffset"] = 3
    elif dtype.kind in "iuf" and not rng.integers(6):
        options["dcpl"] = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        options["dcpl"].set_filter(h5py.h5z.FILTER_NBIT, 0)
    return options


def _virtual(rng, file, path, shape, dtype, values, fillvalue):
    """Make a virtual dataset of two parts: of this file, and of another or of no file."""
    cut, sources = int(rng.integers(0, shape[0] + 1)), h5py.VirtualLayout(shape, dtype)
    file.create_dataset("source", shape, dtype, chunks=pick(rng, None, True))[...] = values
    sources[:cut] = h5py.VirtualSource(".", "source", shape=shape, dtype=dtype)[:cut]
    if rng.integers(4):
        with h5py.File(f"{path}.other", "w") as other:
            other.create_dataset("source", shape, dtype)[...] = values
        sources[cut:] = h5py.VirtualSource(f"{path}.other", "source", shape=shape, dtype=dtype)[cut:]
    file.create_virtual_dataset("x", sources, fillvalue=fillvalue)


def hdf5(path, rng):
    """Write an HDF5 file with a dataset ``x``. Return what h5py reads there, None if it raises."""
    rows = int(rng.integers(1, 40)) if rng.integers(20) else 0
    shape = (rows, *rng.integers(1, 6, rng.integers(3)).tolist()) if rng.integers(30) else ()
    dtype, values = hdf5_values(rng, shape)
    layout = pick(rng, "contiguous", "chunked", "chunked", "chunked", "external", "virtual", "compact")
    layout = "contiguous" if (layout == "external" and dtype.hasobject) or not shape else layout
    of_file = {"libver": pick(rng, "earliest", "v108", "v110", "latest"), "track_order": pick(rng, True, False)}
    of_file |= {"fs_strategy": "page", "fs_persist": True} if not rng.integers(6) else {}
    of_file |= {"driver": "core"} if not rng.integers(8) else {"userblock_size": pick(rng, 0, 512)}
    options = {"fillvalue": 1} if dtype.kind in "iuf" and rng.integers(3) == 0 else {}
    how = options["dcpl"] = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if not rng.integers(4):
        how.set_fill_time(pick(rng, h5py.h5d.FILL_TIME_ALLOC, h5py.h5d.FILL_TIME_NEVER, h5py.h5d.FILL_TIME_IFSET))
    if layout == "chunked":
        options |= _chunked(rng, dtype, shape)
    elif layout == "external":
        size = int(np.prod(shape)) * dtype.itemsize
        options["external"] = [(f"{path}.raw", 8, size // 2), (f"{path}.more", 0, h5py.h5f.UNLIMITED)][not size // 2 :]
    elif layout == "compact":
        how.set_layout(h5py.h5d.COMPACT)
    with h5py.File(path, "w", **of_file) as file:
        if layout == "virtual":
            _virtual(rng, file, path, shape, dtype, values, options.get("fillvalue"))
        else:
            made = file.create_dataset(
                pick(rng, "x", "x", "g/h"), shape, dtype, track_times=pick(rng, True, False), **options
            )
            if made.name != "/x":
                file["x"] = h5py.SoftLink(made.name) if rng.integers(2) else made
            written = rows if rng.integers(5) else rows // 2
            made[: written or None if shape else ()] = values[: written or None] if shape else values
            if options.get("maxshape") and rng.integers(2):
                made.resize(
                    [
                        int(rng.integers(1, 2 * size + 1)) if longest is None else size
                        for size, longest in zip(shape, made.maxshape, strict=True)
                    ]
                )
            if layout == "chunked" and not rng.integers(6) and not dtype.hasobject and "scaleoffset" not in options:
                zeros = np.zeros(made.chunks, made.dtype).tobytes()
                made.id.write_direct_chunk((0,) * len(shape), zeros, filter_mask=(1 << 8) - 1)
    return library_reads("hdf5", path)


_PARQUET = ["int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "bool", "string", "large_string"]
_PARQUET += ["binary", "fixed binary", "date32", "date64", "s", "ms", "UTC", "ns", "duration", "time32", "decimal"]
_PARQUET += ["list", "array", "large list", "lists", "times", "struct", "dictionary", "map", "null", "string_view"]


def _parquet_type(kind):
    import pyarrow as pa

    made = {
        "fixed binary": lambda: pa.binary(4),
        "s": lambda: pa.timestamp("s"),
        "ms": lambda: pa.timestamp("ms"),
        "UTC": lambda: pa.timestamp("us", "Asia/Tokyo"),
        "ns": lambda: pa.timestamp("ns"),
        "duration": lambda: pa.duration("ms"),
        "time32": lambda: pa.time32("s"),
        "decimal": lambda: pa.decimal128(9, 3),
        "list": lambda: pa.list_(pa.int32()),
        "array": lambda: pa.list_(pa.float32(), 3),
        "large list": lambda: pa.large_list(pa.string()),
        "lists": lambda: pa.list_(pa.list_(pa.int8())),
        "times": lambda: pa.list_(pa.timestamp("ms", "UTC"), 2),
        "struct": lambda: pa.struct([("a", pa.int8())]),
        "dictionary": lambda: pa.dictionary(pa.int8(), pa.string()),
        "map": lambda: pa.map_(pa.string(), pa.int8()),
    }
    return made.get(kind, getattr(pa, f"{kind}_", None) or getattr(pa, kind, pa.int8))()


def _parquet_value(rng, kind):
    import pyarrow as pa

    types, number = pa.types, int(rng.integers(0, 99))
    inner = getattr(kind, "value_type", None)
    if types.is_fixed_size_list(kind):
        return [_parquet_value(rng, inner) for _ in range(kind.list_size)]
    if types.is_map(kind):
        return [("k", number)]
    if types.is_list(kind) or types.is_large_list(kind):
        return [_parquet_value(rng, inner) for _ in range(rng.integers(4))]
    for is_one, value in {
        types.is_null: None,
        types.is_boolean: number > 50,
        types.is_float16: np.float16(number / 8),
        types.is_floating: number / 7,
        types.is_fixed_size_binary: rng.bytes(4),
        types.is_binary: rng.bytes(number % 4),
        types.is_large_string: str(TEXTS[number % len(TEXTS)]),
        types.is_string: str(TEXTS[number % len(TEXTS)]),
        types.is_dictionary: str(number % 3),
        types.is_struct: {"a": number},
        types.is_decimal: decimal.Decimal(number) / 1000,
        types.is_date: datetime.date(2000, 1, 1 + number % 9),
        types.is_time: datetime.time(1, 2, number % 60),
    }.items():
        if is_one(kind):
            return value
    return str(number) if str(kind) == "string_view" else number


def parquet(path, rng):
    """Write a Parquet file with a column ``x``. Return what pyarrow reads there, None if it raises."""
    import pyarrow as pa
    from pyarrow import parquet

    rows, kind = int(rng.integers(1, 60)) if rng.integers(20) else 0, _parquet_type(pick(rng, *_PARQUET))
    values = [_parquet_value(rng, kind) for _ in range(rows)]
    if rows and not rng.integers(8):
        values[0] = None
    options = {"use_dictionary": pick(rng, True, False)}
    if not options["use_dictionary"] and rng.integers(2):
        encodings = {"i": ["DELTA_BINARY_PACKED"], "f": ["BYTE_STREAM_SPLIT"], "s": ["DELTA_BYTE_ARRAY"]}
        options["column_encoding"] = {"x": pick(rng, *encodings.get(str(kind)[0], []), "PLAIN"), "y": "PLAIN"}
    if not rng.integers(5):
        options |= {"coerce_timestamps": pick(rng, "ms", "us"), "allow_truncated_timestamps": True}
    if kind == pa.timestamp("ns") and rng.integers(2):
        options["use_deprecated_int96_timestamps"] = True
    knows_decimals = int(pa.__version__.partition(".")[0]) >= 18
    parquet.write_table(
        pa.table({"x": pa.array(values, kind), "y": pa.array(range(rows))}),
        path,
        compression=pick(rng, "none", "snappy", "gzip", "zstd", "lz4", "brotli"),
        data_page_version=pick(rng, "1.0", "2.0"),
        version=pick(rng, "1.0", "2.4", "2.6"),
        row_group_size=int(rng.integers(1, 40)),
        data_page_size=pick(rng, 10, 100, 1 << 20),
        store_schema=pick(rng, True, False),
        write_page_checksum=True,
        write_statistics=pick(rng, True, False),
        write_page_index=pick(rng, True, False),
        **({"store_decimal_as_integer": True} if pick(rng, True, False) and knows_decimals else {}),
        use_compliant_nested_type=pick(rng, True, False),
        **options,
    )
    return library_reads("parquet", path)


DTYPES = {"i": "i8", "u": "u1", "f": "f8", "b": "bool", "O": "str", "M": "M8[s]"}


def csv(path, rng):
    """Write a CSV file with a column ``x``. Return what pandas reads there, or what was written where it raises.

    ``path.kind`` has the arguments of the reader.
    """
    import pandas

    rows, kind = int(rng.integers(1, 60)), pick(rng, *DTYPES, "f")
    values = {
        "i": rng.integers(-(1 << 62), 1 << 62, rows),
        "u": rng.integers(0, 256, rows).astype("u1"),
        "f": pick(
            rng,
            rng.normal(size=rows) * 10.0 ** rng.integers(-300, 300, rows),
            rng.choice([np.inf, -np.inf, np.nan, 1.5], rows),
        ),
        "b": rng.integers(0, 2, rows).astype(bool),
        "O": TEXTS[rng.integers(len(TEXTS), size=rows)],
        "M": rng.integers(0, 10**9, rows).astype("M8[s]"),
    }[kind]
    options = {
        "sep": pick(rng, ",", ";", "\t", "|"),
        "header": pick(rng, True, True, False),
        "index": pick(rng, True, False),
    }
    escapes = {"doublequote": False, "escapechar": "\\"} if not rng.integers(6) else {}
    with_decimal = {"decimal": ","} if not rng.integers(6) else {}
    format_of = {"float_format": "%.17e"} if not rng.integers(4) else {}
    pandas.DataFrame({"x": values, "y": range(rows)}).to_csv(
        path,
        quoting=pick(rng, standard.QUOTE_MINIMAL, standard.QUOTE_ALL, standard.QUOTE_NONNUMERIC, standard.QUOTE_NONE),
        lineterminator=pick(rng, *["\n"] * 3, "\r\n", "\r\n", "\r"),
        encoding=pick(rng, *["utf-8"] * 6, "utf-8-sig", "latin-1", "utf-16"),
        compression=pick(rng, *[None] * 7, "gzip"),
        index_label="index",
        na_rep=pick(rng, "", "nan", "NA"),
        **options,
        **escapes,
        **with_decimal,
        **format_of,
    )
    name = "x" if options["header"] else str(int(options["index"]))
    arguments = name, DTYPES[kind], options["sep"], options["header"]
    with open(f"{path}.kind", "w") as file:
        json.dump(arguments, file)
    found = library_reads("csv", path)
    return values if found is None else found


def _arguments(path):
    with open(f"{path}.kind") as file:
        return json.load(file)


def library_reads(kind, path):
    """Return what the library of a format reads, None if it raises."""
    try:
        if kind == "hdf5":
            with h5py.File(path) as file:
                return file["x"][...]
        if kind == "parquet":
            from pyarrow import parquet

            file = parquet.ParquetFile(path, page_checksum_verification=True)
            return np.array([*file.read(["x"], use_threads=False).column("x").to_numpy(), None], object)[:-1]
        import pandas

        name, dtype, separator, header = _arguments(path)
        found = pandas.read_csv(
            path,
            compression="gzip" if Path(path).read_bytes().startswith(b"\x1f\x8b") else None,
            sep=separator,
            header=0 if header else None,
            dtype={name if header else int(name): "str" if dtype == "M8[s]" else dtype},
            keep_default_na=False,
            float_precision="round_trip",
            skip_blank_lines=True,
        )[name if header else int(name)].to_numpy()
        return found.astype("M8[s]") if dtype == "M8[s]" else found
    except Exception:
        return None


def read_csv(path):
    """Return the dataset of a file that `csv` has written."""
    name, dtype, separator, header = _arguments(path)
    return Dataset.from_csv(path, name, {name: dtype}, separator, header)


FORMATS = {
    "hdf5": (hdf5, lambda path: Dataset.from_hdf5(path, "x")),
    "parquet": (parquet, lambda path: Dataset.from_parquet(path, "x")),
    "csv": (csv, read_csv),
}


def plain(values):
    """Return values in a form that is compared by its text: NaN is NaN, and NumPy's numbers are Python's."""
    if isinstance(values, (np.ndarray, np.generic)):
        values = [plain(each) for each in values] if getattr(values, "ndim", 0) else values.item()
    if isinstance(values, (list, tuple)):
        return [plain(each) for each in values]
    return values.encode() if isinstance(values, str) else values


def batches(read, comm):
    """Return the parts of batches that all ranks read, in order, and an error if a rank has one. Collective."""
    strategy, options = mpistrat.MultiWorkerMirroredStrategy(comm=comm), Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    mine, error = [], ""
    try:
        mine = list(strategy.experimental_distribute_dataset(read().batch(8).with_options(options)))
    except REFUSED as failed:
        error = f"{type(failed).__name__}: {failed}"
    everyone = comm.allgather((mine, error))
    steps = zip(*(each for each, _ in everyone), strict=not any(error for _, error in everyone))
    return [batch for step in steps for batch in step], max(error for _, error in everyone)


def verdict(kind, path, expected, comm=MPI.COMM_SELF):
    """Return "equal" or the message of an error. Raise AssertionError if rows differ from what is expected."""
    parts, error = batches(lambda: FORMATS[kind][1](str(path)), comm)
    if error:
        assert "fix: " in error, error
        return error
    found = [row for part in parts for row in plain(part)]
    assert expected is not None, f"{found[:5]}, where the library raises"
    assert repr(found) == repr(plain(expected)), f"{repr(found)[:300]}, not {repr(plain(expected))[:300]}"
    if kind == "hdf5" and expected.dtype.kind in "biufc":
        assert {part.dtype for part in parts} <= {expected.dtype.newbyteorder("=")}, f"not {expected.dtype}"
    return "equal"


def compare(kind, seed, folder, comm=MPI.COMM_SELF):
    """Let rank 0 write a file, and all ranks read it. Return what `verdict` says, None if the writer refuses."""
    path, expected = os.path.join(folder, f"{seed}.{kind}"), None
    if comm.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = True, FORMATS[kind][0](path, np.random.default_rng(seed))
            except Exception as error:  # options that do not go together
                expected = False, f"{type(error).__name__}: {error}"
    written, expected = comm.bcast(expected)
    return verdict(kind, path, expected, comm) if written else None


def main(count, first=0, shows=False, comm=MPI.COMM_WORLD):
    """Compare so many files of each format, and return the counts."""
    counts, errors = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as own:
        folder = comm.bcast(own)
        for kind in FORMATS:
            for seed in range(first, first + count):
                try:
                    found = compare(kind, seed, folder, comm)
                except AssertionError as error:
                    found = "WRONG"
                    print("WRONG", kind, seed, error, file=sys.stderr)
                what = found if found in (None, "equal", "WRONG") else "error"
                counts[kind, "not written" if what is None else what] += 1
                errors[kind, str(found).replace(folder, "")[:230]] += what == "error"
        comm.Barrier()
    if shows and comm.rank == 0:
        for error, number in errors.most_common():
            if number:
                print(number, *error)
    return counts


if __name__ == "__main__":
    found = main(*map(int, (a for a in sys.argv[1:] if a != "-v")), shows="-v" in sys.argv)
    if MPI.COMM_WORLD.rank == 0:
        print({" ".join(key): number for key, number in sorted(found.items())})
