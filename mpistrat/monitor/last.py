"""The last records of jobs that have ended: kept in a file, and read again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from mpistrat.launch import proc
from mpistrat.monitor.waits import Wait, of_one_job, waits
from mpistrat.process import private_file
from mpistrat.process.files import appearing
from mpistrat.process.waiting import within
from mpistrat.record import read
from mpistrat.record.layout import Phase
from mpistrat.record.read import Record, record_as_json, record_from_json
from mpistrat.runtime.environment import rc

_ANNOUNCED_PHASES = (Phase.FAILED, Phase.FINISHED)
_MOST_FILES = 20
_PREFIX = "last-"
_NAME = re.compile(rf"{_PREFIX}\d+-\d+\.json")
_WRITE_TIMEOUT_S = 10.0  # for the file of a job


class End(NamedTuple):
    """What has ended a job, as far as it is known."""

    first: int | None = None  # the rank that ended first, after which the launcher has ended the others
    by: str = ""  # what has ended all ranks at once: ``"the call of MPI_Abort"``, say


UNKNOWN = End()


class EndedJob(NamedTuple):
    """A job that has ended."""

    records: tuple[Record, ...]
    notes: tuple[str, ...]  # what the launcher said of its end
    when: float  # the time since the epoch at which the records were kept
    end: End
    # how many processes of its cgroup the system had killed for want of memory by then
    out_of_memory_kills: int | None


def left(since: float, processes: Collection[int]) -> list[Record]:
    """Return the records that the ended processes of a job have left in the memory of this node.

    The job was started at ``since``, in seconds since the epoch. ``processes`` has its processes, as far as they are
    known. Records of other jobs do not count.
    """
    gone = []
    for record in read.records():
        with contextlib.suppress(OSError):
            if not record.lives and os.stat(record.path).st_ctime >= since:
                gone.append(record)
    selected = [record for record in gone if record.pid in processes]
    for record in selected[:]:  # a rank that ended early may not be known
        selected += [other for other in of_one_job(record, gone) if other not in selected]
    return selected


def keep(records: Sequence[Record], notes: Sequence[str], failed: bool, end: End = UNKNOWN) -> Path | None:
    """Move records from the memory of this node to a file. They stay in memory if no file can be written.

    ``notes`` are texts of the launcher about the end of the job. The records of a job that has not ``failed`` are only
    removed. Return the file, or None if there is nothing to keep. Raise OSError if no file can be written.
    """
    path = None
    if failed and records:
        text = json.dumps(
            {
                "when": time.time(),
                "notes": list(notes),
                "end": end,
                "out_of_memory_kills": proc.out_of_memory_kills(),
                "records": [record_as_json(record) for record in records],
            }
        )
        name = f"{_PREFIX}{time.time_ns()}-{os.getpid()}.json"
        path = within(_WRITE_TIMEOUT_S, lambda: write_new(name, text))
        for old in _files(path.parent)[_MOST_FILES:]:
            with contextlib.suppress(OSError):
                old.unlink()
    # After the file is complete: if it cannot be written, `mpistrat top --last` still finds the records in memory.
    for record in records:
        with contextlib.suppress(OSError):
            os.unlink(record.path)
    return path


def first_to_end(records: Sequence[Record], order: Sequence[int], ranks: int) -> int | None:
    """Return the rank that ended first, after which the launcher ended the others, or None if that is not known.

    ``records`` are the ones that ranks have left on this node, and ``order`` has its processes in the order in which
    they ended. The job has so many ``ranks``. A rank that failed or left by ``os._exit`` has noted it, and may end
    after others that the launcher ends.
    """
    if len(records) < ranks:  # a rank of another node, or one without a record, may have ended first
        return None
    positions = {process: position for position, process in enumerate(order)}
    announced = (record.phase == Phase.FAILED or record.exit_status is not None for record in records)
    if any(announced) or any(record.pid not in positions for record in records):
        return None
    ended = [record for record in records if record.phase != Phase.FINISHED]
    return min(ended, key=lambda record: positions[record.pid]).rank if ended else None


def waits_at_end(records: Sequence[Record], first: int | None) -> list[Wait]:
    """Return the collectives in which ranks waited when their job ended. Ranks that had left did not wait any more."""
    return waits(records, [record.key for record in records if record.rank == first or record.exit_status is not None])


def unfinished(records: Sequence[Record], left: Collection[int] = (), first: int | None = None) -> list[str]:
    """Return texts about the ranks whose processes have ended before their programs.

    Ranks that have failed, or finalized MPI, report it themselves. If all ranks have ended by ``os._exit(0)``, the list
    is empty. ``left`` has the ranks that have left according to the launcher, and ``first`` ended first.
    """
    if all(record.exit_status == 0 for record in records):
        return []
    known = [record for record in records if record.exit_status is not None or record.rank in left]
    known = known or [record for record in records if record.rank == first]
    if not known and any(record.phase == Phase.FAILED for record in records):
        return []  # the launcher has ended the others
    behind = known or [record for wait in waits_at_end(records, first) for record in wait.missing] or records
    several = [record for record in dict.fromkeys(behind) if record.size > 1 and record.phase not in _ANNOUNCED_PHASES]
    one_of = "" if known or len(several) < 2 else "one of these: "  # the launcher has ended the others
    return [one_of + _end_of(record) for record in several]


def _end_of(record: Record) -> str:
    how = "" if record.exit_status is None else f" by os._exit({record.exit_status})"
    last = record.entries[-1] if record.entries else None
    call = "it had made no collective" if last is None else f"its last collective was {last.operation} at {last.place}"
    return f"rank {record.rank} ({record.host}, process {record.pid}) ended{how} without telling the others; {call}"


def _files(of: Path) -> list[Path]:
    """Return the files of a directory that `keep` has written for this user, the newest first."""
    paths = []
    for path in of.glob(f"{_PREFIX}*.json"):
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(path.name) and path.lstat().st_uid == os.geteuid():
                paths.append(path)
    return sorted(paths, reverse=True)


def latest(job: str = "") -> EndedJob | None:
    """Return the job that ended last: one whose records are still in memory, or the job of the newest file.

    Only the batch job of number ``job`` counts, if it is given. Raise OSError if the directory for files does not
    exist, or its files cannot be read, and ValueError if its files are damaged.
    """
    gone = [record for record in read.records() if not record.lives and job in ("", record.job)]
    times = [record.last_sign for record in gone]
    saved, problems = _newest(_files(reports_folder()), job)
    if gone and (saved is None or max(times) > saved.when):
        newest = gone[times.index(max(times))]
        kills = proc.out_of_memory_kills()
        return EndedJob(tuple(of_one_job(newest, gone)), (), max(times), UNKNOWN, kills)
    if saved is None and problems:
        raise problems[0]
    return saved


def _newest(files: Sequence[Path], job: str) -> tuple[EndedJob | None, list[Exception]]:
    """Return the content of the first intact file, of this batch job if one is given, and the errors of the others."""
    problems: list[Exception] = []
    for path in files:
        try:
            ended = load(path)
        except (OSError, ValueError) as error:
            problems.append(error)
        else:
            if not job or job in {record.job for record in ended.records}:
                return ended, problems
    return None, problems


def load(path: str | Path) -> EndedJob:
    """Return the job in a file. Raise ValueError if the file is not one that `keep` has written."""
    try:
        values = json.loads(Path(path).read_text("utf-8"))
        return EndedJob(
            tuple(map(record_from_json, values["records"])),
            tuple(values["notes"]),
            float(values["when"]),
            End(*values.get("end", ())),
            values.get("out_of_memory_kills"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the record of a job, or is damaged ({error}): remove it") from None


def reports_folder() -> Path:
    """Return the directory, which exists and belongs to this user.

    It is ``MPISTRAT_RECORD_DIR``, or one of this user below the directory for temporary files. Raise OSError if no
    directory can be written by this user.
    """
    if rc.record_dir:
        chosen = Path(rc.record_dir)  # is taken as it is: a group may share it
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(mode=0o700, parents=True)
        if not chosen.is_dir():
            raise NotADirectoryError(f"MPISTRAT_RECORD_DIR={chosen} is not a directory: choose another")
        return chosen
    path = Path(tempfile.gettempdir()) / f"mpistrat-{os.geteuid()}"
    # All users write to this place: one may have made a directory or a link of this name, to read reports or to let
    # them overwrite a file. The name is not secret, so that `mpistrat top --last` finds it.
    private_file.make_folder(path, "set MPISTRAT_RECORD_DIR")
    return path


def write_new(name: str, text: str) -> Path:
    """Write a new file, which other users cannot read, and which appears complete and synced to disk.

    Raise FileExistsError if there is such a file: another rank of this node has written it. Raise OSError if the
    directory cannot be made, or is full.
    """
    path = reports_folder() / name
    with appearing(path, replace=False) as temporary, open(private_file.open_new(temporary), "wb") as file:
        # Names of files need not be UTF-8, and the locale need not be able to write lines of the program.
        file.write(text.encode(errors="backslashreplace"))
    return path
