"""Python processes that run code of this package. They import nothing from the current directory.

``python -c`` and ``python -m`` would look there first, and a folder may be another user's, with an ``mpi4py`` of his
own. ``python -P`` is not known before Python 3.11. So this file is the main program of such a process: Python puts its
folder on the path instead, and it takes that away before it imports.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGES = os.path.dirname(os.path.dirname(_HERE))
_SAFE = 'import sys\nif sys.path[0] == "":\n    del sys.path[0]\n'  # the path has no such entry with PYTHONSAFEPATH


def running_code(code: str, python: str) -> list[str]:
    """Return the command of a Python, which may have other packages, that runs this code."""
    return [python, "-c", _SAFE + code]


def running(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package as the main program, with these arguments."""
    return [sys.executable, *words(module, *arguments)]


def words(module: str, *arguments: str) -> list[str]:
    """Return the words after the name of Python in `running`."""
    return [os.path.join(_HERE, os.path.basename(__file__)), module, *arguments]


def run_as_main(program: tuple[str, ...]) -> None:
    """Run a file, a folder or an archive with its arguments in this process, or ``-m`` and a module, as Python does."""
    import pkgutil
    import runpy

    is_module, safe = program[0] == "-m", getattr(sys.flags, "safe_path", False)
    sys.argv[:] = program[is_module:]
    if is_module:
        sys.path[:0] = [] if safe else [os.getcwd()]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        is_script = pkgutil.get_importer(program[0]) is None  # neither a folder nor an archive
        sys.path[:0] = [os.path.dirname(os.path.realpath(program[0]))] if is_script and not safe else []
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")


def _main() -> None:
    if sys.path[0] in (_HERE, os.path.dirname(os.path.realpath(__file__))):
        del sys.path[0]
    # The parent may have found the package in a folder that this process does not know, before another copy of it.
    known = [folder for folder in sys.path if os.path.isfile(os.path.join(folder, "mpistrat", "__init__.py"))]
    if not known or known[0] != _PACKAGES:
        sys.path.insert(sys.path.index(known[0]) if known else len(sys.path), _PACKAGES)
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
