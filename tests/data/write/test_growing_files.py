"""Tests of files that grow by steps: what a program leaves that ends at any write, and files with many chunks."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpistrat.data import Writer
from mpistrat.data.errors import DataFileError
from mpistrat.data.write import growing
from mpistrat.data.write.growing import GrowingHdf5, StepSeries
from mpistrat.data.write.growing_zarr import GrowingZarr, GrowingZarr3
from mpistrat.storage import layout
from mpistrat.storage.layout import Box
from tests.selection import core


def series_of(name, shape, chunk):
    series = StepSeries(name, np.dtype("f8"), shape, chunk)
    series.boxes = [Box((0,) * len(shape), shape)]
    return series


@pytest.fixture
def file(tmp_path):
    file = GrowingHdf5(tmp_path / "f.h5", None)
    file.make(replace=False)
    file.attach()
    yield file
    file.close()


@pytest.mark.parametrize("flushes", [[5000], [1, 63, 64, 65, 4095, 4096, 4097, 4098, 4160, 8193, 9000]])
@pytest.mark.parametrize("chunk", core([(1, 1, 3), (1, 2, 3)], (1, 1, 3)))
def test_indexes_of_several_levels(file, tmp_path, flushes, chunk):
    series = series_of("u", (2, 3), chunk)
    file.create(series)
    values = np.random.default_rng(0).random((flushes[-1], 2, 3))
    for flush in flushes:
        while series.steps < flush:
            file.put(series, values[series.steps], 0)
            series.steps += 1
        file.commit({"u": series}, {})
        with h5py.File(tmp_path / "f.h5") as found:
            assert found["u"].id.get_num_chunks() == flush * series.cells
            np.testing.assert_array_equal(found["u"][()], values[:flush])
    file.close()
    with h5py.File(tmp_path / "f.h5", "r+") as found:  # HDF5 goes on with such an index
        found["u"].resize(len(values) + 100, axis=0)
        found["u"][-100:] = values[:100]
        found["other"] = 1
    with h5py.File(tmp_path / "f.h5") as found:
        np.testing.assert_array_equal(found["u"][()], np.concatenate([values, values[:100]]))


class Disk:
    """A file as the disk has it: of the writes since the last sync it may have any part."""

    def __init__(self, path):
        self.synced, self.later, self.states = path.read_bytes(), [], []

    def write(self, data, offset):
        self.later.append((offset, bytes(data)))
        self.states.append((self.synced, list(self.later)))

    def sync(self):
        self.synced, self.later = applied(self.synced, self.later), []


def applied(content, writes):
    content = bytearray(content)
    for offset, data in writes:
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data
    return bytes(content)


@pytest.mark.full
def test_a_program_that_ends_at_any_write(file, tmp_path, monkeypatch):
    """Killed after each write, and without power after each: any of the writes since the last sync are lost then."""
    disk, draw = Disk(tmp_path / "f.h5"), np.random.default_rng(0)
    write = growing.write_all

    def noted(descriptor, data, offset):
        disk.write(data, offset)
        write(descriptor, data, offset)

    for module in (growing, layout):
        monkeypatch.setattr(module, "write_all", noted)
    monkeypatch.setattr(growing.os, "fdatasync", lambda descriptor: disk.sync())
    known = {"u": series_of("u", (3,), (1, 3)), "g/few": series_of("g/few", (), (8,))}
    values = {"u": draw.random((90, 3)), "g/few": draw.random(90)}
    committed, seen = [0], 0
    for step in range(90):
        for name, series in known.items():
            if step == 0:
                file.create(series)
            file.put(series, values[name][step], 0)
            series.steps += 1
        if step % 7 == 0:
            file.sync()
            file.commit(known, {"step": step})
            committed.append(step + 1)
        states, disk.states = disk.states, []
        for synced, later in states:
            lost = [each for each in later if draw.random() < 0.5]
            torn = [*later[:-1], (later[-1][0], later[-1][1][: draw.integers(0, 5000) // 4096 * 4096])]
            for kept in (later, lost, torn if len(later[-1][1]) > 4096 else later):
                (tmp_path / "left.h5").write_bytes(applied(synced, kept))
                with h5py.File(tmp_path / "left.h5") as found:
                    lengths = {len(found[name]) if name in found else 0 for name in known}
                    assert len(lengths) == 1
                    assert lengths <= set(committed[-2:]) | {step + 1}
                    seen += 1
                    for name in known if lengths != {0} else ():
                        np.testing.assert_array_equal(found[name][()], values[name][: len(found[name])])
    assert seen > 500


def zarr_store(path, version):
    if version == 2:
        return GrowingZarr(path, None)
    pytest.importorskip("zarr", minversion="3")
    return GrowingZarr3(path, None, 3)


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_store_whose_writer_ends_at_any_rename(tmp_path, monkeypatch, version):
    """Each rename is the last once: all arrays then go on from the same step, the last one that was begun or before."""
    replace, left = os.replace, [0]

    def last(*paths):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(*paths)

    def grow(path):
        store = zarr_store(path, version)
        known = {each.name: each for each in store.existing()[0]} or {
            n: series_of(n, (3,), (1, 3)) for n in ("u", "g/v")
        }
        for series in known.values():
            series.boxes = series_of("", (3,), (1, 3)).boxes
            store.create(series)
            if version == 2:
                store.put(series, np.full(3, series.steps), 0)
            else:
                store.store(series, {0: np.full((1, 3), series.steps)}, None)
            series.steps += 1
        store.sync()
        store.commit(known, {"note": 1})

    ended, renames = True, 0
    while ended:
        path = tmp_path / f"{renames}.zarr"
        zarr_store(path, version).make(replace=False)
        grow(path)
        left[0], ended = renames, False
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", last)
            try:
                grow(path)
            except KeyboardInterrupt:
                ended = True
        steps = {each.steps for each in zarr_store(path, version).existing()[0]}
        assert steps in ({1}, {2}), (renames, steps)
        grow(path)
        assert {each.steps for each in zarr_store(path, version).existing()[0]} == {max(steps) + 1}
        for name in ("u", "g/v") if version == 3 else ():
            values = sys.modules["zarr"].open(str(path), mode="r")[name][...]
            np.testing.assert_array_equal(values, np.repeat(np.arange(max(steps) + 1.0)[:, None], 3, 1))
        renames += 1
    assert renames > 4
    (path / ".commit").write_text('{"../out": {}}')
    with pytest.raises(DataFileError, match="names what is not in the store"):
        zarr_store(path, version).existing()
    assert not (tmp_path / "out").exists()


def test_version_3_needs_zarr_3(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr")
    monkeypatch.delattr(zarr, "create_array", raising=False)
    with pytest.raises(ImportError, match=rf"zarr {zarr.__version__} writes version 2 only; fix: pip install"):
        Writer(tmp_path / "u.zarr", zarr_format=3)


def test_attributes_of_arrays_that_stay(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    for step in range(2):
        with Writer(tmp_path / "u.zarr", "a", zarr_format=3, attributes={"grid": np.array([1, 2])}) as writer:
            writer.append("u", step)
    assert dict(zarr.open_group(tmp_path / "u.zarr").attrs) == {"grid": [1, 2]}


@pytest.mark.parametrize(("shards", "numbers", "chunk"), [(np.int64(100), 1125, 5), (3, 1, 3), (101, 1125, 1)])
def test_a_shard_has_the_steps_that_are_asked_for(tmp_path, shards, numbers, chunk):
    zarr = pytest.importorskip("zarr", minversion="3")
    with Writer(tmp_path / "u.zarr", zarr_format=3, shards=shards) as writer:
        writer.append("u", np.ones(numbers))
    array = zarr.open_group(tmp_path / "u.zarr")["u"]
    assert (array.shards, array.chunks) == ((shards, numbers), (chunk, numbers))


def test_a_shard_grows_by_the_steps_that_are_flushed(tmp_path):
    pytest.importorskip("zarr", minversion="3")
    path, how = tmp_path / "u.zarr", {"zarr_format": 3, "shards": 64}
    with Writer(path, **how) as writer:
        for steps in (1, 2):
            writer.append("u", np.ones(10_000))
            writer.flush()
            assert 80_000 * steps < (path / "u" / "c.0.0").stat().st_size < 80_000 * steps + 2000
    os.truncate(path / "u" / "c.0.0", 0)  # zarr reads it as zeros
    with pytest.raises(DataFileError, match=r"file of chunk c\.0\.0; fix: bring it back if gone or empty"):
        Writer(path, "a", **how)


@pytest.mark.parametrize("version", [2, 3])
def test_what_zarr_cannot_have_is_refused_before_anything_is_written(tmp_path, version):
    zarr = pytest.importorskip("zarr", minversion="3")
    with Writer(tmp_path / "u.zarr", zarr_format=version) as writer:
        with pytest.raises(ValueError, match=r"'flow/zarr\.json'.* choose another name"):
            writer.append("flow/zarr.json", 1)
        if version == 3:
            with pytest.raises(TypeError, match=r"'far/u': zarr does not take .*; fix: write float64"):
                writer.append("far/u", np.longdouble(1))
        writer.append("u", 1)
    assert sorted(zarr.open_group(tmp_path / "u.zarr")) == ["u"]
    assert not {"flow", "far"} & {*os.listdir(tmp_path / "u.zarr")}


PROGRAM = """
import sys
from mpistrat.data import Writer
for mode in sys.argv[2:]:
    try:
        Writer(sys.argv[1], mode, overwrite=mode == "w")
    except OSError as error:
        print(error)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["f.h5", "f.zarr"])
def test_two_programs_do_not_write_to_one_file(tmp_path, name):
    def second(*modes):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), *modes]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout

    with Writer(tmp_path / name) as writer:
        writer.append("u", 1)
        assert "another program writes to it" in second("a")
        if name == "f.h5":
            with pytest.raises(OSError, match="lock"):
                h5py.File(tmp_path / name, "r+")
            h5py.File(tmp_path / name).close()
    assert second("a") == ""
    with Writer(tmp_path / name, "a") as writer:
        writer.append("u", 2)
        writer.flush()
        if name == "f.h5":  # a lock of this process would end here
            h5py.File(tmp_path / name).close()
        refused = second("a", "w").splitlines()
        assert ["another program writes to it" in line for line in refused] == [True, True]
    assert os.listdir(tmp_path) == [name]


def test_a_file_that_hdf5_has_open_for_writing(tmp_path):
    with Writer(tmp_path / "f.h5") as writer:
        writer.append("u", 1)
    with h5py.File(tmp_path / "f.h5", "r+"), pytest.raises(OSError, match="another program writes to it"):
        Writer(tmp_path / "f.h5", "a")


def test_what_hdf5_has_changed_stays(tmp_path):
    path = tmp_path / "f.h5"
    with Writer(path) as writer:
        writer.append("u", np.arange(3))
    with h5py.File(path, "r+") as file:
        file.attrs["note"] = "seen"
        file["u"].attrs["unit"] = "K"
        file["u"].resize(2000, axis=0)
    with Writer(path, "a") as writer:
        writer.append("u", np.arange(3) + 1)
    with h5py.File(path) as file:
        assert dict(file.attrs) | dict(file["u"].attrs) == {"note": "seen", "unit": "K"}
        np.testing.assert_array_equal(file["u"][()], [[0, 1, 2], *[[0] * 3] * 1999, [1, 2, 3]])
