"""Errors that travel to another rank, with the traceback of the rank that raised them."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple


class RemoteTraceback(Exception):
    """The cause of an error of another rank: where it was raised there."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Failure(NamedTuple):
    """An error of another rank."""

    pickled: bytes | None  # the exception; None if it cannot be sent
    summary: str  # its class and message
    where: str  # the rank and its role
    text: str  # its traceback

    def error(self) -> BaseException:
        """Return the exception. Its cause shows the other rank and its traceback."""
        made: BaseException
        try:
            made = RuntimeError(self.summary) if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # the class takes other arguments than those it keeps
            made = RuntimeError(self.summary)
        made.__cause__ = RemoteTraceback(f"\non {self.where}:\n{self.text}")
        return made


def failure_of(error: BaseException, where: str) -> Failure:
    """Return an error as it is sent. SystemExit and the like become RuntimeError; KeyboardInterrupt stays."""
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    pickled = None
    if isinstance(error, (Exception, KeyboardInterrupt)):
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(pickled, summary, where, text)
