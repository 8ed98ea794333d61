"""Optimizers whose state is shared out make the steps of those that keep all of it on each rank, bit by bit."""

import copy

import numpy as np
import pytest
from layouts import SIZE, layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat import nest
from mpistrat.experimental import CommunicationOptions
from mpistrat.optimizers import LARS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, schedules
from mpistrat.runtime.agreement.operation import MismatchError

RANK = MPI.COMM_WORLD.rank
# Of fewer elements than ranks, of none, and of more than a norm adds at once: some parts end inside of a variable.
# NumPy 1 computes with arrays without dimensions in float64: a number then differs in its last bit.
NUMBER = () if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else (1,)
SHAPES = [(3,), NUMBER, (41, 17), (0, 4), (33_000,), (5,)]
SMALL = [(3,), (2, 5), NUMBER, (700,)]
METHODS = {
    "sgd": (SGD, {}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {}),
    "amsgrad": (Adam, {"amsgrad": True}),
    "adamw": (AdamW, {"weight_decay": 0.02}),
    "rmsprop": (RMSprop, {"momentum": 0.5, "centered": True}),
    "adagrad": (Adagrad, {}),
    "lars": (LARS, {"weight_decay": 0.01, "eta": 0.02, "nesterov": True}),
}
OPTIONS = {
    "plain": {},
    "clipnorm": {"clipnorm": 2.0},
    "clipvalue": {"clipvalue": 0.3},
    "global_clipnorm": {"global_clipnorm": 5.0},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2, "global_clipnorm": 1.0, "use_ema": True},
    "schedule": {"learning_rate": schedules.ExponentialDecay(0.1, 2, 0.5)},
}


class Centered(Optimizer):
    """A rule that looks at all elements of a gradient, and keeps one number for each axis."""

    slots = ("axes",)

    def initial_state(self, slot, variable):
        return np.full(max(1, len(variable.shape)), 2.0 + RANK)  # that of rank 0 counts

    def update(self, weights, gradient, step, rate, *state):
        state[0][...] += gradient.ndim
        weights -= (gradient - gradient.mean()) * rate * state[0].sum() if gradient.size else 0


METHODS["own"] = (Centered, {})


def strategy_by(implementation, comm=None, **more):
    options = CommunicationOptions(implementation=implementation)
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options, **more)


def variables_of(strategy, shapes, dtype):
    with strategy.scope():
        return [mpistrat.Variable(np.ones(shape, dtype), name=f"v{i}") for i, shape in enumerate(shapes)]


def gradients(shapes, dtype, call, replica):
    random = np.random.default_rng([replica, call])
    return [np.array(random.standard_normal(shape) * 3.0**i, dtype) for i, shape in enumerate(shapes)]


def train(strategy, optimizer, variables, dtype, calls=range(3), without=1):
    shapes = [variable.shape for variable in variables]

    def step(call):
        given = gradients(shapes, dtype, call, mpistrat.get_replica_context().replica_id_in_sync_group)
        if call % 2:
            given[without] = None
        optimizer.apply_gradients(zip(given, variables, strict=True))

    for call in calls:
        strategy.run(step, (call,))


def trained(strategy, kind, arguments, shapes=SHAPES, dtype="f4", **more):
    """What a program sees: the values of the variables, and of the optimizer's variables, by name."""
    variables = variables_of(strategy, shapes, dtype)
    optimizer = kind(**{"learning_rate": 0.1, **arguments}, **more)
    train(strategy, optimizer, variables, dtype)
    return seen(variables, optimizer)


def seen(variables, optimizer):
    values = [(each.name, each.shape, each.read_value()) for each in [*variables, *optimizer.variables]]
    return [(name, shape, value.dtype, value.tobytes()) for name, shape, value in values]


@pytest.mark.four_ranks
@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_every_option(method):
    kind, arguments = METHODS[method]
    strategy = strategy_by("ordered")
    shapes = SHAPES if method in ("adam", "lars") else SMALL
    for options in OPTIONS.values():
        both = [trained(strategy, kind, arguments | options, shapes, shard_state=on) for on in (False, True)]
        assert both[0] == both[1]


@pytest.mark.four_ranks
@pytest.mark.parametrize("layout", [*layouts("0000", "0011", "0101", "0001"), None])
def test_bits_and_rounding_on_nodes(layout):
    """Also over several nodes, where nodes have unequal numbers of ranks, and without memory that ranks share."""
    small = {"slot_bytes": 48_000, "slot_bytes_between_nodes": 48_000, "chunk_bytes": 40_000}
    comm = on_nodes("0000", **small | {"slot_bytes": 0}) if layout is None else on_nodes(layout, **small)
    options = {"global_clipnorm": 1.0}
    for implementation, dtype in (("ordered", "f4"), ("exact", "f8"), ("tree", "f4"), ("exact", "c16"), ("AUTO", "f8")):
        strategy = strategy_by(implementation, comm)
        both = []
        for on in (False, True):
            variables = variables_of(strategy, SHAPES, dtype)
            optimizer = Adam(0.1, shard_state=on, **options)
            train(strategy, optimizer, variables, dtype, range(2))
            both.append((seen(variables, optimizer), [each.read_value() for each in variables]))
        if implementation != "AUTO":
            assert both[0][0] == both[1][0], implementation
        for one, other in zip(both[0][1], both[1][1], strict=True):
            np.testing.assert_allclose(one, other, 1e-6, 1e-6)
    comm.Free()


def test_half_precision_and_reduced_gradients():
    strategy = strategy_by("ordered")
    arguments = {"momentum": 0.9, "clipnorm": 3.0}
    both = [trained(strategy, SGD, arguments, SMALL, "f2", shard_state=on) for on in (False, True)]
    assert both[0] == both[1]
    results = []
    for on in (False, True):
        variables, optimizer = (variables_of(strategy, SMALL, "f8"), Adam(0.1, global_clipnorm=2.0, shard_state=on))
        given = gradients(SMALL, "f8", 0, 0)  # equal on all ranks
        for _ in range(2):
            pairs = [*zip(given, variables, strict=True), (np.ones(3), variables[0])]  # one of them twice
            strategy.run(lambda o=optimizer, pairs=pairs: o.apply_gradients(pairs, None, False))
        results.append(seen(variables, optimizer))
    assert results[0] == results[1]


@pytest.mark.four_ranks
def test_gradients_in_shared_memory():
    """They are added where they are, and keep what the rank wrote."""
    shapes = [(40_000,), (3, 5), ()]
    for implementation in ("ordered", "exact", "tree"):
        strategy, results = strategy_by(implementation), []
        for on in (False, True):
            variables, optimizer = (variables_of(strategy, shapes, "f4"), Adam(0.1, clipnorm=9.0, shard_state=on))
            buffers = strategy.experimental_buffers_like(variables)
            for call in range(3):
                given = gradients(shapes, "f4", call, RANK)
                for buffer, gradient in zip(buffers, given, strict=True):
                    buffer[...] = gradient
                pairs = zip(buffers if on else given, variables, strict=True)
                strategy.run(lambda o=optimizer, pairs=pairs: o.apply_gradients(pairs))
            results.append(seen(variables, optimizer))
        assert results[0] == results[1]
        assert SIZE == 1 or all(np.array_equal(*pair) for pair in zip(buffers, given, strict=True))


@pytest.mark.four_ranks
def test_virtual_replicas_and_ops_of_another_kind():
    """Gradients are summed as a whole there, and each rank takes its part of the sum."""
    others = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice())
    for strategy in (mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=5), others):
        for options in ("plain", "accumulation"):
            both = [trained(strategy, Adam, OPTIONS[options], SMALL, shard_state=on) for on in (False, True)]
            assert both[0] == both[1]


@pytest.mark.four_ranks
def test_a_rank_keeps_its_part():
    strategy = strategy_by("AUTO")
    sizes = [10_000, 1, 3, 40_000, 0, 7]
    variables = variables_of(strategy, [(size,) for size in sizes], "f4")
    optimizer = Adam(shard_state=True)
    optimizer.build(variables)
    mine = sum(each.own_copy().nbytes for each in optimizer.variables[2:])
    by_rank = MPI.COMM_WORLD.allgather(mine)
    assert sum(by_rank) == 2 * 4 * sum(sizes)
    assert max(by_rank) - min(by_rank) <= 2 * 4 * len(sizes)
    assert all(each.shape == (size,) for each, size in zip(optimizer.variables[2::2], sizes, strict=True))
    if SIZE > 1:
        assert all(each.own_copy().base is None or each.own_copy().nbytes < 1 << 16 for each in optimizer.variables)


def test_weights_come_and_optimizers_are_copied():
    strategy = strategy_by("ordered")
    results = []
    for on in (False, True):
        variables, optimizer = variables_of(strategy, SMALL, "f4"), Adam(0.1, shard_state=on)
        train(strategy, optimizer, variables[:2], "f4")
        train(strategy, optimizer, variables, "f4")
        other, own = copy.deepcopy((optimizer, variables))
        train(strategy, other, own, "f4", range(2))
        assert seen(variables, optimizer) != seen(own, other)
        results.append([seen(variables, optimizer), seen(own, other)])
        optimizer.finalize_variable_values(variables)
    assert results[0] == results[1]


def test_state_is_read_and_written_whole():
    strategy = strategy_by("AUTO")
    variables = variables_of(strategy, [(3, 5), ()], "f4")
    optimizer = SGD(0.5, momentum=0.5, shard_state=True)
    optimizer.build(variables)
    velocity, number = optimizer.variables[2:]
    velocity.assign(np.arange(15.0, dtype="f4").reshape(3, 5))
    number.assign(np.float32(2))
    assert velocity.read_value().tolist() == np.arange(15.0).reshape(3, 5).tolist()
    assert float(number) == 2
    if SIZE > 1:
        for wrong in (np.zeros(3), 1.0):
            with pytest.raises(ValueError, match="shared out over the ranks, with shape"):
                velocity.assign(wrong)
        with pytest.raises(RuntimeError, match="outside of run"):
            strategy.run(lambda: velocity.assign(np.zeros((3, 5))))
        with pytest.raises(ValueError, match="instead of scatter_add"):
            velocity.scatter_add(mpistrat.IndexedSlices(np.ones((1, 5)), np.array([0])))


def flat(structure):
    leaves, paths = nest.flatten(structure)[0], nest.paths(structure)
    return [(path, each.shape, each.dtype, each.tobytes()) for path, each in zip(paths, leaves, strict=True)]


@pytest.mark.full
@pytest.mark.four_ranks
@pytest.mark.parametrize("method", ["adam", "own"])
def test_files_are_those_of_whole_state(method, tmp_path):
    """Saved on all ranks, shared out or not, and loaded on one rank less and on each alone, shared out or not."""
    kind = METHODS[method][0]
    strategy, files = strategy_by("ordered"), []
    for on in (False, True):
        variables, optimizer = variables_of(strategy, SMALL, "f4"), kind(0.1, shard_state=on, use_ema=True)
        train(strategy, optimizer, variables, "f4", range(2))
        files.append(tmp_path / f"{on}.h5")
        mpistrat.training.save([*variables, *optimizer.variables], files[-1])
        files.append(mpistrat.training.Checkpoint(model=variables, optimizer=optimizer).save(tmp_path / f"{on}"))
    for one, other in zip(files[:2], files[2:], strict=True):
        both = [flat(mpistrat.training.load_arrays(file)) for file in (one, other)]
        assert both[0] == both[1]
    expected = seen(variables, optimizer)
    fewer = MPI.COMM_WORLD.Split(RANK < SIZE - 1 or SIZE == 1)
    for comm in (fewer, MPI.COMM_SELF):
        loading = strategy_by("ordered", comm)
        for on in (False, True):
            for file in files[2:]:
                variables, optimizer = (variables_of(loading, SMALL, "f4"), kind(0.1, shard_state=on, use_ema=True))
                if file is files[2]:
                    optimizer.build(variables)
                    mpistrat.training.load([*variables, *optimizer.variables], file)
                    assert seen(variables, optimizer) == expected
                else:  # the slots come at the first step
                    mpistrat.training.Checkpoint(model=variables, optimizer=optimizer).restore(file)
                    train(loading, optimizer, variables, "f4", range(1))
                    assert optimizer.iterations == 3
    fewer.Free()


REFUSED = {
    "rows": (lambda v: mpistrat.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2)), "takes no sparse rows"),
    "shape": (lambda v: np.ones(4), "and its gradient"),
}


@pytest.mark.skipif(SIZE == 1, reason="nothing is shared out")
@pytest.mark.parametrize("what", REFUSED)
def test_refused_gradients(strategy, what):
    gradient, message = REFUSED[what]
    with strategy.scope():
        v = mpistrat.Variable(np.ones((3, 2)))
    optimizer = Adam(shard_state=True)
    with pytest.raises(ValueError, match=message):
        strategy.run(lambda: optimizer.apply_gradients([(gradient(v), v)]))
    # Where one rank alone gives it, all raise.
    with pytest.raises(MismatchError, match=message):
        strategy.run(lambda: optimizer.apply_gradients([(gradient(v) if RANK == SIZE - 1 else np.ones((3, 2)), v)]))
    strategy.run(lambda: optimizer.apply_gradients([(np.ones((3, 2)), v)]))
    assert optimizer.iterations == 1


@pytest.mark.skipif(SIZE == 1, reason="nothing is shared out")
def test_variables_with_one_copy_are_refused():
    strategy = mpistrat.experimental.CentralStorageStrategy()
    with strategy.scope():
        v = mpistrat.Variable(np.ones(3))
    for call in (lambda o: o.build([v]), lambda o: strategy.run(lambda: o.apply_gradients([(np.ones(3), v)]))):
        with pytest.raises(ValueError, match="needs a copy of each variable on each rank"):
            call(Adam(shard_state=True))


@pytest.mark.skipif(SIZE == 1, reason="there is no other rank")
def test_a_rank_that_fails_in_its_update(strategy):
    """Its error is raised there, and all others raise, too: none waits for its weights."""

    class Failing(SGD):
        def update(self, weights, gradient, step, rate, *state):
            if RANK == SIZE - 1:
                raise ArithmeticError("of the last rank")
            weights -= gradient

    variables = variables_of(strategy, [(40,)] * SIZE, "f4")
    for optimizer in (Failing(shard_state=True), Failing(shard_state=True, global_clipnorm=1.0)):
        with pytest.raises(MismatchError, match=f"rank {SIZE - 1}.*ArithmeticError|of the last rank"):
            train(strategy, optimizer, variables, "f4")
    train(strategy, SGD(shard_state=True), variables, "f4")  # the ranks are in step


@pytest.mark.skipif(SIZE == 1, reason="there is no other rank")
def test_ranks_that_differ(strategy):
    variables = variables_of(strategy, SMALL, "f4")
    with pytest.raises(MismatchError, match="shared out"):
        Adam(shard_state=RANK > 0).build(variables)
    optimizer = Adam(shard_state=True)
    train(strategy, optimizer, variables, "f4")
    with pytest.raises(MismatchError):
        train(strategy, optimizer, variables[: 4 - (RANK == 0)], "f4", range(1))
    with pytest.raises(MismatchError):
        train(strategy, optimizer, variables, "f4" if RANK else "f2", range(1))
    optimizer.update = lambda weights, gradient, step, rate, *state: None
    with pytest.raises(ValueError, match="before its state is created"):
        train(strategy, optimizer, variables, "f4", range(1))
