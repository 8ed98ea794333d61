"""Ranks whose worker processes call a function: ``python killed_workers_program.py FOLDER KIND``."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import mpistrat
from mpistrat.data import Dataset

folder, kind, rank = Path(sys.argv[1]), sys.argv[2], os.getpid()


def call(x):
    if os.getpid() == rank:  # which calls the function for the first row
        return x
    (folder / f"worker-{os.getpid()}").touch()
    if kind == "endless":
        while True:
            pass
    if kind == "keeps the GIL":
        sum(itertools.repeat(0))
    if kind == "has a child":
        subprocess.run(["sleep", "1000"], check=True)
    time.sleep(0.005)
    return x


strategy = mpistrat.MultiWorkerMirroredStrategy()
(folder / f"rank-{rank}").touch()
dataset = Dataset.range(1000).repeat().map(call, workers=2).batch(8 * strategy.num_replicas_in_sync)
for _ in strategy.experimental_distribute_dataset(dataset):
    if kind == "waits":
        time.sleep(1000)
