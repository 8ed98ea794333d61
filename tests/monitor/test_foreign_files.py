"""Files in the directory for records that are of other programs or users, and texts that are not plain."""

import json
import os

import pytest

from mpistrat.monitor import last
from mpistrat.monitor.view import Notices
from mpistrat.record import flight_record, layout, read


@pytest.fixture
def made():
    made = flight_record.FlightRecord(0, 1)
    yield made
    if made.path is not None and os.path.exists(made.path):
        os.unlink(made.path)


@pytest.fixture
def record(made):
    return read.parse(made.contents(), made.path or "")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path))
    return tmp_path


def test_old_records_are_removed_and_files_of_other_programs_are_not(record, directory):
    foreign = [directory / f"last-{name}.json" for name in ("epoch", "1", "0-best")]
    for each in foreign:
        each.write_text("{}")
    old = directory / "last-1000-1.json"
    for i in range(20):
        (directory / f"last-100{i:02}-1.json").write_text("{}")
    old.write_text("{}")
    kept = last.keep([record], [], failed=True)
    assert kept.exists()
    assert not old.exists()
    assert all(each.exists() for each in foreign)


def test_files_of_other_programs_alone_are_no_error(directory):
    (directory / "last-epoch.json").write_text("{}")
    assert last.latest("no such job") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_records_of_other_users_do_not_count(record, directory):
    theirs = last.keep([record], ["theirs"], failed=True)
    theirs.chmod(0o644)
    os.chown(theirs, 65534, 65534)
    assert last.latest("no such job") is None
    assert last.latest(record.job) is None or last.latest(record.job).notes != ("theirs",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_record_of_another_user_is_passed_over(made, tmp_path):
    copy = tmp_path / f"{layout.PREFIX}copy"
    copy.write_bytes(made.contents())
    assert len(read.records(str(tmp_path))) == 1
    os.chown(copy, 65534, 65534)
    assert read.records(str(tmp_path)) == []


def test_a_report_with_lines_and_names_that_are_not_utf_8(directory):
    path = last.write_new("hang.txt", "at caf\udce9.py:3: print('\u65e5\u672c')")
    assert path.read_bytes().decode() == "at caf\\udce9.py:3: print('\u65e5\u672c')"


def test_files_that_are_no_notices_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notices, other = Notices("job", 0), Notices("job", 1)
    with notices.looking():
        (board,) = tmp_path.rglob(".mpistrat-board-*")
        (board / "x.json").write_text("{}")
        (board / "call-1.asks.one.json").write_text("{}")
        (board / "call-2.asks.3.json").write_text(json.dumps({"now": 1.0, "records": [], "facts": []}))
        assert other.unanswered([1]) == ["call-2"]
    notices.leave()
    other.leave()
