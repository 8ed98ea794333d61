"""Nested structures of arrays to a file and back."""

import collections
import os

import h5py
import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.data import ChecksumError
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import load, load_arrays, save, save_async

Moments = collections.namedtuple("Moments", "mu nu")


def state_of(seed):
    """A structure with arrays of several kinds and shapes, as of parameters and an optimizer."""
    random = np.random.default_rng(seed)
    return {
        "params": [{"w": random.normal(size=(3, 5)), "b": np.float32(random.normal(size=0))}, None],
        "opt": Moments(random.normal(size=7).astype(ml_dtypes.bfloat16), (random.integers(9, size=(2, 1)),)),
        "layer.0.weight": np.asfortranarray(random.normal(size=(4, 3))),
        "step": np.array(seed),
        2: random.normal(size=8)[::2],
    }


def leaves(state):
    return mpistrat.nest.flatten(state)[0]


def assert_equal(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("in_scope", [False, True])
def test_arrays_are_filled_in_place(strategy, tmp_path, in_scope):
    rank = strategy.comm.rank
    state, expected = state_of(rank), state_of(0)

    def there_and_back():
        save(state, tmp_path / "new" / "state.h5", differing="chief")
        for leaf in leaves(state):
            leaf[...] = 0
        load(state, tmp_path / "new" / "state.h5")

    if in_scope:
        with strategy.scope():
            there_and_back()
    else:
        there_and_back()
    assert_equal(state, expected)
    strategy.barrier()
    assert os.listdir(tmp_path / "new") == ["state.h5"]


def test_a_new_structure(strategy, tmp_path):
    expected = {**state_of(0), "rate": 0.5, "count": 3, "on": True}
    save_async(expected, tmp_path / "state.h5").wait()
    like = {**state_of(1), "rate": 0.0, "count": 0, "on": False}
    for leaf in leaves(like):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    found = load_arrays(tmp_path / "state.h5", like)
    assert type(found["opt"]) is Moments
    assert found["params"][1] is None
    assert [found.pop(key) for key in ("rate", "count", "on")] == [0.5, 3, True]
    assert_equal(found, {key: value for key, value in expected.items() if key in found})


def test_all_of_a_file(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], name="dense/kernel")
    expected = state_of(0)
    save({"model": [v], **expected}, tmp_path / "state.h5")
    found = load_arrays(tmp_path / "state.h5")
    np.testing.assert_array_equal(found["model"]["dense"]["kernel"], [1.0, 2.0])
    np.testing.assert_array_equal(found["params"]["0"]["w"], expected["params"][0]["w"])
    np.testing.assert_array_equal(found["2"], expected[2])
    assert found["opt"]["0"].dtype == ml_dtypes.bfloat16
    assert found["step"].shape == ()


def test_variables_and_arrays_together(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], name="v")
    array = np.arange(3.0)
    save({"a": (v, array)}, tmp_path / "state.h5")
    v.assign([0.0, 0.0])
    array[:] = 9
    load({"a": (v, array)}, tmp_path / "state.h5")
    np.testing.assert_array_equal(v.read_value(), [1.0, 2.0])
    np.testing.assert_array_equal(array, [0.0, 1.0, 2.0])


def test_what_does_not_fit_changes_nothing(strategy, tmp_path):
    save({"a": np.ones(3), "b": np.ones(2)}, tmp_path / "state.h5")
    a, other = np.zeros(3), np.zeros(4)
    for state, message in (
        ({"a": a, "b": other}, "variable 'b' is float64 of shape"),
        ({"a": a, "c": other}, "has no variable 'c': it has 'a', 'b'"),
        (
            {"a": other, "b": np.zeros(2, "f4"), "c": a, "d": a},
            r"no variable 'c', 'd': it has 'a', 'b'; variable 'a' is float64 of shape \(3,\) there, and float64 of "
            r"shape \(4,\) here; variable 'b' is float64 .* there, and float32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load(state, tmp_path / "state.h5")
        with pytest.raises(ValueError, match=message):
            load_arrays(tmp_path / "state.h5", state)
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    for leaf in (read_only, 1.0, np.float64(1.0)):
        with pytest.raises(TypeError, match=r"'b' is a .*float.*, which cannot be changed: use load_arrays"):
            load({"a": a, "b": leaf}, tmp_path / "state.h5")
    assert not a.any()
    with pytest.raises(FileNotFoundError):
        load_arrays(tmp_path / "none.h5")
    strategy.barrier()
    if strategy.is_chief:
        with h5py.File(tmp_path / "state.h5", "r+") as file:
            file["b"][1] = 7
    strategy.barrier()
    with pytest.raises(ChecksumError, match="'b'"):
        load({"a": a, "b": np.zeros(2)}, tmp_path / "state.h5")
    with pytest.raises(ChecksumError, match="'b'"):
        load_arrays(tmp_path / "state.h5")
    assert not a.any()


def test_shapes_that_differ_between_ranks(strategy, tmp_path):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("for several ranks")
    state = {"a": np.ones(3 + strategy.comm.rank)}
    for call in (lambda: save(state, tmp_path / "x.h5"), lambda: load(state, tmp_path / "x.h5")):
        with pytest.raises(RuntimeError, match="do not fit together"):
            call()
    assert os.listdir(tmp_path) == []


def test_in_a_replica_context_there_is_no_file(strategy, tmp_path):
    for call in (lambda: save([np.ones(3)], tmp_path / "x.h5"), lambda: load_arrays(tmp_path / "x.h5")):
        with pytest.raises(RuntimeError, match=r"outside of strategy\.run"):
            strategy.run(call)


SAVES = {"save": save, "save_async": lambda *arguments, **options: save_async(*arguments, **options).wait()}


@pytest.mark.parametrize("how", SAVES)
def test_arrays_of_a_ranks_own_are_not_saved_as_one(strategy, comm, tmp_path, how):
    path = tmp_path / f"{how}.h5"
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
    same = {"v": v, "one": np.ones(3), "empty": np.ones((0, 2)), "nan": np.array(np.nan)}
    SAVES[how](same, path)
    before = path.read_bytes() if comm.rank == 0 else b""
    own = {**same, "u": np.full(3, float(comm.rank == comm.size - 1)), "n": comm.rank, "a/b": np.eye(2)}
    if comm.size == 1:
        SAVES[how](own, path)
        return
    whose = f"rank {comm.size - 1}" if comm.size == 2 else f"ranks 1-{comm.size - 1}"
    with pytest.raises(ValueError, match=rf"2 of 6 arrays \('n', 'u'\) .* those of {whose} differ .*\"chief\""):
        SAVES[how](own, path)
    if comm.rank == 0:
        assert path.read_bytes() == before
    strategy.barrier()
    SAVES[how](own, path, differing="chief")
    found = load_arrays(path)
    assert found["u"].tolist() == [0, 0, 0]
    assert found["n"] == 0
    with pytest.raises(ValueError, match="'error' or 'chief', not 'own'"):
        SAVES[how](same, path, differing="own")
    with pytest.raises(MismatchError):
        SAVES[how](same, path, differing="chief" if comm.rank else "error")
    SAVES[how](same, path)


def test_bytes_can_be_saved_and_strings_not(strategy, tmp_path):
    with strategy.scope():
        words = mpistrat.Variable(np.array([b"a", b"bcd"]))
        refused = mpistrat.Variable(np.array(["a"])), mpistrat.Variable(np.array(["2020-01-01"], "M8[D]"))
    save({"words": words}, tmp_path / "a.h5")
    assert load_arrays(tmp_path / "a.h5")["words"].tolist() == [b"a", b"bcd"]
    for state in [*refused, np.array(["a"]), np.array(["2020"], "M8[s]"), "text"]:
        with pytest.raises(TypeError, match=r"'x' is .*astype"):
            save({"x": state}, tmp_path / "b.h5")


def test_a_url_is_not_a_path(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"x": np.ones(3)}
    for call in (save, save_async, load):
        with pytest.raises(ValueError, match=r"'s3://bucket/a\.h5' is a URL"):
            call(state, "s3://bucket/a.h5")
    with pytest.raises(ValueError, match="is a URL"):
        load_arrays("s3://bucket/a.h5")
    assert not os.listdir(tmp_path)


def test_bytes_of_another_order(strategy, tmp_path):
    """They are saved in this machine's order, also as a rank's own, and fill arrays of either order."""
    given = np.arange(3.0).astype(">f8")
    save({"x": given}, tmp_path / "x.h5", own={"mine": given.astype(">i4") + strategy.comm.rank})
    native, swapped, mine = np.zeros(3), np.zeros(3, ">f8"), np.zeros(3, ">i4")
    load({"x": native}, tmp_path / "x.h5", own={"mine": mine})
    load({"x": swapped}, tmp_path / "x.h5")
    assert native.tolist() == swapped.tolist() == [0.0, 1.0, 2.0]
    assert mine.tolist() == [strategy.comm.rank + i for i in range(3)]
    assert load_arrays(tmp_path / "x.h5")["x"].dtype == np.dtype("f8")


def test_long_doubles_that_are_equal(strategy, tmp_path):
    """The bytes between two of them are of whatever was in memory."""
    values = np.linspace(0, 1, 100).astype("longdouble")
    values.view(np.uint8).reshape(-1, values.itemsize)[:, 10:] = strategy.comm.rank + 1
    complex_values = values.astype("clongdouble")
    save({"x": values, "z": complex_values}, tmp_path / "x.h5")
    found = load_arrays(tmp_path / "x.h5")
    np.testing.assert_array_equal(found["x"], values)
    np.testing.assert_array_equal(found["z"], complex_values)


@pytest.mark.parametrize("how", ["load", "load of its own", "load_arrays", "load_arrays like"])
def test_a_path_that_differs_between_ranks(strategy, comm, tmp_path, how):
    if comm.size == 1:
        pytest.skip("for several ranks")
    paths = [tmp_path / f"{i}.h5" for i in range(2)]
    for path in paths:
        save({"x": np.ones(2)}, path, own={"mine": np.ones(2)})
    mine = np.zeros(2)
    calls = {
        "load": lambda path: load({"x": mine}, path),
        "load of its own": lambda path: load({}, path, own={"mine": mine}),
        "load_arrays": load_arrays,
        "load_arrays like": lambda path: load_arrays(path, {"x": mine}),
    }
    with pytest.raises(MismatchError, match=r"1\.h5"):
        calls[how](paths[comm.rank == comm.size - 1])
    assert mine.tolist() == [0.0, 0.0]


def test_a_file_with_texts_and_without_values(strategy, comm, tmp_path):
    if comm.rank == 0:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["x"], file["nothing"] = np.ones(2), h5py.Empty("f4")
    comm.Barrier()
    assert [*load_arrays(tmp_path / "x.h5")] == ["x"]
    comm.Barrier()
    if comm.rank == 0:
        with h5py.File(tmp_path / "x.h5", "a") as file:
            file["title"] = "a text"
    comm.Barrier()
    with pytest.raises(ValueError, match="'title' holds texts"):
        load_arrays(tmp_path / "x.h5")
    assert load_arrays(tmp_path / "x.h5", {"x": np.zeros(2)})["x"].tolist() == [1.0, 1.0]


def test_a_name_of_the_format_is_refused(strategy, tmp_path):
    with pytest.raises(ValueError, match="cannot be the name"):
        save({"__replicas__": {"x": np.ones(3)}}, tmp_path / "x.h5")


def test_a_private_file_stays_private(strategy, comm, tmp_path):
    save({"x": np.ones(3)}, tmp_path / "x.h5")
    if comm.rank == 0:
        os.chmod(tmp_path / "x.h5", 0o600)
    comm.Barrier()
    save({"x": np.zeros(3)}, tmp_path / "x.h5")
    assert os.stat(tmp_path / "x.h5").st_mode & 0o777 == 0o600
