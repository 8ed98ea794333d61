"""Removes one ordering after another from the package, and prints whether `test_order_of_streams` notices.

A process loads everything once. For each mutant it forks, and the child exchanges the code of the functions that the
changed line belongs to: objects that other modules have imported change with it. So a mutant takes less than a second.

    python tests/gpu/mutants.py [NAME ...]
"""

import importlib
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "gpu" / "test_order_of_streams.py"
PASSED, FAILED = 0, 1  # pytest's exit status
PROCESSES = 2
PINNED = "mpistrat.arrays.gpu.pinned"
DEVICE, NCCL = "mpistrat.arrays.device", "mpistrat.collectives.gpu.nccl"
POINTERS, KERNELS = "mpistrat.collectives.gpu.pointers", "mpistrat.arrays.gpu.kernels"
ARRAYS = "mpistrat.arrays.arrays"

# name: the module, the function, the text that is changed (the first after the line of the function), and the new text
MUTANTS = {
    "a download does not wait for the stream": (PINNED, "begin", "self._down.wait_event(self._begun)", "pass"),
    "an upload does not wait for the stream": (PINNED, "begin", "self._up.wait_event(self._begun)", "pass"),
    "the beginning is not recorded": (
        PINNED, "begin", "self._begun.record(self._cupy.cuda.get_current_stream())", "pass",
    ),
    "the stream does not wait for an upload": (
        PINNED, "end", "self._cupy.cuda.get_current_stream().wait_event(self._ended)", "pass",
    ),
    "the end is not recorded": (PINNED, "end", "self._ended.record(self._up)", "pass"),
    "the end is that of the downloads": (PINNED, "end", ".record(self._up)", ".record(self._down)"),
    "a slot is filled while it is uploaded": (PINNED, "fetch", "slot.released.synchronize()", "pass"),
    "an arrival is not recorded": (PINNED, "fetch", "slot.arrived.record(self._down)", "pass"),
    "a departure is not recorded": (PINNED, "send", "slot.released.record(self._up)", "pass"),
    "a copy begins at once": (PINNED, "staging", "stage.begin()", "pass"),
    "a copy ends at any time": (PINNED, "staging", "stage.end()", "pass"),
    "an error leaves copies behind": (PINNED, "staging", "stage.settle()", "pass"),
    "a piece is reduced before it arrived": (PINNED, "through_host", "slot.arrived.synchronize()", "pass"),
    "a piece is handed out before it arrived": (PINNED, "download", "slot.arrived.synchronize()", "pass"),
    "a slot is written while it is uploaded": (PINNED, "upload", "slot.released.synchronize()", "pass"),
    "a batch is not recorded": (PINNED, "Feed.send", "ready.record(self.stream)", "pass"),
    "a chunk is not recorded": (PINNED, "_next_chunk", "self._ring[self._at][1].record(self.stream)", "pass"),
    "a chunk is written while it is copied": (
        PINNED, "_next_chunk", "self._ring[self._at][1].synchronize()", "pass",
    ),
    "memory of a batch is written while it is read": (PINNED, "reclaim", "self.stream.wait_event(event)", "pass"),
    "a batch is read before it arrived": (PINNED, "received", "stream.wait_event(sent.ready)", "pass"),
    "a batch is received on another device": (PINNED, "received", "on_device(sent.feed.device)", "on_device(0)"),
    "a release is not recorded": (PINNED, "__del__", "self._event.record(self._stream)", "pass"),
    "a release is recorded on another device": (
        PINNED, "__del__", "with on_device(self._feed.device):", "with contextmanager(lambda: iter([None]))():",
    ),
    "a failed release frees the memory": (PINNED, "__del__", "_lost.append(self._array)", "pass"),
    "scratch is used by two streams": (POINTERS, "scratch", "stream.wait_event(memory.released)", "pass"),
    "the last use of scratch is not recorded": (POINTERS, "scratch", "memory.released.record(stream)", "pass"),
    "MPI gets memory that is being written": (
        POINTERS, "_settled", 'cupy_for("arrays on GPUs").cuda.get_current_stream().synchronize()', "pass",
    ),
    "streams share tables": (KERNELS, "_tables_of", "device, cupy.cuda.get_current_stream().ptr", "device, 0"),
    "devices share tables": (
        KERNELS, "_tables_of", "device, cupy.cuda.get_current_stream().ptr", "0, cupy.cuda.get_current_stream().ptr",
    ),
    "NCCL goes by stream 0": (NCCL, "NcclRoute.reduce", "stream.ptr,", "0,"),
    "NCCL's end is not recorded": (NCCL, "NcclRoute.reduce", "done.record(stream)", "pass"),
    "NCCL is not ended": (NCCL, "_abort", "communicator.abort()", "pass"),
    "NCCL's end is that of the stream": (NCCL, "NcclRoute.reduce", "communicator, done,", "communicator, stream,"),
    "a device is left for one without a context": (DEVICE, "on_device", "if used:", "if True:"),
    "a device is not left": (DEVICE, "on_device", "if used:", "if False:"),
    "a device is not made current": (DEVICE, "on_device", "cuda.runtime.setDevice(index)", "pass"),
    "memory of a tensor is written while it is read": (ARRAYS, "to_cupy", "value.record_stream(", "id("),
    "results for PyTorch are in another stream": (
        ARRAYS, "stream_of", 'not all(hasattr(value, "detach") for value in values)', "True",
    ),
    "a tensor's GPU is not made current": (ARRAYS, "stream_of", "on_device(number)", "on_device(0)"),
    "a tensor is read from another GPU": (
        ARRAYS, "to_cupy", "on_device(value.__dlpack_device__()[1])", "on_device(0)",
    ),
    "a result for PyTorch goes back to CuPy's stream": (ARRAYS, "from_cupy", "result.copy()", "result"),
    "a result is copied before it is there": (ARRAYS, "from_cupy", "torch_stream.wait_event(before.record())", "pass"),
    "a result is overwritten while it is copied": (
        ARRAYS, "from_cupy", "before.wait_event(torch_stream.record())", "pass",
    ),
    "arrays of CuPy are read in PyTorch's stream": (ARRAYS, "stream_of", "not all(", "not any("),
    "stream 0 is not recorded": (ARRAYS, "to_cupy", "if stream else", "if True else"),
    "CUDA's headers are not looked for": (DEVICE, "require", "_require_headers(self)", "pass"),
}  # fmt: skip


def mutate(module_name, function, old, new):
    """Change a line of a function of a module, in place."""
    module = importlib.import_module(module_name)
    source = Path(module.__file__).read_text()
    owner, _, function = function.rpartition(".")
    start = source.index(f"def {function}(", source.index(f"class {owner}") if owner else 0)
    at = source.index(old, start)
    assert "\ndef " not in source[start:at], f"{old!r} is not in {function}"
    changed = source[:at] + new + source[at + len(old) :]
    codes = dict(_codes(compile(changed, module.__file__, "exec")))
    targets = [
        each
        for each in _functions(module)
        if each.__name__ == function and each.__qualname__.startswith(owner and f"{owner}.")
    ]
    assert targets, f"{module_name} has no {function}"
    for each in targets:
        each.__code__ = codes[each.__qualname__]


def _codes(code, prefix=""):
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield f"{prefix}{each.co_name}", each
            yield from _codes(each, f"{prefix}{each.co_name}.")


def _functions(module):
    for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        for each in vars(owner).values():
            found = getattr(each, "__wrapped__", each)
            if isinstance(found, types.FunctionType) and found.__module__ == module.__name__:
                yield found


def start(mutant):
    """Run the tests in a child with this mutant, or with none. Return its process id."""
    import pytest

    child = os.fork()
    if child:
        return child
    status = 70
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        if mutant is not None:
            mutate(*mutant)
        options = ["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
        status = pytest.main([str(TESTS), "-x", "-q", "-p", "no:faulthandler", *options])
    finally:
        os._exit(status)


def main(names):
    sys.path[:0] = [str(ROOT / "tests")]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for module in sorted({mutant[0] for mutant in MUTANTS.values()}):
        importlib.import_module(module)
    importlib.import_module("fakes.install").fake_cupy()
    names = names or list(MUTANTS)
    waiting, running, missed = [None, *names], {}, []
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            name = waiting.pop(0)
            running[start(name and MUTANTS[name])] = name
        child, status = os.wait()
        name, status = running.pop(child), os.waitstatus_to_exitcode(status)
        # A kernel with a wrong table may end the process.
        if (status == PASSED) if name is None else (status == FAILED or status < 0):
            print(f"found: {name}" if name else "without a mutant all tests pass", flush=True)
        else:
            missed.append(name)
            print(f"MISSED: {name} (status {status})", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} mutants found")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
