"""The names of ``tf.tpu`` that a program with `mpistrat.TPUStrategy` uses. A device is a rank."""

from mpistrat.tpu import experimental

__all__ = ["experimental"]
