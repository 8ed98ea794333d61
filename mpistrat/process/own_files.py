"""Which files make collectives for the user: those of this package, and of libraries that call it."""

from __future__ import annotations

import os

_directories: tuple[str, ...] = (os.path.abspath(os.path.join(os.path.dirname(__file__), "..")) + os.sep,)


def skip_in_call_sites(directory: str) -> None:
    """Look for the user's code outside a directory, too: that of a library that calls the package."""
    global _directories
    _directories = (*_directories, os.path.abspath(directory) + os.sep)


def is_own(file: str) -> bool:
    """Return whether a file is not the user's code."""
    return file.startswith(_directories)
