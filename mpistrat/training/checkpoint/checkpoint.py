"""Checkpoints of objects, by the names of ``tf.train.Checkpoint``."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpistrat import representation
from mpistrat.collectives import structures
from mpistrat.data import DataFileError
from mpistrat.process.files import local_path
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.topology import Topology
from mpistrat.training.checkpoint import by_all
from mpistrat.training.checkpoint.object_graph import (
    Graph,
    Node,
    Stateful,
    check,
    graph_of,
    pack_state,
    unpack_state,
    with_types_of,
)
from mpistrat.training.checkpoint.variables import contents_of, load, loaded_arrays, ranks_of, save

_COUNTER = "save_counter"
_MOST_NAMED = 5  # objects in a message
_MOST_OF_STATES = 256 << 20  # bytes: more than any iterator has, and less than would fill a node
_log = logging.getLogger(__name__)


class Checkpoint:
    """Objects that are saved to a file together, each under its path, and restored from it.

    Variables, optimizers, metrics, distributed datasets, random generators (also a PerReplica of these), lists, dicts,
    other checkpoints, arrays that can be filled (of NumPy, CuPy and PyTorch), objects with ``get_state()`` and
    ``set_state(state)``, and modules, optimizers and schedulers of PyTorch, by their ``state_dict()``. The names of
    variables play no part. Any attribute that is set later belongs to the checkpoint, too.

    All methods are collective: all ranks call them in the same order, with the same paths.

    Parameters
    ----------
    root : Mapping, Checkpoint or None
        Objects that are saved like ``objects``. A Checkpoint also gives the objects that it gets later.
    **objects
        What to save, by name.

    Raises
    ------
    TypeError
        If an object is of another kind. The message names it.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     weights = mpistrat.Variable([1.0, 2.0])
    ...     optimizer = mpistrat.optimizers.Adam()
    >>> checkpoint = mpistrat.training.Checkpoint(weights=weights, optimizer=optimizer)
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = checkpoint.save(pathlib.Path(folder.name) / "model")
    >>> pathlib.Path(path).name
    'model-1'
    >>> _ = weights.assign([0.0, 0.0])
    >>> _ = checkpoint.restore(path).assert_consumed()
    >>> weights.read_value()
    array([1., 2.])
    >>> folder.cleanup()

    Notes
    -----
    The file is one of `mpistrat.training.save`: any HDF5 program reads it, and every array has checksums. The state of
    an iterator or a generator is text in JSON. If it differs between ranks, the file has the state of each, and only as
    many ranks can restore it. For a PerReplica, such as ``strategy.rng`` of virtual replicas, it has the state of each
    replica, for any number of ranks. An optimizer's state of an exchange between groups is by rank.

    What the objects have but the file lacks keeps its value. What the file has but the objects lack waits: for an
    attribute that is set later, and for the variables that an optimizer creates at its first step. What is added to a
    list or a dict is restored by the next method of the status that `restore` returned.
    """

    __slots__ = ("__weakref__", "_objects", "_pending", "_root", "_saves", "_when_grown")

    def __init__(self, root: Mapping[str, Any] | Checkpoint | None = None, **objects: Any):
        self._root = root if isinstance(root, Checkpoint) else None
        self._objects: dict[str, Any] = {}
        self._saves = 0
        self._pending: _PendingRestore | None = None
        self._when_grown: Callable[[], object] | None = None
        if root is not None and self._root is None:
            objects = {**root, **objects}
        for name, value in objects.items():
            self._track(name, value)

    def tracked(self) -> Mapping[str, Any]:
        """Return the objects of this checkpoint, by name."""
        return self._objects if self._root is None else {**self._root.tracked(), **self._objects}

    def when_grown(self, function: Callable[[], object]) -> None:
        """Call a function after each attribute that is set.

        Only the last function is called: the one of the checkpoint that was restored last.
        """
        self._when_grown = function
        if self._root is not None:
            self._root.when_grown(function)

    def leaves(self) -> list[Any]:
        """Return the variables and arrays of all objects, which say the ranks that save them."""
        return [*graph_of(self).leaves.values()]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Checkpoint.__slots__:
            super().__setattr__(name, value)
        else:
            self._track(name, value)

    def _track(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise ValueError(f"{name!r} is a name of Checkpoint itself: give the object another name")
        check(name, value)
        before = self._objects
        self._objects = {**before, name: value}
        try:
            if self._when_grown is not None:
                self._when_grown()
        except BaseException:  # a value that does not fit the file: later attributes may
            self._objects = before
            raise

    def __getattr__(self, name: str) -> Any:
        if name in Checkpoint.__slots__ or name not in self.tracked():
            raise AttributeError(f"this Checkpoint has no object {name!r}")
        return self.tracked()[name]

    @property
    def save_counter(self) -> int:
        """The number of calls of `save`, which `restore` sets to the number in the file."""
        return self._saves

    def save(self, file_prefix: str | os.PathLike[str], number: Any = None) -> str:
        """Save the objects to the file ``prefix-N``, where N is the new `save_counter`, and return its path.

        Parameters
        ----------
        file_prefix : path
            The directory is created if it does not exist.
        number : int or Variable, optional
            N, in place of the counter.

        Raises
        ------
        ValueError
            On every rank, if the ranks give different paths, or an array differs between ranks.
        MismatchError
            On every rank, if the ranks have different objects.
        TypeError
            On every rank, if the state of an object is not of numbers, texts, arrays, lists and dicts.
        OSError
            On every rank, if the file cannot be written. The counter is unchanged then.
        """
        # Kept only after the file is written, so that a failed save takes no number.
        count = self._saves + 1
        path = f"{os.fspath(file_prefix)}-{count if number is None else int(number)}"
        self._write(path, {_COUNTER: np.int64(count)})
        self._saves = count
        return path

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Save the objects to a file of just this name, without the counter, and return its path.

        Raises
        ------
        ValueError
            If there are no objects, and as `save`.
        MismatchError, TypeError, OSError
            As `save`.
        """
        path = os.fspath(file_prefix)
        self._write(path, {})
        return path

    def _write(self, path: str, more: Mapping[str, Any]) -> None:
        state, own = self.contents("Checkpoint.save", "to", path)
        if not (state or more):
            raise ValueError("this Checkpoint has no objects: set attributes, or give them to Checkpoint(...)")
        if self._pending is not None:
            self._pending.warn_of_loss(path, {*state})
        save({**state, **more}, path, own=own or None)

    def contents(self, call: str, *parts: Hashable) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return by name what `mpistrat.training.save` writes, and what each rank has of its own. Collective.

        The ranks compare the name of the ``call``, and its ``parts``.
        """
        graph, topology, _ = _compared(self, call, *parts)
        texts = {}
        texts_of_ranks = topology.on_all_ranks(lambda: [pack_state(state.get()) for state in graph.states.values()])
        for (name, state), of_ranks in zip(graph.states.items(), zip(*texts_of_ranks, strict=True), strict=True):
            # One text if the ranks agree: then any number of ranks can restore the state.
            different: Sequence[bytes] = of_ranks if len({*of_ranks}) > 1 else of_ranks[:1]
            if state.replicas is not None:  # a list of each rank, in the order of replicas: without its brackets
                different = [text[1:-1] for text in of_ranks]
            texts[name] = np.frombuffer(b"[" + b",".join(different) + b"]", np.uint8)
            if texts[name].size > _MOST_OF_STATES:  # it could not be restored
                raise ValueError(
                    f"the state {name!r} of all ranks takes {texts[name].size} bytes, and {_MOST_OF_STATES} is the "
                    "limit: give large arrays to the checkpoint as arrays"
                )
        return {**graph.leaves, **texts}, {name: block.get() for name, block in graph.own.items()}

    def restore(self, save_path: str | os.PathLike[str] | None) -> Status:
        """Set the objects to their values in a file of `save`, and return what was found.

        Parameters
        ----------
        save_path : path or None
            What `save` returned. With None nothing is restored.

        Raises
        ------
        FileNotFoundError
            On every rank, if the file does not exist.
        ValueError
            On every rank, if an object has another shape or dtype in the file. Nothing is changed then.
        DataFileError, ChecksumError
            On every rank, if the file is damaged. Nothing is changed then.
        """
        if self._pending is not None:
            self._pending.over = True  # nothing more is restored from an earlier file
        self._pending = None
        if save_path is None:
            return Status(None)
        waiting = _PendingRestore(self, local_path(save_path))
        counter = waiting.restore()
        if counter is not None:
            self._saves = counter
        self._pending = waiting
        waiting.warn_at_end()
        return Status(waiting)

    def read(self, save_path: str | os.PathLike[str]) -> Status:
        """Set the objects to their values in a file of `write`, as `restore`. The counter keeps its value.

        Raises
        ------
        FileNotFoundError, ValueError, DataFileError, ChecksumError
            As `restore`.
        """
        saves = self._saves
        status = self.restore(save_path)
        self._saves = saves
        return status

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.tracked()) or 'nothing'}>"


def _compared(root: Node, call: str, *parts: Hashable) -> tuple[Graph, Topology, ReplicaGroup]:
    """Return the objects below a checkpoint, and their ranks. Collective: what is wrong on one rank raises on all."""
    graph = graph_of(root)
    topology, replicas = ranks_of(graph.leaves.values(), call)
    structures.agree(topology, call, *parts)
    topology.on_all_ranks(graph.check)
    of_replicas = (f"{name} of replicas" for name, state in graph.states.items() if state.replicas is not None)
    structures.agree(topology, call, "of", (*graph.leaves, *graph.states, *graph.own, *of_replicas))
    return graph, topology, replicas


class _PendingRestore:
    """A file from which a checkpoint is restored, and the names in it that nothing has restored yet.

    ``matched`` has the names that were restored, ``unmatched`` the others. ``over`` says whether another file was
    restored since.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path):
        self._checkpoint, self._path = checkpoint, path
        _, topology, replicas = _compared(checkpoint, "Checkpoint.restore", "of", str(path))
        self._topology = topology
        by_all.finish(topology)  # the pending save may be of this file
        self._contents = contents_of(topology, path)
        self._replicas = replicas
        self.matched: set[str] = set()
        self.unmatched = {*self._contents}
        self.over = False
        self._warning: weakref.finalize[..., _PendingRestore] | None = None

    def lacking(self) -> list[str]:
        """Return the names of the objects that the file lacks."""
        graph = graph_of(self._checkpoint)
        lacking = [name for name in (*graph.leaves, *graph.states) if name not in self._contents]
        return lacking + [name for name in graph.own if not _below(name, self._contents)]

    def warn_at_end(self) -> None:
        """Warn of names that nothing restored, when this object is freed or the program ends."""
        # All ranks have the same names: one warns.
        if self._replicas.is_chief:
            self._warning = weakref.finalize(self, _warn_of_unmatched, self._path, self.unmatched)

    def warn_of_loss(self, path: str, saved: set[str]) -> None:
        """Warn that a new file lacks values that wait for their objects, or has new values of ``saved`` names."""
        lost = {
            "%s lacks %s of %s, which wait for their objects: make these before save(), an optimizer's by "
            "optimizer.build(variables) before restore()": self.unmatched - saved,
            "%s has new values of %s, not those of %s: a list or dict has grown since restore(), which nothing "
            "notices; call assert_existing_objects_matched() of what restore() returned after that": self.unmatched
            & saved,
        }
        for text, waiting in lost.items():
            if waiting and self._warning is not None and self._warning.alive:
                _log.warning(text, path, few(waiting), self._path)

    def expect_partial(self) -> None:
        """Warn of nothing when the program ends."""
        if self._warning is not None:
            self._warning.detach()

    def restore(self) -> int | None:
        """Restore the objects that were not there before. Return the counter, if it is read now. Collective."""
        if self.over or not self.unmatched:
            return None
        graph = graph_of(self._checkpoint)
        leaves = {name: leaf for name, leaf in graph.leaves.items() if name in self.unmatched}
        states = {name: state for name, state in graph.states.items() if name in self.unmatched}
        arrays = self._read([*states, *self.unmatched & {_COUNTER}])
        # All that may be wrong in the file comes before the first change.
        new_states: dict[str, Any] = {}
        own_states = {name: block.get() for name, block in graph.own.items() if _below(name, self.unmatched)}

        def set_states() -> None:
            for name, state in states.items():
                state.set(new_states[name])

        if states:  # a program's function may fail on one rank, and the ranks would go on with other states
            counts = [state.replicas for state in states.values()]
            of_ranks = [counts] if {*counts} == {None} else self._topology.all_gather_object(counts)
            by_state = zip(states.items(), zip(*of_ranks, strict=True), strict=True)
            restored = ((name, self._own_state(name, arrays[name], state, dealt)) for (name, state), dealt in by_state)
            self._topology.on_all_ranks(lambda: new_states.update(restored))
        if leaves or own_states:
            load(leaves, self._path, own=own_states or None)
        for name, state in own_states.items():
            graph.own[name].set(state)
            self.matched |= _below(name, self.unmatched)
        if states:
            self._topology.on_all_ranks(set_states)
        self.matched |= {*leaves, *arrays}
        self.unmatched.difference_update(self.matched)
        # For the slots that an optimizer creates at its first step.
        for growing in graph.growing:
            growing.when_grown(self.restore)
        return int(arrays[_COUNTER]) if _COUNTER in arrays else None

    def _read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the states and the counter from the file. Collective."""
        likes = {}
        for name in names:
            dtype, shape = self._contents[name]
            # Before memory is taken: a damaged file may have any shape there.
            expected = (np.dtype(np.int64), 0) if name == _COUNTER else (np.dtype(np.uint8), 1)
            if (dtype, len(shape)) != expected or math.prod(shape) > _MOST_OF_STATES:
                self._refuse(name, f"it is {dtype} of shape {shape}, which no checkpoint has there")
            likes[name] = np.empty(shape, dtype)
        # On the ranks of the objects: outside of a scope, `load_arrays` would wait for all ranks of the job.
        return loaded_arrays(self._topology, self._replicas, likes, self._path) if likes else {}

    def _own_state(self, name: str, text: np.ndarray, state: Stateful, counts: Sequence[Any]) -> Any:
        """Return this rank's state from the text of all ranks. ``counts`` has the replicas of each rank, or None."""
        try:
            states = unpack_state(text.tobytes())
        except ValueError as error:
            self._refuse(name, f"it is not a state ({error})")
        if not isinstance(states, list) or not states:
            self._refuse(name, "it is not a list of states")
        ranks = self._topology
        if state.replicas is not None:
            if len(states) != sum(counts):
                raise ValueError(
                    f"file {str(self._path)!r}, dataset {name!r}: {len(states)} replicas saved a state, and there are "
                    f"{sum(counts)} replicas now: restore with as many virtual_replicas, or leave "
                    f"{name.rpartition('/')[0]!r} out"
                )
            first = sum(counts[: ranks.rank])
            return with_types_of(states[first : first + state.replicas], state.get())
        if len(states) not in (1, ranks.size):
            raise ValueError(
                f"file {str(self._path)!r}, dataset {name!r}: {len(states)} ranks saved a state of their own, and "
                f"there are {ranks.size} ranks now: restore with as many, or leave "
                f"{name.rpartition('/')[0]!r} out"
            )
        return with_types_of(states[ranks.rank if len(states) > 1 else 0], state.get())

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise DataFileError(f"file {str(self._path)!r}, dataset {name!r}: {reason}; fix: restore an earlier checkpoint")


def _warn_of_unmatched(path: Path, names: set[str]) -> None:
    if names:
        _log.warning(
            "%s was restored in part: nothing took %s; if that is meant, call expect_partial() of what restore() "
            "returned",
            path,
            few(names),
        )


class Status:
    """The result of `Checkpoint.restore`. The methods return this object, and raise on every rank alike.

    They are collective: lists and dicts may have grown, and their new objects are restored first.
    """

    def __init__(self, waiting: _PendingRestore | None):
        self._pending = waiting

    def _restored(self) -> _PendingRestore:
        if self._pending is None:
            raise AssertionError("nothing was restored: the path is None")
        self._pending.restore()
        return self._pending

    def assert_consumed(self) -> Status:
        """Raise AssertionError unless each object was in the file, and each name of the file has an object."""
        waiting = self._restored()
        if waiting.unmatched:
            raise AssertionError(f"the file has {few(waiting.unmatched)}, and no object below the checkpoint does")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Status:
        """Raise AssertionError unless each object was in the file."""
        lacking = self._restored().lacking()
        if lacking:
            raise AssertionError(f"the file lacks {few(lacking)}")
        return self

    def assert_nontrivial_match(self) -> Status:
        """Raise AssertionError unless some name of the file was found."""
        if not self._restored().matched:
            raise AssertionError("nothing in the file is the name of an object below the checkpoint")
        return self

    def expect_partial(self) -> Status:
        """Warn of nothing when the program ends: the file has more than this program takes."""
        if self._pending is not None:
            self._pending.expect_partial()
        return self


def _below(name: str, names: Iterable[str]) -> set[str]:
    """Return the names below ``name``, of arrays of single ranks."""
    return {below for below in names if below.startswith(f"{name}/")}


def few(names: Iterable[str]) -> str:
    """Return the first names, in the order of names, and whether there are more."""
    return representation.few([*map(repr, sorted(names))], _MOST_NAMED)
