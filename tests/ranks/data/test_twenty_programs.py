"""Twenty programs that users of other loaders have, as the documentation says to write them, on any number of ranks.

Each returns a dataset of batches. The rows of all ranks are compared, in order, with what NumPy, pandas, xarray, zarr
or Pillow read. Six programs return what they have found themselves.
"""

import itertools
import json
import tracemalloc

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import nest
from mpistrat.data import Dataset, Options

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LENGTHS = (17, 5, 30)
ROWS = sum(LENGTHS)
X = np.random.default_rng(0).normal(3, 2, (ROWS, 4))
LABEL = np.arange(ROWS) % 7 % 3 % 2  # 1 is rarer than 0
PATIENT = np.arange(ROWS) // 4


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture
def folder(comm, tmp_path):
    path = comm.bcast(tmp_path)
    if RANK == 0:
        starts = np.cumsum([0, *LENGTHS])
        for number, (first, last) in enumerate(itertools.pairwise(starts)):
            with h5py.File(path / f"part-{number}.h5", "w") as file:
                file["x"], file["label"] = X[first:last], LABEL[first:last]
                file["patient"] = PATIENT[first:last]
        np.save(path / "a.npy", X)
        np.save(path / "b.npy", LABEL)
        (path / "a.txt").write_text("".join(f"line {number}\n" for number in range(ROWS)))
    comm.barrier()
    return path


def all_rows(comm, batches):
    """Return the rows of all ranks, in the order of the batches."""
    found = []
    for step in zip(*comm.allgather([*batches]), strict=True):
        leaves = zip(*(nest.flatten(piece)[0] for piece in step), strict=True)
        found.append([np.concatenate(each) for each in leaves])
    return [np.concatenate(each) for each in zip(*found, strict=True)]


# --- programs that return a dataset, and the rows that they should have --------------------------


def files_of_different_lengths(folder):
    return Dataset.from_hdf5(f"{folder}/*.h5", {"x": "x", "y": "label"}).batch(8), {"x": X, "y": LABEL}


def zip_of_two_files(folder):
    pairs = Dataset.zip(Dataset.from_npy(f"{folder}/a.npy"), Dataset.from_npy(f"{folder}/b.npy"))
    return pairs.batch(8), (X, LABEL)


def columns_by_name(folder):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": LABEL})
    if RANK == 0:
        table.to_parquet(folder / "a.parquet")
    MPI.COMM_WORLD.barrier()
    return Dataset.from_parquet(folder / "a.parquet", ("c", "a")).batch(8), (table["c"], table["a"])


def normalised_by_the_training_set(folder):
    rows = Dataset.from_hdf5(f"{folder}/*.h5", "x")
    train, test = rows.split(0.8, seed=1)
    count, total, squares = train.reduce((0, 0.0, 0.0), lambda s, x: (s[0] + 1, s[1] + x, s[2] + x * x))
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    part = np.array([*Dataset.from_arrays(X).split(0.8, seed=1)[0]])
    rest = np.array([*Dataset.from_arrays(X).split(0.8, seed=1)[1]])
    assert len(part) == int(0.8 * ROWS) + 1
    return test.map(lambda x: ((x - mean) / std).round(8)).batch(5), ((rest - part.mean(0)) / part.std(0)).round(8)


def time_windows(folder):
    windows = Dataset.from_hdf5(f"{folder}/*.h5", "x").window(6, shift=2, drop_remainder=True)
    return windows.batch(4), np.lib.stride_tricks.sliding_window_view(X, 6, 0)[::2].swapaxes(1, 2)


def noise_of_a_row(folder):
    def noisy(x, rng):
        return x + rng.normal(size=x.shape)

    noise = [
        np.random.Generator(np.random.Philox(key=[7, 0], counter=[0, i, 0, 0])).normal(size=4) for i in range(ROWS)
    ]
    return Dataset.from_npy(f"{folder}/a.npy").map(noisy, seed=7).batch(8), X + noise


def image_folder(folder):
    image = pytest.importorskip("PIL.Image")
    expected = []
    for label, name in enumerate(["cat", "dog"]):
        for number in range(7):
            pixels = np.random.default_rng(number).integers(0, 256, (4 + number, 5, 3), np.uint8)
            path = folder / "images" / name / f"{number}.png"
            if RANK == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                image.fromarray(pixels).save(path)
            expected.append((np.array(image.fromarray(pixels).resize((8, 6))), label))
    MPI.COMM_WORLD.barrier()
    return Dataset.from_images(folder / "images", size=(6, 8)).batch(3), tuple(
        map(np.array, zip(*expected, strict=True))
    )


def parquet_of_pandas(folder):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    count = pd.Series([None if k % 5 == 0 else k for k in range(ROWS)], dtype="Int64")
    table = pd.DataFrame({"city": pd.Categorical(["Graz", "Linz"] * (ROWS // 2)), "count": count})
    table["mass"] = [None if k % 7 == 0 else k / 2 for k in range(ROWS)]
    if RANK == 0:
        table.to_parquet(folder / "a.parquet")
    MPI.COMM_WORLD.barrier()
    rows = Dataset.from_parquet(folder / "a.parquet", null={"count": -1})
    return rows.batch(8), {
        "city": table["city"].astype(object),
        "count": table["count"].fillna(-1).to_numpy(np.int64),
        "mass": table["mass"],
    }


def csv_with_na(folder):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    if RANK == 0:
        lines = [f"{'NA' if k % 5 == 0 else k / 4},{k},{'' if k % 3 == 0 else k}" for k in range(ROWS)]
        (folder / "a.csv").write_text("\n".join(["mass,number,age", *lines]) + "\n")
    MPI.COMM_WORLD.barrier()
    rows = Dataset.from_csv(folder / "a.csv", dtypes={"number": int}, na_values=["", "NA"])
    return rows.batch(8), {name: values.to_numpy() for name, values in pd.read_csv(folder / "a.csv").items()}


def lines_of_text(folder):
    lines = Dataset.from_text(f"{folder}/a.txt").map(lambda line: int(line.split()[1]))
    return lines.batch(8), np.arange(ROWS)


def packed_tokens(folder):
    tokens = Dataset.from_text(f"{folder}/a.txt").map(lambda line: np.frombuffer(line.encode(), np.uint8))
    text = b"".join(f"line {number}".encode() for number in range(ROWS))
    whole = len(text) // 16 * 16
    return tokens.pack(16).batch(4), np.frombuffer(text[:whole], np.uint8).reshape(-1, 16)


def packed_netcdf(folder):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    packed = {"t2m": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 20.0, "_FillValue": -1}}
    values = np.where(X[:, 0] > 5, np.nan, np.round(X[:, 0] * 2) / 2)
    if RANK == 0:
        xarray.Dataset({"t2m": ("time", values)}).to_netcdf(folder / "a.nc", encoding=packed, engine="netcdf4")
    MPI.COMM_WORLD.barrier()
    with xarray.open_dataset(folder / "a.nc", engine="netcdf4") as opened:
        return Dataset.from_netcdf(folder / "a.nc", "t2m").batch(8), opened["t2m"].to_numpy()


def zarr_in_a_zip_archive(folder):
    zarr = pytest.importorskip("zarr")
    if RANK == 0:
        store = zarr.storage.ZipStore(folder / "a.zarr.zip", mode="w")
        zarr.open_group(store, mode="w")
        made = zarr.open(store, path="x", mode="w", shape=X.shape, chunks=(8, 2), dtype=X.dtype)
        made[:] = X
        store.close()
    MPI.COMM_WORLD.barrier()
    return Dataset.from_zarr(f"{folder}/*.zarr.zip", "x").batch(8), X


def rows_of_some_patients(folder):
    rows = Dataset.from_hdf5(f"{folder}/*.h5", ("x", "patient"))
    some = rows.filter(lambda patient: patient % 3 == 1, by=1)
    return some.batch(4), (X[PATIENT % 3 == 1], PATIENT[PATIENT % 3 == 1])


RETURNED = [
    files_of_different_lengths,
    zip_of_two_files,
    columns_by_name,
    normalised_by_the_training_set,
    time_windows,
    noise_of_a_row,
    image_folder,
    parquet_of_pandas,
    csv_with_na,
    lines_of_text,
    packed_tokens,
    packed_netcdf,
    zarr_in_a_zip_archive,
    rows_of_some_patients,
]
STREAMS = [packed_tokens]


@pytest.mark.parametrize("program", RETURNED)
def test_rows_are_those_of_a_serial_program(strategy, comm, folder, program):
    dataset, expected = program(folder)
    made = strategy.experimental_distribute_dataset(dataset)
    found, rows = all_rows(comm, made), [np.asarray(each) for each in nest.flatten(expected)[0]]
    for ours, theirs in zip(found, rows, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if program not in STREAMS:
        assert made.cardinality == -(-len(rows[0]) // dataset.batch_size)


# --- programs that return what they have found ---------------------------------------------------


def test_resume_in_mid_epoch(strategy, comm, folder):
    rows = Dataset.from_hdf5(f"{folder}/*.h5", "x").shuffle(seed=1)
    iterator = iter(strategy.experimental_distribute_dataset(rows.batch(8)))
    begun = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(iterator.state()))
    again = strategy.experimental_distribute_dataset(rows.batch(6))
    again.restore(state)
    (found,) = all_rows(comm, [*begun, *again])
    assert sorted(found.tolist()) == sorted(X.tolist())


def test_two_corpora_by_weight(strategy, comm, folder):
    lines, numbers = Dataset.from_npy(f"{folder}/b.npy").map(lambda x: x * 0 - 1), Dataset.range(1000)
    mixed = Dataset.sample_from_datasets([lines.repeat(), numbers.repeat()], [1, 3], seed=2).take(2000)
    (found,) = all_rows(comm, strategy.experimental_distribute_dataset(mixed.batch(100)))
    assert 0.2 < np.mean(found == -1) < 0.3
    of_numbers = found[found >= 0]
    assert of_numbers.tolist() == [k % 1000 for k in range(len(of_numbers))]


def test_split_by_group(strategy, comm, folder):
    rows = Dataset.from_hdf5(f"{folder}/*.h5", ("x", "patient"))
    parts = [
        all_rows(comm, strategy.experimental_distribute_dataset(part.batch(8)))[1]
        for part in rows.split([0.7, 0.3], seed=1, by=1)
    ]
    assert not {*parts[0]} & {*parts[1]}
    assert sorted([*parts[0], *parts[1]]) == PATIENT.tolist()


def test_class_balance(strategy, comm, folder):
    rows = Dataset.from_hdf5(f"{folder}/*.h5", {"x": "x", "label": "label"}).sample(
        by="label", seed=1, num_samples=1000
    )
    found, _ = all_rows(comm, strategy.experimental_distribute_dataset(rows.batch(100)))
    assert LABEL.mean() < 0.45 < found.mean() < 0.55


def test_another_order_each_epoch(strategy, comm, folder):
    rows = strategy.experimental_distribute_dataset(Dataset.from_hdf5(f"{folder}/*.h5", "x").shuffle(seed=1).batch(8))
    first, second = (all_rows(comm, rows)[0].tolist() for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(X.tolist())


def test_data_larger_than_memory(strategy, comm, folder):
    if RANK == 0:
        with h5py.File(folder / "large.hdf5", "w") as file:
            large = file.create_dataset("x", (12000, 256), "i4", chunks=(100, 256))
            for first in range(0, 12000, 1000):
                large[first : first + 1000] = np.arange(first, first + 1000, dtype="i4")[:, np.newaxis]
    comm.barrier()
    options = Options()
    options.shuffle_memory = 1 << 20
    rows = Dataset.from_hdf5(folder / "large.hdf5", "x").shuffle(seed=1).with_options(options)
    made = strategy.experimental_distribute_dataset(rows.batch(96))
    tracemalloc.start()
    try:
        firsts = [x for batch in made for x in batch[:, 0].tolist()]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sorted(x for each in comm.allgather(firsts) for x in each) == [*range(12000)]
    assert peak < 6 << 20  # of 12
