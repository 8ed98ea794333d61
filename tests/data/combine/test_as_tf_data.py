"""Random pipelines, compared with the same pipelines of tf.data."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat import nest
from mpistrat.data import Dataset

pytestmark = pytest.mark.full
small = st.integers(1, 4)


def as_lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


def steps(tf):
    """Return, for each verb, its arguments, how it is written here, and how it is written in tf.data.

    All keep elements that are single integers.
    """

    def window(d, size, shift, stride, drop):
        return d.window(size, shift, stride, drop).flat_map(lambda rows: rows.batch(size)).map(tf.reduce_sum)

    def bucketed(d, bound, a, b, drop, **more):
        rows = d.map(lambda x: tf.fill([x % 7], x))
        sizes = {"bucket_boundaries": [bound], "bucket_batch_sizes": [a, b], "drop_remainder": drop}
        made = rows.bucket_by_sequence_length(lambda x: tf.shape(x)[0], padded_shapes=[None], **sizes, **more)
        return made.map(lambda x: tf.reduce_sum(x) * 100 + tf.shape(x, tf.int64)[0] * 10 + tf.shape(x, tf.int64)[1])

    def ours_bucketed(d, bound, a, b, drop, **more):
        rows = d.map(lambda x: np.full(x % 7, x))
        made = rows.bucket_by_sequence_length(len, [bound], [a, b], drop_remainder=drop, **more)
        return Dataset.from_iterable([x.sum() * 100 + x.shape[0] * 10 + x.shape[1] for x in made])

    return {
        "map": ([st.integers(0, 9)], lambda d, n: d.map(lambda x: x * 3 + n), lambda d, n: d.map(lambda x: x * 3 + n)),
        "take": ([st.integers(0, 20)], lambda d, n: d.take(n), lambda d, n: d.take(n)),
        "skip": ([st.integers(0, 5)], lambda d, n: d.skip(n), lambda d, n: d.skip(n)),
        "shard": ([small], lambda d, n: d.shard(n, n - 1), lambda d, n: d.shard(n, n - 1)),
        "repeat": ([st.integers(0, 2)], lambda d, n: d.repeat(n), lambda d, n: d.repeat(n)),
        "unbatch": (
            [small, st.booleans()],
            lambda d, n, drop: d.batch(n, drop).map(lambda x: x + 1).unbatch(),
            lambda d, n, drop: d.batch(n, drop).map(lambda x: x + 1).unbatch(),
        ),
        "rebatch": ([small], lambda d, n: d.batch(n).unbatch(), lambda d, n: d.batch(n).unbatch()),
        "window": ([small, small, small, st.booleans()], lambda d, *a: d.window(*a).map(lambda x: x.sum()), window),
        "flat_map": (
            [st.integers(1, 3)],
            lambda d, n: d.flat_map(lambda x: Dataset.range(int(x) % (n + 1)).map(lambda y: y + x)),
            lambda d, n: d.flat_map(lambda x: tf.data.Dataset.range(x % (n + 1)).map(lambda y: y + x)),
        ),
        "interleave": (
            [small, small, small],
            lambda d, n, *a: d.interleave(lambda x: Dataset.range(int(x) % (n + 1)).map(lambda y: y + x), *a),
            lambda d, n, *a: d.interleave(lambda x: tf.data.Dataset.range(x % (n + 1)).map(lambda y: y + x), *a),
        ),
        "scan": (
            [st.integers(0, 5)],
            lambda d, n: d.scan(np.int64(n), lambda s, x: (s * 2 % 11 + x, s + x)),
            lambda d, n: d.scan(np.int64(n), lambda s, x: (s * 2 % 11 + x, s + x)),
        ),
        "take_while": (
            [st.integers(2, 40)],
            lambda d, n: d.take_while(lambda x: x < n),
            lambda d, n: d.take_while(lambda x: x < n),
        ),
        "filter": ([small], lambda d, n: d.filter(lambda x: x % n == 0), lambda d, n: d.filter(lambda x: x % n == 0)),
        "enumerate": (
            [small],
            lambda d, n: d.enumerate(n).map(lambda k, x: k + x),
            lambda d, n: d.enumerate(n).map(lambda k, x: k + x),
        ),
        "concatenate": (
            [small],
            lambda d, n: d.concatenate(Dataset.range(n)),
            lambda d, n: d.concatenate(tf.data.Dataset.range(n)),
        ),
        "buckets": ([st.integers(1, 7), small, small, st.booleans()], ours_bucketed, bucketed),
        "full buckets": (
            [small, small],
            lambda d, a, b: ours_bucketed(d.map(lambda x: x % 5), 5, a, b, False, pad_to_bucket_boundary=True),
            lambda d, a, b: bucketed(d.map(lambda x: x % 5), 5, a, b, False, pad_to_bucket_boundary=True),
        ),
    }


@settings(derandomize=True, database=None, deadline=None, max_examples=70, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_pipelines_are_those_of_tf_data(tf, data):
    table = steps(tf)
    ours = Dataset.range(data.draw(st.integers(0, 25)))
    theirs = tf.data.Dataset.range(len(ours))
    chain = []
    for name in data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=4)):
        arguments, here, there = table[name]
        values = [data.draw(each) for each in arguments]
        chain.append((name, *values))
        ours, theirs = here(ours, *values), there(theirs, *values)
    size = data.draw(small)
    for _ in range(2):
        assert as_lists(ours.batch(size)) == [x.tolist() for x in theirs.batch(size).as_numpy_iterator()], chain
    total = ours.reduce(np.int64(0), lambda s, x: s * 2 % 101 + x)
    assert int(total) == int(theirs.reduce(np.int64(0), lambda s, x: s * 2 % 101 + x)), chain


def test_structures_are_passed_as_in_tf_data(tf):
    ours = Dataset.from_arrays((np.arange(5), np.arange(5) * 10))
    theirs = tf.data.Dataset.from_tensor_slices((np.arange(5), np.arange(5) * 10))
    both = {
        "take_while": lambda d: d.take_while(lambda a, b: b < 30),
        "scan": lambda d: d.scan(np.int64(1), lambda s, row: (s + row[0], (s, row[1]))),
        "unbatch": lambda d: d.batch(2).map(lambda a, b: (b, a)).unbatch(),
    }
    for name, call in both.items():
        assert as_lists(call(ours)) == as_lists(call(theirs).as_numpy_iterator()), name
    total = ours.reduce(0, lambda s, row: s + int(row[0] + row[1]))
    assert total == int(theirs.reduce(np.int64(0), lambda s, row: s + row[0] + row[1]))
