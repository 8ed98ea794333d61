"""Source of the elements of an iterable, read from its beginning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data.rows import elements
from mpistrat.data.rows.contracts import StreamSource
from mpistrat.data.rows.spec import ArraySpec


class IterableSource(StreamSource):
    """The elements of an iterable. Their number is unknown."""

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]):
        if not isinstance(iterable, Iterable) and not callable(iterable):
            raise TypeError(f"from_iterable() needs an iterable, or a function that returns one, not {iterable!r}")
        self._iterable = iterable
        self._once = isinstance(iterable, Iterator)
        self._begun = False
        self._first: Any = None

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over all elements, in arrays of their own: a generator may fill one array again and again.

        Raise ValueError if the iterable is an iterator that was used already.
        """
        if self._once:
            if self._begun:
                raise ValueError(
                    f"a {type(self._iterable).__name__} yields its elements only once: give from_iterable() the "
                    "function that makes it"
                )
            self._begun = True
        return map(elements.copied, self._raw())

    def first(self) -> Any:
        """Return the first element. Raise ValueError if the iterable is empty."""
        if self._first is None:
            raw = self._raw()
            for element in raw:
                self._first = elements.copied(element)
                if self._once:
                    self._iterable = itertools.chain([self._first], raw)
                break
            else:
                raise ValueError(f"{self} yields no elements, so their structure is unknown")
        return self._first

    def _raw(self) -> Iterator[Any]:
        if isinstance(self._iterable, Iterable):
            return iter(self._iterable)
        return iter(self._iterable())

    def __repr__(self) -> str:
        return f"an iterable ({getattr(self._iterable, '__name__', type(self._iterable).__name__)})"


class GeneratorSource(IterableSource):
    """The elements that a function yields. The signature says what each element has, None for any."""

    def __init__(self, generator: Callable[..., Iterable[Any]], args: tuple[Any, ...], signature: Any):
        if not callable(generator):
            raise TypeError(f"from_generator() needs a function that returns an iterable, not {generator!r}")
        self._generator, self._args, self._signature = generator, args, signature
        super().__init__(self._elements)

    def _elements(self) -> Iterator[Any]:
        for number, element in enumerate(self._generator(*self._args)):
            yield (element if self._signature is None else _as_signed(element, self._signature, f"element {number}"))

    def element_spec(self) -> Any:
        """Return the signature, if it has all shapes, or else the structure of the first element."""
        leaves, rebuild = nest.flatten(self._signature)
        if self._signature is None or any(leaf.shape is None for leaf in leaves):
            return super().element_spec()
        return rebuild([ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves])

    def fingerprint(self) -> Any:
        return f"{self} {'' if self._signature is None else self._signature}"

    def __repr__(self) -> str:
        return f"a generator ({getattr(self._generator, '__name__', type(self._generator).__name__)})"


def signature_of(types: Any, shapes: Any, signature: Any) -> Any:
    """Return the signature, from either way to give it. Raise TypeError for both ways, or without shape and dtype."""
    if types is None and shapes is None:
        if signature is not None and (wrong := _not_specs(signature)):
            raise TypeError(f"output_signature must be an ArraySpec, or a tuple or dict of them, not {wrong[0]!r}")
        return signature
    if signature is not None or types is None:
        raise TypeError("from_generator() takes output_signature, or output_types with output_shapes, not both")
    if isinstance(types, list):
        raise TypeError(f"output_types must be a dtype, or a tuple or dict of them, not {types!r}")
    if shapes is None:
        return nest.map_structure(lambda dtype: _Typed(np.dtype(dtype)), types)
    return _with_shapes(types, shapes)


def _not_specs(part: Any) -> list[Any]:
    """Return what of a signature is neither a spec nor a tuple or dict."""
    if isinstance(part, (tuple, dict)):
        parts = part.values() if isinstance(part, dict) else part
        return [wrong for each in parts for wrong in _not_specs(each)]
    return [] if hasattr(part, "shape") and hasattr(part, "dtype") else [part]


class _Typed:
    """A dtype with any shape."""

    shape = None

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"any shape of {self.dtype}"


def _with_shapes(types: Any, shapes: Any) -> Any:
    if isinstance(types, dict):
        return {key: _with_shapes(types[key], shapes[key]) for key in types}
    if isinstance(types, tuple):
        return tuple(_with_shapes(*each) for each in zip(types, shapes, strict=True))
    return ArraySpec(tuple(shapes), types)


def _as_signed(part: Any, like: Any, where: str) -> Any:
    """Return a part of an element with the dtypes of the signature."""
    if isinstance(like, dict):
        if not isinstance(part, dict) or {*part} != {*like}:
            raise TypeError(f"{where} of the generator must be a dict with the keys {[*like]}, not {part!r:.100}")
        return {key: _as_signed(part[key], like[key], f"{where}[{key!r}]") for key in like}
    if isinstance(like, tuple):
        if not isinstance(part, (tuple, list)) or len(part) != len(like):
            raise TypeError(f"{where} of the generator must be a tuple of {len(like)}, not {part!r:.100}")
        return tuple(_as_signed(p, s, f"{where}[{i}]") for i, (p, s) in enumerate(zip(part, like, strict=True)))
    array = arrays.as_numpy(part)
    dtype = np.dtype(like.dtype)
    python = not hasattr(part, "dtype")
    integers = python and array.dtype.kind in "iu" and dtype.kind in "iu"
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind" if python else "safe"):
        raise TypeError(
            f"{where} of the generator is of {array.dtype}, but output_signature says {dtype}: convert it, or "
            "change the signature"
        )
    if like.shape is not None:
        fits = len(like.shape) == array.ndim and all(
            want is None or want == size for want, size in zip(like.shape, array.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{where} of the generator has shape {array.shape}, but output_signature has {like.shape}")
    return array.astype(dtype, copy=False)
