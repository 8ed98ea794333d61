"""Single elements: taken out of stacked rows, given to a map function, stacked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.data.rows.byte_order import in_native_order
from mpistrat.runtime import arrays


def call(fn: Callable[..., Any], element: Any) -> Any:
    """``fn`` of an element; a tuple is spread over the arguments, as in tf.data."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:  # would be taken for the end of the dataset
        raise RuntimeError("the function given to map() raised StopIteration") from error


def rows_of(tree: Any) -> Iterator[Any]:
    """The elements that are stacked in a structure of arrays."""
    leaves, rebuild = nest.flatten(tree)
    for i in range(len(leaves[0])):
        yield rebuild([leaf[i] for leaf in leaves])


def mapped(element: Any, functions: Sequence[Callable[..., Any]]) -> Any:
    """One element after all functions, its leaves as NumPy arrays or scalars."""
    for fn in functions:
        element = nest.map_structure(_as_value, call(fn, element))
    return element


def mapped_batch(batch: Any, functions: Sequence[Callable[..., Any]]) -> Any:
    """Return a batch after all functions.

    Raises
    ------
    TypeError
        If the last one returned a masked array.
    """
    for fn in functions:
        batch = call(fn, batch)
    for leaf in nest.flatten(batch)[0] if functions else ():
        arrays.refuse_masked(leaf)
    return batch


def stack(elements: Sequence[Any]) -> Any:
    """Elements of equal structure and shapes, stacked on a new axis 0.

    Raises
    ------
    ValueError
        If they differ in structure or shape.
    """
    first, _ = nest.flatten(elements[0])
    if not first:
        raise ValueError(
            f"an element {elements[0]!r} holds no array: does the function given to map() return its result?"
        )
    try:
        return nest.map_structure(lambda *leaves: np.stack(leaves), *elements)
    except ValueError as error:
        shapes = [nest.map_structure(np.shape, element) for element in elements]
        other = next((shape for shape in shapes if shape != shapes[0]), None)
        if other is None:
            raise
        raise ValueError(
            f"elements of one batch must have equal shapes, but map() gave {shapes[0]} for one and {other} "
            "for another: pad them to one shape"
        ) from error


def of_arrays(element: Any) -> Any:
    """An element of Python objects with its leaves as NumPy arrays or scalars."""
    return nest.map_structure(_as_value, lists_to_arrays(element))


def as_array(leaf: Any) -> np.ndarray:
    """A leaf as one array, in the byte order of this machine."""
    try:
        array = arrays.as_numpy(leaf)
    except ValueError as error:
        raise ValueError(
            f"{type(leaf).__name__} does not make one array ({error}): use a tuple for a structure of several"
        ) from None
    return in_native_order(array)


def lists_to_arrays(tree: Any) -> Any:
    """A list is one array, as in tf.data; tuples and dicts are structure."""
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
    return leaf if isinstance(leaf, np.ndarray) else array[()]
