"""Names from earlier releases of tf.distribute."""

from mpistrat.compat import v1 as v1

__all__ = ["v1"]
