"""Rows that cannot be read are left out, counted and named, if the program asks for that."""

import gzip
import itertools
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpistrat.data import DataFileError, Dataset, EmptyDatasetError
from mpistrat.data.formats import text as text_format

ROWS = {
    b"%d,%d.5,t": lambda k: (k, k + 0.5, "t"),
    b'%d,%d.5,"a,\nb"': lambda k: (k, k + 0.5, "a,\nb"),
    b"": None,  # no row
    b"%d,%d": False,  # bad ones
    b"x%d,%d.5,t": False,
    b"%d,%d.5,\xff": False,
}


def read(dataset):
    """Return what a function returns, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = dataset()
        return list(made), [str(each.message) for each in found]


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*ROWS]), max_size=24), st.sampled_from([1, 3, 8]), st.integers(7, 99), st.booleans())
def test_bad_rows_of_csv(tmp_path_factory, kinds, block_rows, piece, packed):
    pytest.importorskip("pyarrow.csv")
    path = tmp_path_factory.mktemp("bad") / "a.csv"
    texts = [kind % (k, k) if kind else kind for k, kind in enumerate(kinds)]
    text = b"\n".join([b"n,x,t", *texts, b""])
    path.write_bytes(gzip.compress(text) if packed else text)
    good = [ROWS[kind](k) for k, kind in enumerate(kinds) if ROWS[kind]]
    bad = [k for k, kind in enumerate(kinds) if ROWS[kind] is False]
    line = 2 + sum(each.count(b"\n") + 1 for each in texts[: bad[0]]) if bad else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "BLOCK_ROWS", block_rows)
        patch.setattr(text_format, "_PIECE_OF_CSV", piece)
        make = lambda: Dataset.from_csv(path, ("n", "x", "t"), {"n": "i4", "t": str}, on_bad_row="skip")  # noqa: E731
        if not good:
            with pytest.raises(EmptyDatasetError):
                read(make)
            return
        rows, told = read(make)
        assert rows == good
        assert len(read(make)[0]) == len(good)
        assert len(told) == bool(bad)
        if bad:
            assert f"a.csv': {len(bad)} row" in told[0]
            assert f"line {line} (" in told[0]
            with pytest.raises(DataFileError):
                list(Dataset.from_csv(path, ("n", "x", "t"), {"n": "i4", "t": str}))


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([b"", b"ok", b"\xc3\xa4", b"\xff\xfe"]), max_size=12),
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=3),
    st.integers(1, 9),
)
@example([b"", b"", b"\xff\xfe", b""], [b"\r"], 4)
@example([b"ok", b"\xff\xfe", b"", b"", b"ok"], [b"\r", b"\n"], 4)
def test_bad_lines_of_text(tmp_path_factory, texts, ends, block_rows):
    path = tmp_path_factory.mktemp("bad") / "a.txt"
    text = b"".join(text + end for text, end in zip(texts, itertools.cycle(ends), strict=False))
    path.write_bytes(text)
    # An empty line of "\n" after an end of "\r" is that end's, also for Python.
    texts = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    good = [text.decode() for text in texts if text != b"\xff\xfe"]
    if good:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_format, "BLOCK_ROWS", block_rows)
            rows, told = read(lambda: Dataset.from_text(path, on_bad_row="skip"))
        assert rows == good
        if len(good) < len(texts):
            assert f"line {1 + texts.index(bytes.fromhex('fffe'))} (" in told[0]


def test_a_manifest_keeps_what_is_left_out(tmp_path):
    path, manifest = tmp_path / "a.txt", tmp_path / "manifest.json"
    path.write_bytes(b"a\n\xff\nb\n")
    first = read(lambda: Dataset.from_text(path, manifest=manifest, on_bad_row="skip"))
    assert first == read(lambda: Dataset.from_text(path, manifest=manifest, on_bad_row="skip"))
    assert first[0] == ["a", "b"]
    with pytest.raises(DataFileError, match="stale"):
        len(Dataset.from_text(path, manifest=manifest))
    with pytest.raises(ValueError, match="on_bad_row must be"):
        Dataset.from_text(path, on_bad_row="drop")


def test_bad_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(2):
            image.new("L", (3, 2), number).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"no image")
    rows, told = read(lambda: Dataset.from_images(tmp_path, mode="L", on_bad_row="skip"))
    assert [(int(x.max()), int(y)) for x, y in rows] == [(1, 0), (0, 1), (1, 1)]
    assert len(told) == 1
    assert "1 row cannot be read and is left out" in told[0]
    assert "0.png" in told[0]
    for path in tmp_path.glob("*/*"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="4 rows"), pytest.raises(DataFileError, match="none of the 4 images"):
        Dataset.from_images(tmp_path, on_bad_row="skip")


def test_an_error_of_the_system_is_no_bad_image(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (3, 2)).save(tmp_path / "a" / "0.png")
    for error in (OSError(5, "Input/output error"), MemoryError()):

        def fails(*args, error=error):
            raise error

        monkeypatch.setattr(image, "open", fails)
        with pytest.raises(type(error)):
            Dataset.from_images(tmp_path, mode="L", on_bad_row="skip")


def test_blocks_of_bad_lines_only(tmp_path, monkeypatch):
    """They are not read with the block before them."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\n" * 3 + b"a\n" + b"\xff\n" * 6 + b"b\n\xff\n" + b"\xff\n" * 4)
    monkeypatch.setattr(text_format, "BLOCK_ROWS", 2)
    assert read(lambda: Dataset.from_text(path, on_bad_row="skip"))[0] == ["a", "b"]


def test_ends_of_lines_are_not_joined(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\r\xff\n\ny\n")
    assert read(lambda: Dataset.from_text(path, on_bad_row="skip"))[0] == ["x", "", "y"]
