"""CUDA's compiler. A test takes it away by `missing`, or the headers alone by `headers`."""

missing = False
headers = True


class CompileException(Exception):
    pass


def getVersion():
    if missing:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open")
    return 12, 9


def check(code):
    """Raise for source that cannot be compiled."""
    getVersion()
    if "#include <cuda" in code and not headers:
        raise CompileException("test.cu(1): catastrophic error: could not open source file")
