"""A rank whose record finds no room in the memory that its node shares."""

import errno
import os

import pytest

from mpistrat.monitor import last
from mpistrat.runtime.record import flight_record, layout, read


@pytest.fixture(params=["full", "missing"])
def record(request, monkeypatch, tmp_path):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if request.param == "full":
        monkeypatch.setattr(layout, "FOLDER", str(tmp_path))
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr(layout, "FOLDER", str(tmp_path / "missing"))
    return flight_record.FlightRecord(3, 4)


def test_it_keeps_its_record_to_itself(record, tmp_path):
    assert record.path is None
    assert list(tmp_path.iterdir()) == []
    record.answer(41)
    record.tell_stacks()
    assert read.parse(record.contents()).rank == 3
    record.close()


def test_its_record_is_kept_like_others(record, tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path / "records"))
    kept = last.keep([read.parse(record.contents())], ["note"], failed=True)
    assert [each.rank for each in last.load(kept).records] == [3]
