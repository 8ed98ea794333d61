"""Random numbers of a replica that do not depend on where the replica runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def random_stream(seed: int | Sequence[int], replica: int) -> np.random.Generator:
    """Return a replica's PCG64, seeded by ``SeedSequence(seed, spawn_key=(replica,))``. See `Strategy.rng`."""
    numbers: Sequence[Any] = seed if isinstance(seed, (list, tuple)) else [seed]
    if not numbers or not all(isinstance(each, (int, np.integer)) for each in numbers):
        raise TypeError(f"seed must be an int or a list of ints, the same on every replica, not {seed!r}")
    if min(numbers) < 0:
        raise ValueError(f"seed must not be negative, not {seed!r}")
    sequence = np.random.SeedSequence([int(each) for each in numbers], spawn_key=(replica,))
    return np.random.Generator(np.random.PCG64(sequence))
