"""Source of rows that are drawn from some datasets by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.data.combine.choices import Choices
from mpistrat.data.combine.chosen import ChosenSource
from mpistrat.data.combine.dataset_part import DatasetPart
from mpistrat.data.rows.contracts import Seed


class MixedSource(ChosenSource):
    """Rows of the parts, each part in its own order. The part of each row is drawn, the same in every iteration.

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

    def of_parts(self, parts: Sequence[DatasetPart]) -> MixedSource:
        """Return the same mixture of other parts."""
        return MixedSource(parts, self._weights, self._seed, self._stop)

    def seeds(self) -> list[Seed]:
        """Return the seed of the mixture, and those of the parts."""
        return [self._seed, *super().seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> MixedSource:
        """Return the source with other seeds."""
        parts = super().with_seeds(seeds[1:]).parts
        return MixedSource(parts, self._weights, self._seed._replace(value=seeds[0]), self._stop)

    def identity(self) -> dict[str, Any]:
        """Return the identities of the parts, and the weights."""
        return {**super().identity(), "weights": [float(each) for each in self._weights], "stop": self._stop}

    def fingerprint(self) -> Any:
        """Return the fingerprints of the parts, and the weights."""
        seed = self._seed.value if self._seed.given else None
        return f"{super().fingerprint()} weights={list(self._weights)} seed={seed} stop={self._stop}"
