"""Program that shuffles 10**8 rows of 100 bytes: ``python many_rows_program.py FILE MEMORY``.

It prints by how many bytes its memory grew, and how many rows it got.
"""

import re
import sys

import h5py
import numpy as np

import mpistrat
from mpistrat.data import Dataset, Options


def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+)", status.read())[1]) << 10


path, memory = sys.argv[1:]
with h5py.File(path, "w") as file:  # a file of holes
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((10**8, 25)), how)
options = Options()
options.shuffle_memory = int(memory)
strategy = mpistrat.OneDeviceStrategy("cpu:0")
small = Dataset.from_arrays(np.arange(100)).shuffle(seed=1).batch(7)
list(strategy.experimental_distribute_dataset(small))
before = peak()
dataset = Dataset.from_hdf5(path, "x").shuffle(seed=1).batch(128).with_options(options)
rows = 0
for batch in strategy.experimental_distribute_dataset(dataset):
    rows += len(batch)
    if rows >= 2_000_000:
        break
print(peak() - before, rows)
