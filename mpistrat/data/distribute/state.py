"""Position in an epoch: what a dataset shares with its iterators, and a small dict of it for a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpistrat.arrays.device import Device
from mpistrat.data.distribute.autoshard import ByData, ByLanes, Division
from mpistrat.data.hdf5.manifest import unpacked
from mpistrat.data.options import AUTOTUNE
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.pipeline.transforms import Batch
from mpistrat.data.rows import spec
from mpistrat.data.rows.lanes import MOST_LANES, Lanes
from mpistrat.runtime.topology import Topology

_VERSION = 1
_FILES_SHOWN = 3
_MOST = 2**62  # more rows have no order: see `Feistel`
_TYPES: dict[str, Any] = {
    "lanes": list,
    "epoch": int,
    "step": int,
    "position": int,
    "policy": str,
    "replicas": int,
    "batch": (int, type(None)),
    "pipeline": list,
    "seeds": list,
    "datasets": list,
    "source": Mapping,
}


@dataclass
class Position:
    """A position in an epoch: after ``step`` steps of a division, which begins after ``skipped`` rows of the epoch.

    ``line`` is the line of the program that made the iterator. ``ended`` says whether that has raised StopIteration.
    """

    division: Division
    epoch: int
    step: int = 0
    skipped: int = 0
    line: str = ""
    ended: bool = False


def state_of(whole: Division, position: Position) -> dict[str, Any]:
    """Return the state of a position in an epoch of a division."""
    described = whole.described()
    state: dict[str, Any] = {
        "version": _VERSION,
        "epoch": position.epoch,
        "policy": whole.name,
        "replicas": whole.replicas.size,
        **described,
        "seeds": [seed.value for seed in described["seeds"]],
    }
    if position.division.lanes is not None:  # of the batch size with which the epoch began
        state["lanes"] = [*position.division.lanes]
    if not _by_rows(whole):
        if len(whole.pipelines) != whole.replicas.size:
            state["pipelines"] = len(whole.pipelines)
        return {**state, "step": position.step}
    rows = position.skipped + position.step * (state["batch"] or 1)
    length = whole.plan.row_length
    return {**state, "position": rows if length is None else min(rows, length)}


def resumed(whole: Division, state: Mapping[str, Any]) -> tuple[Division, Position]:
    """Return the division with the seeds of a state, and the position that the state names.

    Raise TypeError if ``state`` is not a state, and ValueError if this division cannot continue it.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise TypeError(f"restore() needs what state() returned, not {state!r:.200}")
    if state["version"] != _VERSION:
        raise ValueError(
            f"the state has version {state['version']}, but this mpistrat knows version {_VERSION} only: "
            "restore it with the mpistrat that wrote it"
        )
    by_rows, now = _by_rows(whole), whole.described()
    # The state of the first position shows which entries a state of this dataset has.
    _check_types(state, state_of(whole, Position(whole, 0)))
    require_same("policy", state["policy"], whole.name, "set the policy of the saved run")
    if not by_rows:
        by_batch = isinstance(whole, ByData)
        which = "with transforms after batch()" if by_batch else f"under the policy {whole.name}"
        hint = f"{which} a state can be continued only with the same number; use AutoShardPolicy.DATA"
        if by_batch:
            hint += " and put everything but map() before batch()"
        else:
            require_same("number of replicas", state["replicas"], whole.replicas.size, hint)
            pipelines = state.get("pipelines", state["replicas"])
            require_same("number of input pipelines", pipelines, len(whole.pipelines), hint)
    _same_source(state["source"], now["source"])
    require_same("pipeline", state["pipeline"], now["pipeline"], "chain the same transforms")
    if not by_rows:
        require_same("batch size", state["batch"], now["batch"], hint)
        for replica, (then, own) in enumerate(zip(state.get("datasets", ()), now.get("datasets", ()), strict=False)):
            require_same(f"dataset of replica {replica}", then, own, "let dataset_fn return that of the saved run")
    seeds = now["seeds"]
    if seeds:
        # Blocks of another size would make another order of the same seeds.
        blocks = "shuffled blocks (rows, blocks of a window)"
        require_same(
            blocks,
            state["source"].get("blocks"),
            now["source"].get("blocks"),
            "read the HDF5 datasets of the saved run, with its Options.shuffle_memory",
        )
    if len(state["seeds"]) != len(seeds):
        raise TypeError(f"restore() needs what state() returned: {len(state['seeds'])} seeds for {len(seeds)} shuffles")
    for number, (seed, then) in enumerate(zip(seeds, state["seeds"], strict=True)):
        if seed.given:
            require_same(f"seed of shuffle number {number}", then, seed.value, "give the seed of the saved run")
    key = "position" if by_rows else "step"
    if key not in state:
        raise TypeError(f"restore() needs all that state() returned, but {key!r} is missing")
    most, unit = (whole.plan.row_length, "rows") if by_rows else (whole.steps, "steps")
    if state[key] > (_MOST if most is None else most):
        has = f"more than {_MOST} cannot be numbered" if most is None else f"an epoch has {most} {unit}"
        raise ValueError(
            f"the state cannot be restored: its {key} is {state[key]}, and {has}; give what state() returned"
        )
    # A division with other seeds begins without what this one has prepared.
    if list(state["seeds"]) != [seed.value for seed in seeds]:
        whole = whole.with_seeds(state["seeds"])
    # This epoch goes on in the lanes with which it began. The next takes lanes for its own batch size.
    rest = whole.in_lanes(Lanes(*state["lanes"])) if isinstance(whole, ByLanes) else whole
    if by_rows:
        rows = state["position"]
        return whole, Position(rest.after(rows), state["epoch"], 0, rows)
    return whole, Position(rest, state["epoch"], state["step"])


def _check_types(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if a state lacks an entry that a state of this dataset has, or an entry has another type."""
    missing = {*expected} - {*state} - {"step", "position"}
    if state.get("policy") != expected["policy"]:
        # A state of another policy has none, and the error names the policies.
        missing -= {"lanes"}
    if missing or not {"step", "position"} & {*state}:
        raise TypeError(f"restore() needs all that state() returned, but {sorted(missing) or 'the place'} is missing")
    for name, kind in _TYPES.items():
        if name not in state:
            continue
        value = state[name]
        # An edited state may hold anything, and True is an int.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"restore() needs what state() returned: {name} is {value!r:.100}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"restore() needs what state() returned: {name} is {value}, which is below 0")
    if state["epoch"] > _MOST:
        raise ValueError(f"restore() needs what state() returned: epoch is {state['epoch']}, beyond {_MOST}")
    if "lanes" in expected and not _are_lanes(state.get("lanes", [1, 1])):
        raise TypeError(f"restore() needs what state() returned: lanes are {state['lanes']!r:.100}")
    for seed in state["seeds"]:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"restore() needs what state() returned: a seed is {seed!r:.100}")


def _are_lanes(lanes: list[Any]) -> bool:
    """Return whether a list has the size of a batch, and a number of lanes."""
    if len(lanes) != 2 or any(type(number) is not int for number in lanes):
        return False
    return 1 <= lanes[1] <= min(lanes[0], MOST_LANES) and lanes[0] <= _MOST


def _by_rows(division: Division) -> bool:
    """Return whether a position in the epoch can be counted in rows of all replicas together."""
    after_batch = False
    for transform in division.whole.transforms:
        # Batches are taken in another order: the steps so far have not read the first rows.
        if after_batch and transform.reorders:
            return False
        if isinstance(transform, Batch):
            after_batch = True
            if not transform.consecutive:
                return False
    return isinstance(division, ByData)


def require_same(what: str, then: Any, now: Any, fix: str) -> None:
    """Raise ValueError if an entry of a state differs from the entry of this dataset."""
    if then != now:
        raise ValueError(f"the state cannot be restored: its {what} is {then}, but here it is {now}; {fix}")


def _same_source(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    # Only sources of files have a digest. The lists of files in both states name the difference.
    if then.get("digest") != now.get("digest"):
        raise ValueError(
            f"the state cannot be restored: the files have changed since: {_changes(then, now)}; restore it with "
            "the old files, or begin a new epoch without it"
        )
    if "digest" not in now and then != now:
        raise ValueError(
            f"the state cannot be restored: it is a state of {then.get('source')}, but this is {now.get('source')}"
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changes = []
    lists: list[Any] = []
    if then.get("list") and now.get("list"):
        with contextlib.suppress(Exception):  # a state that was edited may hold anything
            lists = [{name: line for name, *line in unpacked(source["list"])} for source in (then, now)]
    if lists:
        before, after = lists
        changes += [f"{name!r} is missing" for name in before if name not in after]
        changes += [f"{name!r} is new" for name in after if name not in before]
        changes += [
            f"{name!r} had {before[name][0]} rows in {before[name][1]} bytes and has {line[0]} in {line[1]} now"
            for name, line in after.items()
            if name in before and before[name] != line
        ]
        changes = changes or ["they have another order"]
    if not changes:
        return (
            f"there were {then.get('files')} with {then.get('rows')} rows, and now there are {now.get('files')} "
            f"with {now.get('rows')}"
        )
    more = f" and {len(changes) - _FILES_SHOWN} more" if len(changes) > _FILES_SHOWN else ""
    return ", ".join(changes[:_FILES_SHOWN]) + more


class Passes:
    """The state that a distributed dataset shares with its iterators.

    ``in_line`` tells whether the program made the batches of the last epoch itself, because a thread would have won
    nothing. It is assumed for the first epoch, unless the program asked for read-ahead: two threads that read compete
    for memory and the GIL, and being wrong costs two reads.
    """

    def __init__(self, division: Division, ranks: Topology, prefetch: int | None):
        self.division = division
        self.device = Device("cpu")
        self.prefetch = AUTOTUNE if prefetch is None else prefetch
        self.making = MakingLock()
        automatic = prefetch is None or prefetch == AUTOTUNE
        self.in_line = automatic and not division.communicates
        self.ranks = ranks
        self._next = Position(division, 0)
        self.newest: Position | None = None

    def begin(self, line: str) -> Position:
        """Begin the next pass of an iterator, made on ``line``. Return its position, which the iterator moves."""
        self.newest, self._next = self._next, Position(self.division, self._next.epoch + 1)
        self.newest.line = line
        return self.newest

    @property
    def element_spec(self) -> Any:
        """Structure of the batches of a replica."""
        of_plan = self.division.plan.element_spec()
        if self.division.replicas.size == 1 or self.division.plan.batch is None:
            return of_plan
        return spec.any_size(of_plan)

    def state(self) -> dict[str, Any]:
        """Return the state of the newest pass; if that has ended, of the next."""
        newest = self.newest
        return state_of(self.division, self._next if newest is None or newest.ended else newest)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue at the position of a state."""
        self.division, self._next = resumed(self.division, state)
        self.newest = None
