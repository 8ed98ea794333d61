"""The mapping of replicas to ranks. Packages above this one count replicas, packages below count ranks."""

from mpistrat.replicas.group import ReplicaGroup, random_stream

__all__ = ["ReplicaGroup", "random_stream"]
