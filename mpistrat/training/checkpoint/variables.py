"""Saving variables and arrays to a file, and loading them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mpistrat import context, nest, verify
from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.movement.moves import broadcast
from mpistrat.engine import Engine
from mpistrat.mesh import ShardedArray
from mpistrat.messages import contact
from mpistrat.process import mpi
from mpistrat.process.files import local_path
from mpistrat.record import flight_record
from mpistrat.record.layout import Phase
from mpistrat.replicas import ReplicaGroup
from mpistrat.representation import require
from mpistrat.runtime import affinity
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.topology import Topology
from mpistrat.storage.layout import NewArray
from mpistrat.storage.write import writers
from mpistrat.strategy import Variable, get_strategy
from mpistrat.training.checkpoint import by_all, names
from mpistrat.training.checkpoint.by_all import PendingSave, Prepare, SaveBuffer
from mpistrat.training.checkpoint.format import BLAS, BLAS_BYTES, PARTS, comparable
from mpistrat.values import PerReplica, VariableSynchronization

_log = logging.getLogger(__name__)


def save(
    state: Any, path: str | os.PathLike[str], differing: Literal["error", "chief"] = "error", own: Any = None
) -> None:
    """Save variables and arrays to an HDF5 file. Collective; all ranks write, or replica 0 alone if it is small.

    The file appears whole or not at all: it is written under another name, flushed to the disk, and then
    renamed. Variables that are combined when read are saved as their combined value; with ``virtual_replicas`` also
    each replica's. A pending `save_async` is finished first.

    Parameters
    ----------
    state : nested mappings, sequences and dataclasses, or iterable of Variable
        Variables, arrays of any library and numbers. The name of each is its path, as ``"dense/kernel"``. A variable
        in a sequence has its own name.
    path : path
        Path of the file. An existing file is replaced. The directory is created if it does not exist.
    differing : {"error", "chief"}
        What to do with arrays and numbers that are not equal on all ranks. With ``"chief"`` the file gets the values
        of replica 0, and nothing is compared. PyTorch's DDP needs it for a model with batch norm, whose running
        averages differ.
    own : nested mappings and sequences, optional
        Arrays that differ between ranks. The file has the array of rank 3 as ``name/3``, and a `PerReplica` by
        replica. A `mpistrat.data.Block` becomes a box of one dataset. These two may also be in ``state``, and a
        `mpistrat.ShardedArray`, whose parts are boxes, too.

    Raises
    ------
    ValueError
        If there are no variables, two have the same name, one has no single value (ON_READ with NONE), or the path is
        a URL. On every replica, if the path, names, shapes or dtypes differ between replicas, or the contents of an
        array, or if blocks overlap or do not cover their global shape.
    TypeError
        If an element is neither a Variable, an array of numbers nor a number.
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
    file, topology, _, new = _arrays_to_save(state, path, "save", differing, own)

    def write_alone() -> None:
        with flight_record.phase(Phase.SAVING):
            by_all.prepare_alone(new.values, file)()

    if new.alone:
        by_all.refuse_differing(topology, new.compared)
        topology.on_first(write_alone)
        return
    with flight_record.phase(Phase.SAVING):
        by_all.write_by_ranks(topology, new.arrays, new.values, file, new.compared)


def save_async(
    state: Any, path: str | os.PathLike[str], differing: Literal["error", "chief"] = "error", own: Any = None
) -> PendingSave:
    """Copy variables and arrays, and save the copies to an HDF5 file in a thread. Collective; written as by `save`.

    It corresponds to ``tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)``, and to the
    ``AsyncCheckpointer`` of Orbax. The variables can be changed as soon as it returns: a thread of each rank writes
    the copies while training continues. The file is the same as by `save`, and appears when it is complete,
    whether or not the program makes another call.

    One save runs at a time: `save`, `save_async` and `load` wait for the pending one. A rank copies only what it
    writes. The next save uses that memory again; it is not freed. Arrays are compared between ranks as by `save`, and
    of variables that their strategy keeps equal one page in 64, another one in each save.

    No thread makes MPI calls. The thread of replica 0 never waits for the disk inside a call of HDF5, which would hold
    the lock of h5py: a program that reads data through h5py is not blocked.

    A program waits for the file at its end, but an error is then only logged, not raised: call `PendingSave.wait`
    for the last save. A program that fails waits for one second at most; the earlier file of that name
    then remains.

    Parameters
    ----------
    state, path, differing, own
        As of `save`.

    Returns
    -------
    PendingSave
        Its ``wait()`` returns when the file is complete, and ``done()`` tells whether it is. Both are collective.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `save`.
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
    file, topology, replicas, new = _arrays_to_save(state, path, "save_async", differing, own)
    by_all.refuse_differing(topology, new.compared)  # now, before training changes the arrays
    prepare: Prepare | None = partial(by_all.prepare_by_ranks, topology, new.arrays, new.values, file)
    if new.alone:
        prepare = partial(by_all.prepare_alone, new.values, file) if replicas.is_chief else None
    return by_all.begin(topology, replicas.is_chief, file, prepare)


def arrays_of(
    state: Any, own: Any, call: str, sample: int
) -> tuple[Topology, dict[str, np.ndarray]] | tuple[Topology, None]:
    """Return the arrays that `save` would write, on every rank: views if possible. Collective.

    None in place of them if no rank has all of them: with arrays of a rank's own, or boxes. Raise ValueError on every
    rank as `save_async`, whose sample of pages is drawn by the number ``sample``.
    """
    named, parts = names.split_leaves(state, own)
    topology, replicas = _prepared(named, call, Path(), parts)
    names.extract_parts(named, parts, topology.size, lambda: False)
    if parts:
        return topology, None
    new = _contents(named, topology, replicas, "error", parts, sample, holder=None)
    by_all.refuse_differing(topology, new.compared)
    return topology, {name: np.asarray(arrays.to_host(value), order="C") for name, value in new.values.items()}


def load(state: Any, path: str | os.PathLike[str], own: Any = None) -> None:
    """Load a file that `save` wrote into variables and arrays. Collective; replica 0 reads, each rank its own parts.

    Every variable gets its value as by ``assign`` in cross-replica context: a variable that is summed when
    read gets its share for the current number of replicas. Virtual replicas get their own values back, if as many of
    them saved the file. Every array of NumPy, CuPy or PyTorch is filled in place,
    on each replica. Nothing changes if one does not fit, or if the file is damaged.

    Parameters
    ----------
    state : nested mappings, sequences and dataclasses, or iterable of Variable
        The variables and arrays to load, under the names that `save` gives them. The file may have more.
    path : path
    own : nested mappings and sequences, optional
        What `save` had as ``own``, which is filled: as many ranks or replicas get their parts back. A block gets its
        box of the dataset, on any number of ranks.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    TypeError
        If an array cannot be changed: one of JAX, a read-only one, a number. Use `load_arrays`.
    ValueError
        On every replica, if the file lacks a variable or has it with another shape or dtype, or has the parts of
        another number of ranks. Also if names, shapes, dtypes or paths differ between replicas.
    mpistrat.data.DataFileError
        On every replica, if the file is not an HDF5 file, is truncated or is damaged.
    mpistrat.data.ChecksumError
        On every replica, if the values are not as they were saved: a kind of DataFileError.
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
    file = local_path(path)
    named, parts = names.split_leaves(state, own)
    names.require_fillable(named, parts)
    _fill(*_prepared(named, "load", file, parts), file, named, parts)


@collective_call(lambda topology: topology, "load")  # this rank may be interrupted when the others have loaded
def _fill(
    topology: Topology,
    replicas: ReplicaGroup,
    file: Path,
    named: dict[str, Any],
    parts: dict[str, names.PerRank | names.ArrayBlock],
) -> None:
    names.extract_parts(named, parts, topology.size, lambda: by_all.is_one_file(topology, file), reads=True)
    likes = _likes(named)
    for name in _differing(named, replicas):
        likes[PARTS + name] = np.empty((replicas.size, *likes[name].shape), likes[name].dtype)
    if replicas.is_virtual:
        # The same replicas on another BLAS get other bits: the load compares, and warns.
        likes[BLAS] = np.empty(BLAS_BYTES, np.uint8)
    loaded = loaded_arrays(topology, replicas, likes, file) if likes else {}
    filled = by_all.read_own(topology, replicas, parts, file)
    if replicas.is_chief and BLAS in loaded and (loaded[BLAS] != _own_blas()).any():
        _log.warning(
            "%s was saved with another BLAS, kernel or number of threads (%s) than is used now (%s): weights may "
            "get other bits",
            file,
            *(bytes(blas).decode(errors="replace").rstrip() for blas in (loaded[BLAS], _own_blas())),
        )
    for name, leaf in named.items():
        if PARTS + name in loaded:
            for component, part in zip(leaf.values, loaded[PARTS + name][replicas.first :], strict=False):
                component.write("assign", part)
        elif name in loaded:
            leaf.assign(loaded[name]) if isinstance(leaf, Variable) else arrays.fill(leaf, loaded[name])
    for target, value in filled:
        arrays.fill(target, value)


def load_arrays(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Return the arrays of a file that `save` wrote. Collective; replica 0 reads.

    Parameters
    ----------
    path : path
    like : nested structure, optional
        A structure as it was saved. The result has its form, and its arrays are of the same libraries on the same
        devices. Its values are not changed. The file may have more.

    Returns
    -------
    nested structure
        Without ``like``, all of the file as nested dicts of NumPy arrays. The elements of a sequence are then in a
        dict, under ``"0"``, ``"1"``, ... The same on every replica.

    Raises
    ------
    FileNotFoundError, ValueError, DataFileError, ChecksumError, OSError, RuntimeError
        As `load`.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "params.h5"
    >>> params = {"dense": {"kernel": np.ones(2)}, "steps": (3, 4)}
    >>> save(params, path)
    >>> load_arrays(path)
    {'dense': {'kernel': array([1., 1.])}, 'steps': {'0': array(3), '1': array(4)}}
    >>> load_arrays(path, params)
    {'dense': {'kernel': array([1., 1.])}, 'steps': (3, 4)}
    >>> folder.cleanup()
    """
    file = local_path(path)
    named = {} if like is None else names.named(like)
    names.refuse_own(named)
    topology, replicas = _prepared(named, "load_arrays", file)
    values = _read(topology, replicas, file, None if like is None else _likes(named))
    if like is None:
        return names.nested(values)
    # The names are in the order of the leaves.
    rebuild = nest.flatten(like)[1]
    return rebuild([_like(value, leaf) for value, leaf in zip(values.values(), named.values(), strict=True)])


@collective_call(lambda topology: topology, "load_arrays")
def _read(
    topology: Topology, replicas: ReplicaGroup, file: Path, likes: dict[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Return the arrays of a file with these names, dtypes and shapes, or all arrays. Collective."""
    if likes is None:
        stored = contents_of(topology, file)
        texts = [name for name, (dtype, _) in stored.items() if dtype.hasobject]
        if texts:
            raise ValueError(
                f"{file}: {', '.join(map(repr, texts))} holds texts or references, not numbers: give the arrays to "
                "read as `like`"
            )
        likes = {name: np.empty(shape, dtype) for name, (dtype, shape) in stored.items()}
    return loaded_arrays(topology, replicas, likes, file)


def _like(value: np.ndarray, leaf: Any) -> Any:
    return value.item() if type(leaf) in (bool, int, float, complex) else arrays.from_host(value, leaf)


def _prepared(
    named: Mapping[str, Any],
    call: str,
    file: Path,
    parts: Mapping[str, names.PerRank | names.ArrayBlock] = {},
    differing: str = "error",
) -> tuple[Topology, ReplicaGroup]:
    """Return the ranks and replicas of variables and arrays, after these are compared and pending saves finished."""
    require(differing in ("error", "chief"), "differing must be 'error' or 'chief'", differing)
    topology, replicas = ranks_of(named.values(), call)
    # Before replica 0 replaces a file, and before one rank reads another variable than the others.
    structures.agree(topology, call, "of", (*named, *parts))
    kinds = tuple(
        (leaf.synchronization.name, leaf.aggregation.name) if isinstance(leaf, Variable) else "array"
        for leaf in named.values()
    )
    likes = tuple(_types(named).values())
    own = tuple(
        "a block" if isinstance(value, names.ArrayBlock) else ("own", value.by_replica) for value in parts.values()
    )
    way = "from" if call.startswith("load") else "to"
    more = [] if differing == "error" else [differing]
    structures.agree(topology, call, "of", likes, kinds, own, *more, way, str(file))
    by_all.finish(topology)
    return topology, replicas


def ranks_of(leaves: Iterable[Any], call: str) -> tuple[Topology, ReplicaGroup]:
    """Return the ranks and replicas that save these variables and arrays.

    Raise ValueError if variables belong to several strategies, or an array is cut over other ranks. Raise RuntimeError
    in a replica context or while another strategy is current.
    """
    leaves = [*leaves]
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, ShardedArray)]
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in leaves if isinstance(v, Variable)}
    if len(strategies) > 1:
        raise ValueError(f"the variables belong to {len(strategies)} strategies: save and load those of one at a time")
    strategy = next(iter(strategies.values()), get_strategy())
    context.require_cross_replica(strategy, call, "call it outside of strategy.run")
    # A coordinator calls this alone, for its own arrays: its workers and servers would never join a collective.
    if strategies or not context.is_default() or contact.here() is not None:
        engine: Engine = strategy.extended.engine
        topology, replicas = engine.all_ranks, engine.replicas
    else:  # arrays outside of any scope: the ranks over which they are cut, or all ranks of the job
        replicas = ReplicaGroup(topology := meshes[0].topology if meshes else Topology.of(mpi.start().COMM_WORLD))
    for mesh in meshes:
        mesh.require_ranks(topology, call)
    return topology, replicas


def _types(named: Mapping[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    dtypes = {
        name: (leaf.dtype, leaf.shape) if isinstance(leaf, Variable) else arrays.dtype_and_shape(leaf)
        for name, leaf in named.items()
    }
    return {name: (dtype.newbyteorder("="), shape) for name, (dtype, shape) in dtypes.items()}


def _likes(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays of the dtypes and shapes of variables and arrays, whose pages are never touched."""
    return {name: np.empty(shape, dtype) for name, (dtype, shape) in _types(named).items()}


class _NewFile(NamedTuple):
    """The arrays of a new file, this rank's values (views if possible), and the values to compare between ranks.

    ``alone`` says whether one rank writes all.
    """

    arrays: dict[str, NewArray]
    values: dict[str, Any]
    compared: dict[str, np.ndarray]
    alone: bool


def _arrays_to_save(
    state: Any, path: str | os.PathLike[str], call: str, differing: str, own: Any
) -> tuple[Path, Topology, ReplicaGroup, _NewFile]:
    """Return the path of a new file, the ranks that save it, and its arrays. Collective."""
    file = local_path(path)
    named, parts = names.split_leaves(state, own)
    topology, replicas = _prepared(named, call, file, parts, differing)
    of_variables = [leaf.distribute_strategy.extended.engine for leaf in named.values() if isinstance(leaf, Variable)]
    for engine in of_variables[:1]:  # all belong to one strategy
        verify.require_equal(engine.topology)
    names.extract_parts(named, parts, topology.size, lambda: len(writers(topology, file.parent)) == topology.size)
    # The number of the save draws the pages: another sample in each save.
    sample = topology.slot(SaveBuffer).count if call == "save_async" else None
    return file, topology, replicas, _contents(named, topology, replicas, differing, parts, sample)


def _contents(
    named: Mapping[str, Any],
    topology: Topology,
    replicas: ReplicaGroup,
    differing: str,
    parts: Mapping[str, names.PerRank | names.ArrayBlock],
    sample: int | None,
    holder: int | None = 0,
) -> _NewFile:
    """Return the arrays and values to save. With ``sample``, only some pages of mirrored variables are compared.

    ``holder`` is the rank that gets the replicas' own values, None for all.
    """
    like = _types(named)
    # Without a comparison, ranks may have other values, and pieces of several would be no one's: rank 0 saves its own.
    owner = None if differing == "error" else 0
    new = {name: NewArray(*dtype_and_shape, owner) for name, dtype_and_shape in like.items()}
    alone = not parts and by_all.is_small(topology, new)
    arrays_of_file, compared = {}, {}
    compares = differing == "error" and topology.size > 1
    of_several_ranks = topology.size > replicas.size  # no strategy keeps their variables equal
    for name, leaf in named.items():
        is_variable = isinstance(leaf, Variable)
        value = comparable(arrays.numpy_or_cupy(leaf))  # of some variables, collective
        # An array on a GPU stays there: each rank copies only the pieces that it writes.
        if not arrays.on_gpu(value) or (alone and replicas.is_chief):
            value = np.asarray(arrays.to_host(value), order="C")
        arrays_of_file[name] = value
        if compares and (of_several_ranks or not is_variable or not alone):
            compared[name] = np.asarray(arrays.to_host(value), order="C")
            if sample is not None and is_variable and not of_several_ranks:
                compared[name] = by_all.sampled(compared[name], sample)
    if replicas.is_virtual:
        new[BLAS] = NewArray(np.dtype(np.uint8), (BLAS_BYTES,), 0)
        arrays_of_file[BLAS] = _own_blas()
    for name in _differing(named, replicas):
        dtype, shape = like[name]
        new[PARTS + name] = NewArray(dtype, (replicas.size, *shape), 0)
        leaf = named[name]
        # Only virtual replicas get their own values back; each array gets an axis of replicas in front.
        copies = PerReplica([copy[np.newaxis] for copy in leaf.own_copies()])
        arrays_of_file[PARTS + name] = leaf.distribute_strategy.gather(copies, 0, dst=holder)
    if parts:
        more, values = by_all.new_arrays(topology, replicas, parts)
        new.update(more)
        arrays_of_file.update(values)
    return _NewFile(new, arrays_of_file, compared, alone)


def _own_blas() -> np.ndarray:
    return np.frombuffer(affinity.blas().encode()[:BLAS_BYTES].ljust(BLAS_BYTES), np.uint8)


def _differing(named: Mapping[str, Any], replicas: ReplicaGroup) -> list[str]:
    """Return the names of the variables that have another value on each of several virtual replicas."""
    if not replicas.is_virtual:
        return []
    on_read = VariableSynchronization.ON_READ
    return [name for name, leaf in named.items() if isinstance(leaf, Variable) and leaf.synchronization is on_read]


def loaded_arrays(
    topology: Topology, replicas: ReplicaGroup, likes: Mapping[str, np.ndarray], path: Path
) -> dict[str, np.ndarray]:
    """Return the arrays of a file, of these names, shapes and dtypes, on every rank. Collective.

    Values of virtual replicas may be missing.
    """
    from mpistrat.training.checkpoint.read import read

    values = SaveBuffer().arrays(likes) if replicas.is_chief else dict(likes)
    names_there = topology.on_first(lambda: read(values, path))
    values = {name: value for name, value in values.items() if name in names_there}
    if topology.size > 1:
        sent = broadcast(topology, [*values.values()], "of a checkpoint", *values)
        return dict(zip(values, sent, strict=True))
    return values


def contents_of(topology: Topology, path: Path) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the names, dtypes and shapes of the arrays in a file, on every rank. Collective."""
    from mpistrat.training.checkpoint.read import contents

    described: dict[str, tuple[np.dtype, tuple[int, ...]]] = topology.on_first(lambda: contents(path))
    return described
