"""The writes of tasks to parameter servers: the coordinator decides whether they count.

A task that writes prepares its writes on servers. Once it has ended, these servers commit the writes, or abort them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpistrat.asynchronous.task import Task
from mpistrat.messages.pickling import unpack
from mpistrat.messages.post import Letter, Post


class Decisions:
    """The tasks whose writes parameter servers are told to commit.

    Parameters
    ----------
    post : Post
    servers : tuple of int
        The ranks of the parameter servers.
    """

    def __init__(self, post: Post, servers: tuple[int, ...]):
        self._post = post
        self._servers = servers
        # By task: its result, and the servers that have not committed.
        self._open: dict[int, tuple[Task, Any, set[int]]] = {}

    def commit(self, task: Task, value: Any, servers: Iterable[int]) -> None:
        """Tell servers, by their index, to commit the writes of a task. `committed` has its result later."""
        ranks = [self._servers[each] for each in servers]
        self._tell(ranks, "commit", task.number)
        self._open[task.number] = task, value, {*ranks}

    def abort(self, number: int, servers: Iterable[int] | None = None) -> None:
        """Tell servers, by their index, to forget the writes of a task; by default all of them."""
        ranks = self._servers if servers is None else [self._servers[each] for each in servers]
        self._tell(ranks, "abort", number)

    def committed(self, letter: Letter) -> tuple[Task, Any, BaseException | None] | None:
        """Take the news that a server has applied the writes of a task.

        Returns
        -------
        tuple of Task, value and error, or None
            None until all servers of the task have applied its writes.
        """
        (number,) = letter.head
        task, value, missing = self._open[number]
        missing.discard(letter.source)
        if letter.body.stream:
            task.error = task.error or unpack(letter.body).error()
        if missing:
            return None
        del self._open[number]
        error, task.error = task.error, None
        return task, value, error

    def _tell(self, ranks: Iterable[int], kind: str, number: int) -> None:
        for rank in ranks:
            self._post.send(rank, kind, (number,))
