"""Calls of functions on the host, from code that runs eagerly, is traced, or is compiled.

On PyTorch a function is called directly. In JAX and TensorFlow it becomes an ordered operation of the compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.integrations.keras.hooks import BACKEND


def call_on_host(function: Callable[..., Sequence[Any]], like: Sequence[Any], *arguments: Any) -> list[Any]:
    """Return ``function(*arguments)``, a list of arrays of the dtypes and shapes of ``like``.

    ``function`` gets NumPy arrays on JAX and TensorFlow, and what it is given on PyTorch.
    """
    if BACKEND == "torch":
        return list(function(*arguments))
    if BACKEND == "jax":
        import jax
        from jax.experimental import io_callback

        def on_arrays(*values: Any) -> Any:
            return tuple(function(*map(np.asarray, values)))

        results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in like]
        stopped = [jax.lax.stop_gradient(each) for each in arguments]
        return list(io_callback(on_arrays, tuple(results), *stopped, ordered=True))
    import tensorflow as tf

    out = tf.numpy_function(lambda *values: tuple(function(*values)), list(arguments), [each.dtype for each in like])
    out = [out] if tf.is_tensor(out) else list(out)
    for each, of in zip(out, like, strict=True):
        each.set_shape(of.shape)
    return out


def wait() -> None:
    """Wait for all calls of steps that have been started."""
    if BACKEND == "jax":
        import jax

        jax.effects_barrier()
