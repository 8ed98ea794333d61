"""Methods of a dataset that add a transform. Each returns a new dataset."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mpistrat import representation
from mpistrat.data.options import AUTOTUNE, SHARD_HINT, Options
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.mapping import generators_of
from mpistrat.data.pipeline.transforms import (
    Batch,
    Map,
    PaddedBatch,
    Repeat,
    Shard,
    Shuffle,
    Skip,
    Take,
    Transform,
    integer,
)
from mpistrat.runtime import affinity
from mpistrat.runtime.environment import rc

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.data.dataset import Dataset

_Result = TypeVar("_Result")


class Chain:
    """A source of rows and a chain of transforms: the base of all datasets."""

    def __init__(self, source: Any, transforms: tuple[Transform, ...] = (), options: Options | None = None):
        self._definition = Definition(source, transforms, options or Options())

    def map(
        self,
        fn: Callable[..., _Result],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        seed: int | None = None,
        workers: int | Literal["auto"] | None = None,
    ) -> Dataset[_Result]:
        """Apply a function to every element.

        Before `batch` the function gets one row. After `batch` it gets a batch. On several replicas that is
        the replica's piece of a batch, which may have no rows.

        Parameters
        ----------
        fn : callable
            Called with the element. The parts of a tuple are separate arguments. May return any nested
            structure. Elements that are batched afterwards must agree in structure and shape.
        num_parallel_calls : int, optional
            How many calls for rows of a batch run at the same time, in threads. `AUTOTUNE` (-1) takes one for each
            core of this rank. That helps functions that wait, or that run outside of Python: decoders, large
            NumPy operations. Quick functions get slower. By default calls follow each other. It has no effect after
            `batch`, and on calls in ``workers``.
        deterministic : bool, optional
            Accepted for programs written for tf.data. The order of the elements is always kept.
        seed : int, optional
            Before `batch`: the function gets a random generator as its last argument. Its numbers depend on the seed,
            the epoch and the number of the row in the source alone. They are the same on any number of ranks and
            threads, and after a resume: ``Generator(Philox(key=[seed, epoch], counter=[0, row, 0, 0]))``.
        workers : int or "auto", optional
            Before `batch`: how many processes of this rank call the function for the rows of a batch. That helps slow
            functions in Python. "auto" takes one for each core of this rank, and none while a call takes less than
            0.2 ms, or if the rank has one core. Elements and their order stay the same.

        Raises
        ------
        TypeError
            If ``fn`` is not a function, or ``num_parallel_calls`` or ``seed`` is not an integer. If ``fn`` cannot be
            pickled for ``workers``.
        ValueError
            If ``num_parallel_calls`` is 0 or less than -1. If ``seed`` is not from 0 to 2**64 - 1, is the seed of
            another `map` of the dataset, or is given after `batch`. If ``workers`` is not "auto" or an integer of at
            least 1, or is given after `batch`.
        RuntimeError
            When rows are read, if a worker process was killed.

        Notes
        -----
        Workers get a copy of ``fn`` when the first batch is read: what it changes is not seen by the program. They do
        not import the program, have no strategy, and end with their rank.

        `element_spec` calls ``fn`` on the first row of the source. So does an empty piece on a replica that had
        no row yet.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> pairs = Dataset.from_arrays(([1, 2], [10, 20]))
        >>> [int(x) for x in pairs.map(lambda a, b: a + b)]
        [11, 22]
        >>> noisy = Dataset.range(3).map(lambda x, rng: x + rng.integers(100), seed=7)
        >>> [int(x) for x in noisy] == [int(x) for x in noisy]  # of another epoch
        False
        """
        if not callable(fn):
            raise TypeError(f"map() needs a function, not {fn!r}")
        calls = 1 if num_parallel_calls is None else integer(num_parallel_calls, "num_parallel_calls of map()", -1)
        if calls == 0:
            raise ValueError("num_parallel_calls of map() must be at least 1, or AUTOTUNE (-1), got 0")
        if calls == AUTOTUNE:
            # Not all systems tell which cores a process may use.
            calls = len(affinity.cores() or range(affinity.cores_of_machine()))
        if seed is not None:
            seed = integer(seed, "the seed of map()", 0)
            if seed >= 1 << 64:
                raise ValueError(f"the seed of map() must be below 2**64, got {seed}")
            if self.batch_size is not None:
                raise ValueError(
                    "map(seed=...) needs rows, as a replica's piece of a batch depends on the ranks: call "
                    "it before batch()"
                )
            if any(isinstance(transform, Map) and transform.seed == seed for transform in self._definition.transforms):
                raise ValueError(
                    f"another map() has the seed {seed}, and would get the same numbers: give another seed"
                )
        pool = None
        if workers is not None:
            is_number = isinstance(workers, Integral) and not isinstance(workers, bool)
            if not (is_number and int(workers) > 0) and workers != "auto":
                raise ValueError(f"workers of map() must be 'auto', or an integer of at least 1, not {workers!r}")
            if self.batch_size is not None:
                raise ValueError("map(workers=...) needs rows, which workers share: call it before batch()")
            from mpistrat.data.pipeline.workers import Workers  # a late import: takes 20 ms

            pool = Workers(fn, seed, workers)
            if names := generators_of(fn):
                warnings.warn(
                    f"the function of map() draws from the random generator {', '.join(map(repr, names))} of the "
                    "program: each worker process has a copy, so rows of other workers get the same numbers; take "
                    "map(fn, seed=...)",
                    stacklevel=2,
                )
        return self._then(Map(fn, calls, seed, pool))  # type: ignore[return-value]

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        mode: Literal["block", "exact"] = "block",
    ) -> Self:
        """Permute all elements.

        The order is the same on all replicas and does not depend on their number. It is computed from
        (seed, epoch, position), so mode ``"block"`` needs no memory for it, whatever the number of elements.

        Parameters
        ----------
        buffer_size : int, optional
            Accepted for programs written for tf.data: no buffer is filled. It has an effect only where the dataset
            is endless (`shuffle` after ``repeat()``) or of unknown length: each run of that many elements is
            permuted.
        seed : int, optional
            Makes the order the same in every run of the program. Without a seed, one is drawn. On several
            replicas, all use the one of replica 0.
        reshuffle_each_iteration : bool
            Whether every epoch, and every repetition by `repeat`, has its own order.
        mode : {"block", "exact"}
            ``"block"`` suits storage. Blocks of rows (chunks of HDF5 datasets, or about 1.5 MiB) are permuted
            over the whole dataset. Then rows are permuted inside windows of 8 to 64 blocks. Windows of large compressed
            chunks have fewer blocks, so that each chunk is decoded once. Rows in memory, and datasets of up to 8
            blocks, are permuted as a whole. ``"exact"`` is a uniform permutation of all elements. It takes
            4 bytes of memory per element (8 from 2**31 elements on).

        Raises
        ------
        ValueError
            If the dataset is endless and ``buffer_size`` is missing, or ``mode`` is unknown.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> dataset = Dataset.range(6).shuffle(seed=3).batch(6)
        >>> [batch.tolist() for epoch in range(2) for batch in dataset]
        [[0, 1, 3, 4, 2, 5], [2, 5, 4, 3, 0, 1]]
        """
        if buffer_size is not None:
            buffer_size = integer(buffer_size, "the buffer_size of shuffle()", 1)
        if mode not in ("block", "exact"):
            raise ValueError(f"the mode of shuffle() must be 'block' or 'exact', not {mode!r}")
        if "data" in rc.debug and self.batch_size is not None:
            warnings.warn("shuffle() after batch() moves whole batches, not rows: call it first", stacklevel=2)
        drawn = seed is None
        # Not from a generator of the program: that would change the numbers which the program draws from it.
        seed = secrets.randbits(63) if drawn else integer(seed, "the seed of shuffle()", -(2**63))
        return self._then(Shuffle(seed, not drawn, buffer_size, bool(reshuffle_each_iteration), mode))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Stack consecutive rows.

        On several replicas this is the size of the *global* batch, which the replicas share.

        Parameters
        ----------
        batch_size : int
            Number of rows of a batch.
        drop_remainder : bool
            Whether to leave out a last batch with fewer rows.

        Raises
        ------
        TypeError
            If ``batch_size`` is not an integer.
        ValueError
            If ``batch_size`` is less than 1, or the dataset is already batched.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> len(Dataset.range(7).batch(3)), len(Dataset.range(7).batch(3, drop_remainder=True))
        (3, 2)
        """
        return self._then(Batch(self._new_batch_size(batch_size), bool(drop_remainder)))

    def padded_batch(
        self, batch_size: int, padded_shapes: Any = None, padding_values: Any = None, drop_remainder: bool = False
    ) -> Self:
        """Stack consecutive rows whose shapes differ, each padded to the longest.

        On several replicas each pads its piece of the batch by itself. Give ``padded_shapes`` for equal shapes.

        Parameters
        ----------
        batch_size : int
            Number of rows of a batch, of all replicas together.
        padded_shapes : tuple of int or None, or structure of these, optional
            The shape of each padded row. None and -1 stand for the longest row of the batch. By default all
            dimensions are padded to the longest.
        padding_values : number, str or structure of these, optional
            By default 0, or the empty string. A single value is for all arrays of an element.
        drop_remainder : bool
            Whether to leave out a last batch with fewer rows.

        Raises
        ------
        ValueError
            When rows are read, if a row is longer than ``padded_shapes`` allows.

        Examples
        --------
        >>> import numpy as np
        >>> from mpistrat.data import Dataset
        >>> rows = Dataset.range(1, 4).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in rows.padded_batch(2)]
        [[[1, 0], [2, 2]], [[3, 3, 3]]]
        """
        size = self._new_batch_size(batch_size)
        return self._then(PaddedBatch(size, bool(drop_remainder), padded_shapes, padding_values))

    def _new_batch_size(self, batch_size: int) -> int:
        size = integer(batch_size, "the batch size", 1)
        if self.batch_size is not None:
            raise ValueError(f"this dataset is already in batches of {self.batch_size}: call batch() once")
        return size

    def repeat(self, count: int | None = None) -> Self:
        """Repeat the dataset. A `shuffle` before it gives every repetition another order.

        Parameters
        ----------
        count : int, optional
            Number of repetitions. None and -1 repeat without end.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> list(Dataset.range(3).repeat(2).batch(4))
        [array([0, 1, 2, 0]), array([1, 2])]
        """
        if count is not None:
            count = integer(count, "the count of repeat()", -1)
        return self._then(Repeat(None if count == -1 else count))

    def take(self, count: int) -> Self:
        """Keep the first elements only.

        Parameters
        ----------
        count : int
            Number of elements to keep, -1 for all.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(9).skip(2).take(3)]
        [2, 3, 4]
        """
        return self._then(Take(integer(count, "the count of take()", -1)))

    def skip(self, count: int) -> Self:
        """Leave out the first elements.

        Parameters
        ----------
        count : int
            Number of elements to leave out, -1 for all.
        """
        return self._then(Skip(integer(count, "the count of skip()", -1)))

    def shard(self, num_shards: int, index: int) -> Self:
        """Keep every ``num_shards``-th element, from ``index`` on.

        Only ``distribute_datasets_from_function`` needs it. ``experimental_distribute_dataset`` divides the
        dataset by itself.

        Parameters
        ----------
        num_shards : int
            Number of shards.
        index : int
            Index of this shard. With ``shard(SHARD_HINT, SHARD_HINT)``, AutoShardPolicy.HINT fills in both.

        Raises
        ------
        ValueError
            If ``index`` is not from 0 to ``num_shards - 1``.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(7).shard(3, 1)]
        [1, 4]
        """
        num_shards = integer(num_shards, "num_shards", SHARD_HINT)
        index = integer(index, "the index of a shard", SHARD_HINT)
        if (num_shards, index) != (SHARD_HINT, SHARD_HINT) and not 0 <= index < num_shards:
            raise ValueError(f"the index of a shard must be from 0 to num_shards - 1, got {index} of {num_shards}")
        return self._then(Shard(num_shards, index))

    def prefetch(self, buffer_size: int) -> Self:
        """Read batches in a thread while the program computes.

        By default a distributed dataset reads 2 batches ahead. Of small batches in HDF5 files it reads up to 4 MiB
        ahead, many at once. Batches that are made faster than a thread could hand them over are made without a
        thread. A dataset that is not distributed does not read ahead by default. Prefetching does not change the
        batches. The functions given to `map` run in the thread or in its place, in order and one call at a time.
        They must not make collective calls.

        Parameters
        ----------
        buffer_size : int
            Number of batches to read ahead, 0 for no thread, `AUTOTUNE` (-1) for the default of a distributed
            dataset.

        Raises
        ------
        TypeError
            If ``buffer_size`` is not an integer.
        ValueError
            If ``buffer_size`` is less than -1.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> list(Dataset.range(5).batch(2).prefetch(1))
        [array([0, 1]), array([2, 3]), array([4])]
        """
        size = integer(buffer_size, "the buffer size of prefetch()", -1)
        options = Options()
        options.prefetch = size
        return self.with_options(options)

    def with_options(self, options: Options) -> Self:
        """Return the dataset with options, which override options given earlier.

        Parameters
        ----------
        options : Options
            Copied: later changes of this object do not reach the dataset.
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options() needs an Options object, not {options!r}")
        definition = self._definition
        return type(self)(definition.source, definition.transforms, definition.options.merge(options))

    # --- questions ------------------------------------------------------------------------

    def options(self) -> Options:
        """Return a copy of the options."""
        return Options().merge(self._definition.options)

    @property
    def definition(self) -> Definition:
        """Source of the rows, transforms and options, for code that reads the rows in a way of its own."""
        return self._definition

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a batch. None if the elements are single rows."""
        return self._definition.batch_size

    # Without this method, bool() would call len(): false without rows, and an error for endless datasets.
    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return str(self._definition)

    def _repr_html_(self) -> str:
        definition = self._definition
        steps = {f"step {i}": str(transform) for i, transform in enumerate(definition.transforms, 1)}
        return representation.table("Dataset", {"rows": str(definition.source), **steps})

    def _then(self, transform: Transform) -> Self:
        definition = self._definition
        return type(self)(definition.source, (*definition.transforms, transform), definition.options)
