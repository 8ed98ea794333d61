"""A program with NumPy and mpi4py that ends after its first all-reduce."""

import time

first_line = time.time()

import resource  # noqa: E402

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

total = np.empty(1, np.float32)
MPI.COMM_WORLD.Allreduce(np.ones(1, np.float32), total)
done = time.time()
assert total == MPI.COMM_WORLD.size
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"\nstarted {first_line!r} {done!r} {peak} .\n", end="", flush=True)
