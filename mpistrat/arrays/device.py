"""Names of devices, checks that the devices exist, and upper bounds of the bandwidth of a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_NAME = re.compile(
    r"^(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+|\*))?$"
)
_REINSTALL = "; fix: install one CuPy for this Python, NumPy and CUDA, and no other beside it"
_T = TypeVar("_T")
_KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


class Device(NamedTuple):
    """A device of this rank's node.

    >>> str(Device.parse("/gpu:1"))
    'cuda:1'
    >>> Device.parse("cpu:0").kind
    'cpu'
    """

    kind: str  # ``"cpu"`` or ``"cuda"``
    # the number of the device among the devices of its kind that this process sees
    index: int = 0  # type: ignore[assignment]  # the field hides tuple.index, which is not used

    @classmethod
    def parse(cls, name: str | Device) -> Device:
        """Return the device of a name such as ``"cpu:0"`` or ``"/gpu:1"``. Raise TypeError or ValueError for others."""
        if isinstance(name, Device):
            return name
        if not isinstance(name, str):
            raise TypeError(f"a device is named by a string such as 'cpu:0' or 'cuda:1', not {name!r}")
        match = _NAME.match(name.strip())
        if match is None or match["kind"].lower() not in _KINDS:
            raise ValueError(f"{name!r} names no device: use 'cpu:0', 'cuda:1', '/gpu:1' or 'GPU:1'")
        index = match["index"]
        return cls(_KINDS[match["kind"].lower()], 0 if index in (None, "*") else int(index))

    def require(self) -> Device:
        """Return this device. Raise RuntimeError if it does not exist or cannot compile kernels."""
        if self.kind == "cuda":
            count = gpu_count(f"device {self}")
            if self.index >= count:
                raise RuntimeError(
                    f"device {self} is not there: this process sees {count} GPU{'s' * (count > 1)}, "
                    f"cuda:0{f' to cuda:{count - 1}' * (count > 1)}{_restriction()}; fix: use one of these, or 'cuda', "
                    "which gives each rank its own"
                )
            _require_headers(self)
        return self

    def use(self) -> Device:
        """Make this GPU the current device of CuPy in this thread. Does nothing for a CPU."""
        if self.kind == "cuda":
            cupy_for(f"device {self}").cuda.Device(self.index).use()
        return self

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a GPU current for this block, then the former GPU, if this thread has used that: each context takes 0.5 GB.

    `cupy.cuda.Device` always returns to the former GPU: in a new thread GPU 0, where every rank would have a context.
    """
    cuda = cupy_for("a GPU").cuda
    before = cuda.runtime.getDevice()
    if before == index:
        yield
        return
    used = cuda.driver.ctxGetCurrent() != 0
    cuda.runtime.setDevice(index)
    try:
        yield
    finally:
        if used:
            cuda.runtime.setDevice(before)


@contextmanager
def lent(idle: dict[int, list[_T]], device: int, make: Callable[[int], _T]) -> Iterator[_T]:
    """Lend an idle object of a GPU, or a new one, to one thread for this block."""
    waiting = idle.setdefault(device, [])
    try:
        item = waiting.pop()
    except IndexError:
        item = make(device)
    try:
        yield item
    finally:
        waiting.append(item)


def any_gpu(name: str | Device) -> bool:
    """Return whether a name asks for one GPU per rank: a kind without a number, such as ``"cuda"``."""
    if Device.parse(name).kind == "cpu" or isinstance(name, Device):
        return False
    return not name.strip()[-1].isdigit()


def seen_gpus(subject: str) -> tuple[str, ...]:
    """Return an identifier, unique on the node, of each GPU or slice that this process sees. Raise as `gpu_count`."""
    count, runtime = gpu_count(subject), cupy_for(subject).cuda.runtime
    return tuple(
        f"{bytes(runtime.getDeviceProperties(device).get('uuid', b'')).hex()} {runtime.deviceGetPCIBusId(device)}"
        for device in range(count)
    )


def cupy_for(subject: str) -> Any:
    """Return the module ``cupy``. Raise RuntimeError, whose text begins with ``subject``, if it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        if error.name not in (None, "cupy"):  # CuPy is there, but a module that it imports is missing
            raise RuntimeError(f"{subject} needs CuPy, which cannot be imported: {error}{_REINSTALL}") from error
        raise RuntimeError(
            f"{subject} needs CuPy, which is not installed: pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        ) from error
    except Exception as error:  # a shared library is missing or has another version
        raise RuntimeError(f"{subject} needs CuPy, which cannot be imported: {error}{_REINSTALL}") from error
    return cupy


def gpu_count(subject: str) -> int:
    """Return the number of GPUs that this process sees and can use, or raise RuntimeError that says what to do."""
    runtime = cupy_for(subject).cuda.runtime
    try:
        count: int = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(_no_gpu(subject, runtime, error)) from error
    if count == 0:
        raise RuntimeError(_none_seen(subject))
    _require_compiler(subject)
    return count


def _require_compiler(subject: str) -> None:
    """Raise if CUDA's compiler is missing: CuPy's wheels do not contain it, and CuPy needs it for most calls."""
    compiler = getattr(cupy_for(subject).cuda, "nvrtc", None)  # ROCm has another compiler
    if compiler is None:
        return
    try:
        compiler.getVersion()
    except Exception as error:  # the class differs between versions of CuPy
        raise RuntimeError(
            f"{subject}: CuPy does not find CUDA's compiler (NVRTC), without which it can do nothing: load the site's "
            f"CUDA module, or pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]' ({str(error).strip()})"
        ) from error


def _require_headers(device: Device) -> None:
    """Raise if CUDA's headers are missing, as in images that only run programs: CuPy's own kernels include them."""
    cupy = cupy_for(f"device {device}")
    if getattr(cupy.cuda, "nvrtc", None) is None:
        return
    try:
        with on_device(device.index):
            cupy.ones(1, "float16")  # a kernel, which CuPy keeps in its cache on disk
    except Exception as error:  # the class differs between versions of CuPy
        raise RuntimeError(
            f"device {device}: CuPy cannot compile a kernel, without which it can do nothing; fix: pip install "
            "'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]', which brings CUDA's headers, or set CUDA_PATH to a whole "
            f"toolkit ({' '.join(str(error).split())[:300]})"
        ) from error


_NO_DRIVER_OR_TOO_OLD, _NO_DEVICE = 35, 100  # cudaErrorInsufficientDriver, cudaErrorNoDevice


def _no_gpu(subject: str, runtime: Any, error: Any) -> str:
    status = getattr(error, "status", None)
    if status == _NO_DEVICE:
        return _none_seen(subject)
    if status != _NO_DRIVER_OR_TOO_OLD:
        return f"{subject}: CUDA does not start: {error}; fix: see whether nvidia-smi works here, or use 'cpu'"
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return (
            f"{subject}: CuPy is installed, but this machine has no NVIDIA driver (libcuda.so.1): run where a GPU is, "
            "in a container with --nv or --gpus, or use 'cpu'"
        )
    return (
        f"{subject}: the NVIDIA driver is too old: it is for CUDA {_version(driver)}, and CuPy for CUDA "
        f"{_version(needed)}: update the driver, install the CuPy for CUDA {driver // 1000}, or use 'cpu'"
    )


def _none_seen(subject: str) -> str:
    text = f"{subject}: this process sees no GPU{_restriction()}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return text
    return f"{text}; fix: ask the scheduler for GPUs, in the srun line too (--gpus-per-node), or use 'cpu'"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _restriction() -> str:
    """Return text about the environment variable that hides GPUs from this process, if it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ""
    if not visible:
        return " (CUDA_VISIBLE_DEVICES is empty, which hides all: unset it, ask the scheduler for GPUs, or use 'cpu')"
    return f" (CUDA_VISIBLE_DEVICES={visible})"


_SYSTEM = Path("/sys/bus/pci/devices")
_FOR_BYTES = ((60, 242 / 256), (8, 128 / 130), (0, 8 / 10))  # (least GT/s, fraction that is payload)


class Bounds(NamedTuple):
    """Bandwidths of a GPU in bytes per second, None where unknown."""

    memory: float | None  # bytes read plus bytes written
    link: float | None  # one direction, to the host or from it. Both directions at once carry twice as much.
    link_name: str  # such as ``"PCIe 32 GT/s x16"``; empty where unknown

    def __str__(self) -> str:
        texts = [] if self.memory is None else [f"memory {self.memory / 1e9:.0f} GB/s"]
        if self.link is not None:
            texts.append(f"{self.link_name} {self.link / 1e9:.0f} GB/s each way")
        return ", ".join(texts) or "bounds unknown"


def bounds(device: int) -> Bounds:
    """Return the bounds of a GPU that this process sees. An idle link is slow: its full speed counts."""
    runtime = cupy_for("bounds of a GPU").cuda.runtime
    try:
        # Two transfers for each clock tick.
        kilohertz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, device)
        bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, device)
        memory = 2e3 * kilohertz * bits / 8 or None
    except (runtime.CUDARuntimeError, AttributeError):  # a driver or a CuPy without this attribute
        memory = None
    link, name = _link(runtime.deviceGetPCIBusId(device).lower())
    return Bounds(memory, link, name)


def near_cores(device: int) -> frozenset[int]:
    """Return the cores of the NUMA node to which a GPU is attached; none if the system does not tell."""
    bus_id = cupy_for("cores near a GPU").cuda.runtime.deviceGetPCIBusId(device).lower()
    try:
        parts = (_SYSTEM / bus_id / "local_cpulist").read_text().strip().split(",")
    except OSError:
        return frozenset()
    ends = [part.split("-") for part in parts if part]
    return frozenset(core for pair in ends for core in range(int(pair[0]), int(pair[-1]) + 1))


def _link(bus_id: str) -> tuple[float | None, str]:
    try:
        speed = (_SYSTEM / bus_id / "max_link_speed").read_text()
        lanes = int((_SYSTEM / bus_id / "current_link_width").read_text())
    except (OSError, ValueError):
        return None, ""
    match = re.match(r"([\d.]+) GT/s", speed)
    if match is None or not 0 < lanes <= 32:
        return None, ""
    transfers = float(match[1])
    return link_bandwidth(transfers, lanes), f"PCIe {transfers:g} GT/s x{lanes}"


def link_bandwidth(transfers: float, lanes: int) -> float:
    """Return the bytes per second, in one direction, of a PCI Express link with lanes of ``transfers`` GT/s.

    >>> f"{link_bandwidth(32, 16):.3g}"
    '6.3e+10'
    """
    payload = next(payload for least, payload in _FOR_BYTES if transfers >= least)
    return transfers * 1e9 / 8 * lanes * payload
