"""One rank is told to stop: all save at the same step, leave, and go on where they were."""

import logging
import os
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from mpistrat.training.preemption import StepTimes

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
STEPS = 12
SLURM = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_END_TIME")


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch):
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)


class Training:
    """Noisy gradient descent whose result depends on every step and on the order of steps."""

    def __init__(self, strategy, folder, config=None):
        self.strategy = strategy
        with strategy.scope():
            self.weight = mpistrat.Variable(np.ones(5), name="weight")
            self.velocity = mpistrat.Variable(np.zeros(5), name="velocity")
        self.handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver, [self.weight, self.velocity], folder, config
        )

    def step(self, number):
        gradient = np.random.default_rng([number, RANK]).normal(size=5)
        mean = self.strategy.reduce("MEAN", gradient + np.asarray(self.weight), axis=None)
        self.velocity.assign(0.9 * np.asarray(self.velocity) + mean)
        self.weight.assign_sub(0.1 * np.asarray(self.velocity))
        return float(np.square(self.weight).sum())

    def run(self, before=lambda step: None):
        loss = None
        for step in range(self.handler.total_run_calls, STEPS):
            before(step)
            loss = self.handler.run(self.step, step)
        return loss


def tell(step, number=signal.SIGUSR2, rank=LAST):
    """What sends one rank a signal before a step."""

    def before(now):
        if now == step and rank == RANK:
            os.kill(os.getpid(), number)

    return before


def steps_of_all(comm, training):
    return comm.allgather(training.handler.total_run_calls)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("step", [0, 5, STEPS - 1])
def test_told_to_one_rank_and_resumed(strategy, comm, tmp_path, number, step):
    undisturbed = Training(strategy, tmp_path / "undisturbed").run()
    first = Training(strategy, tmp_path / "first")
    with pytest.raises(SystemExit) as end:
        first.run(tell(step, number))
    assert end.value.code == (143 if number == signal.SIGTERM else 42 if step else 1)
    assert steps_of_all(comm, first) == [step] * SIZE
    second = Training(strategy, tmp_path / "first")
    assert second.handler.total_run_calls == step
    assert second.run() == undisturbed
    assert os.listdir(tmp_path / "first") == ["preemption.h5"]


def test_nobody_is_told(strategy, tmp_path):
    training = Training(strategy, tmp_path / "new")
    assert training.run() is not None
    assert training.handler.total_run_calls == STEPS
    assert not (tmp_path / "new").exists()


def test_further_signals_change_nothing(strategy, comm, tmp_path):
    saved = []

    def save():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append(handler.total_run_calls)

    with strategy.scope():
        handler = PreemptionCheckpointHandler(None, save)

    def step(number):
        if number == 3:
            for rank, each in ((0, signal.SIGUSR2), (LAST, signal.SIGUSR2), (LAST, signal.SIGUSR1)):
                if rank == RANK:
                    os.kill(os.getpid(), each)

    def train():
        for number in range(STEPS):
            handler.run(step, number)

    with pytest.raises(SystemExit):
        train()
    assert comm.allgather(saved) == [[4]] * SIZE


@pytest.mark.ranks(min=2)
def test_signal_during_a_collective(strategy, comm, tmp_path):
    pids = comm.allgather(os.getpid())
    training = Training(strategy, tmp_path)

    def before(step):
        if step == 4:
            if RANK == 0:
                time.sleep(0.1)  # the others are in the barrier by now, most likely
                os.kill(pids[LAST], signal.SIGUSR2)
            strategy.barrier()

    with pytest.raises(SystemExit):
        training.run(before)
    saved_after = steps_of_all(comm, training)
    assert len(set(saved_after)) == 1
    assert saved_after[0] in (4, 5)


def scontrol(folder, comm, script):
    """A program of that name, on PATH before all others, that keeps what it is told."""
    if comm.rank == 0:
        program = folder / "bin" / "scontrol"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/told\n{script}\n')
        program.chmod(0o755)
    comm.Barrier()
    return f"{folder}/bin{os.pathsep}{os.environ['PATH']}"


def shown(state, preempted, started="2026-11-21T12:20:00"):
    """What ``scontrol show job`` says, in short, and ``scontrol requeue`` does."""
    line = f"JobId=12 JobState={state} Requeue=1 StartTime={started} PreemptTime={preempted} Comment=a=b c"
    return f'[ "$1" = requeue ] || [ "$SLURM_TIME_FORMAT" != standard ] || echo "{line}"'


@pytest.mark.parametrize(
    ("number", "script", "told", "status", "text"),
    [
        (signal.SIGUSR2, "exit 0", ["requeue 12"], 0, "the job was put back into the queue"),
        # Slurm ends the processes of a job that it puts back, also this one.
        (signal.SIGUSR2, "kill -TERM $$", ["requeue 12"], 0, "the job was put back into the queue"),
        (
            signal.SIGUSR2,
            "echo it is not allowed >&2; exit 1",
            ["requeue 12"],
            42,
            "scontrol requeue 12: it is not allowed; status 42 asks to be started again",
        ),
        # Cancelled, or preempted without time to leave: then Slurm itself puts it back.
        (signal.SIGTERM, shown("COMPLETING", "2026-11-21T12:25:58"), [], 143, "is not requeued: status 143"),
        (signal.SIGTERM, shown("RUNNING", "None"), [], 143, "is not requeued: status 143"),
        # An earlier run of the job was preempted.
        (signal.SIGTERM, shown("RUNNING", "2026-11-21T12:19:59"), [], 143, "is not requeued: status 143"),
        (signal.SIGTERM, "exit 1", [], 143, "is not requeued: status 143"),
        # Preempted with time to leave: Slurm puts back what has not ended by itself.
        (signal.SIGTERM, shown("RUNNING", "2026-11-21T12:25:58"), ["requeue 12"], 0, "was put back"),
    ],
)
def test_replica_0_requeues(strategy, comm, tmp_path, monkeypatch, caplog, number, script, told, status, text):
    monkeypatch.setenv("PATH", scontrol(tmp_path, comm, script))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")  # "2 hours ago", as some like it
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as end:
        Training(strategy, tmp_path / "saved").run(tell(2, number))
    assert end.value.code == status
    asked = ["show job --oneliner 12"] if number == signal.SIGTERM else []
    assert (tmp_path / "told").read_text().splitlines() == [*asked, *told]
    if RANK == 0:
        assert f"rank {LAST} was told to stop ({number.name} at" in caplog.text
        assert f"all {SIZE} ranks saved after run 2" in caplog.text
        assert text in caplog.text
    else:
        assert caplog.text == ""


def status_of(function):
    """The exit status of a program that is told to stop, and calls this."""
    tell(0)(0)
    with pytest.raises(SystemExit) as end:
        function()
    return end.value.code


def test_without_progress_it_does_not_come_back(strategy, comm, tmp_path, monkeypatch, caplog):
    """Or it would for ever. What another run of the program has done does not count."""
    monkeypatch.setenv("PATH", scontrol(tmp_path, comm, "exit 0"))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    first = Training(strategy, tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        assert status_of(lambda: first.handler.run(first.step, 0)) == 1
    comm.Barrier()
    assert not (tmp_path / "told").exists()
    if RANK == 0:
        assert "told to stop before its first step was over" in caplog.text
    second = Training(strategy, tmp_path / "saved")
    second.handler.run(second.step, 0)
    assert status_of(lambda: second.handler.run(second.step, 1)) == 0
    third = Training(strategy, tmp_path / "saved")
    assert status_of(lambda: third.handler.run(third.step, 1)) == 1
    assert third.handler.total_run_calls == 1


def test_progress_of_loops_that_do_not_use_run(strategy, comm, tmp_path, monkeypatch):
    """What is called at the end of a step has seen one."""
    monkeypatch.setenv("PATH", scontrol(tmp_path, comm, "exit 0"))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    handler = Training(strategy, tmp_path / "saved").handler
    assert status_of(handler.save_checkpoint_if_preempted) == 0
    handler = Training(strategy, tmp_path / "saved").handler

    def scope():
        with handler.watch_preemption_scope():
            pass

    assert status_of(scope) == 0


def test_without_scontrol(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        Training(strategy, tmp_path / "saved").run(tell(2))
    assert end.value.code == 42


@pytest.mark.parametrize("begins_with", [signal.SIGUSR2, "termination_watcher_fn"])
@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_grace_period(strategy, comm, number, begins_with):
    """A checkpoint at once, and one before the end: here by the clock, or because SIGTERM comes."""
    saved, watched = [], []
    config = TerminationConfig(
        (lambda: RANK == LAST and watched == [2]) if begins_with == "termination_watcher_fn" else None,
        grace_period=0.3 if number is None else 3600,
    )
    with strategy.scope():
        handler = PreemptionCheckpointHandler(
            None, lambda: saved.append(handler.total_run_calls), termination_config=config
        )

    def step(count):
        if count == 2 and begins_with == signal.SIGUSR2:
            tell(2)(2)
        watched[:] = [count]
        if count == 6 and number is not None:
            tell(6, number)(6)
        time.sleep(0.001)

    def train():
        for count in range(100_000):
            handler.run(step, count)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == (42 if number is None else 143)
    assert comm.allgather(saved) == [saved] * SIZE
    assert len(saved) == 2
    assert saved[0] == 3
    assert saved[1] > 3 if number is None else saved[1] == 7


@pytest.mark.ranks(min=2)
def test_grace_period_that_begins_with_sigterm(strategy, comm):
    """It comes to the ranks one after the other: the last one does not end the time that the first one began."""
    saved = []
    with strategy.scope():
        handler = PreemptionCheckpointHandler(
            None, lambda: saved.append(handler.total_run_calls), termination_config=TerminationConfig(grace_period=3600)
        )
    for count in range(6):
        tell(2, signal.SIGTERM, rank=0)(count)
        tell(4, signal.SIGTERM, rank=LAST)(count)
        handler.run(lambda: None)
    assert comm.allgather(saved) == [[2]] * SIZE


def test_the_end_of_the_jobs_time(strategy, comm, tmp_path, monkeypatch):
    """Only the clock of replica 0 counts: the others' may say anything."""
    end = time.time() + (5 if RANK == 0 else 1e6)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(end)))
    training = Training(strategy, tmp_path)
    with pytest.raises(SystemExit):
        training.run()
    assert steps_of_all(comm, training) == [1] * SIZE  # one step at least, or it would never end


def test_the_end_of_time_is_told_once(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 5)))
    left = []
    training = Training(strategy, tmp_path, TerminationConfig(exit_fn=lambda: left.append(1)))
    assert training.run() is not None
    assert left == [1]


def test_slow_steps_of_long_ago_do_not_count(strategy, tmp_path, monkeypatch):
    """Nor does the first one: only the last steps say how long the next one may take."""
    clock = [0.0]
    monkeypatch.setattr(StepTimes.__init__, "__defaults__", (lambda: clock[0],))

    def steps(*durations, left):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left)))
        for duration in durations:
            handler.run(lambda duration=duration: clock.__setitem__(0, clock[0] + duration))

    handler = Training(strategy, tmp_path).handler
    steps(1000, 1, left=1e6)
    steps(1, left=600)
    steps(400, *[1] * 20, left=1e6)
    steps(1, left=600)
    steps(400, 1, left=1e6)
    with pytest.raises(SystemExit):
        steps(1, left=600)
    assert handler.total_run_calls == 2 + 1 + 21 + 1 + 2


def test_no_end_of_time_in_sight(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + (1e6 if RANK == 0 else 5))))
    assert Training(strategy, tmp_path).run() is not None


def test_own_functions(strategy, comm):
    asked, saved, left = [], [], []

    def watch():
        asked.append(True)
        return RANK == LAST and len(asked) == 4

    config = TerminationConfig(watch, lambda: left.append(True), save_fn=lambda *a, **k: saved.append((a, k)))
    with strategy.scope():
        handler = PreemptionCheckpointHandler(None, lambda: saved.append("not this"), None, config)
    for _ in range(6):  # exit_fn returns, and the program goes on
        handler.save_checkpoint_if_preempted(7, name="x")
    assert saved == [((7,), {"name": "x"})]
    assert left == [True]
    assert handler.total_run_calls == 0


def test_manager(strategy):
    class Manager:
        def __init__(self):
            self.calls = []

        def save(self):
            self.calls.append("save")

        def restore_or_initialize(self):
            self.calls.append("restore")

    manager = Manager()
    with strategy.scope():
        handler = PreemptionCheckpointHandler(None, manager)
    assert manager.calls == ["restore"]
    with pytest.raises(SystemExit), handler.watch_preemption_scope():
        tell(0)(0)
    assert manager.calls == ["restore", "save"]


def test_error_in_the_scope_is_not_held_up(strategy):
    saved = []
    with strategy.scope():
        handler = PreemptionCheckpointHandler(None, lambda: saved.append(1))

    def fail():
        with handler.watch_preemption_scope():
            os.kill(os.getpid(), signal.SIGUSR2)
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert saved == []


def test_a_directory_that_cannot_be_written_to_is_found_at_once(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v")
    (tmp_path / "file").touch()
    for name in ("file", "file/inside"):
        with pytest.raises(OSError, match="so checkpoints could not be written; give another checkpoint_dir"):
            PreemptionCheckpointHandler(None, [v], tmp_path / name)
    PreemptionCheckpointHandler(None, [v], tmp_path / "to" / "be" / "made")


def test_wrong_arguments(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v")
    with pytest.raises(ValueError, match="checkpoint_dir"):
        PreemptionCheckpointHandler(None, [v])
    with pytest.raises(TypeError, match="ndarray"):
        PreemptionCheckpointHandler(None, [np.ones(2)], tmp_path)
    with pytest.raises(TypeError, match="TerminationConfig"):
        PreemptionCheckpointHandler(None, [v], tmp_path, {"grace_period": 3})
    with pytest.raises(TypeError, match="exit_fn"):
        TerminationConfig(exit_fn=3)
    for period in (-1, float("nan")):
        with pytest.raises(ValueError, match="grace_period"):
            TerminationConfig(grace_period=period)
    cluster = mpistrat.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
    resolver = mpistrat.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    with pytest.raises(NotImplementedError, match="parameter servers"):
        PreemptionCheckpointHandler(resolver, [v], tmp_path)
    handler = PreemptionCheckpointHandler(None, [v], tmp_path)
    with pytest.raises(TypeError, match="save_fn"):
        handler.save_checkpoint_if_preempted(3)
    with pytest.raises(RuntimeError, match=r"outside of strategy\.run"):
        strategy.run(lambda: handler.run(lambda: None))


def test_checkpoint_of_another_model(strategy, tmp_path):
    with pytest.raises(SystemExit):
        Training(strategy, tmp_path).run(tell(1))
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="something else")
    with pytest.raises(ValueError, match="something else"):
        PreemptionCheckpointHandler(None, [v], tmp_path)


@pytest.mark.ranks(max=1)
def test_watcher():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("own"))
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        watcher = PreemptionWatcher()
        assert watcher.preemption_message is None
        watcher.block_until_worker_exit()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert watcher.preemption_message is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watcher.preemption_message.startswith("SIGUSR1 at ")
        assert called == ["own"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.preemption_message.startswith("SIGUSR1 at ")
        assert watcher.signals == (signal.SIGUSR1, signal.SIGTERM)
        watcher.clear()
        assert watcher.preemption_message is None
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, ignored)
