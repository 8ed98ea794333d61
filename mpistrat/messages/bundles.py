"""Several requests to one rank as one letter, and their outcomes as one reply."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.messages.failures import Failure
from mpistrat.messages.pickling import Packed, unpack
from mpistrat.messages.post import Letter, Post

SEVERAL = "several"  # kind of such a letter

Request = tuple[int, str, tuple[Any, ...], Packed]  # rank, kind, head, body


def ask_in_bundles(post: Post, requests: Sequence[Request]) -> list[Any]:
    """Return the replies to requests, with one letter to each rank, which does what one asks for before the next.

    The first error is raised after all have come.
    """
    places: dict[int, list[int]] = {}
    for place, (to, *_) in enumerate(requests):
        places.setdefault(to, []).append(place)
    if len(places) == len(requests):
        return post.ask_all(requests)
    replies: list[Any] = [None] * len(requests)
    letters = [(to, SEVERAL, (), bundle([requests[i][1:] for i in own])) for to, own in places.items()]
    for own, outcomes in zip(places.values(), post.ask_all(letters), strict=True):
        for place, (_, _, body) in zip(own, outcomes, strict=True):
            replies[place] = unpack(body)
    for reply in replies:
        if isinstance(reply, Failure):
            raise reply.error()
    return replies


def outcomes_of(letter: Letter, outcome: Callable[[Letter], Packed]) -> Packed:
    """Return the reply to a letter of several requests. ``outcome`` returns the packed value, or `Failure`, of each."""
    outcomes = []
    for kind, head, body in unpack(letter.body):
        outcomes.append((kind, (), outcome(Letter(letter.source, kind, (*letter.head, *head), body))))
    return bundle(outcomes)


def bundle(parts: Sequence[tuple[Any, tuple[Any, ...], Packed]]) -> Packed:
    """Return (name, facts, packed object) of several objects as one body, whose arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    wrapped = [
        (kind, head, Packed(body.stream, tuple(map(pickle.PickleBuffer, body.buffers)))) for kind, head, body in parts
    ]
    stream = pickle.dumps(wrapped, 5, buffer_callback=buffers.append)
    return Packed(stream, tuple(each.raw() for each in buffers))
