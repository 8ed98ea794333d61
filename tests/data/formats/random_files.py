"""netCDF files and Zarr stores made at random by their own writers, and what xarray reads from them.

``python -m tests.data.formats.random_files 100`` compares so many of both, and counts; under ranks,
these share the rows.
"""

import collections
import os
import sys
import tempfile
import warnings

import numpy as np
from mpi4py import MPI

from mpistrat.data import Dataset
from tests.data.formats.random_tables import batches

NUMBERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
UNITS = ("days since 2000-01-01", "hours since 1970-1-1 06:30:00", "seconds since 1990-05-05T00:00:00Z")


def values(rng, dtype, shape):
    """Return small numbers, which have the same value in all dtypes."""
    return rng.integers(0, 100, shape).astype(dtype)


def attributes(rng, dtype):
    """Return attributes that change what values of a dtype mean, as one of several kinds of programs writes them."""
    number = dtype.type
    kind = rng.choice(
        ["none", "packed", "missing", "unsigned", "time", "span", "bool", "units"], p=[0.2, *[0.12] * 6, 0.08]
    )
    made = {}
    if kind == "packed":
        both = rng.integers(1, 4)
        made |= {"scale_factor": rng.choice([np.float32, np.float64])(0.25)} if both & 1 else {}
        made |= {"add_offset": rng.choice([np.float32, np.float64])(-7.5)} if both & 2 else {}
    if kind in ("missing", "packed", "time") and rng.random() < 0.6:
        made["missing_value"] = number(17) if rng.random() < 0.7 else np.array([3, 17], number)
    if kind == "unsigned" and dtype.isnative:  # xarray swaps the bytes of other fill values
        made["_Unsigned"] = str(rng.choice(["true", "false"]))
    if kind == "time":
        made["units"] = str(
            rng.choice([*UNITS, "months since 2000-01-01", "days since 0001-01-01"], p=[0.28, 0.28, 0.28, 0.08, 0.08])
        )
        if rng.random() < 0.5:
            made["calendar"] = str(rng.choice(["standard", "proleptic_gregorian", "noleap"], p=[0.4, 0.5, 0.1]))
    if kind == "span":
        made |= {
            "units": str(rng.choice(["days", "seconds", "milliseconds"])),
            "dtype": str(rng.choice(["timedelta64[ns]", "timedelta64[s]"])),
        }
    if kind == "bool":
        made["dtype"] = "bool"
    if kind == "units":
        made["units"] = str(rng.choice(["K", "days", "m s-1"]))
    return made


def netcdf(path, rng):
    """Write a netCDF file. Return the names of variables and what xarray makes of them, None where xarray raises."""
    import netCDF4

    version = "NETCDF4_CLASSIC" if rng.random() < 0.1 else "NETCDF3_64BIT" if rng.random() < 0.05 else "NETCDF4"
    with netCDF4.Dataset(path, "w", format=version) as file:
        fills = rng.random() >= 0.2
        if not fills:
            file.set_fill_off()
        rows = int(rng.integers(1, 30)) if rng.random() < 0.6 else 600
        file.createDimension("x", None if rng.random() < 0.5 else rows)
        file.createDimension("y", int(rng.integers(1, 6)))
        file.createDimension("z", None if rng.random() < 0.1 and version == "NETCDF4" else 3)
        file.createDimension("unused", None if rng.random() < 0.5 and version == "NETCDF4" else rows)
        group = file.createGroup("g") if rng.random() < 0.3 and version == "NETCDF4" else file
        for name in ("x", "y", "a", "b", "c"):
            if rng.random() < 0.7:
                _variable(group if rng.random() < 0.5 else file, name, rows, rng)
    found = {}
    with netCDF4.Dataset(path) as file:
        for where, prefix in (file, ""), *((group, "g/") for group in file.groups.values()):
            for name, variable in where.variables.items():
                if variable.shape and variable.shape[0]:
                    found[prefix + name] = netcdf_values(variable)
        found |= dict.fromkeys(set(file.dimensions) - set(file.variables))
    return found


def _variable(group, name, rows, rng):
    dims = ("y",) if name == "y" and rng.random() < 0.5 else ("x", "y", "z")[: rng.integers(1, 4)]
    dims = ("unused",) if rng.random() < 0.15 else dims
    kind = str(rng.choice([*NUMBERS, "S1", "str"], p=[*[0.09] * 10, 0.05, 0.05]))
    dtype = str if kind == "str" else np.dtype(kind).newbyteorder(str(rng.choice(["<", ">"])))
    options = {}
    if rng.random() < 0.6 and kind != "str":
        compressors = ["zlib", "zstd", "bzip2"]
        if rows == 600 and kind not in ("i1", "u1", "S1"):  # netCDF's Blosc fails if it cannot make a chunk smaller
            compressors = ["szip", "blosc_lz", "blosc_lz4", "blosc_lz4hc", "blosc_zlib", "blosc_zstd"]
            options["chunksizes"] = [len(_dimension(group, dim)) or 200 for dim in dims]
        options |= {"compression": str(rng.choice(compressors)), "complevel": int(rng.integers(1, 9))}
        options |= {"shuffle": bool(rng.random() < 0.5), "blosc_shuffle": int(rng.integers(0, 3))}
    if kind != "str":
        options |= {"fletcher32": bool(rng.random() < 0.3), "endian": "native" if dtype.isnative else "big"}
    if kind.startswith("f") and rng.random() < 0.3:
        options |= {
            "significant_digits": 4,
            "quantize_mode": str(rng.choice(["BitGroom", "BitRound", "GranularBitRound"])),
        }
    if kind in NUMBERS and rng.random() < 0.4:
        options["fill_value"] = False if rng.random() < 0.3 else np.dtype(kind).type(5)
    fixed = not any(_dimension(group, dim).isunlimited() for dim in dims)
    if "chunksizes" not in options and rng.random() < 0.5:
        sizes = [1 + rows // 2 if dim in ("x", "unused") else 1 for dim in dims]
        options["chunksizes"] = sizes if not fixed else [1] * len(dims)
    elif fixed and "compression" not in options and not options.get("fletcher32"):
        options["contiguous"] = bool(rng.random() < 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = group.createVariable(name, dtype, dims, **options)
        except (RuntimeError, ValueError):  # no plugin in this build of netCDF, a name that exists, or an old format
            return
    made.set_auto_maskandscale(False)
    sizes = {"x": rows, "z": 3, "unused": rows}
    sizes["y"] = len(_dimension(group, "y"))
    # netCDF gives whatever was in memory for unwritten rows of another byte order, or with two unlimited dimensions.
    endless = sum(_dimension(group, dim).isunlimited() for dim in dims)
    is_short = rng.random() < 0.3 and (kind == "str" or dtype.isnative) and endless < 2
    count = int(rng.integers(0, rows + 1)) if is_short else None
    shape = [sizes[dim] for dim in dims]
    shape[0] = shape[0] if count is None else min(count, shape[0])
    if shape[0]:
        if kind in NUMBERS:
            data = values(rng, kind, shape)
        else:
            data = rng.choice(np.array(["a", "b", "c"], "S1" if kind == "S1" else object), shape)
        made[tuple(slice(0, size) for size in shape)] = data
    if kind in NUMBERS:
        made.setncatts(attributes(rng, dtype))


def _dimension(group, name):
    return group.dimensions[name] if name in group.dimensions else group.parent.dimensions[name]


def netcdf_values(variable):
    """Return what xarray makes of a variable of netCDF4, None if it raises, or does not give numbers of NumPy."""
    import xarray

    variable.set_auto_maskandscale(False)
    variable.set_auto_chartostring(False)
    stored = {name: variable.getncattr(name) for name in variable.ncattrs()}
    return _decoded(lambda: xarray.Variable(variable.dimensions, variable[...], stored))


def _decoded(make):
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = xarray.conventions.decode_cf_variable("v", make(), concat_characters=False).values
        except Exception:
            return None
    return found


def zarr_store(path, rng):
    """Write a Zarr store. Return the names of arrays and what xarray makes of them, None where xarray raises."""
    import numcodecs
    import xarray
    import zarr

    version = int(rng.integers(2, 4))
    rows, found = int(rng.integers(1, 30)), {}
    root = zarr.open_group(path, mode="w", zarr_format=version)
    for name in ("a", "b", "g/c"):
        dtype = np.dtype(str(rng.choice([*NUMBERS, "bool", "f2", "c8", "S3", "U2"]))).newbyteorder(
            str(rng.choice(["<", ">"]))
        )
        dtype = dtype.newbyteorder("=") if dtype.kind == "U" else dtype  # xarray takes the others for longer texts
        shape = (rows, int(rng.integers(1, 7)), 4)[: rng.integers(1, 4)]
        chunks = tuple(int(rng.integers(1, size + 1)) for size in shape)
        options = {"chunks": chunks, "fill_value": None if rng.random() < 0.3 else np.zeros((), dtype)[()]}
        if dtype.kind in "iuf" and rng.random() < 0.4:
            options["fill_value"] = dtype.type(5)
        if version == 2:
            shuffles = (numcodecs.Blosc.NOSHUFFLE, numcodecs.Blosc.SHUFFLE, numcodecs.Blosc.BITSHUFFLE)
            bloscs = [
                numcodecs.Blosc(cname, 5, how) for cname in numcodecs.blosc.list_compressors() for how in shuffles
            ]
            others = [
                numcodecs.Zstd(),
                numcodecs.GZip(),
                numcodecs.Zlib(),
                numcodecs.BZ2(),
                numcodecs.LZMA(),
                numcodecs.LZ4(),
                None,
            ]
            pool = bloscs if rng.random() < 0.5 else others
            options["compressors"] = pool[rng.integers(len(pool))]
            if dtype.kind in "iu" and rng.random() < 0.4:
                little = dtype.str
                pool = [
                    [numcodecs.Delta(little)],
                    [numcodecs.Fletcher32()],
                    [numcodecs.Shuffle(dtype.itemsize)],
                    [numcodecs.CRC32()],
                    [numcodecs.FixedScaleOffset(0, 1, little, little)],
                ]
                options["filters"] = pool[rng.integers(len(pool))]
            options["order"] = str(rng.choice(["C", "F"]))
            options["chunk_key_encoding"] = {"name": "v2", "separator": str(rng.choice([".", "/"]))}
        else:
            from zarr import codecs

            pool = [
                [],
                [codecs.ZstdCodec()],
                [codecs.GzipCodec()],
                [codecs.Crc32cCodec()],
                [codecs.ZstdCodec(checksum=True), codecs.Crc32cCodec()],
            ]
            bloscs = [
                [codecs.BloscCodec(cname=name, shuffle=how)]
                for name in ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
                for how in ("shuffle", "noshuffle", "bitshuffle")
            ]
            pool = bloscs if rng.random() < 0.4 else [*pool, [codecs.BloscCodec(), codecs.Crc32cCodec()]]
            options["compressors"] = pool[rng.integers(len(pool))]
            if rng.random() < 0.4:
                options["shards"] = tuple(size * int(rng.integers(1, 4)) for size in chunks)
            if rng.random() < 0.2:
                options["filters"] = [codecs.TransposeCodec(order=tuple(rng.permutation(len(shape)).tolist()))]
            if dtype.kind in "iufc" and dtype.itemsize > 1 and rng.random() < 0.5:
                options["serializer"] = codecs.BytesCodec(endian=str(rng.choice(["little", "big"])))
            options["chunk_key_encoding"] = {
                "name": str(rng.choice(["default", "v2"])),
                "separator": str(rng.choice([".", "/"])),
            }
        named = rng.random() < 0.8
        if named and version == 3:
            options["dimension_names"] = [f"{name[-1]}{axis}" for axis in range(len(shape))]
        group, _, last = name.rpartition("/")
        group = root.require_group(group) if group else root
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = group.create_array(last, shape=shape, dtype=dtype, **options)
        except (ValueError, TypeError, NotImplementedError):
            continue
        if rng.random() < 0.8:
            part = shape[0] if rng.random() < 0.7 else int(rng.integers(0, rows + 1))
            data = values(rng, "i1", (part, *shape[1:])) if dtype.kind != "b" else rng.random((part, *shape[1:])) < 0.5
            made[:part] = data.astype(dtype)
        given = attributes(rng, dtype) if dtype.kind in "iuf" and named else {}
        given = {
            key: value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
            for key, value in given.items()
        }
        if version == 3 and named and dtype.kind in "iuf" and rng.random() < 0.3:
            from xarray.backends.zarr import FillValueCoder

            given["_FillValue"] = FillValueCoder.encode(dtype.type(9), dtype)
        if named and version == 2:
            given["_ARRAY_DIMENSIONS"] = [f"{name[-1]}{axis}" for axis in range(len(shape))]
        made.attrs.update(given)
        found[name] = named, made[...]
    if rng.random() < 0.5:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(path)
    expected = {}
    for name, (named, stored) in found.items():
        if not named:
            expected[name] = stored
            continue
        group, _, last = name.rpartition("/")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = xarray.backends.ZarrStore.open_group(path, "r", group=group or None, consolidated=False)
        expected[name] = _decoded(lambda: store.open_store_variable(last))  # noqa: B023
    return expected


def verdict(read, expected, comm=MPI.COMM_SELF):
    """Return ``"equal"``, or the message of an error. Raise AssertionError if rows differ without a word."""
    parts, error = batches(read, comm)
    if error:
        return error
    check(np.concatenate(parts), expected)
    return "equal"


def check(found, expected):
    """Raise AssertionError if rows, or their dtype, are not those that are expected."""
    assert expected is not None, f"{found.dtype} where xarray has no numbers: {found.ravel()[:5]}"
    wanted = expected.dtype.newbyteorder("="), expected.shape
    assert (found.dtype, found.shape) == wanted, (found.dtype, found.shape, *wanted)
    both = (found == expected) | ((found != found) & (expected != expected))
    at = np.flatnonzero(~both.astype(bool))[:5]
    assert not len(at), f"{found.ravel()[at]} at {at} of {found.shape}, not {expected.ravel()[at]}"


def main(count, first=0, comm=MPI.COMM_WORLD):
    """Compare so many files of both kinds. Rank 0 writes them, and all ranks share the rows."""
    import netCDF4  # noqa: F401  # HDF5 then finds its filters, on each rank

    counts, errors, wrong = collections.Counter(), collections.Counter(), 0
    with tempfile.TemporaryDirectory() as own:
        folder = comm.bcast(own)
        kinds = ("netcdf", netcdf, Dataset.from_netcdf), ("zarr", zarr_store, Dataset.from_zarr)
        for seed in range(first, first + count):
            for kind, write, read in kinds:
                path, written = os.path.join(folder, f"{seed}.{kind}"), None
                if comm.rank == 0:
                    try:
                        written = write(path, np.random.default_rng(seed))
                    except RuntimeError as error:
                        counts[kind, f"the writer failed: {error}"] += 1
                if (written := comm.bcast(written)) is None:
                    continue
                counts[kind, "files"] += 1
                for name, expected in sorted(written.items(), key=lambda item: item[0]):
                    try:
                        found = verdict(lambda: read(path, name), expected, comm)  # noqa: B023
                    except AssertionError as error:
                        wrong += 1
                        print("WRONG", kind, seed, name, str(error)[:600])
                        continue
                    counts[kind, found if found == "equal" else "error"] += 1
                    if found != "equal":
                        errors[kind, expected is None, found.replace(path, "FILE")[:230]] += 1
        comm.Barrier()
    return counts, errors, wrong


if __name__ == "__main__":
    counts, errors, wrong = main(int(sys.argv[1]), int((sys.argv[2:] or [0])[0]))
    if MPI.COMM_WORLD.rank == 0:
        for error, number in errors.most_common():
            print(number, *error)
        print(dict(counts), "wrong", wrong)
