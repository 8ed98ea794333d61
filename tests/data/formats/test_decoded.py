"""netCDF and Zarr as their own libraries read them: names, missing and packed values, times, and damaged files."""

import os
import pickle
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset, DatasetMismatchError, DatasetNotFoundError
from tests.data.formats import damaged_files, random_files
from tests.selection import core

netcdf = pytest.importorskip("netCDF4")


@pytest.fixture
def xarray():
    return pytest.importorskip("xarray", minversion="2026.1", reason="older ones decode spans of time otherwise")


@pytest.fixture
def zarr():
    return pytest.importorskip("zarr", minversion="3", reason="the tests write as zarr 3 does")


def rows(dataset):
    return np.concatenate(list(dataset.batch(4)))


@pytest.fixture
def new(tmp_path):
    """Return a function that makes a netCDF file with a variable of some values, and attributes; returns its path."""

    def make(values, stored="i2", name="a.nc", **attributes):
        with netcdf.Dataset(tmp_path / name, "w") as file:
            file.createDimension("t", None)
            made = file.createVariable("x", stored, ("t",), fill_value=attributes.pop("_FillValue", None))
            made.set_auto_maskandscale(False)
            made[:] = values
            made.setncatts(attributes)
        return tmp_path / name

    return make


@pytest.mark.parametrize("seed", core(range(6), 0))
@pytest.mark.parametrize("kind", ["netcdf", "zarr_store"])
def test_random_files(tmp_path, kind, seed, xarray, zarr):
    """Rows are those of xarray, or an error says why not."""
    read = Dataset.from_netcdf if kind == "netcdf" else Dataset.from_zarr
    equal = 0
    for part in range(5):
        path = tmp_path / str(part)
        try:
            written = getattr(random_files, kind)(path, np.random.default_rng(10 * seed + part))
        except RuntimeError:  # filters of netCDF fail with some chunks
            continue
        for name, expected in written.items():
            found = random_files.verdict(lambda: read(path, name), expected)  # noqa: B023
            equal += found == "equal"
            assert found == "equal" or found.startswith(("DataFileError", "DatasetNotFoundError")), found
            assert found == "equal" or "fix:" in found
    assert equal >= 4


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 100])
def test_damaged_files(first, zarr):
    """Rows are those that were written, or an error is raised; also where a C library might read beyond a chunk."""
    code = f"from tests.data.formats import damaged_files; print(damaged_files.main(80, {first})[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stdout + done.stderr[-3000:]


def test_a_variable_that_is_not_the_coordinate_of_its_dimension(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        group = file.createGroup("g")
        for place in (file, group):
            place.createDimension("x", None)
            place.createDimension("t", 7)
            place.createVariable("x", "f8", ("t",))[:] = np.arange(7) + 1
            place.createVariable("y", "i4", ("x",))[:] = np.arange(7)
    for name in ("x", "g/x"):
        assert rows(Dataset.from_netcdf(tmp_path / "a.nc", name)).tolist() == [1, 2, 3, 4, 5, 6, 7]
        dataset = Dataset.from_netcdf(tmp_path / "a.nc", name)
        assert len(rows(dataset)) == 7
        os.utime(tmp_path / "a.nc", (1, len(name)))  # it is described again, and is the same
        assert len(rows(dataset)) == 7
    with pytest.raises(DatasetNotFoundError, match="no variable 't', only a dimension"):
        len(Dataset.from_netcdf(tmp_path / "a.nc", "t"))


def test_the_default_fill_value_of_netcdf(tmp_path):
    kinds = [*random_files.NUMBERS, "S1", "str"]
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.set_fill_off()
        file.createDimension("t", None)
        for kind in kinds:
            made = file.createVariable(kind, str if kind == "str" else kind, ("t",))
            made[:2] = np.array(["a", "b"], object) if kind == "str" else np.array([1, 2]).astype(kind)
        file.createVariable("long", "i4", ("t",))[:5] = 0
    with netcdf.Dataset(tmp_path / "a.nc") as file:
        file.set_auto_mask(False)
        for kind in kinds:
            found = rows(Dataset.from_netcdf(tmp_path / "a.nc", kind))
            assert (found.tolist(), len(found)) == (file[kind][:].tolist(), 5), kind


DECODED = {
    "packed": ([0, 46, -1], "i2", {"scale_factor": 0.5, "_FillValue": np.int16(-1)}, [0, 23, np.nan]),
    "packed in float32": ([0, 46], "i2", {"scale_factor": np.float32(0.5), "add_offset": np.float32(1)}, [1, 24]),
    "unsigned": ([1, -128, -1], "i1", {"_Unsigned": "true"}, [1, 128, 255]),
    "unsigned and missing": ([1, -1], "i1", {"_Unsigned": "true", "_FillValue": np.int8(-1)}, [1, np.nan]),
    "signed": ([1, 255], "u1", {"_Unsigned": "false"}, [1, -1]),
    "missing": ([1, 7, 8], "i4", {"missing_value": np.array([7, 8], "i4")}, [1, np.nan, np.nan]),
    "NaN for missing": ([1, np.nan], "f4", {"_FillValue": np.float32(np.nan)}, [1, np.nan]),
    "days": ([0, 31], "i4", {"units": "days since 2000-01-01"}, ["2000-01-01", "2000-02-01"]),
    "parts of days": ([0.25, np.nan], "f8", {"units": "days since 2000-1-1 6:00"}, ["2000-01-01T12", "NaT"]),
    **{
        f"zone {zone}": ([0], "i4", {"units": f"minutes since 2000-01-01 {clock}{zone}"}, [expected])
        for zone, clock, expected in (
            ("+1:00", "00:00:00 ", "1999-12-31T23"),
            ("-05:30", "0:0:0 ", "2000-01-01T05:30"),
            ("+0200", "6:00", "2000-01-01T04"),
            ("-6", "6:00 ", "2000-01-01T12"),
            ("+01:00", "", "1999-12-31T23"),
            ("GMT", "00:00 ", "2000-01-01"),
        )
    },
    "missing days": ([0, 9], "i4", {"units": "day since 2000-01-01", "_FillValue": np.int32(9)}, ["2000-01-01", "NaT"]),
    "spans": ([5, 6], "i4", {"units": "days", "dtype": "timedelta64[s]"}, [432000, 518400]),
    "booleans": ([0, 1], "i1", {"dtype": "bool"}, [False, True]),
    "other units": ([0, 9], "f4", {"units": "K"}, [0, 9]),
}


@pytest.mark.parametrize("name", DECODED)
def test_values_are_decoded(new, name):
    values, dtype, attributes, expected = DECODED[name]
    dataset = Dataset.from_netcdf(new(values, dtype, **attributes), "x")
    found = rows(dataset)
    assert dataset.element_spec.dtype == found.dtype
    np.testing.assert_array_equal(found, np.array(expected).astype(found.dtype))
    np.testing.assert_array_equal(np.sort(rows(dataset.shuffle(seed=1))), np.sort(found))
    stored = rows(Dataset.from_netcdf(new(values, dtype, **attributes), "x", decode=False))
    assert stored.dtype == dtype
    np.testing.assert_array_equal(stored, np.array(values, dtype))


@pytest.mark.parametrize("name", DECODED)
def test_values_are_decoded_as_by_xarray(new, tmp_path, name, xarray, zarr):
    values, dtype, attributes, _ = DECODED[name]
    path = new(values, dtype, **attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = xarray.load_dataset(path)
        random_files.check(rows(Dataset.from_netcdf(path, "x")), data["x"].values)
        for version in (2, 3) if "missing_value" not in attributes else ():  # xarray does not write several
            store = tmp_path / f"{version}.zarr"
            data.to_zarr(store, zarr_format=version, consolidated=version == 3)
            with xarray.open_zarr(store, consolidated=False) as written:
                random_files.check(rows(Dataset.from_zarr(store, "x")), written["x"].values)


@pytest.mark.parametrize(
    ("dtype", "attributes", "match"),
    [
        ("i4", {"units": "days since 2000-01-01", "calendar": "noleap"}, "calendar 'noleap'"),
        ("i4", {"units": "days since 0001-01-01"}, "days since 0001-01-01"),
        ("i4", {"units": "days since 2001-02-29"}, "2001-02-29"),
        ("i4", {"units": "months since 2000-01-01"}, "months since"),
        ("i4", {"units": "days since 2000-01-01 00:00 CET"}, "CET"),
        ("i4", {"units": "days since 2000-01-01 +1"}, r"\+1"),
        ("f4", {"units": "days", "dtype": "timedelta64[s]"}, "days that are float32"),
        ("i4", {"units": "milliseconds", "dtype": "timedelta64[s]"}, "milliseconds that are int32"),
        ("i4", {"units": "days", "_FillValue": np.int32(1)}, "units 'days'"),
        ("i4", {"scale_factor": [1.0, 2.0]}, "scale_factor"),
        ("i4", {"scale_factor": "0.5"}, "scale_factor"),
        ("f4", {"missing_value": "-9"}, "missing_value"),
        ("i1", {"_Unsigned": "yes"}, "_Unsigned is 'yes'"),
    ],
)
def test_what_is_not_decoded_is_refused_by_name(new, dtype, attributes, match):
    path = new([1, 2], dtype, **attributes)
    with pytest.raises(DataFileError, match=rf"a\.nc', variable 'x': .*{match}.*; fix: decode=False"):
        len(Dataset.from_netcdf(path, "x"))
    assert rows(Dataset.from_netcdf(path, "x", decode=False)).tolist() == [1, 2]


def test_texts(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("t", None)
        file.createVariable("x", str, ("t",))[:] = np.array(["a", "", "\u00e9"], object)
        file.createVariable("y", "S1", ("t",))[:] = np.array(["a", "b", "c"], "S1")
        file.createVariable("z", str, ("t",))[:] = np.array(["a", "b", "c"], object)
        file["z"].missing_value = "b"
    assert rows(Dataset.from_netcdf(tmp_path / "a.nc", "x")).tolist() == ["a", "", "\u00e9"]
    assert rows(Dataset.from_netcdf(tmp_path / "a.nc", "y")).tolist() == [b"a", b"b", b"c"]
    with pytest.raises(DataFileError, match="missing_value"):
        len(Dataset.from_netcdf(tmp_path / "a.nc", "z"))


def test_a_time_that_is_too_far(new):
    path = new([1, 10**9], "i8", units="days since 2000-01-01")
    with pytest.raises(DataFileError, match="variable 'x': a time is out of the range"):
        rows(Dataset.from_netcdf(path, "x"))


def test_files_with_different_attributes(new, tmp_path):
    """Values of each file are decoded by its own attributes; their dtypes must be the same."""
    files = [new([2, 4], "i2", f"{scale}.nc", scale_factor=scale) for scale in (0.5, 2.0)]
    assert rows(Dataset.from_netcdf(files, "x")).tolist() == [1, 2, 4, 8]
    assert rows(pickle.loads(pickle.dumps(Dataset.from_netcdf(files, "x")))).tolist() == [1, 2, 4, 8]
    times = [new([1], "i4", f"{unit}.nc", units=f"{unit} since 2000-01-01") for unit in ("days", "hours")]
    assert rows(Dataset.from_netcdf(times, "x")).astype("M8[h]").astype(str).tolist() == [
        "2000-01-02T00",
        "2000-01-01T01",
    ]
    with pytest.raises(DatasetMismatchError, match=r"float64 .* datetime64\[ns\]"):
        len(Dataset.from_netcdf([files[0], times[0]], "x"))
    kept = tmp_path / "kept.json"
    for _ in range(2):
        assert rows(Dataset.from_netcdf(files, "x", manifest=kept)).tolist() == [1, 2, 4, 8]
    for other in (
        lambda: Dataset.from_netcdf(files, "x", kept, decode=False),
        lambda: Dataset.from_hdf5(files, "x", kept),
    ):
        with pytest.raises(DataFileError, match="stale: its files were read as netCDF, and now as"):
            len(other())


def test_attributes_that_change(new):
    path = new([2, 4], "i2", scale_factor=0.5)
    dataset = Dataset.from_netcdf(path, "x")
    assert rows(dataset).tolist() == [1, 2]
    size = os.path.getsize(path)
    new([2, 4], "i2", scale_factor=0.25)
    assert os.path.getsize(path) == size
    os.utime(path, (1, 1))
    with pytest.raises(DataFileError, match=r"changed|written"):
        rows(dataset)


def test_coordinates_of_several_axes(tmp_path):
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("x", None)
        file.createDimension("t", None)
        file.createVariable("x", "f4", ("x", "t"))[:2, :5] = 1
        file.createVariable("y", "f4", ("t",))[:3] = 1
    for name in ("x", "y"):
        with pytest.raises(DataFileError, match="'/x' has several axes, one of them unlimited"):
            len(Dataset.from_netcdf(tmp_path / "a.nc", name))


@pytest.fixture
def store(tmp_path, zarr):
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w")
    group.create_array("x", shape=(20, 3), dtype="f4", chunks=(2, 3), shards=(10, 3))[:] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
    return path


@pytest.mark.parametrize("size", [0, 1, 60, 200])
def test_shards_that_are_cut(store, size):
    os.truncate(store / "x/c/1/0", size)
    with pytest.raises(DataFileError, match=r"array 'x': .*c/1/0': (it has 0 bytes|a shard of|.*)"):
        rows(Dataset.from_zarr(store, "x"))


@pytest.mark.parametrize("version", [2, 3])
def test_blosc_chunks_that_are_cut(tmp_path, version, monkeypatch, zarr):
    blosc = damaged_files.layouts()[f"zarr {version} blosc {'lz4' if version == 2 else 'zstd'}"][1]
    blosc(tmp_path / "a.zarr")
    chunk = tmp_path / "a.zarr/x" / ("0.0" if version == 2 else "c/0/0")
    os.truncate(chunk, chunk.stat().st_size // 2)
    with pytest.raises(DataFileError, match=r"a Blosc chunk of .* says that it has"):
        rows(Dataset.from_zarr(tmp_path / "a.zarr", "x"))
    chunk.write_bytes(b"\x02\x01\x00\x04" + np.array([2000, 100, 16], "<u4").tobytes())
    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", "1999")
    with pytest.raises(DataFileError, match="MPISTRAT_DATA_BLOCK_BYTES"):
        rows(Dataset.from_zarr(tmp_path / "a.zarr", "x"))


def test_arrays_that_consolidated_metadata_does_not_know(store, zarr):
    group = zarr.open_group(store, use_consolidated=False)
    group["x"].append(np.full((5, 3), 8, "f4"))
    assert rows(Dataset.from_zarr(store, "x"))[:, 0].tolist() == [7] * 20 + [8] * 5
    shutil.rmtree(store / "x")
    with pytest.raises(DatasetNotFoundError, match="no array 'x'"):
        len(Dataset.from_zarr(store, "x"))


def test_a_store_is_opened_once_and_its_changes_are_noticed(store, monkeypatch, zarr):
    opened, opens = [], zarr.open
    monkeypatch.setattr(zarr, "open", lambda *args, **kwargs: opened.append(args) or opens(*args, **kwargs))
    dataset = Dataset.from_zarr(store, "x")
    for _ in range(3):
        assert len(rows(dataset)) == 20
    assert len(opened) == 1
    assert len(rows(pickle.loads(pickle.dumps(dataset)))) == 20
    os.utime(store / "x/zarr.json", (1, 1))  # another state with the same contents
    assert len(rows(dataset)) == 20
    opens(store, use_consolidated=False)["x"].append(np.zeros((5, 3), "f4"))
    with pytest.raises(DataFileError, match=r"changed|written"):
        rows(dataset)
