"""Tests of manifests and states: what they keep between jobs, and which changes of files they detect."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest

from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, DatasetMismatchError, DistributedDataset, Options
from mpistrat.data.formats import hdf5


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number, rows in enumerate((5, 3, 4)):
        write(folder / f"{number}.h5", rows, number)
    return folder


def write(path, rows, number=0):
    with h5py.File(path, "w") as file:
        file["x"] = np.full((rows, 2), number, "f4")
        file.create_dataset("y", data=np.arange(rows), chunks=(2,), compression="gzip")
        file.create_dataset("text", data=["a"] * rows, dtype=h5py.string_dtype())
        file["pair"] = np.zeros(rows, [("n", ">i2"), ("v", "<f4", (2,))])


def by_data(dataset):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    return dataset.with_options(options)


@pytest.fixture
def described(monkeypatch):
    """Record the files that are described, in order."""
    names, real = [], hdf5.describe
    monkeypatch.setattr(hdf5, "describe", lambda path, *more: names.append(os.path.basename(path)) or real(path, *more))
    return names


NAMES = {"x": "x", "y": "y", "text": "text", "pair": "pair"}


def made(files, manifest):
    return by_data(Dataset.from_hdf5(str(files / "*.h5"), NAMES, manifest=manifest).batch(4))


def values(batches):
    return [{name: list(map(str, array)) for name, array in batch.items()} for batch in batches]


@pytest.mark.parametrize("size", [1, 3])
def test_a_manifest_is_written_once_and_used(files, tmp_path, replicas, described, size):
    kept = tmp_path / "manifest.json"
    expected = values(made(files, None))
    described.clear()

    def replica(peer):
        return values(DistributedDataset(made(files, kept), peer))

    def together(found):
        return [
            {name: [row for mine in step for row in mine[name]] for name in NAMES} for step in zip(*found, strict=True)
        ]

    for turn in range(2):
        found = replicas(size, replica)
        assert together(found) == expected
        # Each of these threads counts as a job of one process, which describes the first file at once.
        assert sorted(set(described)) == (["0.h5", "1.h5", "2.h5"] if turn == 0 else [])
        assert [described.count(name) for name in ("1.h5", "2.h5")] == [turn == 0] * 2
        described.clear()
    assert sorted(os.listdir(tmp_path)) == ["files", "manifest.json"]
    # Files and manifest that are moved together still match.
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(files, moved / "files")
    shutil.move(kept, moved / "manifest.json")
    assert values(made(moved / "files", moved / "manifest.json")) == expected


def spoil(files, kept, how):
    if how == "longer":
        write(files / "1.h5", 900, 1)
    elif how == "touched":
        os.utime(files / "1.h5")
    elif how == "gone":
        (files / "1.h5").unlink()
    elif how == "new":
        write(files / "7.h5", 2)
    elif how == "no json":
        kept.write_text("{")
    elif how == "no manifest":
        kept.write_text("{}")
    elif how == "no files":
        content = json.loads(kept.read_text())
        del content["files"]
        kept.write_text(json.dumps(content))
    elif how == "no record":
        content = json.loads(kept.read_text())
        content["files"][0]["record"] = {"kind": "Column"}
        kept.write_text(json.dumps(content))


SPOILT = {
    "longer": r"stale: file '.*1\.h5' had \d+ bytes, and has \d+ now; fix: remove the manifest",
    "touched": r"stale: file '.*1\.h5' has been written to",
    "gone": r"stale: file 'files/1\.h5' is no longer among the files",
    "new": r"stale: file 'files/7\.h5' is new",
    "no json": "not JSON",
    "no manifest": "not a mpistrat manifest of version 1; fix: give the manifest another name",
    "no record": "damaged",
    "no files": "damaged",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_stale_manifest_is_refused(files, tmp_path, replica_errors, how):
    kept = tmp_path / "manifest.json"
    len(made(files, kept))
    spoil(files, kept, how)
    content = kept.read_bytes()
    errors = replica_errors(2, lambda peer: DistributedDataset(made(files, kept), peer))
    assert [type(error) for error in errors] == [DataFileError] * 2
    assert str(errors[0]) == str(errors[1])
    for call in (lambda: len(made(files, kept)), lambda: (_ for _ in ()).throw(errors[0])):
        with pytest.raises(DataFileError, match=SPOILT[how]):
            call()
    assert kept.read_bytes() == content


def test_a_manifest_of_other_datasets(files, tmp_path):
    len(made(files, tmp_path / "m.json"))
    with pytest.raises(DataFileError, match=r"describes the datasets \['pair', .*but these are \['x'\]"):
        len(Dataset.from_hdf5(str(files / "*.h5"), "x", manifest=tmp_path / "m.json"))


def test_a_manifest_that_cannot_be_written(files, tmp_path, replica_errors):
    errors = replica_errors(2, lambda p: DistributedDataset(made(files, tmp_path / "no" / "m.json"), p))
    assert [type(error) for error in errors] == [FileNotFoundError] * 2
    assert "so the manifest was not written; fix: " in str(errors[0])
    errors = replica_errors(2, lambda p: DistributedDataset(made(files, tmp_path), p))
    assert [type(error) for error in errors] == [IsADirectoryError] * 2
    assert "so the manifest was not read; fix: " in str(errors[1])


def test_a_manifest_that_one_node_cannot_read(files, tmp_path, replica_errors):
    """The nodes have copies of the files in folders of their own, each with a manifest."""
    copies = [tmp_path / name for name in ("first", "second")]
    for copy in copies:
        shutil.copytree(files, copy / "files")
        len(made(copy / "files", copy / "m.json"))
    datasets = [made(copy / "files", copy / "m.json") for copy in copies]
    (copies[1] / "m.json").write_text("{")
    found = replica_errors(2, lambda p: DistributedDataset(datasets[p.rank], p))
    assert [type(error) for error in found] == [DataFileError] * 2
    assert all("not JSON" in str(error) for error in found)


def test_a_manifest_on_some_ranks_alone(files, tmp_path, replica_errors):
    names = str(files / "*.h5")
    errors = replica_errors(
        2,
        lambda p: DistributedDataset(
            Dataset.from_hdf5(names, "x", manifest=tmp_path / "m.json" if p.rank else None).batch(2), p
        ),
    )
    assert [type(error) for error in errors] == [ValueError] * 2
    with_manifest, without = str(errors[0]).split(" on rank 1 and ")
    assert "with the manifest 'm.json'" in with_manifest
    assert "manifest" not in without
    assert without.partition(" on rank 0: ")[2].startswith("build it in the same way on all ranks")


# --- states ---------------------------------------------------------------------------------


def state_of(files):
    return distributed(files).state()


def distributed(files):
    class SingleRankTopology:
        size, rank = 1, 0

        def all_gather_object(self, value):
            return [value]

        def broadcast_object(self, value):
            return value

    return DistributedDataset(Dataset.from_hdf5(str(files / "*.h5"), "x").batch(2), SingleRankTopology())


CHANGES = {
    "longer": r"'1\.h5' had 3 rows in \d+ bytes and has 900 in \d+ now",
    "gone": r"'1\.h5' is missing",
    "new": r"'7\.h5' is new",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_state_is_of_the_same_files(files, how):
    state = json.loads(json.dumps(state_of(files)))
    spoil(files, None, "touched")
    distributed(files).restore(state)
    spoil(files, None, how)
    with pytest.raises(ValueError, match="files have changed since: " + CHANGES[how]):
        distributed(files).restore(state)
    state["source"]["list"] = None
    with pytest.raises(ValueError, match=r"there were 3 with 12 rows, and now there are \d with \d+"):
        distributed(files).restore(state)


@pytest.mark.full
def test_a_state_is_small(tmp_path):
    from mpistrat.data.hdf5.manifest import Manifest
    from mpistrat.data.hdf5.records import FileRecord

    def identity(files, rows):
        records = [FileRecord(rows[i], 0, rows[i], ()) for i in range(files)]
        return Manifest.of([f"/data/part-{i:05}.h5" for i in range(files)], records).identity()

    alike = identity(10_000, [1000] * 10_000)
    assert len(json.dumps(alike)) < 64 << 10
    assert alike["list"]
    varied = identity(40_000, np.random.default_rng(0).integers(1, 2**40, 40_000).tolist())
    assert varied["list"] is None
    assert len(json.dumps(varied)) < 200


def test_a_file_of_another_type_is_still_noticed(files):
    with h5py.File(files / "2.h5", "w") as file:
        file["x"] = np.zeros((2, 3), "f4")
    with pytest.raises(DatasetMismatchError, match=r"0\.h5.*2\.h5"):
        len(Dataset.from_hdf5(str(files / "*.h5"), "x"))


@pytest.mark.parametrize("packed", ["!!", 5, "AAAA"])
def test_a_state_whose_list_of_files_is_damaged(files, packed):
    state = state_of(files)
    state["source"] = {**state["source"], "digest": "another", "list": packed}
    with pytest.raises(ValueError, match="the files have changed since: there were 3 with 12 rows"):
        distributed(files).restore(state)
