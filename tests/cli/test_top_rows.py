"""The values in a row of ``mpistrat top``."""

import dataclasses
import os
import time

import pytest
from monitor.records import new_record
from rich.console import Console

from mpistrat.cli.top import jobs, main
from mpistrat.record import read
from mpistrat.runtime.agreement.operation import operation


@pytest.fixture
def record():
    with new_record(1) as made:
        yield made


def test_user_code_lasts_since_the_last_collective(record):
    flight = record.join(5, 1, 0)
    before = time.monotonic()
    flight.enter(operation("barrier"), 1)
    flight.leave()
    (row,) = jobs.rows([read.read(record.path)], 0.0)
    assert row["phase"] == "user code"
    assert row["for_seconds"] <= time.monotonic() - before
    flight.enter(operation("barrier"), 2)
    (row,) = jobs.rows([read.read(record.path)], 0.0)
    assert (row["phase"], row["number"]) == ("collective", 2)


def test_slow_ranks_and_shares_of_waiting(record):
    """In the order of ranks, whatever the order of the records."""
    seen = dataclasses.replace(read.read(record.path), path="/nowhere", program="train.py [x]")
    waits = {2: 0.08, 0: 0.08, 1: 0.01, 3: 0.079}  # seconds of a step of 0.1 s
    found = [dataclasses.replace(seen, rank=rank, steps=((0.1, each, 0.0, 0.0),) * 30) for rank, each in waits.items()]
    rows = jobs.rows(found, 0.0)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row["slow"] for row in rows] == [False, True, False, False]
    assert [round(row["waiting_share"], 3) for row in rows] == [0.8, 0.1, 0.8, 0.79]
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(main._table(rows, cut=True))
    lines = capture.get().splitlines()
    assert sum("0.1 s, slow │ 10%" in line for line in lines) == 1
    assert len(lines) == 3 + 4 + 2  # a row for each rank
    assert lines[-1].strip() == "train.py [x]: 4 ranks"


def test_a_process_that_ends_while_it_is_looked_at(record):
    seen = read.read(record.path)
    os.rename(record.path, record.path + ".gone")
    try:
        (row,) = jobs.rows([seen], 0.0)
        assert row["pid"] == os.getpid()
    finally:
        os.rename(record.path + ".gone", record.path)
