"""Programs that read faulty data files: ``python programs.py NAME FOLDER`` under several ranks."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.data import AutoShardPolicy, Dataset, DistributedDataset, Options
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.topology import Topology

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
FOLDER = Path(sys.argv[2])


def say(*words):
    """Print one line in one write, so that lines of ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def write(path, rows=4, width=2, dtype="f4", **more):
    with h5py.File(path, "w") as f:
        f["x"] = np.ones((rows, width), dtype)
        for name, value in more.items():
            f[name] = value
    return path


def rewrite(path, fill):
    with h5py.File(path, "w") as f:
        fill(f)


def odd_filter(path):
    """Write a file that claims to be stored with a filter that no installation has."""
    rewrite(path, lambda f: f.create_dataset("x", data=np.ones((4, 2), "f4"), compression="lzf"))
    content = path.read_bytes()
    path.write_bytes(content.replace((32000).to_bytes(2, "little"), (31999).to_bytes(2, "little")))


def distributed(strategy, files, datasets="x", policy="DATA", several=None, **options_of_files):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    dataset = Dataset.from_hdf5(files, datasets, **options_of_files).batch(6).with_options(options)
    if several:
        ranks = Topology.of(WORLD)
        return DistributedDataset(dataset, ranks, replicas=ReplicaGroup.dealt(ranks, several))
    return strategy.experimental_distribute_dataset(dataset)


# How file 1 of 4, which rank 1 describes, is spoilt, and the error that every rank must raise.
ONE = r"^rank 1 \(.+\): file '.*/1\.h5'"
BAD = {
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 8), "DataFileError", ONE + r".*truncated \(\d+ byte"),
    "no HDF5": (lambda p: p.write_text("text"), "DataFileError", ONE + r".*not an HDF5 file \(4 bytes\)"),
    "0 bytes": (lambda p: p.write_text(""), "DataFileError", ONE + r".*empty \(0 bytes\)"),
    "no link": (
        lambda p: rewrite(p, lambda f: f.__setitem__("x", h5py.ExternalLink("gone.h5", "x"))),
        "DatasetNotFoundError",
        ONE + r".*dataset 'x'.*'gone\.h5'",
    ),
    "no dataset": (
        lambda p: rewrite(p, lambda f: f.__setitem__("z", [1])),
        "DatasetNotFoundError",
        ONE + r" has no dataset 'x'; it has 'z'",
    ),
    "scalar": (
        lambda p: rewrite(p, lambda f: f.__setitem__("x", 1.0)),
        "DatasetMismatchError",
        ONE + r".*dataset 'x': it is a scalar",
    ),
    "lengths": (
        lambda p: write(p, 4, y=np.zeros(3)),
        "DatasetMismatchError",
        ONE + r".*'x' has 4 rows and dataset 'y' has 3",
    ),
    "dtype": (
        lambda p: write(p, dtype="f8", y=np.zeros(4)),
        "DatasetMismatchError",
        r"^rank 1 \(.+\): dataset 'x' .*0\.h5'.*float64.*1\.h5'",
    ),
    "shape": (
        lambda p: write(p, width=3, y=np.zeros(4)),
        "DatasetMismatchError",
        r"^rank 1 \(.+\): dataset 'x' .*0\.h5'.*\(3,\).*1\.h5'",
    ),
    "filter": (odd_filter, "FilterUnavailableError", ONE + r".*'x'.*filter 31999"),
    "vanished": (lambda p: p.unlink(), "FileNotFoundError", r"file '.*/1\.h5' does not exist"),
}


def bad_files():
    """Make a dataset of each kind of faulty file, in one job: every rank must raise the error in time."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    files = [FOLDER / f"{i}.h5" for i in range(4)]

    def expect(name, kind, text, make, prepare=None, keep=False):
        if RANK == 0 and not keep:
            for path in files:
                write(path, y=np.zeros(4))
            if prepare:
                prepare(files[1])
        WORLD.Barrier()
        error, began = None, time.perf_counter()
        try:
            make()
        except Exception as caught:
            error = caught
        took = time.perf_counter() - began
        found = f"{type(error).__name__}: {error}"
        assert type(error).__name__ == kind, (name, found)
        assert re.search(text, str(error)), (name, found)
        told = WORLD.allgather(found)
        assert len(set(told)) == 1, (name, told)
        took = WORLD.reduce(took, MPI.MAX)
        if RANK == 0:
            say("told", name, f"after {took:.3f}")

    for name, (prepare, kind, text) in BAD.items():
        datasets = ("x", "y") if name in ("lengths", "dtype", "shape") else "x"
        expect(name, kind, text, lambda datasets=datasets: distributed(strategy, files, datasets), prepare)

    def empty_all(path):
        for each in files:
            write(each, rows=0)

    expect(
        "all empty",
        "EmptyDatasetError",
        r"none of the 4 files has a row in dataset 'x', the first is '.*0\.h5'",
        lambda: distributed(strategy, files),
        empty_all,
    )
    expect("no file", "ValueError", "list of files is empty", lambda: distributed(strategy, []))
    expect("no match", "FileNotFoundError", "matches no file", lambda: distributed(strategy, str(FOLDER / "n*.h5")))
    expect(
        "too few",
        "ValueError",
        r"2 files with rows for 3 replicas: use AutoShardPolicy\.DATA",
        lambda: distributed(strategy, files[:2], policy="FILE"),
    )
    writer = None
    if RANK == 0:
        write(files[1])
        code = f"import h5py, sys; f = h5py.File({str(files[1])!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE"))}
        writer = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
        writer.stdout.readline()
    expect(
        "writer",
        "DataFileError",
        ONE + r": it is being written by process \d+ \(.*python",
        lambda: distributed(strategy, files),
        keep=True,
    )
    if writer:
        writer.communicate()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if RANK == 0:
            write(files[1], rows=0)
        WORLD.Barrier()
        made = distributed(strategy, files)
        assert made.cardinality == len(made) == 2
    told = WORLD.gather([str(each.message) for each in caught])
    if RANK == 0:
        assert [len(each) for each in told] == [1, 0, 0], told
        assert "1.h5' has no rows and is skipped" in told[0][0]
        say("all cases seen")


def opens_once():
    """Check that the job opens every file once when the dataset is distributed, and no file before that."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == 0:
        for i in range(40):
            write(FOLDER / f"{i:02}.h5", rows=3)
    WORLD.Barrier()
    opened, real = [], h5py.h5f.open
    h5py.h5f.open = lambda path, *more, **options: opened.append(os.fsdecode(path)) or real(path, *more, **options)
    stats, real_stat = [], os.stat
    os.stat = lambda path, *more, **options: stats.append(str(path)) or real_stat(path, *more, **options)
    dataset = Dataset.from_hdf5(str(FOLDER / "*.h5"), "x").batch(6)
    assert not opened
    assert not any(path.endswith(".h5") for path in stats)
    for _ in range(2):
        mine = strategy.experimental_distribute_dataset(dataset)
    os.stat, h5py.h5f.open = real_stat, real
    everyone = sorted(path for theirs in WORLD.allgather(opened) for path in theirs)
    assert [os.path.basename(path) for path in everyone] == [f"{i:02}.h5" for i in range(40)], everyone
    assert WORLD.allreduce(sum(len(batch) for batch in mine)) == 120
    if RANK == 0:
        say("one open per file")


# --- faults that are found while rows are read --------------------------------------------


def spoilt(fn, several=None):
    """Begin an epoch on all ranks, then spoil file 1, which one rank will read."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    files = [FOLDER / f"{i}.h5" for i in range(4)]
    if RANK == 0:
        for path in files:
            with h5py.File(path, "w") as f:
                f.create_dataset("x", data=np.arange(1200.0).reshape(600, 2), chunks=(50, 2), fletcher32=True)
    WORLD.Barrier()
    batches = iter(distributed(strategy, files, several=several))
    next(batches)
    WORLD.Barrier()
    if RANK == 0:
        fn(files[1])
        say("at", time.time())
    WORLD.Barrier()
    for batch in batches:
        rows = np.concatenate(batch.values) if several else batch
        assert rows.any(axis=1).all(), rows
        strategy.reduce("SUM", float(len(rows)), axis=None)


def truncated_while_read():
    spoilt(lambda path: os.truncate(path, path.stat().st_size // 2))


def vanished_while_read():
    spoilt(lambda path: path.unlink())


def vanished_while_several_replicas_read():
    spoilt(lambda path: path.unlink(), several=5)


def flipped_while_read():
    def flip(path):
        with h5py.File(path) as f:
            offset = f["x"].id.get_chunk_info(6).byte_offset
        with open(path, "r+b") as f:
            f.seek(offset + 10)
            byte = f.read(1)
            f.seek(offset + 10)
            f.write(bytes([byte[0] ^ 8]))

    spoilt(flip)


def not_finite():
    """Read a row with NaN in file 1: only datasets with ``check_finite`` raise."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    files = [FOLDER / f"{i}.h5" for i in range(4)]
    if RANK == 0:
        for path in files:
            write(path, rows=600)
        with h5py.File(files[1], "r+") as f:
            f["x"][301, 1] = np.nan
        say("at", time.time())
    WORLD.Barrier()
    for batch in distributed(strategy, files, check_finite=True):
        assert np.isfinite(batch).all()
        strategy.reduce("SUM", float(len(batch)), axis=None)


def killed():
    """Kill a rank in the middle of an epoch."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    batches = iter(distributed(strategy, str(FOLDER / "*.h5")))
    next(batches)
    WORLD.Barrier()
    if RANK == 1:
        say("at", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    for batch in batches:
        strategy.reduce("SUM", float(len(batch)), axis=None)


def paces():
    """Check the log: each rank has a line for each epoch that it ends, and no other; no figures are mixed up."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    lines = []
    logger = logging.getLogger("mpistrat.data")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.Handler())
    logger.handlers[0].emit = lambda record: lines.append(record.getMessage())
    training = strategy.experimental_distribute_dataset(Dataset.range(60).shuffle(seed=1).batch(2 * WORLD.size))
    validation = strategy.experimental_distribute_dataset(Dataset.range(30).batch(2 * WORLD.size))
    for epoch in range(3):
        for step, _ in enumerate(training):
            if (epoch, RANK) in ((0, 1), (1, 0)) and step == 3:
                break
        list(validation)
    position = iter(training)
    next(position)
    other = strategy.experimental_distribute_dataset(Dataset.range(60).shuffle(seed=1).batch(2 * WORLD.size))
    other.restore(position.state())
    rest = sum(map(len, other))
    expected = []
    for epoch in range(3):
        if (epoch, RANK) not in ((0, 1), (1, 0)):
            expected.append((epoch, 60 // WORLD.size))
        expected.append((epoch, 30 // WORLD.size))
    for line, (epoch, rows) in zip(lines, [*expected, (3, rest)], strict=True):
        begin = rf"epoch {epoch}{f' of rank {RANK}' if WORLD.size > 1 else ''}: {rows} samples in [\d.]+ s, "
        assert re.fullmatch(begin + r"[\d,]+ samples/s, [\d.]+ GB/s, [\d.]+% of the time waiting for data", line), line
    say("seen")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
