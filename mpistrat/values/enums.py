"""The enums of tf.distribute that say how and when values of replicas are combined."""

from __future__ import annotations

import enum

_NAMES = "'SUM', 'MEAN', 'MAX', 'MIN' or 'PROD'"  # the last three are not of ``tf.distribute``, nor of its enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    Attributes
    ----------
    AUTO
        Same as ON_WRITE.
    NONE
        Never. Not allowed for variables of a strategy.
    ON_WRITE
        At every write, which reaches all copies: the copies are always equal.
    ON_READ
        At a read in cross-replica context, which combines the copies. Each replica writes its own copy.

    Examples
    --------
    >>> VariableSynchronization.ON_READ.name
    'ON_READ'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas write to a variable are combined.

    Attributes
    ----------
    NONE
        Not combined: a write in a replica context is an error.
    SUM, MEAN
        Sum or mean of the replicas' values.
    ONLY_FIRST_REPLICA
        Value of replica 0, for all replicas.

    Examples
    --------
    >>> VariableAggregation.SUM.name
    'SUM'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined into one.

    Attributes
    ----------
    SUM, MEAN
        Sum or mean of the replicas' values. The mean of integers is float64.

    Examples
    --------
    >>> ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    __hash__ = object.__hash__  # Enum's is in Python, slow for a key of hot tables

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the reduction of a variable's aggregation.

        Raises
        ------
        ValueError
            For NONE and ONLY_FIRST_REPLICA, which are not reductions.

        Examples
        --------
        >>> ReduceOp.from_variable_aggregation(VariableAggregation.SUM).name
        'SUM'
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"{aggregation} is not a reduction: use SUM or MEAN")

    @staticmethod
    def parse(op: ReduceOp | VariableAggregation | str) -> ReduceOp:
        """Return the reduction of a name, in upper or lower case, or of a variable's aggregation.

        Raises
        ------
        ValueError
            If ``op`` is not the name of a reduction.
        TypeError
            If ``op`` is not a name, a ``ReduceOp`` or a ``VariableAggregation``.

        Examples
        --------
        >>> ReduceOp.parse("sum") is ReduceOp.SUM
        True
        """
        if type(op) is ReduceOp:
            return op
        if isinstance(op, str):
            found = OPS.get(op) or OPS.get(op.upper())
            if found is None:
                raise ValueError(f"{op!r} is not a reduction: use {_NAMES}")
            return found
        if isinstance(op, VariableAggregation):
            return ReduceOp.from_variable_aggregation(op)
        raise TypeError(f"a reduction is a ReduceOp, {_NAMES}, not {op!r}")


# The reductions by themselves and by name, for callers that cannot afford a call of `ReduceOp.parse`.
OPS: dict[object, ReduceOp] = {each: op for op in ReduceOp for each in (op, op.name)}
