"""Meshes of ranks, and strategies whose replicas are several ranks."""

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat import Mesh, ShardedArray

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def test_places():
    mesh = Mesh(a=-1, b=2 if SIZE % 2 == 0 else 1)
    assert mesh.ranks.size == SIZE
    assert mesh.shape == tuple(mesh.axes.values())
    for name, axis in ((name, mesh.axis(name)) for name in mesh.axes):
        places = mesh.comm(name).allgather(mesh.coordinates)
        assert [each[name] for each in places] == [*range(axis.size)]
        assert axis.index == mesh.coordinates[name]
        assert all(each[other] == mesh.coordinates[other] for each in places for other in mesh.axes if other != name)
        assert axis.neighbors() == ((axis.index - 1) % axis.size, (axis.index + 1) % axis.size)
        assert (axis.neighbors(False)[0] is None) == (axis.index == 0)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_for_a_grid(ndim):
    mesh = Mesh.for_grid(ndim)
    assert [*mesh.axes] == ["x", "y", "z"][:ndim]
    assert [*mesh.shape] == MPI.Compute_dims(SIZE, ndim)
    assert mesh is Mesh(**mesh.axes)
    comm = MPI.COMM_WORLD.Split(RANK % 2)
    try:
        assert Mesh.for_grid(2, comm=comm, names=["a", "b"]).size == comm.size
    finally:
        comm.Free()


def test_over_some_of_the_ranks(tmp_path):
    comm = MPI.COMM_WORLD.Split(RANK < 2, key=-RANK)
    mesh = Mesh(comm=comm, replica=-1)
    strategy = mpistrat.MultiWorkerMirroredStrategy(mesh=mesh)
    assert strategy.num_replicas_in_sync == comm.size == (min(SIZE, 2) if RANK < 2 else SIZE - 2)
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", np.array([1.0, RANK])))
    assert total.tolist() == [comm.size, sum(comm.allgather(RANK))]
    u = ShardedArray.from_array(np.arange(9.0), mesh=mesh, axes=["replica"])
    path = tmp_path / f"{RANK < 2}.h5"
    if RANK < 2:  # the other ranks do not come
        mpistrat.training.save({"u": u, "mean": u.mean(), "all": u.redistribute([None])}, path)
        loaded = np.zeros_like(u)
        mpistrat.training.load({"u": loaded}, path)
        assert loaded.gather().tolist() == [*range(9)]
        with mpistrat.data.Writer(tmp_path / "steps.h5", strategy=strategy) as writer:
            writer.append("u", u)
    if SIZE > 2:
        message = r"fix: make it with a strategy .*comm=mesh\.parent"
        with mpistrat.data.Writer(tmp_path / "all.h5") as writer, pytest.raises(ValueError, match=message):
            writer.append("u", u)
        with mpistrat.MultiWorkerMirroredStrategy().scope(), pytest.raises(ValueError, match=message):
            mpistrat.training.save({"u": u}, path)


@pytest.mark.four_ranks
def test_inner_axes_stay_on_a_node():
    if SIZE != 4:
        pytest.skip("for four ranks")
    for layout in layouts("001100", "010100"):
        comm = on_nodes(layout)
        try:
            mesh = Mesh(comm=comm, replica=2, model=2)
            assert len({layout[rank] for rank in mesh.ranks[mesh.coordinates["replica"]]}) == 1
        finally:
            comm.Free()


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({}, ValueError, "at least one axis"),
        ({"x": 7}, ValueError, r"their product must be .* give comm="),
        ({"x": -1, "y": -1}, ValueError, "only one axis"),
        ({"x": 0}, ValueError, "at least 1, or -1"),
        ({"x": 1.0}, TypeError, "must be an int"),
    ],
)
def test_wrong_sizes(axes, error, message):
    with pytest.raises(error, match=message):
        Mesh(**axes)


def strategy_of(inner):
    if SIZE % inner:
        pytest.skip(f"for a multiple of {inner} ranks")
    mesh = Mesh(replica=-1, model=inner)
    return mesh, mpistrat.MultiWorkerMirroredStrategy(mesh=mesh)


@pytest.mark.four_ranks
@pytest.mark.parametrize("inner", [1, 2])
def test_replicas_of_several_ranks(inner, tmp_path):
    mesh, strategy = strategy_of(inner)
    replica, place = mesh.coordinates["replica"], mesh.coordinates["model"]
    assert strategy.num_replicas_in_sync == SIZE // inner
    assert strategy.is_chief == (replica == place == 0) == (mesh.ranks.flat[0] == RANK)
    number = strategy.run(lambda: mpistrat.get_replica_context().replica_id_in_sync_group)
    assert number == replica
    # Values meet those of the same place.
    total = strategy.reduce("SUM", np.array([10.0 * place + 1, replica]), axis=None)
    count = SIZE // inner
    assert total.tolist() == [count * (10.0 * place + 1), sum(range(count))]
    # A cut array is that of the replica.
    gathered = strategy.run(
        lambda: ShardedArray.from_array(np.full(4, replica), mesh=mesh, axes=["model"]).gather().tolist()
    )
    assert gathered == [replica] * 4
    # All ranks of a replica have its rows.
    dataset = mpistrat.data.Dataset.range(12).shuffle(12).batch(6)  # of a seed that the ranks draw
    batches = strategy.experimental_distribute_dataset(dataset)
    rows = [batch.tolist() for batch in batches]
    assert mesh.comm("model").allgather(rows) == [rows] * inner
    everything = mesh.comm("replica").allgather(rows)
    assert sorted(row for each in everything for batch in each for row in batch) == [*range(12)]
    with strategy.scope():
        v = mpistrat.Variable(np.arange(3.0), aggregation=mpistrat.VariableAggregation.MEAN)
    strategy.run(lambda: v.assign(v + 1))
    mpistrat.training.save([v], tmp_path / "v.h5")
    v.assign(np.zeros(3))
    mpistrat.training.load([v], tmp_path / "v.h5")
    assert v.read_value().tolist() == [1, 2, 3]
    mpistrat.data.write_hdf5(tmp_path / "rows.h5", {"rank": np.array([RANK])}, strategy=strategy)
    assert sorted(each.item() for each in mpistrat.data.Dataset.from_hdf5(tmp_path / "rows.h5", "rank").batch(1)) == [
        *range(SIZE)
    ]
    writer = mpistrat.summary.create_file_writer(tmp_path / "summaries")
    with writer.as_default(step=0):
        wrote = strategy.run(lambda: mpistrat.summary.scalar("x", 1.0))
    writer.close()
    assert mesh.parent.allgather(wrote).count(True) == 1
    assert strategy.agree(True)
    assert not strategy.agree(RANK != SIZE - 1)  # one rank of one replica


@pytest.mark.four_ranks
def test_a_perceptron_over_two_ranks(tmp_path):
    """The hidden layer is cut over the ranks of a replica; two replicas share the rows; weights as on one rank."""
    mesh, strategy = strategy_of(2)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)), rng.normal(size=(8, 1))
    first, second = rng.normal(size=(5, 6)), rng.normal(size=(6, 1))

    def gradients(first, second, x, y, total):
        """Gradients of the squared error of ``tanh(x @ first) @ second``; ``total`` adds what parts give."""
        hidden = np.tanh(x @ first)
        error = (total(hidden @ second) - y) / 8
        return x.T @ ((error @ second.T) * (1 - hidden**2)), hidden.T @ error

    whole = [first.copy(), second.copy()]
    for _ in range(20):
        for weights, gradient in zip(whole, gradients(*whole, x, y, lambda part: part), strict=True):
            weights -= 0.1 * gradient
    half = slice(3 * mesh.coordinates["model"], 3 * mesh.coordinates["model"] + 3)
    rows = np.array_split(np.arange(8), strategy.num_replicas_in_sync)[mesh.coordinates["replica"]]
    with strategy.scope():
        weights = [mpistrat.Variable(each) for each in (first[:, half], second[half])]
        optimizer = mpistrat.optimizers.SGD(0.1)

    def step():
        values = [each.read_value() for each in weights]
        got = gradients(*values, x[rows], y[rows], mesh.comm("model").allreduce)
        optimizer.apply_gradients(zip(got, weights, strict=True))

    for _ in range(20):
        strategy.run(step)
    with pytest.raises(ValueError, match="are not the same on all ranks"):
        mpistrat.training.save(weights, tmp_path / "half.h5")
    np.testing.assert_allclose(weights[0].read_value(), whole[0][:, half], rtol=1e-6)
    np.testing.assert_allclose(weights[1].read_value(), whole[1][half], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": 3}, TypeError, "mesh must be a Mesh"),
        ({"mesh": {"x": -1}}, ValueError, "the mesh has no axis 'replica'"),
        ({"mesh": {"replica": -1}, "virtual_replicas": 8}, ValueError, "leave out comm and virtual_replicas"),
    ],
)
def test_wrong_strategies(options, error, message):
    if isinstance(options["mesh"], dict):
        options = {**options, "mesh": Mesh(**options["mesh"])}
    with pytest.raises(error, match=message):
        mpistrat.MultiWorkerMirroredStrategy(**options)
