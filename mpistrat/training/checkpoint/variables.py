"""Saving variables to a file, and loading them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.broadcast import broadcast
from mpistrat.data import ChecksumError, DataFileError
from mpistrat.runtime import arrays
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.record.layout import Phase
from mpistrat.runtime.topology import Topology
from mpistrat.strategy import Variable
from mpistrat.strategy.checks import require_cross_replica
from mpistrat.training.checkpoint import pending_save
from mpistrat.training.checkpoint.buffers import SaveBuffer
from mpistrat.training.checkpoint.pending_save import PendingSave


def save(variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]) -> None:
    """Save variables to an HDF5 file. Collective; replica 0 writes.

    The file appears whole or not at all: it is written under another name, flushed to the disk, and then
    renamed. Variables that are combined when read are saved as their combined value. A pending `save_async` is
    finished first.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        An iterable takes the names from the variables.
    path : path
        Path of the file. An existing file is replaced. The directory is created if it does not exist.

    Raises
    ------
    ValueError
        If there are no variables, two have the same name, or one has no single value (ON_READ with NONE). On every
        replica, if the names or their order differ between replicas.
    TypeError
        If an element is not a Variable.
    RuntimeError
        In a replica context, or while another strategy is current.
    OSError
        On every replica, if the file cannot be written, or the file of an earlier `save_async` could not be. An
        earlier file of the same name is unchanged.

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
    named, topology = _prepared(variables, "save")
    values = _values(named, topology)
    topology.on_first(lambda: _write(values, Path(path)))


def save_async(
    variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]
) -> PendingSave:
    """Copy variables, and save the copies to an HDF5 file in a thread. Collective; replica 0 writes.

    It corresponds to ``tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)``, and to the
    ``AsyncCheckpointer`` of Orbax. The variables can be changed as soon as it returns: a thread of replica 0 writes
    the copies while training continues. The file is the same as that of `save`, and appears when it is complete.

    One save runs at a time: `save`, `save_async` and `load` wait for the pending one. The copies take as much memory
    on replica 0 as the variables. The next save uses that memory again; it is not freed.

    The thread calls HDF5 from time to time, and h5py allows one thread at a time to do so. The thread never waits for
    the disk, or for another thread, inside such a call. A program that reads data through h5py is therefore not
    blocked. The thread makes no MPI calls.

    A program waits for the file at its end, but an error is then only logged, not raised: call `PendingSave.wait`
    for the last save. A program that fails waits for one second at most; the earlier file of that name
    then remains.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        An iterable takes the names from the variables.
    path : path
        Path of the file. An existing file is replaced. The directory is created if it does not exist.

    Returns
    -------
    PendingSave
        Its ``wait()`` returns when the file is complete, and ``done()`` tells whether it is. Both are collective.

    Raises
    ------
    ValueError
        If there are no variables, two have the same name, or one has no single value (ON_READ with NONE). On every
        replica, if the names or their order differ between replicas.
    TypeError
        If an element is not a Variable.
    RuntimeError
        In a replica context, or while another strategy is current.
    OSError
        On every replica, if the file of an earlier `save_async` could not be written and no call has raised that
        yet. No save begins then. Errors of this save are raised by ``wait()``, or by the next save.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable([1.0, 2.0], name="v")
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = save_async([v], pathlib.Path(folder.name) / "weights.h5")
    >>> _ = v.assign([0.0, 0.0])  # training goes on
    >>> pending.wait()
    >>> load([v], pathlib.Path(folder.name) / "weights.h5")
    >>> v.read_value()
    array([1., 2.])
    >>> folder.cleanup()
    """
    named, topology = _prepared(variables, "save_async")
    return pending_save.begin(topology, _values(named, topology), Path(path))


def load(variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]) -> None:
    """Load variables from a file that `save` wrote. Collective; replica 0 reads.

    Every variable gets its value as by ``assign`` in cross-replica context: a variable that is summed when
    read gets its share for the current number of replicas. No variable changes if one does not fit, or if
    the file is damaged.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        The variables to load. The file may have more.
    path : path

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        On every replica, if the file lacks a variable or has it with another shape or dtype. Also if the names or
        their order differ between replicas.
    mpistrat.data.DataFileError
        On every replica, if the file is not an HDF5 file, is truncated or is damaged.
    mpistrat.data.ChecksumError
        On every replica, if the values differ from those that were saved: a kind of DataFileError.
    OSError
        On every replica, if a pending `save_async` fails.
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
    named, topology = _prepared(variables, "load")
    likes = {name: np.empty(variable.shape, variable.dtype) for name, variable in named.items()}
    values = SaveBuffer().arrays(likes) if topology.rank == 0 else likes
    sequence = topology.sequence
    try:  # as `whole` does: this rank may be interrupted when the others have loaded
        damage = topology.on_first(lambda: _read(values, Path(path)))
        if damage is not None:
            what, is_checksum = damage
            raise (ChecksumError if is_checksum else DataFileError)(f"rank 0: {what}")
        loaded = list(values.values())
        if topology.size > 1:
            loaded = broadcast(topology, loaded, "of a checkpoint", *values)
        for variable, value in zip(named.values(), loaded, strict=True):
            variable.assign(value)
    except BaseException as error:
        topology.left_call("load", type(error), sequence)
        raise


def named_variables(variables: Mapping[str, Variable] | Iterable[Variable]) -> dict[str, Variable]:
    """Return variables by their names in a file. Raise ValueError or TypeError for names that cannot be used."""
    if isinstance(variables, Mapping):
        pairs = [(str(name), variable) for name, variable in variables.items()]
        places_given = [f"the value of {name!r}" for name, _ in pairs]
    elif isinstance(variables, Variable):
        raise TypeError(
            f"variables must be a list or a dict of variables, not the variable {variables.name!r}"
        )
    else:
        pairs = [(getattr(variable, "name", ""), variable) for variable in variables]
        places_given = [f"element {number}" for number in range(len(pairs))]
    if not pairs:
        raise ValueError("there are no variables")
    named: dict[str, Variable] = {}
    places: dict[tuple[str, ...], str] = {}
    for where, (name, variable) in zip(places_given, pairs, strict=True):
        if not isinstance(variable, Variable):
            raise TypeError(
                f"{where} is {_described(variable)}, not a Variable: make mpistrat.Variable of arrays in the scope of "
                "a strategy, and give a flat dict or list of them"
            )
        # As HDF5 reads it: "/a//./b" is "a/b".
        place = tuple(part for part in name.split("/") if part not in ("", "."))
        if not place or "\0" in name:
            raise ValueError(
                f"{name!r} cannot be the name of a variable in a file: give a dict with names of your own"
            )
        if place in places:
            both = repr(name) if name == places[place] else f"{places[place]!r} or {name!r}"
            raise ValueError(f"two variables have the name {both}: give a dict with names of your own")
        named["/".join(place)], places[place] = variable, name
    for place, name in places.items():
        for above in (place[:i] for i in range(1, len(place))):
            if above in places:
                raise ValueError(
                    f"the names {places[above]!r} and {name!r} cannot both be in a file: one is in the other's group; "
                    "give a dict with names of your own"
                )
    return named


def _described(thing: Any) -> str:
    """Return the type of an object, and the shape of an array, without its content."""
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
    shape = getattr(thing, "shape", None)
    if shape is not None:
        return f"a {kind} of shape {tuple(shape)}"
    return f"a {kind} of {len(thing)}" if isinstance(thing, (Mapping, list, tuple)) else f"a {kind}"


def _prepared(
    variables: Mapping[str, Variable] | Iterable[Variable], what: str
) -> tuple[dict[str, Variable], Topology]:
    """Return the variables by name, and their topology, after pending saves are finished."""
    named = named_variables(variables)
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in named.values()}
    if len(strategies) > 1:
        raise ValueError(
            f"the variables belong to {len(strategies)} strategies: save and load those of one at a time"
        )
    (strategy,) = strategies.values()
    require_cross_replica(strategy, what, "call it outside of strategy.run")
    topology: Topology = strategy.extended.engine.topology
    # Before replica 0 replaces a file, and before one rank reads another variable than the others.
    structures.agree(topology, what, "of", tuple(named))
    kinds = tuple((v.synchronization.name, v.aggregation.name) for v in named.values())
    likes = tuple((v.dtype, tuple(v.shape)) for v in named.values())
    structures.agree(topology, what, "of", likes, kinds)
    pending_save.finish(topology)
    return named, topology


def _values(named: Mapping[str, Variable], topology: Topology) -> dict[str, np.ndarray]:
    """Return the values to save on replica 0, as views where possible, and an empty dict on other replicas."""
    found = {}
    for name, variable in named.items():
        value = variable._read()  # of some, collective
        if topology.rank == 0:
            found[name] = np.asarray(arrays.to_host(value), order="C")
    return found


def _write(values: Mapping[str, np.ndarray], path: Path) -> None:
    from mpistrat.training.checkpoint.write import write

    with flight_record.phase(Phase.SAVING):
        write(values, path)


def _read(values: Mapping[str, np.ndarray], path: Path) -> tuple[str, bool] | None:
    """Fill the arrays from a file. Return a description of its damage and whether a checksum found it, or None."""
    from mpistrat.training.checkpoint.read import read

    try:
        read(values, path)
    except DataFileError as error:
        return str(error), isinstance(error, ChecksumError)
    return None
