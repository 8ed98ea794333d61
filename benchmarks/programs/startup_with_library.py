"""A program with the library that ends after its first all-reduce."""

import time

first_line = time.time()

import resource  # noqa: E402

import numpy as np  # noqa: E402

import mpistrat  # noqa: E402

strategy = mpistrat.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", np.ones(1, np.float32), axis=None)
done = time.time()
assert total == strategy.num_replicas_in_sync
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"\nstarted {first_line!r} {done!r} {peak} .\n", end="", flush=True)
