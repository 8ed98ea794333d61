"""Programs, one after the other, in processes that load a backend once: ``together.py ONE.py ARG + OTHER.py``."""

import runpy
import sys

rest = sys.argv[1:]
while rest:
    end = rest.index("+") if "+" in rest else len(rest)
    sys.argv, rest = rest[:end], rest[end + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
