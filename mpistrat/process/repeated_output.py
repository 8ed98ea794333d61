"""What several ranks print alike, or write to one file: told at the end of a program with ``rc.debug``."""

from __future__ import annotations

import builtins
import os
import sys
import sysconfig
import zlib
from typing import Any, NamedTuple

from mpistrat.process import failure
from mpistrat.process.own_files import is_own

_MOST = 1000  # lines and files that are noted
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


class _Printed(NamedTuple):
    calls: int
    checksum: int
    first: str


_printed: dict[str, _Printed] = {}
_written: dict[str, str] = {}
_noting = False


def note() -> None:
    """Note from now on what this rank prints, and which files it opens for writing."""
    global _noting
    if _noting:
        return
    _noting = True
    import h5py

    own_print, own_init = builtins.print, h5py.File.__init__

    def noted_print(*values: Any, **options: Any) -> None:
        if options.get("file") in (None, sys.stdout) and len(_printed) < _MOST and (place := _place()):
            text = " ".join(map(str, values))
            calls, checksum, first = _printed.get(place, _Printed(0, 0, text))
            _printed[place] = _Printed(calls + 1, zlib.crc32(text.encode(errors="replace"), checksum), first)
        own_print(*values, **options)

    def noted_init(self: Any, name: Any, mode: str = "r", *args: Any, **options: Any) -> None:
        if mode != "r" and options.get("driver") != "mpio":  # by which all ranks open one file together
            _note_file(name)
        own_init(self, name, mode, *args, **options)

    builtins.print = noted_print
    h5py.File.__init__ = noted_init  # the HDF5 library opens files without Python
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        _note_file(arguments[0])


def _note_file(name: Any) -> None:
    if isinstance(name, (str, bytes, os.PathLike)) and len(_written) < _MOST and (place := _place()):
        _written.setdefault(os.path.realpath(os.fsdecode(name)), place)


def _place() -> str:
    """Return the file and line of the program, or an empty string for a call of this package."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_own(name):
            if name != __file__:
                return ""
        elif not name.startswith((*_LIBRARIES, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return ""


def report(world: Any) -> None:
    """Print on rank 0 what the ranks have done alike. Collective."""
    files = {path: (place, _identity(path)) for path, place in _written.items()}
    everyone = world.allgather((dict(_printed), {path: each for path, each in files.items() if each[1]}))
    _printed.clear()
    _written.clear()
    if world.rank:
        return
    lines = []
    for place, printed in everyone[0][0].items():
        if all(other.get(place) == printed for other, _ in everyone[1:]):
            times = f", {printed.calls} times" if printed.calls > 1 else ""
            lines.append(
                f"{place} prints {printed.first[:40]!r} on all {world.size} ranks{times}: print on one of them by "
                "`if strategy.is_chief:`"
            )
    writers: dict[tuple[str, Any], list[tuple[int, str]]] = {}
    for rank, (_, theirs) in enumerate(everyone):
        for path, (place, identity) in theirs.items():
            writers.setdefault((path, identity), []).append((rank, place))
    for (path, _), found in writers.items():
        if len(found) > 1:
            places = ", ".join(f"rank {rank} at {place}" for rank, place in found[:4])
            more = ", ..." * (len(found) > 4)
            lines.append(
                f"{path} was opened for writing by {len(found)} ranks ({places}{more}): write it on one rank by `if "
                "strategy.is_chief:`, or give each rank a name of its own"
            )
    text = (
        "".join(f"  {each}\n" for each in lines)
        or "  no line that all ranks print, no file that several write\n"
    )
    failure.write(f"mpistrat, MPISTRAT_DEBUG at the end of {world.size} ranks:\n{text}")


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a file from one of the same path on another node, None if it is not a file."""
    if not os.path.isfile(path):
        return None
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns
