"""Programs written against ``tf.distribute`` give the answers that TensorFlow gives."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from conformance.checkpoints import CHECKPOINTS
from conformance.layers import LAYERS, LOGICAL
from conformance.optimizers import OPTIMIZERS
from conformance.scenarios import RESOLVER_SCENARIOS, SCENARIOS
from conformance.storage import CENTRAL
from conformance.tensorboard_files import read
from layouts import on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import Mesh
from mpistrat.strategies.tpu import LogicalDevices
from mpistrat.tpu.experimental import DeviceAssignment, Topology

SIZE = MPI.COMM_WORLD.size
RECORDS = Path(__file__).parents[1] / "conformance"
EXPECTED = json.loads((RECORDS / "expected.json").read_text())
EXPECTED_CHECKPOINTS = json.loads((RECORDS / "expected_checkpoints.json").read_text())
EXPECTED_LAYERS = json.loads((RECORDS / "expected_layers.json").read_text())
EXPECTED_OPTIMIZERS = json.loads((RECORDS / "expected_optimizers.json").read_text())
EXPECTED_STORAGE = json.loads((RECORDS / "expected_storage.json").read_text())


@functools.cache
def options_of_two_replicas():
    """What a strategy over all ranks of an even number is given. Of three, the last one plays two by itself."""
    if SIZE < 4:
        comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
        return {"comm": comm, **({"virtual_replicas": 2} if comm.size == 1 else {})}
    return {"mesh": Mesh(comm=on_nodes("00112233"[:SIZE]), replica=2, inside=-1)}


class World:
    """What a scenario is given: two ranks, one replica each. Or one rank with two devices, as TensorFlow had.

    Or two replicas of several ranks, on nodes of two.
    """

    dist = mpistrat
    end = StopIteration
    optimizers = mpistrat.optimizers

    def __init__(self):
        if SIZE == 1:
            self.sync, self.other = (mpistrat.MirroredStrategy(devices=["cpu:0", "cpu:1"]) for _ in range(2))
        else:
            made = options_of_two_replicas()
            self.sync, self.other = (mpistrat.MultiWorkerMirroredStrategy(**made) for _ in range(2))
        self.central = mpistrat.experimental.CentralStorageStrategy()
        self.one = mpistrat.OneDeviceStrategy("cpu:0")
        self.Variable = mpistrat.Variable
        self.Sync = mpistrat.VariableSynchronization
        self.Agg = mpistrat.VariableAggregation

    def array(self, x, dtype):
        return np.array(x, dtype)  # a new one: the same object from all replicas is not wrapped

    def py(self, x):
        return np.asarray(x).tolist()

    def each(self, strategy, value):
        mine = [self.py(result) for result in strategy.experimental_local_results(value)]
        return [result for of_rank in strategy.comm.allgather(mine) for result in of_rank]

    def dataset(self, x):
        return mpistrat.data.Dataset.from_arrays(np.asarray(x, "float32"))

    def apply(self, optimizer, pairs, **options):
        optimizer.apply_gradients(pairs, **options)

    def raises(self, fn):
        try:
            fn()
        except Exception as error:
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return None


class WithFolders(World):
    """What a scenario of checkpoints is given."""

    train = mpistrat.training

    def __init__(self, path):
        super().__init__()
        self._path, self._folders = path, 0

    def folder(self):
        self._folders += 1
        return str(self._path / str(self._folders))

    def stored(self, folder):
        return sorted(each.name for each in Path(folder).iterdir() if each.name != "checkpoint")

    def replica(self):
        return mpistrat.get_replica_context().replica_id_in_sync_group

    def distributed(self, x):  # batches of one row, of which each replica gets the rows of another dataset
        dataset = self.dataset(x)
        return self.sync.distribute_datasets_from_function(lambda context: dataset)


class WithLayers(WithFolders):
    """What a scenario of layers and summaries is given."""

    def rows(self, x, width):
        return np.array(x, "float32").reshape(-1, width)

    def batch_norm(self, strategy, width, **options):
        with strategy.scope():
            layer = mpistrat.training.BatchNormalization(**options)
            layer.build((None, width))
        return layer

    def norm_and_gradients(self, layer, x, gradient):
        y = layer(x, training=True)
        dx, gradients = layer.backward(gradient)
        return (y, dx, *gradients)

    def norm_inference(self, layer, x):
        return layer(x)

    def norm_state(self, strategy, layer):
        return [self.py(layer.moving_mean), self.py(layer.moving_variance)]

    def summaries(self, strategy, fn, x):
        folder = self.folder()
        writer = mpistrat.summary.create_file_writer(folder)
        with writer.as_default():
            written = strategy.run(lambda value: fn(mpistrat.summary.scalar, value), args=(x,))
        writer.close()
        strategy.barrier()
        points, by_replica = None, self.each(strategy, written)
        if strategy.is_chief:  # only one rank loads the reader
            points = [[name, value, at] for at, name, value in read(Path(folder))]
        mesh = getattr(strategy, "mesh", None)
        return (strategy.comm if mesh is None else mesh.parent).bcast([by_replica, points])


def test_every_answer_has_a_scenario():
    assert {*SCENARIOS, *RESOLVER_SCENARIOS} == set(EXPECTED)
    assert set(OPTIMIZERS) == set(EXPECTED_OPTIMIZERS)
    assert set(CHECKPOINTS) == set(EXPECTED_CHECKPOINTS)
    assert {*LAYERS, *LOGICAL} == set(EXPECTED_LAYERS)


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_answer(name):
    answer = json.loads(json.dumps(SCENARIOS[name](World())))
    assert answer == EXPECTED[name]


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("name", CENTRAL)
def test_answer_of_central_storage(name):
    answer = json.loads(json.dumps(CENTRAL[name](World())))
    assert answer == EXPECTED_STORAGE[name]


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_answer_of_a_checkpoint(name, tmp_path):
    if name == "checkpoint_of_an_iterator" and MPI.COMM_WORLD.size == 1:
        pytest.skip("the answer is that of two workers")
    answer = json.loads(json.dumps(CHECKPOINTS[name](WithFolders(tmp_path))))
    assert answer == EXPECTED_CHECKPOINTS[name]


@pytest.mark.four_ranks
@pytest.mark.parametrize("name", LAYERS)
def test_answer_of_a_layer(name, tmp_path):
    folder = tmp_path / str(MPI.COMM_WORLD.rank // 2 if SIZE == 3 else 0)
    answer = json.loads(json.dumps(LAYERS[name](WithLayers(folder))))
    np.testing.assert_equal(answer, _close(answer, EXPECTED_LAYERS[name]))


@pytest.mark.four_ranks
@pytest.mark.parametrize("name", LOGICAL)
def test_answer_of_logical_devices(name):
    """They are ranks where these make up replicas of so many, and else only counted."""

    def logical(count):
        if SIZE % count:
            return LogicalDevices(count)
        assignment = DeviceAssignment.build(Topology(SIZE), [1, 1, 1, count], num_replicas=SIZE // count)
        return mpistrat.TPUStrategy(experimental_device_assignment=assignment)

    world = World()
    world.logical = logical
    assert json.loads(json.dumps(LOGICAL[name](world))) == EXPECTED_LAYERS[name]


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_answer_of_an_optimizer(name):
    answer = json.loads(json.dumps(OPTIMIZERS[name](World())))
    np.testing.assert_equal(answer, _close(answer, EXPECTED_OPTIMIZERS[name]))


def _close(answer, expected):
    """What is expected, with the answer in place of numbers that it comes close to."""
    if isinstance(expected, list) and isinstance(answer, list) and len(expected) == len(answer):
        return [_close(mine, other) for mine, other in zip(answer, expected, strict=True)]
    if isinstance(expected, float) and isinstance(answer, float) and abs(answer - expected) < 2e-4:
        return answer
    return expected
