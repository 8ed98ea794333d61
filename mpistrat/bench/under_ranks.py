"""Launching a measurement under several ranks."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from mpistrat.launch.launch import started_tasks, without_launcher
from mpistrat.process import children
from mpistrat.runtime.affinity import THREADS

_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parser(description: str | None, repetitions: int, program: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all subjects have. A file that is run needs no ``program`` to name it."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add_launch(parser)
    count(parser, "--repetitions", repetitions, "measurements of each program")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    return parser


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument("-n", type=positive, default=2, help="number of ranks to launch (%(default)s)")
    parser.add_argument("--launcher", help="command to launch with, such as 'srun -n {n}' (mpistrat run -n {n})")
    parser.add_argument("--here", action="store_true", help="use the ranks that run this command; launch no others")


def count(parser: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    """Add an option that is a positive number. Its help ends with the default."""
    parser.add_argument(option, type=positive, default=default, help=f"{text} (%(default)s)")


def positive(text: str) -> int:
    """Return an argument as a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be positive, not {number}")
    return number


def size(text: str) -> int:
    """Return the bytes of a size with a unit.

    >>> size("64KiB")
    65536
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]iB|B|)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of bytes, such as 64KiB, not {text!r}")
    return int(match[1]) * _BYTES[match[2]]


def sizes(text: str) -> list[int]:
    """Return the bytes of sizes separated by commas.

    >>> sizes("4KiB,1MiB")
    [4096, 1048576]
    """
    return [size(part) for part in text.split(",")]


def add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option ``--sizes``, which is a list of bytes."""
    parser.add_argument("--sizes", type=sizes, default=sizes(default), help=f"sizes of the array ({default})")


def under_several_ranks() -> bool:
    """Return whether a launcher started this process together with others."""
    started = started_tasks(os.environ)
    return started is not None and started.tasks > 1


def safe_words(program: Sequence[str]) -> Sequence[str]:
    """Return the words after the name of Python that start a program, safely if it is a module of this package."""
    return children.words(*program[1:]) if program[0] == "-m" else program


def command(n: int, launcher: str | None, program: Sequence[str]) -> list[str]:
    """Return the command that runs ``python program...`` under n ranks."""
    program = safe_words(program)
    if launcher is None:
        return children.running("mpistrat", "run", "-n", str(n), *program)
    return [*shlex.split(launcher.replace("{n}", str(n))), sys.executable, *program]


def one_thread(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a rank one BLAS thread: none if the user has set one of them.

    >>> one_thread({"OMP_NUM_THREADS": "4"})
    {}
    """
    return {} if any(name in environ for name in THREADS) else dict.fromkeys(THREADS, "1")


def environment() -> dict[str, str]:
    """Return the environment of launched ranks."""
    environ = without_launcher(os.environ)
    return {**environ, **one_thread(environ)}


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    program: Sequence[str],
    measure: Callable[[argparse.Namespace], int],
) -> int:
    """Launch ``python program... argv...`` under the ranks of its arguments, and return the exit status.

    Measure in this process if a launcher started it, or ``--here`` is given. The environment then limits the threads
    of a BLAS that is loaded later.
    """
    arguments = parser.parse_args(argv)
    if arguments.here or under_several_ranks():
        os.environ.update(one_thread(os.environ))
        return measure(arguments)
    words = command(arguments.n, arguments.launcher, [*program, "--here", *argv])
    return subprocess.run(words, env=environment()).returncode
