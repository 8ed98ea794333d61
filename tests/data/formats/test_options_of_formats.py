"""Options of CSV and Parquet files: values are those of pandas and pyarrow, or an error names the option."""

import gzip

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset, DatasetNotFoundError
from tests.selection import core

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
csv = pytest.importorskip("pyarrow.csv")


def columns(dataset):
    """Return all rows of a dataset of dicts as a dict of lists."""
    rows = [*dataset]
    return {name: [np.asarray(row[name]).tolist() for row in rows] for name in rows[0]}


@pytest.fixture
def mixed(tmp_path):
    """A table with what pandas writes: nulls, categories, structures, times; in row groups of 4."""
    table = pa.table(
        {
            "x": pa.array([0.5, None, 2.5, 3.5, None, 5.5, 6.5, 7.5, 8.5, 9.5]),
            "n": pa.array([0, 1, None, 3, 4, 5, 6, 7, 8, 9]),
            "kind": pa.array(["a", "b", "a", "c", "a", "b", "a", "c", "b", "b"]).dictionary_encode(),
            "when": pa.array([0, None, *range(2, 10)], pa.timestamp("us")),
            "at": pa.array([{"p": k, "q": {"r": k / 2}} for k in range(10)]),
            "text": pa.array(["u", None, *"wxyzuvwx"]),
        }
    )
    path = tmp_path / "mixed.parquet"
    pq.write_table(table, path, row_group_size=4)
    return path, table


def test_all_columns_of_parquet(mixed):
    path, table = mixed
    null = {"n": -1, "text": ""}
    found = columns(Dataset.from_parquet(path, null=null))
    flat = table.flatten().flatten()
    assert [*found] == flat.column_names
    for name, values in found.items():
        expected = [null.get(name) if each is None else each for each in flat[name].to_pylist()]
        if name == "when":
            stored = flat[name].to_numpy()
            np.testing.assert_array_equal(
                np.array([row["when"] for row in Dataset.from_parquet(path, null=null)]), stored
            )
        else:
            np.testing.assert_array_equal(values, [np.nan if each is None else each for each in expected])
    of_two = Dataset.from_parquet(path, ("at.q.r", "kind")).shuffle(seed=1).batch(3)
    assert sorted(map(str, (x for batch in of_two for x in batch[0]))) == [str(k / 2) for k in range(10)]


def test_missing_values_that_no_dtype_holds(mixed):
    path, _ = mixed
    for name in ("n", "text"):
        with pytest.raises(DataFileError, match=r"missing \(null\).*null="):
            [*Dataset.from_parquet(path, name)]
    as_pandas = [*Dataset.from_parquet(path, "n", null={"n": np.nan})]
    np.testing.assert_array_equal(as_pandas, [0, 1, np.nan, *range(3, 10)])  # as `Table.to_pandas` has them
    assert {each.dtype for each in as_pandas} == {np.dtype(float)}
    assert [int(n) for n in Dataset.from_parquet(path, "n", null={"n": 7})][2] == 7
    with pytest.raises(DataFileError, match="is not of int64"):
        Dataset.from_parquet(path, "n", null={"n": "none"})
    with pytest.raises(DatasetNotFoundError, match="null= names 'm'"):
        Dataset.from_parquet(path, "n", null={"m": 0})
    with pytest.raises(DatasetNotFoundError, match=r"'at\.p', 'at\.q\.r'"):
        Dataset.from_parquet(path, "at.z")
    large = path.with_name("large.parquet")
    pq.write_table(pa.table({"n": [2**53 + 1, None, 0]}), large)
    with pytest.raises(DataFileError, match="9007199254740993"):
        [*Dataset.from_parquet(large, "n", null={"n": np.nan})]


@pytest.mark.parametrize(
    "filters", [[("n", ">", 4)], [("n", "in", {1, 8}), ("x", ">", 0)], [[("n", "<", 2)], [("kind", "==", "c")]]]
)
def test_filters_of_parquet(mixed, filters):
    path, _ = mixed
    expected = pq.read_table(path, filters=filters)
    dataset = Dataset.from_parquet(path, ("n", "at.p"), null={"n": -1}, filters=filters)
    assert len(dataset) == expected.num_rows
    assert [(int(n), int(p)) for n, p in dataset] == [
        (n, at["p"]) for n, at in zip(expected["n"].to_pylist(), expected["at"].to_pylist(), strict=True)
    ]
    batches = [*dataset.shuffle(seed=1).batch(2)]
    assert sorted(x for batch in batches for x in batch[0].tolist()) == sorted(expected["n"].to_pylist())
    assert (
        dataset.definition.source.fingerprint()
        != Dataset.from_parquet(path, ("n", "at.p")).definition.source.fingerprint()
    )


def test_filters_leave_row_groups_out_by_their_statistics(mixed):
    path, _ = mixed
    raw = bytearray(path.read_bytes())
    raw[4:40] = bytes(36)  # of the first row group
    path.write_bytes(raw)
    assert [int(n) for n in Dataset.from_parquet(path, "n", filters=[("n", ">", 7)])] == [8, 9]
    with pytest.raises(DataFileError):
        [*Dataset.from_parquet(path, "x")]


def test_columns_of_folders(tmp_path):
    for year in (2020, 2021):
        for name in ("a", "b c"):
            folder = tmp_path / f"year={year}" / f"site={name.replace(' ', '%20')}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"x": np.arange(3) + year}), folder / "0.parquet")
    pattern = str(tmp_path / "**" / "*.parquet")
    found = columns(Dataset.from_parquet(pattern))
    expected = (
        pa.dataset.dataset(tmp_path, partitioning="hive")
        .to_table()
        .sort_by([("x", "ascending"), ("site", "ascending")])
    )
    order = sorted(zip(found["x"], found["site"], found["year"], strict=True))
    assert order == list(zip(*(expected[name].to_pylist() for name in ("x", "site", "year")), strict=True))
    some = Dataset.from_parquet(pattern, ("x", "site"), filters=[("year", "==", 2021), ("x", ">", 2021)])
    assert [(int(x), site) for x, site in some] == [(2022, "a"), (2023, "a"), (2022, "b c"), (2023, "b c")]


TEXT = '# made by hand\nx,n,name\n1.5,1,Zoë\n# more\nNA,2,NA\n,3,"a,b"\n2.5,4,ü\n'


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
@pytest.mark.parametrize("packed", [False, True])
def test_options_of_csv(tmp_path, encoding, packed):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    text = TEXT.encode(encoding)
    path.write_bytes(gzip.compress(text) if packed else text)
    dtypes = {"n": int, "name": str}
    options = {"na_values": ("NA", ""), "comment": "#", "encoding": encoding}
    dataset = Dataset.from_csv(path, dtypes=dtypes, **options)
    expected = pandas.read_csv(path, comment="#", encoding=encoding, keep_default_na=False, na_values={"x": ["NA", ""]})
    found = columns(dataset)
    for name in ("x", "n", "name"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert sorted(n for batch in dataset.shuffle(seed=1).batch(3) for n in batch["n"].tolist()) == [1, 2, 3, 4]
    with pytest.raises(DataFileError, match="dtypes="):
        [*Dataset.from_csv(path, "name", {"name": int}, **options)]


def test_options_of_csv_in_many_blocks(tmp_path):
    lines = [f"{k},{'NA' if k % 7 == 0 else k / 2}" for k in range(10_000)]
    text = "k,x\n" + "".join(line + ("\n# note\n" if n % 11 == 0 else "\n") for n, line in enumerate(lines))
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_bytes(gzip.compress(text.encode()))
    dataset = Dataset.from_csv(tmp_path / "*.csv", ("k", "x"), {"k": "i4"}, na_values=["NA"], comment="#")
    (batch,) = dataset.batch(20_000)
    assert batch[0].tolist() == [*range(10_000)] * 2
    np.testing.assert_array_equal(batch[1], [np.nan if k % 7 == 0 else k / 2 for k in range(10_000)] * 2)
    whens = tmp_path / "when.txt"
    whens.write_text("t\n2020-01-01\nNA\n")
    found = [*Dataset.from_csv(whens, "t", {"t": "M8[D]"}, na_values=["NA"])]
    assert str(found[0]) == "2020-01-01"
    assert np.isnat(found[1])


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("end", core(["\n", "\r\n"], "\r\n"))
def test_lines_of_white_space_in_a_large_csv(tmp_path, quoted, end):
    """The lines of text without quotes are found by arrays, 4 MiB at a time; those of other text one by one."""
    random, lines, values = np.random.default_rng(0), ["number,text"], []
    for number in random.integers(0, 10**9, 90_000).tolist():
        if random.random() < 0.01:
            lines.append("" if quoted else random.choice(["", "  ", "\t", "\f \v"]))
        text = "y" * (number % 97)
        values.append((number, text))
        lines.append(f"{' ' * (number % 2)}{number},{text}")
    if quoted:
        lines[1], values[0] = '1,"a, b"', (1, "a, b")
    path = tmp_path / "a.csv"
    path.write_bytes(end.join(lines).encode())
    assert path.stat().st_size > 4 << 20
    rows = Dataset.from_csv(path, ["number", "text"], {"number": "i8", "text": str})
    assert len(rows) == len(values)
    at = random.integers(0, len(values), 50)
    assert [rows[int(i)] for i in at] == [values[i] for i in at]
    numbers, texts = zip(*rows.batch(5000), strict=True)
    assert [*zip(np.concatenate(numbers).tolist(), np.concatenate(texts).tolist(), strict=True)] == values


def test_wrong_options_of_csv(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text('x\n"1\n2"\n')
    for wrong in (
        {"na_values": "NA"},
        {"na_values": [-1]},
        {"comment": "##"},
        {"comment": ","},
        {"encoding": "utf-16"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Dataset.from_csv(path, "x", **wrong)
    with pytest.raises(DataFileError, match="comment= is given"):
        Dataset.from_csv(path, "x", comment="#")
    (tmp_path / "b.csv").write_bytes("x\nZoë\n".encode("latin-1"))
    with pytest.raises(DataFileError):
        [*Dataset.from_csv(tmp_path / "b.csv", "x", {"x": str})]
    packed = gzip.compress(b"x\n" + b"1\n" * 1000)
    (tmp_path / "c.csv").write_bytes(packed[:-9])
    with pytest.raises(DataFileError, match="gzip cannot unpack"):
        Dataset.from_csv(tmp_path / "c.csv", "x")
    (tmp_path / "d.csv").write_bytes(packed)

    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", "500")
    with pytest.raises(DataFileError, match="its text has 501 bytes"):
        Dataset.from_csv(tmp_path / "d.csv", "x")
