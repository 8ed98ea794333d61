"""Files that an earlier version wrote are read as they were: one of each kind, in base 85 of zlib's bytes."""

import base64
import json
import shutil
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat
from mpistrat.coordinator import Executor
from mpistrat.data import Block, Writer
from mpistrat.training import Checkpoint, load, load_arrays

RECORDED = json.loads(Path(__file__).with_name("recorded_files.json").read_text())
WEIGHTS, HALVES = np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.float16)


@pytest.fixture
def recorded(tmp_path):
    """``recorded(name)``: the path of a file of that version."""

    def written(name):
        path = tmp_path / name
        path.write_bytes(zlib.decompress(base64.b85decode(RECORDED[name])))
        return path

    return written


def variables():
    with mpistrat.MultiWorkerMirroredStrategy().scope():
        return mpistrat.Variable(np.zeros((2, 3)), name="w"), mpistrat.Variable(np.zeros(4, np.float16), name="h")


def test_variables(recorded):
    w, h = variables()
    load([w, h], recorded("variables.h5"))
    np.testing.assert_array_equal(w.read_value(), WEIGHTS)
    np.testing.assert_array_equal(h.read_value(), HALVES)
    assert h.read_value().dtype == np.float16
    np.testing.assert_array_equal(load_arrays(recorded("async.h5"))["w"], WEIGHTS)


def test_parts_of_ranks_and_boxes(recorded):
    _, h = variables()
    mine, box = np.zeros(3, np.int32), Block(np.zeros((2, 3)), (0, 0), (2, 3))
    load([h], recorded("parts.h5"), own={"mine": mine, "box": box})
    np.testing.assert_array_equal(mine, [7, 7, 7])
    np.testing.assert_array_equal(box.array, WEIGHTS)


def test_objects(recorded):
    class Odd:
        def get_state(self):
            return {"n": 0, "big": 0, "t": "", "a": np.zeros(3, "i2"), "l": [0, (0, 0)], "f": 0.0}

        def set_state(self, state):
            self.state = state

    w, _ = variables()
    optimizer, odd, rng = mpistrat.optimizers.Adam(0.1), Odd(), np.random.default_rng(4)
    status = Checkpoint(w=w, optimizer=optimizer, odd=odd, rng=rng).read(recorded("objects.h5"))
    optimizer.build([w])
    status.assert_consumed()
    np.testing.assert_array_equal(w.read_value(), WEIGHTS)
    assert float(optimizer.learning_rate) == 0.5
    assert rng.random() == np.random.default_rng(3).random()
    numbers = odd.state.pop("a")
    assert (numbers.dtype, numbers.tolist()) == ("i2", [0, 1, 2])
    assert odd.state == {"n": 1 << 70, "big": 1 << 5000, "t": "\ud800x", "l": [1, (2, 3)], "f": 0.5}


@pytest.mark.parametrize(("name", "compress", "shape"), [("steps.h5", None, (2, 3)), ("packed.h5", "gzip", (40, 240))])
def test_steps_go_on(recorded, tmp_path, name, compress, shape):
    path = recorded(name)
    shutil.copy(path, tmp_path / "before.h5")
    with Writer(path, "a", compress=compress) as writer:
        assert (writer.steps("u"), writer.steps("t")) == (3, 3)
        writer.append("u", np.full(shape, 3, np.float32))
        writer.append("t", 1.5)
    with h5py.File(path) as file:
        assert dict(file.attrs) == {"rate": 0.25}
        np.testing.assert_array_equal(file["u"][()], np.broadcast_to(np.arange(4.0).reshape(4, 1, 1), (4, *shape)))
        assert file["t"][()].tolist() == [0.0, 0.5, 1.0, 1.5]
    with h5py.File(tmp_path / "before.h5") as file:
        assert len(file["u"]) == 3


def test_kept_results(recorded):
    with Executor(progress=False) as executor:
        found = list(executor.map(pow, [2, 3, 2**70], [0.5, 2, 1], keep=recorded("kept.h5")))
    assert found == [2**0.5, 9, 2**70]
