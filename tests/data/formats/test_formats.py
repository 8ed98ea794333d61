"""Tests of all formats of files: the same rows, the same rules."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, NotFiniteError, Options
from mpistrat.data.distribute.dataset import DistributedDataset

pytestmark = pytest.mark.filterwarnings("ignore:file .* has no rows")


def numbers(batches):
    found = []
    for x, y in batches:
        assert (x * 2 == y).all()
        assert (x.dtype, y.dtype) == ("f8", "i8")
        found += y.tolist()
    return found


@pytest.mark.parametrize("form", ["hdf5", "netcdf", "npy", "csv", "parquet", "zarr"], indirect=True)
def test_rows_in_order_and_shuffled(form, files):
    dataset = form.read(files)
    assert len(dataset) == 40
    assert numbers(dataset.batch(7)) == list(range(40))
    for shuffled in (dataset.shuffle(seed=1), dataset.shuffle(seed=1, mode="exact")):
        batches = shuffled.batch(7)
        epochs = [numbers(batches) for _ in range(2)]
        assert epochs[0] != epochs[1]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(40))
    assert numbers(dataset.skip(11).take(5).batch(5)) == [11, 12, 13, 14, 15]
    assert numbers(
        Dataset(pickle.loads(pickle.dumps(dataset.definition.source)), dataset.definition.transforms).batch(9)
    ) == list(range(40))


def divided(dataset):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    return dataset.with_options(options)


def test_replicas_share_the_rows_exactly(form, files, replicas):
    def begun(peer):
        distributed = DistributedDataset(divided(form.read(files).shuffle(seed=3).batch(6)), peer)
        iterator = iter(distributed)
        mine = [next(iterator) for _ in range(3)]
        return numbers(mine), iterator.state()

    def rest(peer):
        distributed = DistributedDataset(divided(form.read(files).shuffle(seed=3).batch(5)), peer)
        distributed.restore(state)
        batches = [*distributed]
        return numbers(batches), len(batches)

    told = replicas(2, begun)
    state = told[0][1]
    then = replicas(3, rest)
    assert len({steps for _, steps in then}) == 1
    assert sorted([x for mine, _ in (*told, *then) for x in mine]) == list(range(40))


def test_a_manifest_is_kept(form, files, tmp_path):
    manifest = tmp_path / "manifest.json"
    for _ in range(2):
        assert numbers(form.read(files, manifest=manifest).batch(9)) == list(range(40))
    form.write(tmp_path / f"part-9.{form.end}", {"x": np.zeros(1), "y": np.zeros(1, int)})
    with pytest.raises(DataFileError, match="stale"):
        len(form.read(files, manifest=manifest))


def test_files_that_are_missing_or_empty(form, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        form.read(tmp_path / f"nothing-here.{form.end}")
    path = tmp_path / f"empty.{form.end}"
    if form.end == "zarr":
        path.mkdir()
    else:
        path.write_bytes(b"")
    with pytest.raises(DataFileError, match=r"empty\."):
        len(form.read(path))


def test_damaged_files_are_named(form, files, replicas):
    path = Path(files.replace("*", "2"))
    if form.end == "csv":
        path.write_text(path.read_text().replace("\n8.0,", "\neight,"))
    elif form.end == "zarr":
        for each in path.rglob("*"):
            if each.is_file():
                each.write_bytes(b"\0")
    else:
        os.truncate(path, path.stat().st_size // 2)

    def replica(peer):
        with pytest.raises(DataFileError, match=r"part-2\."):
            for _ in DistributedDataset(form.read(files).batch(40), peer):
                pass
        return True

    assert replicas(1, replica) == [True]


def test_values_that_are_not_finite_are_found(form, tmp_path):
    path = tmp_path / f"nan.{form.end}"
    form.write(path, {"x": np.array([1.0, 2.0, np.nan]), "y": np.arange(3)})
    with pytest.raises(NotFiniteError, match="row 2"):
        list(form.read(path, check_finite=True).batch(3))


def test_files_that_differ(form, tmp_path):
    form.write(tmp_path / f"a.{form.end}", {"x": np.zeros(3), "y": np.zeros(3, int)})
    if form.end == "npy":
        np.save(tmp_path / "b.npy", np.zeros((3, 5)))
    elif form.end == "csv":
        (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    else:
        form.write(tmp_path / f"b.{form.end}", {"x": np.zeros(3, "f4"), "y": np.zeros(3, int)})
    with pytest.raises(ValueError, match=rf"b\.{form.end}"):
        len(form.read(tmp_path / f"*.{form.end}"))


def test_a_file_that_changes_is_found(form, tmp_path):
    path = tmp_path / f"a.{form.end}"
    form.write(path, {"x": np.zeros(9), "y": np.zeros(9, int)})
    dataset = form.read(path)
    assert len(dataset) == 9
    if form.end == "zarr":
        pytest.skip("a folder does not show that a chunk in it has changed")
    os.remove(path)
    form.write(path, {"x": np.zeros(5), "y": np.zeros(5, int)})
    with pytest.raises(DataFileError, match=r"a\."):
        list(dataset.batch(9))


def test_columns_that_are_missing(tmp_path, form):
    if form.end == "npy":
        pytest.skip("an npy file has one array")
    path = tmp_path / f"a.{form.end}"
    form.write(path, {"x": np.zeros(3), "z": np.zeros(3, int)})
    with pytest.raises(ValueError, match=r"'y'.*has.*'z'"):
        len(form.read(path))


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match="pip install pyarrow"):
        len(Dataset.from_parquet(tmp_path / "a.parquet", "x"))
