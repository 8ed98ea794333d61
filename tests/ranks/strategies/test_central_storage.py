"""CentralStorageStrategy: one copy of each variable, against a serial oracle in NumPy."""

import copy

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat import IndexedSlices, PerReplica, VariableAggregation, VariableSynchronization
from mpistrat.experimental import CentralStorageStrategy

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SUM, MEAN, FIRST = VariableAggregation.SUM, VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA
SHAPES = [(), (3,), (41, 17), (0, 4), (300, 401)]


@pytest.fixture
def central():
    return CentralStorageStrategy()


def variable(strategy, value, dtype=None, **options):
    with strategy.scope():
        return mpistrat.Variable(value, dtype=dtype, **options)


def combined(aggregation, values):
    """What the values of all replicas become."""
    if aggregation is FIRST:
        return values[0]
    return sum(values) if aggregation is SUM else sum(values) / len(values)


def everywhere(value):
    """The value on every rank, which must be the same."""
    told = MPI.COMM_WORLD.allgather(value)
    for other in told:
        np.testing.assert_array_equal(other, told[0])
    return told[0]


class TestWhatItIs:
    def test_properties(self, central):
        assert central.num_replicas_in_sync == SIZE
        assert central.cluster_resolver is None
        assert central.extended.worker_devices == central.extended.parameter_devices == ("cpu:0",)
        assert central.extended.should_save_summary == (RANK == 0)
        assert variable(central, 1.0).device == "cpu:0"
        assert f"replicas={SIZE}" in repr(central)
        with central.scope():
            assert mpistrat.get_strategy() is central
            assert mpistrat.in_cross_replica_context()

    def test_devices(self):
        strategy = CentralStorageStrategy(["cpu:0"] * SIZE, "/cpu:0")
        assert strategy.extended.parameter_devices == ("cpu:0",)
        assert CentralStorageStrategy(comm=MPI.COMM_SELF).num_replicas_in_sync == 1

    def test_version_1(self):
        strategy = mpistrat.compat.v1.experimental.CentralStorageStrategy()
        assert isinstance(strategy, CentralStorageStrategy)
        assert strategy.reduce("SUM", 1.0) == SIZE
        dataset = mpistrat.data.Dataset.from_arrays(np.arange(8.0)).batch(4)
        assert len(list(strategy.make_dataset_iterator(dataset))) == 2

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            (("cpu:0",), TypeError, "not the string 'cpu:0'"),
            ((["cpu:0"] * (SIZE + 1),), ValueError, f"names {SIZE + 1} devices for {SIZE} replicas"),
            (([],), ValueError, "names 0 devices"),
            ((["moon"] * SIZE,), ValueError, "names no device"),
            (([3] * SIZE,), TypeError, "not 3"),
            ((["gpu:9"] * SIZE,), RuntimeError, "cuda:9"),
            ((None, 3), TypeError, "not 3"),
            ((None, "moon"), ValueError, "names no device"),
        ],
    )
    def test_wrong_arguments(self, central, arguments, error, text):
        with pytest.raises(error, match=text):
            CentralStorageStrategy(*arguments)
        assert central.agree(True)

    def test_variables_on_a_gpu(self, central):
        with pytest.raises(ValueError if SIZE > 1 else RuntimeError, match=r"cuda:9|'cuda:9'.*memory of the host"):
            CentralStorageStrategy(None, "cuda:9")
        assert central.agree(True)

    @pytest.mark.four_ranks
    @pytest.mark.parametrize("layout", layouts("0111", "0012", "0123"))
    def test_several_nodes(self, layout):
        comm = on_nodes(layout)
        if len({*layout}) == 1:
            assert CentralStorageStrategy(comm=comm).num_replicas_in_sync == SIZE
        else:
            with pytest.raises(RuntimeError, match=r"on \d nodes: use MultiWorkerMirroredStrategy"):
                CentralStorageStrategy(comm=comm)
        comm.Free()


class TestOnePlace:
    def test_reads_are_views_of_the_same_memory(self, central):
        v = variable(central, np.zeros((5, 3)))
        before = np.asarray(v)
        v.assign(np.ones((5, 3)))
        np.testing.assert_array_equal(before, 1.0)  # nothing was copied to this rank
        with pytest.raises(ValueError, match="read-only"):
            before[0] = 2.0

    def test_only_rank_0_can_write_to_it(self, central):
        array = central.experimental_local_results(variable(central, [1.0, 2.0]))[0].own_copy()
        assert array.flags.writeable == (RANK == 0)

    def test_initial_value_is_that_of_replica_0(self, central):
        assert float(variable(central, float(RANK))) == 0.0

    @pytest.mark.ranks(min=2)
    def test_initial_values_that_differ(self, central):
        with pytest.raises(ValueError, match="a central variable"):
            variable(central, np.zeros(3 if RANK else 2))
        assert central.agree(True)

    def test_copies_are_variables_of_their_own(self, central):
        v = variable(central, [1.0, 2.0])
        other = copy.deepcopy(v)
        other.assign_add([1.0, 1.0])
        assert (v.numpy().tolist(), other.numpy().tolist()) == ([1.0, 2.0], [2.0, 3.0])

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", ["float32", "int64", "complex128", "bool", "uint8"])
    def test_shapes_and_dtypes(self, central, shape, dtype):
        value = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)
        v = variable(central, value)
        assert (v.shape, v.dtype) == (shape, dtype)
        v.assign(~value if dtype == "bool" else value + np.ones((), dtype))
        np.testing.assert_array_equal(everywhere(v.numpy()), ~value if dtype == "bool" else value + 1)


class TestReplicas:
    @pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
    @pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_assignments(self, central, aggregation, method, shape):
        given = [np.random.default_rng([each, *shape]).standard_normal(shape) for each in range(SIZE)]
        start = np.full(shape, 10.0)
        v = variable(central, start, aggregation=aggregation)
        seen = central.run(lambda: getattr(v, method)(given[RANK]).numpy())
        total = combined(aggregation, given)
        expected = {"assign": total, "assign_add": start + total, "assign_sub": start - total}[method]
        np.testing.assert_allclose(seen, expected, rtol=1e-13, atol=1e-13)
        everywhere(seen)

    @pytest.mark.parametrize("method", ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div"])
    def test_rows(self, central, method):
        """Rows of all replicas count, repeated ones too."""
        v = variable(central, np.full((7, 2), 8.0), aggregation=SUM)
        given = [(np.array([[2.0, 4.0]] * 3), np.array([each % 7, 6, 6])) for each in range(SIZE)]
        central.run(lambda: getattr(v, method)(IndexedSlices(*given[RANK])))
        expected = np.full((7, 2), 8.0)
        ufunc = {"scatter_add": np.add, "scatter_sub": np.subtract, "scatter_mul": np.multiply}
        for values, indices in given:
            ufunc.get(method, np.true_divide).at(expected, indices, values)
        np.testing.assert_allclose(everywhere(v.numpy()), expected, rtol=1e-13)

    @pytest.mark.parametrize("method", ["scatter_min", "scatter_max", "scatter_update"])
    def test_rows_of_the_first_replica(self, central, method):
        v = variable(central, np.full((4, 1), 2.0), aggregation=FIRST)
        rows = IndexedSlices(np.array([[3.0 + RANK], [1.0]]), np.array([0, 3]))
        central.run(lambda: getattr(v, method)(rows))
        first, last = {"scatter_min": (2, 1), "scatter_max": (3, 2), "scatter_update": (3, 1)}[method]
        assert everywhere(v.numpy()).ravel().tolist() == [first, 2.0, 2.0, last]

    def test_without_aggregation(self, central):
        v = variable(central, 10.0)
        if SIZE == 1:
            central.run(lambda: v.assign_add(1.0))
            assert float(v) == 11.0
            return
        with pytest.raises(ValueError, match="needs to know how the replicas' values"):
            central.run(lambda: v.assign_add(1.0))
        assert float(v) == 10.0
        assert central.agree(True)

    def test_synchronization_on_read_makes_no_difference(self, central):
        v = variable(central, 0.0, synchronization=VariableSynchronization.ON_READ, aggregation=SUM)
        for _ in range(3):
            central.run(lambda: v.assign_add(RANK + 1.0))
        assert float(v) == 3 * SIZE * (SIZE + 1) / 2
        assert central.run(lambda: float(v)) == float(v)

    def test_a_variable_as_value(self, central):
        """The memory that is read is the memory that is written."""
        v = variable(central, np.arange(1000.0), aggregation=SUM)
        central.run(lambda: v.assign_add(v))
        np.testing.assert_array_equal(everywhere(v.numpy()), np.arange(1000.0) * (1 + SIZE))

    def test_many_steps(self, central):
        """A random program, step by step as NumPy does it."""
        draw = np.random.default_rng(7)
        state = {name: np.zeros(11) for name in (SUM, MEAN, FIRST)}
        made = {name: variable(central, value, aggregation=name) for name, value in state.items()}
        for _ in range(150):
            aggregation = list(state)[draw.integers(3)]
            method = ["assign", "assign_add", "assign_sub"][draw.integers(3)]
            given = draw.integers(-9, 10, (SIZE, 11)).astype(float)
            across = bool(draw.integers(2))
            v = made[aggregation]
            if across:
                getattr(v, method)(given[0])
                total = given[0]
            else:
                central.run(lambda v=v, method=method, given=given: getattr(v, method)(given[RANK]))
                total = combined(aggregation, list(given))
            old = state[aggregation]
            state[aggregation] = {"assign": total, "assign_add": old + total, "assign_sub": old - total}[method]
            np.testing.assert_allclose(v.numpy(), state[aggregation], rtol=1e-12, atol=1e-12)

    def test_a_read_never_sees_half_of_a_write(self, central):
        v = variable(central, np.zeros(200_000), aggregation=FIRST)
        for step in range(40):
            whole = np.asarray(v)
            assert whole[0] == whole[-1] == step
            assert (whole == step).all()
            central.run(lambda: v.assign_add(np.ones(200_000)))


class TestAcrossReplicas:
    def test_assignments_count_once(self, central):
        v = variable(central, [1.0, 2.0], aggregation=SUM)
        v.assign([5.0, 6.0])
        v.assign_add([2.0, 2.0]).assign_sub([1.0, 1.0])
        v[0] = 9.0
        v += 1.0
        assert everywhere(v.numpy()).tolist() == [10.0, 8.0]
        v.assign(variable(central, [3.0, 4.0]))
        assert everywhere(v.numpy()).tolist() == [3.0, 4.0]

    def test_in_no_scope(self, central):
        v = variable(central, 1.0)
        v.assign_add(2.0)
        with central.scope():
            v.assign_add(2.0)
        assert float(v) == 5.0

    @pytest.mark.parametrize(
        ("method", "value", "error"),
        [
            ("assign", np.zeros(3), ValueError),
            ("assign_add", np.zeros(2, complex), TypeError),
            ("assign", PerReplica((np.zeros(2),)), ValueError),
            ("scatter_add", IndexedSlices(np.zeros(1), np.array([2])), ValueError),
        ],
    )
    def test_values_that_do_not_fit(self, central, method, value, error):
        v = variable(central, np.zeros(2))
        with pytest.raises(error):
            getattr(v, method)(value)
        assert v.numpy().tolist() == [0.0, 0.0]
        assert central.agree(True)

    @pytest.mark.ranks(min=2)
    @pytest.mark.parametrize("replica", [False, True])
    def test_a_value_that_does_not_fit_on_one_rank(self, central, replica):
        """All ranks raise, nothing is written, and the ranks stay in step."""
        v = variable(central, np.zeros(2), aggregation=SUM)
        for odd in range(SIZE):
            value = np.zeros(3 if odd == RANK else 2)
            with pytest.raises(RuntimeError if odd != RANK else (RuntimeError, ValueError)):
                central.run(lambda value=value: v.assign(value)) if replica else v.assign(value)
            assert v.numpy().tolist() == [0.0, 0.0]
            assert central.agree(True)

    @pytest.mark.ranks(min=2)
    def test_ranks_that_write_different_variables(self, central):
        v, w = variable(central, 1.0, name="v"), variable(central, 1.0, name="w")
        for write in (lambda x: x.assign(2.0), lambda x: central.extended.update(x, lambda a: a.assign(2.0))):
            with pytest.raises(ValueError, match=r"of a variable [vw]|update [vw]"):
                write(v if RANK else w)
        assert float(v) == float(w) == 1.0
        assert central.agree(True)


class TestUpdate:
    def test_the_function_is_called_once(self, central):
        v, calls = variable(central, 1.0), []
        central.extended.update(v, lambda a, b: (calls.append(1), a.assign_add(b))[1], args=(2.0,))
        assert MPI.COMM_WORLD.allgather(len(calls)) == [1] + [0] * (SIZE - 1)
        assert float(v) == 3.0

    def test_results_are_the_same_on_all_ranks(self, central):
        v, w = variable(central, [1.0, 2.0]), variable(central, 5.0)
        update = central.extended.update
        own = central.experimental_local_results(v)[0]
        assert update(v, lambda a: a.assign_add([1.0, 1.0])).values[0] is own
        assert update(v, lambda a: None, group=False) == (None,)
        found = update(v, lambda a, x: {"rank": RANK, "a": [a, x], "w": w, "v": v}, args=(3,)).values[0]
        assert (found["rank"], found["a"][1], float(found["w"])) == (0, 3, 5.0)
        assert found["a"][0] is own
        np.testing.assert_array_equal(found["v"], [2.0, 3.0])
        total = update(v, lambda a: a.read_value() * 2, group=False)[0]
        np.testing.assert_array_equal(total, [4.0, 6.0])
        assert central.extended.update_non_slot(None, lambda: RANK, group=False) == (0,)

    def test_in_a_merge_call(self, central):
        v = variable(central, 1.0)

        def merge(strategy, gradient):
            total = strategy.extended.reduce_to("MEAN", gradient, v)
            strategy.extended.update(v, lambda a, t: a.assign_sub(t), args=(total,))

        for _ in range(4):
            central.run(lambda: mpistrat.get_replica_context().merge_call(merge, args=(RANK + 1.0,)))
        assert everywhere(float(v)) == 1.0 - 4 * (SIZE + 1) / 2

    def test_other_variables_are_written_too(self, central):
        v, w = variable(central, 1.0), variable(central, np.zeros(3))
        central.extended.update(v, lambda a: (w.assign_add(np.ones(3)), None)[1])
        assert everywhere(w.numpy()).tolist() == [1.0] * 3

    @pytest.mark.parametrize("error", [KeyError, ZeroDivisionError, MemoryError])
    def test_a_function_that_raises(self, central, error):
        def fail(a):
            raise error("on purpose")

        v = variable(central, 1.0)
        with pytest.raises(error, match="on purpose"):
            central.extended.update(v, fail)
        v.assign_add(1.0)
        assert everywhere(float(v)) == 2.0

    @pytest.mark.ranks(min=2)
    def test_a_result_that_cannot_be_sent(self, central):
        v = variable(central, 1.0)
        with pytest.raises(TypeError, match=r"runs on rank 0, and its result cannot be sent"):
            central.extended.update(v, lambda a: lambda: None)
        assert central.agree(True)

    @pytest.mark.ranks(min=2)
    def test_a_function_that_communicates(self, central):
        """It would wait for ranks that wait for it: all raise."""
        v = variable(central, 1.0)
        with pytest.raises(RuntimeError, match="the ranks met in different collectives"):
            central.extended.update(v, lambda a: central.barrier())
        assert central.agree(True)

    def test_refusals(self, central):
        other = CentralStorageStrategy()
        with pytest.raises(ValueError, match="was created by"):
            central.extended.update(variable(other, 1.0), lambda a: a)
        with pytest.raises(TypeError, match="takes a variable"):
            central.extended.update(3.0, lambda a: a)
        assert central.agree(True)


class TestWhatStandsOnIt:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: mpistrat.optimizers.SGD(0.1),
            lambda: mpistrat.optimizers.SGD(0.1, momentum=0.9),
            lambda: mpistrat.optimizers.Adam(0.1, amsgrad=True),
            lambda: mpistrat.optimizers.AdamW(0.1),
        ],
    )
    def test_optimizers(self, central, make):
        """As one process that adds up the gradients of all replicas."""

        def gradients(step, rank):
            draw = np.random.default_rng([step, rank])
            rows = IndexedSlices(draw.standard_normal((3, 4)), draw.integers(0, 6, 3))
            return draw.standard_normal((41, 3)), draw.standard_normal(()), rows

        def train(strategy, gradients_of):
            start = np.ones((41, 3)), 2.0, np.ones((6, 4))
            weights, optimizer = [variable(strategy, each) for each in start], make()
            for step in range(4):
                pairs = list(zip(gradients_of(step), weights, strict=True))
                strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
            assert optimizer.iterations == 4
            return [each.numpy() for each in (*weights, *optimizer.variables)]

        def added_up(step):
            dense, number, rows = zip(*(gradients(step, rank) for rank in range(SIZE)), strict=True)
            whole = np.zeros((6, 4))
            for each in rows:
                np.add.at(whole, each.indices, each.values)
            return sum(dense), sum(number), whole

        found = train(central, lambda step: gradients(step, RANK))
        alone = train(mpistrat.OneDeviceStrategy("cpu:0"), added_up)
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
            everywhere(one)

    def test_checkpoints(self, central, tmp_path):
        """What is saved here is loaded into mirrored variables, and back."""
        mirrored = mpistrat.MultiWorkerMirroredStrategy()
        start = np.arange(12.0).reshape(3, 4)
        here = variable(central, start, name="w")
        mpistrat.training.save([here], tmp_path / "central.h5")
        there = variable(mirrored, np.zeros((3, 4)), name="w")
        mpistrat.training.load([there], tmp_path / "central.h5")
        np.testing.assert_array_equal(there.numpy(), start)
        there.assign(start * 2)
        mpistrat.training.save([there], tmp_path / "mirrored.h5")
        mpistrat.training.load([here], tmp_path / "mirrored.h5")
        np.testing.assert_array_equal(everywhere(here.numpy()), start * 2)

    def test_metrics(self, central):
        """The mean is over all examples, however many each replica has."""
        with central.scope():
            mean, accuracy = mpistrat.metrics.Mean(), mpistrat.metrics.SparseCategoricalAccuracy()
        rows = [np.arange(each + 1.0) + each for each in range(SIZE)]
        for _ in range(2):
            central.run(lambda: mean.update_state(rows[RANK]))
        assert float(mean.result()) == np.concatenate(rows).mean()
        labels = np.arange(RANK + 2) % 2
        central.run(lambda: accuracy.update_state(labels, np.eye(2)[[0] * len(labels)]))
        everyone = np.concatenate([np.arange(each + 2) % 2 for each in range(SIZE)])
        assert float(accuracy.result()) == (everyone == 0).mean()
        mean.reset_state()
        assert float(mean.result()) == 0.0

    def test_datasets_and_values(self, central):
        dataset = mpistrat.data.Dataset.from_arrays(np.arange(24.0)).batch(12)
        sums = [
            central.reduce("SUM", central.run(lambda x: x.sum(), args=(batch,)), axis=None)
            for batch in central.experimental_distribute_dataset(dataset)
        ]
        assert sums == [sum(range(12)), sum(range(12, 24))]
        value = central.experimental_distribute_values_from_function(lambda c: np.full(2, c.replica_id_in_sync_group))
        assert central.gather(value, axis=0).tolist() == [rank for rank in range(SIZE) for _ in range(2)]
