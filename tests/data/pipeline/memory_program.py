"""Program that measures the memory of fifty epochs: ``python memory_program.py FILE CASE BATCH WAITING PAUSE``.

It prints three numbers: how many bytes of the peak remain beyond the memory before the epochs, ``WAITING`` batches,
one that is being made, and two of the program; by how many bytes the program grew from the tenth epoch on; and the
bytes of the largest batch.
"""

import re
import sys
import time

import h5py  # noqa: F401
import numpy as np

import mpistrat
from mpistrat.data import Dataset


def memory(which):
    with open("/proc/self/status") as status:
        return int(re.search(which + r":\s+(\d+)", status.read())[1]) << 10


def nbytes(batch):
    return sum(row.nbytes for row in batch) if batch.dtype.hasobject else batch.nbytes


path, case, size, waiting, pause = sys.argv[1:]
strategy = mpistrat.OneDeviceStrategy("cpu:0")
dataset = Dataset.from_hdf5(path, "x")
if "shuffled" in case:
    dataset = dataset.shuffle(seed=0)
if "mapped rows" in case:
    dataset = dataset.map(lambda row: np.tile(row, (64, 1)))
dataset = dataset.batch(int(size))
if "mapped batches" in case:
    dataset = dataset.map(lambda batch: np.tile(batch, (1, 64)))
if "rests" in case:  # small batches, also the first one, among large ones
    dataset = dataset.repeat(2).shuffle(seed=12)
distributed = strategy.experimental_distribute_dataset(dataset)
before = memory("VmHWM")
largest, taken = 0, []
for epoch in range(50):
    for batch in distributed:
        largest = max(largest, nbytes(batch))
        time.sleep(float(pause) * (epoch % 2))  # with a pause the thread makes the batches, without it the program does
    if epoch % 10 == 9:
        taken.append(memory("VmRSS"))
# 9/8, because the buffer pool rounds sizes up by at most one eighth.
print(memory("VmHWM") - before - (int(waiting) + 3) * largest * 9 // 8, taken[-1] - taken[0], largest)
