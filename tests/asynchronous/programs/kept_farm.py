"""A farm that ends its job by a signal, once it has some results: ``python kept_farm.py FOLDER COUNT LAST SIGNAL``.

By SIGKILL it waits until the file has them. By SIGTERM and SIGINT it is the farm that writes them. SIGINT comes to all
ranks, and to the workers first, most of whose time is between two calls.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from mpistrat.coordinator import Executor

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def square(i, part):
    """A result of numbers and arrays. Each call leaves a line of its number."""
    if FOLDER is not None:
        with open(FOLDER / f"ran-{os.getpid()}", "a") as file:
            file.write(f"{i}\n")
        if int(sys.argv[4]) != signal.SIGINT:
            time.sleep(0.01)
    return i**2, {"part": np.arange(3) * part, "name": str(i)}


def kept(path):
    if not path.exists():
        return 0
    with h5py.File(path) as file:
        return len(json.loads(file["results"][()].tobytes()))


def main(count, last, number):
    with Executor() as executor:
        if executor is not None:
            path = FOLDER / "results.h5"
            results = []
            for result in executor.map(square, range(count), np.linspace(0, 1, count), keep=path):
                results.append(result)
                if len(results) == last:
                    while number == signal.SIGKILL and kept(path) < last:  # a pause follows each write
                        time.sleep(0.01)
                    if number == signal.SIGINT:
                        for worker in FOLDER.glob("ran-*"):
                            os.kill(int(worker.name.removeprefix("ran-")), number)
                        time.sleep(0.2)
                    os.kill(os.getpid(), number)
            assert str(results) == str([square(i, part) for i, part in enumerate(np.linspace(0, 1, count))])
            print("as in one process")


if __name__ == "__main__":
    main(*map(int, sys.argv[2:]))
