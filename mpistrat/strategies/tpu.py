"""``TPUStrategy``: replicas of several logical devices, each of which is a rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.arrays import arrays
from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.mesh import Mesh
from mpistrat.process import mpi
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy

_AXES = "replica", "logical_device"


@dataclass(frozen=True)
class DeviceTopology:
    """The devices of a job, as ``tf.tpu.experimental.initialize_tpu_system`` returns them: a device is a rank.

    Attributes
    ----------
    num_tasks : int
        The number of ranks.
    num_tpus_per_task : int
        Always 1.
    mesh_shape : tuple of int

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.tpu.experimental.Topology(8).mesh_shape
    (8, 1, 1, 1)
    """

    num_tasks: int
    num_tpus_per_task: int = 1

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The devices along each axis: a line of ranks."""
        return self.num_tasks, 1, 1, 1


@dataclass(frozen=True)
class DeviceAssignment:
    """The devices of each replica: ``num_cores_per_replica`` consecutive ranks.

    Examples
    --------
    >>> from mpistrat.tpu.experimental import DeviceAssignment, Topology
    >>> assignment = DeviceAssignment.build(Topology(8), computation_shape=[1, 1, 1, 2], num_replicas=4)
    >>> assignment.num_replicas, assignment.num_cores_per_replica
    (4, 2)
    """

    topology: DeviceTopology
    num_replicas: int
    num_cores_per_replica: int

    @staticmethod
    def build(
        topology: DeviceTopology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Return the assignment of ``num_replicas`` replicas, each of the product of ``computation_shape`` devices.

        ``computation_stride`` is ignored: the ranks of a replica follow each other, so that they share a node.

        Raises
        ------
        ValueError
            If a number is below 1, or the topology has fewer devices.
        """
        shape = [1] if computation_shape is None else [*computation_shape]
        if num_replicas < 1 or min(shape) < 1:
            raise ValueError(f"{num_replicas} replicas of {shape} devices: all numbers must be at least 1")
        cores = math.prod(shape)
        need, available = num_replicas * cores, topology.num_tasks
        if need > available:
            raise ValueError(f"{num_replicas} replicas of {cores} devices need {need} ranks, and there are {available}")
        return DeviceAssignment(topology, int(num_replicas), cores)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> DeviceTopology:
    """Return the ranks of the job as devices. There is nothing to initialize: MPI has started them.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.tpu.experimental.initialize_tpu_system().num_tasks
    1
    """
    return DeviceTopology(mpi.start().COMM_WORLD.size)


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Do nothing: MPI ends the ranks.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.tpu.experimental.shutdown_tpu_system()
    """


class LogicalDevices:
    """The checks of the three annotations, for a replica of ``count`` logical devices.

    They say where TensorFlow computes the parts of a tensor. Here each rank of a replica computes what the program
    says, so that they check their arguments and return the value.
    """

    def __init__(self, count: int, is_spmd: bool = False):
        self._logical_devices, self._is_spmd = count, is_spmd

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Return the value. See `LogicalDevices`.

        Raises
        ------
        ValueError
            If the replica does not have this device, or with ``experimental_spmd_xla_partitioning``.
        """
        if self._is_spmd:
            raise ValueError("experimental_assign_to_logical_device does not go with SPMD partitioning")
        if not 0 <= logical_device_id < self._logical_devices:
            raise ValueError(
                f"logical_device_id {logical_device_id} is not one of the {self._logical_devices} logical devices of a "
                f"replica: 0 to {self._logical_devices - 1}"
            )
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Return the value. ``partition_dimensions`` are the parts along each axis.

        Raises
        ------
        ValueError
            If there is not one number for each axis, an axis cannot be divided so, or the product is not the number of
            logical devices.
        """
        _, shape = arrays.dtype_and_shape(tensor)
        counts, count = [*partition_dimensions], self._logical_devices
        if len(counts) != len(shape):
            raise ValueError(f"partition_dimensions {counts} must have a number for each axis of the shape {shape}")
        for size, parts in zip(shape, counts, strict=True):
            if parts < 1 or size % parts:
                raise ValueError(f"partition_dimensions {counts} do not divide the shape {shape}: {size} by {parts}")
        if math.prod(counts) != count:
            raise ValueError(f"partition_dimensions {counts} must make as many parts as a replica has devices: {count}")
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Return the value: each logical device has it."""
        return tensor


class TPUStrategy(MultiWorkerMirroredStrategy, LogicalDevices):
    """``tf.distribute.TPUStrategy`` on ranks: synchronous training of replicas of one or several ranks.

    It is a `MultiWorkerMirroredStrategy` with the mesh ``Mesh(replica=R, logical_device=D)``. All ranks of a replica
    get the rows of the replica. ``strategy.mesh.comm("logical_device")`` speaks inside of it.

    Parameters
    ----------
    tpu_cluster_resolver : ClusterResolver, optional
        Of MPI's or Slurm's ranks, which is compared with MPI.
    experimental_device_assignment : DeviceAssignment, optional
        The number of ranks of a replica; by default 1.
    experimental_spmd_xla_partitioning : bool
        Whether `experimental_assign_to_logical_device` is refused, as TensorFlow does then.

    Raises
    ------
    ValueError
        If the assignment does not make up the ranks. As `mpistrat.MultiWorkerMirroredStrategy`.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.TPUStrategy()
    >>> strategy.num_replicas_in_sync
    1
    >>> strategy.experimental_assign_to_logical_device(7, 0)
    7
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ):
        cores, ranks = 1, mpi.start().COMM_WORLD.size
        if experimental_device_assignment is not None:
            cores = experimental_device_assignment.num_cores_per_replica
            if experimental_device_assignment.num_replicas * cores != ranks:
                raise ValueError(
                    f"the device assignment has {experimental_device_assignment.num_replicas} replicas of {cores} "
                    f"devices, and the job has {ranks} ranks: their product must be the number of ranks"
                )
        mesh = Mesh(**dict(zip(_AXES, (ranks // cores, cores), strict=True)))
        MultiWorkerMirroredStrategy.__init__(self, tpu_cluster_resolver, mesh=mesh)
        LogicalDevices.__init__(self, cores, experimental_spmd_xla_partitioning)


class FormerTPUStrategy(TPUStrategy):
    """`mpistrat.TPUStrategy` under its former name, with its former arguments. Deprecated.

    Examples
    --------
    >>> import warnings, mpistrat
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     strategy = mpistrat.experimental.TPUStrategy()
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: DeviceAssignment | None = None
    ):
        warnings.warn(
            "mpistrat.experimental.TPUStrategy is deprecated: use mpistrat.TPUStrategy",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(tpu_cluster_resolver, device_assignment)


FormerTPUStrategy.__module__ = "mpistrat.experimental"  # which exports it, as errors and `repr` show
FormerTPUStrategy.__name__ = FormerTPUStrategy.__qualname__ = "TPUStrategy"
