"""Steps over flat arrays are those of variables that are updated one by one, to the last bit."""

import copy

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD, Adam, AdamW

SHAPES = [(5, 3), (7,), (), (0, 4), (130, 140), (2, 3, 4), (300, 100), (64,), (1,)]


def separate(kind):
    """The same optimizer, without the promise that allows flat arrays."""
    return type(kind.__name__, (kind,), {"elementwise": False})


METHODS = {
    "sgd": lambda of: of(SGD)(0.1),
    "momentum": lambda of: of(SGD)(0.1, momentum=0.9),
    "nesterov": lambda of: of(SGD)(0.1, momentum=0.9, nesterov=True),
    "adam": lambda of: of(Adam)(0.1),
    "amsgrad": lambda of: of(Adam)(0.1, amsgrad=True),
    "adamw": lambda of: of(AdamW)(0.1, weight_decay=0.01),
}
DTYPES = {
    "float32": ["float32"],
    "float64": ["float64"],
    "float32 from float64": ["float32", "float64"],
    "float16 from float32": ["float16", "float32"],
    "mixed": ["float32", "float64", "float16", "complex64", "float32"],
}


def values(shapes, dtypes, seed):
    random = np.random.default_rng(seed)
    made = []
    for i, shape in enumerate(shapes):
        made.append(np.array(random.standard_normal(shape) + 0.1, dtypes[i % len(dtypes)]))
    return made


class Both:
    """Two optimizers of one kind with equal variables: the one may use flat arrays, the other may not."""

    def __init__(self, strategy, name, initial):
        self.strategy = strategy
        self.optimizers = METHODS[name](lambda kind: kind), METHODS[name](separate)
        with strategy.scope():
            self.variables = [
                [mpistrat.Variable(value, name=f"v{i}") for i, value in enumerate(initial)] for _ in range(2)
            ]

    def step(self, gradients, order=None, aggregate=True):
        for optimizer, variables in zip(self.optimizers, self.variables, strict=True):
            pairs = list(zip(gradients, variables, strict=True))
            pairs = pairs if order is None else [pairs[i] for i in order]
            arguments = {"experimental_aggregate_gradients": aggregate}
            self.strategy.run(optimizer.apply_gradients, (pairs,), arguments)

    def check(self):
        for mine, other in zip(*self.variables, strict=True):
            assert mine.numpy().tobytes() == other.numpy().tobytes()
        mine, other = (optimizer.variables for optimizer in self.optimizers)
        assert [each.name.partition("/")[2] for each in mine] == [each.name.partition("/")[2] for each in other]
        for one, two in zip(mine, other, strict=True):
            assert one.numpy().tobytes() == two.numpy().tobytes()


def rank():
    return mpistrat.get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_bits(strategy, name, dtypes):
    if "complex64" in DTYPES[dtypes] and name == "amsgrad":
        pytest.skip("it has no largest complex number")
    own = [dtype for dtype in DTYPES[dtypes] if "from" not in dtypes or dtype == DTYPES[dtypes][0]]
    both = Both(strategy, name, values(SHAPES, own, 0))
    given = own if "from" not in dtypes else DTYPES[dtypes][1:]
    me = strategy.extended.engine.topology.rank
    with np.errstate(all="ignore"):
        for step in range(4):
            both.step(values(SHAPES, given, [step, me]))
    assert both.optimizers[0].iterations == 4
    both.check()
    for variable in both.variables[0]:
        assert len(set(strategy.comm.allgather(variable.numpy().tobytes()))) == 1


def test_gradients_of_any_kind_and_order(strategy):
    """What the program gives may change from step to step."""
    both = Both(strategy, "adam", values(SHAPES[:6], ["float32"], 0))
    me = strategy.extended.engine.topology.rank
    for step in range(12):
        gradients = values(SHAPES[:6], ["float32"], [step, me])
        order, aggregate = None, True
        if step == 3:
            gradients[1] = gradients[5] = None
        elif step == 4:
            order = [4, 2, 0, 5, 3, 1]
        elif step == 5:
            order = [0, 2, 4]
        elif step == 6:
            gradients = [gradient.astype(np.float64) for gradient in gradients]
        elif step == 7:
            gradients[2] = 0.5
            gradients[1] = gradients[1].tolist()
        elif step == 8:
            gradients = [np.array(gradient, order="F") for gradient in gradients]
            gradients[1] = np.repeat(gradients[1], 2)[::2]
        elif step == 9:
            gradients = values(SHAPES[:6], ["float32"], step)
            aggregate = False
        elif step == 10:
            gradients[4] = mpistrat.IndexedSlices(np.full((2, 140), me, np.float32), [me, 129], (130, 140))
        kept = copy.deepcopy(gradients)
        both.step(gradients, order, aggregate)
        for one, two in zip(gradients, kept, strict=True):
            if isinstance(one, np.ndarray):
                np.testing.assert_array_equal(one, two)
    both.check()


def test_a_variable_may_be_given_twice(strategy):
    both = Both(strategy, "momentum", values([(3,), (4,)], ["float64"], 0))
    for step in range(3):
        both.step([np.full(3, step), np.full(4, 2.0)], order=[0, 1, 0])
    both.check()


def test_gradients_in_buffers(strategy):
    both = Both(strategy, "adam", values(SHAPES, ["float32"], 0))
    buffers = strategy.experimental_buffers_like([np.zeros(shape, np.float32) for shape in SHAPES])
    me = strategy.extended.engine.topology.rank
    for step in range(4):
        for optimizer, variables in zip(both.optimizers, both.variables, strict=True):
            for buffer, value in zip(buffers, values(SHAPES, ["float32"], [step, me]), strict=True):
                buffer[...] = value
            strategy.run(optimizer.apply_gradients, (list(zip(buffers, variables, strict=True)),))
    both.check()


@pytest.mark.parametrize("kept", ["np.asarray", "component"])
def test_views_of_a_variable_follow_it(strategy, kept):
    """Also those taken before the first step: a variable keeps its memory for life."""
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    views = [np.asarray(v) if kept == "np.asarray" else v.own_copy() for v in variables]
    optimizer = Adam(0.1)
    for step in range(3):
        gradients = values(SHAPES, ["float32"], step)
        strategy.run(optimizer.apply_gradients, (list(zip(gradients, variables, strict=True)),))
        for view, variable in zip(views, variables, strict=True):
            np.testing.assert_array_equal(view, variable.numpy())
    assert not np.array_equal(views[0], np.zeros(SHAPES[0]))
    if kept == "np.asarray":
        assert not any(view.flags.writeable for view in views)


def test_values_written_between_steps_count(strategy, tmp_path):
    both = Both(strategy, "adam", values([(3,), (4, 5)], ["float64"], 0))
    gradients = values([(3,), (4, 5)], ["float64"], 1)
    both.step(gradients)
    both.step(gradients)
    for variables in both.variables:
        variables[0].assign([1.0, 2.0, 3.0])
        variables[1][1] = np.arange(5.0)
    both.step(gradients)
    both.check()
    path = tmp_path / "state.h5"
    names = [dict(enumerate([*v, *o.variables])) for v, o in zip(both.variables, both.optimizers, strict=True)]
    mpistrat.training.save(names[0], path)
    expected = [value.numpy() for value in names[0].values()]
    both.step(gradients)
    for each in names:
        mpistrat.training.load(each, path)
    for value, want in zip(names[0].values(), expected, strict=True):
        np.testing.assert_array_equal(value.numpy(), want)
    both.step(gradients)
    assert [optimizer.iterations for optimizer in both.optimizers] == [4, 4]
    both.check()


def test_several_optimizers_share_variables(strategy):
    both = [Both(strategy, name, values([(3,), (4,)], ["float32"], 0)) for name in ("adam", "momentum")]
    both[1].variables = both[0].variables
    for step in range(6):
        both[step % 2].step(values([(3,), (4,)], ["float32"], step))
    both[0].check()
    both[1].check()


def test_a_copy_of_an_optimizer_has_a_state_of_its_own(strategy):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(3))
    first = SGD(1.0, momentum=0.5)
    apply = [(np.ones(3), v)]
    strategy.run(first.apply_gradients, (apply,))
    strategy.run(first.apply_gradients, (apply,))
    with strategy.scope():
        second = copy.deepcopy(first)
    before = [slot.numpy() for slot in first.variables]
    strategy.run(second.apply_gradients, (apply,))
    for slot, value in zip(first.variables, before, strict=True):
        np.testing.assert_array_equal(slot.numpy(), value)
    assert (first.iterations, second.iterations) == (2, 3)


def test_an_update_of_its_own_gets_each_variable(strategy):
    """A subclass may look at all elements of a variable, such as at their norm."""
    seen = []

    class Normed(SGD):
        def update(self, weights, gradient, step, rate, *state):
            seen.append(weights.shape)
            super().update(weights, gradient / np.linalg.norm(gradient), step, rate, *state)

    class Promised(SGD):
        elementwise = True

        def update(self, weights, gradient, step, rate, *state):
            seen.append(weights.shape)
            super().update(weights, gradient, step, rate, *state)

    assert (Normed.elementwise, Promised.elementwise) == (False, True)
    for kind, shapes in ((Normed, [(2,), (3, 4)]), (Promised, [(14,)])):
        with strategy.scope():
            variables = [mpistrat.Variable(np.zeros(shape)) for shape in ((2,), (3, 4))]
        optimizer = kind(1.0)
        for _ in range(2):
            seen.clear()
            pairs = [(np.ones(variable.shape), variable) for variable in variables]
            strategy.run(optimizer.apply_gradients, (pairs,))
        assert seen == shapes


def test_ops_of_the_program_get_each_gradient():
    class Counting(mpistrat.ReductionToOneDevice):
        lengths = ()

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            self.lengths = [np.size(value.values[0]) for value, _ in value_destination_pairs]
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    ops = Counting()
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(n)) for n in (2, 3)]
    optimizer = SGD(1.0)
    for _ in range(2):
        strategy.run(optimizer.apply_gradients, ([(np.ones(v.shape), v) for v in variables],))
    assert strategy.extended.engine.ops.lengths == [2, 3]


@pytest.mark.ranks(min=2)
def test_ranks_that_disagree_raise_on_all(strategy):
    """In a step that is prepared, too, and for variables of one name."""
    optimizer = SGD(1.0)
    with strategy.scope():
        u, v = (mpistrat.Variable(np.ones(shape), name="w") for shape in ((2, 3), (3, 2)))
        w = mpistrat.Variable(np.ones(6), name="w")
    pairs = [(np.ones((2, 3)), u), (np.ones((3, 2)), v)]
    for _ in range(2):
        strategy.run(optimizer.apply_gradients, (pairs,))
        strategy.run(optimizer.apply_gradients, (pairs[::-1],))
    before = u.numpy(), v.numpy()
    first = strategy.is_chief
    rows = mpistrat.IndexedSlices(np.ones((1, 3)), [0], (2, 3))
    others = (
        pairs[::-1],
        pairs[:1],
        [(None, u), pairs[1]],
        [(rows, u), pairs[1]],
        [(np.ones((2, 3), np.float32), u), pairs[1]],
        [(np.ones((2, 2)), u), pairs[1]],
        [(np.ones(6), w)],
    )
    for other in others:
        with pytest.raises(ValueError, match="all_reduce") as caught:
            strategy.run(optimizer.apply_gradients, (pairs if first else other,))
        assert __file__ in str(caught.value)
    np.testing.assert_array_equal(u.numpy(), before[0])
    np.testing.assert_array_equal(v.numpy(), before[1])
    assert optimizer.iterations == 4
    strategy.run(optimizer.apply_gradients, (pairs,))


def test_a_gradient_that_does_not_fit_raises_in_a_prepared_step(strategy):
    optimizer = SGD(1.0)
    with strategy.scope():
        u, v = (mpistrat.Variable(np.ones(3), name=name) for name in "uv")
    for _ in range(2):
        strategy.run(optimizer.apply_gradients, ([(np.ones(3), u), (np.ones(3), v)],))
    with pytest.raises(ValueError, match=r"'v' has shape \(3,\), and its gradient \(4,\)"):
        strategy.run(optimizer.apply_gradients, ([(np.ones(3), u), (np.ones(4), v)],))
    with pytest.raises(ValueError, match="'u' has dtype float64, and its gradient complex128"):
        strategy.run(optimizer.apply_gradients, ([(np.ones(3, complex), u), (np.ones(3), v)],))
    other = mpistrat.MultiWorkerMirroredStrategy()
    with pytest.raises(ValueError, match="created by"):
        other.run(optimizer.apply_gradients, ([(np.ones(3), u), (np.ones(3), v)],))
    assert optimizer.iterations == 2


@pytest.mark.parametrize("kind", ["default", "one device"])
def test_without_replicas(kind):
    strategy = mpistrat.get_strategy() if kind == "default" else mpistrat.OneDeviceStrategy("cpu:0")
    both = Both(strategy, "adam", values(SHAPES, ["float32"], 0))
    for step in range(3):
        both.step(values(SHAPES, ["float32"], step))
    both.check()
