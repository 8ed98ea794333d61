"""What ranks print alike, write to one file, or draw unlike, reported at a program's end with ``rc.debug``."""

from __future__ import annotations

import builtins
import functools
import os
import random
import sys
import sysconfig
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from mpistrat.process import failure
from mpistrat.process.own_files import is_own
from mpistrat.representation import few, grouped

_MOST = 1000  # lines and files that are noted
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


class _Printed(NamedTuple):
    calls: int
    checksum: int
    first: str


_printed: dict[str, _Printed] = {}
_written: dict[str, str] = {}
_drawn: dict[str, int] = {}  # checksum of the numbers, by line
_noting: set[str] = set()
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")


def note(checks: frozenset[str]) -> None:
    """Note from now on what this rank prints and opens for writing (``output``), and draws (``random``)."""
    for check, begin in ("output", _note_output), ("random", _note_draws):
        if check in checks and check not in _noting:
            _noting.add(check)
            begin()


def _note_draws() -> None:
    import numpy as np

    for module in (random, np.random):
        for name, function in vars(module).copy().items():
            of = type(getattr(function, "__self__", None))  # the generator that the module shares
            if of in (random.Random, np.random.RandomState) and name not in _NO_DRAWS:
                setattr(module, name, _noted(function))
    without_seed = np.random.default_rng

    @functools.wraps(without_seed)
    def default_rng(seed: Any = None) -> Any:
        generator = without_seed(seed)
        if seed is None:
            _note_draw(generator.bit_generator.state)
        return generator

    np.random.default_rng = default_rng


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **options: Any) -> Any:
        drawn = function(*args, **options)
        _note_draw(args if drawn is None else drawn)  # shuffle() changes its argument
        return drawn

    return draw


def _note_draw(drawn: Any) -> None:
    if len(_drawn) < _MOST and (site := _call_site(outermost=True)):
        bits = drawn.tobytes() if hasattr(drawn, "tobytes") else repr(drawn).encode(errors="replace")
        _drawn[site] = zlib.crc32(bits, _drawn.get(site, 0))


def _note_output() -> None:
    import h5py

    own_print, own_init = builtins.print, h5py.File.__init__

    def noted_print(*values: Any, **options: Any) -> None:
        if options.get("file") in (None, sys.stdout) and len(_printed) < _MOST and (site := _call_site()):
            text = " ".join(map(str, values))
            calls, checksum, first = _printed.get(site, _Printed(0, 0, text))
            _printed[site] = _Printed(calls + 1, zlib.crc32(text.encode(errors="replace"), checksum), first)
        own_print(*values, **options)

    def noted_init(self: Any, name: Any, mode: str = "r", *args: Any, **options: Any) -> None:
        if mode != "r" and options.get("driver") != "mpio":  # by which all ranks open one file together
            _note_file(name)
        own_init(self, name, mode, *args, **options)

    builtins.print = noted_print
    h5py.File.__init__ = noted_init  # the HDF5 library opens files without Python
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        _note_file(arguments[0])


def _note_file(name: Any) -> None:
    if isinstance(name, (str, bytes, os.PathLike)) and len(_written) < _MOST and (site := _call_site()):
        _written.setdefault(os.path.realpath(os.fsdecode(name)), site)


def _call_site(outermost: bool = False) -> str:
    """Return the file and line of the program, or an empty string for a call of this package.

    With ``outermost`` also for a call in a function that this package calls, as `Strategy.run` does.
    """
    frame, site = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_own(name):
            if name != __file__:
                return ""
        elif not site and not name.startswith((*_LIBRARIES, "<")):
            site = f"{name}:{frame.f_lineno}"
            if not outermost:
                break
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return site


def report(world: Any) -> None:
    """Print on rank 0 what the ranks have done alike. Collective."""
    files = {path: (site, _identity(path)) for path, site in _written.items()}
    files = {path: entry for path, entry in files.items() if entry[1]}
    of_ranks = world.allgather((dict(_printed), files, dict(_drawn)))
    for record in (_printed, _written, _drawn):
        record.clear()
    if world.rank:
        return
    lines = []
    for site, printed in of_ranks[0][0].items():
        if all(other.get(site) == printed for other, *_ in of_ranks[1:]):
            times = f", {printed.calls} times" if printed.calls > 1 else ""
            lines.append(
                f"{site} prints {printed.first[:40]!r} on all {world.size} ranks{times}: print on one of them by "
                "`if strategy.is_chief:`"
            )
    for site, checksum in of_ranks[0][2].items():
        others = [drawn.get(site) for *_, drawn in of_ranks[1:]]
        if None not in others and {*others} != {checksum}:
            lines.append(
                f"{site} draws other numbers on each rank, outside of strategy.run: for equal numbers give a seed, as "
                "in np.random.default_rng(0) and np.random.seed(0); for numbers of each rank take strategy.rng(seed)"
            )
    writers = grouped(
        ((path, identity), (rank, site))
        for rank, (_, written, _) in enumerate(of_ranks)
        for path, (site, identity) in written.items()
    )
    for (path, _), opened in writers.items():
        if len(opened) > 1:
            sites = few([f"rank {rank} at {site}" for rank, site in opened], 4)
            lines.append(
                f"{path} was opened for writing by {len(opened)} ranks ({sites}): write it on one rank by `if "
                "strategy.is_chief:`, or give each rank a name of its own"
            )
    text = (
        "".join(f"  {line}\n" for line in lines)
        or "  no line that all ranks print, no file that several write, no draw that differs\n"
    )
    failure.write(f"mpistrat, MPISTRAT_DEBUG at the end of {world.size} ranks:\n{text}")


def _identity(path: str) -> tuple[int, int] | None:
    """Return a mark of a file, other than of one of the same path on another node; None if it is not a file."""
    if not os.path.isfile(path):
        return None
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns
