"""Names of axes over the ranks, for replicas of several ranks and for arrays that are cut."""

from mpistrat.mesh.halo import Halo
from mpistrat.mesh.mesh import REPLICA, Mesh, MeshAxis
from mpistrat.mesh.sharded_array import ShardedArray

__all__ = ["REPLICA", "Halo", "Mesh", "MeshAxis", "ShardedArray"]
