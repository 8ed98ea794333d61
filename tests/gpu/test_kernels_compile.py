"""The kernels through NVIDIA's own compiler, which needs no GPU: pip install nvidia-cuda-nvrtc-cu12 (or cupy's)."""

import ctypes
import importlib.util
import itertools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpistrat.arrays.gpu import kernels
from mpistrat.collectives.gpu import route as gpu_combine
from mpistrat.training.optimizers import algorithms
from mpistrat.training.optimizers.rule import _with_average, _with_decay

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
OF_OPTIMIZERS = [
    algorithms._PLAIN,
    algorithms._MOMENTUM,
    algorithms._NESTEROV,
    algorithms._ADAM,
    algorithms._AMSGRAD,
    algorithms._ADAGRAD_KERNEL,
    *(algorithms._rmsprop_kernel(*options) for options in itertools.product((False, True), repeat=2)),
]
KERNELS = [
    *((kernels._copy, dtype) for dtype in (np.uint8, np.uint16, np.uint32, np.uint64)),
    *(
        (gpu_combine._sum_of(rows), dtype)
        for rows in (2, 3, gpu_combine._TOGETHER)
        for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64)
    ),
    *((kernel, dtype) for kernel in OF_OPTIMIZERS for dtype in FLOATS),
]


def sources_of(dtype):
    """The sources of all kernels of a dtype, to be compiled together."""
    calls = (False, True)
    averaged = [_with_average(_with_decay(kernel), each) for kernel in OF_OPTIMIZERS for each in calls]
    variants = [*OF_OPTIMIZERS, *averaged]
    sources = [kernel._source(dtype) for kernel in variants]
    sources.append(kernels.squares_source(dtype).removeprefix(kernels._HALVES))
    if dtype.name in ("float32", "float64"):
        rows = range(2, gpu_combine._TOGETHER + 1)
        sources += [gpu_combine._sum_of(number)._source(dtype) for number in rows]
    return sources


@pytest.fixture(scope="module")
def nvrtc():
    return library()


def library():
    """NVRTC, from the wheel."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.1[0-9]")]
    if not files:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    return ctypes.CDLL(str(files[0]))


def compiled(nvrtc, source, *options, code="PTX"):
    """PTX or machine code, or an AssertionError with what the compiler says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    texts = []
    for what in ("ProgramLog", code):
        if what == "ProgramLog" or status == 0:
            getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
            text = ctypes.create_string_buffer(size.value)
            getattr(nvrtc, f"nvrtcGet{what}")(program, text)
            texts.append(text.value.decode(errors="replace"))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, texts[0]
    return texts[1]


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=lambda each: getattr(each, "_name", None))
def test_every_kernel(nvrtc, kernel, dtype):
    """As CuPy compiles it; without fused multiply-add, so that it rounds as NumPy does."""
    source = kernels._HALVES + kernel._source(np.dtype(dtype))
    ptx = compiled(nvrtc, source, "--gpu-architecture=compute_90", "--std=c++17", *kernels.OPTIONS)
    assert f".entry {kernel._name}(" in ptx
    assert "fma." not in ptx


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_copy_has_several_loads_on_their_way(nvrtc, dtype):
    """A load that waited for the store before it would leave most of the memory's bandwidth unused."""
    ptx = compiled(
        nvrtc,
        kernels._HALVES + kernels._copy._source(np.dtype(dtype)),
        "--gpu-architecture=compute_90",
        *kernels.OPTIONS,
    )
    bits = 8 * np.dtype(dtype).itemsize
    moves = re.findall(rf"^\s(ld|st)\.global\.u{bits} ", ptx, re.MULTILINE)
    assert "ld " * (16 // np.dtype(dtype).itemsize) in " ".join(moves) + " "
