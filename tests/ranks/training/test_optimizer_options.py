"""RMSprop, Adagrad and LARS, and the options of all optimizers, against formulas that are written serially."""

import copy

import numpy as np
import pytest
from selection import core

import mpistrat
from mpistrat.optimizers import LARS, SGD, Adagrad, Adam, AdamW, RMSprop
from mpistrat.optimizers.schedules import ExponentialDecay

RATE = 0.1
SHAPES = [(3,), (), (41, 17), (0, 4), (257, 129), (5,)]
CALLS = 6


def sgd(w, g, state, step):
    return w - RATE * g


def momentum(w, g, state, step):
    state["m"] = 0.9 * state.get("m", 0.0) - RATE * g
    return w + state["m"]


def adam(w, g, state, step):
    m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
    return w - RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 1e-7)


def rmsprop(w, g, state, step):
    v = state["v"] = 0.8 * state.get("v", 0.0) + 0.2 * g * g
    return w - RATE * g / np.sqrt(v + 1e-3)


def centered(w, g, state, step):
    v = state["v"] = 0.8 * state.get("v", 0.0) + 0.2 * g * g
    mean = state["mean"] = 0.8 * state.get("mean", 0.0) + 0.2 * g
    m = state["m"] = 0.5 * state.get("m", 0.0) + RATE * g / np.sqrt(v - mean * mean + 1e-3)
    return w - m


def adagrad(w, g, state, step):
    state["sum"] = state.get("sum", 0.2) + g * g
    return w - RATE * g / np.sqrt(state["sum"] + 1e-7)


def lars(w, g, state, step):
    trust, decay = 1.0, 0.0
    if w.ndim > 1:
        decay = 0.01
        of_w, of_g = np.linalg.norm(w), np.linalg.norm(g)
        trust = 0.02 * of_w / (of_g + decay * of_w) if of_w and of_g else 1.0
    m = state["m"] = 0.9 * state.get("m", 0.0) - RATE * trust * (g + decay * w)
    return w + m


def nesterov_lars(w, g, state, step):
    before = state.get("m", 0.0)
    lars(w, g, state, step)
    return w + 0.9 * state["m"] + (state["m"] - 0.9 * before)


METHODS = {
    "sgd": (SGD, {}, sgd),
    "momentum": (SGD, {"momentum": 0.9}, momentum),
    "adam": (Adam, {}, adam),
    "adamw": (AdamW, {"weight_decay": 0.02}, adam),
    "rmsprop": (RMSprop, {"rho": 0.8, "epsilon": 1e-3}, rmsprop),
    "centered": (RMSprop, {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-3, "centered": True}, centered),
    "adagrad": (Adagrad, {"initial_accumulator_value": 0.2}, adagrad),
    "lars": (LARS, {"weight_decay": 0.01, "eta": 0.02}, lars),
    "nesterov lars": (LARS, {"weight_decay": 0.01, "eta": 0.02, "nesterov": True}, nesterov_lars),
}
CASES = {
    **{name: (name, {}) for name in METHODS},
    "clipnorm": ("momentum", {"clipnorm": 2.0}),
    "clipvalue": ("momentum", {"clipvalue": 0.3}),
    "global_clipnorm": ("momentum", {"global_clipnorm": 5.0}),
    "weight_decay": ("momentum", {"weight_decay": 0.1}),
    "ema": ("momentum", {"use_ema": True, "ema_momentum": 0.75}),
    "ema overwrites": ("momentum", {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}),
    "accumulation": ("momentum", {"gradient_accumulation_steps": 3}),
    "adam with all": (
        "adam",
        {"gradient_accumulation_steps": 2, "global_clipnorm": 1.0, "weight_decay": 0.1, "use_ema": True},
    ),
    "rmsprop with all": (
        "centered",
        {"clipnorm": 1.0, "weight_decay": 0.1, "use_ema": True, "ema_overwrite_frequency": 3},
    ),
    "ema of calls": (
        "adam",
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3, "gradient_accumulation_steps": 2},
    ),
    "lars with all": ("lars", {"clipnorm": 1.0, "use_ema": True, "gradient_accumulation_steps": 2}),
}


def gradients(rank, call, dtype):
    random = np.random.default_rng([rank, call])
    return [np.array(random.standard_normal(shape), dtype) for shape in SHAPES]


def clipped(gs, options):
    if limit := options.get("clipvalue"):
        return [g.clip(-limit, limit) for g in gs]
    norms = [np.linalg.norm(g) for g in gs]
    if limit := options.get("global_clipnorm"):
        norms = [np.linalg.norm(norms)] * len(gs)
    limit = limit or options.get("clipnorm") or np.inf
    return [g if norm <= limit else g * limit / norm for g, norm in zip(gs, norms, strict=True)]


def serial(formula, decay, options, replicas, dtype):
    """The weights and their averages after all calls."""
    weights = [np.ones(shape) for shape in SHAPES]
    averages, states, step, sums = list(weights), [{} for _ in SHAPES], 0, None
    accumulated, kept = options.get("gradient_accumulation_steps", 1), options.get("ema_momentum", 0.99)
    for call in range(CALLS):
        each = [gradients(rank, call, dtype) for rank in range(replicas)]
        total = [sum(g.astype(float) for g in gs) for gs in zip(*each, strict=True)]
        sums = total if sums is None else [a + b for a, b in zip(sums, total, strict=True)]
        is_step = (call + 1) % accumulated == 0
        if is_step:
            means, sums, step = clipped([g / accumulated for g in sums], options), None, step + 1
            weights = [
                formula(w * (1 - RATE * decay), g, state, step)
                for w, g, state in zip(weights, means, states, strict=True)
            ]
        number = call // accumulated + 1  # of the step to which the call belongs: averages see calls, as in Keras
        for i, w in enumerate(weights):
            averages[i] = w if number == 1 else kept * averages[i] + (1 - kept) * w
            if (often := options.get("ema_overwrite_frequency")) and number % often == 0:
                weights[i] = averages[i]
    return weights, averages, step


def trained(strategy, kind, arguments, dtype, calls=range(CALLS)):
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(shape, dtype), name=f"v{i}") for i, shape in enumerate(SHAPES)]
    optimizer = kind(RATE, **arguments)
    continue_training(strategy, optimizer, variables, dtype, calls)
    return optimizer, variables


def continue_training(strategy, optimizer, variables, dtype, calls):
    def step(call):
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        mine = gradients(rank, call, dtype)
        kept = copy.deepcopy(mine)
        optimizer.apply_gradients(zip(mine, variables, strict=True))
        assert all((a == b).all() for a, b in zip(mine, kept, strict=True))

    for call in calls:
        strategy.run(step, (call,))


def bits(variables):
    return [variable.numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("case", core(CASES, "centered", "adam with all"))
def test_as_the_formula(strategy, case):
    name, options = CASES[case]
    dtype = (np.float32, np.float64)[list(CASES).index(case) % 2]
    kind, own, formula = METHODS[name]
    optimizer, variables = trained(strategy, kind, own | options, dtype)
    decay = (own | options).get("weight_decay", 0.0) if kind is not LARS else 0.0
    weights, averages, steps = serial(formula, decay, options, strategy.num_replicas_in_sync, dtype)
    assert optimizer.iterations == steps
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is np.float32 else {"rtol": 1e-10, "atol": 1e-10}
    for variable, w in zip(variables, weights, strict=True):
        np.testing.assert_allclose(variable.read_value(), w, **tolerance)
    assert len(set(map(tuple, strategy.comm.allgather(bits(variables))))) == 1
    # The same bits where each variable is updated by itself.
    separate = type(kind.__name__, (kind,), {"elementwise": False})
    other, others = trained(strategy, separate, own | options, dtype)
    assert bits(variables) == bits(others)
    assert bits(optimizer.variables) == bits(other.variables)
    if options.get("use_ema"):
        optimizer.finalize_variable_values(variables)
        for variable, average in zip(variables, averages, strict=True):
            np.testing.assert_allclose(variable.read_value(), average, **tolerance)


@pytest.mark.parametrize("calls", core([3, 4, 5], 5))
def test_a_checkpoint_between_two_calls(strategy, tmp_path, calls):
    """Training that is continued from a file gives the weights of training that was not interrupted."""
    options = {"gradient_accumulation_steps": 4, "use_ema": True, "clipnorm": 1.0, "weight_decay": 0.1}
    optimizer, variables = trained(strategy, Adam, options, np.float64, range(calls))
    before = optimizer.iterations
    mpistrat.training.save([*variables, *optimizer.variables], tmp_path / "file.h5")
    continue_training(strategy, optimizer, variables, np.float64, range(calls, 10))
    resumed, copies = trained(strategy, Adam, options, np.float64, ())
    resumed.build(copies)
    mpistrat.training.load([*copies, *resumed.variables], tmp_path / "file.h5")
    assert resumed.iterations == before == calls // 4
    continue_training(strategy, resumed, copies, np.float64, range(calls, 10))
    assert resumed.iterations == optimizer.iterations == 2
    for one, other in zip([*variables, *optimizer.variables], [*copies, *resumed.variables], strict=True):
        # A sum is divided among the replicas when it is loaded, so it may be rounded.
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-9, atol=1e-11)


def test_a_copy_accumulates_for_itself(strategy):
    optimizer, variables = trained(
        strategy, SGD, {"gradient_accumulation_steps": 2, "use_ema": True}, np.float64, range(1)
    )
    copied, copies = copy.deepcopy((optimizer, variables))
    continue_training(strategy, optimizer, variables, np.float64, range(1, 4))
    assert (copied.iterations, optimizer.iterations) == (0, 2)
    continue_training(strategy, copied, copies, np.float64, range(1, 4))
    assert bits(variables) == bits(copies)
    assert bits(optimizer.variables) == bits(copied.variables)


OF_ROWS = [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 0.5}, {"gradient_accumulation_steps": 2}]


@pytest.mark.full
@pytest.mark.parametrize("options", OF_ROWS, ids="-".join)
def test_rows_are_clipped_as_the_dense_gradient(strategy, options):
    with strategy.scope():
        sparse, dense = (mpistrat.Variable(np.ones((6, 2))) for _ in range(2))
    one, other = SGD(1.0, **options), SGD(1.0, **options)

    def step(number):
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        rows = mpistrat.IndexedSlices(np.full((3, 2), rank - 0.25), [rank, 4, rank], (6, 2))
        one.apply_gradients([(rows, sparse)])
        other.apply_gradients([(rows.to_dense(), dense)])

    for number in range(2):
        strategy.run(step, (number,))
    np.testing.assert_allclose(sparse.read_value(), dense.read_value(), rtol=1e-12)
    assert (sparse.read_value() != 1).any()


def test_accumulation_takes_what_the_program_gives(strategy):
    """None adds nothing, reduced gradients are not added up, and float16 is added up in float32."""
    with strategy.scope():
        v, u = mpistrat.Variable(np.zeros(2)), mpistrat.Variable(np.zeros(1))
        half = mpistrat.Variable(np.zeros(1, np.float16))
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    replicas = strategy.num_replicas_in_sync

    def step(pairs, **options):
        strategy.run(lambda: optimizer.apply_gradients(pairs, **options))

    step([(np.array([2.0, 4.0]), v), (None, u)])
    step([(None, v), (np.ones(1), u)])
    assert v.read_value().tolist() == [-replicas, -2 * replicas]
    assert u.read_value().tolist() == [-replicas / 2]
    for _ in range(2):
        step([(np.array([1.0, 1.0]), v)], experimental_aggregate_gradients=False)
    assert v.read_value().tolist() == [-replicas - 1, -2 * replicas - 1]
    step([(np.full(1, 60000.0, np.float16), half)])
    step([(np.full(1, -59900.0, np.float16), half)])
    # Both are rounded to float16: 60000 and -59904.
    assert half.read_value().tolist() == [np.float16(-48.0 * replicas)]
    assert optimizer.iterations == 3


def test_replicas_do_not_communicate_until_the_last_call(strategy):
    optimizer, variables = trained(strategy, SGD, {"gradient_accumulation_steps": 3}, np.float64, range(1))
    topology = strategy.extended.engine.topology
    before = topology.lock.sequence
    continue_training(strategy, optimizer, variables, np.float64, range(1, 2))
    assert topology.lock.sequence == before
    continue_training(strategy, optimizer, variables, np.float64, range(2, 3))
    assert topology.size == 1 or topology.lock.sequence > before


def test_misuse(strategy):
    for options in (
        {"clipnorm": 1.0, "clipvalue": 1.0},
        {"clipnorm": 1.0, "global_clipnorm": 1.0},
        {"clipnorm": 0},
        {"clipvalue": -1.0},
        {"weight_decay": -0.1},
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 2.5},
        {"use_ema": True, "ema_momentum": 1.5},
        {"use_ema": True, "ema_overwrite_frequency": 0},
    ):
        with pytest.raises(ValueError, match=r"must|only one of"):
            SGD(0.1, **options)
    for make in (
        lambda: RMSprop(rho=1.0),
        lambda: RMSprop(momentum=-1),
        lambda: Adagrad(initial_accumulator_value=-1),
        lambda: LARS(eta=0),
        lambda: LARS(momentum=1),
        lambda: LARS(weight_decay=-1),
    ):
        with pytest.raises(ValueError, match="must"):
            make()
    with strategy.scope():
        z = mpistrat.Variable(np.zeros(2, np.complex64))
    with pytest.raises(ValueError, match="clipvalue cannot clip a gradient of complex64: use clipnorm"):
        strategy.run(lambda: SGD(1.0, clipvalue=1.0).apply_gradients([(np.ones(2, np.complex64), z)]))
    central = mpistrat.experimental.CentralStorageStrategy()
    with central.scope():
        v = mpistrat.Variable(np.zeros(2))
    with pytest.raises(ValueError, match="use MultiWorkerMirroredStrategy"):
        central.run(lambda: SGD(1.0, gradient_accumulation_steps=2).apply_gradients([(np.zeros(2), v)]))
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="No gradients provided"):
        strategy.run(lambda: optimizer.apply_gradients([(None, z)]))


def test_a_wrong_gradient_at_the_last_call_raises_on_all_ranks(strategy):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(2))
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    last = strategy.num_replicas_in_sync - 1
    strategy.run(lambda: optimizer.apply_gradients([(np.zeros(2), v)]))

    def wrong():
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        optimizer.apply_gradients([(np.zeros(3 if rank == last else 2), v)])

    with pytest.raises(ValueError, match="shape"):
        strategy.run(wrong)


def test_complex_gradients_are_clipped_by_their_norm(strategy):
    with strategy.scope():
        z = mpistrat.Variable(np.zeros(2, np.complex128))
    strategy.run(lambda: SGD(1.0, clipnorm=1.0).apply_gradients([(np.array([3.0, 4.0j]), z)]))
    np.testing.assert_allclose(z.read_value(), [-0.6, -0.8j])


def test_a_class_of_its_own_has_the_options(strategy):
    class Sign(mpistrat.optimizers.Optimizer):
        def update(self, weights, gradient, step, rate, *state):
            weights -= rate * np.sign(gradient)

    with strategy.scope():
        v = mpistrat.Variable(np.array([4.0, 8.0]))
    optimizer = Sign(1.0, weight_decay=0.5, use_ema=True)
    strategy.run(lambda: optimizer.apply_gradients([(np.array([1.0, -1.0]), v)]))
    assert v.read_value().tolist() == [1.0, 5.0]
    assert optimizer.variables[-1].read_value().tolist() == [1.0, 5.0]


def test_repr(strategy):
    optimizer = Adam(0.01, beta_1=0.8, clipnorm=1.0)
    assert repr(optimizer) == "<Adam learning_rate=0.01 clipnorm=1.0 beta_1=0.8 steps=0 variables=0>"
    with strategy.scope():
        v = mpistrat.Variable(0.0)
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert "steps=1 variables=1" in repr(optimizer)
    assert "<th" in optimizer._repr_html_()
    assert "clipnorm" in optimizer._repr_html_()
    again = Adam(**optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    ("often", "weights", "averages"),
    [
        (
            None,
            [0.762640743192, 0.857491396498, 0.619679415032, 0.782189418346, 0.525153935765],
            [0.762640743192, 0.786353406519, 0.768027061609, 0.72289107926, 0.692914060899],
        ),
        (
            2,
            [0.762640743192, 0.786353406519, 0.5520983254, 0.723691966747, 0.469581357444],
            [0.762640743192, 0.786353406519, 0.727789636239, 0.723691966747, 0.660164314422],
        ),
        (
            3,
            [0.762640743192, 0.857491396498, 0.745351827462, 0.901578208656, 0.638573285137],
            [0.762640743192, 0.786353406519, 0.745351827462, 0.784408422761, 0.786395974352],
        ),
    ],
)
def test_averages_under_accumulation_are_those_of_keras(strategy, often, weights, averages):
    """The numbers are recorded from keras 3.15 on torch, whose hyper-parameters have float32."""
    with strategy.scope():
        v = mpistrat.Variable(1.0)
    options = {"use_ema": True, "ema_momentum": 0.75, "ema_overwrite_frequency": often, "weight_decay": 0.1}
    optimizer = SGD(0.5, momentum=0.5, gradient_accumulation_steps=3, **options)
    found = []
    for call in range(15):
        gradient = np.cos(call) / strategy.num_replicas_in_sync
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, v)]))
        if call % 3 == 2:
            average = next(each for each in optimizer.variables if each.name.endswith("/average"))
            found.append((float(v), float(average)))
    np.testing.assert_allclose(found, list(zip(weights, averages, strict=True)), rtol=1e-6)


@pytest.mark.parametrize("calls", [2, 3])
def test_a_schedule_under_accumulation_sees_calls_as_that_of_keras(strategy, calls):
    """A step has the rate of the call that completes it. For two calls, keras 3.15 has -0.625 after four."""
    with strategy.scope():
        v = mpistrat.Variable(0.0)
        optimizer = SGD(ExponentialDecay(1.0, 1, 0.5), gradient_accumulation_steps=calls)
    for call in range(2 * calls):
        strategy.run(lambda: optimizer.apply_gradients([(1.0 / strategy.num_replicas_in_sync, v)]))
        if call == calls:  # the second call of the second step has not come
            assert optimizer.learning_rate == 0.5 ** (2 * calls - 1)
    assert float(v) == -(0.5 ** (calls - 1) + 0.5 ** (2 * calls - 1))
    if calls == 2:
        assert float(v) == -0.625


@pytest.mark.parametrize("often", [None, 3])
@pytest.mark.parametrize("calls", [2, 4, 7, 8])
def test_averages_of_a_step_that_is_not_complete(strategy, calls, often):
    """They have all calls, also those since the last step; the oracle is a loop over the calls."""
    options = {"use_ema": True, "ema_momentum": 0.75, "ema_overwrite_frequency": often}
    with strategy.scope():
        v = mpistrat.Variable(1.0)
        optimizer = SGD(0.5, gradient_accumulation_steps=3, **options)
    weight = average = 1.0
    for call in range(calls):
        strategy.run(lambda: optimizer.apply_gradients([(1.0 / strategy.num_replicas_in_sync, v)]))
        number = call // 3 + 1
        weight -= 0.5 * (call % 3 == 2)
        average = weight if number == 1 else 0.75 * average + 0.25 * weight
        weight = average if often and number % often == 0 else weight
    optimizer.finalize_variable_values([v])
    np.testing.assert_allclose(float(v), average, rtol=1e-12)
