"""Methods of a dataset that take elements by their numbers: one, a selection, parts, draws and windows."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.data.combine.methods import Combining, part_of_rows
from mpistrat.data.combine.streamed import filtered
from mpistrat.data.combine.windows import WindowedSource, Windows
from mpistrat.data.pipeline.chosen import ColumnFilter, Keys, PartOfSplit, Select, SplitParts, WeightedDraws
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.pipeline.transforms import Repeat, Seeded, integer

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.data.dataset import Dataset


class Access(Combining):
    """A combination of datasets whose elements are known by numbers."""

    _making: MakingLock
    _plan: Any

    def __getitem__(self, index: Any) -> Any:
        """Return an element of epoch 0, or the dataset of a slice."""
        if self._definition.streamed:
            raise TypeError(f"{self} can be read only from its beginning: use take() and skip()")
        length = self._plan.length
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length("a slice"))
            # Only a slice that runs backwards needs a table of numbers. The others are transforms without one.
            if step < 0:
                return self.select(range(start, stop, step))
            tail = self.skip(start).take(max(0, stop - start))
            return tail if step == 1 else tail.shard(step, 0)
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"an index must be an integer or a slice, not {index!r:.100}: use select()") from None
        if number < 0:
            number += self._length("a negative index")
        if number < 0 or (length is not None and number >= length):
            raise IndexError(f"index {index} is outside of the dataset, which has {length} elements")
        # A thread that reads ahead may call the functions of map at this moment.
        with self._making:
            return self._plan.element(number, 0)

    def select(self, indices: Any) -> Self:
        """Take elements by their numbers, in this order.

        Parameters
        ----------
        indices : sequence of int
            Numbers of elements. Negative ones count from the end. Numbers may be repeated.

        Raises
        ------
        IndexError
            When the length is first needed, if the dataset has no such element.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(10).select([7, 0, -1])]
        [7, 0, 9]
        """
        self._refuse_streams("select()")
        return self._then(Select(indices))

    def split(self, fractions: float | Sequence[float], seed: int, by: Any = None) -> tuple[Self, ...]:
        """Divide the elements at random into several datasets. Each keeps their order.

        The division depends on the seed and the number of elements alone. It is the same in every epoch and on any
        number of ranks. 8 bytes of memory are needed for each element.

        Parameters
        ----------
        fractions : float or sequence of float
            The share of each part. They add up to 1. One number is the share of the first of two parts. The number of
            elements is rounded down, and the rest is dealt to the first parts, as in torch's ``random_split``.
        seed : int
            Another seed gives another division.
        by : str, int, callable or array, optional
            Elements with an equal value stay in one part: the name of a column of a dict, the number of a column of a
            tuple, a function of an element, or a value for each. Parts then have about their share. The values are
            read once. The ranks share this work when the dataset is distributed.

        Raises
        ------
        ValueError
            After `shuffle` or `repeat`: parts would have common elements. When the length is first needed, if
            a part has no elements.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> train, test = Dataset.range(10).split(0.8, seed=1)
        >>> [int(x) for x in train], [int(x) for x in test]
        ([0, 1, 2, 3, 4, 5, 6, 9], [7, 8])
        >>> patients = Dataset.from_arrays({"patient": [1, 1, 2, 2, 3, 3], "x": range(6)})
        >>> [[int(row["x"]) for row in part] for part in patients.split([2 / 3, 1 / 3], seed=1, by="patient")]
        [[0, 1, 2, 3], [4, 5]]
        """
        shares = [fractions, 1 - fractions] if isinstance(fractions, (int, float)) else [*fractions]
        if not shares or not all(0 < share <= 1 for share in shares) or not math.isclose(sum(shares), 1):
            raise ValueError(f"the fractions of split() must be above 0 and add up to 1, got {fractions!r}")
        parts = self._parts("split", shares, seed, by)
        return tuple(self._then(PartOfSplit(parts, (number,))) for number in range(len(shares)))

    def k_folds(self, k: int, seed: int, by: Any = None) -> list[tuple[Self, Self]]:
        """Return k pairs of datasets for cross-validation: all parts but one, and this one.

        Parameters
        ----------
        k : int
            The number of parts, of about equal size.
        seed, by
            As for `split`.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> for train, test in Dataset.range(5).k_folds(2, seed=1):
        ...     print([int(x) for x in train], [int(x) for x in test])
        [0, 2] [1, 3, 4]
        [1, 3, 4] [0, 2]
        """
        k = integer(k, "the k of k_folds()", 2)
        parts = self._parts("k_folds", [1 / k] * k, seed, by)
        others = [tuple(n for n in range(k) if n != part) for part in range(k)]
        return [
            (self._then(PartOfSplit(parts, rest)), self._then(PartOfSplit(parts, (part,))))
            for part, rest in enumerate(others)
        ]

    def sample(
        self,
        weights: Any = None,
        replacement: bool = True,
        seed: int | None = None,
        num_samples: int | None = None,
        by: Any = None,
    ) -> Self:
        """Draw elements by weight, others in each epoch.

        Parameters
        ----------
        weights : array of float, str, int or callable, optional
            As ``by`` of `split`: a number for each element. They need not add up to 1.
        replacement : bool
            Whether an element may be drawn several times. If not, no element is drawn twice, and elements without
            weight are not drawn.
        seed : int, optional
            As for `shuffle`.
        num_samples : int, optional
            Number of elements of an epoch. By default as many as the dataset has.
        by : str, int, callable or array, optional
            In place of ``weights``, as ``by`` of `split`: the class of each element. Each class is drawn equally often.

        Raises
        ------
        TypeError
            Unless either ``weights`` or ``by`` is given.
        ValueError
            After `shuffle`, which gives each weight another element in each epoch. When the length is first needed,
            if weights are missing or below 0.

        Examples
        --------
        >>> import numpy as np
        >>> from mpistrat.data import Dataset
        >>> labels = np.array([0, 0, 0, 1])
        >>> balanced = Dataset.from_arrays(labels).sample(by=labels, seed=1, num_samples=1000)
        >>> sum(int(label) for label in balanced)
        494
        """
        self._refuse_streams("sample()")
        _refuse_orders(self._definition, "sample()", repeats=True)
        if (weights is None) == (by is None):
            raise TypeError("sample() needs either weights, or the classes of elements in by=")
        keys = Keys(
            self._definition, *((by, "sample(by=...)") if weights is None else (weights, "weights of sample()"))
        )
        count = None if num_samples is None else integer(num_samples, "num_samples of sample()", 1)
        number = secrets.randbits(63) if seed is None else integer(seed, "the seed of sample()", -(2**63))
        return self._then(WeightedDraws(number, seed is not None, keys, bool(replacement), count, weights is None))

    def filter(self, predicate: Callable[..., Any], by: Any = None) -> Self:
        """Keep the elements for which a function is true. Call it before `batch`.

        Without ``by`` the number of elements is unknown then. If the dataset is distributed, every replica reads all
        rows and calls the function for each, as for `from_iterable`. ``shuffle()`` before it permutes the whole
        dataset.

        With ``by`` the function is called once for each value of a column, and the rows that are left have numbers: the
        length is known, and each replica reads its own rows only. Call it before `shuffle`.

        Parameters
        ----------
        predicate : callable
            Called with the element, or with the value of ``by``. The parts of a tuple are separate arguments. Returns
            True or False, the same on all replicas.
        by : str, int, callable or array, optional
            As ``by`` of `split`: the column that the function needs. It is read once. The ranks share this work.

        Returns
        -------
        IterableDataset
            With ``by``: Dataset.

        Raises
        ------
        TypeError
            If ``predicate`` is not a function. With ``by``, if rows have no numbers.
        ValueError
            With ``by`` after `shuffle`, which gives each value another element in each epoch.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(6).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        >>> years = Dataset.from_arrays({"year": [2019, 2020, 2021], "x": [1, 2, 3]})
        >>> recent = years.filter(lambda year: year > 2019, by="year")
        >>> len(recent), int(recent[0]["x"])
        (2, 2)
        """
        if not callable(predicate):
            raise TypeError(f"filter() needs a function, not {predicate!r}")
        if by is None:
            return self._by_function("filter", part_of_rows(self._definition, "filter"), filtered(predicate))
        self._refuse_streams("filter(by=...)")
        part_of_rows(self._definition, "filter")
        _refuse_orders(self._definition, "filter(by=...)", repeats=True)
        return self._then(ColumnFilter(Keys(self._definition, by, "filter(by=...)", predicate)))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        across_files: bool = True,
    ) -> Dataset[Any]:
        """Stack rows to windows, which may overlap. Call it before `batch`.

        A window is an array of rows, where tf.data has a dataset. In a batch, the axes of windows are batch, row.

        Parameters
        ----------
        size : int
            Number of rows of a window.
        shift : int, optional
            The number of rows from the begin of a window to the begin of the next. By default ``size``.
        stride : int
            The distance of the rows of a window.
        drop_remainder : bool
            Whether to leave out windows at the end that have fewer rows. Such windows cannot be batched, except by
            `padded_batch`.
        across_files : bool
            Whether a window may have rows of two files. If not, the windows of each file begin at its first row.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [x.tolist() for x in Dataset.range(5).window(3, shift=1, drop_remainder=True)]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        >>> [x.tolist() for x in Dataset.range(5).window(3, stride=2)]
        [[0, 2, 4], [3]]
        """
        size = integer(size, "the size of window()", 1)
        shift = size if shift is None else integer(shift, "the shift of window()", 1)
        stride = integer(stride, "the stride of window()", 1)
        windows = Windows(size, shift, stride, bool(drop_remainder), bool(across_files))
        part = part_of_rows(self._definition, "window")
        if part.streamed:
            return self._by_function(f"window({windows})", part, windows.of_stream())
        return self._of(WindowedSource([part], windows), (), self._definition.options)

    def _parts(self, method: str, shares: Sequence[float], seed: int, by: Any) -> SplitParts:
        self._refuse_streams(f"{method}()")
        _refuse_orders(self._definition, f"{method}()")
        keys = None if by is None else Keys(self._definition, by, f"{method}(by=...)")
        return SplitParts(method, shares, integer(seed, f"the seed of {method}()", -(2**63)), keys)

    def _refuse_streams(self, method: str) -> None:
        if self._definition.streamed:
            raise TypeError(f"{method} needs a dataset whose rows have numbers, but {self} can be read only in order")

    def _length(self, operation: str) -> int:
        length = self._plan.length
        if length is None:
            raise TypeError(f"{operation} needs a dataset that ends: use take(), or repeat() with a count")
        return int(length)


def _random(definition: Definition) -> Iterator[Any]:
    """Yield the transforms that change the place of elements from epoch to epoch, also of datasets inside."""
    for part in getattr(definition.source, "parts", ()):
        yield from _random(part)
    yield from (transform for transform in definition.transforms if isinstance(transform, (Seeded, Repeat)))


def _refuse_orders(definition: Definition, method: str, repeats: bool = False) -> None:
    for transform in _random(definition):
        if isinstance(transform, Repeat) and not repeats:
            raise ValueError(f"{method} after {transform} gives parts that have common elements: call {method} first")
        if isinstance(transform, Seeded) and (not transform.seeded or getattr(transform, "reshuffle", True)):
            raise ValueError(
                f"{method} after {transform} would take other elements in each epoch: call {method} first, or give "
                "shuffle() a seed and reshuffle_each_iteration=False"
            )
