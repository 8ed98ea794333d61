"""The learning rate is a variable of the optimizer: saved, restored, copied, and compared between ranks."""

import copy
import functools
import pickle

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import training
from mpistrat.experimental import CommunicationOptions, MeshAxis, PreemptionCheckpointHandler
from mpistrat.optimizers import LARS, SGD, Adam, schedules
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import Checkpoint, CheckpointManager

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
SUM = CommunicationOptions(implementation="ordered")
STRATEGIES = {
    "one replica on each rank": lambda: mpistrat.MultiWorkerMirroredStrategy(communication_options=SUM),
    "virtual replicas": lambda: mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=2 * SIZE),
    "central storage": mpistrat.experimental.CentralStorageStrategy,
}


@pytest.fixture(params=list(STRATEGIES))
def any_strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def strategy():
    return STRATEGIES["one replica on each rank"]()


def made(strategy, rate=0.5, kind=SGD, build=True, **more):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v")
        optimizer = kind(rate, **more)
        if build:
            optimizer.build([v])
    return v, optimizer


def step(strategy, v, optimizer):
    strategy.run(lambda: optimizer.apply_gradients([(1.0 / strategy.num_replicas_in_sync, v)]))
    return float(v)


def shared(tmp_path, name):
    return WORLD.bcast(str(tmp_path / name))


# --- what it is ----------------------------------------------------------------------------------------


def test_it_is_the_second_variable_and_a_float(any_strategy):
    _, optimizer = made(any_strategy, 0.5, Adam)
    assert [each.name for each in optimizer.variables][:2] == ["Adam/iterations", "Adam/learning_rate"]
    assert isinstance(optimizer.learning_rate, float)
    optimizer.learning_rate.assign(0.25)
    assert optimizer.learning_rate == float(optimizer.variables[1]) == optimizer.learning_rate.numpy() == 0.25
    for each in (copy.deepcopy(optimizer.learning_rate), pickle.loads(pickle.dumps(optimizer.learning_rate))):
        assert type(each) is float
        assert each == 0.25
    assert Adam(**optimizer.get_config()).get_config() == optimizer.get_config()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="must not be negative"):
            optimizer.learning_rate.assign(wrong)


def test_each_change_counts_at_the_next_step(any_strategy):
    """Numbers, a schedule in place of a number, and a number in place of a schedule."""
    v, optimizer = made(any_strategy, 0.5, build=False)
    expected = 1.0
    for rate in (0.5, 0.125, schedules.InverseTimeDecay(1.0, 1, 1.0), None, 0.25, 0.25):
        if rate is not None:
            optimizer.learning_rate = rate
        number = optimizer.iterations
        expected -= 1 / (1 + number) if rate is None or callable(rate) else rate
        assert step(any_strategy, v, optimizer) == pytest.approx(expected, rel=1e-12)
    assert optimizer.learning_rate == 0.25


def test_a_schedule_has_no_variable_and_a_number_after_it_has_one(any_strategy):
    v, optimizer = made(any_strategy, schedules.ExponentialDecay(0.5, 1, 0.5))
    step(any_strategy, v, optimizer)
    assert len(optimizer.variables) == 1
    optimizer.learning_rate = 0.125
    assert step(any_strategy, v, optimizer) == 0.375
    assert [each.name for each in optimizer.variables] == ["SGD/iterations", "SGD/learning_rate"]


@pytest.mark.parametrize("kind", [SGD, Adam, LARS])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_weights_have_the_bits_of_a_function_that_returns_the_rate(strategy, kind, dtype):
    rows = np.random.default_rng([3, RANK]).standard_normal((4, 3, 5)).astype(dtype)
    found = []
    for rate in (0.1, lambda number: 0.1):
        with strategy.scope():
            v = mpistrat.Variable(np.ones((3, 5), dtype))
        optimizer = kind(rate)
        for row in rows:
            strategy.run(optimizer.apply_gradients, args=([(row, v)],))
        found.append(v.read_value().tobytes())
    assert found[0] == found[1]


# --- files and copies ----------------------------------------------------------------------------------


def by_save(v, optimizer, path):
    training.save([v, *optimizer.variables], path)


def by_load(v, optimizer, path):
    training.load([v, *optimizer.variables], path)


def by_checkpoint(v, optimizer, path):
    Checkpoint(v=v, o=optimizer).write(path)


def from_checkpoint(v, optimizer, path):
    Checkpoint(v=v, o=optimizer).read(path).assert_consumed()


def by_manager(v, optimizer, path):
    CheckpointManager(Checkpoint(v=v, o=optimizer), path + ".d", max_to_keep=1).save()


def from_manager(v, optimizer, path):
    assert CheckpointManager(Checkpoint(v=v, o=optimizer), path + ".d", max_to_keep=1).restore_or_initialize()


WAYS = {
    "save and load": (by_save, by_load),
    "Checkpoint": (by_checkpoint, from_checkpoint),
    "CheckpointManager": (by_manager, from_manager),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_changed_rate_is_restored(strategy, way, options, tmp_path):
    write, read = WAYS[way]
    v, optimizer = made(strategy, 0.5, Adam, **options)
    optimizer.learning_rate = 0.125
    write(v, optimizer, shared(tmp_path, "file"))
    w, other = made(strategy, 0.5, Adam, **options)
    read(w, other, shared(tmp_path, "file"))
    assert other.learning_rate == 0.125
    for _ in range(2):
        assert step(strategy, v, optimizer) == step(strategy, w, other)
    assert float(v) < 1


def test_a_preempted_job_goes_on_with_its_rate(strategy, tmp_path):
    """The handler restores when it is made."""
    v, optimizer = made(strategy)
    optimizer.learning_rate = 0.125
    CheckpointManager(Checkpoint(v=v, o=optimizer), shared(tmp_path, "d"), max_to_keep=1).save()
    w, other = made(strategy)
    PreemptionCheckpointHandler(strategy.cluster_resolver, Checkpoint(v=w, o=other), shared(tmp_path, "d"))
    assert step(strategy, w, other) == 0.875


@pytest.mark.parametrize("way", ["save and load", "Checkpoint"])
def test_files_without_a_rate_leave_that_of_the_program(strategy, way, tmp_path, caplog):
    """Files of an older version, and of an optimizer that had a schedule."""
    write, _ = WAYS[way]
    for name in ("old", "schedule"):
        path = shared(tmp_path, name)
        v, optimizer = made(strategy, 0.125 if name == "old" else schedules.ExponentialDecay(0.125, 1, 1.0))
        v.assign(3.0)
        write(v, optimizer, path)
        if name == "old" and RANK == 0:
            with h5py.File(path, "r+") as file:
                del file["SGD/learning_rate" if way == "save and load" else "o/learning_rate"]
        WORLD.Barrier()
        w, other = made(strategy)
        if way == "save and load":
            by_load(w, other, path)
            assert "has no SGD/learning_rate: the learning rate of the program stays" in caplog.text or RANK
        else:
            status = Checkpoint(v=w, o=other).read(path)
            with pytest.raises(AssertionError, match="lacks 'o/learning_rate'"):
                status.assert_existing_objects_matched()
        assert other.learning_rate == 0.5
        assert step(strategy, w, other) == 2.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_have_a_rate_of_their_own(strategy, copied):
    if copied is not copy.deepcopy:
        pair = SGD(0.5)
        pair.learning_rate = 0.125
        assert copied(pair).learning_rate == 0.125
        return
    v, optimizer = made(strategy)
    optimizer.learning_rate = 0.125
    with strategy.scope():
        w, other = copied((v, optimizer))
    optimizer.learning_rate = 0.25
    assert (step(strategy, v, optimizer), step(strategy, w, other)) == (0.75, 0.875)


# --- ranks that differ ---------------------------------------------------------------------------------


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", [SGD, LARS])
def test_rates_that_differ_at_the_first_step_raise_on_every_rank(strategy, kind):
    for build in (True, False):
        v, optimizer = made(strategy, 0.5 + RANK, kind, build=False)
        with pytest.raises(MismatchError, match=r"learning_rate [01]\.5"):
            optimizer.build([v]) if build else step(strategy, v, optimizer)
        assert float(v) == 1.0
        optimizer.learning_rate = 0.5
        with strategy.scope():
            optimizer.build([v])
        step(strategy, v, optimizer)
        assert len(set(WORLD.allgather(float(v)))) == 1


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", [SGD, LARS])
@pytest.mark.parametrize("value", [0.125, schedules.InverseTimeDecay(0.125, 1, 1.0)], ids=["number", "schedule"])
def test_a_rate_that_one_rank_sets_raises_on_every_rank(strategy, kind, value):
    v, optimizer = made(strategy, 0.5, kind)
    before = step(strategy, v, optimizer)
    if RANK == SIZE - 1:
        optimizer.learning_rate = value
    with pytest.raises((MismatchError, ValueError), match="learning_rate set to"):
        step(strategy, v, optimizer)
    assert float(v) == before
    optimizer.learning_rate = 0.25
    step(strategy, v, optimizer)
    assert len(set(WORLD.allgather(float(v)))) == 1
    assert float(v) < before


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("virtual replicas", {}),
        ("one replica on each rank", {"gradient_accumulation_steps": 2}),
        ("one replica on each rank", {"shard_state": True}),
    ],
    ids=["virtual replicas", "accumulation", "shared out"],
)
def test_a_rate_of_one_rank_with_options(name, options):
    strategy = STRATEGIES[name]()
    v, optimizer = made(strategy, 0.5, **options)
    if RANK == 0:
        optimizer.learning_rate = 0.125
    if "gradient_accumulation_steps" in options:
        step(strategy, v, optimizer)
    with pytest.raises((MismatchError, ValueError), match="learning_rate set to"):
        step(strategy, v, optimizer)
    assert float(v) == 1


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("option", ["momentum", "weight_decay", "clipnorm", "eta"])
def test_other_options_that_differ_raise_on_every_rank(strategy, option):
    v, optimizer = made(strategy, 0.5, LARS, build=False, **{option: 0.5 + 0.25 * (RANK == SIZE - 1)})
    with pytest.raises(MismatchError, match=rf"{option}=0\.75"):
        step(strategy, v, optimizer)
    assert float(v) == 1


class Falling:
    def __init__(self, first):
        self.first, self.log = first, object()  # another object on each rank

    def __call__(self, number):
        return self.first / (number + 1)

    def method(self, number):
        return 0.5


def of_function(last):
    def rate(number):
        return 0.5 if number < 100 else last

    return rate


SCHEDULES = {
    "CosineDecay": lambda differs: schedules.CosineDecay(0.5, 100 + differs),
    "PiecewiseConstantDecay": lambda differs: schedules.PiecewiseConstantDecay(
        [100, 200 + differs], [0.5, 0.25, 0.125]
    ),
    "object": lambda differs: Falling(0.5 + differs),
    "around": lambda differs: of_function(0.25 + differs),
    "default": lambda differs: lambda number, last=0.25 + differs: 0.5 if number < 100 else last,
    "partial": lambda differs: functools.partial(lambda last, number: 0.5, 0.25 + differs),
    "method": lambda differs: Falling(RANK).method if not differs else abs,
    "table": lambda differs: of_function(np.arange(100.0) + differs),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_that_differ_raise_on_every_rank(strategy, name):
    """At the first step, and where a later one is set; equal ones, made on each rank, do not."""
    differing = RANK == SIZE - 1
    v, optimizer = made(strategy, SCHEDULES[name](differing), build=False)
    with pytest.raises(MismatchError, match="learning_rate "):
        step(strategy, v, optimizer)
    optimizer.learning_rate = SCHEDULES[name](False)
    before = step(strategy, v, optimizer)
    assert before == 0.5
    optimizer.learning_rate = SCHEDULES[name](differing)
    with pytest.raises(MismatchError, match="learning_rate set to"):
        step(strategy, v, optimizer)
    assert float(v) == before
    optimizer.learning_rate = SCHEDULES[name](False)
    step(strategy, v, optimizer)
    assert len(set(WORLD.allgather(float(v)))) == 1


@pytest.mark.ranks(min=2)
def test_numbers_of_a_rule_of_the_program_that_differ_raise_on_every_rank(strategy):
    class Scaled(mpistrat.optimizers.Optimizer):
        def __init__(self, scale):
            super().__init__(0.5)
            self.scale, self.rank = scale, RANK

        def update(self, weights, gradient, step, rate, *state):
            weights -= self.scale * rate * gradient

    for differs in (True, False):
        v, optimizer = made(strategy, 1.0 + differs * (RANK == 0), Scaled, build=False)
        if differs:
            with pytest.raises(MismatchError, match="scale="):
                step(strategy, v, optimizer)
        else:
            assert step(strategy, v, optimizer) == 0.5


class Powers(mpistrat.optimizers.Optimizer):
    def __init__(self, scale, power):
        self.scale = scale  # before the base class knows of it
        super().__init__(0.5)
        self.power, self.seconds = power, 0.0

    def update(self, weights, gradient, step, rate, *state):
        weights -= rate * self.scale * gradient**self.power


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("name", "value"), [("scale", 0.25), ("power", 2)])
def test_options_of_a_rule_that_one_rank_changes_raise_on_every_rank(strategy, name, value):
    v, optimizer = made(strategy, 1.0, Powers, build=False, power=1)
    before = step(strategy, v, optimizer)
    optimizer.seconds = float(RANK)  # no argument of the constructor
    if RANK == 0:
        setattr(optimizer, name, value)
    with pytest.raises(MismatchError, match=f"{name} set to {value}"):
        step(strategy, v, optimizer)
    assert float(v) == before
    setattr(optimizer, name, value)
    step(strategy, v, optimizer)
    assert len(set(WORLD.allgather(float(v)))) == 1


@pytest.mark.ranks(min=2)
def test_whole_numbers_of_a_rule_that_differ_raise_on_every_rank(strategy):
    v, optimizer = made(strategy, 1.0, Powers, build=False, power=1 + (RANK == 0))
    with pytest.raises(MismatchError, match="power=2"):
        step(strategy, v, optimizer)


@pytest.mark.ranks(min=2)
def test_groups_that_differ_raise_on_every_rank():
    """Each rank is a group."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(groups=MeshAxis("replica", 1, 0, WORLD.Split(RANK)))
    v, optimizer = made(strategy)
    optimizer.learning_rate = 0.25
    before = step(strategy, v, optimizer)
    if RANK == 0:
        optimizer.learning_rate = 0.125
    with pytest.raises(MismatchError, match=r"learning_rate 0\.125"):
        step(strategy, v, optimizer)
    optimizer.learning_rate = 0.25
    assert step(strategy, v, optimizer) == before - 0.25


@pytest.mark.parametrize("later", [None, 0.3])
def test_a_restored_rate_is_read_at_once_and_can_be_set(tmp_path, later):
    """Also of an optimizer whose state is created at its first step."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    v, optimizer = made(strategy)
    step(strategy, v, optimizer)
    path = Checkpoint(v=v, o=optimizer).save(shared(tmp_path, "c"))
    w, again = made(strategy, 0.125, build=False)
    Checkpoint(v=w, o=again).restore(path)
    assert again.learning_rate == 0.5
    if later is not None:
        again.learning_rate = later
    before = float(w)
    assert step(strategy, w, again) == before - (later or 0.5)


def test_other_options_are_set_at_the_start_alone():
    optimizer = mpistrat.optimizers.SGD(0.1, momentum=0.5)
    for name in ("momentum", "weight_decay", "clipnorm"):
        with pytest.raises(AttributeError, match=f"make a new optimizer with {name}=0.9"):
            setattr(optimizer, name, 0.9)

    class Own(mpistrat.optimizers.Optimizer):
        def __init__(self):
            super().__init__(0.1)
            self.clipnorm = 3.0

        def update(self, weights, gradient, step, rate, *state):
            weights -= rate * gradient

    assert Own().clipnorm == 3.0


def test_a_variable_is_no_rate(any_strategy):
    """No step would see that it changes."""
    v, optimizer = made(any_strategy)
    for setting in (lambda: SGD(v), lambda: setattr(optimizer, "learning_rate", v)):
        with pytest.raises(TypeError, match="lambda step: float"):
            setting()
    assert optimizer.learning_rate == 0.5
