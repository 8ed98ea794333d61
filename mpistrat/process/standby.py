"""A rank of the next run of a program, which waits for the end of this one with the program's imports done.

The launcher has started it, but it has not started MPI. It imports what the same rank of this run has imported by the
end of its first step, but not the program's own files. Then it makes the file `READY`, and reads from a named pipe
whose other end `mpistrat run` has: a byte lets it run the program, and the end of `mpistrat run` ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from mpistrat.launch import launch, proc
from mpistrat.process import children

GO, INPUT = "go", "stdin"  # the named pipes in the folder of a job
READY = "ready"  # there, a file for each rank whose imports are done
IMPORTS = "imports"  # in the folder of copies, a folder for what ranks note
_IDLE = 4.0  # times the time that it computes, which it leaves to the run that computes
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def note_imports(folder: Path, run: int, rank: int) -> None:
    """Note what this process has imported, and the variables that it has changed, if ``folder`` has a place for it."""
    folder /= IMPORTS
    if not folder.is_dir():
        return
    with contextlib.suppress(OSError):  # then no ranks wait
        initial = proc.environ(os.getpid())
        noted = {
            "modules": [name for name, module in sys.modules.copy().items() if _is_installed(name, module)],
            "environ": {name: value for name, value in os.environ.items() if initial.get(name) != value},
        }
        temporary = folder / f".{run}.{rank}"
        temporary.write_text(json.dumps(noted), "utf-8")
        temporary.rename(folder / f"{run}.{rank}")


def _is_installed(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None) or ""
    # Submodules of mpi4py start MPI, or cost next to nothing.
    return not name.startswith(("__main__", "mpi4py.")) and (
        name.startswith("mpistrat.") or any(folder in file for folder in _INSTALLED)
    )


class _SlowFinder:
    """The first finder of modules, which finds none. It pauses, and ends the process when the pipe ``go`` does.

    Niceness would serve as well, but only root may lower it again. An import of ``mpi4py.MPI`` would start MPI. An
    exception would leave half of the importing package behind, which may not be imported twice. So it ends the process.
    """

    def __init__(self, go: int):
        self._go, self._computed = go, time.process_time()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        pause = _IDLE * (time.process_time() - self._computed)
        if name == "mpi4py.MPI" or select.select([self._go], [], [], pause)[0]:
            os._exit(1)
        self._computed = time.process_time()


def _import(noted: dict[str, Any], finder: Any) -> None:
    """Import modules in the environment in which the program has imported them."""
    before = {name: os.environ.get(name) for name in noted["environ"]}
    os.environ.update(noted["environ"])
    sys.meta_path.insert(0, finder)
    for name in noted["modules"]:
        with contextlib.suppress(BaseException):  # the program gets the error when it imports this module
            importlib.import_module(name)
    sys.meta_path.remove(finder)
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def _main(folder: str, imports: str, *program: str) -> None:
    # Without waiting for a writer: if `mpistrat run` has ended, the pipe has none.
    go = os.open(os.path.join(folder, GO), os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(go, True)
    rank = (launch.rank_and_size(os.environ) or (0, 1))[0]
    _import(json.loads(Path(f"{imports}.{rank}").read_text("utf-8")), _SlowFinder(go))
    Path(folder, f"{READY}.{rank}").touch()
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    if rank == 0:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, INPUT), "rb", buffering=0) as source:
            os.dup2(source.fileno(), 0)
    children.run_as_main(program)


if __name__ == "__main__":
    _main(*sys.argv[1:])
