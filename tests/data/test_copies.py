"""Tests that datasets can be copied and pickled, as for the workers of a coordinator."""

import copy
import pickle
import pickletools

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset

ROWS = 7


def numbers():
    return iter(range(ROWS))


def of_csv(path):
    path.write_text("x\n" + "".join(f"{i}\n" for i in range(ROWS)))
    return Dataset.from_csv(path, "x")


def of_hdf5(path):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(ROWS)
    return Dataset.from_hdf5(path, "x")


def of_images(path):
    image = pytest.importorskip("PIL.Image")
    (path / "a").mkdir(parents=True)
    for number in range(ROWS):
        image.new("L", (2, 1), number).save(path / "a" / f"{number}.png")
    return Dataset.from_images(path, mode="L").map(np.add)


def of_netcdf(path):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("i", ROWS)
        file.createVariable("x", "i8", ("i",))[:] = np.arange(ROWS)
    return Dataset.from_netcdf(path, "x")


def of_npy(path):
    np.save(path, np.arange(ROWS))
    return Dataset.from_npy(path)


def of_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": np.arange(ROWS)}), path)
    return Dataset.from_parquet(path, "x")


def of_text(path):
    path.write_text("".join(f"{i}\n" for i in range(ROWS)))
    return Dataset.from_text(path)


def of_zarr(path):
    zarr = pytest.importorskip("zarr")
    zarr.save_array(str(path), np.arange(ROWS))
    return Dataset.from_zarr(path)


DATASETS = {
    "arrays": lambda _: Dataset.from_arrays(np.arange(ROWS)),
    "csv": of_csv,
    "generator": lambda _: Dataset.from_iterable(numbers),
    "hdf5": of_hdf5,
    "images": of_images,
    "mixed": lambda _: Dataset.sample_from_datasets([Dataset.range(ROWS)] * 2, [0.5, 0.5], seed=1),
    "netcdf": of_netcdf,
    "npy": of_npy,
    "parquet": of_parquet,
    "range": lambda _: Dataset.range(ROWS),
    "sequence": lambda _: Dataset.from_sequence(range(ROWS)),
    "tensors": lambda _: Dataset.from_tensors(np.arange(ROWS)),
    "text": of_text,
    "zarr": of_zarr,
}
CHAINS = {
    "as it is": lambda dataset: dataset,
    "batches": lambda dataset: dataset.map(np.copy).batch(2),
    "endless": lambda dataset: dataset.repeat().take(2 * ROWS),
    "shuffled": lambda dataset: dataset.shuffle(100, seed=3),
    "options": lambda dataset: dataset.with_options(dataset.options()),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda dataset: pickle.loads(pickle.dumps(dataset))}


def epoch(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("made", DATASETS)
def test_a_copy_goes_on_from_the_epoch(made, chain, tmp_path):
    dataset = CHAINS[chain](DATASETS[made](tmp_path / f"x.{made}"))
    first = epoch(dataset)
    copies = {name: make(dataset) for name, make in COPIES.items()}
    second = epoch(dataset)
    assert first
    for name, made_copy in copies.items():
        assert epoch(made_copy) == second, name


@pytest.mark.parametrize("made", DATASETS)
def test_no_object_of_itertools_is_pickled(made, tmp_path):
    # Python 3.14 cannot pickle or copy one. Earlier Pythons can, so that the other test passes there.
    pickled = pickle.dumps(DATASETS[made](tmp_path / f"x.{made}"))
    assert "itertools" not in [argument for _, argument, _ in pickletools.genops(pickled)]
