"""Single elements: taking them out of stacked rows, mapping them, and stacking them again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data.rows.spec import in_native_order

_ONLY_ARRAYS = {np.ndarray}
_NUMBERS = (bool, int, float, complex)
_TEXTS = "UST"  # kinds of dtypes; T is StringDType of NumPy 2


def call(fn: Callable[..., Any], element: Any) -> Any:
    """Return ``fn`` of an element. The parts of a tuple are separate arguments, as in tf.data."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:  # it would end the iteration of the dataset
        raise RuntimeError("the function given to map() raised StopIteration") from error


def rows_of(tree: Any) -> Iterator[Any]:
    """Yield the elements that are stacked in a structure of arrays."""
    leaves, rebuild = nest.flatten(tree)
    for i in range(len(leaves[0])):
        yield rebuild([leaf[i] for leaf in leaves])


def mapped(element: Any, functions: Sequence[Callable[..., Any]]) -> Any:
    """Return an element after all functions, with leaves as NumPy arrays or scalars."""
    for fn in functions:
        element = nest.map_structure(_as_value, call(fn, element))
    return element


def seeded(fn: Callable[..., Any], seed: int | None, row_id: tuple[int, int]) -> Callable[..., Any]:
    """Return a function with a generator as its last argument, for the number of a row and its epoch.

    Without a seed it is the function itself.
    """
    if seed is None:
        return fn
    row, epoch = row_id

    def with_generator(*parts: Any) -> Any:
        # Philox counts what is drawn in the first word of the counter, so rows have 2**64 numbers each.
        bits = np.random.Philox(key=[seed, epoch], counter=[0, row, 0, 0])
        return fn(*parts, np.random.Generator(bits))

    return with_generator


def mapped_batch(batch: Any, functions: Sequence[Callable[..., Any]]) -> Any:
    """Return a batch after all functions. Raise TypeError if the last function returned a masked array."""
    for fn in functions:
        batch = call(fn, batch)
    # A masked array is a subclass of ndarray, so exact types need no look at each leaf.
    if functions and set(map(type, batch if type(batch) is tuple else [batch])) != _ONLY_ARRAYS:
        for leaf in nest.flatten(batch)[0]:
            arrays.refuse_masked(leaf)
    return batch


def stack(elements: Sequence[Any], dtypes: Sequence[np.dtype] | None = None) -> Any:
    """Return elements of equal structure and shapes, stacked on a new axis 0, in these dtypes of the columns.

    Raise TypeError if a column's dtype cannot hold a value, and ValueError if elements differ in structure or shape.
    """
    first, _ = nest.flatten(elements[0])
    if not first:
        raise ValueError(f"element {elements[0]!r} holds no array: see that the function of map() returns its result")
    remaining = iter(dtypes or ())
    try:
        return nest.map_structure(lambda *rows: np.stack(of_one_dtype(rows, next(remaining, None))), *elements)
    except ValueError as error:
        # Shapes are compared only now: np.stack has checked them.
        shapes = [nest.map_structure(np.shape, element) for element in elements]
        other = next((shape for shape in shapes if shape != shapes[0]), None)
        if other is None:
            raise
        raise ValueError(
            f"elements of one batch must have equal shapes, but map() returned {shapes[0]} for one and {other} "
            "for another: pad them to one shape"
        ) from error


def dtypes_of(spec: Any) -> list[np.dtype]:
    """Return the dtype of each column, from the specs of a row."""
    return [leaf.dtype for leaf in nest.flatten(spec)[0]]


def of_one_dtype(rows: Sequence[Any], dtype: np.dtype | None) -> Sequence[Any]:
    """Return the rows of a column as arrays of this dtype. Raise TypeError if it cannot hold a value.

    NumPy would promote the rows of each batch for itself, so that batches, and the pieces of one batch on two ranks,
    would differ in dtype. Texts of one kind keep their lengths.
    """
    if dtype is None or all(_is_of(row.dtype, dtype) for row in rows):
        return rows
    return [
        row if _is_of(row.dtype, dtype) else _converted(row, dtype, f"row {number} of a batch has")
        for number, row in enumerate(rows)
    ]


def dtypes_of_batch(batch: Any) -> list[Any]:
    """Return the dtype of each leaf of a batch, also of a Python number. None for a leaf without one."""
    return [
        np.dtype(type(leaf)) if type(leaf) in _NUMBERS else getattr(leaf, "dtype", None)
        for leaf in nest.flatten(batch)[0]
    ]


def batch_of_dtypes(batch: Any, dtypes: Sequence[Any]) -> Any:
    """Return a batch with the leaves in these dtypes of `dtypes_of_batch`. Raise TypeError if a leaf does not fit."""
    leaf_dtypes = dtypes_of_batch(batch)
    if all(map(_is_of, leaf_dtypes, dtypes)):
        return batch
    leaves, rebuild = nest.flatten(batch)
    subject = "a batch that map() returned has"
    return rebuild(
        [
            leaf if _is_of(leaf_dtype, dtype) else _converted(leaf, dtype, subject)
            for leaf, leaf_dtype, dtype in zip(leaves, leaf_dtypes, dtypes, strict=True)
        ]
    )


def _is_of(actual: Any, dtype: Any) -> bool:
    if actual is dtype or actual is None or dtype is None:
        return True
    if not (isinstance(actual, np.dtype) and isinstance(dtype, np.dtype)):
        return type(actual) is type(dtype) and bool(actual == dtype)
    return actual == dtype or actual.kind == dtype.kind in "USTO"


def _converted(value: Any, dtype: Any, what: str) -> Any:
    """Return a row, or a whole batch, in a dtype; raise TypeError if a value would change."""
    if not isinstance(value, (np.ndarray, np.generic, *_NUMBERS)) or not isinstance(dtype, np.dtype):
        raise TypeError(
            f"{what} dtype {value.dtype} in a column of {dtype}, the dtype that the dataset's first row gives: return "
            "one dtype for all rows"
        )
    array = np.asarray(value)
    cast, same = _cast(array, dtype)
    if not same.all():
        if what.startswith("a batch") and same.shape:
            number = int(np.argmin(same.reshape(len(same), -1).all(axis=1)))
            what, array = f"row {number} of {what}", array[number]
        raise TypeError(
            f"{what} dtype {array.dtype} in a column of {dtype}, the dtype of the dataset's first row, which cannot "
            f"hold {np.array2string(array, threshold=6)}: return one dtype for all rows, such as "
            f"np.{array.dtype}(...)"
        )
    return cast[()]


def _cast(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return an array in another dtype, and where its values are the same."""
    nowhere = np.zeros(array.shape, bool)
    if (array.dtype.kind in _TEXTS) != (dtype.kind in _TEXTS) and "O" not in (array.dtype.kind, dtype.kind):
        return array, nowhere  # NumPy would write numbers as texts, and read them
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ComplexWarning
        try:
            cast = array.astype(dtype)
            restored = cast.astype(array.dtype)
            # NaN is not equal to itself, and stays NaN.
            return cast, np.asarray((restored == array) | ((restored != restored) & (array != array)))
        except (TypeError, ValueError):
            return array, nowhere


def of_arrays(element: Any) -> Any:
    """Return an element of Python objects, with leaves as NumPy arrays or scalars."""
    return nest.map_structure(_as_value, lists_to_arrays(element))


def copied(element: Any) -> Any:
    """Return `of_arrays` of an element, in arrays of its own."""
    return nest.map_structure(lambda x: x.copy() if type(x) is np.ndarray else x, of_arrays(element))


def as_array(leaf: Any) -> np.ndarray:
    """Return a leaf as one array, in the byte order of this machine."""
    try:
        array = arrays.as_numpy(leaf)
    except ValueError as error:
        raise ValueError(
            f"{type(leaf).__name__} cannot become one array ({error}): use a tuple for a structure of several arrays"
        ) from None
    return in_native_order(array)


def lists_to_arrays(tree: Any) -> Any:
    """Convert each list to one array, as in tf.data. Tuples and dicts are structure."""
    if isinstance(tree, list):
        return as_array(tree)
    if isinstance(tree, dict):
        return type(tree)((key, lists_to_arrays(value)) for key, value in tree.items())
    if isinstance(tree, tuple):
        children = [lists_to_arrays(value) for value in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return tree


def _as_value(leaf: Any) -> Any:
    if isinstance(leaf, np.generic) or type(leaf) is np.ndarray:
        return leaf
    array = arrays.as_numpy(leaf)
    # A subclass of ndarray, such as a memory map, stays as it is.
    return leaf if isinstance(leaf, np.ndarray) else array[()]
