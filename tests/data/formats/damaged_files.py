"""Files of each format and codec with bytes that are cut off or flipped at random.

``python -m tests.data.formats.damaged_files 200`` reads so many of them, and counts; ``200 0 hdf5`` only HDF5 files. A
read gives the rows as they were written, or an error. Nothing but a checksum can tell that a value is another. So a
flip inside the values of a chunk without a checksum may change values of this chunk, as the library of the format
reads them, and nothing else: neither the number of rows nor another chunk. So may a CSV file be cut anywhere.
"""

import collections
import csv
import os
import shutil
import sys
import tempfile
import warnings
from functools import partial

import numpy as np

ONE_VALUE = (1, 1)
ROWS = np.random.default_rng(0).integers(1, 9, (60, 50)).cumsum(axis=1)


def layouts():
    """Return for each format and codec: what one flip may change, and a function that writes ``ROWS`` to a path.

    A flip may change as many rows and columns as are encoded together without a checksum, none if there is one.
    """
    import h5py
    import netCDF4
    import numcodecs
    import pandas
    import pyarrow
    import zarr
    from pyarrow import parquet
    from zarr import codecs

    def hdf5(path, libver="earliest", nbit=False, **options):
        if nbit:
            options["dcpl"] = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            options["dcpl"].set_filter(h5py.h5z.FILTER_NBIT, 0)
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("x", data=ROWS.astype("i4"), **options)

    def table(path, **options):
        made = pyarrow.FixedSizeListArray.from_arrays(ROWS.astype("i4").ravel(), ROWS.shape[1])
        parquet.write_table(pyarrow.table({"x": made}), path, row_group_size=12, **options)

    def lines(path, **options):
        pandas.DataFrame({"x": ROWS.ravel()}).to_csv(path, index=False, **options)

    def netcdf(path, **options):
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("r", None)
            file.createDimension("c", 50)
            made = file.createVariable("x", "i4", ("r", "c"), chunksizes=(12, 50), **options)
            made[:] = ROWS

    def store(path, **options):
        made = zarr.create_array(path, name="x", shape=ROWS.shape, dtype="i4", chunks=(12, 25), fill_value=0, **options)
        made[:] = ROWS

    found = {}
    for libver in ("earliest", "latest"):
        for name, options in {
            "contiguous": {},
            "chunks": {"chunks": (12, 25)},
            "gzip": {"chunks": (12, 25), "compression": "gzip"},
            "shuffle lzf": {"chunks": (12, 25), "compression": "lzf", "shuffle": True},
            "szip": {"chunks": (12, 25), "compression": "szip" if h5py.h5z.filter_avail(4) else "gzip"},
            "scaleoffset": {"chunks": (12, 25), "scaleoffset": 0},
            "nbit": {"chunks": (12, 25), "nbit": True},
            "fletcher32": {"chunks": (12, 25), "fletcher32": True},
            "shuffle gzip fletcher32": {"chunks": (9, 11), "compression": 4, "shuffle": True, "fletcher32": True},
        }.items():
            together = None if "gzip" in name or "fletcher32" in name else options.get("chunks", ONE_VALUE)
            found[f"hdf5 {libver} {name}"] = together, partial(hdf5, libver=libver, **options)
    for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
        for version in ("1.0", "2.0"):
            checksum = {"compression": codec, "data_page_version": version, "write_page_checksum": True}
            found[f"parquet {codec} {version}"] = None, partial(table, **checksum)
    found["csv"] = ONE_VALUE, lines
    found["csv quoted"] = ONE_VALUE, partial(lines, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    for name, options in {
        "plain": {},
        "zlib": {"compression": "zlib"},
        "fletcher32": {"fletcher32": True},
        "shuffle zlib fletcher32": {"compression": "zlib", "fletcher32": True},
        "zstd": {"compression": "zstd"},
        "blosc": {"compression": "blosc_lz4"},
    }.items():
        together = None if "zlib" in name or "fletcher32" in name else (12, 50)
        found[f"netcdf {name}"] = together, lambda path, options=options: netcdf(path, **options)
    second = {
        "none": None,
        "zstd": numcodecs.Zstd(),
        "zstd checksum": numcodecs.Zstd(checksum=True),
        "gzip checksum": numcodecs.GZip(),
        "zlib checksum": numcodecs.Zlib(),
        "bz2 checksum": numcodecs.BZ2(),
        "lzma checksum": numcodecs.LZMA(),
        "lz4": numcodecs.LZ4(),
        **{f"blosc {name}": numcodecs.Blosc(name) for name in numcodecs.blosc.list_compressors()},
    }
    for name, codec in second.items():
        found[f"zarr 2 {name}"] = (
            None if "checksum" in name else (12, 25),
            lambda path, codec=codec: store(path, zarr_format=2, compressors=codec),
        )
    for check in (numcodecs.Fletcher32(), numcodecs.CRC32(), numcodecs.Adler32()):
        found[f"zarr 2 {check.codec_id}"] = (
            None,
            lambda path, check=check: store(path, zarr_format=2, compressors=None, filters=[check]),
        )
    third = {
        "none": [],
        "zstd": [codecs.ZstdCodec()],
        "zstd checksum": [codecs.ZstdCodec(checksum=True)],
        "gzip checksum": [codecs.GzipCodec()],
        "crc32c checksum": [codecs.Crc32cCodec()],
        "blosc": [codecs.BloscCodec(cname="lz4")],
        "blosc zstd": [codecs.BloscCodec(cname="zstd")],
        "blosc crc32c checksum": [codecs.BloscCodec(), codecs.Crc32cCodec()],
    }
    for name, each in third.items():
        for shards in (None, (24, 50)):
            found[f"zarr 3 {name}{' in shards' if shards else ''}"] = (
                None if "checksum" in name else (12, 25),
                lambda path, each=each, shards=shards: store(path, zarr_format=3, compressors=each, shards=shards),
            )
    return found


def spoil(path, rng):
    """Cut or flip one file, of a store: one of its files. Return whether it was cut, and what was done."""
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        files.sort(key=lambda file: (file.rpartition("/")[2] in ("zarr.json", ".zarray", ".zattrs", ".zgroup"), file))
        few = 1 if rng.random() < 0.1 else len([file for file in files if "z" not in file[len(path) :]]) or len(files)
        files = files[-few:] if few == 1 else files[:few]
    file = files[rng.integers(len(files))]
    size = os.path.getsize(file)
    if rng.random() < 0.5:
        kept = int(rng.choice([0, 1, size // 2, size - 1, rng.integers(size)]))
        os.truncate(file, kept)
        return True, f"{file} cut to {kept} of {size}"
    at = int(rng.integers(min(size, 32)) if rng.random() < 0.4 else rng.integers(size))
    with open(file, "r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0] ^ (1 << int(rng.integers(8)))
        raw.seek(at)
        raw.write(bytes([byte]))
    return False, f"{file} flipped at {at} of {size}"


# HDF5 reads what was in memory before where a damaged chunk of these filters gives too little: another at each read.
UNWRITTEN = ("szip", "nbit", "lzf")


def as_after_a_flip(found, together):
    """Whether only values that are encoded together differ from what was written. ``found`` has two axes."""
    if together is None or found.shape != ROWS.shape:
        return False
    return len({*map(tuple, np.argwhere(found != ROWS) // together)}) == 1


def by_library(path, kind):
    import h5py
    import netCDF4
    import pandas
    import pyarrow
    import zarr
    from pyarrow import parquet

    if kind == "zarr":
        return zarr.open_group(path, mode="r", use_consolidated=False)["x"][...]
    if kind == "hdf5":
        with h5py.File(path) as file:
            return file["x"][...]
    if kind == "parquet":
        found = parquet.ParquetFile(path, page_checksum_verification=True).read(["x"], use_threads=False)["x"]
        values = found.combine_chunks()
        if isinstance(found.type, pyarrow.FixedSizeListType):
            return values.flatten().to_numpy().reshape(len(found), -1)
        return values.to_numpy(zero_copy_only=False)
    if kind == "csv":
        return pandas.read_csv(path, dtype={"x": "i8"}, keep_default_na=False, skip_blank_lines=True)["x"].to_numpy()
    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        return file["x"][...]


def main(count, first=0, kinds=""):
    """Spoil so many files, and return the counts and the number of those whose rows are wrong."""
    from mpistrat.data import Dataset

    readers = {
        "hdf5": lambda path: Dataset.from_hdf5(path, "x"),
        "netcdf": lambda path: Dataset.from_netcdf(path, "x"),
        "zarr": lambda path: Dataset.from_zarr(path, "x"),
        "parquet": lambda path: Dataset.from_parquet(path, "x"),
        "csv": lambda path: Dataset.from_csv(path, "x", {"x": int}),
    }
    warnings.simplefilter("ignore")
    counts, wrong = collections.Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        known = [each for each in layouts().items() if each[0].startswith(kinds)]
        for seed in range(first, first + count):
            rng = np.random.default_rng(seed)
            name, (together, write) = known[seed % len(known)]
            kind = name.partition(" ")[0]
            path = os.path.join(folder, f"{seed}.{kind}")
            write(path)
            cut, done = spoil(path, rng)
            print(seed, name, done.replace(folder, ""), file=sys.stderr, flush=True)
            try:
                found = np.concatenate(list(readers[kind](path).batch(7)))
            except Exception as error:
                result = "error" if "DataFile" in type(error).__name__ else type(error).__name__
                print("   ", str(error).replace(path, "FILE")[:300], file=sys.stderr)
            else:
                result, written = "rows", ROWS.ravel() if kind == "csv" else ROWS
                if found.dtype.hasobject and len(found) == len(written) and all(map(np.array_equal, found, written)):
                    result = "rows, of which nothing says any more that they are of one length"
                elif found.shape != written.shape or (found != written).any():
                    result = "values of one chunk"
                    try:
                        theirs = by_library(path, kind)
                    except Exception:
                        theirs = None
                    right = theirs is not None and np.array_equal(found, theirs)
                    if not right and any(each in name for each in UNWRITTEN):
                        right, result = True, "with memory that HDF5's filter has left"
                    if cut:
                        right = right and kind == "csv"
                    elif right:
                        right = found.size == ROWS.size and as_after_a_flip(found.reshape(ROWS.shape), together)
                    if not right:
                        result, wrong = "WRONG", wrong + 1
                        print("WRONG", seed, name, done)
            counts[kind, "cut" if cut else "flipped", result] += 1
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    return counts, wrong


if __name__ == "__main__":
    counts, wrong = main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
    print({" ".join(key): number for key, number in sorted(counts.items())}, "wrong", wrong)
