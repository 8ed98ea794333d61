"""A coordinator of more workers than a machine has."""

import threading
from collections import deque
from types import SimpleNamespace

from mpistrat.asynchronous.dispatcher import Dispatcher
from mpistrat.asynchronous.task import Task
from mpistrat.messages.failures import failure_of
from mpistrat.messages.pickling import EMPTY, pack
from mpistrat.messages.post import Letter

WORKERS = 600


class FailingWorkers:
    """A post whose workers answer each task with an error. The answers wait until they are let through."""

    def __init__(self):
        self.lock, self.closed, self.open = threading.RLock(), False, False
        self.body = pack(failure_of(OSError("on purpose"), "a worker"))[0]
        self.letters, self.losses = deque(), SimpleNamespace(ranks=set())

    def receive(self):
        return self.letters.popleft() if self.open and self.letters else None

    def require_open(self):
        pass

    def send(self, to, kind, head=(), body=EMPTY):
        if kind == "task":
            self.letters.append(Letter(to, "failed", (head[0], 0.0, ()), self.body))


def test_many_tasks_that_fail_together_run_again():
    post = FailingWorkers()
    roles = SimpleNamespace(workers=range(1, WORKERS + 1), parameter_servers=())
    functions = SimpleNamespace(send=lambda *_: None)
    dispatcher = Dispatcher(SimpleNamespace(post=post, roles=roles, functions=functions))
    function, given_up = SimpleNamespace(digest=b"", packed=EMPTY), []

    def attempt(left):
        def ended(_, error):
            assert isinstance(error, OSError)
            if left:
                dispatcher.add(attempt(left - 1))
            else:
                given_up.append(error)

        return Task(function, EMPTY, None, dispatcher, None, ended)

    for _ in range(WORKERS):
        dispatcher.add(attempt(2))
    post.open = True
    dispatcher.wait(lambda: len(given_up) == WORKERS)
    assert not dispatcher.unfinished(dispatcher)
