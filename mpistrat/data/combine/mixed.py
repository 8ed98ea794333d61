"""Sources of rows that are drawn from some datasets by weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.data.combine.choices import Choices, drawn
from mpistrat.data.combine.chosen import ChosenSource
from mpistrat.data.combine.dataset_part import DatasetPart
from mpistrat.data.combine.of_parts import OfParts
from mpistrat.data.combine.streamed import Openers, StreamedSource, alike
from mpistrat.data.rows.contracts import Seed

if TYPE_CHECKING:
    from typing_extensions import Self

_END = object()


class Drawn(OfParts):
    """Parts of which each gives its rows in its own order. The part of each row is drawn, the same in every iteration.

    Parameters
    ----------
    parts : sequence of DatasetPart
    weights : sequence of float
    seed : Seed
    stop : bool
        Whether the rows end where a part has none left.
    """

    word = "sample_from_datasets"

    def __init__(self, parts: Sequence[DatasetPart], weights: Sequence[float], seed: Seed, stop: bool):
        super().__init__(parts)
        self._weights, self._seed, self._stop = weights, seed, stop

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        """Return the same mixture of other parts."""
        return type(self)(parts, self._weights, self._seed, self._stop)

    def seeds(self) -> list[Seed]:
        """Return the seed of the mixture, and those of the parts."""
        return [self._seed, *super().seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the source with other seeds."""
        parts = super().with_seeds(seeds[1:]).parts
        return type(self)(parts, self._weights, self._seed._replace(value=seeds[0]), self._stop)

    def identity(self) -> dict[str, Any]:
        """Return the identities of the parts, and the weights."""
        return {**super().identity(), "weights": [float(each) for each in self._weights], "stop": self._stop}

    def fingerprint(self) -> Any:
        """Return the fingerprints of the parts, and what the program gave for the draws."""
        seed = self._seed.value if self._seed.given else None
        return f"{super().fingerprint()} weights={list(self._weights)} seed={seed} stop={self._stop}"


class MixedSource(Drawn, ChosenSource):
    """The mixture of parts whose rows can be read in any order."""

    @cached_property
    def _choices(self) -> Choices:
        lengths = [part.length for part in self.parts]
        return Choices(self._seed.value, self._weights, lengths, self._stop)

    @property
    def length(self) -> int | None:
        """Number of rows."""
        return self._choices.length

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the part of each row, and the number of the row in that part."""
        return self._choices(ks)


class MixedStream(Drawn, StreamedSource):
    """The mixture of parts of which one can be read only in order, or has an unknown length."""

    def combine(self, openers: Openers) -> Iterator[Any]:
        """Yield elements of the parts, as they are drawn."""
        streams = alike(openers)
        left = np.ones(len(streams), bool)
        for block in itertools.count():
            chosen = drawn(self._seed.value, self._weights, block, left)
            if not len(chosen):
                return
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
