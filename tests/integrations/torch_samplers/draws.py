"""Draws of runs that stop and go on with other ranks, for the tests of samplers: each row must come once.

The ranks follow each other in one process. ``SAMPLER_DRAWS=1000`` draws so many.
"""

import os
import random
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import DataLoader

from mpistrat.integrations.torch import BatchSampler, CountedLoader

FEW = int(os.environ.get("SAMPLER_DRAWS", "12"))


@dataclass
class Draw:
    """A run of two epochs that stops in its epoch ``epoch``, after ``stop`` steps, and goes on with other ranks."""

    length: int
    ranks: tuple[int, int]
    size: int
    sizes: tuple[int, int]
    workers: tuple[int, int]
    shuffle: bool
    epoch: int
    stop: int

    @classmethod
    def of(cls, seed, least=1):
        """Return a draw whose ranks have so many rows or more of a step."""
        drawn = random.Random(seed)
        ranks = drawn.randint(1, 6), drawn.randint(1, 6)
        size = max(least * max(ranks), drawn.randint(1, 24))
        length = drawn.randint(max(ranks), 120)
        stop = drawn.randint(0, max(0, length // size - 1))
        sizes = size, drawn.choice([size, max(*ranks, drawn.randint(1, 24))])
        workers = drawn.choice([0, 0, 0, 1, 2]), drawn.choice([0, 0, 0, 1, 2])
        return cls(length, ranks, size, sizes, workers, drawn.random() < 0.7, drawn.randint(0, 1), stop)

    def loaders(self, after, kind=DataLoader, counted=True, **options):
        """Return the loaders of all ranks, before or after the stop."""
        made = []
        for rank in range(self.ranks[after]):
            sampler = BatchSampler(
                range(self.length),
                num_replicas=self.ranks[after],
                rank=rank,
                shuffle=self.shuffle,
                global_batch_size=self.sizes[after],
            )
            loader = kind(range(self.length), batch_sampler=sampler, num_workers=self.workers[after], **options)
            made.append(CountedLoader(loader) if counted else loader)
        return made

    def check(self, first, second, states):
        """Compare the rows of each rank, an epoch after the other, with all rows twice."""
        assert all(state == states[0] for state in states)
        rows = sorted([*flat(first), *flat(second)])
        assert rows == sorted([*range(self.length)] * 2), self


def flat(batches):
    return [int(row) for batch in batches for row in (batch if isinstance(batch, list) else batch.tolist())]


def ran(loader, epochs):
    return [batch for _ in range(epochs) for batch in loader]


def check_loaders(kind, stateful):
    """Check loaders of a class, which are ahead of the loop if they have workers. Stateful ones have states."""
    for seed in range(FEW):
        draw = Draw.of(seed)
        first, states = [], []
        for loader in draw.loaders(0, kind, not stateful):
            first += ran(loader, draw.epoch)
            first += islice(iterator := iter(loader), draw.stop)
            states.append(loader.state_dict())
            del iterator
        second = []
        for loader in draw.loaders(1, kind, not stateful):
            if stateful:  # the states of torchdata's loader also hold those of its workers
                loader.batch_sampler.load_state_dict(of_rows(states[0]))
            else:
                loader.load_state_dict(states[0])
            second += ran(loader, 2 - draw.epoch)
        draw.check(first, second, [of_rows(each) if stateful else each for each in states])


def of_rows(state):
    """Return what a state of torchdata's loader says of the sampler."""
    inner = state.get("_snapshot", {}).get("_main_snapshot", state)
    return inner["_sampler_iter_state"]
