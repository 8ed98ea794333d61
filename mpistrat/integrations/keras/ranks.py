"""The collectives of a model that trains on several ranks.

Their errors are kept, since JAX and TensorFlow raise errors of their own in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from mpistrat import verify
from mpistrat.arrays import arrays
from mpistrat.collectives.movement import moves
from mpistrat.engine import Engine
from mpistrat.values import ReduceOp

OTHER_BATCHES = (
    "the ranks have read other batches: a dataset that Keras cannot divide is read whole by every rank, and must give "
    "the same batches on all of them; call keras.utils.set_random_seed, or give it the same seed"
)
DIGESTS = 1 << 24  # so many digests of batches: float32 holds each of them
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _keeping_error(method: _Method) -> _Method:
    """Decorate a method to keep its error in ``self.error``."""

    @functools.wraps(method)
    def call(self: TrainingRanks, *args: Any) -> Any:
        try:
            return method(self, *args)
        except BaseException as error:
            self.error = error
            raise

    return call  # type: ignore[return-value]


def digest(array: np.ndarray) -> int:
    """Return a digest of an array, its dtype and its shape. Strings are in arrays of objects."""
    kind = verify.digest(f"{array.dtype.str}{array.shape}".encode())
    if array.dtype.hasobject:
        return verify.digest(repr(array.tolist()).encode(), kind)
    return verify.digest(arrays.as_bytes(np.ascontiguousarray(array)).data, kind)


def _bits(seen: int) -> np.ndarray:
    """Return the bits of a digest of batches."""
    return (seen >> np.arange(24) & 1).astype(np.float32)


class TrainingRanks:
    """The ranks that train a model together."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.topology = engine.topology
        self.wants_stop = False  # whether a callback of this rank wants training to stop
        self.stop = False  # whether a callback of any rank wanted it in the last step, as all ranks know
        self.rows = 1  # of this rank, in the batch that it read last, or in its last step with gradients
        self.error: BaseException | None = None  # of the last collective that failed

    # --- in a step -----------------------------------------------------------------------

    @_keeping_error
    def totals(self, number: Any) -> list[Any]:
        """Return the sum of an array over ranks."""
        return self.engine.all_reduce(ReduceOp.SUM, [number])

    @_keeping_error
    def gradients(self, info: Any, *weighted: Any) -> list[Any]:
        """Return the sums of weighted gradients."""
        numbers, *total = self.engine.all_reduce(ReduceOp.SUM, [self._numbers(info), *weighted])
        self._learn(numbers)
        return total

    @_keeping_error
    def tensors(self, info: Any, weight: float | None, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the sums of gradients of PyTorch, times a weight if there is one. A rank without rows gives zeros."""
        import torch

        rows = bool(info[0])
        own = [
            gradient.detach() if gradient is not None and rows else torch.zeros_like(variable.value)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        own = own if weight is None else [gradient * weight for gradient in own]
        # Fast path: float32 tensors on the host go as arrays. The engine's type dispatch takes 9 us for each tensor.
        usual = all(gradient.is_cpu and gradient.dtype is torch.float32 for gradient in own)
        have = np.array([rows and gradient is not None for gradient in gradients], np.float32)
        values = [self._numbers(info), have, *([gradient.numpy() for gradient in own] if usual else own)]
        numbers, have, *total = self.engine.all_reduce(ReduceOp.SUM, values)
        self._learn(numbers)
        total = [*map(torch.from_numpy, total)] if usual else total
        return [gradient if any_rank else None for gradient, any_rank in zip(total, have, strict=True)]

    @_keeping_error
    def slices(self, values: Any, indices: Any) -> list[Any]:
        """Return the rows and indices of all ranks."""
        return [moves.all_gather(self.topology, array, 0) for array in (values, indices)]

    def _numbers(self, info: Any) -> np.ndarray:
        """Return the wish to stop and the bits of a digest, as float32: they join the message of the gradients."""
        self.rows, seen = int(info[0]), int(info[-1]) if len(info) > 1 else 0
        return np.array([self.wants_stop, *_bits(seen)], np.float32)

    def _learn(self, numbers: np.ndarray) -> None:
        """Note a wish to stop. Raise, on all ranks, if some but not all have a bit of their digests."""
        self.stop = bool(numbers[0])
        self._require_same(numbers[1:])

    def _require_same(self, bits: np.ndarray) -> None:
        if not {*bits.tolist()} <= {0, self.topology.size}:
            raise ValueError(OTHER_BATCHES)

    # --- between steps -------------------------------------------------------------------

    def sums(self, values: Sequence[np.ndarray], marks: Sequence[int] = ()) -> list[np.ndarray]:
        """Return the sums of arrays over ranks. Raise ValueError on all ranks if some have read other batches.

        ``marks`` are the digests of the batches that this rank has read.
        """
        seen = digest(np.array(marks, np.int64)) % DIGESTS
        bits, *total = self.engine.all_reduce(ReduceOp.SUM, [_bits(seen), *values])
        self._require_same(bits)
        return total

    def different(self, names: Sequence[str], values: Sequence[np.ndarray]) -> dict[int, int]:
        """Return the numbers of the values that differ between ranks, each with a rank whose value is not rank 0's.

        Names may differ, as Keras numbers layers. Raise ValueError on all ranks if shapes or dtypes differ.
        """
        own = [
            (name, f" of shape {value.shape}, {value.dtype}", digest(value))
            for name, value in zip(names, values, strict=True)
        ]
        differing: dict[int, int] = {}
        first, *others = self.topology.all_gather_object(own)
        for rank, theirs in enumerate(others, 1):
            for number, (expected, actual) in enumerate(zip_longest(first, theirs, fillvalue=("nothing", "", 0))):
                if expected[1] != actual[1]:
                    raise ValueError(
                        f"rank {rank} has {actual[0]}{actual[1]} where rank 0 has {expected[0]}{expected[1]}: they "
                        "must be alike on all ranks"
                    )
                if expected[2] != actual[2]:
                    differing.setdefault(number, rank)
        return differing

    def gathered(self, value: np.ndarray, chief_only: bool) -> np.ndarray | None:
        """Return the rows of all ranks, in the order of ranks; with ``chief_only``, None on other ranks."""
        return moves.gather(self.topology, value, 0, 0) if chief_only else moves.all_gather(self.topology, value, 0)
