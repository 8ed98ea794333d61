"""Groups that are in sync by themselves, and exchange gradients or weights now and then."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import Dataset
from mpistrat.experimental import Mesh, MeshAxis, PowerSGD, TopK
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import Checkpoint, load, save

WORLD = MPI.COMM_WORLD
RATE, STEPS = 0.05, 12
NESTEROV = {"momentum": 0.9, "nesterov": True}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS * 12 * 4, 6))
Y = X @ RNG.standard_normal((6, 5)) + 1

pytestmark = pytest.mark.four_ranks


def groups_of(count):
    """The axis of this rank's group, of ``count`` of about the same size, and the number of the group."""
    sizes = [WORLD.size * (i + 1) // count - WORLD.size * i // count for i in range(count)]
    index = int(np.searchsorted(np.cumsum(sizes), WORLD.rank, side="right"))
    comm = WORLD.Split(index)
    return MeshAxis("replica", comm.size, comm.rank, comm), index, np.array(sizes) / WORLD.size


def gradients(weights, bias, rows):
    x, y = rows
    error = x @ weights + bias - y
    return x.T @ error, error.sum(0)


def train(count, steps=STEPS, rows=12, inner=mpistrat.optimizers.SGD, **options):
    """Train in groups, each on batches of its own. Return the strategy, the variables and their optimizer."""
    axis, _, _ = groups_of(count)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, **options)
    with strategy.scope():  # the ranks begin with the values of rank 0
        variables = [mpistrat.Variable(np.full(shape, WORLD.rank + 1.0)) for shape in ((6, 5), (5,))]
    optimizer = inner(RATE)

    def step(batch):
        found = gradients(*(each.read_value() for each in variables), batch)
        optimizer.apply_gradients([(each / rows, v) for each, v in zip(found, variables, strict=True)])

    dataset = Dataset.from_arrays((X, Y)).batch(rows).take(steps * count)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    return strategy, variables, optimizer


def expected(count, sync_every, outer=None, steps=STEPS, rows=12):
    """The same in NumPy, with a model for each group."""
    weight = groups_of(count)[2]
    models = [[np.ones((6, 5)), np.ones(5)] for _ in range(count)]
    anchor, momentum = [each.copy() for each in models[0]], [0.0, 0.0]
    for step in range(steps):
        found = []
        for g, model in enumerate(models):
            at = slice((step * count + g) * rows, (step * count + g + 1) * rows)
            found.append([each / rows for each in gradients(*model, (X[at], Y[at]))])
        if sync_every == 1:
            mean = [sum(w * each[i] for w, each in zip(weight, found, strict=True)) for i in range(2)]
            found = count * [mean]
        for model, each in zip(models, found, strict=True):
            for i in range(2):
                model[i] = model[i] - RATE * each[i]
        if sync_every > 1 and (step + 1) % sync_every == 0:
            for i in range(2):
                mean = sum(w * model[i] for w, model in zip(weight, models, strict=True))
                if outer is None:
                    anchor[i] = mean
                else:
                    change = anchor[i] - mean
                    momentum[i] = NESTEROV["momentum"] * momentum[i] - outer * change
                    anchor[i] = anchor[i] + NESTEROV["momentum"] * momentum[i] - outer * change
                for model in models:
                    model[i] = anchor[i].copy()
    return models


def counts():
    return sorted({1, min(2, WORLD.size), WORLD.size})


@pytest.mark.parametrize("count", counts())
@pytest.mark.parametrize(("sync_every", "outer"), [(1, None), (4, None), (5, None), (4, 0.7)])
def test_weights(count, sync_every, outer):
    options = {} if outer is None else {"outer_optimizer": mpistrat.optimizers.SGD(outer, **NESTEROV)}
    strategy, variables, _ = train(count, sync_every=sync_every, **options)
    index = groups_of(count)[1]
    assert strategy.num_replicas_in_sync == WORLD.allreduce(1) * groups_of(count)[2][index]
    for v, each in zip(variables, expected(count, sync_every, outer)[index], strict=True):
        np.testing.assert_allclose(v.read_value(), each, rtol=1e-12, atol=1e-12)


def test_the_rest_of_the_steps_is_exchanged_at_the_end():
    _, variables, optimizer = train(WORLD.size, sync_every=5)
    contents = WORLD.allgather(variables[0].read_value().tobytes())
    assert len(set(contents)) == WORLD.size  # 12 steps: two since the last exchange
    optimizer.finalize_variable_values(variables)
    assert len(set(WORLD.allgather(variables[0].read_value().tobytes()))) == 1
    mean = sum(np.frombuffer(each) for each in contents) / WORLD.size
    np.testing.assert_allclose(variables[0].read_value().reshape(-1), mean, rtol=1e-12)


@pytest.mark.parametrize("compression", [PowerSGD(1), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("count", counts())
def test_what_compression_leaves_out_is_sent_later(count, compression):
    """Gradients that do not depend on the weights: all of them are in the weights, or in the errors.

    In some steps the variable has two gradients.
    """
    axis, index, weight = groups_of(count)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, compression=compression)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros((8, 9)))
    optimizer = mpistrat.optimizers.SGD(1.0)
    sums = np.zeros((8, 9))
    for step in range(30):
        of_groups = [np.random.default_rng([step, g]).standard_normal((8, 9)) for g in range(count)]
        mean = sum(w * each for w, each in zip(weight, of_groups, strict=True))
        mine = of_groups[index] / axis.size
        sums += mean + mean[::-1] if step % 5 == 0 else mean
        pairs = [(mine, v), (mine[::-1], v)] if step % 5 == 0 else [(mine, v)]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        assert len(set(WORLD.allgather(v.read_value().tobytes()))) == 1
    assert abs(v.read_value() + sums).max() > 1e-3  # something is left out
    own = optimizer.exchange.state()["error"].reshape(-1, 8, 9).sum(0)  # of one rank of each group
    np.testing.assert_allclose(v.read_value(), WORLD.allreduce(own) - sums, rtol=1e-10, atol=1e-10)


def test_low_rank_gradients_are_exact():
    axis, index, weight = groups_of(WORLD.size)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, compression=PowerSGD(2))
    with strategy.scope():
        v, halves = mpistrat.Variable(np.zeros((6, 4, 2))), mpistrat.Variable(np.zeros((6, 8), np.float16))
    left = np.random.default_rng(7).standard_normal((6, 2))
    rights = [np.random.default_rng(g).standard_normal((2, 8)) for g in range(WORLD.size)]
    optimizer = mpistrat.optimizers.SGD(1.0)
    mine = left @ rights[index]
    pairs = [(mine.reshape(6, 4, 2), v), (mine.astype(np.float16), halves)]
    strategy.run(lambda: optimizer.apply_gradients(pairs))
    mean = left @ sum(w * each for w, each in zip(weight, rights, strict=True))
    np.testing.assert_allclose(v.read_value().reshape(6, 8), -mean, rtol=1e-10)
    np.testing.assert_allclose(halves.read_value(), -mean, rtol=1e-2, atol=1e-2)


def test_compressed_weights():
    """The mean of the weights, but for what is kept."""
    _, variables, optimizer = train(WORLD.size, sync_every=4, compression=PowerSGD(2))
    assert len(set(WORLD.allgather(variables[0].read_value().tobytes()))) == 1
    error = np.abs(X @ variables[0].read_value() + variables[1].read_value() - Y).mean()
    assert error < 0.7 * np.abs(X @ np.ones((6, 5)) + 1 - Y).mean()
    assert {*optimizer.exchange.state()} == {"error", "right", "anchor"}


OUTER = {"sync_every": 3, "compression": TopK(0.3), "outer_optimizer": mpistrat.optimizers.SGD(0.7, **NESTEROV)}


@pytest.mark.parametrize(
    ("options", "inner", "way"),
    [
        (OUTER, mpistrat.optimizers.SGD, "own"),
        (OUTER, mpistrat.optimizers.Adam, "Checkpoint"),
        ({"sync_every": 3}, mpistrat.optimizers.SGD, "Checkpoint"),
        ({"sync_every": 3}, mpistrat.optimizers.Adam, "Checkpoint before build"),
        ({"compression": PowerSGD(1)}, mpistrat.optimizers.Adam, "own"),
        ({"compression": PowerSGD(1)}, mpistrat.optimizers.SGD, "Checkpoint before build"),
    ],
)
def test_state_goes_on(tmp_path, options, inner, way):
    """Training that is saved after an exchange goes on to the same bits."""
    path = Path(WORLD.bcast(str(tmp_path)))
    whole = train(WORLD.size, steps=6, inner=inner, **options)[1]
    _, variables, optimizer = train(WORLD.size, steps=3, inner=inner, **options)
    strategy, again, other = train(WORLD.size, steps=0, inner=inner, **options)
    rest = Dataset.from_arrays((X, Y)).batch(12).skip(3 * WORLD.size).take(3 * WORLD.size)
    if way == "own":
        equal = optimizer.variables[: None if options.get("sync_every") is None else 2]
        own = optimizer.exchange.state()
        save([*variables, *equal], path / "first.h5", own=own or None)
        other.build(again)
        state = other.exchange.state()
        load([*again, *other.variables[: len(equal)]], path / "first.h5", own=state or None)
        other.exchange.restore(state)
    else:
        name = Checkpoint(v=variables, optimizer=optimizer).save(path / "first")
        if way == "Checkpoint":
            other.build(again)
        status = Checkpoint(v=again, optimizer=other).restore(name)

    def step(batch):
        found = gradients(*(each.read_value() for each in again), batch)
        other.apply_gradients([(each / 12, v) for each, v in zip(found, again, strict=True)])

    for batch in strategy.experimental_distribute_dataset(rest):
        strategy.run(step, args=(batch,))
    for v, each in zip(again, whole, strict=True):
        assert v.read_value().tobytes() == each.read_value().tobytes()
    if way != "own":
        status.assert_consumed()
    with pytest.raises(ValueError, match="is not that of these variables and groups"):
        other.exchange.restore({"anchor": np.zeros(1)})


def test_another_number_of_ranks_does_not_take_the_state(tmp_path):
    """Training begins anew there with the weights alone."""
    path = Path(WORLD.bcast(str(tmp_path)))
    _, variables, optimizer = train(WORLD.size, sync_every=3, steps=3, inner=mpistrat.optimizers.Adam)
    name = Checkpoint(v=variables, optimizer=optimizer).save(path / "first")
    saved = [v.read_value() for v in variables]
    alone = WORLD.Split(WORLD.rank)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=alone, groups=MeshAxis("replica", 1, 0, alone), sync_every=3)
    with strategy.scope():
        again = [mpistrat.Variable(np.zeros(shape)) for shape in ((6, 5), (5,))]
    other = mpistrat.optimizers.Adam(RATE)
    other.build(again)
    if WORLD.size > 1:
        with pytest.raises(ValueError, match=f"of {WORLD.size} ranks, and there are 1 now"):
            Checkpoint(v=again, optimizer=other).restore(name)
        assert not again[0].read_value().any()
    Checkpoint(v=again).restore(name).expect_partial()
    for v, each in zip(again, saved, strict=True):
        np.testing.assert_array_equal(v.read_value(), each)


def test_each_group_reads_batches_of_its_own(tmp_path):
    axis, index, _ = groups_of(min(2, WORLD.size))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=2)
    count = min(2, WORLD.size)
    batches = [*strategy.experimental_distribute_dataset(Dataset.range(23).batch(4))]
    assert len(batches) == 6 // count
    read = WORLD.allgather([int(row) for batch in batches for row in batch])
    assert sorted(chain(*read)) == [*range(23)]
    assert {row // 4 % count for row in read[WORLD.rank]} <= {index}
    saved = iter(strategy.experimental_distribute_dataset(Dataset.range(23).batch(4)))
    next(saved)
    name = Checkpoint(data=saved).save(Path(WORLD.bcast(str(tmp_path))) / "data")
    again = iter(strategy.experimental_distribute_dataset(Dataset.range(23).batch(4)))
    Checkpoint(data=again).restore(name).assert_consumed()
    for each, batch in zip(again, batches[1:], strict=True):
        np.testing.assert_array_equal(each, batch)
    endless = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(4).repeat()))
    assert [next(endless) for _ in range(5)]
    with pytest.raises(ValueError, match="cannot be dealt evenly"):
        strategy.experimental_distribute_dataset(Dataset.from_iterable(lambda: iter([np.zeros(3)])).batch(2))
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [(WORLD.size, WORLD.rank, axis.size)]
    assert len(set(WORLD.allgather(int(strategy.rng(1).integers(1 << 60))))) == WORLD.size


@pytest.mark.parametrize("options", [{}, {"compression": PowerSGD(1)}, {"sync_every": 2}], ids=repr)
def test_variables_of_all_kinds(options):
    """A number, one that is given twice, gradients of another dtype, rows, and none."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=groups_of(WORLD.size)[0], **options)
    with strategy.scope():
        number, twice = mpistrat.Variable(1.0), mpistrat.Variable(np.zeros((9, 8), np.float32))
        rows, left = mpistrat.Variable(np.zeros((4, 2))), mpistrat.Variable([7.0])
    optimizer = mpistrat.optimizers.SGD(1.0)
    own = float(WORLD.rank + 1)
    some = mpistrat.IndexedSlices(np.full((1, 2), own), [2], (4, 2))
    pairs = [(own, number), (np.full((9, 8), own), twice), (np.ones((9, 8)), twice), (some, rows), (None, left)]
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients(pairs))
    mean = (WORLD.size + 1) / 2
    np.testing.assert_allclose(number.read_value(), 1 - 2 * mean, rtol=1e-6)
    np.testing.assert_allclose(twice.read_value(), np.full((9, 8), -2 * mean - 2), rtol=1e-5)
    np.testing.assert_allclose(rows.read_value(), [[0, 0], [0, 0], 2 * [-2 * mean], [0, 0]], rtol=1e-6)
    assert left.read_value().tolist() == [7.0]


@pytest.mark.parametrize(
    "options",
    [{"compression": TopK(0.5)}, {"outer_optimizer": mpistrat.optimizers.SGD(0.7, **NESTEROV)}],
    ids=["k", "o"],
)
def test_weights_that_are_loaded_after_build_are_kept(options):
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups="node", sync_every=2, **options)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(8))
    optimizer = mpistrat.optimizers.SGD(0.0)
    optimizer.build([v])
    v.assign(np.full(8, 100.0))
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(8), v)]))
    assert v.read_value().tolist() == 8 * [100.0]
    optimizer.finalize_variable_values([v])  # nothing was done since
    assert v.read_value().tolist() == 8 * [100.0]


@pytest.mark.parametrize("outer", [None, 0.7])
def test_values_that_are_assigned_between_steps_are_no_change(tmp_path, outer):
    """The change that an exchange averages counts from what the program assigned, or loaded, after steps."""
    path = Path(WORLD.bcast(str(tmp_path))) / "v.h5"
    options = {"compression": PowerSGD(2)} if outer is None else {"outer_optimizer": mpistrat.optimizers.SGD(outer)}
    axis, index, weight = groups_of(WORLD.size)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=4, **options)
    with strategy.scope():
        v, w = mpistrat.Variable(np.zeros(8)), mpistrat.Variable(np.full(8, 9.0))
    optimizer = mpistrat.optimizers.SGD(1.0)
    one = lambda: optimizer.apply_gradients([(np.full(8, index + 1.0), v), (np.ones(8), w)])  # noqa: E731
    save({"v": w}, path)
    for _ in range(3):
        strategy.run(one)
    v.assign(np.full(8, 100.0))
    strategy.run(one)
    share, mean = outer or 1.0, weight @ np.arange(1, WORLD.size + 1)
    np.testing.assert_allclose(v.read_value(), np.full(8, 100 - share * mean), rtol=1e-12)
    np.testing.assert_allclose(w.read_value(), np.full(8, 9 - 4 * share), rtol=1e-12)
    strategy.run(one)
    load({"v": v}, path)
    for _ in range(3):
        strategy.run(one)
    np.testing.assert_allclose(v.read_value(), np.full(8, 9 - 3 * share * mean), rtol=1e-12)
    strategy.run(one)
    v[:4] = 50.0  # the rest differs between groups: the mean of all, as without it
    optimizer.finalize_variable_values([v])
    assert len(set(WORLD.allgather(v.read_value().tobytes()))) == 1
    rest = v.read_value()[4:]
    strategy.run(one)
    for each in (v, w):
        each.assign(np.full(8, 7.0))
    optimizer.finalize_variable_values([v])
    assert v.read_value().tolist() == w.read_value().tolist() == 8 * [7.0]
    if outer is None:
        np.testing.assert_allclose(rest, np.full(4, 9 - 4 * mean), rtol=1e-12)


@pytest.mark.skipif(WORLD.size == 1, reason="one group has none that differs")
@pytest.mark.parametrize("outer", [None, 0.5])
def test_different_values_that_groups_assign_are_a_part_of_their_change(outer):
    axis, index, weight = groups_of(WORLD.size)
    options = {} if outer is None else {"outer_optimizer": mpistrat.optimizers.SGD(outer)}
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=2, **options)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(8))
    optimizer = mpistrat.optimizers.SGD(1.0)
    for _ in range(3):  # an exchange is after the second
        strategy.run(lambda: optimizer.apply_gradients([(np.full(8, index + 1.0), v)]))
        v.assign(np.full(8, index + 2.0))
    optimizer.finalize_variable_values([v])
    mean, before = weight @ np.arange(2, WORLD.size + 2), 0.0
    if outer is not None:
        change = (weight @ np.arange(2, WORLD.size + 2)) - (weight @ np.arange(1, WORLD.size + 1))
        before = outer * change  # from 0, after the second step
        mean = before + outer * (mean - before)
    np.testing.assert_allclose(v.read_value(), np.full(8, mean), rtol=1e-12)


@pytest.mark.skipif(WORLD.size == 1, reason="one group has none that differs")
def test_groups_that_exchange_gradients_assign_the_same():
    axis, index, _ = groups_of(min(2, WORLD.size))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, compression=PowerSGD(1))
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(8))
    optimizer = mpistrat.optimizers.SGD(1.0)
    step = lambda: optimizer.apply_gradients([(np.ones(8), v)])  # noqa: E731
    strategy.run(step)
    v.assign(np.full(8, index + 2.0))
    with pytest.raises(MismatchError, match=r"different values to .*: assign the same"):
        strategy.run(step)


@pytest.mark.parametrize("sync_every", [1, 3])
@pytest.mark.parametrize("compression", [PowerSGD(1), TopK(0.1)], ids=repr)
def test_a_gradient_that_is_not_finite_does_not_stay(compression, sync_every):
    """All groups get it, as of an all-reduce. The errors are those of the last good exchange."""
    axis, index, _ = groups_of(WORLD.size)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=sync_every, compression=compression)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros((8, 9)))
    optimizer = mpistrat.optimizers.SGD(1.0)

    def steps(gradient):
        for _ in range(sync_every):
            strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
        return v.read_value()

    good = np.random.default_rng(index).standard_normal((8, 9))
    assert np.isfinite(steps(good)).all()
    kept = {kind: each.tobytes() for kind, each in optimizer.exchange.state().items()}
    for wrong in (np.inf, -np.inf, np.nan):
        bad = good.copy()
        bad[3, 4] = wrong if index == WORLD.size - 1 else 1.0
        assert not np.isfinite(steps(bad)).all()
        state = optimizer.exchange.state()
        assert all(state[kind].tobytes() == kept[kind] for kind in compression.kinds)
        v.assign(np.zeros((8, 9)))
    assert np.isfinite(steps(good)).all()
    assert len(set(WORLD.allgather(v.read_value().tobytes()))) == 1


@pytest.mark.parametrize(("of_variables", "of_gradients"), [("f4", "f8"), ("f8", "f4")])
@pytest.mark.parametrize("compression", [PowerSGD(1), TopK(0.2)], ids=repr)
def test_compressed_gradients_of_another_dtype(compression, of_variables, of_gradients):
    """In groups of two, of which each rank owns a variable and gets the other."""
    axis, index, weight = groups_of(max(1, WORLD.size // 2))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, compression=compression)
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros((8, 9), of_variables)) for _ in range(2)]
    optimizer = mpistrat.optimizers.SGD(1.0)
    gradient = np.full((8, 9), (index + 1.0) / axis.size, of_gradients)
    for _ in range(9):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v) for v in variables]))
    assert len(set(WORLD.allgather(variables[0].read_value().tobytes()))) == 1
    mean = weight @ np.arange(1, len(weight) + 1)
    if isinstance(compression, PowerSGD):
        np.testing.assert_allclose(variables[1].read_value(), np.full((8, 9), -9 * mean), rtol=1e-5)


@pytest.mark.skipif(WORLD.size == 1, reason="needs another group")
@pytest.mark.parametrize(
    ("few", "many", "options"),
    [
        (2, 3, {}),
        (2, 4, {"sync_every": 4}),  # both are about to exchange
        (4, 5, {"sync_every": 4, "compression": TopK(0.5)}),
        (4, 8, {"sync_every": 4}),  # one has exchanged all
    ],
)
def test_groups_that_make_other_numbers_of_steps(few, many, options):
    """All ranks raise, also those that own no arrays, and name groups and steps."""
    axis, index, _ = groups_of(min(2, WORLD.size))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, **options)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(4))
    optimizer = mpistrat.optimizers.SGD(1.0)

    def train_on():
        for _ in range(many if index else few):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(4), v)]))
        optimizer.finalize_variable_values([v])

    with pytest.raises(MismatchError, match=r"group 0 \(rank \d\): step \d+\n.*group 1 \(rank \d\): step \d+"):
        train_on()
    WORLD.Barrier()
    assert strategy.agree(True)  # the ranks are in step


def test_power_sgd_recovers_from_a_gradient_of_zeros():
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups="node", compression=PowerSGD(1))
    with strategy.scope():
        v = mpistrat.Variable(np.zeros((8, 8)))
    optimizer = mpistrat.optimizers.SGD(1.0)
    size = strategy.num_replicas_in_sync
    for step in range(9):
        gradient = np.zeros((8, 8)) if step == 0 else np.pad(np.ones((7, 8)), ((1, 0), (0, 0))) / size
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, v)]))
    np.testing.assert_allclose(v.read_value()[1:], np.full((7, 8), -8.0), rtol=1e-6)


@pytest.mark.skipif(WORLD.size == 1, reason="needs another group")
def test_groups_that_give_other_gradients_are_told():
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=groups_of(WORLD.size)[0])
    with strategy.scope():
        a, b = mpistrat.Variable(0.0), mpistrat.Variable(0.0)
    optimizer = mpistrat.optimizers.SGD(1.0)
    with pytest.raises(MismatchError, match="groups"):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, b if WORLD.rank else a)]))
    with pytest.raises(MismatchError, match="length of a dataset"):
        strategy.experimental_distribute_dataset(Dataset.range(8 + 2 * WORLD.rank).batch(2))


def test_nodes_are_groups():
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups="node", sync_every=2)
    assert strategy.num_replicas_in_sync == WORLD.Split_type(MPI.COMM_TYPE_SHARED).size


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"groups": "rack"}, ValueError, 'must be "node", the axis'),
        ({"groups": "node", "sync_every": 0}, ValueError, "at least 1"),
        ({"groups": "node", "sync_every": 1.5}, TypeError, "must be an int"),
        ({"sync_every": 2}, ValueError, "are for groups"),
        ({"compression": TopK()}, ValueError, "are for groups"),
        ({"groups": "node", "compression": "topk"}, TypeError, "must be PowerSGD or TopK"),
        ({"groups": "node", "sync_every": 2, "outer_optimizer": 0.7}, TypeError, "must be an optimizer"),
        ({"groups": "node", "outer_optimizer": mpistrat.optimizers.SGD()}, ValueError, "sync_every above 1"),
        (
            {"groups": "node", "sync_every": 2, "outer_optimizer": mpistrat.optimizers.SGD(clipvalue=1)},
            ValueError,
            "clipv",
        ),
        ({"groups": "node", "virtual_replicas": 8}, ValueError, "leave out mesh"),
    ],
)
def test_wrong_arguments(options, error, text):
    with pytest.raises(error, match=text):
        mpistrat.MultiWorkerMirroredStrategy(**options)
    with pytest.raises(ValueError, match="leave out mesh"):
        mpistrat.MultiWorkerMirroredStrategy(groups="node", mesh=Mesh(replica=-1))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups="node", sync_every=2)
    with strategy.scope():
        v = mpistrat.Variable(0.0)
        with pytest.raises(ValueError, match="leave it out"):
            mpistrat.optimizers.SGD(use_ema=True).build([v])
        with pytest.raises(ValueError, match="after every 2 steps only"):
            mpistrat.experimental.PreemptionCheckpointHandler(None, [v], "never made")


@pytest.mark.skipif(WORLD.size == 1, reason="needs another rank")
def test_ranks_that_differ():
    axis, _, _ = groups_of(1)
    with pytest.raises(MismatchError, match="groups"):
        mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=2 + WORLD.rank)


def test_a_slow_group_stops_no_other():
    """Between two exchanges, the other groups read, train and reduce before the first one begins."""
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=60)
    axis, index, weight = groups_of(min(2, WORLD.size))
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=4, communication_options=options)
    with strategy.scope():
        v = mpistrat.Variable([0.0])
    optimizer = mpistrat.optimizers.SGD(1.0)
    optimizer.build([v])
    batches = iter(strategy.experimental_distribute_dataset(Dataset.range(200).batch(6)))

    def step(batch):
        replica = mpistrat.get_replica_context()
        assert (replica.num_replicas_in_sync, replica.replica_id_in_sync_group) == (axis.size, axis.index)
        optimizer.apply_gradients([([(index + 1.0) / axis.size], v)])
        return len(batch)

    def steps(count):
        return [int(strategy.reduce("SUM", strategy.run(step, (next(batches),)), axis=None)) for _ in range(count)]

    if index == 0 and axis.index == 0:
        [WORLD.recv(source=rank) for rank in range(axis.size, WORLD.size)]
    assert steps(3) == 3 * [6]  # rows of a batch, over the ranks of this group alone
    if index:
        WORLD.send(None, 0)
    assert v.read_value() == -3 * (index + 1)
    steps(1)
    np.testing.assert_allclose(v.read_value(), -4 * (weight @ np.arange(1, len(weight) + 1)), rtol=1e-6)


@pytest.mark.full
@pytest.mark.skipif(WORLD.size == 1, reason="needs another group")
def test_a_group_that_stays_away():
    """The others wait as long as the time limit says, at the exchange and not before."""
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=1)
    axis, index, _ = groups_of(WORLD.size)
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=axis, sync_every=3, communication_options=options)
    with strategy.scope():
        v = mpistrat.Variable([1.0])
    optimizer = mpistrat.optimizers.SGD(0.1)
    optimizer.build([v])
    one = lambda: optimizer.apply_gradients([([1.0], v)])  # noqa: E731
    for _ in range(2):
        strategy.run(one)
    if index:
        with pytest.raises(TimeoutError):
            strategy.run(one)
    WORLD.Barrier()
