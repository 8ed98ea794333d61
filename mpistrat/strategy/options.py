"""Options of `Strategy.run`."""

from __future__ import annotations

from typing import Any, NamedTuple


class RunOptions(NamedTuple):
    """Options of `Strategy.run`, without effect: kept for code written for ``tf.distribute``.

    Examples
    --------
    >>> RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
