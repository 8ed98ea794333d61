"""The mapping of replicas to ranks. Rooms above this one count replicas, rooms below count ranks."""

from mpistrat.replicas.group import ReplicaGroup, random_stream

__all__ = ["ReplicaGroup", "random_stream"]
