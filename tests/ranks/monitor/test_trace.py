"""The trace of several ranks, merged into one file."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from trace_format import PHASES, Merged

import mpistrat
from mpistrat.cli import commands
from mpistrat.record import layout, ring

BARRIERS, STEPS = 20, 3
pytestmark = pytest.mark.skipif(not Path(layout.FOLDER).is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture(scope="module")
def directory(comm, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") if comm.rank == 0 else None
    return comm.bcast(path)


@pytest.fixture(scope="module")
def strategy(comm):
    made = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    if made.extended.engine.topology.lock.flight is None:
        pytest.skip("the record has no room: other tests did not free their communicators")
    return made


@pytest.fixture(scope="module")
def traced(strategy, comm, directory):
    """The directory, after each rank has read, reduced and saved."""
    rows = mpistrat.data.Dataset.from_arrays(np.arange(64.0)).batch(8 * comm.size)
    batches = iter(strategy.experimental_distribute_dataset(rows))
    # Several arrays of one message, which are packed; and one that is larger than a message.
    arrays = [np.full(1000, comm.rank, np.float32), np.ones((7, 3), np.float32), np.ones(300_001)]
    with strategy.scope():
        variable = mpistrat.Variable(np.ones(1000))

    def step():
        return mpistrat.get_replica_context().all_reduce("SUM", arrays)

    mpistrat.experimental.step()  # from now on nothing else counts as one
    with mpistrat.experimental.trace(directory):
        for _ in range(BARRIERS):
            strategy.barrier()
        for _ in range(STEPS):
            next(batches, None)
            reduced = strategy.run(step)
            mpistrat.experimental.step()
        mpistrat.training.save({"v": variable}, directory / "saved.h5")
    assert ring.ring is None
    first = strategy.experimental_local_results(reduced)[0][0]
    assert (first == sum(range(comm.size))).all()
    comm.barrier()
    return directory


def command(*arguments):
    ended = CliRunner().invoke(commands, ["trace", *map(str, arguments)])
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def merged(traced, comm):
    """What the merged file has, on rank 0."""
    if comm.rank == 0:
        command(traced, "-o", traced / "out.json.gz")
        return Merged(traced / "out.json.gz")
    return None


def test_each_rank_has_one_file_that_others_cannot_read(traced, comm):
    files = list(traced.glob("*.mpistrat-trace"))
    assert len(files) == comm.size
    assert {os.stat(each).st_mode & 0o777 for each in files} == {0o600}


def test_tracks_nest_and_flows_meet(merged, comm):
    if comm.rank == 0:
        assert sorted(merged.ranks) == list(range(comm.size))
        assert len({node for node, _ in merged.ranks.values()}) == 1  # the ranks of one node
        assert len(merged.flows) >= (BARRIERS + STEPS) * (comm.size > 1)
        assert all(len(events) == comm.size for events in merged.flows.values())


def test_clocks_agree_to_50_us(merged, comm):
    if comm.rank == 0:
        merged.check_clocks(most=50)


def test_phases(merged, comm):
    if comm.rank == 0:
        for rank in range(comm.size):
            slices = merged.of_rank(rank)
            names = [name for name, *_ in slices]
            expected = {"INPUT_WAIT", "REDUCE_PACK", "REDUCE_UNPACK", "REDUCE_WIRE", "USER"}
            expected |= {"REDUCE_MEET"} if comm.size > 1 else set()
            expected |= {"SAVE"} if rank == 0 else set()  # the others wait for it in a collective
            assert {each for each in names if each in PHASES} == expected
            assert names.count("barrier") >= BARRIERS
            assert sum(name.startswith("all_reduce SUM float32[1000]") for name in names) == STEPS
            # The phases fill the whole time: what is outside collectives, input and saving is of the program.
            top = [each for each in slices if each[3] == "phase" and each[0] in ("USER", "INPUT_WAIT", "SAVE")]
            assert top[0][0] == "USER"


def test_the_place_is_a_line_of_the_program(merged, comm):
    if comm.rank == 0:
        barriers = [each for each in merged.of_rank(0) if each[0] == "barrier"]
        assert all(re.fullmatch(rf"{re.escape(__file__)}:\d+ in traced", each[4]["at"]) for each in barriers[:BARRIERS])


def test_summary(traced, comm):
    if comm.rank == 0:
        told = json.loads(command(traced, "--json").stdout)
        assert [row["rank"] for row in told["ranks"]] == list(range(comm.size))
        for row in told["ranks"]:
            assert abs(sum(row["shares"].values()) - 1) < 1e-6
            assert row["steps"] == STEPS
        reduced = [row for row in told["collectives"] if row["operation"].startswith("all_reduce")]
        assert reduced[0]["calls_per_rank"] == STEPS
        assert reduced[0]["bytes"] == 4 * 1021 + 8 * 300_001
        assert "USER" in command(traced, "--summary").stdout
    if comm.size > 1 and comm.rank == 0:
        assert sum(each["collectives"] for each in told["last"]) >= BARRIERS


def test_small_reductions_have_phases(strategy, comm, tmp_path):
    """They take a shorter way where they are not traced, with the same result."""
    short = strategy.reduce("SUM", np.float32(comm.rank), axis=None)
    with mpistrat.experimental.trace(tmp_path):
        traced = strategy.reduce("SUM", np.float32(comm.rank), axis=None)
    assert traced == short == sum(range(comm.size))
    comm.barrier()
    if comm.rank == 0:
        command(tmp_path, "-o", tmp_path / "out.json")
        merged = Merged(tmp_path / "out.json")
        assert any(name.startswith("all_reduce SUM float32") for name, *_ in merged.of_rank(0))
        if comm.size > 1:
            assert "REDUCE_MEET" in {name for name, *_ in merged.of_rank(0)}


def test_a_rank_that_cannot_write_goes_on(strategy, comm, tmp_path, caplog):
    """The others are traced, and their trace says who is missing."""
    place = tmp_path / "file" / "traces" if comm.rank == comm.size - 1 else tmp_path / "traces"
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    comm.barrier()
    with mpistrat.experimental.trace(place):
        strategy.barrier()
    comm.barrier()
    if comm.rank == comm.size - 1:
        assert "no trace of this rank" in caplog.text
    if comm.rank == 0 and comm.size > 1:
        ended = command(place, "--summary")
        assert f"there is no trace of rank {comm.size - 1}" in ended.stderr


def test_a_trace_in_a_trace_is_the_outer_one(strategy, comm, tmp_path, caplog):
    with mpistrat.experimental.trace(tmp_path / "outer"):
        with mpistrat.experimental.trace(tmp_path / "inner"):
            strategy.barrier()
        assert ring.ring is not None
    comm.barrier()
    assert "is traced already" in caplog.text
    assert not (tmp_path / "inner").exists()
    assert len(list((tmp_path / "outer").iterdir())) == comm.size
