"""Tests of what one format of files has and others do not."""

import codecs
import csv

import numpy as np
import pytest

from mpistrat.data import ArraySpec, DataFileError, Dataset, DatasetMismatchError, DatasetNotFoundError


def test_npy_arrays_of_any_form(tmp_path):
    values = np.arange(24, dtype=">f4").reshape(4, 2, 3)
    np.save(tmp_path / "a.npy", values)
    dataset = Dataset.from_npy(tmp_path / "a.npy")
    assert dataset.element_spec == ArraySpec((2, 3), "f4")
    (batch,) = dataset.batch(4)
    assert (batch == values).all()
    assert batch.dtype.isnative


def test_npy_files_that_are_refused(tmp_path):
    for name, values, match in (("scalar", np.float64(3), "scalar"), ("objects", np.array([None, 1]), "objects")):
        np.save(tmp_path / name, values)
        with pytest.raises((DataFileError, DatasetMismatchError), match=match):
            len(Dataset.from_npy(tmp_path / f"{name}.npy"))
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros(3))
    with pytest.raises(DataFileError, match=r"'x\.npy' is compressed.*savez"):
        len(Dataset.from_npy(tmp_path / "b.npz"))
    np.savez(tmp_path / "b.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(DatasetMismatchError, match="different lengths"):
        len(Dataset.from_npy(tmp_path / "b.npz"))
    with pytest.raises(DatasetNotFoundError, match="no array 'z'; it has 'x', 'y'"):
        len(Dataset.from_npy(tmp_path / "b.npz", arrays="z"))
    (tmp_path / "b.npz").write_bytes((tmp_path / "b.npz").read_bytes()[:-30])
    with pytest.raises(DataFileError, match=r"b\.npz"):
        len(Dataset.from_npy(tmp_path / "b.npz"))


@pytest.mark.parametrize("shape", [(7, 3), (50, 2, 3), (9, 1), (1, 4), (4000, 5)])
@pytest.mark.parametrize("dtype", ["f8", ">i4", "S3"])
@pytest.mark.parametrize("archive", [False, True])
def test_npy_arrays_in_fortran_order_and_archives(tmp_path, shape, dtype, archive):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = tmp_path / ("a.npz" if archive else "a.npy")
    if archive:
        np.savez(path, x=np.asfortranarray(values), y=values, z=values[:, 0])
    else:
        np.save(path, np.asfortranarray(values))
    rows = Dataset.from_npy(path)
    for made, order in (rows, np.arange(len(values))), (rows.shuffle(seed=1, mode="exact"), None):
        made = made.map(lambda row: row["x"]) if archive else made
        read = np.concatenate([*made.batch(5)])
        if order is None:
            assert sorted(map(bytes, read)) == sorted(map(bytes, values.astype(read.dtype)))
        else:
            assert (read == values).all()
            assert read.dtype == values.dtype.newbyteorder("=")
    if archive:
        pair = Dataset.from_npy(path, arrays=("z", "y"))
        z, y = next(iter(pair.batch(len(values))))
        assert (z == values[:, 0]).all()
        assert (y == values).all()
        assert rows.definition.source.element_spec().keys() == {"x", "y", "z"}


@pytest.mark.full
def test_parquet_strings_and_lists(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    fixed = arrow.FixedSizeListArray.from_arrays(arrow.array(np.arange(18.0)), 2)
    made = {"text": [f"t{i}" for i in range(9)], "list": [[i] * (i % 3) for i in range(9)], "pair": fixed}
    parquet.write_table(arrow.table(made), tmp_path / "a.parquet", row_group_size=4)
    dataset = Dataset.from_parquet(tmp_path / "a.parquet", ("text", "list", "pair"))
    assert dataset.element_spec[2] == ArraySpec((2,), "f8")
    text, _, pair = next(iter(dataset.skip(3).batch(4)))
    assert text.tolist() == ["t3", "t4", "t5", "t6"]
    assert pair.tolist() == np.arange(6.0, 14).reshape(4, 2).tolist()
    padded = Dataset.from_parquet(tmp_path / "a.parquet", "list").skip(1).padded_batch(2)
    assert next(iter(padded)).tolist() == [[1, 0], [2, 2]]


def test_parquet_values_that_are_missing(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(DataFileError, match=r"column 'x': 1 values are missing"):
        list(Dataset.from_parquet(tmp_path / "a.parquet", "x").batch(2))
    inside = [[1, None], [2]], [["a", None]], [[{"a": None}]], [[[1], None]]
    mapped = arrow.array([[("a", None)]], arrow.map_(arrow.string(), arrow.int64()))
    for lists in (*inside, mapped):
        parquet.write_table(arrow.table({"x": lists}), tmp_path / "b.parquet")
        with pytest.raises(DataFileError, match=r"column 'x': 1 values are missing"):
            list(Dataset.from_parquet(tmp_path / "b.parquet", "x").batch(2))


def test_parquet_row_groups_of_other_lengths(tmp_path):
    """A flipped bit in the footer makes 3 rows -4, of which pyarrow reads the other groups without a word."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"x": np.arange(9)}), path, row_group_size=3)
    content, found = path.read_bytes(), 0
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for place in (place for place in range(footer, len(content) - 8) if content[place] == 6):
        path.write_bytes(content[:place] + b"\7" + content[place + 1 :])
        try:
            groups = parquet.ParquetFile(path).metadata
            rows = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        except (OSError, arrow.ArrowException):
            continue
        if sum(rows) != 9:
            found += 1
            with pytest.raises(DataFileError, match=r"its row groups have .*-4.* rows, and the file 9"):
                len(Dataset.from_parquet(path, "x"))
    assert found == 3


def test_parquet_pages_that_are_damaged(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = np.arange(1000) + 10**12
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"x": values}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    raw = bytearray(path.read_bytes())
    raw[raw.index(values[:2].tobytes()) + 1] ^= 8
    path.write_bytes(raw)
    with pytest.raises(DataFileError, match=r"rows 0 to 999 cannot be read \(.*CRC"):
        list(Dataset.from_parquet(path, "x").batch(1000))


def test_parquet_files_that_differ(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, rows in ("a", ["u", "v"]), ("b", [[1], [2, 3]]), ("c", [["u"], []]):
        parquet.write_table(arrow.table({"x": rows}), tmp_path / f"{name}.parquet")
    for one, other in ("a", "b"), ("b", "c"), ("a", "c"):
        files = [tmp_path / f"{name}.parquet" for name in (one, other)]
        with pytest.raises(DatasetMismatchError, match=r"rows of (strings|lists of int64).*and of lists of"):
            len(Dataset.from_parquet(files, "x"))
        assert len(Dataset.from_parquet(files[1:] * 2, "x", manifest=tmp_path / f"{one}{other}.json")) == 4
        kept = Dataset.from_parquet(files[1:] * 2, "x", manifest=tmp_path / f"{one}{other}.json")
        assert [np.asarray(row).tolist() for row in kept][:2] == [
            np.asarray(row).tolist() for row in Dataset.from_parquet(files[1], "x")
        ]


def test_parquet_columns_of_one_name(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    twice = arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["x", "x"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataFileError, match="2 columns named 'x'"):
        len(Dataset.from_parquet(tmp_path / "a.parquet", "x"))


@pytest.mark.full
def test_parquet_times_are_those_of_utc(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = np.array(["2020-01-01T12", "3000-01-01T12"], "M8[us]")
    for zone in (None, "UTC", "Europe/Berlin"):
        column = arrow.array(times, arrow.timestamp("us", tz=zone))
        parquet.write_table(arrow.table({"x": column}), tmp_path / "a.parquet")
        (batch,) = Dataset.from_parquet(tmp_path / "a.parquet", "x").batch(2)
        assert (batch.dtype, batch.tolist()) == (times.dtype, times.tolist())


@pytest.mark.full
def test_zarr_arrays_that_are_stores(tmp_path):
    zarr = pytest.importorskip("zarr")
    values = np.arange(60, dtype=">i4").reshape(20, 3)
    for name, part in ("a", values[:12]), ("b", values[12:]):
        made = zarr.open(tmp_path / f"{name}.zarr", mode="w", shape=part.shape, chunks=(5, 2), dtype=">i4")
        made[:] = part
    dataset = Dataset.from_zarr(tmp_path / "*.zarr")
    assert dataset.element_spec == ArraySpec((3,), "i4")
    assert np.concatenate(list(dataset.batch(7))).tolist() == values.tolist()


def test_zarr_strings_of_any_length(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    np_strings = pytest.importorskip("numpy.dtypes", reason="NumPy 1").__dict__.get("StringDType")
    if np_strings is None:
        pytest.skip("NumPy 1 has no strings of any length")
    made = zarr.create_array(tmp_path / "a.zarr", shape=(9,), chunks=(2,), dtype="string")
    made[:] = texts = np.array(["a", "", "\u00e9" * 50] * 3, np_strings())
    found = [text for batch in Dataset.from_zarr(tmp_path / "a.zarr").batch(4) for text in batch]
    assert found == texts.tolist()


@pytest.mark.full
def test_netcdf_files_of_version_3(tmp_path):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "old.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("rows", 3)
        file.createVariable("x", "f4", ("rows",))[:] = 1
    with pytest.raises(DataFileError, match="nccopy"):
        len(Dataset.from_netcdf(tmp_path / "old.nc", "x"))


@pytest.mark.parametrize("coordinate", [False, True])
def test_netcdf_rows_that_an_unlimited_dimension_has(tmp_path, coordinate):
    """A variable that is shorter than its unlimited dimension has fill values for the rest, as netCDF reads it."""
    netcdf = pytest.importorskip("netCDF4")
    lengths = {"none": 0, "one": 1, "four": 4, "whole": 23}
    for name in ("a", "b"):
        with netcdf.Dataset(tmp_path / f"{name}.nc", "w") as file:
            file.createDimension("time", None)
            file.createDimension("i", 2)
            if coordinate:
                file.createVariable("time", "f8", ("time",))[:] = range(3)
            for variable, length in lengths.items():
                kind = {} if variable == "one" else {"fill_value": -9.0}
                made = file.createVariable(variable, "f4", ("time", "i"), chunksizes=(5, 2), zlib=True, **kind)
                if length:
                    made[:length] = np.arange(2 * length).reshape(-1, 2)
    files = [tmp_path / "a.nc", tmp_path / "b.nc"]
    with netcdf.Dataset(files[0]) as file:
        expected = {name: np.concatenate([np.ma.getdata(file[name][:])] * 2) for name in file.variables}
    found = Dataset.from_netcdf(files, {name: name for name in expected}, decode=False)
    assert len(found) == 46
    (batch,) = found.batch(46)
    for name, values in expected.items():
        assert batch[name].tolist() == values.tolist(), name
    (shuffled,) = found.shuffle(seed=1).batch(46)
    order = np.lexsort(shuffled["whole"].T)
    assert shuffled["four"][order].tolist() == values_in_order(expected).tolist()


def values_in_order(columns):
    return columns["four"][np.lexsort(columns["whole"].T)]


def test_netcdf_variables_that_are_short_along_another_axis(tmp_path):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("i", 2)
        file.createDimension("time", None)
        file.createVariable("whole", "f4", ("i", "time"))[:, :3] = 1
        file.createVariable("short", "f4", ("i", "time"))[:, :2] = 1
    assert len(Dataset.from_netcdf(tmp_path / "a.nc", "whole")) == 2
    with pytest.raises(DataFileError, match="'short': it is shorter than its unlimited dimension along axis 1"):
        len(Dataset.from_netcdf(tmp_path / "a.nc", "short"))


def test_csv_lines_of_any_form(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfa;text;b\r\n1;"one; \r\ntwo";2\r\n\r\n3;"say ""hi""";4\r\n5;;6')
    dataset = Dataset.from_csv(path, ("a", "text", "b"), {"a": "i4", "text": str}, delimiter=";")
    (batch,) = dataset.batch(9)
    assert [column.tolist() for column in batch] == [[1, 3, 5], ["one; \r\ntwo", 'say "hi"', ""], [2.0, 4.0, 6.0]]
    assert batch[0].dtype == "i4"
    (tmp_path / "b.csv").write_text("1,2\n3,4\n")
    assert [x.tolist() for x in Dataset.from_csv(tmp_path / "b.csv", "1", header=False).batch(2)] == [[2, 4]]


@pytest.mark.full
def test_many_csv_lines(tmp_path):
    lines = [f'{i},"{i}\n"' for i in range(10_000)]
    (tmp_path / "a.csv").write_text("a,t\n" + "\n".join(lines))
    dataset = Dataset.from_csv(tmp_path / "a.csv", {"a": "a", "t": "t"}, {"t": str, "a": int})
    batch = next(iter(dataset.shuffle(seed=1).batch(10_000)))
    assert sorted(batch["a"].tolist()) == list(range(10_000))
    assert all(int(text) == number for text, number in zip(batch["t"], batch["a"], strict=True))


def test_csv_rows_that_are_wrong(tmp_path):
    for text, dtype, match in (
        ("a,b\n1,2\n3\n", float, "row 1 has 1 values"),
        ("a,b\n1,2\nx,4\n", float, "row 1 has 'x'"),
        ("a\n1\nyes\n", bool, "row 1 has 'yes'"),
        ("a\nabc\nabcd\n", "U3", "row 1 has 'abcd'"),
        ("a\n1\n300\n", "u1", "row 1 has '300'"),
        ("a\n1\n1e6\n", "f2", "row 1 has '1e6'"),
        ('a\n1\n"2\n3\n', str, "a quote in row 1 is not closed"),
        ("a,a\n1,2\n", float, "2 columns named 'a'"),
    ):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(DataFileError, match=match):
            list(Dataset.from_csv(tmp_path / "a.csv", "a", {"a": dtype}).batch(2))
    (tmp_path / "a.csv").write_text("label\n1\n")
    with pytest.raises(DatasetNotFoundError, match="no column 'lable'"):
        len(Dataset.from_csv(tmp_path / "a.csv", "label", {"lable": int}))
    for delimiter in (", ", '"', "\n"):
        with pytest.raises(ValueError, match="one character"):
            Dataset.from_csv(tmp_path / "a.csv", "a", delimiter=delimiter)


NO_NUMBERS = ["1_000", "\u0661\u0662", "\uff11", "1\x1c", "1\x00", "\u20071", "0x10", "1e", "--1", "1 2", ".", ""]
NUMBERS = ["1", "-1", "+1", " 1", "1\t", "007"]
NO_VALUES_OF = {
    "u1": ["-1", "256", "1.0", "nan", "1e2", "1" * 30],
    "i8": ["9223372036854775808", "1.0"],
    "f2": ["65520", "-1e6"],
    "f4": ["1e39"],
    "f8": ["1e400", "-1e309", "infinite"],
    "c16": ["1e400", "1e400j", "i"],
    "M8[s]": ["today", "now", "2020-13-01"],
    "m8[s]": ["1 day"],
    "S2": ["1\x00", "\xe9"],
    "U2": ["1\x00"],
}


@pytest.mark.parametrize("dtype", NO_VALUES_OF)
def test_csv_texts_that_are_no_values(tmp_path, dtype):
    """What Python and NumPy take for numbers, but no other reader, is refused; so is what overflows."""
    digits = [] if np.dtype(dtype).kind in "SUMm" else NO_NUMBERS
    for text in [*digits, *NO_VALUES_OF[dtype]]:
        first = {"M": "2020-01-01", "m": "3"}.get(np.dtype(dtype).kind, "1")
        (tmp_path / "a.csv").write_text(f'a\n{first}\n"{text}"\n', encoding="utf-8")
        with pytest.raises(DataFileError, match=r"row 1 has |cannot be read"):
            list(Dataset.from_csv(tmp_path / "a.csv", "a", {"a": dtype}).batch(2))


def test_csv_texts_that_are_numbers(tmp_path):
    for dtype in ("i1", "i8", "f2", "f4", "f8", "c16"):
        (tmp_path / "a.csv").write_text("a\n" + "".join(f'"{text}"\n' for text in NUMBERS))
        (batch,) = Dataset.from_csv(tmp_path / "a.csv", "a", {"a": dtype}).batch(9)
        assert batch.tolist() == [int(text) for text in NUMBERS]
    texts = ["1e-400", "-.5", "2.", "1E3", "inf", "-Infinity", "NaN"]
    (tmp_path / "a.csv").write_text("\n".join(["a", *texts]) + "\n")
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", "a").batch(9)
    assert batch[:6].tolist() == [0, -0.5, 2, 1000, np.inf, -np.inf]
    assert np.isnan(batch[6])


def test_csv_values_as_the_csv_module_reads_them(tmp_path):
    texts = ['5" pipe', '"', 'x"y"', "", " ", "a,b", "a\nb", '"\r\n"', ',"', "\t"]
    rows = [[a, b] for a in texts for b in texts]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file, quoting=quoting).writerows([["a", "b"], *rows])
            file.write('\n7,bare "quotes" and 5" pipe\n')
        (batch,) = Dataset.from_csv(tmp_path / "a.csv", ("a", "b"), dict.fromkeys("ab", str)).batch(200)
        assert [list(row) for row in zip(*batch, strict=True)] == [*rows, ["7", 'bare "quotes" and 5" pipe']]
    (tmp_path / "b.csv").write_bytes(codecs.BOM_UTF8 + b"true\n0\nFALSE\n1\n")
    (batch,) = Dataset.from_csv(tmp_path / "b.csv", "0", {"0": bool}, header=False).batch(9)
    assert batch.tolist() == [True, False, False, True]
    (tmp_path / "c.csv").write_bytes(b'a\n1\n""\n\n2\n')
    (batch,) = Dataset.from_csv(tmp_path / "c.csv", "a", {"a": str}).batch(9)
    assert batch.tolist() == ["1", "", "2"]


@pytest.mark.parametrize(
    ("text", "delimiter"), [("a,b\n1,2\n \t \n3,4\n  ", ","), ("a\tb\r\n1\t2\r\n  \r\n3\t4\r\n", "\t")]
)
@pytest.mark.parametrize("kind", [str, float])
def test_lines_of_spaces_are_no_rows_of_csv(tmp_path, text, delimiter, kind):
    (tmp_path / "a.csv").write_bytes(text.encode())
    (batch,) = Dataset.from_csv(tmp_path / "a.csv", "b", {"b": kind}, delimiter=delimiter).batch(9)
    assert batch.tolist() == [kind("2"), kind("4")]


@pytest.mark.parametrize("text", ['"a\\"b",1\n', '"a"b,1\n', '"a\\"",1\n"b\\"",2\n', '"C",1\n"a\nb"c,2\n'])
def test_a_text_after_a_closing_quote(tmp_path, text):
    """Quotes that are escaped by backslashes end a value elsewhere."""
    (tmp_path / "a.csv").write_text(f"x,y\n{text}")
    with pytest.raises(DataFileError, match=r"in row \d a text follows a closing quote"):
        Dataset.from_csv(tmp_path / "a.csv", "x", {"x": str})
    (tmp_path / "a.csv").write_text('x,y\n"C:\\",1\n"""q""\n" ,2\n')
    assert next(iter(Dataset.from_csv(tmp_path / "a.csv", "x", {"x": str}).batch(2))).tolist() == ["C:\\", '"q"\n ']


def test_a_long_value(tmp_path):
    """The module csv of Python takes no more than 131,072 characters by default."""
    (tmp_path / "a.csv").write_text(f"id,text\n1,short\n2,{'w' * 131_073}\n")
    assert [len(text) for text in Dataset.from_csv(tmp_path / "a.csv", "text", {"text": str})] == [5, 131_073]
    assert list(Dataset.from_csv(tmp_path / "a.csv", "id", {"id": int})) == [1, 2]
