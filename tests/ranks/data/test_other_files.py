"""Tests of files of other formats than HDF5 under several ranks: one description for all, each row once, one error."""

import contextlib
import io
import os
import tarfile
import warnings

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, Options
from mpistrat.data.formats.zarr import Zarr

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SIZES = (13, 4, 7, 20)
GENERATOR = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(SIZE > 4, reason="four files")


def write_npy(path, x):
    np.save(path, x)


def write_csv(path, x):
    pytest.importorskip("pyarrow.csv")
    path.write_text("x\n" + "\n".join(map(str, x.tolist())))


def write_parquet(path, x):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"x": x}), path, row_group_size=6)


def write_zarr(path, x):
    made = pytest.importorskip("zarr").open(path, mode="w", shape=x.shape, chunks=(6,), dtype=x.dtype)
    made[:] = x


def write_text(path, x):
    path.write_text("\n".join(map(str, x.tolist())))


def write_tar(path, x):
    with tarfile.open(path, "w") as archive:
        for k, value in enumerate(x.tolist()):
            member = tarfile.TarInfo(f"{k}.cls")
            member.size = len(str(value))
            archive.addfile(member, io.BytesIO(str(value).encode()))


FORMATS = {
    "npy": (write_npy, Dataset.from_npy),
    "csv": (write_csv, lambda files: Dataset.from_csv(files, "x", {"x": int})),
    "txt": (write_text, lambda files: Dataset.from_text(files).map(int)),
    "parquet": (write_parquet, lambda files: Dataset.from_parquet(files, "x")),
    "zarr": (write_zarr, Dataset.from_zarr),
    "tar": (write_tar, lambda files: Dataset.from_tar(files, "cls")),
}


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param, *FORMATS[request.param]


@pytest.fixture
def files(comm, tmp_path, form):
    end, write, _ = form
    if comm.rank == 0:
        first = 0
        for number, rows in enumerate(SIZES):
            write(tmp_path / f"{number}.{end}", np.arange(first, first + rows))
            first += rows
    comm.Barrier()
    return str(tmp_path / f"*.{end}")


@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_each_row_is_read_once(strategy, comm, files, form, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    dataset = form[2](files).shuffle(seed=1).batch(6).with_options(options)
    made = strategy.experimental_distribute_dataset(dataset)
    orders = []
    for _ in range(2):
        batches = [batch.tolist() for batch in made]
        assert len(set(comm.allgather(len(batches)))) == 1
        mine = [x for batch in batches for x in batch]
        assert sorted(x for theirs in comm.allgather(mine) for x in theirs) == list(range(sum(SIZES)))
        orders.append(mine)
    assert comm.allreduce(orders[0] != orders[1], MPI.LOR)


def test_a_bad_file_is_an_error_on_all_ranks(strategy, comm, files, form, tmp_path):
    if comm.rank == 0:
        bad = tmp_path / f"9.{form[0]}"
        bad.mkdir() if form[0] == "zarr" else bad.write_bytes(b"\x89HDF\r\n\x1a\n" if form[0] == "txt" else b"")
    comm.Barrier()
    with pytest.raises(DataFileError, match=rf"9\.{form[0]}"):
        strategy.experimental_distribute_dataset(form[2](files).batch(6))
    assert strategy.reduce("SUM", 1, axis=None) == SIZE


@pytest.mark.parametrize("batch", [256, 1560])
def test_each_rank_decodes_a_chunk_once(strategy, comm, tmp_path, monkeypatch, batch):
    """Also where a window of chunks is as large as this rank's part of the memory for the shuffle."""
    zarr = pytest.importorskip("zarr")
    path, rows, numbers, block = tmp_path / "a.zarr", 61 * 3900 + 12, [], Zarr.block
    if comm.rank == 0:
        zarr.open(path, mode="w", shape=(rows, 16), chunks=(3900, 16), dtype="f4")[:] = 1
    comm.Barrier()
    monkeypatch.setattr(Zarr, "block", lambda form, *at: numbers.append(at[-1]) or block(form, *at))
    options = Options()
    options.shuffle_memory = 10 << 20
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    dataset = Dataset.from_zarr(path).shuffle(seed=1).with_options(options).batch(batch)
    own = 0
    for piece in strategy.experimental_distribute_dataset(dataset):
        own += len(piece)
        comm.Barrier()  # as in training: ranks far apart need chunks that shared memory has dropped
    assert comm.allreduce(own) == rows
    assert sorted(numbers) == sorted(set(numbers))


def test_rows_of_parquet_that_filters_leave(strategy, comm, tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = comm.bcast(str(tmp_path))
    if comm.rank == 0:
        for year in range(4):
            os.makedirs(f"{folder}/year={year}")
            table = arrow.table({"x": [k if k % 5 else None for k in range(100 * year, 100 * year + 23)]})
            parquet.write_table(table, f"{folder}/year={year}/a.parquet", row_group_size=6)
    comm.barrier()

    def made():
        files = f"{folder}/*/a.parquet"
        rows = Dataset.from_parquet(files, ("x", "year"), null={"x": -1}, filters=[("x", ">", 4), ("year", "!=", 2)])
        return rows.shuffle(seed=1)

    expected = [k for year in (0, 1, 3) for k in range(100 * year, 100 * year + 23) if k % 5 and k > 4]
    dataset = strategy.experimental_distribute_dataset(made().batch(7))
    assert dataset.cardinality == -(-len(expected) // 7)
    iterator = iter(dataset)
    begun = next(iterator)[0].tolist()
    state = iterator.state()
    again = strategy.experimental_distribute_dataset(made().batch(7))
    again.restore(state)
    rest = [x for batch in again for x in batch[0].tolist()]
    assert rest == [x for batch in iterator for x in batch[0].tolist()]
    assert sorted(x for each in comm.allgather(begun + rest) for x in each) == expected


@pytest.mark.parametrize("kind", ["csv", "txt", "images"])
def test_bad_rows_are_left_out_alike(strategy, tmp_path, kind):
    if kind == "csv":
        pytest.importorskip("pyarrow.csv")
    if kind == "images":
        image = pytest.importorskip("PIL.Image")
    if RANK == 0:
        for number, rows in enumerate(SIZES):
            texts = [b"\xff" if k % 4 == 1 else b"%d" % (100 * number + k) for k in range(rows)]
            (tmp_path / f"{number}.csv").write_bytes(b"\n".join([b"x", *texts]))
            (tmp_path / f"{number}.txt").write_bytes(b"\n".join(texts))
            (tmp_path / str(number)).mkdir()
            for k, text in enumerate(texts if kind == "images" else ()):
                path = tmp_path / str(number) / f"{k:02}.tif"
                image.new("I", (1, 1), int(text)).save(path) if text != b"\xff" else path.write_bytes(b"")
    strategy.barrier()
    files = [tmp_path / f"{number}.{kind}" for number in range(len(SIZES))]
    make = {
        "csv": lambda: Dataset.from_csv(files, "x", {"x": int}, on_bad_row="skip"),
        "txt": lambda: Dataset.from_text(files, on_bad_row="skip").map(int),
        "images": lambda: Dataset.from_images(tmp_path, mode="I", on_bad_row="skip").map(lambda x, y: int(x[0, 0])),
    }[kind]
    expected = [100 * number + k for number, rows in enumerate(SIZES) for k in range(rows) if k % 4 != 1]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        batches = strategy.experimental_distribute_dataset(make().shuffle(seed=3).batch(6))
    assert batches.cardinality == -(-len(expected) // 6)
    steps = [sorted(x for each in MPI.COMM_WORLD.allgather(batch.tolist()) for x in each) for batch in batches]
    assert sorted(x for step in steps for x in step) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = mpistrat.OneDeviceStrategy("cpu").experimental_distribute_dataset(make().shuffle(seed=3).batch(6))
    assert steps == [sorted(batch.tolist()) for batch in alone]
    texts = [str(each.message) for each in told if "left out" in str(each.message)]
    assert len(texts) == (0 if RANK else 1 if kind == "images" else len(SIZES))


def write_warned_of(path):
    (path / "a.csv").write_text("x\n" + "".join(f"{x}\n" for x in (1, 2, "bad", 4, 5)))
    (path / "a.txt").write_bytes(b"a\nb\n\xff\nd\n")
    np.save(path / "a.npy", np.arange(4))
    np.save(path / "b.npy", np.arange(0))
    with h5py.File(path / "c.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((60, 1 << 17)), chunks=(10, 1 << 17), compression="gzip")
    (path / "images" / "class").mkdir(parents=True)
    for number in range(5):
        (path / "images" / "class" / f"{number}.png").write_bytes(b"png")
        with contextlib.suppress(ImportError):
            from PIL import Image

            Image.new("RGB", (4, 4)).save(path / "images" / "class" / f"{max(1, number)}.png")


@pytest.mark.parametrize(
    ("needed", "read", "match"),
    [
        ("PIL.Image", lambda path: Dataset.from_images(path / "images", on_bad_row="skip"), "1 row cannot be read"),
        ("pyarrow.csv", lambda path: Dataset.from_csv(path / "a.csv", "x", on_bad_row="skip"), r"a\.csv.*1 row cannot"),
        ("numpy", lambda path: Dataset.from_text(path / "a.txt", on_bad_row="skip"), r"a\.txt.*1 row cannot be read"),
        ("numpy", lambda path: Dataset.from_npy(str(path / "*.npy")), r"b\.npy' has no rows and is skipped"),
        (
            "h5py",
            lambda path: Dataset.from_hdf5(path / "c.h5", "x").shuffle(seed=1, mode="exact"),
            "decodes nearly all chunks again",
        ),
        ("numpy", lambda path: Dataset.range(9).map(lambda x: x + GENERATOR.random()), "random generator 'GENERATOR'"),
    ],
)
@pytest.mark.skipif(SIZE == 1, reason="needs another rank")
def test_a_warning_that_is_an_error_is_raised_on_all_ranks(strategy, comm, tmp_path, needed, read, match):
    pytest.importorskip(needed)
    path = comm.bcast(tmp_path)
    if RANK == 0:
        write_warned_of(path)
    comm.Barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=match):
            strategy.experimental_distribute_dataset(read(path).batch(4))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        strategy.experimental_distribute_dataset(read(path).batch(4))
    assert comm.allgather(len(seen)) == [1] + [0] * (SIZE - 1)
