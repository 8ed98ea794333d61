"""How values are combined, and when."""

from __future__ import annotations

import enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together.

    Attributes
    ----------
    AUTO
        As ON_WRITE.
    NONE
        Never: not for variables of a strategy.
    ON_WRITE
        Every write reaches all copies: they are equal at all times.
    ON_READ
        Every replica writes its own copy; reading in cross-replica context combines them.

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
    """How what the replicas write to a variable is combined.

    Attributes
    ----------
    NONE
        Not at all: writing in a replica context is an error.
    SUM, MEAN
        Added up, averaged.
    ONLY_FIRST_REPLICA
        Global replica 0's value, on all replicas.

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
    """How values of many replicas become one.

    Attributes
    ----------
    SUM, MEAN
        Added up, averaged (integers to float64).

    Examples
    --------
    >>> ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    __hash__ = object.__hash__  # that of Enum is written in Python, and reductions are keys of hot tables

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that a variable's aggregation asks for.

        Raises
        ------
        ValueError
            For NONE and ONLY_FIRST_REPLICA, which are no reductions.

        Examples
        --------
        >>> ReduceOp.from_variable_aggregation(VariableAggregation.SUM).name
        'SUM'
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"{aggregation} is no reduction: SUM and MEAN are")

    @staticmethod
    def parse(op: ReduceOp | VariableAggregation | str) -> ReduceOp:
        """The reduction called by its name in any case, or by a variable's aggregation.

        Raises
        ------
        ValueError
            If there is none of that name.
        TypeError
            If ``op`` is neither.

        Examples
        --------
        >>> ReduceOp.parse("sum") is ReduceOp.SUM
        True
        """
        if type(op) is ReduceOp:
            return op
        if isinstance(op, str):
            found = _BY_NAME.get(op) or _BY_NAME.get(op.upper())
            if found is None:
                raise ValueError(f"{op!r} is no reduction: use 'SUM' or 'MEAN'")
            return found
        if isinstance(op, VariableAggregation):
            return ReduceOp.from_variable_aggregation(op)
        raise TypeError(f"a reduction is a ReduceOp, 'SUM' or 'MEAN', not {op!r}")


# The attributes of an enum are slow to reach.
_BY_NAME = {op.name: op for op in ReduceOp}
