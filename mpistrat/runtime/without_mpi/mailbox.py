"""Letters of ranks to rank 0 when MPI does not work, as notices on a board."""

from __future__ import annotations

import secrets
from typing import Any

from mpistrat.runtime.without_mpi.board import Board

_INBOX, _LETTER = "inbox", "letter-"


class Inbox:
    """The letters of the other ranks to rank 0: in ``letters`` the last of each rank. Empty without a shared directory.

    A launch that was killed may have left letters under the same key, so each inbox has a name, which letters repeat.
    """

    def __init__(self, key: str | None):
        self.letters: dict[int, Any] = {}
        self._heard: set[str] = set()  # the senders
        self._gone: set[str] = set()
        self._announced: set[str] = set()
        self._name = secrets.token_hex(8)
        self._board = _board(key)
        self._board.post(_INBOX, self._name)

    @property
    def works(self) -> bool:
        """Whether the ranks have a directory for letters."""
        return bool(self._board.folders)

    def collect(self) -> None:
        """Read the letters that arrived."""
        self._board.post(_INBOX, self._name)  # NFS looks at a directory again after a change that is made here
        for name in self._board.names():
            letter = self._board.read(name) if name.startswith(_LETTER) else None
            if letter is None or letter["to"] != self._name:
                continue
            self._heard.add(letter["from"])
            if letter["goes"]:
                self._gone.add(letter["from"])
            else:
                self.letters[letter["rank"]] = letter["value"]
        for name in self._announced:
            self.announce(name)

    def announce(self, name: str) -> None:
        """Announce a name to all senders of letters, also to those whose letters arrive later."""
        self._announced.add(name)
        self._board.post(name, sorted(self._heard))

    def all_have_gone(self) -> bool:
        """Return whether all senders of letters have sent their last one."""
        self.collect()
        return self._gone >= self._heard

    def close(self) -> None:
        """Remove the inbox, and what was left in it."""
        if self._board.read(_INBOX) == self._name:
            self._board.take_down(self._board.names(), lambda name: True)


class Outbox:
    """The letters of one rank to rank 0, sent again to each new inbox, since an earlier launch may have left one.

    An announcement counts only if it names this sender.
    """

    def __init__(self, key: str | None, rank: int):
        self._board = _board(key)
        self._notice = f"{_LETTER}{rank}"
        self._name = secrets.token_hex(8)
        self._rank = rank
        self._letter: dict[str, Any] | None = None
        self._sent_to: str | None = None  # the inbox that got the letter

    @property
    def works(self) -> bool:
        return bool(self._board.folders)

    def put(self, value: Any, *, goes: bool = False) -> None:
        """Send a letter that replaces the previous one. ``goes`` marks the last letter."""
        self._letter = {"from": self._name, "rank": self._rank, "value": value, "goes": goes}
        self._sent_to = None
        self._send()

    def announced(self, name: str) -> bool:
        """Return whether rank 0 read a letter of this rank and announced this name."""
        self._send()
        heard = self._board.read(name)
        return isinstance(heard, list) and self._name in heard

    def is_closed(self) -> bool:
        """Return whether rank 0 removed the inbox that got the letter."""
        return self._sent_to is None or self._board.read(_INBOX) != self._sent_to

    def close(self) -> None:
        """Remove an unread letter of this rank, and the directory if it is empty."""
        self._board.take_down([self._notice])

    def _send(self) -> None:
        if self._letter is None:
            return
        inbox = self._board.read(_INBOX)
        if isinstance(inbox, str) and inbox != self._sent_to:
            self._board.post(self._notice, {**self._letter, "to": inbox})
            self._sent_to = inbox


def _board(key: str | None) -> Board:
    """Return the board for the letters of a key; one that takes none without a key, or a directory for it."""
    board = Board(f"letters {key}")  # the watchdogs of this launch have one of their own
    if key is None or not board.make():
        board.forget()
    return board
