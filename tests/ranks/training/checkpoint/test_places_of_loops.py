"""Programs that are ended at any place of their loops, and go on from a checkpoint, on other numbers of ranks."""

import contextlib
import functools
import json
import pathlib
import re
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, Dataset, Options
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import Checkpoint, CheckpointManager, load_arrays
from mpistrat.values import PerReplica

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
EPOCHS, ROWS, BATCH = 3, 11, 4
STEPS = -(-ROWS // BATCH)


class Ended(Exception):
    """The time limit of a job."""


@functools.cache
def of_first_ranks(ranks, **options):
    comm = MPI.COMM_WORLD.Split(ranks > RANK)
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm, **options) if ranks > RANK else None


class Job:
    """One job of a program that trains for some epochs, over the first ranks of the test."""

    def __init__(self, folder, ranks, stop=0):
        self.strategy, self.folder, self.stop, self.rows = of_first_ranks(ranks), folder, stop, []

    def run(self, loop):
        if (strategy := self.strategy) is not None:
            options = Options()
            options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
            dataset = Dataset.range(ROWS).shuffle(seed=5).batch(BATCH).with_options(options)
            with strategy.scope():
                self.step, self.epoch = mpistrat.Variable(0, name="step"), mpistrat.Variable(0, name="epoch")
            with contextlib.suppress(Ended):
                loop(self, strategy, strategy.experimental_distribute_dataset(dataset))
        return MPI.COMM_WORLD.bcast(self.rows)

    def restored(self, **objects):
        self.manager = CheckpointManager(Checkpoint(step=self.step, epoch=self.epoch, **objects), self.folder, 2)
        self.manager.restore_or_initialize()

    def train(self, strategy, batch):
        rows = strategy.comm.allgather(batch.tolist())
        self.rows.append([row for part in rows for row in part])
        self.step.assign_add(1)

    def save(self):
        if int(self.step.read_value()) == self.stop:
            self.manager.save()
            raise Ended


def each_step(job, strategy, distributed):
    job.restored(batches=distributed)
    while int(job.epoch.read_value()) < EPOCHS:
        for batch in distributed:
            job.train(strategy, batch)
            job.save()
        job.epoch.assign_add(1)


def by_steps(job, strategy, distributed):
    job.restored(batches=distributed)
    while int(job.step.read_value()) < EPOCHS * STEPS:
        for batch in distributed:
            job.train(strategy, batch)
            job.save()


def by_the_state(job, strategy, distributed):
    job.restored(batches=distributed)
    for _ in range(distributed.state()["epoch"], EPOCHS):
        for batch in distributed:
            job.train(strategy, batch)
            job.save()


def each_epoch(job, strategy, distributed):
    job.restored(batches=distributed)
    while int(job.epoch.read_value()) < EPOCHS:
        for batch in distributed:
            job.train(strategy, batch)
        job.epoch.assign_add(1)
        job.save()


@pytest.mark.parametrize("loop", [each_step, by_steps, by_the_state, each_epoch])
def test_a_dataset_goes_on_at_every_place(strategy, tmp_path, loop):
    expected = Job(tmp_path / "whole", 1).run(loop)
    assert len(expected) == EPOCHS * STEPS
    for stop in range(1, EPOCHS * STEPS, STEPS if loop is each_epoch else 1):
        stop += (STEPS - 1) * (loop is each_epoch)
        ranks = 1 + stop % SIZE
        begun = Job(tmp_path / f"{stop}", ranks, stop).run(loop)
        rest = Job(tmp_path / f"{stop}", SIZE + 1 - ranks).run(loop)
        assert len(begun) == stop
        assert begun + rest == expected, stop


def an_old_iterator(job, strategy, distributed):
    iterator = iter(distributed)  # of the first epoch
    job.restored(batches=iterator)
    while int(job.step.read_value()) < EPOCHS * STEPS:
        for batch in iterator:
            job.train(strategy, batch)
            job.manager.save()
            job.save()
        iterator = iter(distributed)  # of the others


def test_an_iterator_that_has_ended_before_a_younger_one_is_told_of(strategy, tmp_path):
    source = pathlib.Path(__file__).read_text().splitlines()
    expected = Job(tmp_path / "whole", SIZE).run(each_step)
    for stop in (3, 5):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begun = Job(tmp_path / f"{stop}", SIZE, stop).run(an_old_iterator)
        assert len(told) == (max(0, stop - STEPS + (stop > STEPS)) if RANK == 0 else 0)
        for each in told:
            assert each.filename == __file__
            lines = re.findall(rf"made at {re.escape(__file__)}:(\d+)", str(each.message))
            texts = [source[int(line) - 1] for line in lines]
            assert ["of the first" in text for text in texts] == [True, False]
            assert "of the others" in texts[1]
            assert "Checkpoint(batches=distributed)" in str(each.message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert begun + Job(tmp_path / f"{stop}", SIZE).run(an_old_iterator) == expected


def test_an_iterator_that_was_left_is_told_of_at_the_next_save(strategy):
    distributed = strategy.experimental_distribute_dataset(Dataset.range(12).batch(4))
    first = iter(distributed)
    next(first)
    before = first.state()
    second = iter(distributed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(first)  # both are in use: each has its own place
        next(second)
        assert first.state()["position"] == 8
        assert before["position"] == second.state()["position"] == 4
    next(second)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert first.state()["position"] == 8
    assert ["has not moved since the last save" in str(each.message) for each in told] == [True] * (RANK == 0)


# --- generators of replicas ----------------------------------------------------------------------------


def drawn(strategy, rng):
    """Return the next number of each generator, in the order of replicas."""
    mine = [each.random() for each in strategy.experimental_local_results(rng)]
    return [number for numbers in strategy.comm.allgather(mine) for number in numbers]


@pytest.mark.parametrize("replicas", [4, 6])
def test_generators_of_virtual_replicas_go_on_on_other_ranks(tmp_path, replicas):
    whole = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
    rng = whole.rng(seed=7)
    drawn(whole, rng)
    path = Checkpoint(deep=[rng]).write(tmp_path / "c")
    expected = drawn(whole, rng)
    assert len(json.loads(load_arrays(path)["deep"]["0"][".state"].tobytes())) == replicas
    for ranks in range(1, SIZE + 1):
        if (strategy := of_first_ranks(ranks, virtual_replicas=replicas)) is not None:
            with strategy.scope():
                other = strategy.rng(seed=8)
                Checkpoint(deep=[other]).read(path).assert_consumed()
                assert drawn(strategy, other) == expected
                told = rf"{replicas} replicas saved a state, and there are {ranks} "
                with pytest.raises(ValueError, match=told) if ranks < replicas else contextlib.nullcontext():
                    Checkpoint(deep=[PerReplica([np.random.default_rng(0)])]).read(path)


def test_generators_of_replicas_on_one_rank_alone(strategy, tmp_path):
    """No rank waits for another that has an object of another kind."""
    mine = PerReplica([np.random.default_rng(RANK)])
    if SIZE > 1:
        with pytest.raises(MismatchError):
            Checkpoint(rng=np.random.default_rng(0) if RANK == SIZE - 1 else mine).write(tmp_path / "c")
    with pytest.raises(TypeError, match=r"rng: a checkpoint cannot keep a PerReplica: give .*\(also a PerReplica"):
        Checkpoint(rng=PerReplica([np.zeros(2)]))
    assert strategy.all_reduce("SUM", 1.0) == SIZE


# --- lists of checkpoints ------------------------------------------------------------------------------


def test_a_list_of_files_that_are_gone(strategy, tmp_path, caplog):
    def manager():
        with strategy.scope():
            return CheckpointManager(Checkpoint(v=mpistrat.Variable(1.0)), tmp_path, max_to_keep=3)

    first = manager()
    for _ in range(3):
        first.save()
    for gone, left in (("ckpt-3",), "ckpt-2"), (("ckpt-1", "ckpt-2"), "nothing"):
        strategy.barrier()
        if RANK == 0:
            for name in gone:
                (tmp_path / name).unlink()
        strategy.barrier()
        caplog.clear()
        path = manager().restore_or_initialize()
        assert path == (None if left == "nothing" else str(tmp_path / left))
        assert f"restores {left}" in caplog.text if RANK == 0 else not caplog.text
        assert all(repr(name) in caplog.text for name in gone) or RANK
    strategy.barrier()


def test_two_jobs_in_one_directory(strategy, tmp_path, caplog):
    def manager():
        with strategy.scope():
            return CheckpointManager(Checkpoint(v=mpistrat.Variable(1.0)), tmp_path, max_to_keep=3)

    one, other = manager(), manager()
    one.save()
    one.save()
    assert not caplog.text
    other.save()
    assert caplog.text.count("two jobs that manage one directory") == (RANK == 0)
    one.save()
    one.save()
    assert caplog.text.count("two jobs that manage one directory") == 2 * (RANK == 0)
