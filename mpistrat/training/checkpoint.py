"""Variables to a file and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mpistrat.collectives.broadcast import broadcast
from mpistrat.data import ChecksumError, DataFileError
from mpistrat.runtime import arrays
from mpistrat.runtime.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.strategy import Variable
from mpistrat.strategy.checks import require_cross_replica
from mpistrat.training import pending_save
from mpistrat.training.pending_save import PendingSave
from mpistrat.training.room import Room


def save(variables: Mapping[str, Variable] | Iterable[Variable], path: str | os.PathLike[str]) -> None:
    """Write variables to an HDF5 file. Collective; replica 0 writes.

    The file appears whole or not at all: it is written under another name, brought to the disk, and then
    renamed. Variables that are combined when read are saved as their combined value. What `save_async` has begun is
    waited for first.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        Without names of your own the variables' names are used.
    path : path
        An existing file is replaced.

    Raises
    ------
    ValueError
        If two variables have one name, there are none, or one has no single value (ON_READ with NONE); on every
        replica, if their names or the order of these differ between replicas.
    TypeError
        If something is no Variable.
    RuntimeError
        In a replica context, or while another strategy is current.
    OSError
        If the file cannot be written, or that of an earlier `save_async` could not be. On every replica. An earlier
        file of the name is as it was.

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
    """Begin to write variables to an HDF5 file, and return as soon as they are copied. Collective; replica 0 writes.

    It corresponds to ``tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)``, and to the
    ``AsyncCheckpointer`` of Orbax. The variables may be changed as soon as it returns: a thread of replica 0 writes
    their copies while training goes on. The file is that of `save`, and so is the moment at which it appears.

    One save is under way at a time: the next one, also `save`, and `load`, wait for it. The copies take as much memory
    on replica 0 as the variables; the memory is used again for the next save, and not given back.

    Writing needs one of HDF5's functions now and then, and h5py lets one thread at a time call those. The thread never
    waits for the disk, nor for anything else, while it is in one: a program that reads data through h5py goes on, and
    cannot get stuck. The thread makes no call of MPI.

    A program that comes to its end waits for the file, but nobody raises then if there is an error, which is logged:
    call `PendingSave.wait` for the last one. A program that fails waits for a second at most; the
    file of that name is then the former one.

    Parameters
    ----------
    variables : mapping of name to Variable, or iterable of Variable
        Without names of your own the variables' names are used.
    path : path
        An existing file is replaced.

    Returns
    -------
    PendingSave
        Its ``wait()`` returns when the file is there, and ``done()`` says whether it is. Both are collective.

    Raises
    ------
    ValueError
        If two variables have one name, there are none, or one has no single value (ON_READ with NONE); on every
        replica, if their names or the order of these differ between replicas.
    TypeError
        If something is no Variable.
    RuntimeError
        In a replica context, or while another strategy is current.
    OSError
        If the file of an earlier `save_async` could not be written, of which nobody was told yet. On every replica;
        nothing is begun. Errors of this one are raised by ``wait()``, or by the next save.

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
    """Read variables from a file that `save` wrote. Collective; replica 0 reads.

    Every variable gets its value as ``assign`` outside of a replica context would give it: one that is summed
    when read is given its share, for however many replicas there are now. Nothing is changed if anything
    does not fit, or if the file is damaged.

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
        If a variable is not in it, or has another shape or dtype there, or the names or their order differ between
        replicas. On every replica.
    mpistrat.data.DataFileError
        If it is no HDF5 file, truncated, or damaged. On every replica.
    mpistrat.data.ChecksumError
        If the values are not those that were saved: a kind of the former. On every replica.
    OSError
        If it is being written by `save_async`, and that fails. On every replica.
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
    values = Room().arrays(likes) if topology.rank == 0 else likes
    damage = topology.on_first(lambda: _read(values, Path(path)))
    if damage is not None:
        what, is_checksum = damage
        raise (ChecksumError if is_checksum else DataFileError)(f"rank 0: {what}")
    loaded = list(values.values())
    if topology.size > 1:
        loaded = broadcast(topology, loaded, "of a checkpoint", *values)
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
    places: dict[tuple[str, ...], str] = {}
    for name, variable in pairs:
        if not isinstance(variable, Variable):
            raise TypeError(f"{variable!r} of type {type(variable).__name__} is no Variable")
        # As HDF5 reads it: "/a//./b" is "a/b".
        place = tuple(part for part in name.split("/") if part not in ("", "."))
        if not place or "\0" in name:
            raise ValueError(
                f"{name!r} cannot be the name of a variable in a file: give a dict with names of your own"
            )
        if place in places:
            both = repr(name) if name == places[place] else f"{places[place]!r} or {name!r}"
            raise ValueError(f"two variables have the name {both}: give a dict with names of your own")
        named[name], places[place] = variable, name
    for place, name in places.items():
        for above in (place[:i] for i in range(1, len(place))):
            if above in places:
                raise ValueError(
                    f"the names {places[above]!r} and {name!r} cannot both be in a file: one is in the other's group; "
                    "give a dict with names of your own"
                )
    return named


def _prepared(
    variables: Mapping[str, Variable] | Iterable[Variable], what: str
) -> tuple[dict[str, Variable], Topology]:
    """The variables by name, and their ranks, none of which is in a save any more."""
    named = named_variables(variables)
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in named.values()}
    if len(strategies) > 1:
        raise ValueError(
            f"the variables belong to {len(strategies)} strategies: save and load those of one at a time"
        )
    (strategy,) = strategies.values()
    require_cross_replica(strategy, what, "call it outside of strategy.run")
    topology: Topology = strategy.extended._topology
    # Before replica 0 replaces a file, and before one rank reads another variable than the others.
    topology.compare(operation(what, "of", tuple(named)))
    pending_save.finish(topology)
    return named, topology


def _values(named: Mapping[str, Variable], topology: Topology) -> dict[str, np.ndarray]:
    """What is to be saved: on replica 0, and on the others nothing. The variables' own memory, where it can be."""
    found = {}
    for name, variable in named.items():
        value = variable._read()  # of some, collective
        if topology.rank == 0:
            found[name] = np.asarray(arrays.to_host(value), order="C")
    return found


def _write(values: Mapping[str, np.ndarray], path: Path) -> None:
    from mpistrat.training.checkpoint_write import write

    write(values, path)


def _read(values: Mapping[str, np.ndarray], path: Path) -> tuple[str, bool] | None:
    """Fill the arrays from a file; what is damaged, and whether a checksum says so."""
    from mpistrat.training.checkpoint_read import read

    try:
        read(values, path)
    except DataFileError as error:
        return str(error), isinstance(error, ChecksumError)
    return None
