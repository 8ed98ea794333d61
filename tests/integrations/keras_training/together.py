"""Programs, one after the other, in processes that load a backend once: ``together.py ONE.py ARG + OTHER.py``."""

import os
import runpy
import sys

# Keras imports these where they are installed, TensorFlow for the sake of its seed: 4 of 7 s on PyTorch, of 5 on JAX.
if os.environ.get("MPISTRAT_TEST_KERAS") != "all":
    unused = {"matplotlib", "pandas", "sklearn", "jax", "tensorflow"} - {os.environ["KERAS_BACKEND"]}
    sys.modules.update(dict.fromkeys(unused))
rest = sys.argv[1:]
while rest:
    end = rest.index("+") if "+" in rest else len(rest)
    sys.argv, rest = rest[:end], rest[end + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
