"""A coordinator of more workers than a machine has."""

import threading
import time
from collections import deque
from types import SimpleNamespace

from mpistrat.asynchronous.dispatcher import Dispatcher, Task
from mpistrat.messages.mailbox import ReceivedMessage
from mpistrat.messages.pickling import EMPTY, LostRankError, failure_of, pack
from mpistrat.process import failure

WORKERS = 600
FUNCTIONS = SimpleNamespace(send=lambda *_: None)
FUNCTION = SimpleNamespace(digest=b"", packed=EMPTY)


class FailingWorkers:
    """A mailbox whose workers answer each task with an error. The answers wait until they are let through."""

    def __init__(self):
        self.lock, self.closed, self.open = threading.RLock(), False, False
        self.body = pack(failure_of(OSError("on purpose"), "a worker"))[0]
        self.messages, self.losses = deque(), SimpleNamespace(ranks=set())

    def receive(self):
        return self.messages.popleft() if self.open and self.messages else None

    def require_open(self):
        pass

    def send(self, to, kind, head=(), body=EMPTY):
        if kind == "task":
            self.messages.append(ReceivedMessage(to, "failed", (head[0], 0.0, ()), self.body))


def test_many_tasks_that_fail_together_run_again():
    mailbox = FailingWorkers()
    roles = SimpleNamespace(workers=range(1, WORKERS + 1), parameter_servers=())
    dispatcher = Dispatcher(SimpleNamespace(mailbox=mailbox, roles=roles, functions=FUNCTIONS))
    given_up = []

    def attempt(left):
        def ended(_, error):
            assert isinstance(error, OSError)
            if left:
                dispatcher.add(attempt(left - 1))
            else:
                given_up.append(error)

        return Task(FUNCTION, EMPTY, None, dispatcher, None, ended)

    for _ in range(WORKERS):
        dispatcher.add(attempt(2))
    mailbox.open = True
    dispatcher.wait(lambda: len(given_up) == WORKERS)
    assert not dispatcher.unfinished(dispatcher)


class Mailbox:
    """A mailbox that notes the messages that it is given, and whose replies a test makes."""

    def __init__(self):
        self.lock, self.closed = threading.RLock(), False
        self.sent, self.replies = [], deque()
        self.losses = SimpleNamespace(ranks=set(), error=lambda rank: LostRankError(f"lost {rank}", rank))

    def receive(self):
        return self.replies.popleft() if self.replies else None

    def send(self, to, kind, head=(), body=EMPTY):
        self.sent.append((to, kind, *head[:1]))


def dispatcher_of_two(mailbox):
    """A dispatcher of the workers 1 and 2, and a parameter server."""
    roles = SimpleNamespace(workers=(1, 2), parameter_servers=(3,), task_of=lambda rank: ("worker", rank - 1))
    return Dispatcher(SimpleNamespace(mailbox=mailbox, roles=roles, functions=FUNCTIONS))


def test_no_lost_worker_gets_a_part_of_a_task(monkeypatch):
    def end_job(text):
        raise AssertionError(text)

    monkeypatch.setattr(failure, "end_job", end_job)
    mailbox = Mailbox()
    dispatcher, errors = dispatcher_of_two(mailbox), []
    mailbox.losses.ranks.add(2)
    dispatcher.add(Task(FUNCTION, EMPTY, None, dispatcher, None, lambda _, error: errors.append(error), ranks=2))
    (error,) = errors
    assert isinstance(error, LostRankError)
    assert mailbox.sent == []


def test_no_task_is_taken_back_for_a_worker_whose_writes_are_applied():
    mailbox = Mailbox()
    dispatcher = dispatcher_of_two(mailbox)

    def add(once=False):
        dispatcher.add(Task(FUNCTION, EMPTY, None, dispatcher, None, lambda *_: None, once=once))

    def reply(source, kind, *head):
        mailbox.replies.append(ReceivedMessage(source, kind, head, pack(None)[0] if kind == "ended" else EMPTY))
        dispatcher.progress()

    add(once=True)
    add()
    reply(2, "ended", 1, 0.0, ())  # at once: it is handed two tasks now
    add()
    add()
    assert mailbox.sent == [(1, "task", 0), (2, "task", 1), (2, "task", 2), (2, "task", 3)]
    reply(1, "ended", 0, 1.0, (0,))
    time.sleep(0.01)  # the first task of the other worker is not short
    dispatcher.progress()
    assert mailbox.sent[4:] == [(3, "commit", 0)]
    reply(3, "committed", 0)
    assert mailbox.sent[5:] == [(2, "drop")]
