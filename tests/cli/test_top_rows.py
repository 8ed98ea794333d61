"""The values in a row of ``mpistrat top``."""

import dataclasses
import os
import re
import time

import pytest
from monitor.records import new_record
from rich.console import Console

from mpistrat.cli import top as top_command
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
    (row,) = top_command.rows([read.read(record.path)], 0.0)
    assert row["phase"] == "user code"
    assert row["for_seconds"] <= time.monotonic() - before
    flight.enter(operation("barrier"), 2)
    (row,) = top_command.rows([read.read(record.path)], 0.0)
    assert (row["phase"], row["number"]) == ("collective", 2)


def test_slow_ranks_and_shares_of_waiting(record):
    """In the order of ranks, whatever the order of the records."""
    seen = dataclasses.replace(read.read(record.path), path="/nowhere", program="train.py [x]")
    waits = {2: 0.08, 0: 0.08, 1: 0.01, 3: 0.079}  # seconds of a step of 0.1 s
    found = [dataclasses.replace(seen, rank=rank, steps=((0.1, each, 0.0, 0.0),) * 30) for rank, each in waits.items()]
    rows = top_command.rows(found, 0.0)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row["slow"] for row in rows] == [False, True, False, False]
    assert [round(row["waiting_share"], 3) for row in rows] == [0.8, 0.1, 0.8, 0.79]
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(top_command._table(rows, 160, cut=True))
    lines = capture.get().splitlines()
    assert sum("100 ms, slow  10%" in line for line in lines) == 1
    assert len(lines) == 1 + 4 + 1  # a row for each rank
    assert lines[-1].strip() == "train.py [x]: 4 ranks"


def test_a_process_that_ends_while_it_is_looked_at(record):
    seen = read.read(record.path)
    os.rename(record.path, record.path + ".gone")
    try:
        (row,) = top_command.rows([seen], 0.0)
        assert row["pid"] == os.getpid()
    finally:
        os.rename(record.path + ".gone", record.path)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_narrow_table_has_fewer_columns_and_whole_cells(record, width, cut):
    seen = dataclasses.replace(read.read(record.path), path="/nowhere", program="train.py")
    found = [dataclasses.replace(seen, rank=rank, steps=((0.1, 0.05, 0.0, 0.0),) * 30) for rank in range(3)]
    wide = {"host": "node0123.cluster", "pid": 4123456, "step": 123456, "step_seconds": 0.123, "slow": True}
    wide |= {"collective": "reduce_to(SUM, 12 values of float64 in all)"}
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(top_command._table([{**row, **wide} for row in top_command.rows(found, 0.0)], width, cut=cut))
    table, caption = re.split(r"\n(?=train.py: )", capture.get())
    assert max(map(len, table.splitlines())) <= width
    heads = re.split(r"  +", table.splitlines()[0].strip())
    assert heads[:4] == ["rank", "host", "pid", "step"]
    for rank in range(3):
        assert re.search(rf"^{rank} +node0123.cluster  4123456  123456  (.*  )?reduce_to\(SUM", table, re.MULTILINE)
    assert ("for" in heads, "memory" in heads) == (width > 80, width == 160)
    missing = {"step time", "waits", "phase", "for", "bytes/s", "memory"}.difference(heads)
    text = " ".join(caption.split())
    assert text.startswith("train.py: 3 ranks")
    assert ("wider" in text) == bool(missing)
    assert all(re.search(rf"\b{name}[,)]", text) for name in missing)
