"""CUDA kernels that apply one computation to many arrays, in one launch.

A network has hundreds of arrays, most of them small. One launch for each array would cost more than the work.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.device import cupy_for
from mpistrat.process.cache import Cache

_THREADS = 256
_ELEMENTS = 8192  # per block
_SQUARED = 8 * _ELEMENTS  # per block of `squared_norms`: each thread leaves one sum
# Bytes that a thread reads of each array before it writes. The compiler must assume that a store changes what the next
# load reads, so the two are not overlapped. Too few bytes in flight do not fill the memory's bandwidth.
_BYTES_AHEAD = 16
_MOST_TABLES = 256
_tables = Cache[Hashable, Any](_MOST_TABLES)
OPTIONS = ("--fmad=false",)  # no fused multiply-add: products and sums are rounded separately, as in NumPy

# For each dtype: its type in memory, the type of the computation, and the conversions between the two.
FLOATS = {
    "float16": ("unsigned short", "float", "from_half", "to_half"),
    "bfloat16": ("unsigned short", "float", "from_bfloat", "to_bfloat"),
    "float32": ("float", "float", "", ""),
    "float64": ("double", "double", "", ""),
}
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_BYTES = {"float": 4, "double": 8, **{name: nbytes for nbytes, name in _BITS.items()}}

_HALVES = """
union Bits { unsigned int u; float f; };
__device__ __forceinline__ float from_half(unsigned short h) {
  Bits b;
  const unsigned int sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 0u) {
    b.f = mantissa * 5.9604644775390625e-8f;
    b.u |= sign;
  } else {
    b.u = sign | (exponent == 31u ? 0x7f800000u : (exponent + 112u) << 23) | mantissa << 13;
  }
  return b.f;
}
__device__ __forceinline__ unsigned short to_half(float value) {
  Bits b;
  b.f = value;
  const unsigned int sign = b.u >> 16 & 0x8000u;
  b.u &= 0x7fffffffu;
  if (b.u > 0x7f800000u) return sign | 0x7e00u;
  if (b.u >= 0x477ff000u) return sign | 0x7c00u;
  if (b.u < 0x38800000u) return sign | (unsigned int)rintf(b.f * 16777216.0f);
  return sign | (b.u + 0xc8000fffu + (b.u >> 13 & 1u)) >> 13;
}
__device__ __forceinline__ float from_bfloat(unsigned short h) {
  Bits b;
  b.u = (unsigned int)h << 16;
  return b.f;
}
__device__ __forceinline__ unsigned short to_bfloat(float value) {
  Bits b;
  b.f = value;
  if ((b.u & 0x7fffffffu) > 0x7f800000u) return b.u >> 16 | 0x40u;
  return (b.u + 0x7fffu + (b.u >> 16 & 1u)) >> 16;
}
"""

_PLACE = """
  const long long member = layout[members + 2 * (long long)blockIdx.x];
  const long long first = layout[members + 2 * (long long)blockIdx.x + 1];
  const long long rest = layout[member] - first;
  const int count = rest < {elements} ? (int)rest : {elements};"""
_KERNEL = (
    """
extern "C" __global__ void {name}(const long long* pointers, const long long* layout, long long members{scalars}) {{"""
    + _PLACE
    + """
{views}
  for (int start = threadIdx.x; start < count; start += {batch} * {threads}) {{
{batches}
    if (start + ({batch} - 1) * {threads} < count) {{
#pragma unroll
      for (int k = 0; k < {batch}; ++k) {{
        const int i = start + k * {threads};
{loads}
      }}
    }} else {{
#pragma unroll
      for (int k = 0; k < {batch}; ++k) {{
        const int i = start + k * {threads};
        if (i < count) {{
{loads}
        }}
      }}
    }}
#pragma unroll
    for (int k = 0; k < {batch}; ++k) {{
      const int i = start + k * {threads};
      if (i < count) {{
{values}
        {body}
{stores}
      }}
    }}
  }}
}}
"""
)
_SQUARES = (
    """
extern "C" __global__ void mpistrat_squares(const long long* pointers, const long long* layout, long long members,
                                            double* sums) {{"""
    + _PLACE
    + """
  const {memory}* a = (const {memory}*)pointers[member] + first;
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += {threads}) {{
    const double value = {load}(a[i]);
    sum += value * value;
  }}
  sums[(long long)blockIdx.x * {threads} + threadIdx.x] = sum;
}}
"""
)


class EachElement:
    """A kernel over the elements of several lists of arrays.

    In ``body``, statements of C, the names of ``reads`` and ``writes`` stand for the current element, those of
    ``scalars`` for numbers, and ``R`` for the type of the computation: double for float64, else float.
    """

    def __init__(self, name: str, reads: Sequence[str], writes: Sequence[str], scalars: Sequence[str], body: str):
        self._name = name
        self.reads, self._writes, self._scalars, self._body = reads, writes, scalars, body
        self._lists = list(dict.fromkeys([*reads, *writes]))
        self._kernels: dict[np.dtype, Any] = {}

    def extended(
        self, name: str, *, state: Sequence[str] = (), scalars: Sequence[str] = (), before: str = "", after: str = ""
    ) -> EachElement:
        """Return a kernel that does more in the same launch: with further lists, numbers and statements."""
        return EachElement(
            f"{self._name}_{name}",
            [*self.reads, *state],
            [*self._writes, *state],
            [*self._scalars, *scalars],
            f"{before} {self._body} {after}".strip(),
        )

    def __call__(self, lists: Sequence[Sequence[Any]], scalars: Sequence[float] = ()) -> None:
        """Run the kernel on the current stream.

        ``lists`` has the arrays of ``reads``, then of those only written: contiguous, of one dtype, and of one length
        at the same position of each list.
        """
        if lists[0]:
            pointers = tuple([array.data.ptr for arrays in lists for array in arrays])
            first = lists[0][0]
            self.launch(pointers, tuple([array.size for array in lists[0]]), first.dtype, first.device.id, scalars)

    def launch(
        self,
        pointers: tuple[int, ...],
        sizes: tuple[int, ...],
        dtype: np.dtype,
        device: int,
        scalars: Sequence[float] = (),
    ) -> None:
        """Run the kernel as `__call__` does, on the arrays of each list at these addresses of the current GPU."""
        if not any(sizes):
            return
        cupy = cupy_for("a kernel")
        kernel = self._kernels.get(dtype)
        if kernel is None:
            kernel = cupy.RawKernel(_HALVES + self._source(dtype), self._name, options=OPTIONS)
            self._kernels[dtype] = kernel
        blocks, arguments = _tables_of(cupy, device, pointers, sizes, _ELEMENTS)
        real = np.float64 if dtype == np.float64 else np.float32
        kernel((blocks,), (_THREADS,), (*arguments, *map(real, scalars)))

    def _source(self, dtype: np.dtype) -> str:
        memory, real, load, store = _types(dtype)
        views = [
            f"  {'' if name in self._writes else 'const '}{memory}* {name}_ = "
            f"({memory}*)pointers[{i} * members + member] + first;"
            for i, name in enumerate(self._lists)
        ]
        batch = max(2, _BYTES_AHEAD // _BYTES[memory])
        values = [
            f"        R {name} = {load}({name}_read[k]);" if name in self.reads else f"        R {name};"
            for name in self._lists
        ]
        return f"typedef {real} R;\n" + _KERNEL.format(
            name=self._name,
            scalars="".join(f", {real} {name}" for name in self._scalars),
            elements=_ELEMENTS,
            threads=_THREADS,
            batch=batch,
            views="\n".join(views),
            batches="\n".join(f"    {memory} {name}_read[{batch}];" for name in self.reads),
            loads="\n".join(f"        {name}_read[k] = {name}_[i];" for name in self.reads),
            values="\n".join(values),
            body=self._body,
            stores="\n".join(f"        {name}_[i] = {store}({name});" for name in self._writes),
        )


def _types(dtype: np.dtype) -> tuple[str, str, str, str]:
    if dtype.name in FLOATS:
        return FLOATS[dtype.name]
    bits = _BITS[dtype.itemsize]
    return bits, bits, "", ""


def _tables_of(
    cupy: Any, device: int, pointers: tuple[int, ...], sizes: tuple[int, ...], elements: int
) -> tuple[int, list[Any]]:
    """Return the number of blocks and a kernel's first arguments: tables on the GPU, cached, as steps use equal ones.

    Each stream has its own: another one would wait neither for their copy nor for their readers.
    """
    stream = device, cupy.cuda.get_current_stream().ptr
    addresses = _tables.get((stream, pointers))
    if addresses is None:
        addresses = _tables.keep((stream, pointers), cupy.asarray(np.array(pointers, np.int64)))
    table = _tables.get((stream, sizes, elements))
    if table is None:
        layout, blocks = _layout(sizes, elements)
        table = _tables.keep((stream, sizes, elements), (blocks, cupy.asarray(layout)))
    return table[0], [addresses, table[1], np.int64(len(sizes))]


def _layout(sizes: Sequence[int], elements: int) -> tuple[np.ndarray, int]:
    """Return the length of each array, then each block's array and first element; and the number of blocks."""
    blocks = [-(-size // elements) for size in sizes]
    members = np.repeat(np.arange(len(sizes)), blocks)
    before = np.repeat(np.cumsum([0, *blocks[:-1]]), blocks)
    starts = (np.arange(len(members)) - before) * elements
    pairs = np.stack([members, starts], axis=1).reshape(-1)
    return np.concatenate([np.asarray(sizes, np.int64), pairs.astype(np.int64)]), len(members)


_copy = EachElement("mpistrat_copy", ["a"], ["b"], [], "b = a;")


def copy_each(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy contiguous CuPy arrays to others of the same sizes and dtype, in one launch."""
    if sources:
        pointers = [array.data.ptr for arrays in (sources, targets) for array in arrays]
        copy_bytes(pointers, [array.size for array in sources], sources[0].dtype, sources[0].device.id)


def copy_bytes(pointers: Sequence[int], sizes: Sequence[int], dtype: np.dtype, device: int) -> None:
    """Copy arrays of the current GPU in one launch: the addresses of all sources come first, then the targets."""
    width = min(dtype.itemsize, 8)
    words = dtype.itemsize // width
    _copy.launch(tuple(pointers), tuple([words * size for size in sizes]), np.dtype(f"u{width}"), device)


def squared_norms(arrays: Sequence[Any]) -> list[float]:
    """Return the sum of squares of each contiguous CuPy array, of one dtype of `FLOATS`, by one launch and one copy."""
    norms, sizes = np.zeros(len(arrays)), tuple([array.size for array in arrays])
    if any(sizes):
        cupy, dtype, device = cupy_for("a kernel"), arrays[0].dtype, arrays[0].device.id
        kernel = _squares.get(dtype)
        if kernel is None:
            kernel = _squares[dtype] = cupy.RawKernel(squares_source(dtype), "mpistrat_squares", options=OPTIONS)
        pointers = tuple([array.data.ptr for array in arrays])
        blocks, arguments = _tables_of(cupy, device, pointers, sizes, _SQUARED)
        sums = cupy.empty((blocks, _THREADS), np.float64)
        kernel((blocks,), (_THREADS,), (*arguments, sums))
        layout, _ = _layout(sizes, _SQUARED)
        np.add.at(norms, layout[len(sizes) :: 2], cupy.asnumpy(sums.sum(axis=1)))
    return norms.tolist()


def squares_source(dtype: np.dtype) -> str:
    """Return the CUDA source of `squared_norms`."""
    memory, _, load, _ = _types(dtype)
    return _HALVES + _SQUARES.format(memory=memory, load=load, threads=_THREADS, elements=_SQUARED)


_squares: dict[np.dtype, Any] = {}


def as_bits(array: Any) -> Any:
    """Return a contiguous array as flat unsigned integers of up to 8 bytes, on the same memory."""
    return array.reshape(-1).view(f"u{min(array.dtype.itemsize, 8)}")
