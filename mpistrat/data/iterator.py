"""One pass over a distributed dataset."""

from __future__ import annotations

from typing import Any

from mpistrat import context
from mpistrat.data.policies import Division

_NOTHING = object()


class Optional:
    """A batch, or the news that there is none.

    Examples
    --------
    >>> Optional.from_value(3).get_value(), Optional.empty().has_value()
    (3, False)
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any = _NOTHING):
        self._value = value

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """An optional that holds ``value``."""
        return cls(value)

    @classmethod
    def empty(cls) -> Optional:
        """An optional that holds nothing."""
        return cls()

    def has_value(self) -> bool:
        """Whether there is a value.

        Returns
        -------
        bool
        """
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """The value, as often as it is asked for.

        Returns
        -------
        object

        Raises
        ------
        ValueError
            If there is none.
        """
        if self._value is _NOTHING:
            raise ValueError("this optional is empty: the iterator has ended, ask has_value() first")
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional.empty()"


class DistributedIterator:
    """This replica's batches of one epoch. Made by ``iter()`` of a distributed dataset.

    Every replica makes the same number of steps; one without rows in a step gets an empty batch. Reading
    communicates nothing, so replicas may be at different steps.
    """

    def __init__(self, division: Division, iteration: int, element_spec: Any):
        self._division = division
        self._iteration = iteration
        self._element_spec = element_spec
        self._step = 0

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """The next batch of this replica.

        Returns
        -------
        nested structure of arrays

        Raises
        ------
        StopIteration
            After the last step, on every replica at the same one.
        ValueError
            If called inside a replica function.
        """
        _refuse_replica_context()
        steps = self._division.steps
        if steps is not None and self._step >= steps:
            raise StopIteration
        batch = self._division.batch(self._step, self._iteration)
        self._step += 1
        return batch

    def get_next_as_optional(self) -> Optional:
        """The next batch of this replica, or an empty optional after the last step.

        Returns
        -------
        Optional

        Raises
        ------
        ValueError
            If called inside a replica function.
        """
        try:
            return Optional(self.get_next())
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, as of the dataset."""
        return self._element_spec() if callable(self._element_spec) else self._element_spec


def _refuse_replica_context() -> None:
    if not context.is_default() and context.current().replica_context is not None:
        raise ValueError(
            "next(iterator) should be called from outside of replica_fn: take the batch before "
            "strategy.run(fn, args=(batch,)) and pass it as an argument"
        )
