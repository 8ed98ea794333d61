"""Strategies, their extended part, the replica context, and the current strategy."""

from mpistrat.strategy.default import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.former import RunOptions
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables import Variable

__all__ = [
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
