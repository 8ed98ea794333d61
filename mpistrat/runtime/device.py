"""Devices by name, and whether they are there."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

_NAME = re.compile(
    r"^(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+|\*))?$"
)
_REINSTALL = "; fix: install one CuPy for this Python, NumPy and CUDA, and no other beside it"
_KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


class Device(NamedTuple):
    """A device of this rank's node.

    Attributes
    ----------
    kind : str
        ``"cpu"`` or ``"cuda"``.
    index : int
        Which of its kind, among those this process sees.

    Examples
    --------
    >>> str(Device.parse("/gpu:1"))
    'cuda:1'
    >>> Device.parse("cpu:0").kind
    'cpu'
    """

    kind: str
    index: int = 0  # type: ignore[assignment]  # the field hides tuple.index, which nobody needs

    @classmethod
    def parse(cls, name: str | Device) -> Device:
        """The device called ``"cpu:0"``, ``"cuda:1"``, ``"/gpu:1"``, ``"GPU:1"`` or the like.

        Raises
        ------
        TypeError
            If ``name`` is neither a string nor a device.
        ValueError
            If it is no name of a device.
        """
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
        """This device, if it is there.

        Raises
        ------
        RuntimeError
            If it is not: the text says what is missing.
        """
        if self.kind == "cuda":
            count = gpu_count(f"device {self}")
            if self.index >= count:
                raise RuntimeError(
                    f"device {self} is not there: this process sees {count} GPU{'s' * (count > 1)}, "
                    f"cuda:0{f' to cuda:{count - 1}' * (count > 1)}{_restriction()}; fix: use one of these, or 'cuda', "
                    "which gives each rank its own"
                )
        return self

    def use(self) -> Device:
        """Make it the one on which this thread makes new arrays of CuPy, if it is a GPU."""
        if self.kind == "cuda":
            cupy_for(f"device {self}").cuda.Device(self.index).use()
        return self

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def any_gpu(name: str | Device) -> bool:
    """Whether a name is that of a kind alone, such as ``"cuda"``, so that each rank has a GPU of its own.

    Raises
    ------
    TypeError, ValueError
        As `Device.parse`.

    Examples
    --------
    >>> any_gpu("cuda"), any_gpu("cuda:0"), any_gpu("cpu")
    (True, False, False)
    """
    if Device.parse(name).kind == "cpu" or isinstance(name, Device):
        return False
    return not name.strip()[-1].isdigit()


def seen_gpus(what: str) -> tuple[str, ...]:
    """What tells each GPU, or slice of one, that this process sees from all others of its node.

    Raises
    ------
    RuntimeError
        As `gpu_count`.
    """
    count, runtime = gpu_count(what), cupy_for(what).cuda.runtime
    return tuple(
        f"{bytes(runtime.getDeviceProperties(device).get('uuid', b'')).hex()} {runtime.deviceGetPCIBusId(device)}"
        for device in range(count)
    )


def cupy_for(what: str) -> Any:
    """The module ``cupy``.

    Raises
    ------
    RuntimeError
        If it is not installed, or cannot be imported: the text begins with ``what``.
    """
    try:
        import cupy
    except ImportError as error:
        if error.name not in (None, "cupy"):  # it lacks another one
            raise RuntimeError(f"{what} needs CuPy, which cannot be imported: {error}{_REINSTALL}") from error
        raise RuntimeError(
            f"{what} needs CuPy, which is not installed: pip install 'mpistrat[cuda12]' or 'mpistrat[cuda13]'"
        ) from error
    except Exception as error:  # of a library that is missing or another version
        raise RuntimeError(f"{what} needs CuPy, which cannot be imported: {error}{_REINSTALL}") from error
    return cupy


def gpu_count(what: str) -> int:
    """How many GPUs this process sees, for which CuPy can compile kernels: at least one.

    Raises
    ------
    RuntimeError
        If it can use none: the text begins with ``what`` and says what is missing, and what to do about it.
    """
    runtime = cupy_for(what).cuda.runtime
    try:
        count: int = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(_no_gpu(what, runtime, error)) from error
    if count == 0:
        raise RuntimeError(_none_seen(what))
    _require_compiler(what)
    return count


def _require_compiler(what: str) -> None:
    """CuPy's wheels bring no compiler, and nothing works without: it is asked for before arrays are made."""
    compiler = getattr(cupy_for(what).cuda, "nvrtc", None)  # ROCm has another
    if compiler is None:
        return
    try:
        compiler.getVersion()
    except Exception as error:  # of another class in each version of CuPy
        raise RuntimeError(
            f"{what}: CuPy does not find CUDA's compiler (NVRTC), without which it can do nothing: load the site's "
            f"CUDA module, or pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]' ({str(error).strip()})"
        ) from error


_NO_DRIVER_OR_TOO_OLD, _NO_DEVICE = 35, 100  # cudaErrorInsufficientDriver, cudaErrorNoDevice


def _no_gpu(what: str, runtime: Any, error: Any) -> str:
    status = getattr(error, "status", None)
    if status == _NO_DEVICE:
        return _none_seen(what)
    if status != _NO_DRIVER_OR_TOO_OLD:
        return f"{what}: CUDA does not start: {error}; fix: see whether nvidia-smi works here, or use 'cpu'"
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return (
            f"{what}: CuPy is installed, but this machine has no NVIDIA driver (libcuda.so.1): run where a GPU is, "
            "in a container with --nv or --gpus, or use 'cpu'"
        )
    return (
        f"{what}: the NVIDIA driver is too old: it is for CUDA {_version(driver)}, and CuPy for CUDA "
        f"{_version(needed)}: update the driver, install the CuPy for CUDA {driver // 1000}, or use 'cpu'"
    )


def _none_seen(what: str) -> str:
    text = f"{what}: this process sees no GPU{_restriction()}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return text
    return f"{text}; fix: ask the scheduler for GPUs, in the srun line too (--gpus-per-node), or use 'cpu'"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _restriction() -> str:
    """What hides GPUs from this process, in words."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ""
    if not visible:
        return " (CUDA_VISIBLE_DEVICES is empty, which hides all: unset it, ask the scheduler for GPUs, or use 'cpu')"
    return f" (CUDA_VISIBLE_DEVICES={visible})"
