"""Programs, one after the other, in processes that load a backend once: ``together.py ONE.py ARG + OTHER.py``."""

import os
import runpy
import sys

# Keras imports these where they are installed, and they take a third of its start on PyTorch, half of it on JAX.
if os.environ.get("MPISTRAT_TEST_KERAS") != "all":
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))
rest = sys.argv[1:]
while rest:
    end = rest.index("+") if "+" in rest else len(rest)
    sys.argv, rest = rest[:end], rest[end + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
