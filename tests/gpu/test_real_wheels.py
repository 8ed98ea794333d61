"""The real CuPy, NCCL and NVRTC, on a machine without a GPU: names, signatures, ids, layouts and compiled kernels.

.ci/run installs the wheels into a folder of their own. By hand:

    pip install --target FOLDER cupy-cuda12x nvidia-nccl-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12
    LD_LIBRARY_PATH=FOLDER/nvidia/nccl/lib PYTHONPATH=FOLDER python -m pytest tests/gpu/test_real_wheels.py
"""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import test_kernels_compile
from fakes.install import fake_cupy
from test_kernels_compile import compiled, sources_of

from mpistrat.arrays import arrays
from mpistrat.arrays.device import gpu_count
from mpistrat.arrays.gpu import kernels
from mpistrat.collectives import reduction
from mpistrat.collectives.gpu import nccl as nccl_route
from mpistrat.collectives.gpu.route import MessageLayout, unpack
from mpistrat.values import ReduceOp

cupy = pytest.importorskip("cupy")
if "fake" in cupy.__version__:
    pytest.skip("the stand-in for CuPy is imported", allow_module_level=True)

ROOT = Path(__file__).parents[2]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


@pytest.fixture(scope="module")
def nccl():
    found = importlib.import_module("cupy.cuda.nccl")
    if not found.available:
        pytest.skip("NCCL is not installed: pip install nvidia-nccl-cu12")
    return found


def array_at(address, shape, dtype):
    """An array of CuPy at an invented address."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 40, None, 0)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


# --- names and signatures ------------------------------------------------------------------------------


def names_used():
    """The names of CuPy in the source of the package: `cupy.x`, and `runtime.x`, `driver.x` and `nccl.x` of it."""
    names = set()
    for path in (ROOT / "mpistrat").rglob("*.py"):
        text = path.read_text()
        if "cupy" in text:
            names.update(re.findall(r"(?<![\w\"'`.])cupy\.([a-zA-Z_.]+[a-zA-Z_])\(", text))
            for module in ("runtime", "driver"):
                names.update(f"cuda.{module}.{each}" for each in re.findall(rf"\b{module}\.(\w+)", text))
    return {name for name in names if not name.startswith(("cuda.runtime.Runtime", "cuda.runtime.py"))}


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *(each for each in names_used() if not re.search(r"runtime\.[a-z_]+$|agreement", each)),
            "cuda.runtime.memcpyHostToDevice",
            "cuda.runtime.memcpyDeviceToHost",
            "cuda.Event.done",
            "cuda.Event.synchronize",
            "cuda.Stream.wait_event",
            "RawKernel.compile",
        }
    ),
)
def test_names(name):
    """That the package uses exist, in the real library and in the stand-in."""
    for library in (cupy, fake_cupy()["cupy"]):
        found = library
        for part in name.split("."):
            found = getattr(found, part)


def parameters(function):
    """The names of the parameters; of Cython's functions from the first line of their text."""
    try:
        found = [*inspect.signature(function).parameters]
    except ValueError:
        text = " ".join((function.__doc__ or "").split())
        inside = re.match(r"[\w.]+\((.*?)\)", text)[1]
        found = [re.sub(r"\s*=.*", "", each).split()[-1] for each in inside.split(",") if each.strip()]
    return [each.strip("*") for each in found if each not in ("self", "/", "*")]


@pytest.mark.parametrize(
    "name",
    [
        "RawKernel", "cuda.Event", "cuda.Event.record", "cuda.Stream", "cuda.Stream.wait_event",
        "cuda.UnownedMemory", "cuda.MemoryPointer", "cuda.alloc_pinned_memory", "cuda.driver.ctxGetCurrent",
        "cuda.get_current_stream", "cuda.ExternalStream", "cuda.Stream.from_external",
        "cuda.nccl.NcclCommunicator.allReduce", "cuda.nccl.get_unique_id", "cuda.runtime.deviceGetAttribute",
        "cuda.runtime.deviceGetPCIBusId", "cuda.runtime.eventQuery", "cuda.runtime.getDevice",
        "cuda.runtime.memGetInfo", "cuda.runtime.memcpyAsync", "cuda.runtime.setDevice",
    ],
)  # fmt: skip
def test_the_stand_in_takes_the_same_arguments(name, nccl):
    real, fake = cupy, fake_cupy()["cupy"]
    if name == "cuda.Stream.from_external" and cupy.__version__ < "14":
        pytest.skip("ExternalStream is what version 13 has")
    for part in name.split("."):
        real, fake = getattr(real, part), getattr(fake, part)
    ours = parameters(fake.__init__ if isinstance(fake, type) else fake)
    theirs = parameters(real)
    if name == "RawKernel":
        ours[0] = "code"
    assert theirs[: len(ours)] == ours


# --- what works without a GPU ------------------------------------------------------------------------------


def test_what_a_machine_without_a_driver_is_told():
    if cupy.cuda.runtime.driverGetVersion():
        pytest.skip("this machine has a driver")
    with pytest.raises(RuntimeError, match="it: CuPy is installed, but this machine has no NVIDIA driver"):
        gpu_count("it")


def test_ids_and_constants_of_nccl(nccl):
    unique = nccl.get_unique_id()
    assert type(unique) is (tuple if cupy.__version__ < "14" else bytes)
    assert len(unique) == 128
    tables = nccl_route._TYPES, nccl_route._HALVES, nccl_route._OPERATIONS, {None: "NCCL_AVG"}
    for name in (name for table in tables for name in table.values()):
        assert type(getattr(nccl, name)) is int
    with pytest.raises(nccl_route._ERRORS):
        nccl.NcclCommunicator(1, unique, 0)  # takes these arguments, and finds no GPU
    with pytest.raises(TypeError):
        nccl.NcclCommunicator(1, "an id", 0)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int8])
def test_results_are_views_of_the_message(dtype):
    shapes = [(3, 5), (700,), (40, 30, 2), (40, 30, 2)]
    key = tuple((np.dtype(dtype), shape) for shape in shapes)
    limits = {np.dtype(dtype): reduction.MessageSizes(1 << 30, 1 << 30, 1 << 30)}
    (message,) = reduction.packed_messages(ReduceOp.SUM, key, 2, limits)
    total = array_at(1 << 30, message.length, dtype)
    out = [None] * len(shapes)
    unpack(MessageLayout.of(message), total, out)
    place = total.data.ptr
    for each, shape in zip(out, shapes, strict=True):
        assert (each.shape, each.dtype, each.data.ptr) == (shape, np.dtype(dtype), place)
        assert each.flags.c_contiguous
        assert each.data.mem is total.data.mem  # which keeps the memory
        place += each.nbytes


def test_an_array_is_known_by_its_type(monkeypatch):
    """Without asking DLPack, which asks the driver."""
    array = array_at(1 << 20, 10, np.float32)
    assert arrays.on_gpu(array)
    assert arrays.to_cupy(array) is array
    assert cupy.ascontiguousarray(array) is array
    assert not arrays.on_gpu(np.ones(3))


# --- kernels ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc():
    return test_kernels_compile.library()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_kernels_for_a_gpu(nvrtc, architecture, dtype):
    """To machine code, all of a dtype in one program."""
    sources = sources_of(np.dtype(dtype))
    assert len(sources) > len(test_kernels_compile.OF_OPTIMIZERS)
    compiled(
        nvrtc,
        kernels._HALVES + "\n".join(sources),
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *kernels.OPTIONS,
        code="CUBIN",
    )


def test_headers(nvrtc):
    """NVRTC alone has no headers. What CuPy's kernels include does not compile without those of another wheel."""
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void check(__half* a) { a[0] = __half(1.0f); }'
    with pytest.raises(AssertionError, match=r"could not open source file .*cuda_fp16\.h"):
        compiled(nvrtc, source, "--gpu-architecture=compute_90")
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    if spec is None:
        pytest.skip("the headers are not installed: pip install nvidia-cuda-runtime-cu12")
    folder = Path(next(iter(spec.submodule_search_locations)), "include")
    compiled(nvrtc, source, "--gpu-architecture=compute_90", f"-I{folder}")


# --- the host's time -----------------------------------------------------------------------------------------


def test_the_benchmark_of_the_host():
    program = ROOT / "benchmarks" / "communication" / "host_time_gpu.py"
    output = subprocess.run(
        [sys.executable, program, "--arrays", "20"], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert re.search(r"20 arrays  pack +\d+\.\d us", output)
    assert re.search(r"20 arrays  Adam +\d+\.\d us", output)
