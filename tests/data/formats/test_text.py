"""Lines of text files are those that Python reads."""

import gzip
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat.data import DataFileError, Dataset

ENDS = ["\n", "\r\n", "\r", "\n\n", "\r\r\n"]


def as_python_reads(path, encoding):
    open_any = gzip.open if path.suffix == ".gz" else open
    with open_any(path, "rt", encoding=encoding) as file:
        return [line.removesuffix("\n") for line in file]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.text('aé," \t\x0b\u2028\x85', max_size=6), st.sampled_from(ENDS)), max_size=20),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["utf-8", "latin-1"]),
)
def test_lines(tmp_path_factory, lines, ended, packed, encoding):
    text = "".join(itertools.chain.from_iterable(lines)) + "" if ended else "last"
    raw = text.encode(encoding, "replace")
    path = tmp_path_factory.getbasetemp() / ("lines.txt.gz" if packed else "lines.txt")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    expected = as_python_reads(path, encoding)
    if not expected:
        return
    dataset = Dataset.from_text(path, encoding)
    assert [*dataset] == expected
    assert [len(dataset), dataset[-1], dataset[len(expected) // 2]] == [
        len(expected),
        expected[-1],
        expected[len(expected) // 2],
    ]
    assert sorted(dataset.shuffle(seed=1)) == sorted(expected)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_many_lines_in_many_blocks(tmp_path, end):
    """Blocks end after 4096 lines, and after a MiB. An end of two bytes may lie on the border."""
    random = np.random.default_rng(1)
    lines = [f"{i} " + "x" * int(n) for i, n in enumerate([*random.integers(0, 900, 9000), *[0] * 9000, 2 << 20, 3])]
    (tmp_path / "a.txt").write_text(end.join(lines), newline="")
    dataset = Dataset.from_text(str(tmp_path / "*.txt"))
    assert [*dataset] == lines
    for i in (0, 4095, 4096, 8999, 9000, 18000, 18001):
        assert dataset[i] == lines[i]
    (batch,) = dataset.select([17999, 5, 5]).batch(3)
    assert batch.tolist() == [lines[17999], lines[5], lines[5]]


def test_a_border_between_the_bytes_of_an_end(tmp_path):
    for size in range((1 << 20) - 3, (1 << 20) + 2):
        raw = b"a" * size + b"\r\nb\r\n\r\nc"
        (tmp_path / "a.txt").write_bytes(raw)
        assert [*Dataset.from_text(tmp_path / "a.txt")] == ["a" * size, "b", "", "c"]


def test_a_mark_of_the_byte_order_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("é\nb\n", encoding="utf-8-sig")
    assert [*Dataset.from_text(tmp_path / "a.txt")] == ["é", "b"]


@pytest.mark.filterwarnings(r"ignore:file .*1\.txt' has no rows")
def test_files_follow_each_other_and_are_resumed(tmp_path):
    """In lanes, with another batch size."""
    first = 0
    for number, rows in enumerate((13, 0, 7, 20)):
        (tmp_path / f"{number}.txt").write_text("".join(f"{i}\n" for i in range(first, first + rows)))
        first += rows
    dataset = Dataset.from_text(str(tmp_path / "*.txt"))
    assert [*map(int, dataset)] == [*range(40)]
    shuffled, strategy = dataset.shuffle(seed=3), mpistrat.OneDeviceStrategy("/cpu:0")
    first, other = (strategy.experimental_distribute_dataset(shuffled.batch(size)) for size in (6, 4))
    iterator = iter(first)
    found = [*itertools.islice(iterator, 3)]
    state = iterator.state()
    other.restore(state)
    assert np.concatenate([*found, *other]).tolist() == np.concatenate([*found, *iterator]).tolist()
    assert sorted(map(int, np.concatenate([*other]))) == [*range(40)]


def test_wrong_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\nb\rc\n\xff\n")
    with pytest.raises(DataFileError, match=r"a\.txt': row 3 is not utf-8 .*; fix: give encoding="):
        [*Dataset.from_text(path).batch(2)]
    assert [*Dataset.from_text(path, "latin-1")][-1] == "ÿ"
    np.save(tmp_path / "b.npy", np.ones(3))
    with pytest.raises(DataFileError, match=r"b\.npy"):
        len(Dataset.from_text(tmp_path / "b.npy"))
    for encoding, error in (("utf-16", ValueError), ("no-such", LookupError)):
        with pytest.raises(error):
            Dataset.from_text(path, encoding)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"a\n" * 999)[:-9])
    with pytest.raises(DataFileError, match=r"c\.txt\.gz.*gzip cannot unpack"):
        len(Dataset.from_text(tmp_path / "c.txt.gz"))
