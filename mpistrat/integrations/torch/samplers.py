"""Samplers for torch's own `DataLoader`: the rows of each rank, in an order that does not depend on the ranks.

An epoch is one order of all rows. It is cut into steps, and each step into a piece for each rank. So the position in an
epoch is a number of rows, from which any number of ranks and workers can continue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.utils.data

from mpistrat.data.distribute.state import require_same
from mpistrat.data.pipeline.chosen import Keys, WeightedDraws
from mpistrat.data.pipeline.transforms import Order, Shuffle, Transform, integer
from mpistrat.data.rows.lanes import piece
from mpistrat.process import mpi
from mpistrat.strategy import get_strategy, has_strategy

_VERSION = 1
_LOCATED_AT_ONCE = 4096  # rows, of several batches: 30 calls of NumPy for each batch would cost more than its rows


class _SamplerIterator(Iterator[Any]):
    """An iterator that counts the items ``taken`` from it. ``got`` is how many of these the loop has, if known.

    `StatefulDataLoader` of torchdata asks it for its state after each item, and keeps the state until the loop has the
    batch.
    """

    def __init__(self, sampler: _RankSampler):
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self.epoch = self._sampler.epoch
        epoch, position = self._sampler._restored
        self.start = position if epoch == self.epoch else 0
        self.taken = 0
        self.got: int | None = None
        self._items = self._sampler._listed(self.epoch, self.start)
        self._sampler._latest = self

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            if self._sampler.epoch == self.epoch:  # the program has not set another
                self._sampler.epoch += 1
            raise
        self.taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the items that were taken."""
        return self._sampler._state_after(self, self.taken)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a state."""
        self._sampler.load_state_dict(state_dict)
        self._begin()


class _RankSampler(torch.utils.data.Sampler):
    """A rank's part of an order of rows, which is cut into steps of ``_unit`` rows of all ranks."""

    _items = "batches"
    """The items of an iterator, for messages."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None,
        rank: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        pad: bool | None,
        weights: Any,
        num_samples: int | None,
        batch_size: int | None,
        global_batch_size: int | None = None,
    ):
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"a sampler needs a map-style dataset, with len() and rows by number, not {dataset!r:.100}: divide the "
                "rows of an IterableDataset in its own __iter__"
            )
        if drop_last and pad:
            raise ValueError("drop_last=True leaves rows out, and pad=True repeats rows: give one of them")
        if num_samples is not None and weights is None:
            raise ValueError("num_samples is the number of draws by weight: give weights, too")
        seed = integer(seed, "seed", -(2**63))
        transforms: list[Transform] = [Shuffle(seed, True)] if shuffle else []
        if weights is not None:
            count = None if num_samples is None else integer(num_samples, "num_samples", 1)
            no_rows: Any = None
            transforms = [WeightedDraws(seed, True, Keys(no_rows, np.asarray(weights, float), "weights"), True, count)]
        self._length = len(dataset)
        self._order = Order(self._length, transforms)
        self._rows: int = self._order.length or 0
        self._order_id = f"{transforms[0].without_numbers()} by seed {seed}" if transforms else "that of the dataset"
        self._drop_last, self._pad = bool(drop_last), pad
        size, own = _ranks() if num_replicas is None or rank is None else (1, 0)
        self.num_replicas = integer(size if num_replicas is None else num_replicas, "num_replicas", 1)
        self.rank = integer(own if rank is None else rank, "rank", 0)
        if self.rank >= self.num_replicas:
            raise ValueError(f"rank must be below num_replicas, {self.num_replicas}, got {self.rank}")
        if global_batch_size is None:
            self._unit = integer(batch_size, "batch_size", 1) * self.num_replicas
        else:
            self._unit = integer(global_batch_size, "global_batch_size", self.num_replicas)
        self.epoch, self._restored = 0, (0, 0)
        self._latest: _SamplerIterator | None = None
        self._steps(0)

    @property
    def sampler(self) -> Any:
        """Itself: Lightning, accelerate and transformers call ``batch_sampler.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Take this epoch next. Without a call, epochs follow each other.

        After `load_state_dict`, the epoch of the state is only what is left of it.

        Parameters
        ----------
        epoch : int
            The number of the epoch, at least 0.
        """
        self.epoch = integer(epoch, "epoch", 0)
        if self._latest is not None and self._latest.epoch != epoch:  # Lightning begins to iterate before it sets it
            self._latest = None

    def __iter__(self) -> Iterator[Any]:
        # accelerate's loader takes every n-th batch, so it would lose the other batches of this rank.
        frame: Any = sys._getframe(1)
        callers = [f.f_locals.get("self") for f in (frame, frame.f_back) if f]  # torch's BatchSampler between
        shards = [caller.num_processes for caller in callers if type(caller).__name__ == "BatchSamplerShard"]
        if self.num_replicas > 1 and max(shards, default=1) > 1:
            raise RuntimeError(
                f"rank {self.rank}: the sampler has divided the rows by {self.num_replicas} ranks, and accelerate "
                "would divide them again: leave the loader out of prepare()"
            )
        return _SamplerIterator(self)

    def _listed(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the index lists of this rank, from a row of the epoch on."""
        full, last = self._steps(start)
        own = np.arange(*piece(self._unit, self.num_replicas, self.rank))
        together = max(1, _LOCATED_AT_ONCE // len(own))
        for first in range(0, full, together):
            steps = np.arange(first, min(first + together, full))[:, None]
            yield from self._located(start + steps * self._unit + own, epoch)
        start += full * self._unit
        for size in last:
            own = np.arange(*piece(size, self.num_replicas, self.rank))
            yield from self._located(start + own[None], epoch) if len(own) else ()
            start += size

    def _located(self, positions: np.ndarray, epoch: int) -> Any:
        """Return the rows at some positions of the order, which wrap around at its end."""
        rows = np.empty(positions.size, np.int64)
        for indices, numbers, _ in self._order.locate(positions.ravel() % self._rows, epoch):
            rows[indices] = numbers
        return rows.reshape(positions.shape).tolist()

    def _steps(self, start: int) -> tuple[int, list[int]]:
        """Return the number of full steps from a row on, and the rows of each other step after them."""
        full, rest = divmod(self._rows - start, self._unit)
        if not rest or self._drop_last:
            return full, []
        if self._pad:
            return full, [-(-rest // self.num_replicas) * self.num_replicas]
        # Level the last two steps for any number of ranks, so that steps do not depend on it: half a step usually has a
        # row for each rank.
        if full and self._pad is None and self._items == "batches" and rest < max(self._unit / 2, self.num_replicas):
            rows = self._unit + rest
            return full - 1, [rows - rows // 2, rows // 2] if rows // 2 >= self.num_replicas else [rows]
        if self._pad is False or rest >= self.num_replicas:
            return full, [rest]
        raise ValueError(
            f"{self._rows - start} rows cannot be divided by {self.num_replicas} ranks so that all have as many "
            f"{self._items}: give drop_last=True to leave {rest} out, pad=True to repeat "
            f"{self.num_replicas - rest}, or pad=False if ranks may end at different times"
            + ("; BatchSampler needs none of them" if self._items == "rows" else "")
        )

    def __len__(self) -> int:
        """Return the number of items of this rank in a whole epoch, also if a state begins within one."""
        full, last = self._steps(0)
        return full + sum(self.rank < rows for rows in last)

    def state_dict(self, got: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank, as a dict of values that JSON can hold.

        Parameters
        ----------
        got : int, optional
            How many batches the loop has got since the iteration began (of a `Sampler`: how many rows, on this rank).
            It may be left out before an iteration, in a loop over `CountedLoader`, and by torchdata's
            `StatefulDataLoader`.

        Raises
        ------
        ValueError
            If it is left out elsewhere, since workers take batches ahead of the loop, or is more than was taken.
        """
        latest = self._latest or _SamplerIterator(self)
        got = latest.got if got is None else integer(got, f"the number of {self._items}", 0)
        # torchdata keeps the state beside the batch that was taken last, until the loop has that batch.
        if got is None and sys._getframe(1).f_globals.get("__name__", "").startswith("torchdata."):
            got = latest.taken
        if got is None and latest.taken:
            raise ValueError(
                f"{latest.taken} {self._items} were taken of the sampler, but workers take them ahead of the loop: "
                f"give state_dict() the number of {self._items} that the loop has got since the iteration began, or "
                "iterate over CountedLoader(loader)"
            )
        if (got or 0) > latest.taken:
            raise ValueError(
                f"the loop cannot have got {got} {self._items} since the iteration began: {latest.taken} were taken"
            )
        return self._state_after(latest, got or 0)

    def _state_after(self, taking: _SamplerIterator, got: int) -> dict[str, Any]:
        """Return the state after so many items of an iteration."""
        full, last = self._steps(taking.start)
        position = taking.start + min(got, full) * self._unit + sum(last[: max(0, got - full)])
        return {
            "version": _VERSION,
            "epoch": taking.epoch,
            "position": self._rows if got == full + len(last) else position,  # the last step may drop or repeat rows
            "length": self._length,
            "order": self._order_id,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a state: the next iteration begins there, on any number of ranks and workers.

        Parameters
        ----------
        state_dict : dict
            What ``state_dict()`` returned, on any rank.

        Raises
        ------
        TypeError
            If it is not a state.
        ValueError
            If the dataset had another length or order, or if the rows that are left cannot be divided by the ranks.
        """
        state = state_dict if isinstance(state_dict, Mapping) else {}
        if any(type(state.get(name)) is not int or state[name] < 0 for name in ("epoch", "position", "length")):
            raise TypeError(f"load_state_dict() needs what state_dict() returned, not {state_dict!r:.200}")
        epoch, position = state["epoch"], state["position"]
        require_same("version", state.get("version"), _VERSION, "load it with the mpistrat that wrote it")
        require_same("number of rows", state["length"], self._length, "give the dataset of the saved run")
        require_same("order", state.get("order"), self._order_id, "give the shuffle, seed and weights of the saved run")
        if position > self._rows:
            raise ValueError(f"the state cannot be restored: its position is {position}, of {self._rows} rows")
        self._steps(position)
        self._restored, self._latest = (epoch, position), None
        # An epoch without rows left is followed by the next. `set_epoch` finds nothing left in it.
        self.epoch = epoch + (position == self._rows)


class Sampler(_RankSampler):
    """The rows of a rank, one by one: in place of torch's `DistributedSampler`, and resumed on any number of ranks.

    The order of an epoch follows from the seed and the epoch alone. Rank r of R has its rows r, r + R, r + 2R, ...

    Parameters
    ----------
    dataset : Sized
        A map-style dataset.
    num_replicas, rank : int, optional
        By default from torch's default process group, the current strategy, or MPI.
    shuffle : bool
        Whether each epoch has another order.
    seed : int
        Another seed gives other orders. It must be the same on all ranks.
    drop_last : bool
        Whether to leave out the last rows, if they are fewer than ranks.
    pad : bool, optional
        If the rows cannot be divided by the ranks: True repeats rows from the beginning of the epoch, as torch does.
        False gives some ranks a row less, which may be a batch less. By default such a length is refused.
    weights : array, optional
        Draw rows by these weights with replacement, others in each epoch, instead of ``shuffle``.
    num_samples : int, optional
        How many rows to draw; by default as many as the dataset has.

    Examples
    --------
    >>> from mpistrat.integrations.torch import Sampler
    >>> list(Sampler(range(6), num_replicas=2, rank=1, shuffle=False))
    [1, 3, 5]
    """

    _items = "rows"

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool | None = None,
        weights: Any = None,
        num_samples: int | None = None,
    ):
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last, pad, weights, num_samples, 1)

    def _listed(self, epoch: int, start: int) -> Iterator[int]:
        """Yield the rows of this rank, from a row of the epoch on."""
        return chain.from_iterable(super()._listed(epoch, start))


class BatchSampler(_RankSampler):
    """Batches of the rows of a rank, for ``DataLoader(batch_sampler=...)``, resumed on any number of ranks.

    Every rank has as many batches, and no row is lost or repeated. If the last step of all ranks would have less than
    half of the rows of the others, it gets rows of the step before it. So steps of as many rows are the same on any
    number of ranks, if each has two rows or more.

    Parameters
    ----------
    dataset : Sized
        A map-style dataset.
    batch_size : int, optional
        Rows of a rank in a step.
    num_replicas, rank, shuffle, seed
        As for `Sampler`.
    drop_last : bool
        Whether to leave out a last step that has fewer rows than the others.
    pad : bool, optional
        How the last step is made instead. True repeats rows from the beginning of the epoch, so that all ranks have as
        many. False leaves it as it is: if it has fewer rows than ranks, some ranks end a batch earlier.
    weights, num_samples
        As for `Sampler`.
    global_batch_size : int, optional
        Rows of all ranks in a step, instead of ``batch_size``; at least one for each rank.

    Examples
    --------
    >>> from mpistrat.integrations.torch import BatchSampler
    >>> list(BatchSampler(range(7), 2, num_replicas=2, rank=0, shuffle=False))
    [[0, 1], [4, 5]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool | None = None,
        weights: Any = None,
        num_samples: int | None = None,
        global_batch_size: int | None = None,
    ):
        if (batch_size is None) == (global_batch_size is None):
            raise TypeError("give either batch_size, of a rank, or global_batch_size, of all ranks")
        super().__init__(
            dataset,
            num_replicas,
            rank,
            shuffle,
            seed,
            drop_last,
            pad,
            weights,
            num_samples,
            batch_size,
            global_batch_size,
        )


class CountedLoader:
    """A `DataLoader` with one of these samplers that knows what the loop has got, however much workers have fetched.

    So ``state_dict()`` needs no argument, as checkpoints of libraries want it. All other attributes are the loader's.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        A loader with a `BatchSampler`, or with a `Sampler`.

    Raises
    ------
    TypeError
        If the loader has neither.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> from mpistrat.integrations.torch import BatchSampler, CountedLoader
    >>> loader = CountedLoader(DataLoader(range(7), batch_sampler=BatchSampler(range(7), 2)))
    >>> next(iter(loader)), loader.state_dict()["position"]
    (tensor([0, 4]), 2)
    """

    def __init__(self, loader: Any):
        choices = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
        samplers = [sampler for sampler in choices if isinstance(sampler, _RankSampler)]
        if not samplers:
            raise TypeError(f"CountedLoader needs a DataLoader with mpistrat's BatchSampler or Sampler, got {choices}")
        self._loader, self._sampler = loader, samplers[0]
        self._size = 1 if samplers[0] is choices[0] else loader.batch_size or 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        taking: Any = None
        for batch in self._loader:
            # This iteration is the latest again, if the program has looked at a batch of another since.
            taking = self._sampler._latest = taking or self._sampler._latest
            taking.got = min((taking.got or 0) + self._size, taking.taken)
            yield batch
        if taking:
            self._sampler._latest, taking.got = taking, taking.taken  # with rows that the loader has dropped

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler after the batches that the loop has got."""
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a state."""
        self._sampler.load_state_dict(state_dict)


def _ranks() -> tuple[int, int]:
    """Return the number of ranks, and the number of this rank."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    comm = get_strategy().comm if has_strategy() else mpi.start().COMM_WORLD
    return comm.size, comm.rank
