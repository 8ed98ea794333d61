"""Objects that are saved together and restored, on any number of ranks."""

import collections
import gc
import json
import logging
import os
import pathlib
import random

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import DataFileError
from mpistrat.experimental import PreemptionCheckpointHandler
from mpistrat.training import Checkpoint, CheckpointManager, latest_checkpoint, load_arrays

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
AT = "mpistrat.training.checkpoint.checkpoint"


def variable(strategy, value, name=None):
    with strategy.scope():
        return mpistrat.Variable(np.asarray(value, np.float64), name=name)


def trained(strategy, make, steps, path=None, build=False):
    """Train two variables, from a checkpoint if a path is given. Return their values and the checkpoint."""
    with strategy.scope():
        w, b = mpistrat.Variable([1.0, -2.0, 3.0]), mpistrat.Variable(0.5)
    optimizer = make()
    if build:
        optimizer.build([w, b])
    checkpoint = Checkpoint(model={"w": w, "b": b}, optimizer=optimizer)
    if path is not None:
        checkpoint.restore(path)

    def step():
        replica = mpistrat.get_replica_context().replica_id_in_sync_group
        optimizer.apply_gradients([(w.read_value() * (replica + 1) / SIZE, w), (b.read_value() / SIZE, b)])

    for _ in range(steps):
        strategy.run(step)
    return [*w.read_value(), float(b)], checkpoint


OPTIMIZERS = {
    "momentum": lambda: mpistrat.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: mpistrat.optimizers.Adam(lambda step: 0.1 / (1 + step), amsgrad=True),
    "average": lambda: mpistrat.optimizers.RMSprop(0.01, use_ema=True, weight_decay=0.1),
    "accumulated": lambda: mpistrat.optimizers.Adam(0.1, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize("build", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_at_the_same_bits(strategy, tmp_path, name, build):
    expected, _ = trained(strategy, OPTIMIZERS[name], 7)
    _, checkpoint = trained(strategy, OPTIMIZERS[name], 4)
    path = checkpoint.save(tmp_path / "c")
    # Without build the slots do not exist yet: their values wait for the first step.
    found, again = trained(strategy, OPTIMIZERS[name], 3, path, build)
    assert found == expected
    assert again.optimizer.iterations == (2 if name == "accumulated" else 7)


def test_names_are_paths(strategy, tmp_path):
    with strategy.scope():
        w, mean = mpistrat.Variable([1.0], name="any name"), mpistrat.metrics.Mean("m")
    optimizer = mpistrat.optimizers.Adam()
    optimizer.build([w])
    path = Checkpoint(layers=[{"a/b": w}], opt=optimizer, mean=mean, twice=w).write(tmp_path / "c")
    with h5py.File(path) as file:
        found = []
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    assert sorted(found) == [
        "layers/0/a%2Fb",
        *(f"mean/{each.name.removeprefix('m/')}" for each in sorted(mean.variables, key=lambda v: v.name)),
        "opt/iterations",
        "opt/learning_rate",
        "opt/m/layers/0/a%2Fb",
        "opt/v/layers/0/a%2Fb",
    ]


def test_a_metric_is_shared_anew(strategy, tmp_path):
    with strategy.scope():
        mean, other = mpistrat.metrics.Mean(), mpistrat.metrics.Mean()
    strategy.run(lambda: mean.update_state([1.0, 2.0 + RANK]))
    expected = float(mean.result())
    path = Checkpoint(mean=mean).save(tmp_path / "c")
    Checkpoint(mean=other).restore(path).assert_consumed()
    assert float(other.result()) == pytest.approx(expected, rel=1e-15)


def test_generators_go_on(strategy, tmp_path):
    own, equal = strategy.rng(seed=3), np.random.Generator(np.random.MT19937(4))
    legacy, python = np.random.RandomState(5), random.Random(6)
    for each in (own, equal, legacy):
        each.normal(size=3)
    python.gauss(0, 1)
    path = Checkpoint(own=own, equal=equal, legacy=legacy, python=python).save(tmp_path / "c")
    expected = [each.normal(size=5).tolist() for each in (own, equal, legacy)], python.gauss(0, 1)
    others = strategy.rng(seed=8), np.random.Generator(np.random.MT19937()), np.random.RandomState()
    other = random.Random()
    Checkpoint(own=others[0], equal=others[1], legacy=others[2], python=other).restore(path).assert_consumed()
    assert ([each.normal(size=5).tolist() for each in others], other.gauss(0, 1)) == expected
    texts = load_arrays(path)
    assert [len(json.loads(texts[name][".state"].tobytes())) for name in ("own", "equal")] == [SIZE, 1]


def test_ranks_of_a_strategy_restore_without_the_others(tmp_path):
    """Outside of a scope, too: only the last rank has a strategy of its own and a checkpoint."""
    comm = MPI.COMM_WORLD.Split(RANK == SIZE - 1)
    if RANK == SIZE - 1:
        own = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
        v, rng = variable(own, 3.0), np.random.default_rng(1)
        path = Checkpoint(v=v, rng=rng).save(tmp_path / "c")
        expected = rng.normal()
        v.assign(0.0)
        Checkpoint(v=v, rng=rng).restore(path).assert_consumed()
        assert (float(v), rng.normal()) == (3.0, expected)
    comm.Free()


def test_states_of_other_ranks_are_not_taken(strategy, tmp_path):
    if RANK == 0:
        text = np.frombuffer(b'["a","b","c","d","e","f","g"]', np.uint8)
        with h5py.File(tmp_path / "c", "w") as file:
            file["it/.state"] = text
    strategy.barrier()
    with pytest.raises(ValueError, match=rf"7 ranks saved a state of their own, and there are {SIZE} .*'it'"):
        Checkpoint(it=np.random.default_rng()).restore(tmp_path / "c")


class Own:
    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_objects_with_a_state(strategy, tmp_path):
    state = {"n": (1, [2.5, None]), "text": "ä/", "array": np.arange(6, dtype=">i2").reshape(2, 3).T}
    path = Checkpoint(own=Own(state)).save(tmp_path / "c")
    like = Own({**state, "n": (0, [0.0, None])})
    Checkpoint(own=like).restore(path).assert_consumed()
    np.testing.assert_array_equal(like.state["array"], state["array"])
    assert like.state["array"].dtype == ">i2"
    path0 = Checkpoint(own=Own(np.array(4.0))).save(tmp_path / "0")
    Checkpoint(own=(like0 := Own())).restore(path0).assert_consumed()
    assert repr(like0.state) == "array(4.)"
    assert {**like.state, "array": 0} == {**state, "array": 0}


@pytest.mark.parametrize("bad", [object(), {1, 2}, np.array(["text"])])
def test_a_state_that_is_not_plain(strategy, tmp_path, bad):
    with pytest.raises(TypeError, match="a state in a checkpoint must be of numbers"):
        Checkpoint(own=Own([bad])).save(tmp_path / "c")
    strategy.barrier()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.ranks(min=2)
def test_what_fails_on_one_rank_raises_on_all(strategy, tmp_path):
    class Fails(Own):
        def get_state(self):
            if RANK == 1 and not self.state:
                raise OSError("not now")
            return 1

    named = "" if RANK == 1 else "rank 1: "
    own, inner, v = Fails(True), {}, variable(strategy, 1.0)
    checkpoint = Checkpoint(a=inner, own=own, v=v)
    path = checkpoint.save(tmp_path / "c")
    own.state = False
    v.assign(0.0)
    for call in (lambda: checkpoint.restore(path), lambda: checkpoint.save(tmp_path / "c")):
        with pytest.raises(OSError, match=f"^{named}not now"):
            call()
        if RANK == 1:
            inner["x"] = object()
        with pytest.raises(TypeError, match=f"^{named}a/x: a checkpoint cannot keep an object"):
            call()
        inner.clear()
    assert float(v) == 0.0
    with pytest.raises(TypeError, match=f"^{named}a state in a checkpoint must be of numbers"):
        Checkpoint(own=Own(object() if RANK == 1 else 1)).save(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c-1"]
    assert float(strategy.all_reduce("SUM", 1.0)) == SIZE


@pytest.mark.parametrize("thing", [3, "text", None, object(), {1}, lambda: 0])
def test_what_cannot_be_kept(strategy, thing):
    with pytest.raises(TypeError, match=r"deep/k/1: a checkpoint cannot keep an? \w+: give variables"):
        Checkpoint(deep={"k": [variable(strategy, 1.0), thing]})


def test_names_of_its_own():
    with pytest.raises(ValueError, match="'restore' is a name of Checkpoint itself"):
        Checkpoint(restore=np.zeros(1))
    with pytest.raises(AttributeError, match="no object 'weights'"):
        _ = Checkpoint().weights


def test_a_root_and_arrays(strategy, tmp_path):
    array = np.arange(3.0)
    inner = Checkpoint({"a": array}, b=variable(strategy, 2.0))
    path = Checkpoint(inner).write(tmp_path / "c")
    array[:] = 0
    inner.b.assign(0.0)
    Checkpoint(inner).read(path).assert_consumed()
    assert (array.tolist(), float(inner.b)) == ([0.0, 1.0, 2.0], 2.0)


@pytest.mark.parametrize("make", [lambda inner: Checkpoint(inner=inner), Checkpoint])
def test_an_inner_checkpoint_that_gets_more_objects(strategy, tmp_path, make):
    path = make(Checkpoint(a=variable(strategy, 1.0), b=variable(strategy, 2.0))).save(tmp_path / "c")
    inner = Checkpoint(a=variable(strategy, 0.0))
    outer = make(inner)
    status = outer.restore(path)
    inner.b = variable(strategy, 0.0)
    assert (float(inner.a), float(inner.b)) == (1.0, 2.0)
    status.assert_consumed()
    assert [*load_arrays(outer.write(tmp_path / "d"))] == [*load_arrays(make(inner).write(tmp_path / "e"))]


def test_names_that_must_not_be_lost(strategy, tmp_path):
    v, w = variable(strategy, 1.0), variable(strategy, 2.0)
    assert [*load_arrays(Checkpoint({"_v": v}, _w=w).write(tmp_path / "c"))] == ["_v", "_w"]
    for bad in ({1: v, "1": w}, {1: np.random.default_rng(), "1": np.random.default_rng()}):
        with pytest.raises(ValueError, match=r"two objects of a checkpoint have the name 'm/1"):
            Checkpoint(m=bad)
    with pytest.raises(ValueError, match="'_saves' is a name of Checkpoint itself"):
        Checkpoint(_saves=v)


def test_an_optimizer_alone_of_variables_with_odd_names(strategy, tmp_path):
    optimizers: list[mpistrat.optimizers.SGD] = []
    for value in (1, 2):
        optimizers.append(mpistrat.optimizers.SGD(0.1, momentum=0.9))
        optimizers[-1].build([variable(strategy, 0.0, name) for name in ("a//b", "a", "./c")])
        for each in optimizers[-1].variables:
            each.assign(value)
    path = Checkpoint(optimizer=optimizers[0]).save(tmp_path / "c")
    Checkpoint(optimizer=optimizers[1]).restore(path).assert_consumed()
    assert {float(each) for each in optimizers[1].variables} == {1}


def test_a_list_that_grows(strategy, tmp_path):
    path = Checkpoint(layers=[variable(strategy, 1.0), variable(strategy, 2.0)]).write(tmp_path / "c")
    layers = [variable(strategy, 0.0)]
    status = Checkpoint(layers=layers).read(path)
    with pytest.raises(AssertionError, match="'layers/1'"):
        status.assert_consumed()
    layers.append(variable(strategy, 0.0))
    status.assert_consumed()
    assert [*map(float, layers)] == [1.0, 2.0]


def test_a_dict_that_grows_is_told_of_at_the_next_save(strategy, tmp_path, caplog):
    path = Checkpoint(m={"a": variable(strategy, 1.0), "b": variable(strategy, 2.0)}).save(tmp_path / "c")
    grown = {"a": variable(strategy, 0.0)}
    checkpoint = Checkpoint(m=grown)
    status = checkpoint.restore(path)
    grown["b"] = variable(strategy, 0.0)
    with caplog.at_level(logging.WARNING, AT):
        checkpoint.save(tmp_path / "c")
        told = caplog.text
        status.assert_existing_objects_matched()
        checkpoint.save(tmp_path / "c")
    assert ("c-2 has new values of 'm/b', not those of" in told) == (RANK == 0)
    assert "lacks" not in told
    assert caplog.text == told
    assert (float(grown["b"]), float(load_arrays(tmp_path / "c-3")["m"]["b"])) == (2.0, 2.0)


def test_an_attribute_that_does_not_fit_the_file(strategy, tmp_path):
    path = Checkpoint(a=variable(strategy, 1.0), b=variable(strategy, [1.0] * 3)).save(tmp_path / "c")
    checkpoint = Checkpoint(a=variable(strategy, 0.0))
    status = checkpoint.restore(path)
    with pytest.raises(ValueError, match="'b' is float64 of shape \\(3,\\) there"):
        checkpoint.b = variable(strategy, [0.0] * 2)
    assert [*checkpoint.tracked()] == ["a"]
    checkpoint.z = variable(strategy, 5.0)
    checkpoint.b = variable(strategy, [0.0] * 3)
    assert (checkpoint.b.read_value().tolist(), float(checkpoint.z)) == ([1.0] * 3, 5.0)
    with pytest.raises(AssertionError, match="the file lacks 'z'"):
        status.assert_consumed()


@pytest.mark.parametrize("expected", [False, True])
def test_a_warning_of_what_was_not_taken(strategy, tmp_path, caplog, expected):
    path = Checkpoint(a=variable(strategy, 1.0), b=variable(strategy, 2.0)).save(tmp_path / "c")
    checkpoint = Checkpoint(a=variable(strategy, 0.0))
    status = checkpoint.restore(path)
    if expected:
        status.expect_partial()
    with caplog.at_level(logging.WARNING, AT):
        del checkpoint, status
        gc.collect()
    assert caplog.text.count("nothing took 'b'") == (RANK == 0 and not expected)


@pytest.mark.ranks(min=2)
def test_paths_and_objects_of_ranks_differ(strategy, tmp_path):
    v = variable(strategy, 1.0)
    with pytest.raises(ValueError, match=r"Checkpoint\.save to"):
        Checkpoint(v=v).save(tmp_path / f"of_{RANK}")
    with pytest.raises(ValueError, match=r"save of"):
        Checkpoint(**{f"of_{min(RANK, 1)}": v}).save(tmp_path / "c")
    array = np.full(3, float(RANK))
    with pytest.raises(ValueError, match=r"'own'.* not the same on all ranks"):
        Checkpoint(own=array).save(tmp_path / "c")
    strategy.barrier()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("save_counter", np.zeros(3)),
        ("it/.state", np.frombuffer(b"not json", np.uint8)),
        ("it/.state", np.frombuffer(b"{}", np.uint8)),
        ("it/.state", np.frombuffer(b"[" * 200_000, np.uint8)),
        ("it/.state", np.frombuffer(b'[{"array":"AAAA","dtype":"O","shape":[1]}]', np.uint8)),
        ("it/.state", np.frombuffer(b'[{"array":"AAAA","dtype":"i8","shape":[1099511627776]}]', np.uint8)),
        ("it/.state", np.zeros((2, 2))),
    ],
)
def test_a_file_with_something_else(strategy, tmp_path, name, content):
    v, generator = variable(strategy, 1.0), np.random.default_rng(1)
    if RANK == 0:
        with h5py.File(tmp_path / "c", "w") as file:
            file["v"], file[name] = 5.0, content
    strategy.barrier()
    before = generator.bit_generator.state
    with pytest.raises(DataFileError, match=name):
        Checkpoint(v=v, it=generator).restore(tmp_path / "c")
    assert (float(v), generator.bit_generator.state) == (1.0, before)


def test_a_url_is_not_a_path(strategy, tmp_path):
    checkpoint = Checkpoint(v=variable(strategy, 1.0))
    for call in (checkpoint.save, checkpoint.restore, lambda url: CheckpointManager(checkpoint, url, 1)):
        with pytest.raises(ValueError, match="s3://"):
            call("s3://bucket/c")


def test_a_save_that_fails_does_not_count(strategy, tmp_path):
    checkpoint = Checkpoint(v=variable(strategy, 1.0))
    if RANK == 0:
        (tmp_path / "file").write_text("")
    strategy.barrier()
    with pytest.raises(OSError, match=r"not written|rank 0"):
        checkpoint.save(tmp_path / "file" / "c")
    assert checkpoint.save_counter == 0
    assert checkpoint.save(tmp_path / "c").endswith("c-1")


# --- managers ------------------------------------------------------------------------------------------


def test_a_folder_may_be_moved(strategy, tmp_path, caplog):
    v = variable(strategy, 1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path / "old", max_to_keep=3)
    manager.save()
    strategy.barrier()
    if RANK == 0:
        os.rename(tmp_path / "old", tmp_path / "new")
    strategy.barrier()
    v.assign(0.0)
    assert latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "ckpt-1")
    again = CheckpointManager(Checkpoint(v=v), tmp_path / "new", max_to_keep=3)
    assert again.restore_or_initialize() == str(tmp_path / "new" / "ckpt-1")
    assert float(v) == 1.0
    assert again.save().endswith("ckpt-2")
    strategy.barrier()
    if RANK == 0:
        (tmp_path / "new" / "ckpt-2").unlink()
    strategy.barrier()
    assert latest_checkpoint(tmp_path / "new") is None
    assert caplog.text.count("ckpt-2 is gone: name another checkpoint") == (RANK == 0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 200_000, '{"all_model_checkpoint_paths": ["c-1"], '
             f'"all_model_checkpoint_timestamps": [1{"0" * 400}], "last_preserved_timestamp": 0}}',
             '{"all_model_checkpoint_paths": ["../other-1"], "all_model_checkpoint_timestamps": [1],'
             ' "last_preserved_timestamp": 0}']
)  # fmt: skip
def test_a_damaged_list(strategy, tmp_path, text):
    if RANK == 0:
        (tmp_path / "checkpoint").write_text(text)
    strategy.barrier()
    with pytest.raises(DataFileError, match="not a list of checkpoints"):
        latest_checkpoint(tmp_path)
    with pytest.raises(DataFileError, match="not a list of checkpoints"):
        CheckpointManager(Checkpoint(v=variable(strategy, 1.0)), tmp_path, max_to_keep=1)


def test_only_what_was_saved_is_deleted(strategy, tmp_path):
    if RANK == 0:
        for name in ("ckpt-1.h5", "ckpt-0", "other"):
            (tmp_path / name).write_text("the user's")
    strategy.barrier()
    manager = CheckpointManager(Checkpoint(v=variable(strategy, 1.0)), tmp_path, max_to_keep=1)
    for _ in range(3):
        manager.save()
    strategy.barrier()
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint", "ckpt-3", "ckpt-1.h5", "ckpt-0", "other"}


def test_an_old_checkpoint_that_cannot_be_deleted(strategy, tmp_path, caplog):
    v = variable(strategy, 1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=1)
    manager.save()
    if RANK == 0:
        (tmp_path / "ckpt-1").unlink()
        (tmp_path / "ckpt-1").mkdir()  # as root may delete any file
    strategy.barrier()
    assert [manager.save(), manager.save()] == [str(tmp_path / "ckpt-2"), str(tmp_path / "ckpt-3")]
    strategy.barrier()
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint", "ckpt-1", "ckpt-3"}
    assert (
        manager.checkpoints
        == CheckpointManager(Checkpoint(v=v), tmp_path, 1).checkpoints
        == [manager.latest_checkpoint]
    )
    assert caplog.text.count("was not deleted, remove it: ") == (RANK == 0)


def test_refused_managers(strategy, tmp_path):
    with pytest.raises(TypeError, match=r"must be a mpistrat\.training\.Checkpoint"):
        CheckpointManager([variable(strategy, 1.0)], tmp_path, max_to_keep=1)
    with pytest.raises(ValueError, match="without '/'"):
        CheckpointManager(Checkpoint(), tmp_path, 1, checkpoint_name="../up")


def test_numbers_of_variables_and_steps_of_an_optimizer(strategy, tmp_path):
    with strategy.scope():
        w, number = mpistrat.Variable(1.0), mpistrat.Variable(7)
    optimizer = mpistrat.optimizers.SGD(0.1)
    checkpoint = Checkpoint(w=w)
    with pytest.raises(TypeError, match=r"give lambda: optimizer\.iterations"):
        CheckpointManager(checkpoint, tmp_path, 9, step_counter=optimizer.iterations, checkpoint_interval=2)
    manager = CheckpointManager(
        checkpoint, tmp_path, 9, step_counter=lambda: optimizer.iterations, checkpoint_interval=2
    )
    assert manager.save(checkpoint_number=number) == latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-7")
    saved = []
    for _ in range(4):
        strategy.run(lambda: optimizer.apply_gradients([(np.array(1.0), w)]))
        saved.append(manager.save() is not None)
    assert saved == [False, True, False, True]


@pytest.mark.ranks(min=2)
def test_a_state_that_one_rank_cannot_take(strategy, tmp_path):
    class Fails(Own):
        def set_state(self, state):
            if RANK == 1:
                raise OSError("not now")

    path = Checkpoint(own=Own(1)).save(tmp_path / "c")
    with pytest.raises(OSError, match="not now" if RANK == 1 else "rank 1: not now"):
        Checkpoint(own=Fails(2)).restore(path)
    assert float(strategy.all_reduce("SUM", 1.0)) == SIZE


def test_a_pending_save_is_finished_first(strategy, tmp_path):
    v = variable(strategy, np.ones(1_000_000))
    mpistrat.training.save_async({"v": v}, tmp_path / "c")
    Checkpoint(v=v).read(tmp_path / "c").assert_consumed()


@pytest.mark.ranks(min=2)
def test_restore_of_other_paths(strategy, tmp_path):
    checkpoint = Checkpoint(v=variable(strategy, 1.0))
    paths = [checkpoint.save(tmp_path / "c") for _ in range(2)]
    with pytest.raises(ValueError, match=r"Checkpoint\.restore"):
        checkpoint.restore(paths[min(RANK, 1)])


def test_the_preemption_handler_takes_both(strategy, tmp_path):
    for number, make in enumerate((lambda c, d: (c, d), lambda c, d: (CheckpointManager(c, d, 2), None))):
        folder, v = tmp_path / str(number), variable(strategy, 1.0)
        handler = PreemptionCheckpointHandler(None, *make(Checkpoint(v=v), folder))
        handler._save_fn()
        v.assign(0.0)
        PreemptionCheckpointHandler(None, *make(Checkpoint(v=v), folder))
        assert float(v) == 1.0
    with pytest.raises(ValueError, match="give checkpoint_dir="):
        PreemptionCheckpointHandler(None, Checkpoint(v=v))


def test_written_by_the_chief_alone(strategy, tmp_path, monkeypatch):
    written = []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (written.append(pathlib.Path(paths[1]).name), rename(*paths)))
    CheckpointManager(Checkpoint(v=variable(strategy, 1.0)), tmp_path, max_to_keep=1).save()
    assert written == (["ckpt-1", "checkpoint"] if RANK == 0 else [])


def test_an_optimizer_of_two_variables_of_one_name(strategy, tmp_path):
    v, w = variable(strategy, 1.0, "same"), variable(strategy, 2.0, "same")
    optimizer = mpistrat.optimizers.Adam()
    optimizer.build([v, w])
    with pytest.raises(ValueError, match="two variables of the name 'same'"):
        Checkpoint(optimizer=optimizer).save(tmp_path / "c")
    Checkpoint(optimizer=optimizer, v=v, w=w).save(tmp_path / "c")


def test_a_save_before_the_first_step_says_what_it_lacks(strategy, tmp_path, caplog):
    _, checkpoint = trained(strategy, OPTIMIZERS["adam"], 1)
    path = checkpoint.save(tmp_path / "c")
    _, again = trained(strategy, OPTIMIZERS["adam"], 0, path)
    with caplog.at_level(logging.WARNING, AT):
        again.save(tmp_path / "c")
    assert ("c-2 lacks 'optimizer/iterations'" in caplog.text) == (RANK == 0)
    caplog.clear()
    _, built = trained(strategy, OPTIMIZERS["adam"], 0, path, build=True)
    built.save(tmp_path / "c")
    assert caplog.text == ""


def test_states_keep_their_types_or_are_refused(strategy, tmp_path):
    pair = collections.namedtuple("pair", "a b")
    path = Checkpoint(own=Own(pair(1, [2]))).save(tmp_path / "c")
    like = Own(pair(0, [0]))
    Checkpoint(own=like).restore(path).assert_consumed()
    assert (type(like.state), like.state) == (pair, pair(1, [2]))
    with pytest.raises(TypeError, match="must be a text, not 1"):
        Checkpoint(own=Own({"deep": [{1: "a"}]})).save(tmp_path / "c")


def test_a_restore_that_fails_warns_of_nothing(strategy, tmp_path, caplog):
    gc.collect()  # what other tests have left, of which their own warnings come
    caplog.clear()
    path = Checkpoint(v=variable(strategy, [1.0, 2.0]), w=variable(strategy, 1.0)).save(tmp_path / "c")
    with pytest.raises(ValueError, match="shape"):
        Checkpoint(v=variable(strategy, 1.0)).restore(path)
    gc.collect()
    assert "restored in part" not in caplog.text


def test_zero_hours_keep_no_more(strategy, tmp_path):
    manager = CheckpointManager(Checkpoint(v=variable(strategy, 1.0)), tmp_path, 1, keep_checkpoint_every_n_hours=0)
    for _ in range(3):
        manager.save()
    strategy.barrier()
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint", "ckpt-3"}
