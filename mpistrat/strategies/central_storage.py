"""The strategy whose variables live once on a node, in memory that all its ranks share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat import nest
from mpistrat.arrays.device import Device
from mpistrat.cluster_resolver.own_device import own_device
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.strategies.dealing import parsed_devices, require_one_for_each, topology_of
from mpistrat.strategy import Strategy, StrategyExtended, Variable
from mpistrat.strategy.replica_context import components
from mpistrat.values import Mirrored, VariableSynchronization
from mpistrat.variables.shared_copies import CentralVariable

_HOST = Device("cpu")


class CentralStorageStrategy(Strategy):
    """Synchronous data parallelism over the ranks of one node, with each variable in one place.

    A variable takes the memory of one copy, whatever the number of ranks. Replicas read it without communication and
    without a copy. Updates are combined over the replicas and applied once, by rank 0, while the other ranks wait.

    Parameters
    ----------
    compute_devices : sequence of str, optional
        Device of each replica, in the order of ranks. By default ``mpistrat.rc.device`` (MPISTRAT_DEVICE).
    parameter_device : str, optional
        Device of the variables. By default the compute device if there is one replica, else ``"cpu:0"``. With several
        replicas only the host is possible: it is the memory that they share.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks to use; by default all ranks.

    Raises
    ------
    RuntimeError
        If the ranks are on several nodes or cannot share memory, or a device does not exist.
    ValueError
        If the numbers of devices and replicas differ, or several replicas are to share variables on a GPU.
    TypeError
        If ``compute_devices`` is a string, or a device is not one.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.experimental.CentralStorageStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable([1.0, 2.0], aggregation=mpistrat.VariableAggregation.MEAN)
    >>> _ = strategy.run(lambda: v.assign_add([1.0, 1.0]))
    >>> v.read_value()
    array([2., 3.])
    """

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None, *, comm: Any = None
    ):
        compute = parsed_devices("compute_devices", compute_devices)
        parameters = None if parameter_device is None else Device.parse(parameter_device)
        topology = topology_of(comm)
        replicas = ReplicaGroup(topology)
        _check(topology, replicas, compute, parameters)
        name = None if compute is None else compute[replicas.first]
        device = own_device(topology, name, same=len({*(compute or ())}) <= 1)
        if parameters is None:
            # Ranks share memory of the host only.
            parameters = device if replicas.size == 1 else _HOST
        super().__init__(_CentralExtended(self, topology, device, replicas=replicas))
        self.extended.engine.variable_device = parameters.require()


class _CentralExtended(StrategyExtended):
    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return (str(self.engine.variable_device),)

    def variable_class(self, synchronization: VariableSynchronization) -> type[CentralVariable]:
        return CentralVariable

    def _in_update(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, group: bool
    ) -> Any:
        """Call the function on rank 0, and return its result on every rank. Collective."""
        in_update = super()._in_update
        if self.engine.replicas.size == 1:
            return in_update(fn, args, kwargs, group)
        args, kwargs = components(args), components(kwargs)
        arguments, _ = nest.flatten((args, kwargs))
        names = tuple(value.name for value in arguments if isinstance(value, Variable))
        # The function gets a component, and may return the variable that it belongs to.
        arguments += [self.value_container(value) for value in arguments]
        pickled = self.engine.topology.on_first(
            lambda: _packed(in_update(fn, args, kwargs, group=False)[0], arguments, fn), operation("update", names)
        )
        result = _unpacked(pickled, arguments)
        return Mirrored((result,)) if group else (result,)


class _ArgumentIndex(int):
    """The index of an argument of an update function, in place of the argument in a result."""


def _packed(result: Any, arguments: list[Any], fn: Callable[..., Any]) -> bytes:
    """Return a result as bytes. Arguments in it, such as the variable, are sent by index, other variables as arrays."""
    indices = {id(value): _ArgumentIndex(i) for i, value in enumerate(arguments)}
    leaves, rebuild = nest.flatten(result)
    try:
        return pickle.dumps(rebuild([indices[id(leaf)] if id(leaf) in indices else _plain(leaf) for leaf in leaves]))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"the update function {getattr(fn, '__qualname__', fn)} runs on rank 0, and its result cannot be sent to "
            f"the other ranks: {error}. Return None, one of its arguments, or arrays"
        ) from error


def _plain(leaf: Any) -> Any:
    return leaf.read_value() if isinstance(leaf, Variable) else leaf


def _unpacked(pickled: bytes, arguments: list[Any]) -> Any:
    leaves, rebuild = nest.flatten(pickle.loads(pickled))
    return rebuild([arguments[leaf] if isinstance(leaf, _ArgumentIndex) else leaf for leaf in leaves])


def _check(
    topology: Topology, replicas: ReplicaGroup, compute: Sequence[Device] | None, parameters: Device | None
) -> None:
    if len(topology.nodes) > 1:
        raise RuntimeError(
            f"CentralStorageStrategy keeps variables in the memory of one node, but its ranks are on "
            f"{len(topology.nodes)} nodes: use MultiWorkerMirroredStrategy, or give a comm of one node's ranks"
        )
    if replicas.size > 1 and topology.memory is None:
        raise RuntimeError(
            "CentralStorageStrategy keeps variables in memory that the ranks share, but they cannot share memory: "
            "use MirroredStrategy, or make room in /dev/shm"
        )
    if compute is not None:
        require_one_for_each("compute_devices", compute, replicas)
    if replicas.size > 1 and parameters is not None and parameters.kind != "cpu":
        raise ValueError(
            f"parameter_device={str(parameters)!r}: {replicas.size} replicas share variables in the host's memory; use "
            "'cpu:0', or MirroredStrategy for variables on GPUs"
        )
