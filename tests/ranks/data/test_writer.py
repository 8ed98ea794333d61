"""Tests of `Writer`: steps that all ranks append, against what one process has, and ranks that do not do the same."""

import contextlib
import gc
import json
import os
import resource
import types

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Block, DataFileError, Dataset, DatasetMismatchError, Writer
from mpistrat.data.write import writer as writer_module
from mpistrat.data.write.growing import GrowingHdf5
from tests.selection import core

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
ROWS = [3, 0, 4, 2][:SIZE]
FIRST = sum(ROWS[:RANK])
HOW = [("h5", None), ("h5", "gzip"), ("zarr", None), ("zarr", "gzip")]


def stored(path):
    """The arrays of a file or a store, read without mpistrat, and its attributes by name, "" for those of the file."""
    arrays, attributes = {}, {}
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            attributes[""] = dict(file.attrs)

            def look(name, item):
                if isinstance(item, h5py.Dataset):
                    arrays[name], attributes[name] = item[()], dict(item.attrs)

            file.visititems(look)
        return arrays, attributes
    zarr = pytest.importorskip("zarr")
    store = zarr.open(str(path), mode="r")
    attributes[""] = dict(store.attrs)
    for about in path.rglob(".zarray"):
        name = str(about.parent.relative_to(path))
        arrays[name], attributes[name] = store[name][...], dict(store[name].attrs)
    return arrays, attributes


def steps(count, *shape, dtype="f8"):
    numbers = np.random.default_rng(7).integers(0, 100, (count, *shape))
    return numbers.astype(dtype)


def check(path, **want):
    """Compare the arrays of a file with those wanted, on rank 0, while the others wait."""
    if RANK == 0:
        arrays, _ = stored(path)
        assert sorted(arrays) == sorted(want)
        for name, values in want.items():
            np.testing.assert_array_equal(arrays[name], values, strict=True)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.four_ranks
@pytest.mark.parametrize(("suffix", "compress"), HOW)
@pytest.mark.parametrize("width", [5, 2500])  # several steps in a chunk, and one
def test_file_is_that_of_one_process(tmp_path, suffix, compress, width):
    path = tmp_path / f"f.{suffix}"
    u, time, flags = steps(9, sum(ROWS), width), np.arange(9) * 0.5, steps(9, SIZE, dtype="?")
    mine = u[:, FIRST : FIRST + ROWS[RANK]]
    with Writer(path, compress=compress, attributes={"rate": 0.5}) as writer:
        for step in range(5):
            writer.append("flow/u", mine[step], attributes={"unit": "K"} if step == 0 else None)
            writer.append("time", time[step])
            writer.append("flag", flags[step, RANK : RANK + 1])
            if step % 2:
                writer.flush()
                check(path, **{"flow/u": u[: step + 1], "time": time[: step + 1], "flag": flags[: step + 1]})
    with Writer(path, "a", compress=compress, attributes={"more": 2}) as writer:
        assert (writer.steps("time"), writer.steps("other")) == (5, 0)
        for step in range(5, 9):
            writer.append("time", time[step])
            writer.append("flag", flags[step, RANK : RANK + 1])
            writer.append("flow/u", mine[step].tolist() if ROWS[RANK] else mine[step], attributes={"scale": 1.5})
    check(path, **{"flow/u": u, "time": time, "flag": flags})
    if RANK == 0:
        _, attributes = stored(path)
        assert attributes == {
            "": {"rate": 0.5, "more": 2},
            "flow/u": {"unit": "K", "scale": 1.5},
            "time": {},
            "flag": {},
        }
        assert os.listdir(tmp_path) == [path.name]
        source = Dataset.from_hdf5 if suffix == "h5" else Dataset.from_zarr
        (batch,) = source([path], "flow/u").batch(9)
        np.testing.assert_array_equal(batch, u)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.four_ranks
@pytest.mark.parametrize("shards", core([None, 1, 4, 7], 4))
@pytest.mark.parametrize(("width", "compress"), [(5, None), (2500, "gzip"), (2500, "zstd")])
def test_shards_of_zarr_3(tmp_path, shards, width, compress):
    """zarr reads all flushed steps, also of a second writer whose ranks have other blocks."""
    zarr = pytest.importorskip("zarr", minversion="3")
    path, how = tmp_path / "f.zarr", {"compress": compress, "zarr_format": 3, "shards": shards}
    u, last = steps(19, sum(ROWS), width), sum(ROWS) - FIRST - ROWS[RANK]

    def check_flushed(count):
        if RANK == 0:
            store = zarr.open(str(path), mode="r")
            np.testing.assert_array_equal(store["flow/u"][...], u[:count], strict=True)
            np.testing.assert_array_equal(store["time"][...], np.arange(count) * 0.5, strict=True)
            assert shards is None or store["flow/u"].shards[0] == shards
            assert dict(store.attrs) == {"rate": 1} | ({"more": 2} if count > 9 else {})
            assert dict(store["flow/u"].attrs) == {"unit": "K"}
        MPI.COMM_WORLD.Barrier()

    with Writer(path, attributes={"rate": 1}, **how) as writer:
        for step in range(9):
            writer.append("flow/u", u[step, FIRST : FIRST + ROWS[RANK]], attributes={"unit": "K"})
            writer.append("time", step * 0.5)
            if step % 3 == 1:
                writer.flush()
                check_flushed(step + 1)
    check_flushed(9)
    with Writer(path, "a", attributes={"more": 2}, **how) as writer:
        for step in range(9, 19):
            mine = u[step, last : last + ROWS[RANK]]  # the last rank has the first rows
            writer.append("flow/u", Block(mine, offset=(last, 0), global_shape=u.shape[1:]))
            writer.append("time", step * 0.5)
    check_flushed(19)
    for again in (Dataset.from_zarr([path], "flow/u"), Dataset.from_zarr([path], "flow/u").shuffle(seed=1)):
        (batch,) = again.batch(19)
        np.testing.assert_array_equal(np.sort(batch, axis=0), np.sort(u, axis=0))
    assert {*os.listdir(path)} == {"zarr.json", "flow", "time"}
    with pytest.raises(DataFileError, match="zarr_format= and shards= of the first run"):
        Writer(path, "a", **{**how, "shards": 15})
    with pytest.raises(DataFileError, match=r"\.zgroup"):
        Writer(path, "a")
    if RANK == 0:
        (path / "time" / "c.0").unlink()
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DataFileError, match=r"time': it lacks the file of chunk c\.0"):
        Writer(path, "a", **how)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("f.zarr", {"zarr_format": 4}),
        ("f.zarr", {"shards": 3}),
        ("f.zarr", {"zarr_format": 3, "shards": 0}),
        ("f.zarr", {"zarr_format": 3, "shards": True}),
        ("f.h5", {"zarr_format": 3, "shards": 3}),
        ("f.h5", {"shards": 3}),
        ("f.zarr3", {"zarr_format": 3}),
    ],
)
def test_shards_that_cannot_be(tmp_path, name, how):
    text = r"zarr_format|shards" if name == "f.zarr" else f"ends in '{name[1:]}'"
    with pytest.raises((TypeError, ValueError), match=text):
        Writer(tmp_path / name, **how)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("versions", [(2, 3), (3, 2)])
def test_a_store_of_the_other_version_is_replaced(tmp_path, versions):
    zarr = pytest.importorskip("zarr", minversion="3")
    path = tmp_path / "f.zarr"
    for version in versions:
        with Writer(path, overwrite=True, zarr_format=version) as writer:
            writer.append("u", version)
            writer.flush()
            for other in versions:
                with pytest.raises(OSError, match="another program writes to it"):
                    Writer(path, overwrite=True, zarr_format=other)
    if RANK == 0:
        store = zarr.open_group(path, mode="r")
        assert store.metadata.zarr_format == versions[1]
        np.testing.assert_array_equal(store["u"][...], versions[1:])
        zarr.create_array(tmp_path / "array.zarr", shape=(3,), dtype="f4", zarr_format=versions[0])
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(FileExistsError, match="choose another name"):  # a store, but not a group
        Writer(tmp_path / "array.zarr", overwrite=True, zarr_format=versions[1])


@pytest.mark.four_ranks
@pytest.mark.full
def test_a_simulation_writes_the_bytes_of_one_process(tmp_path):
    """1,000 steps of the heat equation, by ranks that exchange halos and by one that does not."""
    comm, rows = MPI.COMM_WORLD, np.array_split(np.arange(1, 22), SIZE)[RANK]
    plate = np.random.default_rng(0).random((23, 16))

    def advance(block):
        cells = block[1:-1, 1:-1]
        block[1:-1, 1:-1] = cells + 0.2 * (
            block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:] - 4 * cells
        )

    def solve(path, block, own, exchange, **how):
        with Writer(path, **how) as writer:
            for step in range(1000):
                writer.append("u", own, attributes={"rate": 0.2} if step == 0 else None)
                writer.append("time", step * 0.1)
                if step % 100 == 42:
                    writer.flush()
                exchange(block)
                advance(block)

    def exchange(block):
        above = RANK - 1 if RANK else MPI.PROC_NULL
        below = RANK + 1 if RANK < LAST else MPI.PROC_NULL
        comm.Sendrecv(block[1], above, recvbuf=block[-1], source=below)
        comm.Sendrecv(block[-2], below, recvbuf=block[0], source=above)

    block = plate[rows[0] - 1 : rows[-1] + 2].copy()
    solve(tmp_path / "f.h5", block, block[int(RANK > 0) : len(block) - int(RANK < LAST)], exchange)
    if RANK == 0:
        alone = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
        solve(tmp_path / "one.h5", plate, plate, lambda block: None, strategy=alone)
        assert (tmp_path / "f.h5").read_bytes() == (tmp_path / "one.h5").read_bytes()
        with h5py.File(tmp_path / "f.h5") as file:
            assert file["u"].shape == (1000, 23, 16)
            advance(last := file["u"][-1])
            np.testing.assert_array_equal(last, plate)
    comm.Barrier()


@pytest.mark.parametrize(("suffix", "compress"), HOW)
@pytest.mark.parametrize("dtype", ["f4", ">i2", "c16"])
def test_blocks_lie_where_they_say(tmp_path, suffix, compress, dtype):
    """A rank has a part of the columns; the first one is narrower than the others."""
    path = tmp_path / f"f.{suffix}"
    columns = [0, 100, *(100 + 301 * (rank + 1) for rank in range(LAST))]
    first, stop = columns[RANK], columns[RANK + 1]
    u = steps(3, 90, columns[-1], dtype=dtype)
    with Writer(path, compress=compress) as writer:
        for step in u:
            part = np.asfortranarray(step[:, first:stop])
            writer.append("u", Block(part, offset=(0, first), global_shape=step.shape))
            writer.flush()
    check(path, u=u)


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_steps_larger_than_a_chunk_may_be(tmp_path, suffix, monkeypatch):
    for name in ("_LARGEST", "_LARGEST_COMPRESSED"):
        monkeypatch.setattr(writer_module, name, 20_000)
    u = steps(2, 7 * SIZE, 1000)
    for compress in (None, "gzip"):
        path = tmp_path / f"{compress}.{suffix}"
        with Writer(path, compress=compress) as writer:
            for step in u:
                writer.append("u", step[7 * RANK : 7 * (RANK + 1)])
        check(path, u=u)
        with (
            pytest.raises(ValueError, match="along axis 0 has 20008 bytes; fix: swap the axes"),
            Writer(tmp_path / f"wide.{suffix}", overwrite=True) as writer,
        ):
            writer.append("u", np.zeros((1, 2501)))


def test_a_reader_goes_on_with_the_steps_of_its_time(tmp_path):
    path = tmp_path / "f.h5"
    u = steps(300, SIZE, 7)
    early = None
    with Writer(path) as writer:
        for number, step in enumerate(u):
            writer.append("u", step[RANK : RANK + 1])
            if number in (9, 10, 150):
                writer.flush()
                assert writer.steps("u") == number + 1
            if number == 9 and RANK == 0:
                early = h5py.File(path)
        if early is not None:
            np.testing.assert_array_equal(early["u"][()], u[:10])
            early.close()
            with h5py.File(path) as file:
                assert len(file["u"]) == 151
    MPI.COMM_WORLD.Barrier()


def test_files_that_exist(tmp_path):
    for name in ("f.h5", "f.zarr"):
        path = tmp_path / name
        for value in (1.0, 2.0):
            with Writer(path, overwrite=value == 2) as writer:
                writer.append("u", value)
            with pytest.raises(FileExistsError, match="exists already"):
                Writer(path)
            check(path, u=np.array([value]))
    if RANK == 0:
        (tmp_path / "other.zarr").mkdir()
        (tmp_path / "other.zarr" / "precious").touch()
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "other.zarr", overwrite=True)
    with Writer(tmp_path / "new.h5", "a") as writer:  # as h5py does
        writer.append("u", 1)
    check(tmp_path / "new.h5", u=np.array([1]))


def test_a_writer_without_steps(tmp_path):
    for name in ("f.h5", "f.zarr"):
        with Writer(tmp_path / name, attributes={"rate": 1}) as writer:
            writer.flush()
        check(tmp_path / name)
        with Writer(tmp_path / name, "a") as writer:
            writer.append("u", 1.5)
        check(tmp_path / name, u=np.array([1.5]))
        assert RANK or stored(tmp_path / name)[1][""] == {"rate": 1}
        writer.close()
        with pytest.raises(ValueError, match="is closed"):
            writer.append("u", 1.5)


def test_files_of_others_are_not_gone_on_with(tmp_path):
    path = tmp_path / "f.h5"
    if RANK == 0:
        with h5py.File(path, "w", libver="earliest") as file:
            file.create_dataset("x", data=np.arange(3))
            file.create_dataset("y", data=np.arange(3), chunks=(1,), maxshape=(None,))
            file.create_group("g").attrs["a"] = 1
        (tmp_path / "text.h5").write_text("text")
        (tmp_path / "v3.zarr").mkdir()
        (tmp_path / "v3.zarr" / "zarr.json").write_text("{}")
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DataFileError, match=r"goes on with files that a Writer .*'g', 'x'"):
        Writer(path, "a")
    with pytest.raises(DataFileError, match="is not an HDF5 file"):
        Writer(tmp_path / "text.h5", "a")
    with pytest.raises(DataFileError, match=r"\.zgroup"):
        Writer(tmp_path / "v3.zarr", "a")
    for name in ("c.h5", "c.zarr"):
        with Writer(tmp_path / name, compress="gzip") as writer:
            writer.append("u", np.zeros(20_000))
        with pytest.raises(DataFileError, match="or give compress=, zarr_format= and shards= of the first run"):
            Writer(tmp_path / name, "a")
        about = tmp_path / name / "u" / ".zarray"
        if RANK == 0 and about.exists():
            about.write_text(json.dumps(json.loads(about.read_text()) | {"order": "F"}))
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DataFileError, match="'u' float64"):
        Writer(tmp_path / "c.zarr", "a", compress="gzip")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("u/.zarray", "{", "it cannot be described"),
        ("u/.zarray", "[3]", "it cannot be described"),
        ("u/.zarray", '{"shape": [3]}', "it cannot be described"),
        ("u/.zarray", {"chunks": [1, 0]}, "it cannot be described"),
        ("u/.zarray", {"shape": [10**18, 20_000 * SIZE]}, r"it lacks the file of chunk 3\.0"),
        ("u/.zattrs", "3", "it cannot be described"),
        (".zattrs", "{", "it cannot be described"),
        (f"u/1.{LAST}", None, rf"u': it lacks the file of chunk 1\.{LAST}; fix: bring it back"),
    ],
)
def test_a_damaged_store(tmp_path, name, content, told):
    path = tmp_path / "f.zarr"
    with Writer(path) as writer:
        for step in range(3):
            writer.append("u", np.full(20_000, step))
            writer.append("time", step)
    if RANK == 0:
        if content is None:
            (path / name).unlink()
        else:
            changed = (
                content if isinstance(content, str) else json.dumps(json.loads((path / name).read_text()) | content)
            )
            (path / name).write_text(changed)
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DataFileError, match=rf"{'rank 0: ' if RANK else ''}file '.*{told}"):
        Writer(path, "a")
    MPI.COMM_WORLD.Barrier()


def test_steps_that_do_not_fit_the_file(tmp_path):
    path = tmp_path / "f.h5"
    with Writer(path) as writer:
        writer.append("u", np.zeros((1, 3)))
        writer.append("v", 1)
    has = rf"'u' float64 \({SIZE}, 3\), 'v' int64 \(\)"
    with Writer(path, "a") as writer:
        for wrong in (np.zeros((1, 3), "c16"), np.zeros((1, 4)), 1.0):
            with pytest.raises(DatasetMismatchError, match=f"{has}, but the ranks append 'u'"):
                writer.append("u", wrong)
        writer.append("u", np.ones((1, 3)))
    check(path, u=np.repeat([[[0.0] * 3], [[1.0] * 3]], SIZE, 1), v=np.array([1]))


@pytest.mark.parametrize(("suffix", "compress"), HOW)
def test_a_dataset_that_is_first_due_after_a_kill(tmp_path, suffix, compress):
    """The killed run had begun it, in other chunks, without a flush. Steps of it have other dtypes later."""
    path, w = tmp_path / f"f.{suffix}", steps(2, SIZE, 20_000)
    killed = Writer(path, compress=compress)
    killed.append("u", np.zeros(1))
    killed.flush()
    killed.append("w", np.ones((2, 10_000), "f4"))
    killed._release()
    for run in range(2):
        with Writer(path, "a", compress=compress) as writer:
            writer.append("u", np.ones(1, "f4") if run else 1 + np.zeros(1, "i2"))
            writer.append("w", w[run, RANK : RANK + 1].astype("f8" if run == 0 else "i2"))
    check(path, u=np.repeat([[0.0], [1.0], [1.0]], SIZE, 1), w=w)


def test_a_writer_that_is_not_closed(tmp_path, caplog):
    for flushed in (True, False):
        caplog.clear()
        writer = Writer(tmp_path / "f.h5", overwrite=True)
        writer.append("u", np.zeros(1))
        writer.flush()
        for _ in range(0 if flushed else 2):
            writer.append("u", np.ones(1))
            writer.append("time", 1.0)
        del writer
        gc.collect()  # as at the end of the program
        told = "f.h5 was not closed, so steps are lost: 2 of 'u', 2 of 'time'; fix: call close()" in caplog.text
        assert told == (not flushed and RANK == 0)
        check(tmp_path / "f.h5", u=np.zeros((1, SIZE)))
    with Writer(tmp_path / "f.h5", "a") as writer:  # its lock is free
        writer.append("u", np.ones(1))


WRONG = [
    (TypeError, "write strings by write_hdf5", lambda writer: writer.append("s", "text")),
    (TypeError, "write strings by write_hdf5", lambda writer: writer.append("s", np.array([object()]))),
    (TypeError, "for times astype", lambda writer: writer.append("s", np.zeros(1, "M8[s]"))),
    (TypeError, "masked", lambda writer: writer.append("s", np.ma.zeros(2))),
    (
        TypeError,
        r"attribute 'a' is <object .* of type object, which cannot be stored \(.*no native HDF5.*; fix: give a number",
        lambda writer: writer.append("s", np.zeros(1), attributes={"b": 1, "a": object()}),
    ),
    (
        TypeError,
        "attribute 'a' is .* of type ndarray, .*too large",
        lambda writer: writer.append("s", np.zeros(1), attributes={"a": np.zeros(9000)}),
    ),
    (TypeError, "attribute 3 is 1 of type int", lambda writer: writer.append("s", np.zeros(1), attributes={3: 1})),
    (ValueError, "a dataset is named as", lambda writer: writer.append("../s", 1)),
    (ValueError, "a dataset is named as .*, not 's.x00t'", lambda writer: writer.append("s\0t", 1)),
    (ValueError, "a dataset is named as", lambda writer: writer.append(3, 1)),
    (DatasetMismatchError, "'u': step 1 has a block float64", lambda writer: writer.append("u", np.zeros((2, 2)))),
    (
        DatasetMismatchError,
        "'u': step 1 has a block complex",
        lambda writer: writer.append("u", np.zeros((1, 2), "c16")),
    ),
]


@pytest.mark.parametrize(("kind", "text", "wrong"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_rank_that_cannot_append(tmp_path, kind, text, wrong, everywhere):
    path = tmp_path / "f.h5"
    with Writer(path) as writer:
        writer.append("u", np.zeros((1, 2)))
        is_wrong = everywhere or RANK == LAST
        with pytest.raises(kind, match=text if is_wrong else f"rank {LAST}: .*{text}"):
            wrong(writer) if is_wrong else writer.append("s" if "'u'" not in text else "u", np.zeros((1, 2)))
        writer.append("u", np.ones((1, 2)))  # the ranks are still in step
        with pytest.raises(ValueError, match=r"'u/s' would be a group and a dataset; the file has 'u' float64"):
            writer.append("u/s", 1)
    check(path, u=np.repeat([[[0.0, 0.0]], [[1.0, 1.0]]], SIZE, 1))


@pytest.mark.ranks(min=2)
def test_blocks_that_do_not_fit_together(tmp_path):
    size = (2 * SIZE, 3)
    first = np.zeros((2, 3))
    wrong = [
        (np.zeros((2, 3), "f4"), first, "rank .* has a block float"),
        (np.zeros((2, 4)), first, "rank .* has a block float"),
        (1.0, first, r"rank 1: Writer\.append 'u' 1.0"),
        (Block(first, (2, 0), size), first, "rank .* has a block float"),
        (Block(first, (2, 0), (9, 3)), Block(first, (0, 0), size), "rank .* has a block float"),
        (Block(first, (1, 0), size), Block(first, (0, 0), size), "overlap"),
        (Block(first[:1], (2, 0), size), Block(first, (0, 0), size), f"have .* of the {6 * SIZE} elements"),
    ]
    with Writer(tmp_path / "f.h5") as writer:
        for mine, theirs, text in wrong:
            block = mine if RANK == 1 else theirs
            if RANK > 1 and isinstance(theirs, Block) and isinstance(mine, Block):
                block = Block(first, (2 * RANK, 0), size)
            with pytest.raises(ValueError, match=text):
                writer.append("u", block)
        with pytest.raises(ValueError, match="the blocks of all ranks are empty"):
            writer.append("u", np.zeros((0, 3)))
    check(tmp_path / "f.h5")


@pytest.mark.ranks(min=2)
def test_ranks_that_do_not_do_the_same(tmp_path):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with Writer(tmp_path / "f.h5") as writer:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Writer\.append 'x' 1\.5"):
                writer.append("x", 1.5 if RANK == 0 else 2.5)
            with pytest.raises(ValueError, match=r"Writer\.append '[uv]'"):
                writer.append("u" if RANK == 0 else "v", np.zeros(2))
            with pytest.raises(RuntimeError, match=r"Writer\.flush"):
                writer.append("u", np.zeros(2)) if RANK == 0 else writer.flush()
            with pytest.raises(RuntimeError, match="barrier"):
                writer.append("u", 1) if RANK == 0 else strategy.barrier()
    check(tmp_path / "f.h5")


@pytest.mark.ranks(min=2)
def test_a_rank_that_leaves(tmp_path):
    """It meets the others in its next collective, whatever that is."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with (
        contextlib.suppress(ZeroDivisionError),
        pytest.raises(RuntimeError, match="barrier") if RANK else (contextlib.nullcontext()),
        Writer(tmp_path / "f.h5") as writer,
    ):
        writer.append("u", 1)
        writer.flush()
        if RANK == 0:
            raise ZeroDivisionError
        writer.append("u", 2)
    if RANK == 0:
        with pytest.raises(RuntimeError, match=r"Writer\.append"):
            strategy.barrier()
    strategy.barrier()
    check(tmp_path / "f.h5", u=np.array([1]))


ARGUMENTS = [
    (ValueError, "mode must be", lambda path: Writer(path / "f.h5", "r")),
    (ValueError, "compress must be one of", lambda path: Writer(path / "f.h5", compress="lzf")),
    (ValueError, "is a URL", lambda path: Writer("s3://bucket/f.h5")),
    (FileNotFoundError, "is not a folder", lambda path: Writer(path / "none" / "f.h5")),
    (TypeError, "no native HDF5", lambda path: Writer(path / "f.h5", attributes={"a": object()})),
]


@pytest.mark.parametrize(("kind", "text", "wrong"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_of_one_rank_that_are_wrong(tmp_path, kind, text, wrong):
    with pytest.raises(kind, match=text):
        wrong(tmp_path) if RANK == LAST else Writer(tmp_path / "f.h5")
    assert os.listdir(tmp_path) == []
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(min=2)
def test_paths_that_differ(tmp_path):
    with pytest.raises(ValueError, match="must write one file in the same way, but rank 1 has"):
        Writer(tmp_path / f"{RANK}.h5")
    with pytest.raises(ValueError, match="must write one file in the same way, but rank 1 has"):
        Writer(tmp_path / "f.h5", compress="gzip" if RANK == 1 else None)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("path", ["/proc/f.h5", "/proc/f.zarr"])
def test_a_folder_in_which_files_cannot_be_made(path):
    with pytest.raises((FileNotFoundError, PermissionError), match="proc"):
        Writer(path)


@pytest.mark.ranks(min=2)
def test_a_folder_that_not_all_ranks_share(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "writers", lambda ranks, folder: (0,))
    with pytest.raises(OSError, match=rf"only the ranks 0 of {SIZE} can write to files that rank 0 makes in"):
        Writer(tmp_path / "f.h5")
    assert os.listdir(tmp_path) == []
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_a_rank_that_cannot_compress(tmp_path, monkeypatch, suffix):
    def fails(*_):
        raise MemoryError("no memory to compress")

    path, u = tmp_path / f"f.{suffix}", np.random.default_rng(RANK).random(20_000)
    writer = Writer(path, compress="gzip")
    writer.append("u", u)
    writer.flush()
    if RANK == LAST:
        monkeypatch.setattr(GrowingHdf5, "_compressed", fails)
        monkeypatch.setattr(writer._store, "_encode", fails, raising=False)
    writer.append("u", u)  # the next call raises
    with pytest.raises(MemoryError, match="no memory to compress"):
        writer.append("u", u)
    with pytest.raises(MemoryError, match="no memory to compress"):
        writer.close()
    if RANK == 0:
        assert len(stored(path)[0]["u"]) == 1
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(min=2)
def test_a_rank_that_cannot_append_while_calls_are_compared(tmp_path, comm):
    """With `rc.debug` the ranks compare lines of the program too, and still raise the cause."""
    mpistrat.rc.debug = "collectives"
    try:
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    finally:
        del mpistrat.rc.debug
    with Writer(tmp_path / "f.h5", strategy=strategy) as writer:
        with pytest.raises(TypeError, match="'u': <U1 is not a number; fix: write strings by write_hdf5"):
            writer.append("u", np.array(["a"]) if RANK == LAST else np.ones(1))
        writer.append("u", np.ones(1))
    check(tmp_path / "f.h5", u=np.ones((1, SIZE)))


@contextlib.contextmanager
def full_disk(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_no_space_for_a_step_is_found_before_writing(tmp_path, monkeypatch, suffix):
    with Writer(tmp_path / f"f.{suffix}") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(f_blocks=9, f_bavail=39, f_frsize=4096))
            with pytest.raises(OSError, match=f"for {160_000 * SIZE} bytes: 159744 are free"):
                writer.append("u", np.ones(20_000))
        writer.append("u", np.ones(10_000))
    check(tmp_path / f"f.{suffix}", u=np.ones((1, 10_000 * SIZE)))


@pytest.mark.parametrize(("suffix", "compress"), HOW)
def test_a_full_disk(tmp_path, suffix, compress):
    path = tmp_path / f"f.{suffix}"
    u = np.random.default_rng(RANK).random((2, 20_000))

    def fill():
        with Writer(path, compress=compress) as writer:
            writer.append("u", u[0])
            writer.flush()
            with full_disk(50_000) if RANK == LAST else contextlib.nullcontext():
                for _ in range(2):  # at the latest
                    writer.append("u", u[1])
                    writer.flush()

    with pytest.raises(OSError, match=r"(rank \d: )?\[Errno 27\]"):
        fill()
    if RANK == 0:
        assert len(stored(path)[0]["u"]) == 1
    MPI.COMM_WORLD.Barrier()
    with Writer(path, "a", compress=compress) as writer:
        writer.append("u", u[1])
    everyone = np.stack([np.random.default_rng(rank).random((2, 20_000)) for rank in range(SIZE)], 1)
    check(path, u=everyone.reshape(2, -1))
