"""Sources that are made of datasets whose rows can be read only in order, or whose number is unknown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.combined import DatasetPart, OfParts, common_spec
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import StreamSource

if TYPE_CHECKING:
    from typing_extensions import Self

Openers: TypeAlias = "Sequence[Callable[[], Iterator[Any]]]"
Combine: TypeAlias = "Callable[[Openers, int], Iterator[Any]]"


class StreamedSource(OfParts, StreamSource):
    """Elements that are made of the elements of some parts. A subclass says how: `combine`."""

    _first: Any = None
    _begun: Iterator[Any] | None = None

    def combine(self, openers: Openers, iteration: int) -> Iterator[Any]:
        """Return the elements of an iteration. A part is opened when its opener is called."""
        raise NotImplementedError

    def open(self, iteration: int = 0) -> Iterator[Any]:
        # `first` has read an element, which an iterable may yield only once.
        begun, self._begun = self._begun, None
        if begun is not None and iteration == 0:
            return begun
        return self.combine([partial(part.plan.elements, iteration) for part in self.parts], iteration)

    def first(self) -> Any:
        """Return the first element, or raise ValueError. The next `open` yields it: parts may be read only once."""
        if self._first is None:
            stream = self.open()
            self._first = next(stream, None)
            if self._first is None:
                raise ValueError(f"{self} has no elements, so their structure is unknown")
            self._begun = itertools.chain([self._first], stream)
        return self._first


class StreamByFunction(StreamedSource):
    """The elements that a function makes of the elements of some parts, as `StreamedSource.combine`."""

    def __init__(self, name: str, parts: Sequence[DatasetPart], combine: Combine):
        super().__init__(parts)
        self.name, self.function = name, combine

    def combine(self, openers: Openers, iteration: int) -> Iterator[Any]:
        return self.function(openers, iteration)

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(self.name, parts, self.function)


class CachedStream(StreamedSource):
    """The elements of the first iteration of a part, which are kept once all of them were made."""

    name = "cache"
    _kept: list[Any] | None = None

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over the elements, the same in every iteration."""
        return super().open(0)

    def combine(self, openers: Openers, iteration: int) -> Iterator[Any]:
        """Yield the elements, from memory if they are kept."""
        if self._kept is not None:
            yield from (nest.map_structure(_copy, element) for element in self._kept)
            return
        elements = []
        for element in openers[0]():
            elements.append(nest.map_structure(_copy, element))
            yield element
        # Only here: an iterator that is left early has not made all elements.
        self._kept = elements


def zipped(rebuild: Callable[[list[Any]], Any]) -> Combine:
    """Return the combination of elements with the same number."""
    return lambda openers, _: (rebuild([*row]) for row in zip(*(opener() for opener in openers), strict=False))


def concatenated(openers: Openers, iteration: int) -> Iterator[Any]:
    """Yield the elements of one part after another."""
    for stream in alike(openers):
        yield from stream


def alike(openers: Openers) -> list[Iterator[Any]]:
    """Return the streams of all parts. They raise if the first element of one is not as the first that was read."""
    known: list[tuple[int, Any]] = []

    def checked(number: int, opener: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        stream = opener()
        for element in stream:
            known.append((number, nest.map_structure(spec.of_array, element)))
            # The first element of each part must be like the first element of the part that was read first.
            common_spec(known[0], known[-1])
            yield element
            break
        yield from stream

    return [checked(number, opener) for number, opener in enumerate(openers)]


def filtered(predicate: Callable[..., Any]) -> Combine:
    """Return the combination that keeps the elements of one part for which a function is true."""
    return lambda openers, _: (row for row in openers[0]() if is_true(elements.call(predicate, row), "filter"))


def numbered(start: int) -> Combine:
    """Return the combination of a number and each element of one part."""
    return lambda openers, _: ((np.int64(number), element) for number, element in enumerate(openers[0](), start))


def _copy(leaf: Any) -> Any:
    return leaf.copy()


def is_true(answer: Any, name: str) -> bool:
    """Return the answer of a predicate. Raise ValueError if it is not a truth value."""
    if not isinstance(answer, (bool, np.bool_)) and not (
        getattr(answer, "dtype", None) == np.bool_ and np.ndim(answer) == 0
    ):
        raise ValueError(f"the function given to {name}() must return True or False, not {answer!r:.100}")
    return bool(answer)
