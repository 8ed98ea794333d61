"""The last records of jobs that have ended: kept in a file, and read again."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from mpistrat.monitor import folder
from mpistrat.monitor.record_json import as_json, from_json
from mpistrat.monitor.waits import of_one_job, waits
from mpistrat.runtime.process.patience import within
from mpistrat.runtime.record import read
from mpistrat.runtime.record.layout import Phase
from mpistrat.runtime.record.read import Record

_TOLD = (Phase.FAILED, Phase.FINISHED)
_MOST_FILES = 20
_PREFIX = "last-"
_PATIENCE = 10.0  # seconds for the file of a job


class Ended(NamedTuple):
    """A job that has ended.

    Attributes
    ----------
    records : tuple of Record
    notes : tuple of str
        What the launcher said of its end.
    when : float
        The time since the epoch at which the records were kept.
    """

    records: tuple[Record, ...]
    notes: tuple[str, ...]
    when: float


def left(since: float, processes: Collection[int]) -> list[Record]:
    """Return the records in the memory of this node of processes that have ended, but not as a program should.

    Parameters
    ----------
    since : float
        When the job was started, in seconds since the epoch.
    processes : collection of int
        Processes of the job, as far as they are known. Records of other jobs do not count.
    """
    gone = []
    for record in read.records():
        with contextlib.suppress(OSError):
            if not record.lives and os.stat(record.path).st_ctime >= since:
                gone.append(record)
    found = [each for each in gone if each.pid in processes]
    for record in found[:]:  # a rank that ended early may not be known
        found += [each for each in of_one_job(record, gone) if each not in found]
    return found


def keep(records: Sequence[Record], notes: Sequence[str], failed: bool) -> Path | None:
    """Move records from the memory of this node to a file. They stay in memory if no file can be written.

    Parameters
    ----------
    records : sequence of Record
    notes : sequence of str
        What the launcher says of the end of the job.
    failed : bool
        Whether to write the file: the records of a job that succeeded are only removed.

    Returns
    -------
    pathlib.Path or None
        The file, None if there is nothing to keep.

    Raises
    ------
    OSError
        If no file can be written.
    """
    path = None
    if failed and records:
        text = json.dumps(
            {"when": time.time(), "notes": list(notes), "records": [as_json(each) for each in records]}
        )
        name = f"{_PREFIX}{time.time_ns()}-{os.getpid()}.json"
        path = within(_PATIENCE, lambda: folder.write_new(name, text))
        _remove_old(path.parent)
    for record in records:
        with contextlib.suppress(OSError):
            os.unlink(record.path)
    return path


def unfinished(records: Sequence[Record], left: Collection[int] = ()) -> list[str]:
    """Return texts about the ranks that have ended their processes without ending their programs.

    Ranks that have failed, or finalized MPI, told so themselves. If all ranks have ended by ``os._exit(0)``, there is
    nothing to tell.

    Parameters
    ----------
    records : sequence of Record
    left : collection of int
        The ranks that have left according to the launcher.
    """
    if all(each.exit_status == 0 for each in records):
        return []
    known = [each for each in records if each.exit_status is not None or each.rank in left]
    if not known and any(each.phase == Phase.FAILED for each in records):
        return []  # the launcher has ended the others
    behind = known or [each for wait in waits(records, ()) for each in wait.missing] or records
    several = [each for each in dict.fromkeys(behind) if each.size > 1 and each.phase not in _TOLD]
    one_of = "" if known or len(several) < 2 else "one of these: "  # the launcher has ended the others
    return [one_of + _end_of(each) for each in several]


def _end_of(record: Record) -> str:
    how = "" if record.exit_status is None else f" by os._exit({record.exit_status})"
    last = record.entries[-1] if record.entries else None
    call = (
        "it had made no collective"
        if last is None
        else f"its last collective was {last.operation} at {last.place}"
    )
    return f"rank {record.rank} ({record.host}, process {record.pid}) ended{how} without telling the others; {call}"


def _remove_old(of: Path) -> None:
    for path in sorted(of.glob(f"{_PREFIX}*.json"))[:-_MOST_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def latest(job: str = "") -> Ended | None:
    """Return the job that ended last: one whose records are still in memory, or that of the newest file.

    Parameters
    ----------
    job : str, optional
        The number of a batch job: other jobs do not count.

    Raises
    ------
    OSError
        If the directory for files does not exist, or its files cannot be read.
    ValueError
        If its files are damaged.
    """
    gone = [each for each in read.records() if not each.lives and job in ("", each.job)]
    times = [each.last_sign for each in gone]
    files = sorted(folder.folder().glob(f"{_PREFIX}*.json"), reverse=True)
    kept, problems = _newest(files, job)
    if gone and (kept is None or max(times) > kept.when):
        newest = gone[times.index(max(times))]
        return Ended(tuple(of_one_job(newest, gone)), (), max(times))
    if kept is None and problems:
        raise problems[0]
    return kept


def _newest(files: Sequence[Path], job: str) -> tuple[Ended | None, list[Exception]]:
    """Return the first of these files that has records, of this job if there is one, and what is wrong with others."""
    problems: list[Exception] = []
    for path in files:
        try:
            ended = load(path)
        except (OSError, ValueError) as error:
            problems.append(error)
        else:
            if not job or job in {each.job for each in ended.records}:
                return ended, problems
    return None, problems


def load(path: str | Path) -> Ended:
    """Return the job in a file.

    Raises
    ------
    ValueError
        If the file is not one that `keep` has written.
    """
    try:
        told = json.loads(Path(path).read_text())
        return Ended(tuple(map(from_json, told["records"])), tuple(told["notes"]), float(told["when"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the record of a job, or is damaged ({error}): remove it") from None
