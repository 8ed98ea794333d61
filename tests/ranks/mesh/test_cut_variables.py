"""Variables that are cut over the ranks of a replica."""

import copy

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import Mesh, ShardedArray
from mpistrat.training import Checkpoint, load, save

SIZE = MPI.COMM_WORLD.size
WHOLE = np.random.default_rng(1).normal(size=(5, 7))


def scope_of(inner=None, **axes):
    """A mesh and a strategy whose replicas are ``inner`` ranks: by default two if that is possible."""
    inner = inner or (2 if SIZE % 2 == 0 else SIZE)
    mesh = Mesh(**(axes or {"replica": -1, "model": inner}))
    return mesh, mpistrat.MultiWorkerMirroredStrategy(mesh=mesh)


def variable_of(mesh, strategy, whole=WHOLE, axes=(None, "model"), parts=None, **options):
    with strategy.scope():
        return mpistrat.Variable(ShardedArray.from_array(whole, mesh=mesh, axes=axes, parts=parts), **options)


@pytest.mark.four_ranks
def test_reads_and_writes():
    mesh, strategy = scope_of()
    v = variable_of(mesh, strategy, aggregation=mpistrat.VariableAggregation.SUM)
    assert v.shape == WHOLE.shape
    u = v.read_value()
    assert isinstance(u, ShardedArray)
    part = WHOLE[u.box]
    assert v.local.tobytes() == u.local.tobytes() == part.tobytes()
    assert not v.local.flags.writeable
    assert (2 * v - u).gather().tobytes() == (2 * WHOLE - WHOLE).tobytes()
    np.testing.assert_allclose(v.sum(), WHOLE.sum(), rtol=1e-12)
    np.testing.assert_allclose((np.ones((2, 5)) @ v).gather(), np.ones((2, 5)) @ WHOLE, rtol=1e-12)
    np.testing.assert_allclose([np.mean(v), v.std(), np.sum(v)], [WHOLE.mean(), WHOLE.std(), WHOLE.sum()], rtol=1e-12)
    np.testing.assert_array_equal(np.where(u > 0, v, np.zeros_like(v)).gather(), np.where(WHOLE > 0, WHOLE, 0))
    assert (np.shape(v), np.ndim(v), np.size(v)) == (WHOLE.shape, WHOLE.ndim, WHOLE.size)
    for function in (np.concatenate, np.stack):
        with pytest.raises(TypeError, match=r"use gather\(\)"):
            function([v, (v)])
    v.assign(u * 2)
    v.assign_sub(part)
    assert v.read_value().gather().tobytes() == WHOLE.tobytes()
    w = copy.deepcopy(v)
    strategy.run(lambda: v.assign_add(np.ones_like(part)))  # each replica adds its own
    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(v.read_value().gather(), WHOLE + count)
    strategy.run(lambda: v.assign_add(w))
    np.testing.assert_allclose(v.read_value().gather(), WHOLE + count + count * WHOLE, rtol=1e-12)
    np.testing.assert_array_equal(w.read_value().gather(), WHOLE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda v: np.asarray(v), TypeError, r"numpy.asarray does not work .* use gather\(\)"),
        (lambda v: v.numpy(), TypeError, r"use gather\(\)"),
        (lambda v: v[0], TypeError, "an index does not work"),
        (lambda v: v.__setitem__(0, 1.0), TypeError, "an index does not work"),
        (lambda v: v.assign(np.zeros((9, 9))), ValueError, "a value of shape .9, 9. does not fit"),
        (lambda v: v.assign(v.read_value().redistribute((None, None))), ValueError, "cut in another way"),
        (lambda v: mpistrat.optimizers.SGD(clipnorm=1.0).build([v]), ValueError, "needs whole gradients"),
        (lambda v: mpistrat.optimizers.LARS(0.1).build([v]), ValueError, "needs whole gradients"),
    ],
)
def test_what_it_cannot_do(call, error, message):
    mesh, strategy = scope_of()
    v = variable_of(mesh, strategy)
    with pytest.raises(error, match=message):
        call(v)
    np.testing.assert_array_equal(v.read_value().gather(), WHOLE)


def test_of_another_mesh():
    mesh, strategy = scope_of()
    other = Mesh(model=1, replica=-1)  # meshes of equal axes are one
    with pytest.raises(ValueError, match=r"needs MultiWorkerMirroredStrategy\(mesh=mesh\)"):
        variable_of(other, strategy)
    with pytest.raises(ValueError, match=r"needs MultiWorkerMirroredStrategy\(mesh=mesh\)"):
        mpistrat.Variable(ShardedArray.from_array(WHOLE, mesh=mesh, axes=(None, "model")))
    with pytest.raises(ValueError, match="cut along other axes than 'replica'"):
        variable_of(mesh, strategy, axes=("replica", None))
    with pytest.raises(ValueError, match="leave out ON_READ"):
        variable_of(mesh, strategy, synchronization=mpistrat.VariableSynchronization.ON_READ)


class Perceptron:
    """``tanh(x @ first) @ second`` with a hidden layer that is cut, trained by Adam on the rows of its replica."""

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)), rng.normal(size=(8, 1))
    weights = rng.normal(size=(5, 6)), rng.normal(size=(6, 1))

    def __init__(self, mesh, strategy, parts=None, fill=1.0):
        cuts = (None, "model"), ("model", None)
        self.strategy = strategy
        self.variables = [
            variable_of(mesh, strategy, fill * each, axes, parts) for each, axes in zip(self.weights, cuts, strict=True)
        ]
        self.optimizer = mpistrat.optimizers.Adam(0.05)
        self.rows = np.array_split(np.arange(8), strategy.num_replicas_in_sync)[mesh.coordinates["replica"]]

    def step(self):
        first, second = self.variables
        x, y = self.x[self.rows], self.y[self.rows]
        hidden = np.tanh(x @ first)
        error = ((hidden @ second).local - y) / 8
        slope = (error @ second.local.T) * (1 - hidden.local**2)
        gradients = x.T @ slope, hidden.local.T @ error
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def train(self, steps):
        for _ in range(steps):
            self.strategy.run(self.step)
        return [each.read_value().gather() for each in self.variables]


@pytest.fixture(scope="module")
def alone():
    """The weights of one rank after 10 and 20 steps."""
    mesh = Mesh(comm=MPI.COMM_SELF, replica=1, model=1)
    model = Perceptron(mesh, mpistrat.MultiWorkerMirroredStrategy(mesh=mesh))
    return model.train(10), model.train(10)


@pytest.mark.four_ranks
@pytest.mark.parametrize("saves", ["save", "save_async", "Checkpoint"])
def test_a_perceptron_trains_and_goes_on_as_one_rank_does(alone, saves, tmp_path):
    """The second half is trained on other numbers of ranks, with other cuts, from what the first half has saved."""
    mesh, strategy = scope_of()
    model = Perceptron(mesh, strategy)
    for got, expected in zip(model.train(10), alone[0], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    held = [each.own_copy().nbytes for each in (*model.variables, *model.optimizer.variables[2:])]
    assert sum(held) * mesh.axes["model"] == 3 * sum(each.nbytes for each in model.weights)
    state = [*model.variables, *model.optimizer.variables]
    path = tmp_path / "half.h5"
    if saves == "Checkpoint":
        Checkpoint(weights=model.variables, optimizer=model.optimizer).write(path)
    elif saves == "save":
        save(state, path)
    else:
        mpistrat.training.save_async(state, path).wait()
    uneven = {"model": [1, 5] if SIZE == 2 else [6, *[0] * (SIZE - 1)]}
    pair = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
    later = [(MPI.COMM_WORLD, uneven), (pair, None), (MPI.COMM_SELF, None)]  # one replica of all, of two, of one
    for comm, parts in later:
        mesh, strategy = scope_of(comm=comm, replica=1, model=-1)
        other = Perceptron(mesh, strategy, parts, fill=0.0)
        other.optimizer.build(other.variables)
        if saves == "Checkpoint":
            Checkpoint(weights=other.variables, optimizer=other.optimizer).restore(path).assert_consumed()
        else:
            load([*other.variables, *other.optimizer.variables], path)
        assert other.optimizer.iterations == 10
        for got, expected in zip(other.train(10), alone[1], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.four_ranks
def test_files_are_those_of_whole_arrays(tmp_path):
    mesh, strategy = scope_of()
    u = ShardedArray.from_array(WHOLE, mesh=mesh, axes=(None, "model"))
    save({"u": u, "w": variable_of(mesh, strategy)}, tmp_path / "cut.h5")
    found = mpistrat.training.load_arrays(tmp_path / "cut.h5")
    assert found["u"].tobytes() == found["w"].tobytes() == WHOLE.tobytes()
    save({"u": WHOLE + 1, "w": WHOLE + 2}, tmp_path / "whole.h5")
    w = variable_of(mesh, strategy, np.zeros_like(WHOLE), ("model", None))
    load({"u": u, "w": w}, tmp_path / "whole.h5")
    assert u.gather().tobytes() == (WHOLE + 1).tobytes()
    assert w.read_value().gather().tobytes() == (WHOLE + 2).tobytes()
    with pytest.raises(ValueError, match="of shape"):
        load({"u": variable_of(mesh, strategy, WHOLE[:4])}, tmp_path / "whole.h5")


def test_on_a_gpu(cupy, tmp_path):
    mesh = Mesh(replica=1, model=-1)
    strategy = mpistrat.MultiWorkerMirroredStrategy(mesh=mesh, device="cuda")
    v = variable_of(mesh, strategy)
    optimizer = mpistrat.optimizers.Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(cupy.ones(v.part.shape), v)]))
    assert isinstance(v.own_copy(), cupy.ndarray)
    assert not hasattr(v, "__cupy_get_ndarray__")  # CuPy would take the part for the whole
    save([v, *optimizer.variables], tmp_path / "v.h5")
    v.assign(cupy.zeros(v.part.shape))
    assert v.sum() == 0
    load([v, *optimizer.variables], tmp_path / "v.h5")
    np.testing.assert_allclose(v.read_value().gather(), WHOLE - 0.1, atol=1e-6)


def test_averages_and_other_options():
    """Two steps are those of a variable that is not cut."""
    found = []
    for cut in (True, False):
        mesh, strategy = scope_of() if cut else scope_of(1)
        v = variable_of(mesh, strategy)
        optimizer = mpistrat.optimizers.SGD(1.0, use_ema=True, clipvalue=0.5, weight_decay=0.1)
        for number in (1, 2):
            gradient = number * v.local / strategy.num_replicas_in_sync
            strategy.run(optimizer.apply_gradients, args=([(gradient, v)],))
        found.append(v.read_value().gather())
        optimizer.finalize_variable_values([v])
        found.append(v.read_value().gather())
    np.testing.assert_allclose(found[:2], found[2:], rtol=1e-12)
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_a_wrong_gradient_on_one_rank():
    """The ranks of its place in their replicas raise, and the others go on."""
    mesh, strategy = scope_of()
    v = variable_of(mesh, strategy)
    optimizer = mpistrat.optimizers.SGD(1.0)
    last = mesh.ranks.flat[-1] == mesh.rank
    raised = None
    try:
        shape = (9,) if last else v.part.shape
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(shape), v)]))
    except (ValueError, RuntimeError) as error:
        raised = type(error)
    assert (raised is None) == (mesh.coordinates["model"] < mesh.axes["model"] - 1)
    v.assign(np.ones_like(v.local))
    assert v.sum() == WHOLE.size  # the ranks are in step


def test_a_part_does_not_pass_for_the_whole():
    mesh, strategy = scope_of()
    v = variable_of(mesh, strategy)
    rows = mpistrat.IndexedSlices(np.ones((1, WHOLE.shape[1])), [0], WHOLE.shape)
    with pytest.raises(AttributeError, match=r"use gather\(\)"):
        v.flat  # noqa: B018
    with pytest.raises(ValueError, match="not IndexedSlices"):
        v.scatter_update(rows)
    with strategy.scope():
        optimizer = mpistrat.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="not IndexedSlices"):
        strategy.run(lambda: optimizer.apply_gradients([(rows, v)]))
    assert v.read_value().gather().tobytes() == WHOLE.tobytes()
