"""A file that all ranks write at once: the boxes of arrays that they hold together, and its name at the end."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.arrays.arrays import as_bytes, dtype_and_shape, refuse_masked
from mpistrat.process.files import appearing, write_all
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Slot, Topology


class Box(NamedTuple):
    """A part of an array: the index of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Box) -> Box:
        """Return what two boxes of an array have in common, which may be empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(o + n, i + m) for o, n, i, m in zip(*self, *other, strict=True))
        return Box(low, tuple(max(0, stop - start) for start, stop in zip(low, high, strict=True)))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this box in an array that begins at ``origin``."""
        return tuple(slice(o - at, o - at + n) for o, n, at in zip(*self, origin, strict=True))


class Block:
    """A box of a global array: what this rank holds of it. In a file it is one dataset of the global shape.

    The blocks of all ranks must cover the global array without overlap. A block may be empty. Its attributes cannot
    be changed; the elements of ``array`` can.

    Parameters
    ----------
    array : array
        Of any library, with the dtype of the global array and with as many axes.
    offset : sequence of int
        Index in the global array of the first element of ``array``.
    global_shape : sequence of int
        Shape of the global array.

    Raises
    ------
    TypeError
        If ``array`` is not an array, or is masked, or the others are not sequences of integers.
    ValueError
        If the numbers of axes differ, or the box is not inside of the global array.

    Examples
    --------
    >>> import numpy as np
    >>> Block(np.zeros((2, 3)), offset=(4, 0), global_shape=(6, 3))
    <Block float64 [4:6, 0:3] of (6, 3)>
    """

    __slots__ = ("array", "dtype", "global_shape", "offset", "shape")

    array: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __init__(self, array: Any, offset: Iterable[int], global_shape: Iterable[int]):
        refuse_masked(array)
        dtype, shape = dtype_and_shape(array)
        first, whole = _integers("offset", offset), _integers("global_shape", global_shape)
        if not len(first) == len(shape) == len(whole):
            raise ValueError(
                f"a block of {len(shape)} axes needs as many numbers in offset and in global_shape, not {first} and "
                f"{whole}"
            )
        if any(o < 0 or o + n > g for o, n, g in zip(first, shape, whole, strict=True)):
            raise ValueError(f"the block of shape {shape} at {first} is not inside of the global shape {whole}")
        values = {"array": array, "dtype": dtype, "shape": shape, "offset": first, "global_shape": whole}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Block cannot be changed: make another one with another {name}")

    def __repr__(self) -> str:
        return f"<Block {self.dtype} {_shown(Box(self.offset, self.shape))} of {self.global_shape}>"


def require_cover(name: str, of_ranks: Sequence[Sequence[Box]], global_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the boxes of all ranks, inside of the array, cover it once. 20 ms for 1,000 boxes."""
    nonempty = [(rank, box) for rank, boxes in enumerate(of_ranks) for box in boxes if 0 not in box.shape]
    first = np.array([box.offset for _, box in nonempty], np.int64).reshape(len(nonempty), len(global_shape))
    stop = first + np.array([box.shape for _, box in nonempty], np.int64).reshape(first.shape)
    for i, (rank, box) in enumerate(nonempty):
        meets = ((first[i] < stop[i + 1 :]) & (first[i + 1 :] < stop[i])).all(axis=1)
        if meets.any():
            other, met = nonempty[i + 1 + int(meets.argmax())]
            raise ValueError(
                f"{name!r}: the blocks of rank {rank} ({_shown(box)}) and rank {other} ({_shown(met)}) overlap: each "
                "element must be in the block of one rank"
            )
    # Without overlap, boxes with as many elements as the array cover it.
    covered = sum(math.prod(box.shape) for _, box in nonempty)
    if covered < math.prod(global_shape):
        shown = ", ".join(map(_shown, of_ranks[0])) or "none"
        raise ValueError(
            f"{name!r}: the blocks of all {len(of_ranks)} ranks have {covered} of the {math.prod(global_shape)} "
            f"elements of the global shape {global_shape}: rank 0 has {shown}"
        )


def write_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], start_of_dataset: int
) -> None:
    """Write an array as a box of a dataset of its dtype that begins at ``start_of_dataset``, one call for each run."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(np.ascontiguousarray(array)).data, array.itemsize
    for i, start in enumerate(starts.tolist()):
        write_all(descriptor, data[i * count * size : (i + 1) * count * size], start_of_dataset + start * size)


def read_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], start_of_dataset: int
) -> bool:
    """Fill a contiguous array from a box, as `write_box` writes it. Return False if the file ends before."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(array).data, array.itemsize
    for i, start in enumerate(starts.tolist()):
        rest, at = data[i * count * size : (i + 1) * count * size], start_of_dataset + start * size
        while len(rest):
            got = os.preadv(descriptor, [rest], at)
            if got == 0:
                return False
            rest, at = rest[got:], at + got
    return True


def runs(offset: Sequence[int], shape: Sequence[int], global_shape: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return how many elements of a box follow each other in the file, and where each such run begins there."""
    if 0 in shape:
        return 0, np.empty(0, np.int64)
    if len(shape) == 1:  # 2 us less for each piece of a checkpoint
        return shape[0], np.array(offset, np.int64)
    strides = [math.prod(global_shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    outer = len(shape)  # axes before it are not within a run
    while outer and (outer == len(shape) or shape[outer] == global_shape[outer]):
        outer -= 1
    starts = np.array([start], np.int64)
    for axis in range(outer):
        starts = np.add.outer(starts, np.arange(shape[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    return math.prod(shape[outer:]), starts


def boxes_of(first: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes that together are the flat elements ``first`` to ``stop`` of an array in C order, in their order.

    Examples
    --------
    >>> list(boxes_of(1, 6, (3, 2)))
    [Box(offset=(0, 1), shape=(1, 1)), Box(offset=(1, 0), shape=(2, 2))]
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while first < stop:
        offset = tuple(first // stride % length for stride, length in zip(strides, shape, strict=True))
        # The outermost axis along which a box can begin here and end before the last element.
        fitting = (axis for axis, stride in enumerate(strides) if first % stride == 0 and first + stride <= stop)
        axis = next(fitting, None)
        if axis is None:  # of an array without axes
            yield Box((), ())
            return
        count = min((stop - first) // strides[axis], shape[axis] - offset[axis])
        yield Box(offset, (*[1] * axis, count, *shape[axis + 1 :]))
        first += count * strides[axis]


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, not {values!r:.60}") from None


_TOKEN_BYTES = 8


def write_by_all(
    ranks: Topology,
    name: str,
    target: Path,
    replace: bool,
    make: Callable[[Path], Any],
    write: Callable[[Path, Any], Any],
    finish: Callable[[Path, list[Any]], object] = lambda temporary, results: None,
    check: Callable[[list[Any]], object] = lambda results: None,
) -> None:
    """Write a file by all ranks, which appears whole or not at all. Collective; messages call it ``name``.

    ``made = make(temporary)`` is called by rank 0, ``write(temporary, made)`` by each rank, which syncs what it has
    written. With what these returned, all ranks call ``check(results)``, and rank 0 ``finish(temporary, results)``.
    Raise on every rank what any of them raises; FileExistsError if ``target`` exists and ``replace`` is false.
    """
    with contextlib.ExitStack() as appears:  # rank 0's file

        def begin() -> tuple[str, Any]:
            new = appears.enter_context(appearing(target, replace))
            return new.name, make(new)

        def end() -> None:
            finish(temporary, results)
            appears.close()

        name_of_all, made = ranks.on_first(begin, operation(f"{name}: make the file"))
        temporary = target.with_name(name_of_all)
        results = ranks.on_all_ranks(partial(write, temporary, made))
        check(results)
        ranks.on_first(end, operation(f"{name}: give the file its name"))


class _KnownWriters(Slot):
    """The ranks that can write to files of a directory which rank 0 then reads, for each directory that was tried."""

    def __init__(self) -> None:
        self.by_directory: dict[str, tuple[int, ...]] = {}


def writers(ranks: Topology, directory: Path) -> tuple[int, ...]:
    """Return the ranks that can write to rank 0's files in a directory. Collective; rank 0 is always one.

    A directory of one node, or a file system that shows rank 0 other bytes than other nodes wrote, leaves the ranks of
    its node. It is tried once for each directory, which is made if need be. Raise OSError if rank 0 cannot make a file
    there.
    """
    known = ranks.slot(_KnownWriters).by_directory
    key = ranks.broadcast_object(os.path.abspath(directory))  # ranks with other working directories decide alike
    if key in known or ranks.size == 1:
        if ranks.rank == 0:  # it may have been removed since; what fails now fails again where the file is made
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
        return known.get(key, (0,))
    path = directory / f".{secrets.token_hex(8)}.tmp"

    def begin() -> str:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        return path.name

    def read() -> tuple[int, ...]:
        content = path.read_bytes()
        tokens = [content[_TOKEN_BYTES * rank : _TOKEN_BYTES * (rank + 1)] for rank in range(ranks.size)]
        return tuple(rank for rank, token in enumerate(tokens) if rank == 0 or token == _token(rank))

    try:
        name = ranks.on_first(begin, operation("write by all ranks: make a file"))
        # "r+b" makes no file: it fails on a rank that does not see the file of rank 0.
        with contextlib.suppress(OSError), open(directory / name, "r+b", 0) as file:
            os.pwrite(file.fileno(), _token(ranks.rank), _TOKEN_BYTES * ranks.rank)
            os.fsync(file.fileno())  # file systems of a network show other nodes only what was synced
        ranks.barrier()
        able: tuple[int, ...] = ranks.on_first(read, operation("write by all ranks: read the file"))
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)
    known[key] = able
    return able


def _token(rank: int) -> bytes:
    return (rank + 1).to_bytes(_TOKEN_BYTES, "little")
