"""How watchdogs of several nodes tell each other what they see: by notices on a board, since they never call MPI.

The lowest rank of each node that waits too long *asks*: it posts what its node sees. The other nodes see that and
*say* what they see. The lowest rank that asks collects it all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpistrat.monitor import view
from mpistrat.monitor.view import View
from mpistrat.runtime.environment import rc
from mpistrat.runtime.process.board import Board

_ASKS, _SAYS, _LEFT = "asks", "says", "left"
_POLL = 0.1  # seconds between two looks for answers
_LOOK = 3.5  # seconds that a node may take to look at its processes


class Notices:
    """The notices of this rank, and those for it.

    Parameters
    ----------
    key : str
        See `Board`.
    rank : int
        This rank.

    Attributes
    ----------
    searched : tuple of str
        The directories in which notices lie.
    """

    def __init__(self, key: str, rank: int):
        self._board = Board(key, (Path(rc.record_dir),) if rc.record_dir else ())
        self._rank = rank
        self._posted: set[str] = set()
        self.searched = self._board.folders

    def ask(self, call: str, seen: View) -> None:
        """Post what this node sees, and ask the other nodes. ``call`` names what is waited for."""
        self._post(f"{call}.{_ASKS}.{self._rank}", seen)

    def any(self) -> bool:
        """Return whether any node has posted a notice."""
        return bool(self._board.names())

    def unanswered(self, node: Sequence[int]) -> list[str]:
        """Return the calls that other nodes ask about and that no rank of this node, ``node``, has told of."""
        asked, told = set(), set()
        for name in self._board.names():
            call, kind, rank = _parts(name)
            if rank in node:
                told.add(call)
            elif kind == _ASKS:
                asked.add(call)
        return sorted(asked - told)

    def say(self, call: str, seen: View) -> None:
        """Post what this node sees, for another one that asks."""
        self._post(f"{call}.{_SAYS}.{self._rank}", seen)

    def say_that_it_leaves(self, seen: View) -> None:
        """Post what is known of this rank, which is about to end: no process of its node may be left to tell."""
        self._board.post(f"{_LEFT}.{_SAYS}.{self._rank}", view.as_json(seen))

    def collects(self) -> bool:
        """Return whether no lower rank asks."""
        asks = [rank for _, kind, rank in map(_parts, self._board.names()) if kind == _ASKS]
        return min(asks, default=self._rank) >= self._rank

    def collect(self, call: str, own: View, size: int, seconds: float, beat: Callable[[], object]) -> View:
        """Return what all nodes see, as soon as all ``size`` ranks are seen, or after a time.

        ``beat`` is called now and then.
        """
        views: dict[str, View] = {}
        end = time.monotonic() + seconds + _LOOK
        while (
            len(own.ranks.union(*(each.ranks for each in views.values()))) < size and time.monotonic() < end
        ):
            beat()
            time.sleep(_POLL)
            for name in sorted(self._board.names() - views.keys()):
                of, _, rank = _parts(name)
                if of in (call, _LEFT) and rank != self._rank:
                    with contextlib.suppress(
                        KeyError, TypeError, ValueError
                    ):  # of another version, or damaged
                        views[name] = view.from_json(self._board.read(name))
        return view.joined([own, *views.values()])

    def claim(self, call: str) -> bool:
        """Return whether this rank is the first that reports on a call."""
        return self._board.claim(call)

    def take_down(self) -> None:
        """Remove what this rank has posted: it is not true any more."""
        for name in self._posted:
            self._board.take_down(name)
        self._posted.clear()
        if not self._board.names():
            self._board.remove()

    def _post(self, name: str, seen: View) -> None:
        self._board.post(name, view.as_json(seen))
        self._posted.add(name)


def _parts(name: str) -> tuple[str, str, int]:
    call, kind, rank = name.rsplit(".", 2)
    return call, kind, int(rank)
