"""Sources that are made of datasets whose rows can be read only in order, or whose number is unknown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.choices import Draws
from mpistrat.data.combine.chosen import common_spec
from mpistrat.data.combine.dataset_part import DatasetPart, ready_parts, seeds_of_parts, with_seeds_of_parts
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import Peers, Seed, StreamSource

# Makes one stream of those of the parts. A part is opened when its stream is called.
Combine: TypeAlias = "Callable[[Sequence[Callable[[], Iterator[Any]]]], Iterator[Any]]"


class StreamedSource(StreamSource):
    """The elements that a function makes of the elements of some parts.

    Parameters
    ----------
    word : str
        The kind of combination.
    parts : sequence of DatasetPart
    combine : callable
    """

    def __init__(self, word: str, parts: Sequence[DatasetPart], combine: Combine):
        self.word, self.parts, self._combine = word, parts, combine
        self._first: Any = None
        self._begun: Iterator[Any] | None = None

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over the elements of an iteration."""
        begun, self._begun = self._begun, None
        if begun is not None and iteration == 0:
            return begun
        return self._combine([lambda part=part: part.elements(iteration) for part in self.parts])  # type: ignore[misc]

    def first(self) -> Any:
        """Return the first element. The next `open` yields it too, since some parts can be read only once.

        Raises
        ------
        ValueError
            If it has no element.
        """
        if self._first is None:
            stream = self.open()
            self._first = next(stream, None)
            if self._first is None:
                raise ValueError(f"{self} has no elements, so their structure is unknown")
            self._begun = itertools.chain([self._first], stream)
        return self._first

    def of_parts(self, parts: Sequence[DatasetPart]) -> StreamedSource:
        """Return the same combination of other parts."""
        return StreamedSource(self.word, parts, self._combine)

    def fingerprint(self) -> Any:
        """Return the kind of combination, and the fingerprints of its parts."""
        return f"{self.word}({'; '.join(part.fingerprint() for part in self.parts)})"

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        return {"source": self.word, "parts": [part.identity() for part in self.parts]}

    def agree(self, peers: Peers) -> None:
        """Let every part agree with the peers. Collective."""
        for part in self.parts:
            part.source.agree(peers)

    def seeds(self) -> list[Seed]:
        """Return the seeds of the parts."""
        return seeds_of_parts(self.parts)

    def with_seeds(self, seeds: Sequence[int]) -> StreamedSource:
        """Return the source with other seeds for the shuffles of its parts."""
        return self.of_parts(with_seeds_of_parts(self.parts, seeds))

    def ready(self, memory: int, ranks: int | None = None, peers: Peers | None = None) -> StreamedSource:
        """Return the source with parts that are ready for their shuffles."""
        parts = ready_parts(self.parts, memory, ranks, peers)
        return self if parts is None else self.of_parts(parts)  # the rows that a source keeps stay with it

    def __repr__(self) -> str:
        return f"{self.word}({'; '.join(map(repr, self.parts))})"


class CachedStream(StreamedSource):
    """The elements of the first iteration of a part, which are kept once all of them were made."""

    def __init__(self, parts: Sequence[DatasetPart]):
        super().__init__("cache", parts, Keeper())

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over the elements, the same in every iteration."""
        return super().open(0)

    def of_parts(self, parts: Sequence[DatasetPart]) -> CachedStream:
        """Return a cache of other parts, which has kept nothing yet."""
        return CachedStream(parts)


class MixedStream(StreamedSource):
    """Elements of the parts, drawn by weight."""

    def __init__(self, parts: Sequence[DatasetPart], weights: Sequence[float], seed: Seed, stop: bool):
        super().__init__("sample_from_datasets", parts, self._mix)
        self._weights, self._seed, self._stop = weights, seed, stop

    def of_parts(self, parts: Sequence[DatasetPart]) -> MixedStream:
        """Return the same mixture of other parts."""
        return MixedStream(parts, self._weights, self._seed, self._stop)

    def seeds(self) -> list[Seed]:
        """Return the seed of the mixture, and those of the parts."""
        return [self._seed, *super().seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> MixedStream:
        """Return the source with other seeds."""
        parts = super().with_seeds(seeds[1:]).parts
        return MixedStream(parts, self._weights, self._seed._replace(value=seeds[0]), self._stop)

    def fingerprint(self) -> Any:
        """Return the fingerprints of the parts, and what the program gave for the draws."""
        seed = self._seed.value if self._seed.given else None
        return f"{super().fingerprint()} weights={list(self._weights)} seed={seed} stop={self._stop}"

    def identity(self) -> dict[str, Any]:
        """Return the identities of the parts, and the weights."""
        return {**super().identity(), "weights": [float(each) for each in self._weights], "stop": self._stop}

    def _mix(self, openers: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
        draws = Draws(self._seed.value, np.asarray(self._weights, float))
        streams = _alike(openers)
        left = np.ones(len(streams), bool)
        block = 0
        while len(chosen := draws.block(block, left)):
            block += 1
            for each in chosen.tolist():
                if not left[each]:
                    continue
                element = next(streams[each], _END)
                if element is not _END:
                    yield element
                elif self._stop:
                    return
                else:
                    left[each] = False


_END = object()


def zipped(rebuild: Callable[[list[Any]], Any]) -> Combine:
    """Return the combination of elements with the same number."""
    return lambda openers: (rebuild([*row]) for row in zip(*(each() for each in openers), strict=False))


def concatenated(openers: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
    """Yield the elements of one part after another."""
    for stream in _alike(openers):
        yield from stream


def _alike(openers: Sequence[Callable[[], Iterator[Any]]]) -> list[Iterator[Any]]:
    """Return the streams of all parts. They raise if the first element of one is not as the first that was read."""
    known: list[tuple[int, Any]] = []

    def checked(number: int, opener: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        stream = opener()
        for element in stream:
            known.append((number, nest.map_structure(spec.of_array, element)))
            common_spec(known[0], known[-1])
            yield element
            break
        yield from stream

    return [checked(number, opener) for number, opener in enumerate(openers)]


def filtered(predicate: Callable[..., Any]) -> Combine:
    """Return the combination that keeps the elements of one part for which a function is true."""
    return lambda openers: (each for each in openers[0]() if _is_true(elements.call(predicate, each)))


def numbered(start: int) -> Combine:
    """Return the combination of a number and each element of one part."""
    return lambda openers: ((np.int64(number), each) for number, each in enumerate(openers[0](), start))


class Keeper:
    """The combination that keeps the elements of one part once all of them were made."""

    def __init__(self) -> None:
        self._kept: list[Any] | None = None

    def __call__(self, openers: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
        """Yield the elements, from memory if they are kept."""
        if self._kept is not None:
            yield from (nest.map_structure(_copy, each) for each in self._kept)
            return
        made = []
        for each in openers[0]():
            made.append(nest.map_structure(_copy, each))
            yield each
        self._kept = made


def _copy(leaf: Any) -> Any:
    return leaf.copy()


def _is_true(answer: Any) -> bool:
    if not isinstance(answer, (bool, np.bool_)) and not (
        getattr(answer, "dtype", None) == np.bool_ and np.ndim(answer) == 0
    ):
        raise ValueError(f"the function given to filter() must return True or False, not {answer!r:.100}")
    return bool(answer)
