"""Seeds of a dataset: of its shuffles, and of those of the datasets that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpistrat.data.pipeline.transforms import Shuffle, Transform
from mpistrat.data.rows.contracts import Seed


def seeds_of(source: Any, transforms: Sequence[Transform]) -> list[Seed]:
    """Return all seeds of a source with its transforms."""
    shuffles = [each for each in transforms if isinstance(each, Shuffle)]
    return [*source.seeds(), *(Seed(each.seed, each.seeded) for each in shuffles)]


def with_seeds(
    source: Any, transforms: Sequence[Transform], seeds: Sequence[int]
) -> tuple[Any, tuple[Transform, ...]]:
    """Return a source and its transforms with other seeds, in the order of `seeds_of`."""
    inside = len(source.seeds())
    left = iter(seeds[inside:])
    changed = tuple(
        replace(each, seed=next(left)) if isinstance(each, Shuffle) else each for each in transforms
    )
    return source.with_seeds(seeds[:inside]) if inside else source, changed


def with_drawn_seeds(
    source: Any, transforms: Sequence[Transform], seeds: Sequence[Seed]
) -> tuple[Any, tuple[Transform, ...]]:
    """Return a source and its transforms with the seeds of another rank where the program gave none."""
    mine = seeds_of(source, transforms)
    theirs = [each.value for each in seeds if not each.given]
    left = iter(theirs)
    return with_seeds(
        source, transforms, [each.value if each.given else next(left, each.value) for each in mine]
    )
