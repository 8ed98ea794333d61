"""The files that make collectives for the user: of this package, and of libraries that call it."""

from __future__ import annotations

import os
import sys

_directories: tuple[str, ...] = (os.path.abspath(os.path.join(os.path.dirname(__file__), "..")) + os.sep,)


def skip_in_call_sites(directory: str) -> None:
    """Do not take the files of a directory, of a library that calls the package, for the user's code."""
    global _directories
    _directories = (*_directories, os.path.abspath(directory) + os.sep)


def is_own(file: str) -> bool:
    """Return whether a file is not the user's code."""
    return file.startswith(_directories)


def is_of_library(file: str) -> bool:
    """Return whether a file belongs to a library that calls the package."""
    return file.startswith(_directories[1:])


def level_of_program() -> int:
    """Return the ``stacklevel`` by which a warning of the calling function shows the line of the program."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (is_own(file := frame.f_code.co_filename) or file.endswith("/functools.py")):
        frame, level = frame.f_back, level + 1
    return level
