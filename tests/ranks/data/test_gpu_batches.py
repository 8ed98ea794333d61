"""Tests of copying batches to a GPU, or to the stand-in for a GPU (see `test_gpu_collectives`)."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.arrays.gpu import pinned
from mpistrat.arrays.gpu import pinned as device_feed

SIZE = MPI.COMM_WORLD.size
ROWS = 240


@pytest.fixture
def on_gpu(cupy, monkeypatch):
    """Return a strategy that fetches batches to this rank's GPU, without buffers left over from other tests."""
    monkeypatch.setattr(device_feed, "_idle_feeds", {})
    return mpistrat.MultiWorkerMirroredStrategy(device="cuda:0")


def batches_of(strategy, ahead, rows=ROWS, width=50):
    """Return batches of 10 rows per replica: each row holds its own number plus 0.5, and the number."""
    numbers = np.arange(rows)
    dataset = mpistrat.data.Dataset.from_arrays((np.repeat(numbers[:, None], width, 1) + 0.5, numbers))
    return strategy.experimental_distribute_dataset(dataset.batch(10 * SIZE).prefetch(ahead))


def assert_right(x, numbers):
    np.testing.assert_array_equal(x, np.repeat(numbers[:, None], x.shape[1], 1) + 0.5)


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_come_on_the_gpu(cupy, on_gpu, ahead):
    rows = np.arange(24.0).reshape(12, 2)
    texts = np.array([f"row {i}" for i in range(12)])
    dataset = mpistrat.data.Dataset.from_arrays((rows, texts)).batch(4).prefetch(ahead)
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            got = list(on_gpu.experimental_distribute_dataset(dataset))
            assert len(got) == 3
            assert {type(x) for x, _ in got} == {cupy.ndarray}
            assert {type(t) for _, t in got} == {np.ndarray}
            mine = np.concatenate([x.get() for x, _ in got])
            assert [f"row {int(x) // 2}" for x in mine[:, 0]] == np.concatenate([t for _, t in got]).tolist()
            total = on_gpu.reduce("SUM", cupy.asarray(mine.sum()), axis=None)
            assert float(total) == rows.sum()
    options = mpistrat.data.InputOptions(experimental_fetch_to_device=False)
    for x, _ in on_gpu.experimental_distribute_dataset(dataset, options):
        assert type(x) is np.ndarray


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_of_virtual_replicas_come_on_the_gpu(cupy, on_gpu, ahead):
    strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda:0", virtual_replicas=SIZE)
    dataset = mpistrat.data.Dataset.from_arrays((np.arange(12.0), np.arange(12).astype(str)))
    for x, text in strategy.experimental_distribute_dataset(dataset.batch(4).prefetch(ahead)):
        assert [type(each) for each in x.values] == [cupy.ndarray]
        assert x.values[0].get().astype(int).astype(str).tolist() == text.values[0].tolist()


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("first", ["copies", "work"])
def test_memory_is_used_again_once_the_work_is_done(cupy, on_gpu, ahead, first):
    """Each batch is released before the work on it runs. Results are right in any order of the streams."""
    if not hasattr(cupy.cuda.Stream.null, "put"):
        return
    work, seen, places = cupy.cuda.Stream(non_blocking=True), [], set()
    with work:
        for x, numbers in batches_of(on_gpu, ahead):
            places.add(x.data.ptr)
            for each in (x, numbers):
                work.put(lambda memory=each._host: seen.append(memory.copy()))
            feeds = device_feed._idle_feeds.get(0, [])
            del x, numbers, each
            if first == "copies":
                for feed in list(feeds):
                    feed.stream.synchronize()
    work.synchronize()
    assert len(seen) == 2 * ROWS // (10 * SIZE)
    for x, numbers in zip(seen[::2], seen[1::2], strict=True):
        assert_right(x, numbers)
    assert len(places) <= ahead + 5  # the other batches reuse this memory
    assert np.unique(np.concatenate(seen[1::2])).size == ROWS // SIZE


def test_nobody_waits(cupy, on_gpu, monkeypatch):
    """Copies and work are delayed, and still pending when the next batch is requested."""
    if not hasattr(cupy.cuda.Stream.null, "put"):
        return
    waited = []
    for kind in (cupy.cuda.Stream, cupy.cuda.Event):
        original = kind.synchronize
        monkeypatch.setattr(
            kind,
            "synchronize",
            lambda self, original=original: (
                waited.append(self) if getattr(self, "queue", None) else None,
                original(self),
            ),
        )
    work, total = cupy.cuda.Stream(non_blocking=True), []
    with work:
        for x, _ in batches_of(on_gpu, 2, rows=100 * SIZE):
            work.put(lambda memory=x._host: total.append(memory[:, 0].sum()))
        assert not waited
        assert not total
        work.synchronize()
    assert len(total) == 10
    assert MPI.COMM_WORLD.allreduce(sum(total)) == sum(i + 0.5 for i in range(100 * SIZE))


def test_batches_larger_than_the_pinned_memory(cupy, on_gpu, monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 1024)
    for x, numbers in batches_of(on_gpu, 2, width=301):
        assert_right(x.get(), numbers.get())


def test_what_is_kept_stays(cupy, on_gpu):
    """The program keeps one array of each batch, and a part of that array."""
    kept = [numbers[3:5] for _, numbers in batches_of(on_gpu, 2) if len(numbers) == 10]
    assert len(kept) == ROWS // (10 * SIZE)
    assert [int(each[1] - each[0]) for each in kept] == [1] * len(kept)
    assert len({int(each[0]) for each in kept}) == len(kept)


def test_functions_of_the_program_run_on_this_ranks_gpu(cupy, monkeypatch):
    """Also in the thread that reads ahead, where GPU 0 is the current one at first."""
    if not hasattr(cupy.cuda, "contexts"):
        return
    cupy.cuda.begin_anew()
    strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda:1")
    seen = []
    dataset = mpistrat.data.Dataset.range(12 * SIZE).map(
        lambda x: (seen.append((threading.get_ident(), cupy.cuda.runtime.getDevice())), x)[1]
    )
    for batch in strategy.experimental_distribute_dataset(dataset.batch(SIZE).prefetch(2)):
        assert batch.device.id == 1
    assert {thread for thread, _ in seen} - {threading.get_ident()}
    assert {device for _, device in seen} == {1}
    assert cupy.cuda.contexts == {1}


def test_memory_goes_back_when_the_gpu_is_done(cupy, on_gpu):
    for batch in batches_of(on_gpu, 2):
        assert batch
        cupy.cuda.get_current_stream().synchronize()
    cupy.cuda.Device().synchronize()
    del batch
    assert not [feed.released for feed in device_feed._idle_feeds[0] if feed.released]


def test_two_datasets_at_once(cupy, on_gpu):
    """Each reader has its own feed while it copies."""
    one, other = (iter(batches_of(on_gpu, 2, width=width)) for width in (50, 70))
    for (x, numbers), (y, same) in zip(one, other, strict=True):
        assert_right(x.get(), numbers.get())
        assert_right(y.get(), same.get())
    assert len(device_feed._idle_feeds[0]) <= 2
