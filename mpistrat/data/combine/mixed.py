"""Sources of rows that are drawn from some datasets by weight, and the draws."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.data.combine.combined import ChosenSource, DatasetPart, OfParts
from mpistrat.data.combine.streamed import Openers, StreamedSource, alike
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.rows.contracts import Seed
from mpistrat.process.cache import Cache

if TYPE_CHECKING:
    from typing_extensions import Self


_DRAWS = 4096  # choices of a block, whose random numbers need no earlier block
_BLOCKS_KEPT = 8
_END = object()


def drawn(seed: int, weights: Sequence[float], block: int, available: np.ndarray) -> np.ndarray:
    """Return a block of random choices between the datasets that are ``left``; empty if these have no weight."""
    usable = np.where(available, np.asarray(weights, float), 0.0)
    total = usable.sum()
    if not total:
        return np.empty(0, np.int64)
    key = hashlib.blake2b(f"{seed}/choices/{block}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(_DRAWS)
    ends = np.cumsum(usable) / total
    ends[np.flatnonzero(usable)[-1] :] = 1.0  # rounding may leave the sum below 1
    # 53 random bits make an even float in [0, 1).
    return ends.searchsorted((words >> np.uint64(11)) * 2.0**-53, side="right")


class Choices:
    """The dataset of every row of a mixture, and which row of the dataset it is.

    Blocks of choices are drawn from the first one on. Only the rows that each dataset has given before a block are
    kept: 8 bytes for each dataset and 4096 rows. With ``stop`` the rows end with the first choice of a dataset that has
    none left. Otherwise such choices are left out.
    """

    def __init__(self, seed: int, weights: Sequence[float], lengths: Sequence[int | None], stop: bool):
        self._seed, self._weights = seed, weights
        # An endless dataset has more rows than any number.
        self._lengths = np.array([np.iinfo(np.int64).max if length is None else length for length in lengths])
        self._stop = stop
        self._ends = [0]
        self._before = [np.zeros(len(lengths), np.int64)]
        self._over = False
        self._lock = MakingLock()  # datasets made of one mixture may be read ahead at the same time
        self._cache = Cache[int, np.ndarray](_BLOCKS_KEPT)
        used = [length for length, weight in zip(lengths, weights, strict=True) if weight]
        finite = [length for length in used if length is not None]
        self._endless = not finite if stop else len(finite) < len(used)
        self._sum = sum(finite)

    @property
    def length(self) -> int | None:
        """Number of rows. None if they are endless. With ``stop``, all blocks are drawn for it once."""
        if self._endless:
            return None
        if not self._stop:
            return self._sum
        with self._lock:
            while not self._over:
                self._draw()
        return self._ends[-1]

    def __call__(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each row, and the number of the row in it."""
        which, number = np.empty(len(ks), np.int64), np.empty(len(ks), np.int64)
        with self._lock:
            while self._ends[-1] <= ks.max() and not self._over:
                self._draw()
            ends = np.array(self._ends)
            blocks = ends.searchsorted(ks, side="right") - 1
            for block in np.unique(blocks).tolist():
                positions = np.flatnonzero(blocks == block)
                chosen = self._block(block)
                which[positions] = chosen[ks[positions] - ends[block]]
                for part in np.unique(which[positions]).tolist():
                    of_part = positions[which[positions] == part]
                    # Rows of the part before this block, and its choices up to here.
                    counted = np.cumsum(chosen == part) - 1
                    number[of_part] = self._before[block][part] + counted[ks[of_part] - ends[block]]
        return which, number

    def _draw(self) -> None:
        """Draw one more block."""
        chosen, over = self._cut(len(self._ends) - 1)
        self._over = over
        self._ends.append(self._ends[-1] + len(chosen))
        self._before.append(self._before[-1] + np.bincount(chosen, minlength=len(self._lengths)))

    def _block(self, block: int) -> np.ndarray:
        block_choices = self._cache.get(block)
        return self._cache.keep(block, self._cut(block)[0]) if block_choices is None else block_choices

    def _cut(self, block: int) -> tuple[np.ndarray, bool]:
        """Return the choices of a block that have a row, and whether no rows follow."""
        remaining = self._lengths - self._before[block]
        usable = np.ones(len(remaining), bool) if self._stop else remaining > 0
        chosen = drawn(self._seed, self._weights, block, usable)
        if not len(chosen):
            return chosen, True
        keep = np.ones(len(chosen), bool)
        for part in np.flatnonzero(remaining < len(chosen)).tolist():  # which may have no row left in the block
            keep[np.flatnonzero(chosen == part)[remaining[part] :]] = False
        if self._stop and not keep.all():
            return chosen[: int(keep.argmin())], True
        return chosen[keep], False


class Mixture(OfParts):
    """Parts that give their rows in order, as they are drawn. With ``stop`` the rows end where a part has none left."""

    name = "sample_from_datasets"

    def __init__(self, parts: Sequence[DatasetPart], weights: Sequence[float], seed: Seed, stop: bool):
        super().__init__(parts)
        self._weights, self._seed, self._stop = weights, seed, stop

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._weights, self._seed, self._stop)

    def seeds(self) -> list[Seed]:
        return [self._seed, *super().seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        parts = super().with_seeds(seeds[1:]).parts
        return type(self)(parts, self._weights, self._seed._replace(value=seeds[0]), self._stop)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "weights": [float(weight) for weight in self._weights], "stop": self._stop}

    def fingerprint(self) -> Any:
        seed = self._seed.value if self._seed.given else None
        return f"{super().fingerprint()} weights={list(self._weights)} seed={seed} stop={self._stop}"


class MixedSource(Mixture, ChosenSource):
    """The mixture of parts whose rows can be read in any order."""

    @cached_property
    def _choices(self) -> Choices:
        lengths = [part.length for part in self.parts]
        return Choices(self._seed.value, self._weights, lengths, self._stop)

    @property
    def length(self) -> int | None:
        return self._choices.length

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._choices(ks)


class MixedStream(Mixture, StreamedSource):
    """The mixture of parts of which one can be read only in order, or has an unknown length."""

    def combine(self, openers: Openers, iteration: int) -> Iterator[Any]:
        """Yield elements of the parts, as they are drawn."""
        streams = alike(openers)
        has_rows = np.ones(len(streams), bool)
        for block in itertools.count():
            chosen = drawn(self._seed.value, self._weights, block, has_rows)
            if not len(chosen):
                return
            for part in chosen.tolist():
                if not has_rows[part]:
                    continue
                element = next(streams[part], _END)
                if element is not _END:
                    yield element
                elif self._stop:
                    return
                else:
                    has_rows[part] = False
