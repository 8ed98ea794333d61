"""The values in a row of ``mpistrat top``."""

import os
import time

import pytest
from monitor.records import new_record

from mpistrat.cli.top import jobs
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


def test_a_process_that_ends_while_it_is_looked_at(record):
    seen = read.read(record.path)
    os.rename(record.path, record.path + ".gone")
    try:
        (row,) = jobs.rows([seen], 0.0)
        assert row["pid"] == os.getpid()
    finally:
        os.rename(record.path + ".gone", record.path)
