"""Names from earlier releases of tf.distribute."""

from mpistrat.compat import v1 as v1
