"""Which rank plays which replica: the one place that knows. Rooms above count replicas, rooms below count ranks."""

from mpistrat.replicas.group import ReplicaGroup, random_stream

__all__ = ["ReplicaGroup", "random_stream"]
