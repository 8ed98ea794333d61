"""Variables to a file and back."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.collectives.broadcast import broadcast
from mpistrat.strategy import Variable
from mpistrat.strategy.checks import require_cross_replica

# HDF5 has no word for these: their bits are stored, and their name beside.
_BY_BITS = {"bfloat16": np.uint16}


def save(variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]) -> None:
    """Write variables to an HDF5 file. Collective; replica 0 writes.

    The file appears whole or not at all: it is written under another name, brought to the disk, and then
    renamed. Variables that are combined when read are saved as their combined value.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        Without names of your own the variables' names are used.
    path : path
        An existing file is replaced.

    Raises
    ------
    ValueError
        If two variables have one name, there are none, or one has no single value (ON_READ with NONE).
    TypeError
        If something is no Variable.
    RuntimeError
        In a replica context, or while another strategy is current.
    OSError
        If the file cannot be written. On every replica.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable([1.0, 2.0], name="v")
    >>> folder = tempfile.TemporaryDirectory()
    >>> save([v], pathlib.Path(folder.name) / "weights.h5")
    >>> _ = v.assign([0.0, 0.0])
    >>> load([v], pathlib.Path(folder.name) / "weights.h5")
    >>> v.read_value()
    array([1., 2.])
    >>> folder.cleanup()
    """
    named = named_variables(variables)
    require_cross_replica(_strategy_of(named), "save", "call it outside of strategy.run")
    values = {name: variable.numpy() for name, variable in named.items()}
    strategy = _strategy_of(named)
    strategy.extended._topology.on_first(lambda: _write(values, Path(path)))


def load(variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]) -> None:
    """Read variables from a file that `save` wrote. Collective; replica 0 reads.

    Every variable gets its value as ``assign`` outside of a replica context would give it: one that is summed
    when read is given its share, for however many replicas there are now. Nothing is changed if anything
    does not fit.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        What to look for; the file may hold more.
    path : path

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a variable is not in it, or has another shape or dtype there. On every replica.
    RuntimeError
        In a replica context, or while another strategy is current.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "weights.h5"
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     trained, fresh = mpistrat.Variable([1.0, 2.0]), mpistrat.Variable([0.0, 0.0])
    >>> save({"w": trained}, path)
    >>> load({"w": fresh}, path)
    >>> fresh.read_value()
    array([1., 2.])
    >>> folder.cleanup()
    """
    named = named_variables(variables)
    strategy = _strategy_of(named)
    require_cross_replica(strategy, "load", "call it outside of strategy.run")
    values = {name: np.empty(variable.shape, variable.dtype) for name, variable in named.items()}
    topology = strategy.extended._topology
    topology.on_first(lambda: _read(values, Path(path)))
    loaded = broadcast(topology, list(values.values()), "of a checkpoint", *values)
    for variable, value in zip(named.values(), loaded, strict=True):
        variable.assign(value)


def named_variables(variables: Mapping[str, Variable] | Iterable[Variable]) -> dict[str, Variable]:
    """The variables by the names they have in a file; ValueError or TypeError if that cannot be."""
    if isinstance(variables, Mapping):
        pairs = [(str(name), variable) for name, variable in variables.items()]
    elif isinstance(variables, Variable):
        raise TypeError(
            f"variables must be a list or a dict of variables, not the variable {variables.name!r}"
        )
    else:
        pairs = [(getattr(variable, "name", ""), variable) for variable in variables]
    if not pairs:
        raise ValueError("there are no variables")
    named: dict[str, Variable] = {}
    for name, variable in pairs:
        if not isinstance(variable, Variable):
            raise TypeError(f"{variable!r} of type {type(variable).__name__} is no Variable")
        if name in named:
            raise ValueError(f"two variables have the name {name!r}: give a dict with names of your own")
        named[name] = variable
    for name in named:
        for above in (name[:i] for i, letter in enumerate(name) if letter == "/"):
            if above in named:
                raise ValueError(
                    f"the names {above!r} and {name!r} cannot both be in a file: one is in the other's group; give "
                    "a dict with names of your own"
                )
    return named


def _strategy_of(named: dict[str, Variable]) -> Any:
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in named.values()}
    if len(strategies) > 1:
        raise ValueError(
            f"the variables belong to {len(strategies)} strategies: save and load those of one at a time"
        )
    return next(iter(strategies.values()))


def _write(values: dict[str, np.ndarray], path: Path) -> None:
    import h5py

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with h5py.File(temporary, "x") as file:
            for name, value in values.items():
                bits = _BY_BITS.get(value.dtype.name)
                dataset = file.create_dataset(name, data=value if bits is None else value.view(bits))
                dataset.attrs["dtype"] = value.dtype.name
        _to_disk(temporary, os.O_RDWR)
        os.replace(temporary, path)
        _to_disk(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _to_disk(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(values: dict[str, np.ndarray], path: Path) -> None:
    """Fill the arrays from a file."""
    import h5py

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with h5py.File(path, "r") as file:
        for name, into in values.items():
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise ValueError(f"{path} has no variable {name!r}: it has {_names(file)}")
            dtype = str(dataset.attrs.get("dtype", dataset.dtype.name))
            if dataset.shape != into.shape or dtype != into.dtype.name:
                raise ValueError(
                    f"{path}: variable {name!r} is {dtype} of shape {dataset.shape} there, and {into.dtype.name} of "
                    f"shape {into.shape} here"
                )
            into[...] = dataset[()] if dtype not in _BY_BITS else dataset[()].view(into.dtype)


def _names(file: Any) -> str:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if hasattr(item, "shape") else None)
    return ", ".join(repr(name) for name in found[:10]) + (", ..." if len(found) > 10 else "") or "none"
