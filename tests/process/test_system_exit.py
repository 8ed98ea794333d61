"""Why `failure` watches ``code`` before Python 3.12: no hook gets the status of an uncaught SystemExit."""

import sys

import pytest

# Each hook that is documented prints its name and any status that it can see: an argument, or sys.last_value.
PROGRAM = """
import atexit, gc, sys, threading
def see(name):
    def hook(*arguments):
        texts = [repr(each) for each in (*arguments, getattr(sys, "last_value", None))]
        seen.append((name, any("37" in text for text in texts)))
    return hook
seen = []
def at_exit():
    pending = [each for each in gc.get_objects() if isinstance(each, SystemExit)]
    sys.stdout.write(f"{seen}, {sys.exc_info()}, {pending}")
atexit.register(at_exit)
sys.excepthook = see("sys.excepthook")
sys.unraisablehook = see("sys.unraisablehook")
threading.excepthook = see("threading.excepthook")
sys.exit = see("sys.exit")
sys.addaudithook(lambda event, arguments: see("audit")(event, arguments) if "37" in repr(arguments) else None)
raise SystemExit(37)
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring tells it")
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other interpreters are not watched")
def test_no_hook_gets_the_status(run_alone):
    ended = run_alone("-c", PROGRAM)
    assert (ended.status, ended.output) == (37, "[], (None, None, None), []")
