"""``mpistrat trace``: traces that are merged, and files that are not what they should be."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from trace_format import Merged

from mpistrat.cli import commands, trace, trace_files
from mpistrat.record import layout
from mpistrat.record.layout import Kind, Word
from mpistrat.record.ring import Sample, TraceRing

ROOM = layout.TRACE_EVENTS + 1000 * layout.EVENT.size
STEPS = 10
NAMES = {1: "all_reduce SUM float32[1000]", 2: "train.py:7 in step", 3: "barrier", 4: "train.py:9 in <module>"}


def write(directory, rank, size=2, token=5, at=None, clock=None, samples=(), epoch=None):
    """The trace of one rank: steps of 10 ms, in which rank 1 comes 2 ms late."""
    ring = TraceRing(str(directory), rank, size, ROOM)
    words = memoryview(ring._memory).cast("q")
    seconds = memoryview(ring._memory).cast("d")
    if clock is not None:
        words[Word.CLOCK] = clock
    start = seconds[Word.BEGAN] if at is None else at
    seconds[Word.BEGAN] = start
    if epoch is not None:
        seconds[Word.EPOCH] = epoch
    for sample in samples:
        ring.sample(sample)
    ring.add_communicator(token, size, rank)
    whose = ring.communicators[token]
    for i in range(STEPS):
        began = start + 0.010 * i + 0.005 + 0.002 * rank
        event = ring.begin(0, whose, i, ring.text(1, NAMES.__getitem__), ring.text(2, NAMES.__getitem__), 4000, began)
        pack = ring.begin(Kind.REDUCE_PACK, 255, 0, 0, 0, 0, began + 0.0001)
        ring.end(pack, 0.0, began + 0.0002)
        ring.end(event, start + 0.010 * i + 0.0075, start + 0.010 * i + 0.009)
        ring.begin(Kind.STEP, 255, i, 0, 0, 0, start + 0.010 * i + 0.0095)
    seconds[Word.ENDED] = start + 0.010 * STEPS
    return Path(ring.path)


@pytest.fixture
def traced(tmp_path):
    folder = tmp_path / "traces"
    write(folder, 0, at=100.0)
    write(folder, 1, at=100.0)
    return folder


def run(*arguments, status=0):
    ended = CliRunner().invoke(commands, ["trace", *map(str, arguments)])
    assert ended.exit_code == status, ended.output
    return ended


def test_a_merged_trace_keeps_to_the_format(traced, tmp_path):
    ended = run(traced, "-o", tmp_path / "out.json.gz")
    assert "2 ranks" in ended.stderr
    merged = Merged(tmp_path / "out.json.gz")
    assert sorted(merged.ranks) == [0, 1]
    assert len(merged.flows) == STEPS
    slices = merged.of_rank(0)
    names = [name for name, *_ in slices]
    assert names[:6] == ["USER", NAMES[1], "REDUCE_MEET", "REDUCE_PACK", "REDUCE_MEET", "REDUCE_WIRE"]
    assert slices[1][4] == {"at": NAMES[2], "number": 0, "bytes": 4000, "ranks": 2}
    # The arrows go from the rank that came first to the one that came last.
    assert all([event["tid"] for event in each] == [1_000_000, 1_000_001] for each in merged.flows.values())
    run(traced, "-o", tmp_path / "plain.json")
    assert Merged(tmp_path / "plain.json").whole == merged.whole


def test_the_numbers_of_a_summary(traced):
    told = json.loads(run(traced, "--json").stdout)
    fast, slow = told["ranks"]
    # Of steps of 10 ms: 4 ms of the collective on rank 0, in which it waits 2.5 ms and packs 0.1 ms; 1.5 ms after that.
    expected = {"REDUCE_MEET": 0.24, "REDUCE_PACK": 0.01, "REDUCE_WIRE": 0.15, "USER": 0.6}
    for phase, share in expected.items():
        assert abs(fast["shares"][phase] - share) < 1e-3
    assert abs(slow["shares"]["REDUCE_MEET"] - 0.04) < 1e-3
    assert told["last"] == [{"rank": 1, "collectives": STEPS}]
    (row,) = told["collectives"]
    assert row["calls_per_rank"] == STEPS
    assert abs(row["seconds_per_call"] - 0.003) < 1e-5
    assert abs(row["bytes_per_second"] / (4000 / 0.0016) - 1) < 1e-2
    assert abs(told["imbalance"] - (0.96 / 0.86 - 1)) < 1e-3
    text = run(traced, "--summary").stdout
    assert "last in 10 collectives: rank 1 100%" in text
    assert "2 ranks on 1 node" in text


def test_a_collective_has_one_line_of_120_columns(traced):
    told = json.loads(run(traced, "--json").stdout)
    (row,) = told["collectives"]
    row |= {"operation": "all_reduce SUM float64[1000] of weights", "place": f"{'a/' * 200}train.py:22 in train"}
    row |= {"calls_per_rank": 123456, "bytes": 1.23e12, "bytes_per_second": 1.23e13}
    printed = trace.lines(told)
    assert max(map(len, printed)) <= 120
    assert [line for line in printed if "all_reduce SUM" in line and line.endswith("train.py:22 in train")]


# --- clocks ---------------------------------------------------------------------------------------------


def test_clocks_are_aligned_by_their_samples(tmp_path):
    """Rank 1 has a clock that is 1000 s ahead, and gains 20 us in the time of the trace."""
    write(tmp_path, 0, at=100.0, clock=11, samples=[Sample(1.0, 0.0, 0.0, 11)])
    samples = [Sample(1100.0, -1000.0, 2e-6, 11), Sample(1100.1, -1000.00002, 5e-6, 11)]
    write(tmp_path, 1, at=1100.0, clock=12, samples=samples)
    run(tmp_path, "-o", tmp_path / "out.json")
    merged = Merged(tmp_path / "out.json")
    gaps = [events[1]["ts"] - events[0]["ts"] for events in merged.flows.values()]
    # After 7 ms the clock has gained 1.4 us, after 97 ms 19.4 us.
    assert abs(gaps[0] - 1998.6) < 0.1
    assert abs(gaps[-1] - 1980.6) < 0.1
    told = json.loads(run(tmp_path, "--json").stdout)
    assert told["clock_error_seconds"] == 5e-6
    assert told["hosts"] == 2  # not the same node, though the host has the same name


@pytest.mark.full
def test_clocks_that_were_not_compared_are_aligned_by_the_time_of_day(tmp_path):
    write(tmp_path, 0, at=100.0, clock=11, epoch=5000.0)
    write(tmp_path, 1, at=1100.0, clock=12, epoch=4000.0)
    ended = run(tmp_path, "-o", tmp_path / "out.json")
    assert "was not compared" in ended.stderr
    for events in Merged(tmp_path / "out.json").flows.values():
        assert abs(events[1]["ts"] - events[0]["ts"] - 2000) < 1


# --- files that are not what they should be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[: len(data) - 985 * layout.EVENT.size], "15 of its events are missing or damaged"),
        (lambda data: data[: layout.TRACE_EVENTS - 1], "is not a trace, or was cut before its first event"),
        (lambda data: b"", "is not a trace, or was cut"),
        (lambda data: bytes(len(data)), "is not a trace"),
        (lambda data: b"PK" + data[2:], "is not a trace"),
        (lambda data: data[:8] + bytes([99]) + data[9:], "another version"),
        (lambda data: data[: 8 * Word.CAPACITY] + bytes(8) + data[8 * Word.CAPACITY + 8 :], "is damaged"),
        (lambda data: data[: layout.TRACE_EVENTS] + b"\xff" * (len(data) - layout.TRACE_EVENTS), "missing or damaged"),
    ],
)
def test_a_file_that_is_cut_foreign_or_damaged(traced, tmp_path, change, text):
    """The rest is merged, with a warning."""
    victim = next(path for path in sorted(traced.iterdir()) if trace_files.read(path).rank == 1)
    victim.write_bytes(change(victim.read_bytes()))
    ended = run(traced, "-o", tmp_path / "out.json")
    assert text in ended.stderr
    assert str(victim) in ended.stderr
    assert 0 in Merged(tmp_path / "out.json").ranks


@pytest.mark.full
def test_random_bytes_never_stop_the_rest(traced, tmp_path):
    victim = next(path for path in sorted(traced.iterdir()) if trace_files.read(path).rank == 1)
    data = victim.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(30):
        damaged = bytearray(data)
        for place in random.integers(16, layout.TRACE_EVENTS + 40 * layout.EVENT.size, 200):
            damaged[place] = random.integers(256)
        victim.write_bytes(damaged)
        run(traced, "-o", tmp_path / "out.json", "--summary")
        assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_what_is_not_a_file_is_left_out(traced, tmp_path):
    os.mkfifo(traced / f"fifo{layout.SUFFIX}")
    os.symlink("/etc/hostname", traced / f"link{layout.SUFFIX}")
    (traced / f"folder{layout.SUFFIX}").mkdir()
    (traced / "notes.txt").write_text("not looked at")
    ended = run(traced, "-o", tmp_path / "out.json")
    assert ended.stderr.count("it is left out") == 3
    assert "notes.txt" not in ended.stderr


def test_two_jobs_in_one_directory(traced, tmp_path):
    write(traced, 0, size=1, token=6, at=200.0)
    ended = run(traced, "-o", tmp_path / "out.json")
    assert "has 2 jobs" in ended.stderr
    assert sorted(Merged(tmp_path / "out.json").ranks) == [0]
    ended = run(traced, "-o", tmp_path / "out.json", "--job", "1")
    assert sorted(Merged(tmp_path / "out.json").ranks) == [0, 1]
    assert "there is no job 3" in run(traced, "--json", "--job", "3", status=1).stderr


def test_missing_ranks_are_named(tmp_path):
    write(tmp_path, 2, size=4)
    assert "there is no trace of ranks 0-1, 3" in run(tmp_path, "--json").stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["nothing", "missing", "file"])
def test_directories_without_traces(tmp_path, name):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("")
    ended = run(tmp_path / name, "--summary", status=1)
    assert "mpistrat run --trace" in ended.stderr if name == "nothing" else "cannot be read" in ended.stderr


def test_an_output_that_cannot_be_written(traced, tmp_path):
    ended = run(traced, "-o", tmp_path / "missing" / "out.json", status=1)
    assert "cannot be written: No such file" in ended.stderr
    os.mkfifo(pipe := tmp_path / "pipe")  # as /dev/null, of which root could remove the name
    ended = run(traced, "-o", pipe, status=1)
    assert "cannot be written: it is a device, a pipe or a socket" in ended.stderr
    assert pipe.is_fifo()


def test_something_must_be_asked_for(traced):
    assert "-o FILE" in run(traced, status=2).stderr


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    ended = CliRunner().invoke(commands, ["run", "--trace", str(tmp_path / "file" / "x"), "-m", "this"])
    assert ended.exit_code == 2
    assert "cannot be written" in ended.stderr


def test_a_collective_that_was_abandoned_ends_with_the_next(tmp_path):
    path = write(tmp_path, 0, size=1, at=100.0)
    data = bytearray(path.read_bytes())
    at = layout.TRACE_EVENTS + layout.MET + 8  # the end of the first event
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    run(tmp_path, "-o", tmp_path / "out.json")
    first, second = [each for each in Merged(tmp_path / "out.json").of_rank(0) if each[3] == "collective"][:2]
    assert first[4]["finished"] is False
    assert first[2] == second[1]


# --- programs -----------------------------------------------------------------------------------------------

KILLED = """
import time
import numpy as np
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
for _ in range(5):
    strategy.reduce("SUM", np.ones(3), axis=None)
with strategy.extended.engine.topology.lock.collective(mpistrat.runtime.topology.operation("the last one")):
    print("ready", flush=True)
    time.sleep(100)
"""


@pytest.mark.full
def test_a_trace_of_a_killed_process(tmp_path):
    """It has the collective that the process was in, also while the process runs."""
    environ = {**os.environ, "MPISTRAT_TRACE": str(tmp_path / "traces")}
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout.readline() == "ready\n"
        assert "does not end" in run(tmp_path / "traces", "-o", tmp_path / "runs.json").stderr
        process.send_signal(signal.SIGKILL)
    run(tmp_path / "traces", "-o", tmp_path / "killed.json")
    for name in ("runs.json", "killed.json"):
        slices = Merged(tmp_path / name).of_rank(0)
        last = [each for each in slices if each[3] == "collective"][-1]
        assert (last[0], last[4]["finished"]) == ("the last one", False)


@pytest.mark.full
def test_a_disk_without_room_does_not_stop_the_program(tmp_path):
    environ = {**os.environ, "MPISTRAT_TRACE": "/dev/full/x"}
    program = KILLED.replace("time.sleep(100)", "pass")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert ended.stdout == "ready\n"
    assert ended.stderr.count("is not traced") == 1
